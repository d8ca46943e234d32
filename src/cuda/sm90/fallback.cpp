#include "cuda/sm90/fallback.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/head_slices.h"
#include "core/log.h"

namespace kda::cuda::sm90 {
namespace {

constexpr std::uintptr_t kUnitBytes = 16;

class AlignmentExecutor final : public Executor {
 public:
  AlignmentExecutor(const HopperRow& row, std::size_t workspace_bytes,
                    std::unique_ptr<Executor> hopper, std::unique_ptr<Executor> generic)
      : Executor(hopper->problem(), hopper->device()),
        row_(row),
        workspace_bytes_(workspace_bytes),
        hopper_(std::move(hopper)),
        generic_(std::move(generic)) {}

  std::size_t workspace_bytes() const override { return workspace_bytes_; }

  Status run(const Args& args, void* stream) const override {
    const std::optional<TensorId> id = first_unaligned(problem(), args, row_.in_units);
    if (!id) return hopper_->run(args, stream);
    if (generic_ != nullptr) {
      if (log::exec_enabled()) {
        log::write(fmt::format("exec {}: generic kernels, for {} is at no multiple of {}",
                               row_.name, name_of(*id), kUnitBytes));
      }
      return generic_->run(args, stream);
    }
    return {
        StatusCode::kInvalidArgument,
        fmt::format("{}: found address {}, expected a multiple of {} for {}; align it or choose "
                    "the implementation \"cuda\"",
                    name_of(*id), args[*id], kUnitBytes, row_.name)};
  }

 private:
  HopperRow row_;
  std::size_t workspace_bytes_;
  std::unique_ptr<Executor> hopper_;
  std::unique_ptr<Executor> generic_;
};

/// Where no tensor has key heads, all value heads can be told apart.
Problem with_heads_apart(Problem problem) {
  const std::span<const TensorSpec> specs = tensors_of(problem.operation);
  if (std::none_of(specs.begin(), specs.end(), [](const TensorSpec& spec) {
        return spec.shape.find(",H,") != std::string_view::npos;
      })) {
    problem.sizes.H = problem.sizes.HV;
  }
  return problem;
}

}  // namespace

std::optional<TensorId> first_unaligned(const Problem& problem, const Args& args,
                                        std::span<const TensorId> in_units) {
  for (const TensorId id : in_units) {
    if (problem.has(id) && reinterpret_cast<std::uintptr_t>(args[id]) % kUnitBytes != 0) return id;
  }
  return std::nullopt;
}

Result<Fallback> plan_fallback(const Problem& problem, PipelineFunction generic,
                               std::size_t hopper_bytes) {
  constexpr std::size_t kAlwaysFine = std::size_t{32} << 20;
  Fallback fallback{with_heads_apart(problem), 1, hopper_bytes};
  const int64_t heads = fallback.problem.sizes.H;
  const std::size_t limit = std::max(hopper_bytes, kAlwaysFine);
  for (;; fallback.slices = std::min(2 * fallback.slices, heads)) {
    const HeadSlice largest = head_slice(fallback.problem, fallback.slices - 1, fallback.slices);
    const Result<std::size_t> bytes = measure_workspace(largest.problem, generic);
    if (!bytes.ok()) return bytes.status();
    std::size_t& workspace = fallback.workspace_bytes;
    // Even where slices need less: a call of fewer tokens must not need more than a long one.
    workspace = std::max(workspace, std::min(*bytes, kAlwaysFine));
    if (*bytes > limit && fallback.slices < heads) continue;
    workspace = std::max(workspace, *bytes);
    return fallback;
  }
}

std::unique_ptr<Executor> by_alignment(const HopperRow& row, std::size_t workspace_bytes,
                                       std::unique_ptr<Executor> hopper,
                                       std::unique_ptr<Executor> generic) {
  return std::make_unique<AlignmentExecutor>(row, workspace_bytes, std::move(hopper),
                                             std::move(generic));
}

Result<std::unique_ptr<Executor>> make_row(const HopperRow& row, const Problem& problem,
                                           const Device& device, const Options& options,
                                           int64_t slices) {
  Result<std::unique_ptr<Executor>> hopper = make_pipeline(problem, device, row.hopper, slices);
  if (!hopper.ok()) return hopper.status();
  const std::size_t hopper_bytes = (*hopper)->workspace_bytes();
  if (!options.implementation.empty()) {
    return by_alignment(row, hopper_bytes, std::move(*hopper), nullptr);
  }
  const Result<Fallback> fallback = plan_fallback(problem, row.generic, hopper_bytes);
  if (!fallback.ok()) return fallback.status();
  Result<std::unique_ptr<Executor>> generic =
      make_pipeline(fallback->problem, device, row.generic, fallback->slices);
  if (!generic.ok()) return generic.status();
  return by_alignment(row, fallback->workspace_bytes, std::move(*hopper), std::move(*generic));
}

}  // namespace kda::cuda::sm90
