// The mathematics inside one chunk: decays, score matrices, the triangular system.
//
// No exponential here ever has a positive argument and no factor exceeds 1, for any gate. Decays
// between two rows of a sub-chunk are products of per-token factors exp(g); decays across
// sub-chunks split at the first row of the row block (docs/semantics.md 6.2). Nothing is a
// difference of long cumulative sums, so strong gates cost no accuracy, and no row depends on a
// later one.
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/tile-inl.h"

#if defined(KDA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_CHUNK_INL_H_
#undef KDA_CPU_CHUNK_INL_H_
#else
#define KDA_CPU_CHUNK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// From natural-log decays in t.decay: pc, sc, rest, and the per-token factors in place.
inline void build_decays(const ChunkTiles& t, int64_t ld, int64_t rows, int64_t width) {
  const Floats d;
  for_vectors(width, [&](int64_t c) HWY_ATTR {
    Vec sum = hn::Zero(d);
    for (int64_t i = rows - 1; i >= 0; --i) {
      hn::Store(exp_of(d, sum), d, t.sc + i * ld + c);
      sum = hn::Add(sum, hn::Load(d, t.decay + i * ld + c));
    }
    sum = hn::Zero(d);
    Vec lost = hn::Zero(d);  // by the sum, alike in every chunk of equal gates
    Vec whole = hn::Set(d, 1.0f);
    for (int64_t i = 0; i < rows; ++i) {
      const Vec g = hn::Load(d, t.decay + i * ld + c);
      const Vec next = hn::Add(sum, g);
      lost = hn::Add(lost, hn::Sub(g, hn::Sub(next, sum)));
      sum = next;
      whole = exp_of(d, sum);
      hn::Store(whole, d, t.pc + i * ld + c);
      hn::Store(exp_of(d, g), d, t.decay + i * ld + c);
    }
    hn::Store(rest_of_exp(d, hn::Add(sum, lost), whole), d, t.rest + c);
  });
}

/// Natural-log decays from the stage tensor gamma (log2, cumulative).
inline void load_gamma(const Run& run, const Chunk& chunk, int64_t hv, float* decay) {
  const Dims& s = run.dims;
  const Floats d;
  load_tile(run.tokens(TensorId::kGamma, chunk, hv), chunk.tokens, s.K, decay, s.ldk, chunk.rows());
  const Vec ln2 = hn::Set(d, 0.693147180559945f);
  for (int64_t i = chunk.tokens - 1; i >= 0; --i) {
    float* row = decay + i * s.ldk;
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const Vec before = i > 0 ? hn::Load(d, row - s.ldk + c) : hn::Zero(d);
      hn::Store(hn::Mul(hn::Sub(hn::Load(d, row + c), before), ln2), d, row + c);
    });
  }
}

/// 2^gamma of a chunk as the sum of two numbers per key channel.
inline void load_chunk_decay(const Run& run, const Chunk& chunk, int64_t hv, float* gamma,
                             float* rest) {
  const Dims& s = run.dims;
  const Floats d;
  Chunk last = chunk;
  last.begin += chunk.tokens - 1;
  load_tile(run.tokens(TensorId::kGamma, last, hv), 1, s.K, gamma, s.ldk, 1);
  const Vec ln2 = hn::Set(d, 0.693147180559945f);
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    const Vec x = hn::Mul(hn::Load(d, gamma + c), ln2);
    const Vec power = exp_of(d, x);
    hn::Store(power, d, gamma + c);
    hn::Store(rest_of_exp(d, x, power), d, rest + c);
  });
}

