// Copies from global to shared memory that fill up with zeros.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// 16 bytes, or 16 zeros where `valid` is false; both addresses aligned to 16.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared, const void* global,
                                                      bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

}  // namespace kda::cuda
