// Index functions of cuda/tile against models of what the hardware does; no GPU is needed.
#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda {
namespace {

/// The 128-byte swizzle: address bits 4..6 are changed by bits 7..9.
uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

TEST(Tile, UnitsLieWhereTheSwizzlePutsThem) {
  for (int row = 0; row < 128; ++row) {
    for (int unit = 0; unit < 8; ++unit) {
      const auto plain = static_cast<uint32_t>(row * kPanelRowBytes + unit * 16);
      EXPECT_EQ(unit_offset(row, unit), swizzled(plain)) << row << ", " << unit;
    }
  }
}

TEST(Tile, DescriptorsHoldAddressStridesAndSwizzle) {
  const uint64_t d = wgmma_descriptor(0x12400, 8192);
  EXPECT_EQ(d & 0x3fff, 0x12400u >> 4);
  EXPECT_EQ(d >> 16 & 0x3fff, 8192u >> 4);
  EXPECT_EQ(d >> 32 & 0x3fff, 1024u >> 4);
  EXPECT_EQ(d >> 62, 1u);
}

TEST(Tile, StepsMoveAlongTheSummedIndex) {
  const PanelTile<64> tile{0x400};
  // Columns: 32 bytes a step inside a panel of 64 columns, then the next panel.
  for (int step = 0; step < 8; ++step) {
    const auto address = static_cast<uint32_t>(0x400 + step / 4 * 64 * 128 + step % 4 * 32);
    EXPECT_EQ(tile.columns(step) & 0x3fff, address >> 4);
  }
  // Rows: sixteen of 128 bytes a step.
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(tile.rows(step) & 0x3fff, (0x400u + static_cast<uint32_t>(step) * 2048) >> 4);
  }
}

/// stmatrix.x4.trans by one warp: registers[lane][m] hold two elements of matrix m, (lane / 4,
/// 2 (lane % 4)) and the next column; the row that lane 8 m + c names receives column c.
void store_transposed(std::vector<uint16_t>& memory, const std::array<uint32_t, 32>& addresses,
                      const std::array<std::array<uint32_t, 4>, 32>& registers) {
  for (int m = 0; m < 4; ++m) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const int column = 2 * (lane % 4) + i;
        const uint32_t to = addresses[static_cast<std::size_t>(8 * m + column)] / 2;
        memory[to + static_cast<uint32_t>(lane / 4)] = static_cast<uint16_t>(
            registers[static_cast<std::size_t>(lane)][static_cast<std::size_t>(m)] >> 16 * i);
      }
    }
  }
}

// An accumulator [64 rows x 64 columns], packed in pairs, ends in memory as [column][row].
TEST(Tile, PackedAccumulatorsAreStoredTransposed) {
  std::vector<uint16_t> memory(64 * 64);
  for (int warp = 0; warp < 4; ++warp) {
    for (int step = 0; step < 4; ++step) {
      std::array<uint32_t, 32> addresses{};
      std::array<std::array<uint32_t, 4>, 32> registers{};
      for (int lane = 0; lane < 32; ++lane) {
        const FragmentLane at(warp, lane);
        addresses[static_cast<std::size_t>(lane)] = TransposedLane(warp, lane).offset(step);
        for (int m = 0; m < 4; ++m) {
          // Register pair m of the step: eight columns on from m = 2, eight rows on if m is odd.
          const int row = at.row + m % 2 * 8;
          const int column = 16 * step + m / 2 * 8 + at.column;
          registers[static_cast<std::size_t>(lane)][static_cast<std::size_t>(m)] =
              static_cast<uint32_t>(row * 64 + column) |
              static_cast<uint32_t>(row * 64 + column + 1) << 16;
        }
      }
      store_transposed(memory, addresses, registers);
    }
  }
  for (int column = 0; column < 64; ++column) {
    for (int row = 0; row < 64; ++row) {
      const uint32_t at = unit_offset(column, row / 8) / 2 + static_cast<uint32_t>(row % 8);
      EXPECT_EQ(memory[at], row * 64 + column) << "column " << column << ", row " << row;
    }
  }
}

}  // namespace
}  // namespace kda::cuda
