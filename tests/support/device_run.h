// Runs a plan for a GPU on tensors that lie in host memory.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kda/plan.h"

namespace kda::test {

/// Copies the regions to the device, runs the plan on `args` (addresses inside the regions) with
/// the same offsets there, and copies the regions back. The workspace is NaN before and has guards
/// of its own: kInternal if one was written. `captured`: the run is recorded in a graph, which is
/// then launched.
Status run_on_device(const Plan& plan, const Args& args,
                     const std::vector<std::span<std::byte>>& regions, bool captured);

}  // namespace kda::test