/// Loads a chunk of one value head with all pre-processing of section 3.
inline void load_chunk(const Run& run, const Chunk& chunk, int64_t hv, const GateTerms& gate,
                       const ChunkTiles& t) {
  const Dims& s = run.dims;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  const int64_t h = hv / s.G;
  load_tile(run.tokens(TensorId::kQ, chunk, h), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kK, chunk, h), n, s.K, t.k, s.ldk, rows);
  load_tile(run.tokens(TensorId::kV, chunk, hv), n, s.V, t.v, s.ldv, rows);
  load_tile(run.tokens(TensorId::kG, chunk, hv), n, s.K, t.decay, s.ldk, rows);
  load_column(run.tokens(TensorId::kBeta, chunk, hv), n, t.beta, rows);
  if (run.problem.qk_l2norm) {
    normalise_rows(t.q, s.ldk, rows, s.Kp, t.rq);
    normalise_rows(t.k, s.ldk, rows, s.Kp, t.rk);
  }
  if (run.problem.beta_sigmoid) {
    const float most = run.problem.allow_neg_eigval ? 2.0f : 1.0f;
    for (int64_t i = 0; i < n; ++i) t.beta[i] = most * sigmoid(t.beta[i]);
  }
  apply_gate(gate, t.decay, s.ldk, n, rows, s.Kp);
  build_decays(t, s.ldk, rows, s.Kp);
}

/// to = factor . from, row by row; `scale` multiplies everything.
inline void multiply_tiles(const float* factor, const float* from, float scale, float* to,
                           int64_t ld, int64_t rows, int64_t width) {
  const Floats d;
  const Vec all = hn::Set(d, scale);
  for (int64_t i = 0; i < rows * ld; i += ld) {
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      const Vec x = hn::Mul(hn::Load(d, factor + i + c), hn::Load(d, from + i + c));
      hn::Store(hn::Mul(all, x), d, to + i + c);
    });
  }
}

/// (4.16) in place: r = beta . (v - ke h), from ke h.
inline void residual(const Dims& s, int64_t rows, const float* v, const float* beta, float* r) {
  const Floats d;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec b = hn::Set(d, beta[i]);
    for_vectors(s.Vp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldv + c;
      hn::Store(hn::Mul(b, hn::Sub(hn::Load(d, v + at), hn::Load(d, r + at))), d, r + at);
    });
  }
}

/// Multiplies each row by its factor.
inline void scale_rows(float* tile, const float* factor, int64_t ld, int64_t rows, int64_t width) {
  const Floats d;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec f = hn::Set(d, factor[i]);
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      hn::Store(hn::Mul(hn::Load(d, tile + i * ld + c), f), d, tile + i * ld + c);
    });
  }
}

/// Multiplies each row by a vector over the columns.
inline void scale_columns(float* tile, const float* factor, int64_t ld, int64_t rows,
                          int64_t width) {
  const Floats d;
  for (int64_t i = 0; i < rows * ld; i += ld) {
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      hn::Store(hn::Mul(hn::Load(d, tile + i + c), hn::Load(d, factor + c)), d, tile + i + c);
    });
  }
}

/// out = k . 2^(Gamma_last(block) - Gamma) for each row, and the decay of each whole block.
inline void build_columns(const Dims& s, int64_t rows, const float* k, const float* decay,
                          float* out, float* total) {
  const Floats d;
  for (int64_t first = 0; first < rows; first += kBlock) {
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      Vec down = hn::Set(d, 1.0f);
      for (int64_t i = first + kBlock - 1; i >= first; --i) {
        const int64_t at = i * s.ldk + c;
        hn::Store(hn::Mul(hn::Load(d, k + at), down), d, out + at);
        down = hn::Mul(down, hn::Load(d, decay + at));
      }
      hn::Store(down, d, total + first / kBlock * s.ldk + c);
    });
  }
}

/// Row operands of the block that starts at `first`: q and beta k times the decay from the end of
/// the block before it.
inline void build_rows(const Dims& s, int64_t first, const float* q, const float* k,
                       const float* decay, const float* beta, float* out_q, float* out_k) {
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    Vec up = hn::Set(d, 1.0f);
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t at = (first + i) * s.ldk + c;
      up = hn::Mul(up, hn::Load(d, decay + at));
      hn::Store(hn::Mul(up, hn::Load(d, q + at)), d, out_q + i * s.ldk + c);
      const Vec bk = hn::Mul(hn::Set(d, beta[first + i]), hn::Load(d, k + at));
      hn::Store(hn::Mul(up, bk), d, out_k + i * s.ldk + c);
    }
  });
}

