// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them.
//
// A tile of R rows and any multiple of 64 columns is a row of panels [R][64]: 128 bytes a row, in
// which the eight 16-byte units are permuted by unit XOR (row mod 8), the 128-byte swizzle of the
// hardware. Panels start at multiples of 1024 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::cuda {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kUnitElements = 8;  ///< of 16 bytes
inline constexpr int kSwizzleRows = 8;

/// Byte of the first element of unit `unit` of row `row` in a panel.
__host__ __device__ constexpr uint32_t unit_offset(int row, int unit) {
  return static_cast<uint32_t>(row * kPanelRowBytes + ((unit ^ (row % kSwizzleRows)) * 16));
}

/// wgmma's description of a matrix with the 128-byte swizzle: start address, the distance between
/// panels (only where the contiguous index is not the one summed over), that between groups of
/// eight rows.
__host__ __device__ constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kGroupBytes = kSwizzleRows * kPanelRowBytes;
  constexpr uint64_t kSwizzle128 = 1;
  return ((address & 0x3ffff) >> 4) | (static_cast<uint64_t>(panel_bytes >> 4) << 16) |
         ((kGroupBytes >> 4) << 32) | (kSwizzle128 << 62);
}

/// A tile of 16-bit elements with 64-byte rows, 32 columns, and the 64-byte swizzle: units of 16
/// bytes are permuted by unit XOR (row / 2 mod 4). Starts at a multiple of 512 bytes.
struct SquareTile {
  uint32_t address;  ///< in the shared window

  /// Operand whose columns are summed over: its columns 16 step .. 16 step + 15.
  __device__ __forceinline__ uint64_t columns(int step) const {
    constexpr uint64_t kGroupBytes = 8 * 64;
    constexpr uint64_t kSwizzle64 = 2;
    return (((address & 0x3ffff) >> 4) | (uint64_t{1} << 16) | ((kGroupBytes >> 4) << 32) |
            (kSwizzle64 << 62)) +
           step * 2;
  }
  /// Operand whose rows are summed over: its rows 16 step .. 16 step + 15, all 32 columns.
  __device__ __forceinline__ uint64_t rows(int step) const {
    return columns(0) + step * (16 * 64 >> 4);
  }
};

/// Byte of an element of a SquareTile.
__host__ __device__ constexpr int square_offset(int row, int column) {
  return row * 64 + ((column / 8 ^ row / 2 % 4) << 4) + column % 8 * 2;
}

template <int Rows>
struct PanelTile {
  static constexpr uint32_t kPanelBytes = Rows * kPanelRowBytes;

  uint32_t address;  ///< in the shared window

  /// Operand whose columns are summed over: its columns 16 step .. 16 step + 15.
  __host__ __device__ constexpr uint64_t columns(int step) const {
    return wgmma_descriptor(address, 16) + (step / 4) * (kPanelBytes >> 4) + (step % 4) * 2;
  }
  /// Operand whose rows are summed over: its rows 16 step .. 16 step + 15, all panels.
  __host__ __device__ constexpr uint64_t rows(int step) const {
    return wgmma_descriptor(address, kPanelBytes) + step * (16 * kPanelRowBytes >> 4);
  }
};

}  // namespace kda::cuda
