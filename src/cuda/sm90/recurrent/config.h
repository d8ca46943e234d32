// Geometry of sm90_recurrent.
#pragma once

#include <cstddef>

namespace kda::cuda::sm90 {

/// K and V: a state is one contiguous piece of 64 KiB (fp32) or 32 KiB (bf16).
inline constexpr int kDim = 128;
inline constexpr int kStateElements = kDim * kDim;

/// Eight warps hold a whole state in registers, 64 values a thread.
inline constexpr int kConsumerWarps = 8;
/// Warps that activate tokens ahead of the consumers, one token each. With the producer that makes
/// 16 warps, the most that leave a thread 128 registers.
inline constexpr int kTokenWarps = 7;
inline constexpr int kThreads = 32 * (kConsumerWarps + kTokenWarps + 1);

/// Shared memory for states on their way in, in use, and on their way out.
inline constexpr std::size_t kStageBytes = 3 * kStateElements * sizeof(float);
template <class State>
inline constexpr int kStages = static_cast<int>(kStageBytes / (kStateElements * sizeof(State)));
/// Activated tokens in shared memory.
inline constexpr int kTokenSlots = 8;

}  // namespace kda::cuda::sm90
