#include "guard/run.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "guard/buffer.h"
#include "guard/device_run.h"
#include "random.h"

namespace kda::cases {
namespace {

/// The strides of a tensor whose dimensions follow each other as in `order`, fastest first, after
/// each of which `gap(dimension)` elements are left out.
template <class Gap>
void set_strides(TensorLayout& layout, std::span<const std::size_t> order, int64_t step,
                 const Gap& gap) {
  for (const std::size_t dim : order) {
    layout.stride[dim] = step;
    step = step * std::max<int64_t>(layout.shape[dim], 1) + gap(dim);
  }
}

/// The arrangement of one tensor.
Arrangement arrangement_of(const Conditions& conditions, TensorId id) {
  if (conditions.arrangement != Arrangement::kMixed) return conditions.arrangement;
  constexpr std::array kChoices = {Arrangement::kContiguous, Arrangement::kPadded,
                                   Arrangement::kTransposed, Arrangement::kAligned,
                                   Arrangement::kShifted};
  const Random random(conditions.seed, static_cast<uint64_t>(id));
  return kChoices[random.bits(30) % kChoices.size()];
}

/// The layout of a tensor under an arrangement.
TensorLayout arranged(TensorLayout layout, Arrangement arrangement, uint64_t seed, TensorId id) {
  if (arrangement == Arrangement::kContiguous) return layout;
  const Random random(seed, static_cast<uint64_t>(id));
  std::array<std::size_t, 4> all{3, 2, 1, 0};  // fastest first
  const std::span<std::size_t> order =
      std::span(all).subspan(4 - static_cast<std::size_t>(layout.rank));
  if (arrangement == Arrangement::kAligned || arrangement == Arrangement::kShifted) {
    const auto vector = static_cast<int64_t>(16 / size_of(layout.dtype));
    const auto last = static_cast<std::size_t>(layout.rank) - 1;
    set_strides(layout, order, 1, [&](std::size_t dim) {
      if (dim != last) return int64_t{0};
      const int64_t up = (vector - layout.shape[last] % vector) % vector;
      return up + vector * static_cast<int64_t>(random.bits(20) % 4);
    });
    return layout;
  }
  if (arrangement == Arrangement::kTransposed) {
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random.bits(i) % i]);
    }
  }
  set_strides(layout, order, random.bits(10) % 4 == 0 ? 2 : 1,
              [&](std::size_t dim) { return static_cast<int64_t>(random.bits(20 + dim) % 6); });
  return layout;
}

TensorId memory_of(const Conditions& conditions, TensorId id) {
  const bool in_place = id == TensorId::kFinalState && conditions.state_in_place;
  return in_place ? TensorId::kInitialState : id;
}

class Run {
 public:
  Run(const Problem& problem, const TensorMap& inputs, const Conditions& conditions)
      : problem_(arranged(problem, conditions)), inputs_(inputs), conditions_(conditions) {}

