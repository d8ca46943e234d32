// sm90_chunk_bwd as a row of the list of implementations.
#pragma once

#include <memory>

#include "core/executor.h"

namespace kda::cuda::sm90 {

Result<std::unique_ptr<Executor>> make_chunk_bwd(const Problem& problem, const Device& device,
                                                 const Options& options);

}  // namespace kda::cuda::sm90
