// Constants of the Hopper forward that host and device share.
#pragma once

#include <cstdint>

namespace kda::cuda::sm90 {

/// Tokens of a chunk inside the kernels. 32: the state side costs a quarter of what 16 would, the
/// scores a quarter of 64's, and the inverse is one warp's work. Checkpoints and chunk_size are in
/// units of the caller's 64 or 32.
inline constexpr int kChunk = 32;

/// What `prep` leaves for `scan` of one chunk and value head: the image of the scan's shared
/// memory, so that one bulk copy fetches it. All tiles are swizzled as wgmma reads them.
///
///   read    K / 64 panels of 64 rows x 128 bytes: 32 rows k 2^G, then 32 rows q 2^G
///   update  K / 64 panels of 32 rows x 128 bytes: k 2^(G_end - G)
///   solve   32 rows x 64 bytes: (I + L)^-1 - I; its diagonal is not rounded (docs/decisions/0013)
///   scores  32 rows x 64 bytes: tril(q k^T 2^(G_i - G_j)), not scaled
///   decay   K fp32: 2^G_end
///   beta    32 fp32: activated beta
template <int K>
struct Record {
  static constexpr int kRead = 0;
  static constexpr int kUpdate = kRead + K * 2 * kChunk * 2;
  static constexpr int kSolve = kUpdate + K * kChunk * 2;
  static constexpr int kScores = kSolve + kChunk * kChunk * 2;
  static constexpr int kDecay = kScores + kChunk * kChunk * 2;
  static constexpr int kBeta = kDecay + K * 4;
  static constexpr int kBytes = kBeta + kChunk * 4;
};
static_assert(Record<128>::kBytes == 29312 && Record<64>::kBytes == 16768);

inline constexpr int kPrepThreads = 128;
/// bf16: by registers, 80 a thread; by their 43 KB of shared memory five fit. fp16 needs 87 KB.
inline constexpr int kPrepBlocksPerSm = 6;

/// How `prep` makes room for a scan beside it: once its blocks are all there, those of the first
/// SMs leave.
struct PrepRoom {
  int32_t blocks = 0;   ///< of the grid
  int32_t sms = 0;      ///< that blocks leave
  int32_t leaving = 0;  ///< blocks that may
  int32_t at_once = 0;  ///< blocks that begin at once, one an SM; 0: all
};
/// Words behind the flags of the records that blocks of `prep` count in.
inline constexpr int kPrepTickets = 0;  ///< items taken
inline constexpr int kPrepStarted = 1;  ///< blocks
inline constexpr int kPrepLeft = 2;     ///< blocks
inline constexpr int kPrepCounters = 3;
inline constexpr int kClearThreads = 256;

/// A consumer warpgroup of `scan` holds 64 columns of V; one more warp loads.
inline constexpr int kGroupColumns = 64;
inline constexpr int kMostGroups = 2;
inline constexpr int kStages = 4;
inline constexpr int kMostStages = 6;
/// A warp more a group where it stores.
constexpr int scan_threads(int groups, bool has_storing_warps) {
  return groups * (has_storing_warps ? 160 : 128) + 32;
}
/// At most. A quarter of an SM holds 16384 registers: of three warps of a scan with two groups.
inline constexpr int kScanRegisters = 168;

/// Shared memory of a stage: a record, then 32 rows x 128 bytes of v for each warpgroup.
template <int K>
inline constexpr int kStageRecordBytes = (Record<K>::kBytes + 1023) / 1024 * 1024;
inline constexpr int kTokenPanelBytes = kChunk * kGroupColumns * 2;

/// How the blocks of `scan` are made.
struct ScanShape {
  int32_t groups = 1;  ///< consumer warpgroups
  int32_t stages = kStages;
};

template <int K>
constexpr int scan_shared_bytes(ScanShape shape, bool has_h) {
  const int stage = kStageRecordBytes<K> + shape.groups * kTokenPanelBytes;
  const int staging = shape.groups * (2 * kTokenPanelBytes + (has_h ? K * kGroupColumns * 2 : 0));
  return shape.stages * stage + staging;
}
/// heads: those of all sequences.
constexpr int64_t scan_blocks(int64_t heads, int64_t V, int groups) {
  return heads * (V / (groups * kGroupColumns));
}
constexpr ScanShape scan_shape(int64_t heads, int64_t V, int32_t sms) {
  ScanShape shape;
  if (scan_blocks(heads, V, 1) <= sms) {
    shape.stages = kMostStages;  // a block alone on an SM
  } else if (V % (kMostGroups * kGroupColumns) == 0) {
    shape.groups = kMostGroups;
  }
  return shape;
}

/// Tokens of a segment of a sequence, 0 where sequences are not cut. By the sizes of one sequence
/// alone: its bits may not depend on what else is in the batch (docs/decisions/0008).
constexpr int32_t segment_tokens(int64_t HV, int64_t V) {
  constexpr int64_t kMostTiles = 16;
  constexpr int32_t kTokens = 2048;
  return HV * (V / kGroupColumns) <= kMostTiles ? kTokens : 0;
}
/// Rows of starts and transitions: those of a sequence that begins at token t of a packed batch are
/// t / segment + its index and the following, of which it needs no more than it has.
constexpr int64_t segment_rows(bool packed, int64_t sequences, int64_t T, int32_t segment) {
  return packed ? T / segment + sequences : sequences * ((T + segment - 1) / segment);
}
/// The start of the second segment is what an uncut walk leaves there, bit for bit, so that cutting
/// changes and brings nothing up to its end.
constexpr bool segments_help(int64_t T, int32_t segment) { return segment > 0 && T > 2 * segment; }

/// Columns of V of a group of `compose`, and parts of the sum over K; a block has 2 K threads.
inline constexpr int kComposeColumns = 8;
inline constexpr int kComposeParts = 8;
/// Groups of a block: `heads` are those of all sequences. A segment is a transition of 64 KB to
/// read from L2 (K = 128) and 0.6 us of arithmetic a group.
constexpr int32_t compose_groups(int64_t heads, int64_t V) {
  const int64_t blocks = heads * (V / kComposeColumns);
  return blocks <= 64 ? 1 : blocks <= 256 ? 2 : 4;
}

/// Whether a forward runs `prep` and `scan` beside each other: where blocks of the latter, one an
/// SM, leave half of the SMs to the former. Their shape is that of a GPU of half the size.
constexpr bool runs_beside(int64_t heads, int64_t V, int32_t sms) {
  return scan_blocks(heads, V, scan_shape(heads, V, sms / 2).groups) <= sms / 2;
}
constexpr PrepRoom prep_room(int64_t scan_blocks, int32_t sms, int32_t blocks_an_sm) {
  const auto left = static_cast<int32_t>(scan_blocks);
  return {sms * blocks_an_sm, left, left * blocks_an_sm, sms - left};
}
static_assert(scan_shared_bytes<128>({1, kMostStages}, true) <= 226 * 1024);
static_assert(scan_shared_bytes<128>({kMostGroups, kStages}, true) <= 226 * 1024);

}  // namespace kda::cuda::sm90
