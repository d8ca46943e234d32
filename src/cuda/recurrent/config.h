// Geometry of the recurrent kernel.
#pragma once

namespace kda::cuda {

/// 16 bytes of state a load: the widest there is, and every load of a warp is whole 128-byte lines.
inline constexpr int kStateVectorBytes = 16;
inline constexpr int kRecurrentWarps = 4;
inline constexpr int kRecurrentThreads = 32 * kRecurrentWarps;
/// Lanes along the contiguous dimension of the state; 4 lines of the other one a warp and load.
inline constexpr int kVectorLanes = 8;
inline constexpr int kLinesPerWarp = 32 / kVectorLanes;
/// Tokens whose q, k, decay and v lie in shared memory together: a draft of eight needs one wait
/// for memory.
inline constexpr int kTokenBlock = 8;
/// Tokens of it that a thread asks memory for before it converts the first.
inline constexpr int kTokenBatch = 2;

/// Columns of V a block of `recurrent_step` owns: 32 with an fp32 state, 64 with bf16, so that a
/// block of K = 128 moves 16 KiB of state in, 32 or 64 values a thread.
template <class State>
inline constexpr int kStateVector = kStateVectorBytes / static_cast<int>(sizeof(State));
template <class State>
inline constexpr int kRecurrentColumns = kVectorLanes* kStateVector<State>;

/// Most columns of V a block goes through. Its tokens are activated once for all of them: with one
/// block for 32 columns that work (800 of 1130 instructions a warp) kept a step of one token at 55
/// % of the copy bandwidth (H200, batch 128, 32 heads, K = V = 128).
inline constexpr int kMaxRecurrentColumns = 128;
/// Fewer columns a block where there are fewer blocks than this, to keep a small batch on all SMs.
inline constexpr int kEnoughRecurrentBlocks = 1024;
/// Sets of columns in shared memory: one that is computed on, one that is on its way.
inline constexpr int kStateStages = 2;
/// Blocks that share an SM: bounds the registers, and sets how many bytes are in flight.
template <class State>
inline constexpr int kRecurrentBlocksPerSm = sizeof(State) == 4 ? 4 : 3;

/// The any-shape kernel: a K x columns tile of the state in shared memory.
inline constexpr int kAnyThreads = 256;
template <class Real>
inline constexpr int kAnyColumns = sizeof(Real) == 4 ? 32 : 16;

}  // namespace kda::cuda
