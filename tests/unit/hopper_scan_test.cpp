// How the blocks of sm90_chunk_fwd's scan are made, on an H200 of 132 SMs.
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

}  // namespace
}  // namespace kda::cuda::sm90
