// CUDA devices and the CUDA rows of the list of implementations.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/executor.h"
#include "kda/backend.h"

namespace kda {

/// Why no CUDA device can be used, with what to do; empty if one can.
std::string cuda_device_problem();

/// The usable devices, in CUDA's order; empty if there is none.
std::vector<DeviceInfo> cuda_device_infos();

/// Rows of the CUDA backend, fastest first.
std::span<const Implementation> cuda_implementations();

}  // namespace kda
