#include "reference_support.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>

#include "core/shape.h"
#include "core/view.h"
#include "cpu/element.h"

namespace kda {
namespace {

constexpr std::size_t kAlignment = 64;

struct AlignedDelete {
  void operator()(std::byte* memory) const {
    ::operator delete[](memory, std::align_val_t{kAlignment});
  }
};
using Memory = std::unique_ptr<std::byte[], AlignedDelete>;

/// 0xff in every byte is a NaN in each float dtype.
Memory nan_memory(std::size_t bytes) {
  auto* memory = static_cast<std::byte*>(::operator new[](bytes + 1, std::align_val_t{kAlignment}));
  std::memset(memory, 0xff, bytes + 1);
  return Memory(memory);
}

bool is_integer(DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }

/// visit(address, index) for every element in canonical order.
template <class Visit>
void for_elements(const Problem& problem, const Args& args, TensorId id, Visit&& visit) {
  const View view = view_of(problem, args, id);
  std::size_t index = 0;
  const auto extent = [&](int32_t dim) {
    return dim < problem[id].rank ? view.shape[static_cast<std::size_t>(dim)] : 1;
  };
  for (int64_t i = 0; i < extent(0); ++i) {
    for (int64_t j = 0; j < extent(1); ++j) {
      for (int64_t k = 0; k < extent(2); ++k) {
        for (int64_t l = 0; l < extent(3); ++l) visit(view.at(i, j, k, l), index++);
      }
    }
  }
}

void store_input(std::byte* address, DType dtype, double value) {
  if (!is_integer(dtype)) return store_element(address, dtype, value);
  const auto wide = static_cast<int64_t>(value);
  const auto narrow = static_cast<int32_t>(value);
  std::memcpy(address, dtype == DType::kI32 ? static_cast<const void*>(&narrow) : &wide,
              size_of(dtype));
}

}  // namespace

int64_t elements(const Problem& problem, TensorId id) {
  return count_elements(problem.canonical_layout(id));
}

Problem with_operation(const Problem& problem, Operation operation) {
  Problem other = problem;
  other.operation = operation;
  const DType io = problem[TensorId::kV].dtype;
  const Problem required = Problem::make(operation, problem.sizes, io);
  other.tensors = required.tensors;
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.role == Role::kInput && problem.has(spec.id)) other.set(spec.id, problem[spec.id]);
  }
  return other;
}

Problem& want_all(Problem& problem) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role != Role::kOutput) continue;
    if (spec.id == TensorId::kDALog && !problem.has(TensorId::kALog)) continue;
    if (spec.id == TensorId::kDdtBias && !problem.has(TensorId::kDtBias)) continue;
    if (spec.id == TensorId::kDqRaw && !problem.has(TensorId::kDo)) continue;
    problem.set(spec.id, DType::kF64);
  }
  return problem;
}

Problem& pack(Problem& problem, const std::vector<int64_t>& lengths) {
  problem.sizes.N = static_cast<int64_t>(lengths.size());
  return problem.set(TensorId::kCuSeqlens, DType::kI64);
}

Values starts_of(const std::vector<int64_t>& lengths) {
  Values starts{0};
  for (const int64_t length : lengths) {
    starts.push_back(starts.back() + static_cast<double>(length));
  }
  return starts;
}

Tensors random_inputs(const Problem& problem, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  const double key_length = 1 / std::sqrt(static_cast<double>(problem.sizes.K));
  Tensors inputs;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role != Role::kInput || !problem.has(spec.id)) continue;
    if (spec.dtypes == DTypeRule::kIndex || spec.dtypes == DTypeRule::kInt32) continue;
    Values& values = inputs[spec.id];
    values.resize(static_cast<std::size_t>(elements(problem, spec.id)));
    for (double& value : values) {
      if (spec.id == TensorId::kQ || spec.id == TensorId::kK) {
        value = normal(random) * key_length;
      } else if (spec.id == TensorId::kG && problem.gate == Gate::kNone) {
        value = -uniform(random);
      } else if (spec.id == TensorId::kBeta && !problem.beta_sigmoid) {
        value = uniform(random);
      } else {
        value = normal(random);
      }
    }
  }
  return inputs;
}

Result<Tensors> try_run(const Problem& problem, const Tensors& inputs, const RunOptions& options) {
  Result<Plan> plan = make_plan(problem, {}, {options.implementation, options.threads});
  if (!plan.ok()) return plan.status();
  const Problem& resolved = plan->problem();
  Args args;
  std::vector<Memory> memories;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!resolved.has(spec.id)) continue;
    memories.push_back(nan_memory(static_cast<std::size_t>(resolved.bytes(spec.id))));
    args.out(spec.id, memories.back().get());
    if (options.in_place && spec.id == TensorId::kFinalState) {
      args.out(spec.id, args[TensorId::kInitialState]);
    }
    if (spec.role != Role::kInput) continue;
    const Values& values = inputs.at(spec.id);
    for_elements(resolved, args, spec.id, [&](std::byte* address, std::size_t index) {
      store_input(address, resolved[spec.id].dtype, values.at(index));
    });
  }
  memories.push_back(nan_memory(plan->workspace_bytes()));
  args.workspace = memories.back().get();
  args.workspace_bytes = plan->workspace_bytes();
  if (Status status = plan->run(args); !status.ok()) return status;
  Tensors outputs;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role != Role::kOutput || !resolved.has(spec.id)) continue;
    Values& values = outputs[spec.id];
    for_elements(resolved, args, spec.id, [&](const std::byte* address, std::size_t) {
      values.push_back(load_element(address, resolved[spec.id].dtype));
    });
  }
  return outputs;
}

Tensors run(const Problem& problem, const Tensors& inputs, const RunOptions& options) {
  return try_run(problem, inputs, options).value();
}

double relative_error(const Values& reference, const Values& x) {
  if (reference.size() != x.size()) return std::numeric_limits<double>::infinity();
  double error = 0;
  double largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = std::abs(reference[i] - x[i]);
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    error = std::max(error, difference);
    largest = std::max(largest, std::abs(reference[i]));
  }
  return largest > 0 ? error / largest : error;
}

}  // namespace kda
