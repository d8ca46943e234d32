// Tiles of 64 rows by a panel's depth: from memory through registers into shared memory, and
// products of two panels in registers. 256 threads.
#pragma once

#include "cuda/tile/convert.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kTileRows = 64;
/// What the register allocation aims at: two blocks share an SM, so that one computes while the
/// other waits for memory; fp64 takes all registers.
template <class Real>
inline constexpr int kBlocksPerSm = sizeof(Real) == 4 ? 2 : 1;
/// Elements between two depths of a panel with 64 rows: rows stay 16-byte aligned, and the stores
/// of DepthFast panels (8 depths x 4 rows a warp) touch all 32 banks.
inline constexpr int kPanelStride = 68;

/// Elements (row, depth) of a block of ROWS x DEPTH, spread over the threads. DepthFast: depth is
/// the contiguous index in memory; a warp covers 8 depths (one 32-byte sector of fp32) x 4 rows, a
/// thread rows at equal distances. Otherwise rows are contiguous, and a thread has depths at equal
/// distances.
template <class Real, int ROWS, int DEPTH, bool DepthFast>
struct Panel {
  static_assert(DepthFast ? 64 % DEPTH == 0 && ROWS % (kThreads / DEPTH) == 0
                          : kThreads % ROWS == 0 && DEPTH % (kThreads / ROWS) == 0);
  static constexpr int kSteps = ROWS * DEPTH / kThreads;
  static constexpr int kRowStep = DepthFast ? kThreads / DEPTH : 0;
  static constexpr int kDepthStep = DepthFast ? 0 : kThreads / ROWS;
  Real x[kSteps];

  static __device__ __forceinline__ int row(int step) {
    const int tid = static_cast<int>(threadIdx.x);
    return (DepthFast ? tid / 32 / (DEPTH / 8) * 4 + tid % 32 / 8 : tid % ROWS) + step * kRowStep;
  }
  static __device__ __forceinline__ int depth(int step) {
    const int tid = static_cast<int>(threadIdx.x);
    return (DepthFast ? tid / 32 % (DEPTH / 8) * 8 + tid % 8 : tid / ROWS) + step * kDepthStep;
  }
  /// Elements of memory between two of a thread's.
  static __device__ __forceinline__ int64_t distance(int64_t row_stride, int64_t depth_stride) {
    return DepthFast ? kRowStep * row_stride : kDepthStep * depth_stride;
  }

  /// Elements at base + row * row_stride + depth * depth_stride; 0 outside rows x depths.
  __device__ __forceinline__ void load(const Tensor& t, int64_t base, int64_t row_stride,
                                       int64_t depth_stride, int rows, int depths) {
    with_element(t.dtype, [&]<class T>(Element<T>) {
      const T* p =
          static_cast<const T*>(t.data) + base + row(0) * row_stride + depth(0) * depth_stride;
      const int64_t step = distance(row_stride, depth_stride);
#pragma unroll
      for (int s = 0; s < kSteps; ++s, p += step) {
        x[s] = row(s) < rows && depth(s) < depths ? to_real<Real>(*p) : Real(0);
      }
    });
  }

  /// x = f(row, depth, x).
  template <class F>
  __device__ __forceinline__ void map(F f) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) x[s] = f(row(s), depth(s), x[s]);
  }

  /// x = f(row, depth, x, other.x).
  template <class F>
  __device__ __forceinline__ void combine(const Panel& other, F f) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) x[s] = f(row(s), depth(s), x[s], other.x[s]);
  }

  /// Into memory, with load's addresses.
  __device__ __forceinline__ void save(const Tensor& t, int64_t base, int64_t row_stride,
                                       int64_t depth_stride, int rows, int depths) const {
    with_element(t.dtype, [&]<class T>(Element<T>) {
      T* p = static_cast<T*>(t.data) + base + row(0) * row_stride + depth(0) * depth_stride;
      const int64_t step = distance(row_stride, depth_stride);
#pragma unroll
      for (int s = 0; s < kSteps; ++s, p += step) {
        if (row(s) < rows && depth(s) < depths) *p = from_real<T>(x[s]);
      }
    });
  }

  /// Into shared memory, [DEPTH][stride].
  __device__ __forceinline__ void put(Real* shared, int stride = kPanelStride) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) shared[depth(s) * stride + row(s)] = x[s];
  }
};

/// The N consecutive elements at p, aligned to N elements or 16 bytes, whichever is less.
template <int N>
__device__ __forceinline__ void read(float (&out)[N], const float* p) {
  if constexpr (N == 4) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else if constexpr (N == 2) {
    const float2 v = *reinterpret_cast<const float2*>(p);
    out[0] = v.x, out[1] = v.y;
  } else {
    out[0] = *p;
  }
}
template <int N>
__device__ __forceinline__ void read(double (&out)[N], const double* p) {
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) {
    const double2 v = *reinterpret_cast<const double2*>(p + i);
    out[i] = v.x, out[i + 1] = v.y;
  }
  if constexpr (N % 2 == 1) out[N - 1] = p[N - 1];
}

