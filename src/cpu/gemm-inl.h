// Matrix products of tiles: C = alpha op(A) B [+ (row_scale + row_rest) . C].
//
// op(A) is read one element at a time, so that its strides are free (a transposed A costs nothing);
// rows of B and C are contiguous and padded to kPad. A register block of C is 4 rows x 4 vectors
// (2 vectors where there are 16 registers): 16 sums in flight hide the latency of a
// multiply-add, and each block of 8 loads feeds 16 of them.
//
// Each element of C is summed over depth in a fixed order that depends on depth alone, never on the
// number of rows or columns: results of a prefix do not depend on what follows it.
#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/cpu_run.h"

#if defined(KDA_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_GEMM_INL_H_
#undef KDA_CPU_GEMM_INL_H_
#else
#define KDA_CPU_GEMM_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kPad>;
using Vec = hn::Vec<Floats>;

#if HWY_ARCH_X86 && HWY_TARGET != HWY_AVX3
constexpr int kPanel = 2;
#else
constexpr int kPanel = 4;
#endif
// Rows of B that stay in the first-level cache while all rows of A pass: 64 x 64 floats.
constexpr int64_t kDepthBlock = 64;

/// op(A): element (i, p) lies i * row + p * col after data.
struct Left {
  const float* data;
  int64_t row;
  int64_t col;
};

/// What happens to the sums.
struct Sink {
  float alpha = 1;
  bool accumulate = false;
  const float* row_scale = nullptr;  ///< with accumulate: factor of each row of the old C
  const float* row_rest = nullptr;   ///< with row_scale: what that lacks of the factor
};

/// A vector of row i.
HWY_INLINE void sink_vector(Floats d, Vec sum, int64_t i, float* c, const Sink& sink) {
  Vec value = hn::Mul(hn::Set(d, sink.alpha), sum);
  if (sink.accumulate) {
    const Vec old = hn::Load(d, c);
    if (sink.row_scale == nullptr) {
      value = hn::Add(old, value);
    } else {
      value = hn::MulAdd(hn::Set(d, sink.row_rest[i]), old, value);
      value = hn::MulAdd(hn::Set(d, sink.row_scale[i]), old, value);
    }
  }
  hn::Store(value, d, c);
}

template <int kVectors>
HWY_INLINE void sink_row(Floats d, Vec s0, Vec s1, Vec s2, Vec s3, int64_t i, float* c,
                         const Sink& sink) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  sink_vector(d, s0, i, c, sink);
  if constexpr (kVectors > 1) sink_vector(d, s1, i, c + lanes, sink);
  if constexpr (kVectors > 2) sink_vector(d, s2, i, c + 2 * lanes, sink);
  if constexpr (kVectors > 3) sink_vector(d, s3, i, c + 3 * lanes, sink);
}

