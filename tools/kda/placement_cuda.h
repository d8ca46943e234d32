// Placement on a CUDA device.
#pragma once

#include <memory>

#include "execute.h"

namespace kda::cases {

Result<std::unique_ptr<Placement>> make_cuda_placement(int index);

}  // namespace kda::cases