/// One diagonal block of Aqk and of L, pair by pair with running products of the decays.
inline void diagonal_scores(const Dims& s, int64_t first, int64_t last, const float* q,
                            const float* k, const float* decay, const float* beta, float scale,
                            float* aqk, float (*l)[kBlock]) {
  const Floats d;
  alignas(64) float running[256];
  for (int64_t j = first; j < last; ++j) {
    const float* kj = k + j * s.ldk;
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR { hn::Store(hn::Load(d, kj + c), d, running + c); });
    aqk[j * s.ldc + j] = scale * dot(q + j * s.ldk, kj, s.Kp);
    for (int64_t i = j + 1; i < last; ++i) {
      const int64_t at = i * s.ldk;
      Vec p = hn::Zero(d);
      Vec kk = hn::Zero(d);
      for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
        const Vec x = hn::Mul(hn::Load(d, running + c), hn::Load(d, decay + at + c));
        hn::Store(x, d, running + c);
        p = hn::MulAdd(hn::Load(d, q + at + c), x, p);
        kk = hn::MulAdd(hn::Load(d, k + at + c), x, kk);
      });
      aqk[i * s.ldc + j] = scale * sum_lanes(d, p);
      l[i - first][j - first] = beta[i] * sum_lanes(d, kk);
    }
  }
}

/// Inverse of I + l by forward substitution (docs/semantics.md 6.4), written to a tile.
inline void invert_block(const float (*l)[kBlock], float* out, int64_t ld) {
  const Floats d;
  for (int64_t i = 0; i < kBlock; ++i) {
    float* row = out + i * ld;
    for (int64_t j = 0; j < kBlock; ++j) row[j] = i == j ? 1.0f : 0.0f;
    for_vectors(kBlock, [&](int64_t c) HWY_ATTR {
      Vec sum = hn::Load(d, row + c);
      for (int64_t j = 0; j < i; ++j) {
        sum = hn::NegMulAdd(hn::Set(d, l[i][j]), hn::Load(d, out + j * ld + c), sum);
      }
      hn::Store(sum, d, row + c);
    });
  }
}

/// (4.4)-(4.6): aqk [rows, C], zero above the diagonal, and the system I + L as `solver`: its
/// blocks below the diagonal are those of L, its diagonal blocks are inverted.
HWY_NOINLINE inline void chunk_scores(const Dims& s, int64_t tokens, const float* q, const float* k,
                                      const float* decay, const float* beta, float scale,
                                      const IntraTiles& t, float* aqk, float* solver) {
  const int64_t rows = padded(tokens);
  zero_tile(aqk, s.ldc, rows, s.C);
  build_columns(s, rows, k, decay, t.a, t.total);
  transpose(t.a, s.ldk, rows, s.Kp, t.t, s.ldc);
  for (int64_t first = 0; first < rows; first += kBlock) {
    if (first > 0) build_rows(s, first, q, k, decay, beta, t.b, t.c);
    for (int64_t j = first - kBlock; j >= 0; j -= kBlock) {
      const Left row_q{t.b, s.ldk, 1};
      const Left row_k{t.c, s.ldk, 1};
      gemm(kBlock, kBlock, s.Kp, row_q, t.t + j, s.ldc, aqk + first * s.ldc + j, s.ldc, {scale});
      gemm(kBlock, kBlock, s.Kp, row_k, t.t + j, s.ldc, solver + first * s.ldc + j, s.ldc);
      if (j > 0) {
        scale_columns(t.b, t.total + j / kBlock * s.ldk, s.ldk, kBlock, s.Kp);
        scale_columns(t.c, t.total + j / kBlock * s.ldk, s.ldk, kBlock, s.Kp);
      }
    }
    float l[kBlock][kBlock] = {};
    const int64_t last = std::min(first + kBlock, tokens);
    diagonal_scores(s, first, last, q, k, decay, beta, scale, aqk, l);
    invert_block(l, solver + first * s.ldc + first, s.ldc);
  }
}

