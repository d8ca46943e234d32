// What several Hopper leaves ask of the device and of a problem.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kda/problem.h"
#include "kda/status.h"

namespace kda::cuda::sm90 {

/// check_device, and kUnsupported where the compute capability is not 9.0 or the problem has an
/// obstacle ("": none). Where both are in the way the message names both, so that a machine without
/// a GPU tells too whether the problem would fit.
Status check_hopper(const Device& device, const std::string& obstacle);

/// SMs of a device, and of the current one.
int32_t sm_count(const Device& device);
int32_t sm_count();

/// "" or the feature: all of `as_q` have the dtype of q, bf16 or fp16, and `states` that or fp32,
/// and nothing asks for fp64.
std::string dtype_obstacle(const Problem& problem, std::initializer_list<TensorId> as_q,
                           std::initializer_list<TensorId> states);

/// "" or which of these tensors, where it takes part, has rows that are not whole units of 16
/// bytes, one behind the other at multiples of 16 bytes.
std::string uneven_rows(const Problem& problem, std::initializer_list<TensorId> ids);

}  // namespace kda::cuda::sm90
