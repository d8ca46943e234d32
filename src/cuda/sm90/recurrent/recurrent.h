// sm90_recurrent: decode steps of large batches on Hopper, as a row of the list of implementations.
#pragma once

#include <memory>

#include "core/executor.h"

namespace kda::cuda::sm90 {

/// K = V = 128, states of fp32 or bf16 that are contiguous. An address of a state that is not a
/// multiple of 16 is left to the kernels of cuda_recurrent, which give the same bits.
Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options& options);

}  // namespace kda::cuda::sm90
