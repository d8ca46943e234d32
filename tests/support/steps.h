// Calls as a training run makes them, each of another shape, on memory that exists once: what grows
// while they run is not the test's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kda/plan.h"

namespace kda::test {

enum class StepSizes {
  kSmall,
  kModels,  ///< mostly those, and dtypes, that Hopper rows take too
};

/// Forward, backward or decode number `step`: sizes, options and packing change with every number
/// and come back after some hundreds.
Problem problem_of_step(int64_t step, StepSizes sizes = StepSizes::kSmall);

/// Bytes that hold any tensor of any step.
inline constexpr std::size_t kStepBytes = std::size_t{2} << 20;

/// Fill bytes of inputs: 0.046 in fp32 and bf16, and -0.046 for decays.
inline constexpr int kPositiveFill = 0x3D;
inline constexpr int kNegativeFill = 0xBD;
int fill_of(TensorId id);

/// Starts of the sequences of packed steps: at most so many, as int64.
inline constexpr std::size_t kMostStarts = 8;
std::array<int64_t, kMostStarts> starts_of_step(int64_t step);

/// Resident memory of this process.
int64_t resident_bytes();

}  // namespace kda::test
