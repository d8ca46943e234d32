// stmatrix: fragments to 8 x 8 matrices of 16-bit elements in shared memory (sm_90).
#pragma once

#include <cstdint>

namespace kda::cuda {

/// Four matrices, transposed on the way. `address`: this lane's row of 16 bytes, in the shared
/// window; lanes 8 m .. 8 m + 7 name the rows of matrix m.
__device__ __forceinline__ void stmatrix_transposed(uint32_t address, const uint32_t* fragment) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

}  // namespace kda::cuda
