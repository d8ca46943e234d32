// What `kda bench` times: operations with their inputs and costs.
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "kda/problem.h"

namespace kda::program {

struct Workload {
  Problem problem;
  bool state_in_place = false;  ///< final_state is initial_state, as in decoding
  double active = 1;            ///< share of the sequences that state_indices does not skip
};

/// kHost times the host side of small calls, the others the device.
enum class Suite { kShape, kTrain, kPrefill, kDecode, kStages, kHost };

/// What a training or serving system passes: normalisation, gate and sigmoid inside the operator.
struct BenchOptions {
  DType io = DType::kBF16;
  Gate gate = Gate::kSoftplus;
  bool checkpoints = false;  ///< suite train: the forward writes h and the backward reads it
};

/// Sizes; of packed sequences (whole operations only) also the length of each.
struct BenchShape {
  Sizes sizes;
  std::vector<int64_t> lengths;
};

/// One row of sizes.T = sum of `lengths` packed tokens.
BenchShape packed_shape(Sizes sizes, std::vector<int64_t> lengths);

/// The shapes that stand for a suite on a device.
std::vector<BenchShape> shapes_of(Suite suite, DeviceType device);

/// The operations of a suite at one shape, in an order in which each finds its inputs.
std::vector<Workload> workloads_of(Suite suite, const BenchShape& shape,
                                   const BenchOptions& options);

/// Random inputs for them: what a case holds, tokens repeated beyond the first 1024 of a row. A
/// state that is updated in place is initial_state_of its workload.
cases::TensorMap inputs_of(Suite suite, const BenchShape& shape, const BenchOptions& options);

/// Random, one sequence's state repeated; of a pool, every slot.
cases::HostTensor initial_state_of(const Problem& problem);

/// Slots in an order that jumps through the pool; every eighth sequence is skipped, as padding is.
cases::HostTensor state_indices_of(const Problem& problem);

/// Floating-point operations, a multiply-add as two, of the chunked form.
double flop_of(const Problem& problem);
/// What must move at least: every tensor once, of gamma in the scans a row a chunk.
double bytes_of(const Problem& problem);

}  // namespace kda::program
