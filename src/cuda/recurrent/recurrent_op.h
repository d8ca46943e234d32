// The recurrent operation as a row of the list of implementations.
#pragma once

#include <memory>

#include "core/executor.h"

namespace kda::cuda {

Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options& options);

}  // namespace kda::cuda
