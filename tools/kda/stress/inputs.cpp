#include "stress/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "execute.h"
#include "random.h"

namespace kda::stress {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::HostTensor;
using cases::Random;
using cases::TensorMap;
using enum TensorId;

// Beside the streams that TensorId numbers and the two of the generator.
constexpr uint64_t kCutStream = 200;
constexpr uint64_t kPoolStream = 201;
constexpr uint64_t kSlotStream = 202;
constexpr uint64_t kCountStream = 203;

constexpr uint64_t kVariantStep = 0x632BE59BD9B4E019;

/// The same sizes with other values and, if packed, as many other sequences.
CaseSpec other_values(CaseSpec spec, uint64_t variant) {
  if (variant == 0) return spec;
  spec.seed += variant * kVariantStep;
  const Random random(spec.seed, kCutStream);
  for (std::size_t i = 1; i < spec.cu_seqlens.size(); ++i) {
    spec.cu_seqlens[i] =
        static_cast<int64_t>(random.bits(i) % static_cast<uint64_t>(spec.sizes.T + 1));
  }
  std::sort(spec.cu_seqlens.begin(), spec.cu_seqlens.end());
  return spec;
}

/// One operation in float64 on what is there, every output of it.
Status add_outputs(const Case& c, Operation operation, TensorMap& tensors) {
  Problem problem = c.forward;
  problem.operation = operation;
  problem.tensors = {};
  if (operation != Operation::kChunkForward && operation != Operation::kGateCumsum) {
    problem.gate = Gate::kNone;
    problem.lower_bound = 0;
  }
  for (const TensorSpec& spec : tensors_of(operation)) {
    const auto found = tensors.find(spec.id);
    if (spec.role == Role::kOutput) {
      problem.set(spec.id, DType::kF64);
    } else if (found != tensors.end()) {
      problem.set(spec.id, found->second.dtype);
    }
  }
  Options reference;
  reference.implementation = "reference";
  Result<cases::OperationOutcome> outcome =
      cases::execute_operation(problem, tensors, {}, reference);
  if (!outcome.ok()) return outcome.status();
  for (auto& [id, tensor] : outcome->outputs) tensors[id] = std::move(tensor);
  return {};
}

/// What the operation reads beyond the inputs of a case.
Status add_made_inputs(const Case& c, const Problem& problem, TensorMap& tensors) {
  const bool saved = problem.has(kH) || problem.has(kAqk) || problem.has(kA);
  if (problem.operation == Operation::kChunkBackward && saved) {
    return add_outputs(c, Operation::kChunkForward, tensors);
  }
  if (std::find(kStages.begin(), kStages.end(), problem.operation) == kStages.end()) return {};
  for (const Operation stage : kStages) {
    if (stage == problem.operation) break;
    if (Status status = add_outputs(c, stage, tensors); !status.ok()) return status;
  }
  return {};
}

HostTensor pool_of(const Problem& problem, uint64_t seed) {
  const TensorLayout layout = problem.canonical_layout(kInitialState);
  HostTensor pool(layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
  const Random random(seed, kPoolStream);
  for (int64_t i = 0; i < pool.count(); ++i) pool.set(i, random.normal(static_cast<uint64_t>(i)));
  return pool;
}

/// A slot of its own for each sequence, but a fifth of them skipped; any slot where the pool is
/// only read.
HostTensor slots_of(const Problem& problem, uint64_t seed) {
  const Random random(seed, kSlotStream);
  const auto P = static_cast<uint64_t>(problem.sizes.P);
  std::vector<double> slots(P);
  std::iota(slots.begin(), slots.end(), 0.0);
  for (uint64_t i = P; i > 1; --i) std::swap(slots[i - 1], slots[random.bits(i) % i]);
  HostTensor tensor(DType::kI32, {problem.sequences()});
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const auto index = static_cast<uint64_t>(i);
    const bool skipped = random.bits(1000 + index) % 5 == 0;
    const bool read_only = !problem.has(kFinalState);
    const double slot =
        read_only ? static_cast<double>(random.bits(5000 + index) % P) : slots[index % P];
    tensor.set(i, skipped ? -1 : slot);
  }
  return tensor;
}

/// From none to all tokens of the sequence.
HostTensor counts_of(const Case& c, uint64_t seed) {
  const Random random(seed, kCountStream);
  const std::vector<cases::TokenRange> sequences = cases::sequences_of(c);
  HostTensor tensor(DType::kI32, {static_cast<int64_t>(sequences.size())});
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto choices = static_cast<uint64_t>(sequences[i].end - sequences[i].begin + 1);
    tensor.set(static_cast<int64_t>(i), static_cast<double>(random.bits(i) % choices));
  }
  return tensor;
}

/// Every element becomes the first one along the dimension.
void repeat(HostTensor& tensor, const TensorLayout& layout, std::size_t dimension) {
  const int64_t extent = layout.shape[dimension];
  const int64_t step = layout.stride[dimension];
  for (int64_t i = 0; extent > 0 && i < tensor.count(); ++i) {
    tensor.set(i, tensor.get(i - i / step % extent * step));
  }
}

/// Keys of equal channels are no longer than others: with beta |k|^2 above 2 a state may grow
/// without bound.
void shorten(HostTensor& keys) {
  const double most = 1 / std::sqrt(static_cast<double>(keys.shape.back()));
  for (int64_t i = 0; i < keys.count(); ++i) {
    keys.set(i, std::clamp(keys.get(i), -most, most));
  }
}

void repeat_all(const Draw& draw, TensorMap& tensors) {
  constexpr std::size_t kChannels = 3;
  for (const auto& [id, dimension] : draw.repeated) {
    const auto found = tensors.find(id);
    if (found == tensors.end()) continue;
    repeat(found->second, draw.problem.canonical_layout(id), dimension);
    if (id == kK && dimension == kChannels && !draw.problem.qk_l2norm) shorten(found->second);
  }
}

}  // namespace

Result<Case> inputs_of(const Draw& draw, uint64_t variant) {
  const CaseSpec spec = other_values(draw.spec, variant);
  Case c = cases::generate(spec);
  const Problem& problem = draw.problem;
  TensorMap tensors = std::move(c.inputs);
  c.inputs.clear();
  // Saved tensors have to be those of the inputs as rounded and repeated; the inputs of a stage
  // need not.
  if (problem.operation == Operation::kChunkBackward) {
    for (auto& [id, tensor] : tensors) {
      if (problem.has(id)) tensor = cases::converted(tensor, problem[id].dtype);
    }
    repeat_all(draw, tensors);
  }
  if (Status status = add_made_inputs(c, problem, tensors); !status.ok()) return status;
  repeat_all(draw, tensors);
  if (problem.has(kCuSeqlens)) c.inputs[kCuSeqlens] = tensors.at(kCuSeqlens);
  for (const TensorSpec& tensor : tensors_of(problem.operation)) {
    if (tensor.role != Role::kInput || !problem.has(tensor.id)) continue;
    if (tensor.id == kStateIndices) {
      c.inputs[kStateIndices] = slots_of(problem, spec.seed);
    } else if (tensor.id == kNumAccepted) {
      c.inputs[kNumAccepted] = counts_of(c, spec.seed);
    } else if (tensor.id == kInitialState && problem.has(kStateIndices)) {
      c.inputs[kInitialState] = pool_of(problem, spec.seed);
      repeat_all(draw, c.inputs);
    } else if (tensor.id != kCuSeqlens) {
      c.inputs[tensor.id] = cases::converted(tensors.at(tensor.id), problem[tensor.id].dtype);
    }
  }
  return c;
}

}  // namespace kda::stress
