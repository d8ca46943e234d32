// What a row made for Hopper does with addresses that its kernels do not take, which only the run
// knows: by default the generic kernels take them; a row that was chosen by name refuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/executor.h"
#include "cuda/generic/pipeline.h"

namespace kda::cuda::sm90 {

/// A row and the generic one of its operation.
struct HopperRow {
  std::string_view name;
  PipelineFunction hopper;
  PipelineFunction generic;
  /// Reached by TMA, bulk copies or vectors: in units of 16 bytes, from addresses that are
  /// multiples of it.
  std::vector<TensorId> in_units;
};

/// The first of these tensors that takes part and is at another address.
std::optional<TensorId> first_unaligned(const Problem& problem, const Args& args,
                                        std::span<const TensorId> in_units);

/// How the generic kernels stand in: in which slices, and the workspace of the plan.
struct Fallback {
  Cut cut;
  std::size_t workspace_bytes;
};

/// The fewest slices of heads, by doubling, that keep to the workspace of the Hopper kernels or to
/// 32 MiB; if no slice is that small, slices of a key head. Larger sizes never need less workspace.
/// Where that passes a limit of the caller (0: none), what cut_within finds.
Result<Fallback> plan_fallback(const Problem& problem, PipelineFunction generic,
                               std::size_t hopper_bytes, std::size_t workspace_limit = 0);

/// Runs `hopper` on aligned addresses and `generic` on others; without it refuses them.
std::unique_ptr<Executor> by_alignment(const HopperRow& row, std::size_t workspace_bytes,
                                       std::unique_ptr<Executor> hopper,
                                       std::unique_ptr<Executor> generic);

/// The executor of a row for a problem without obstacle, whose own kernels run once for each slice
/// of `cut`, or of a finer one where the options have a limit of workspace.
Result<std::unique_ptr<Executor>> make_row(const HopperRow& row, const Problem& problem,
                                           const Device& device, const Options& options,
                                           const Cut& cut = {});

}  // namespace kda::cuda::sm90