  Result<GuardedOutcome> outcome() {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) place(spec);
    Result<Plan> plan = make_plan(problem_, conditions_.device, conditions_.options);
    if (!plan.ok()) return plan.status();
    GuardedOutcome result{{}, std::string(plan->implementation())};
    const int turns = conditions_.repeat || !on_host() ? 2 : 1;
    for (int turn = 0; turn < turns; ++turn) {
      if (turn > 0) {
        plan = plan_of_repeat(*plan);
        if (!plan.ok()) return plan.status();
      }
      if (Status status = run(*plan, turn > 0); !status.ok()) return status;
      TensorMap outputs = collect();
      if (turn == 0) {
        result.outputs = std::move(outputs);
      } else if (conditions_.watch != Watch::kBounds) {
        if (Status status = same(result.outputs, outputs); !status.ok()) return status;
      }
    }
    return result;
  }

 private:
  bool on_host() const { return conditions_.device.type == DeviceType::kCpu; }

  /// The same row with other threads, and with less workspace if it can do with less.
  Result<Plan> plan_of_repeat(const Plan& first) {
    Options options = conditions_.options;
    if (on_host() && conditions_.repeat_threads > 0) options.threads = conditions_.repeat_threads;
    if (conditions_.repeat_workspace > 0 && !options.implementation.empty()) {
      options.workspace_limit = static_cast<std::size_t>(
          conditions_.repeat_workspace * static_cast<double>(first.workspace_bytes()));
      if (options.workspace_limit > 0) {
        Result<Plan> limited = make_plan(problem_, conditions_.device, options);
        if (limited.status().code() != StatusCode::kUnsupported) return limited;
      }
      options.workspace_limit = conditions_.options.workspace_limit;
    }
    return make_plan(problem_, conditions_.device, options);
  }

  Status run(const Plan& plan, bool again) {
    GuardedBuffer workspace(on_host() ? plan.workspace_bytes() : 0);
    args_.workspace = plan.workspace_bytes() == 0 ? nullptr : workspace.address();
    args_.workspace_bytes = plan.workspace_bytes();
    DeviceLaunch launch;
    if (!on_host()) {
      if (Status status = describe(again, launch); !status.ok()) return status;
    }
    if (Status status = prepare(inputs_); !status.ok()) return status;
    workspace.poison();
    Status ran = on_host() ? plan.run(args_) : run_on_device(plan, args_, regions(), launch);
    if (!ran.ok()) return ran;
    return inspect(workspace);
  }

  /// The first run on a device is a plain one, the second that of a graph.
  Status describe(bool again, DeviceLaunch& launch) {
    launch.captured = again;
    launch.stream = conditions_.seed;
    launch.copies = conditions_.copies;
    if (!again || conditions_.earlier == nullptr) return {};
    if (Status status = prepare(*conditions_.earlier); !status.ok()) return status;
    for (const std::span<std::byte> region : regions()) {
      launch.earlier.emplace_back(region.begin(), region.end());
    }
    return {};
  }

  std::vector<std::span<std::byte>> regions() {
    std::vector<std::span<std::byte>> found;
    for (auto& [_, buffer] : buffers_) found.push_back(buffer->memory());
    return found;
  }

  static Status broken(TensorId id, const std::string& text) {
    return {StatusCode::kInternal, fmt::format("{}: {}", name_of(id), text)};
  }

  bool in_place(TensorId id) const { return memory_of(conditions_, id) != id; }

  /// Gives a present tensor its memory.
  void place(const TensorSpec& spec) {
    if (!problem_.has(spec.id)) return;
    const TensorId source = memory_of(conditions_, spec.id);
    if (source == spec.id) {
      const Arrangement arrangement = arrangement_of(conditions_, source);
      const Random random(conditions_.seed, static_cast<uint64_t>(spec.id) + 1000);
      const bool aligned =
          arrangement == Arrangement::kContiguous || arrangement == Arrangement::kAligned;
      const int64_t offset = aligned ? 0 : static_cast<int64_t>(random.bits(0) % 32);
      buffers_[spec.id] = std::make_unique<GuardedBuffer>(problem_[spec.id], offset);
    }
    args_.out(spec.id, buffers_[source]->address());
  }

  Status prepare(const TensorMap& inputs) {
    for (const TensorSpec& spec : tensors_of(problem_.operation)) {
      if (!problem_.has(spec.id) || in_place(spec.id)) continue;
      GuardedBuffer& buffer = *buffers_[spec.id];
      buffer.poison();
      if (spec.role == Role::kInput) {
        const auto found = inputs.find(spec.id);
        if (found == inputs.end()) return broken(spec.id, "no data for this input");
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
      if (input || conditions_.watch != Watch::kAll) continue;
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
      outputs[spec.id] = buffers_.at(memory_of(conditions_, spec.id))->store();
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

Problem arranged(const Problem& problem, const Conditions& conditions) {
  Problem result = problem;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    const TensorId source = memory_of(conditions, spec.id);
    TensorLayout layout = arranged(problem.canonical_layout(spec.id),
                                   arrangement_of(conditions, source), conditions.seed, source);
    for (const auto& [id, dim] : conditions.repeated) {
      if (id == spec.id) layout.stride[dim] = 0;
    }
    result.set(spec.id, layout);
  }
  return result;
}

Result<GuardedOutcome> run_guarded(const Problem& problem, const TensorMap& inputs,
                                   const Conditions& conditions) {
  return Run(problem, inputs, conditions).outcome();
}

}  // namespace kda::cases
