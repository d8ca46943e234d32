// Gradients inside one chunk, shared by the fused backward and the stages: through the scores
// (docs/semantics.md 5.3, diagonal-free) and the sums that give dg.
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/chunk-inl.h"

#if defined(KDA_CPU_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_GRADIENT_INL_H_
#undef KDA_CPU_GRADIENT_INL_H_
#else
#define KDA_CPU_GRADIENT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// What goes into the gradients through the scores; dP and dL are read below the diagonal only.
struct ScoreInputs {
  const float* q;
  const float* k;
  const float* decay;
  const float* beta;
  const float* dP;
  const float* dL;
};

/// What comes out: dq2 of (5.19) and z of (5.20) in the row role, dkc of (5.23) in the column role.
struct ScoreGradients {
  float* dq2;
  float* z;
  float* dkc;
};

/// Multiplies the rows of a block by the decay from the end of the block before them.
inline void decay_rows(const Dims& s, int64_t first, const float* decay, float* x, float* y) {
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    Vec up = hn::Set(d, 1.0f);
    for (int64_t i = first; i < first + kBlock; ++i) {
      const int64_t at = i * s.ldk + c;
      up = hn::Mul(up, hn::Load(d, decay + at));
      hn::Store(hn::Mul(up, hn::Load(d, x + at)), d, x + at);
      hn::Store(hn::Mul(up, hn::Load(d, y + at)), d, y + at);
    }
  });
}

/// Multiplies the rows of a block by the decay from them to the end of the block.
inline void decay_columns(const Dims& s, int64_t first, const float* decay, float* x) {
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    Vec down = hn::Set(d, 1.0f);
    for (int64_t i = first + kBlock - 1; i >= first; --i) {
      const int64_t at = i * s.ldk + c;
      hn::Store(hn::Mul(down, hn::Load(d, x + at)), d, x + at);
      down = hn::Mul(down, hn::Load(d, decay + at));
    }
  });
}

/// Row role of the blocks below the diagonal.
inline void row_gradients(const Dims& s, int64_t rows, const ScoreInputs& in, const IntraTiles& t,
                          const ScoreGradients& out) {
  build_columns(s, rows, in.k, in.decay, t.a, t.total);
  zero_tile(out.dq2, s.ldk, kBlock, s.Kp);
  zero_tile(out.z, s.ldk, kBlock, s.Kp);
  for (int64_t i = kBlock; i < rows; i += kBlock) {
    const Left dP{in.dP + i * s.ldc, s.ldc, 1};
    const Left dL{in.dL + i * s.ldc, s.ldc, 1};
    gemm(kBlock, s.Kp, i, dP, t.a, s.ldk, out.dq2 + i * s.ldk, s.ldk);
    gemm(kBlock, s.Kp, i, dL, t.a, s.ldk, out.z + i * s.ldk, s.ldk);
    decay_rows(s, i, in.decay, out.dq2, out.z);
    scale_columns(t.a, t.total + i / kBlock * s.ldk, s.ldk, i, s.Kp);
  }
}

/// Column role of the blocks below the diagonal; t.total is as row_gradients left it.
inline void column_gradients(const Dims& s, int64_t rows, const ScoreInputs& in,
                             const IntraTiles& t, const ScoreGradients& out) {
  zero_tile(out.dkc + (rows - kBlock) * s.ldk, s.ldk, kBlock, s.Kp);
  for (int64_t j = rows - 2 * kBlock; j >= 0; j -= kBlock) {
    const int64_t i = j + kBlock;
    float* a = t.a + i * s.ldk;
    float* b = t.b + i * s.ldk;
    const float* total = t.total + i / kBlock * s.ldk;
    scale_columns(a + kBlock * s.ldk, total, s.ldk, rows - i - kBlock, s.Kp);
    scale_columns(b + kBlock * s.ldk, total, s.ldk, rows - i - kBlock, s.Kp);
    build_rows(s, i, in.q, in.k, in.decay, in.beta, a, b);
    const Left dP{in.dP + i * s.ldc + j, 1, s.ldc};
    const Left dL{in.dL + i * s.ldc + j, 1, s.ldc};
    gemm(kBlock, s.Kp, rows - i, dP, a, s.ldk, out.dkc + j * s.ldk, s.ldk);
    gemm(kBlock, s.Kp, rows - i, dL, b, s.ldk, out.dkc + j * s.ldk, s.ldk, {1, true});
    decay_columns(s, j, in.decay, out.dkc);
  }
}

