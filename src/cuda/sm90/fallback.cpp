#include "cuda/sm90/fallback.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

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

}  // namespace

std::optional<TensorId> first_unaligned(const Problem& problem, const Args& args,
                                        std::span<const TensorId> in_units) {
  for (const TensorId id : in_units) {
    if (problem.has(id) && reinterpret_cast<std::uintptr_t>(args[id]) % kUnitBytes != 0) return id;
  }
  return std::nullopt;
}

Result<Fallback> plan_fallback(const Problem& problem, PipelineFunction generic,
                               std::size_t hopper_bytes, std::size_t workspace_limit) {
  constexpr std::size_t kAlwaysFine = std::size_t{32} << 20;
  Fallback fallback{{}, hopper_bytes};
  const int64_t heads = finest_cut(problem).heads;
  const std::size_t limit = std::max(hopper_bytes, kAlwaysFine);
  std::size_t& workspace = fallback.workspace_bytes;
  for (int64_t& slices = fallback.cut.heads;; slices = std::min(2 * slices, heads)) {
    const Result<std::size_t> bytes = measure_workspace(problem, generic, fallback.cut);
    if (!bytes.ok()) return bytes.status();
    // Even where slices need less: a call of fewer tokens must not need more than a long one.
    workspace = std::max(workspace, std::min(*bytes, kAlwaysFine));
    if (*bytes > limit && slices < heads) continue;
    workspace = std::max(workspace, *bytes);
    break;
  }
  if (workspace_limit == 0 || workspace <= workspace_limit) return fallback;
  fallback.cut = cut_within(workspace_limit, problem, generic);
  const Result<std::size_t> bytes = measure_workspace(problem, generic, fallback.cut);
  if (!bytes.ok()) return bytes.status();
  workspace = std::max(hopper_bytes, *bytes);
  return fallback;
}

std::unique_ptr<Executor> by_alignment(const HopperRow& row, std::size_t workspace_bytes,
                                       std::unique_ptr<Executor> hopper,
                                       std::unique_ptr<Executor> generic) {
  return std::make_unique<AlignmentExecutor>(row, workspace_bytes, std::move(hopper),
                                             std::move(generic));
}

Result<std::unique_ptr<Executor>> make_row(const HopperRow& row, const Problem& problem,
                                           const Device& device, const Options& options,
                                           const Cut& cut) {
  const std::size_t limit = options.workspace_limit;
  Result<std::unique_ptr<Executor>> hopper =
      make_pipeline(problem, device, row.hopper, cut_within(limit, problem, row.hopper, cut));
  if (!hopper.ok()) return hopper.status();
  const std::size_t hopper_bytes = (*hopper)->workspace_bytes();
  if (!options.implementation.empty()) {
    return by_alignment(row, hopper_bytes, std::move(*hopper), nullptr);
  }
  const Result<Fallback> fallback = plan_fallback(problem, row.generic, hopper_bytes, limit);
  if (!fallback.ok()) return fallback.status();
  Result<std::unique_ptr<Executor>> generic =
      make_pipeline(problem, device, row.generic, fallback->cut);
  if (!generic.ok()) return generic.status();
  return by_alignment(row, fallback->workspace_bytes, std::move(*hopper), std::move(*generic));
}

}  // namespace kda::cuda::sm90
