// How the blocks of sm90_chunk_fwd's scan are made, on an H200 of 132 SMs.
#include <algorithm>
#include <cstdint>
#include <random>

#include <gtest/gtest.h>

#include "cuda/sm90/chunk_fwd/config.h"

namespace kda::cuda::sm90 {
namespace {

constexpr int32_t kSms = 132;
constexpr int kSharedBytes = 228 * 1024;  ///< of an SM; each block takes 1 KB more than it asks for
constexpr int kQuarterRegisters = 16384;  ///< of the four parts of an SM
constexpr int kWarp = 32;
constexpr int kPrepBytes = 42 * 1024;
constexpr int kPrepRegisters = 80;

ScanShape shape_of(int64_t heads, int64_t V) {
  return scan_shape(heads, V, kSms, scan_fits_beside(heads, V, kSms), false);
}

TEST(HopperScan, BlocksOfOneGroupWhileEachFindsAnSm) {
  EXPECT_EQ(shape_of(16, 128).groups, 1);
  EXPECT_EQ(shape_of(66, 128).groups, 1);
  EXPECT_EQ(shape_of(67, 128).groups, 2);
  EXPECT_EQ(shape_of(256, 256).groups, 2);
  EXPECT_EQ(shape_of(500, 192).groups, 1);  // 192 is no multiple of 128
}

TEST(HopperScan, FindsTheRegistersOfAnSm) {
  // Each quarter runs a warp of each group, one of them the loading warp too.
  EXPECT_LE((kMostGroups + 1) * kWarp * kScanRegisters, kQuarterRegisters);
}

TEST(HopperScan, RunsBesidePrepWhereItsBlocksLeaveSmsIdle) {
  EXPECT_TRUE(scan_fits_beside(32, 128, kSms));
  EXPECT_TRUE(scan_fits_beside(66, 128, kSms));
  EXPECT_FALSE(scan_fits_beside(67, 128, kSms));
  EXPECT_FALSE(scan_fits_beside(96, 128, kSms));
}

// A block that finds no room beside prep would start when prep ends: right, but late.
TEST(HopperScan, FindsRoomBesidePrep) {
  for (const bool has_h : {false, true}) {
    const ScanShape shape = scan_shape(16, 128, kSms, true, has_h);
    // Each quarter runs a consumer warp, one of them the loading warp too.
    EXPECT_LE((shape.groups + 1) * kWarp * kScanRegisters +
                  kPrepBlocksBesideScan * kPrepThreads / 4 * kPrepRegisters,
              kQuarterRegisters);
    EXPECT_LE(
        scan_shared_bytes<128>(shape, has_h) + 2048 + kPrepBlocksBesideScan * (kPrepBytes + 1024),
        kSharedBytes);
  }
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