/// Rows i..i+3 of one column panel.
template <int kVectors>
HWY_INLINE void gemm_block(int64_t i, int64_t depth, const Left& a, const float* HWY_RESTRICT b,
                           int64_t ldb, float* HWY_RESTRICT c, int64_t ldc, const Sink& sink) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec c00 = hn::Zero(d), c01 = c00, c02 = c00, c03 = c00;
  Vec c10 = c00, c11 = c00, c12 = c00, c13 = c00;
  Vec c20 = c00, c21 = c00, c22 = c00, c23 = c00;
  Vec c30 = c00, c31 = c00, c32 = c00, c33 = c00;
  const float* a0 = a.data + i * a.row;
  const float* a1 = a0 + a.row;
  const float* a2 = a1 + a.row;
  const float* a3 = a2 + a.row;
  for (int64_t p = 0; p < depth; ++p, b += ldb) {
    const Vec b0 = hn::Load(d, b);
    const Vec b1 = kVectors > 1 ? hn::Load(d, b + lanes) : b0;
    const Vec b2 = kVectors > 2 ? hn::Load(d, b + 2 * lanes) : b0;
    const Vec b3 = kVectors > 3 ? hn::Load(d, b + 3 * lanes) : b0;
    const int64_t at = p * a.col;
    const Vec x0 = hn::Set(d, a0[at]);
    c00 = hn::MulAdd(x0, b0, c00);
    if constexpr (kVectors > 1) c01 = hn::MulAdd(x0, b1, c01);
    if constexpr (kVectors > 2) c02 = hn::MulAdd(x0, b2, c02);
    if constexpr (kVectors > 3) c03 = hn::MulAdd(x0, b3, c03);
    const Vec x1 = hn::Set(d, a1[at]);
    c10 = hn::MulAdd(x1, b0, c10);
    if constexpr (kVectors > 1) c11 = hn::MulAdd(x1, b1, c11);
    if constexpr (kVectors > 2) c12 = hn::MulAdd(x1, b2, c12);
    if constexpr (kVectors > 3) c13 = hn::MulAdd(x1, b3, c13);
    const Vec x2 = hn::Set(d, a2[at]);
    c20 = hn::MulAdd(x2, b0, c20);
    if constexpr (kVectors > 1) c21 = hn::MulAdd(x2, b1, c21);
    if constexpr (kVectors > 2) c22 = hn::MulAdd(x2, b2, c22);
    if constexpr (kVectors > 3) c23 = hn::MulAdd(x2, b3, c23);
    const Vec x3 = hn::Set(d, a3[at]);
    c30 = hn::MulAdd(x3, b0, c30);
    if constexpr (kVectors > 1) c31 = hn::MulAdd(x3, b1, c31);
    if constexpr (kVectors > 2) c32 = hn::MulAdd(x3, b2, c32);
    if constexpr (kVectors > 3) c33 = hn::MulAdd(x3, b3, c33);
  }
  c += i * ldc;
  sink_row<kVectors>(d, c00, c01, c02, c03, i, c, sink);
  sink_row<kVectors>(d, c10, c11, c12, c13, i + 1, c + ldc, sink);
  sink_row<kVectors>(d, c20, c21, c22, c23, i + 2, c + 2 * ldc, sink);
  sink_row<kVectors>(d, c30, c31, c32, c33, i + 3, c + 3 * ldc, sink);
}

template <int kVectors>
HWY_NOINLINE void gemm_panel(int64_t M, int64_t depth, Left a, const float* b, int64_t ldb,
                             float* c, int64_t ldc, Sink sink) {
  for (int64_t first = 0; first == 0 || first < depth; first += kDepthBlock) {
    const int64_t count = std::min(kDepthBlock, depth - first);
    for (int64_t i = 0; i < M; i += 4) {
      gemm_block<kVectors>(i, count, a, b, ldb, c, ldc, sink);
    }
    a.data += kDepthBlock * a.col;
    b += kDepthBlock * ldb;
    sink.accumulate = true;
    sink.row_scale = nullptr;
  }
}

/// C [M, N] = alpha op(A) [M, depth] B [depth, N] (+ C). M a multiple of 4, N of kPad.
inline void gemm(int64_t M, int64_t N, int64_t depth, const Left& a, const float* b, int64_t ldb,
                 float* c, int64_t ldc, const Sink& sink = {}) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Floats()));
  int64_t j = 0;
  for (; j + kPanel * lanes <= N; j += kPanel * lanes) {
    gemm_panel<kPanel>(M, depth, a, b + j, ldb, c + j, ldc, sink);
  }
  switch ((N - j) / lanes) {
    case 1:
      return gemm_panel<1>(M, depth, a, b + j, ldb, c + j, ldc, sink);
    case 2:
      return gemm_panel<2>(M, depth, a, b + j, ldb, c + j, ldc, sink);
    case 3:
      return gemm_panel<3>(M, depth, a, b + j, ldb, c + j, ldc, sink);
    default:
      return;
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_GEMM_INL_H_
