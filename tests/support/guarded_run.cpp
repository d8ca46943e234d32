#include "support/guarded_run.h"

#include <algorithm>
#include <map>
#include <memory>

#include <fmt/format.h>

#include "random.h"
#include "support/device_run.h"
#include "support/guarded_buffer.h"

namespace kda::test {
namespace {

using cases::HostTensor;
using cases::TensorMap;

/// The layout of a tensor under an arrangement.
TensorLayout arranged(TensorLayout layout, const Conditions& conditions, TensorId id) {
  if (conditions.arrangement == Arrangement::kContiguous) return layout;
  const cases::Random random(conditions.seed, static_cast<uint64_t>(id));
  std::array<std::size_t, 4> order{3, 2, 1, 0};  // fastest first
  const auto rank = static_cast<std::size_t>(layout.rank);
  const auto first = order.begin() + static_cast<std::ptrdiff_t>(4 - rank);
  if (conditions.arrangement == Arrangement::kTransposed) {
    for (std::size_t i = rank; i > 1; --i) {
      std::swap(first[static_cast<std::ptrdiff_t>(i) - 1],
                first[static_cast<std::ptrdiff_t>(random.bits(i) % i)]);
    }
  }
  int64_t step = random.bits(10) % 4 == 0 ? 2 : 1;
  for (auto dim = first; dim != order.end(); ++dim) {
    layout.stride[*dim] = step;
    step = step * std::max<int64_t>(layout.shape[*dim], 1) +
           static_cast<int64_t>(random.bits(20 + *dim) % 6);
  }
  return layout;
}

class Run {
 public:
  Run(const Problem& problem, const TensorMap& inputs, const Conditions& conditions)
      : problem_(problem), inputs_(inputs), conditions_(conditions) {}

  Result<GuardedOutcome> outcome() {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) arrange(spec);
    const Result<Plan> plan = make_plan(problem_, conditions_.device, conditions_.options);
    if (!plan.ok()) return plan.status();
    const bool on_host = conditions_.device.type == DeviceType::kCpu;
    GuardedBuffer workspace(on_host ? plan->workspace_bytes() : 0);
    args_.workspace = plan->workspace_bytes() == 0 ? nullptr : workspace.address();
    args_.workspace_bytes = plan->workspace_bytes();
    GuardedOutcome result{{}, std::string(plan->implementation())};
    const int turns = conditions_.repeat || !on_host ? 2 : 1;
    for (int turn = 0; turn < turns; ++turn) {
      if (Status status = prepare(); !status.ok()) return status;
      workspace.poison();
      Status ran = on_host ? plan->run(args_) : run_mirrored(*plan, turn > 0);
      if (!ran.ok()) return ran;
      if (Status status = inspect(workspace); !status.ok()) return status;
      TensorMap outputs = collect();
      if (turn == 0) {
        result.outputs = std::move(outputs);
      } else if (Status status = same(result.outputs, outputs); !status.ok()) {
        return status;
      }
    }
    return result;
  }

 private:
  Status run_mirrored(const Plan& plan, bool captured) {
    std::vector<std::span<std::byte>> regions;
    for (auto& [_, buffer] : buffers_) regions.push_back(buffer->memory());
    return run_on_device(plan, args_, regions, captured);
  }

  static Status broken(TensorId id, const std::string& text) {
    return {StatusCode::kInternal, fmt::format("{}: {}", name_of(id), text)};
  }

  bool in_place(TensorId id) const {
    return id == TensorId::kFinalState && conditions_.state_in_place;
  }

  /// Gives a present tensor its layout and memory.
  void arrange(const TensorSpec& spec) {
    if (!problem_.has(spec.id)) return;
    const TensorId source = in_place(spec.id) ? TensorId::kInitialState : spec.id;
    TensorLayout layout = arranged(problem_.canonical_layout(spec.id), conditions_, source);
    problem_.set(spec.id, layout);
    if (!in_place(spec.id)) {
      const cases::Random random(conditions_.seed, static_cast<uint64_t>(spec.id) + 1000);
      const bool aligned = conditions_.arrangement == Arrangement::kContiguous;
      const int64_t offset = aligned ? 0 : static_cast<int64_t>(random.bits(0) % 32);
      buffers_[spec.id] = std::make_unique<GuardedBuffer>(layout, offset);
    }
    args_.out(spec.id, buffers_[source]->address());
  }

  Status prepare() {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) {
      if (!problem_.has(spec.id) || in_place(spec.id)) continue;
      GuardedBuffer& buffer = *buffers_[spec.id];
      buffer.poison();
      if (spec.role == Role::kInput) {
        const auto found = inputs_.find(spec.id);
        if (found == inputs_.end()) return broken(spec.id, "no data for this input");
        buffer.load(found->second);
      }
      buffer.snapshot();
    }
    return {};
  }

  Status inspect(const GuardedBuffer& workspace) const {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) {
      if (!problem_.has(spec.id) || in_place(spec.id)) continue;
      const GuardedBuffer& buffer = *buffers_.at(spec.id);
      const bool input = spec.role == Role::kInput;
      const bool shared = spec.id == TensorId::kInitialState && conditions_.state_in_place;
      if (std::string text = buffer.changes(input && !shared); !text.empty()) {
        return broken(spec.id, text);
      }
      if (input) continue;
      if (const int64_t index = buffer.unwritten(); index >= 0) {
        return broken(spec.id, fmt::format("element {} was not written", index));
      }
    }
    if (std::string text = workspace.changes(false); !text.empty()) {
      return {StatusCode::kInternal, "workspace: " + text};
    }
    return {};
  }

  TensorMap collect() const {
    TensorMap outputs;
    for (const TensorSpec& spec : tensors_of(problem_.operation)) {
      if (spec.role == Role::kInput || !problem_.has(spec.id)) continue;
      outputs[spec.id] =
          buffers_.at(in_place(spec.id) ? TensorId::kInitialState : spec.id)->store();
    }
    return outputs;
  }

  static Status same(const TensorMap& first, const TensorMap& second) {
    for (const auto& [id, tensor] : first) {
      if (tensor.bytes != second.at(id).bytes) return broken(id, "a second run gave other bits");
    }
    return {};
  }

  Problem problem_;
  const TensorMap& inputs_;
  const Conditions& conditions_;
  std::map<TensorId, std::unique_ptr<GuardedBuffer>> buffers_;
  Args args_;
};

}  // namespace

Result<GuardedOutcome> run_guarded(const Problem& problem, const TensorMap& inputs,
                                   const Conditions& conditions) {
  return Run(problem, inputs, conditions).outcome();
}

}  // namespace kda::test