/// c = alpha T b (+ c) for a triangular block T. What lies on the other side of its diagonal is not
/// multiplied, not even as zeros: a NaN or infinity in a row of b reaches only what depends on it.
template <bool kUpper>
HWY_NOINLINE void multiply_triangle(const Left& t, const float* HWY_RESTRICT b,
                                    float* HWY_RESTRICT c, int64_t ld, int64_t width,
                                    const Sink& sink) {
  const Floats d;
  for_vectors(width, [&](int64_t col) HWY_ATTR {
    for (int64_t i = 0; i < kBlock; ++i) {
      const float* row = t.data + i * t.row;
      const int64_t end = kUpper ? kBlock : i + 1;
      Vec sum = hn::Zero(d);
      for (int64_t p = kUpper ? i : 0; p < end; ++p) {
        sum = hn::MulAdd(hn::Set(d, row[p * t.col]), hn::Load(d, b + p * ld + col), sum);
      }
      sink_vector(d, sum, i, c + i * ld + col, sink);
    }
  });
}

/// x = A y with A = (I + L)^-1, block by block; y is overwritten.
inline void solve(const Dims& s, int64_t rows, const float* solver, float* y, float* x, int64_t ld,
                  int64_t width) {
  for (int64_t i = 0; i < rows; i += kBlock) {
    const float* row = solver + i * s.ldc;
    if (i > 0) gemm(kBlock, width, i, {row, s.ldc, 1}, x, ld, y + i * ld, ld, {-1, true});
    multiply_triangle<false>({row + i, s.ldc, 1}, y + i * ld, x + i * ld, ld, width, {});
  }
}

/// x = A^T y; y is overwritten.
inline void solve_transposed(const Dims& s, int64_t rows, const float* solver, float* y, float* x,
                             int64_t ld, int64_t width) {
  for (int64_t i = rows - kBlock; i >= 0; i -= kBlock) {
    const int64_t next = i + kBlock;
    if (next < rows) {
      gemm(kBlock, width, rows - next, {solver + next * s.ldc + i, 1, s.ldc}, x + next * ld, ld,
           y + i * ld, ld, {-1, true});
    }
    multiply_triangle<true>({solver + i * s.ldc + i, 1, s.ldc}, y + i * ld, x + i * ld, ld, width,
                            {});
  }
}

/// c = alpha M b (+ c) with M [rows, rows] lower triangular.
inline void multiply_lower(const Dims& s, int64_t rows, const float* m, const float* b, float* c,
                           int64_t ld, int64_t width, const Sink& sink = {}) {
  for (int64_t i = 0; i < rows; i += kBlock) {
    const float* row = m + i * s.ldc;
    multiply_triangle<false>({row + i, s.ldc, 1}, b + i * ld, c + i * ld, ld, width, sink);
    if (i > 0) gemm(kBlock, width, i, {row, s.ldc, 1}, b, ld, c + i * ld, ld, {sink.alpha, true});
  }
}

/// c = alpha M^T b (+ c), M as above.
inline void multiply_lower_transposed(const Dims& s, int64_t rows, const float* m, const float* b,
                                      float* c, int64_t ld, int64_t width, const Sink& sink = {}) {
  for (int64_t i = 0; i < rows; i += kBlock) {
    const float* column = m + i * s.ldc + i;
    multiply_triangle<true>({column, 1, s.ldc}, b + i * ld, c + i * ld, ld, width, sink);
    const int64_t next = i + kBlock;
    if (next < rows) {
      gemm(kBlock, width, rows - next, {column + kBlock * s.ldc, 1, s.ldc}, b + next * ld, ld,
           c + i * ld, ld, {sink.alpha, true});
    }
  }
}

/// A itself, from the system: solves for the unit vectors. `work` is a [C, ldc] tile.
inline void explicit_inverse(const Dims& s, int64_t rows, const float* solver, float* work,
                             float* out) {
  zero_tile(work, s.ldc, rows, s.C);
  for (int64_t i = 0; i < rows; ++i) work[i * s.ldc + i] = 1.0f;
  zero_tile(out, s.ldc, rows, s.C);
  solve(s, rows, solver, work, out, s.ldc, padded(rows));
}

/// Sets what lies above the diagonal to 0.
inline void keep_lower(const Dims& s, int64_t rows, float* m) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i + 1; j < s.C; ++j) m[i * s.ldc + j] = 0;
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_CHUNK_INL_H_
