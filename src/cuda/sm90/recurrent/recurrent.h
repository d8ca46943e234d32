// sm90_recurrent: decode steps of large batches on Hopper, as a row of the list of implementations.
#pragma once

#include <memory>

#include "core/executor.h"

namespace kda::cuda::sm90 {

/// K = V = 128, states of fp32 or bf16 that are contiguous; where nobody chose it only as many as
/// the GPU has SMs or with four tokens each. The bits of recurrent_step. With a state whose address
/// is not a multiple of 16 the call runs recurrent_any, as cuda_recurrent does: its sums have
/// another order.
Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options& options);

}  // namespace kda::cuda::sm90