/// The diagonal block that starts at `first`, both roles, by Horner's scheme in the decays.
inline void diagonal_gradients(const Dims& s, int64_t first, int64_t last, const ScoreInputs& in,
                               const ScoreGradients& out) {
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    for (int64_t i = first + 1; i < last; ++i) {
      Vec dq = hn::Zero(d);
      Vec z = hn::Zero(d);
      for (int64_t j = first; j < i; ++j) {
        const Vec kj = hn::Load(d, in.k + j * s.ldk + c);
        const Vec step = hn::Load(d, in.decay + (j + 1) * s.ldk + c);
        dq = hn::Mul(step, hn::MulAdd(hn::Set(d, in.dP[i * s.ldc + j]), kj, dq));
        z = hn::Mul(step, hn::MulAdd(hn::Set(d, in.dL[i * s.ldc + j]), kj, z));
      }
      const int64_t at = i * s.ldk + c;
      hn::Store(hn::Add(dq, hn::Load(d, out.dq2 + at)), d, out.dq2 + at);
      hn::Store(hn::Add(z, hn::Load(d, out.z + at)), d, out.z + at);
    }
    for (int64_t j = first; j + 1 < last; ++j) {
      Vec dk = hn::Zero(d);
      for (int64_t i = last - 1; i > j; --i) {
        const int64_t at = i * s.ldk + c;
        dk = hn::MulAdd(hn::Set(d, in.dP[i * s.ldc + j]), hn::Load(d, in.q + at), dk);
        const Vec dL = hn::Set(d, in.dL[i * s.ldc + j] * in.beta[i]);
        dk = hn::MulAdd(dL, hn::Load(d, in.k + at), dk);
        dk = hn::Mul(dk, hn::Load(d, in.decay + at));
      }
      const int64_t at = j * s.ldk + c;
      hn::Store(hn::Add(dk, hn::Load(d, out.dkc + at)), d, out.dkc + at);
    }
  });
}

/// (5.19), (5.20), (5.23) without the diagonal of dP.
HWY_NOINLINE inline void score_gradients(const Dims& s, int64_t tokens, const ScoreInputs& in,
                                         const IntraTiles& t, const ScoreGradients& out) {
  const int64_t rows = padded(tokens);
  row_gradients(s, rows, in, t, out);
  column_gradients(s, rows, in, t, out);
  for (int64_t first = 0; first < rows; first += kBlock) {
    diagonal_gradients(s, first, std::min(first + kBlock, tokens), in, out);
  }
}

/// (5.33) in place: W becomes dg, from W, k . dkx and 2^gamma . rowsum_V(h . dh). The last two may
/// be null.
inline void accumulate_gate(const Dims& s, int64_t rows, float* W, const float* kdkx,
                            const float* whole) {
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    Vec suffix = hn::Zero(d);
    for (int64_t i = rows - 1; i >= 0; --i) {
      suffix = hn::Add(suffix, hn::Load(d, W + i * s.ldk + c));
      hn::Store(suffix, d, W + i * s.ldk + c);
    }
    if (kdkx == nullptr) return;
    Vec prefix = hn::Load(d, whole + c);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * s.ldk + c;
      hn::Store(hn::Add(prefix, hn::Load(d, W + at)), d, W + at);
      prefix = hn::Add(prefix, hn::Load(d, kdkx + at));
    }
  });
}

/// 2^gamma . rowsum_V(h . dh), one value per key channel.
inline void state_overlap(const Dims& s, const float* h, const float* dh, const float* gamma,
                          float* out) {
  for (int64_t i = 0; i < s.Kp; ++i) out[i] = gamma[i] * dot(h + i * s.ldv, dh + i * s.ldv, s.Vp);
}

/// dP = s do v'^T and dL = -R v'^T, whole sub-chunks from the left up to the diagonal.
inline void score_products(const Dims& s, int64_t rows, const float* d_o, const float* R,
                           const float* v_new, float scale, float* work, float* dP, float* dL) {
  transpose(v_new, s.ldv, rows, s.Vp, work, s.ldc);
  for (int64_t i = 0; i < rows; i += kBlock) {
    const int64_t width = i + kBlock;
    gemm(kBlock, width, s.Vp, {d_o + i * s.ldv, s.ldv, 1}, work, s.ldc, dP + i * s.ldc, s.ldc,
         {scale});
    gemm(kBlock, width, s.Vp, {R + i * s.ldv, s.ldv, 1}, work, s.ldc, dL + i * s.ldc, s.ldc, {-1});
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_GRADIENT_INL_H_
