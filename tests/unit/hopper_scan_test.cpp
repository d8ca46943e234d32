// How the blocks of sm90_chunk_fwd's scan are made, on an H200 of 132 SMs.
#include <algorithm>
#include <cstdint>
#include <random>

#include <gtest/gtest.h>

#include "cuda/sm90/chunk_fwd/config.h"

namespace kda::cuda::sm90 {
namespace {

constexpr int32_t kSms = 132;
constexpr int kMostSharedBytes = 227 * 1024;  ///< of a block
constexpr int kStaticBytes = 1024;            ///< of a block, its barriers
constexpr int kQuarterRegisters = 16384;      ///< of the four parts of an SM
constexpr int kWarp = 32;

TEST(HopperScan, BlocksOfOneGroupWhileEachFindsAnSm) {
  EXPECT_EQ(scan_shape(16, 128, kSms).groups, 1);
  EXPECT_EQ(scan_shape(66, 128, kSms).groups, 1);
  EXPECT_EQ(scan_shape(67, 128, kSms).groups, 2);
  EXPECT_EQ(scan_shape(256, 256, kSms).groups, 2);
  EXPECT_EQ(scan_shape(500, 192, kSms).groups, 1);  // 192 is no multiple of 128
}

TEST(HopperScan, MoreStagesForABlockAloneOnAnSm) {
  EXPECT_EQ(scan_shape(66, 128, kSms).stages, kMostStages);
  EXPECT_EQ(scan_shape(67, 128, kSms).stages, kStages);
  EXPECT_EQ(scan_shape(500, 192, kSms).stages, kStages);
}

TEST(HopperScan, FindsTheRegistersOfAnSm) {
  // Each quarter runs a warp of each group, one of them the loading warp too.
  EXPECT_LE((kMostGroups + 1) * kWarp * kScanRegisters, kQuarterRegisters);
}

TEST(HopperScan, FindsTheSharedMemoryOfAnSm) {
  for (const int64_t heads : {1, 66, 67, 1000}) {
    EXPECT_LE(scan_shared_bytes<128>(scan_shape(heads, 128, kSms), true) + kStaticBytes,
              kMostSharedBytes);
  }
}

TEST(HopperScan, RunsBesidePrepWhereItLeavesHalfOfTheGpu) {
  EXPECT_TRUE(runs_beside(33, 128, kSms));  // blocks of 64 columns
  EXPECT_TRUE(runs_beside(66, 128, kSms));  // of 128
  EXPECT_FALSE(runs_beside(67, 128, kSms));
  EXPECT_TRUE(runs_beside(66, 64, kSms));
  EXPECT_FALSE(runs_beside(67, 64, kSms));
  EXPECT_FALSE(runs_beside(23, 192, kSms));
  EXPECT_FALSE(runs_beside(1, 128, 1));
}

TEST(HopperScan, BlocksOfPrepLeaveAnSmForEachOfScan) {
  const PrepRoom room = prep_room(32, kSms, 5);
  EXPECT_EQ(room.blocks, 5 * kSms);
  EXPECT_EQ(room.sms, 32);
  EXPECT_EQ(room.leaving, 5 * 32);
  EXPECT_EQ(room.at_once, kSms - 32);
}

TEST(HopperScan, CutsSequencesOfFewHeads) {
  EXPECT_EQ(segment_tokens(1, 64), 2048);
  EXPECT_EQ(segment_tokens(8, 128), 2048);
  EXPECT_EQ(segment_tokens(4, 256), 2048);
  EXPECT_EQ(segment_tokens(9, 128), 0);
  EXPECT_EQ(segment_tokens(16, 128), 0);
  EXPECT_FALSE(segments_help(1 << 20, 0));
  EXPECT_FALSE(segments_help(4096, 2048));
  EXPECT_TRUE(segments_help(4097, 2048));
}

// Checkpoints are rows of 64 tokens at most: a segment begins with one.
TEST(HopperScan, SegmentsAreWholeCheckpoints) { EXPECT_EQ(segment_tokens(1, 64) % 64, 0); }

TEST(HopperScan, EverySegmentHasARow) {
  constexpr int32_t kTokens = 64;
  EXPECT_EQ(segment_rows(false, 3, 129, kTokens), 9);
  std::mt19937 random(1);
  for (int round = 0; round < 1000; ++round) {
    const auto N = static_cast<int64_t>(1 + random() % 8);
    int64_t start = 0;
    int64_t next_free = 0;
    for (int64_t i = 0; i < N; ++i) {
      const auto length = static_cast<int64_t>(random() % 4 == 0 ? 0 : random() % 300);
      const int64_t first = start / kTokens + i;
      EXPECT_GE(first, next_free);
      next_free = first + std::max<int64_t>((length + kTokens - 1) / kTokens, 1);
      start += length;
    }
    EXPECT_LE(next_free, segment_rows(true, N, start, kTokens));
  }
}

}  // namespace
}  // namespace kda::cuda::sm90
