// The latencies that the Hopper kernels are designed by.
#pragma once

namespace kda::bench {

/// One JSON line each: loads and TMA copies from L2 and memory, loads and copies between the blocks
/// of a cluster.
void print_latencies();

}  // namespace kda::bench
