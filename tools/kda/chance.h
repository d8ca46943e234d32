// Outputs whose ratio is large where its denominator happens to be small (docs/semantics.md 7.3).
#pragma once

#include <cstdint>

#include "compare.h"

namespace kda::cases {

double rms(const HostTensor& tensor);
inline constexpr double kLeastRms = 1e-8;  ///< of (7.1)

/// Few numbers, or numbers that are sums of many terms of either sign: their size, the denominator
/// of the ratio, is a draw, while the errors are as large as the terms make them.
bool is_a_draw(TensorId id, const HostTensor& expected);

/// Further draws of the inputs over which `usual_rms` below is taken.
inline constexpr uint64_t kFurtherDraws = 8;

/// Takes the larger of the RMS of `expected` and `usual_rms` for denominator, and raises the limit
/// for the spread of few errors.
void allow_for_chance(TensorId id, const HostTensor& expected, double usual_rms, Difference& d,
                      double& limit);

}  // namespace kda::cases