/// A thread's part of a tile of 16 TM rows x 16 TN columns: rows TM row(0).., columns TN col(0)...
template <class Real, int TM, int TN>
struct Accumulator {
  Real x[TM][TN] = {};

  static __device__ __forceinline__ int row(int m) {
    return static_cast<int>(threadIdx.x) / 16 * TM + m;
  }
  static __device__ __forceinline__ int col(int n) {
    return static_cast<int>(threadIdx.x) % 16 * TN + n;
  }

  /// x += a^T b over `depth`, a [depth][a_stride] holding rows, b [depth][b_stride] columns.
  __device__ __forceinline__ void add_product(const Real* a, int a_stride, const Real* b,
                                              int b_stride, int depth) {
    a += row(0);
    b += col(0);
#pragma unroll 8
    for (int d = 0; d < depth; ++d) {
      Real ra[TM];
      Real rb[TN];
      read<TM>(ra, a + d * a_stride);
      read<TN>(rb, b + d * b_stride);
#pragma unroll
      for (int m = 0; m < TM; ++m) {
#pragma unroll
        for (int n = 0; n < TN; ++n) x[m][n] += ra[m] * rb[n];
      }
    }
  }

  /// Elements at base + row * row_stride + col * col_stride; 0 outside rows x cols.
  __device__ __forceinline__ void fetch(const Tensor& t, int64_t base, int64_t row_stride,
                                        int64_t col_stride, int rows, int cols) {
    with_element(t.dtype, [&]<class T>(Element<T>) {
      const T* p = static_cast<const T*>(t.data) + base + row(0) * row_stride + col(0) * col_stride;
#pragma unroll
      for (int m = 0; m < TM; ++m, p += row_stride) {
#pragma unroll
        for (int n = 0; n < TN; ++n) {
          x[m][n] = row(m) < rows && col(n) < cols ? to_real<Real>(p[n * col_stride]) : Real(0);
        }
      }
    });
  }

  /// As add_product, over the pairs (row, d) that `keep` selects. What it leaves out may be NaN.
  template <class Keep>
  __device__ __forceinline__ void add_product_if(const Real* a, int a_stride, const Real* b,
                                                 int b_stride, int depth, Keep keep) {
    a += row(0);
    b += col(0);
#pragma unroll 4
    for (int d = 0; d < depth; ++d) {
      Real ra[TM];
      Real rb[TN];
      read<TM>(ra, a + d * a_stride);
      read<TN>(rb, b + d * b_stride);
#pragma unroll
      for (int m = 0; m < TM; ++m) {
        const bool kept = keep(row(m), d);
#pragma unroll
        for (int n = 0; n < TN; ++n) {
          if (kept) x[m][n] += ra[m] * rb[n];
        }
      }
    }
  }

  /// x = f(row, col, x).
  template <class F>
  __device__ __forceinline__ void map(F f) {
#pragma unroll
    for (int m = 0; m < TM; ++m) {
#pragma unroll
      for (int n = 0; n < TN; ++n) x[m][n] = f(row(m), col(n), x[m][n]);
    }
  }

  /// The element at the rows and columns of this thread: (row, col) as map passes them.
  __device__ __forceinline__ Real at(int r, int c) const { return x[r - row(0)][c - col(0)]; }

  /// Into memory at base + row * row_stride + col * col_stride, inside rows x cols only.
  __device__ __forceinline__ void save(const Tensor& t, int64_t base, int64_t row_stride,
                                       int64_t col_stride, int rows, int cols) const {
    with_element(t.dtype, [&]<class T>(Element<T>) {
      T* p = static_cast<T*>(t.data) + base + row(0) * row_stride + col(0) * col_stride;
#pragma unroll
      for (int m = 0; m < TM; ++m, p += row_stride) {
        if (row(m) >= rows) break;
        if constexpr (sizeof(T) == 4 && sizeof(Real) == 4 && TN == 4) {
          // One 16-byte store a row: four scalar ones would write a quarter of each sector.
          if (col_stride == 1 && col(3) < cols && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
            *reinterpret_cast<float4*>(p) = make_float4(x[m][0], x[m][1], x[m][2], x[m][3]);
            continue;
          }
        }
#pragma unroll
        for (int n = 0; n < TN; ++n) {
          if (col(n) < cols) p[n * col_stride] = from_real<T>(x[m][n]);
        }
      }
    });
  }

  /// Into shared memory as [row][stride].
  __device__ __forceinline__ void put_rows(Real* shared, int stride) const {
#pragma unroll
    for (int m = 0; m < TM; ++m) {
#pragma unroll
      for (int n = 0; n < TN; ++n) shared[row(m) * stride + col(n)] = x[m][n];
    }
  }

  /// Into shared memory as [col][stride].
  __device__ __forceinline__ void put_cols(Real* shared, int stride) const {
#pragma unroll
    for (int m = 0; m < TM; ++m) {
#pragma unroll
      for (int n = 0; n < TN; ++n) shared[col(n) * stride + row(m)] = x[m][n];
    }
  }
};

}  // namespace kda::cuda
