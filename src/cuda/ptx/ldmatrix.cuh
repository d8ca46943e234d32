// ldmatrix: 8 x 8 matrices of 16-bit elements from shared memory to fragments.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// Four matrices. `address`: this lane's row of 16 bytes, in the shared window; lanes 8 m ..
/// 8 m + 7 name the rows of matrix m.
__device__ __forceinline__ void ldmatrix(uint32_t* fragment, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// Four matrices, transposed on the way. `address`: this lane's row of 16 bytes, in the shared
/// window; lanes 8 m .. 8 m + 7 name the rows of matrix m.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t* fragment, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

}  // namespace kda::cuda
