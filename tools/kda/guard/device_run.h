// Runs a plan for a GPU on tensors that lie in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kda/plan.h"
#include "tensor.h"

namespace kda::cases {

/// How a plan runs on a device.
struct DeviceLaunch {
  /// The run is recorded in a graph, which is then launched.
  bool captured = false;
  /// With `captured`: contents of the regions for a launch of the graph before that on the regions'
  /// own, so that a value which the recording had looked at would show. Empty: no such launch.
  std::vector<AlignedBytes> earlier;
  /// Chooses between the default stream (not for a recording), one that waits for it and one that
  /// does not.
  uint64_t stream = 1;
  /// As many runs at once, each with tensors, workspace and stream of its own; all must give the
  /// same bits.
  int copies = 1;
};

/// Copies the regions to the device, runs the plan on `args` (addresses inside the regions) with
/// the same offsets there, and copies the regions back. The workspace is NaN before and has guards
/// of its own: kInternal if one was written, or if copies differ.
Status run_on_device(const Plan& plan, const Args& args,
                     const std::vector<std::span<std::byte>>& regions, const DeviceLaunch& launch);

}  // namespace kda::cases
