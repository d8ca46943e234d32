// wgmma: products of a warpgroup, D [64 x N] in registers += A [64 x 16] B [16 x N], 16-bit inputs,
// fp32 sums. A is a register fragment (rs) or a tile in shared memory (ss), B always a tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kda::cuda {

/// Which index of an operand is contiguous in shared memory: the one summed over, or the other.
enum class Major : int { kSummed = 0, kOuter = 1 };

/// Before the first wgmma that touches registers written since.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Ends a group of this warpgroup's products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Until at most N groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/// N registers of a larger array of sums.
template <int N>
__device__ __forceinline__ float (&part_of(float* x))[N] {
  return *reinterpret_cast<float(*)[N]>(x);
}

// The operands of one instruction: the registers of D come first, then A, B, the flag and the
// layout of the operands in shared memory.
#define KDA_WGMMA_D16 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define KDA_WGMMA_OUT16 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define KDA_WGMMA_D32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define KDA_WGMMA_OUT32                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15])
#define KDA_WGMMA_D64                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KDA_WGMMA_OUT64                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define KDA_WGMMA_D128                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "  \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
  "%62, %63}"
#define KDA_WGMMA_OUT128                                                                          \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),  \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define KDA_WGMMA_RS32(type)                                                                   \
  asm volatile(                                                                                \
      "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " KDA_WGMMA_D32            \
      ", {%16, %17, %18, %19}, %20, p, %23, 1, %22;}"                                          \
      : KDA_WGMMA_OUT32                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
        "n"(kMajor), "n"(kSign))
#define KDA_WGMMA_RS64(type)                                                                   \
  asm volatile(                                                                                \
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " KDA_WGMMA_D64            \
      ", {%32, %33, %34, %35}, %36, p, %39, 1, %38;}"                                          \
      : KDA_WGMMA_OUT64                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
        "n"(kMajor), "n"(kSign))
#define KDA_WGMMA_SS16(type)                                                        \
  asm volatile(                                                                     \
      "{.reg .pred p; setp.ne.b32 p, %10, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " " KDA_WGMMA_D16 \
      ", %8, %9, p, 1, 1, %11, %12;}"                                               \
      : KDA_WGMMA_OUT16                                                             \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB))
#define KDA_WGMMA_SS32(type)                                                        \
  asm volatile(                                                                     \
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " KDA_WGMMA_D32 \
      ", %16, %17, p, 1, 1, %19, %20;}"                                             \
      : KDA_WGMMA_OUT32                                                             \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB))
#define KDA_WGMMA_SS64(type)                                                        \
  asm volatile(                                                                     \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " KDA_WGMMA_D64 \
      ", %32, %33, p, 1, 1, %35, %36;}"                                             \
      : KDA_WGMMA_OUT64                                                             \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB))
#define KDA_WGMMA_RS128(type)                                                                  \
  asm volatile(                                                                                \
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " KDA_WGMMA_D128          \
      ", {%64, %65, %66, %67}, %68, p, %71, 1, %70;}"                                          \
      : KDA_WGMMA_OUT128                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
        "n"(kMajor), "n"(kSign))

/// D += kSign A B, or D = kSign A B without `accumulate`. A: 4 registers of packed pairs; B:
/// descriptor; kSign: 1 or -1.
template <class T16, Major kB, int kSign = 1>
__device__ __forceinline__ void wgmma_rs(float (&d)[16], const uint32_t* a, uint64_t b,
                                         bool accumulate) {
  constexpr int kMajor = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_RS32("f16");
  } else {
    KDA_WGMMA_RS32("bf16");
  }
}

/// D += kSign A B, or D = kSign A B without `accumulate`. A: 4 registers of packed pairs; B:
/// descriptor; kSign: 1 or -1.
template <class T16, Major kB, int kSign = 1>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const uint32_t* a, uint64_t b,
                                         bool accumulate) {
  constexpr int kMajor = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_RS64("f16");
  } else {
    KDA_WGMMA_RS64("bf16");
  }
}

/// The same with A in shared memory.
template <class T16, Major kA, Major kB>
__device__ __forceinline__ void wgmma_ss(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kMajorA = static_cast<int>(kA);
  constexpr int kMajorB = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_SS16("f16");
  } else {
    KDA_WGMMA_SS16("bf16");
  }
}

/// The same with A in shared memory.
template <class T16, Major kA, Major kB>
__device__ __forceinline__ void wgmma_ss(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kMajorA = static_cast<int>(kA);
  constexpr int kMajorB = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_SS32("f16");
  } else {
    KDA_WGMMA_SS32("bf16");
  }
}

/// The same with A in shared memory.
template <class T16, Major kA, Major kB>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kMajorA = static_cast<int>(kA);
  constexpr int kMajorB = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_SS64("f16");
  } else {
    KDA_WGMMA_SS64("bf16");
  }
}

/// D += kSign A B, or D = kSign A B without `accumulate`. A: 4 registers of packed pairs; B:
/// descriptor; kSign: 1 or -1.
template <class T16, Major kB, int kSign = 1>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const uint32_t* a, uint64_t b,
                                         bool accumulate) {
  constexpr int kMajor = static_cast<int>(kB);
  if constexpr (__is_same(T16, __half)) {
    KDA_WGMMA_RS128("f16");
  } else {
    KDA_WGMMA_RS128("bf16");
  }
}

#undef KDA_WGMMA_D16
#undef KDA_WGMMA_OUT16
#undef KDA_WGMMA_SS16
#undef KDA_WGMMA_D32
#undef KDA_WGMMA_OUT32
#undef KDA_WGMMA_RS32
#undef KDA_WGMMA_D64
#undef KDA_WGMMA_OUT64
#undef KDA_WGMMA_D128
#undef KDA_WGMMA_OUT128
#undef KDA_WGMMA_RS64
#undef KDA_WGMMA_SS64
#undef KDA_WGMMA_RS128
#undef KDA_WGMMA_SS32

}  // namespace kda::cuda
