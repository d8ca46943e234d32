// Chunked backward of one sequence and q/k head: a task takes the value heads of the group one
// after another, so that dq and dk are summed in a fixed order.
//
//   pass 1, chunks upwards    scores, v' and, unless the caller saved it in fp32, h of each chunk
//   pass 2, chunks downwards  the compact form (5.27)-(5.33), D = gradient of the leaving state:
//     dv' = Aqk^T do + kg D         R = A^T dv'        dv = beta . R
//     [do; R] h^T                   dq1 and -Y in one product
//     dkx = 2^(gamma-Gamma) . v' D^T
//     dP = s do v'^T                dL = -R v'^T
//     D = 2^gamma . D + [s qg; -beta ke]^T [do; R]
//     dq2, z, dkc through the scores, then dq, dk, dbeta, dg and the gate
//   finish, per value head    dA_log and ddt_bias: sums over sequences in order
//
// Scratch in floats, at K = V = 128, C = 64: tiles 280 k (1.1 MB a thread), and for each chunk of
// the longest possible sequence v' 9 k, aqk and system 10 k, h 18 k (not with a saved fp32 h).
// With more than one value head a group, dq and dk sums of [T, K] each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_bwd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "cpu/cpu_kernels.h"
#include "cpu/cpu_scratch.h"
#include "cpu/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// The task's place in the run.
struct Head {
  int64_t sequence;
  int64_t h;
  int64_t hv;
  int64_t chunks;
  bool keys;         ///< anything beyond dv and dinitial_state is asked for
  double* dA;        ///< sum over the sequence
  double* ddt_bias;  ///< likewise, [Kp]
};

/// Pass 1 for one chunk: needs the entering state in w.h, leaves the next one there.
void rebuild_chunk(const Run& run, const Head& head, int64_t c, const GateTerms& gate,
                   const BackwardScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Chunk chunk = run.chunk(head.sequence, c);
  const int64_t rows = chunk.rows();
  const bool keeps_h = ChunkStore::keeps_h(run.problem);
  if (keeps_h) {
    std::copy_n(w.h, s.Kp * s.ldv, w.store.h(c));
  } else {
    load_tile(run.state(TensorId::kH, chunk.row, head.hv), s.K, s.V, w.h, s.ldv, s.Kp);
  }
  load_chunk(run, chunk, head.hv, gate, t);
  chunk_scores(s, chunk.tokens, t.q, t.k, t.decay, t.beta, run.scale, w.intra, w.store.aqk(c),
               w.store.solver(c));
  multiply_tiles(t.pc, t.k, 1.0f, w.x, s.ldk, rows, s.Kp);
  gemm(rows, s.Vp, s.Kp, {w.x, s.ldk, 1}, w.h, s.ldv, w.y, s.ldv);
  residual(s, rows, t.v, t.beta, w.y);
  solve(s, rows, w.store.solver(c), w.y, w.store.v_new(c), s.ldv, s.Vp);
  if (!keeps_h || c + 1 == head.chunks) return;
  multiply_tiles(t.sc, t.k, 1.0f, w.kg, s.ldk, rows, s.Kp);
  gemm(s.Kp, s.Vp, rows, {w.kg, 1, s.ldk}, w.store.v_new(c), s.ldv, w.h, s.ldv,
       {1, true, t.pc + (rows - 1) * s.ldk, t.rest});
}

/// x = [s qg; -beta ke] and kg.
void gated_operands(const Run& run, int64_t rows, const BackwardScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Floats d;
  multiply_tiles(t.pc, t.q, run.scale, w.x, s.ldk, rows, s.Kp);
  multiply_tiles(t.sc, t.k, 1.0f, w.kg, s.ldk, rows, s.Kp);
  for (int64_t i = 0; i < rows; ++i) {
    const Vec b = hn::Set(d, -t.beta[i]);
    float* out = w.x + (rows + i) * s.ldk;
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldk + c;
      const Vec ke = hn::Mul(hn::Load(d, t.pc + at), hn::Load(d, t.k + at));
      hn::Store(hn::Mul(b, ke), d, out + c);
    });
  }
}

/// dv' -> R -> dv of a chunk; do_r is left as [do; R].
void value_gradients(const Run& run, const Head& head, int64_t c, const Chunk& chunk,
                     const BackwardScratch& w) {
  const Dims& s = run.dims;
  const int64_t rows = chunk.rows();
  float* R = w.do_r + rows * s.ldv;
  load_tile(run.tokens(TensorId::kDo, chunk, head.hv), chunk.tokens, s.V, w.do_r, s.ldv, rows);
  gemm(rows, s.Vp, s.Kp, {w.kg, s.ldk, 1}, w.dh, s.ldv, w.y, s.ldv);
  multiply_lower_transposed(s, rows, w.store.aqk(c), w.do_r, w.y, s.ldv, s.Vp, {1, true});
  solve_transposed(s, rows, w.store.solver(c), w.y, R, s.ldv, s.Vp);
  if (!run.wants(TensorId::kDv)) return;
  const Floats d;
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const Vec b = hn::Set(d, w.chunk.beta[i]);
    for_vectors(s.Vp, [&](int64_t v) HWY_ATTR {
      hn::Store(hn::Mul(b, hn::Load(d, R + i * s.ldv + v)), d, w.dv + i * s.ldv + v);
    });
  }
  store_tile(w.dv, s.ldv, run.tokens(TensorId::kDv, chunk, head.hv), chunk.tokens, s.V);
}

/// The products with the states, before dh moves on: w.products, w.dkx, w.whole.
void state_products(const Run& run, const Head& head, int64_t c, const Chunk& chunk,
                    const BackwardScratch& w) {
  const Dims& s = run.dims;
  const int64_t rows = chunk.rows();
  const float* h = w.h;
  if (ChunkStore::keeps_h(run.problem)) {
    h = w.store.h(c);
  } else {
    load_tile(run.state(TensorId::kH, chunk.row, head.hv), s.K, s.V, w.h, s.ldv, s.Kp);
  }
  transpose(h, s.ldv, s.Kp, s.Vp, w.turned, s.ldk);
  gemm(2 * rows, s.Kp, s.Vp, {w.do_r, s.ldv, 1}, w.turned, s.ldk, w.products, s.ldk);
  transpose(w.dh, s.ldv, s.Kp, s.Vp, w.turned, s.ldk);
  gemm(rows, s.Kp, s.Vp, {w.store.v_new(c), s.ldv, 1}, w.turned, s.ldk, w.dkx, s.ldk);
  state_overlap(s, h, w.dh, w.chunk.pc + (rows - 1) * s.ldk, w.whole);
}

/// (5.32): dq into dq2, dk into z, W into dkc, k . dkx into dkx, dbeta.
void combine_gradients(const Run& run, int64_t rows, const BackwardScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Floats d;
  const Vec scale = hn::Set(d, run.scale);
  const float* R = w.do_r + rows * s.ldv;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec b = hn::Set(d, t.beta[i]);
    const Vec diagonal = hn::Set(d, w.dP[i * s.ldc + i]);
    Vec dbeta = hn::Zero(d);
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldk + c;
      const Vec q = hn::Load(d, t.q + at);
      const Vec k = hn::Load(d, t.k + at);
      const Vec pc = hn::Load(d, t.pc + at);
      const Vec dkc = hn::Load(d, w.dkc + at);
      const Vec dkx = hn::Mul(hn::Load(d, t.sc + at), hn::Load(d, w.dkx + at));
      const Vec RhT = hn::Load(d, w.products + rows * s.ldk + at);
      const Vec kr = hn::NegMulAdd(pc, RhT, hn::Load(d, w.z + at));
      const Vec doh = hn::Load(d, w.products + at);
      const Vec dqs = hn::MulAdd(hn::Mul(scale, pc), doh, hn::Load(d, w.dq2 + at));
      const Vec row = hn::Mul(b, kr);
      dbeta = hn::MulAdd(kr, k, dbeta);
      hn::Store(hn::MulAdd(diagonal, k, dqs), d, w.dq2 + at);
      const Vec dk = hn::Add(hn::Add(row, dkx), dkc);
      hn::Store(hn::MulAdd(diagonal, q, dk), d, w.z + at);
      hn::Store(hn::MulAdd(q, dqs, hn::Mul(k, hn::Sub(row, dkc))), d, w.dkc + at);
      hn::Store(hn::Mul(k, dkx), d, w.dkx + at);
    });
    w.dbeta[i] = sum_lanes(d, dbeta) + dot(R + i * s.ldv, t.v + i * s.ldv, s.Vp);
  }
}

/// Adds what earlier value heads of the group gave; the last one finishes dq and dk.
void finish_keys(const Run& run, const Head& head, int64_t c, const Chunk& chunk,
                 const BackwardScratch& w) {
  const Dims& s = run.dims;
  const Floats d;
  const int64_t rows = chunk.rows();
  const int64_t g = head.hv % s.G;
  const int64_t count = rows * s.ldk;
  float* sums[2] = {w.dq_sum + c * s.C * s.ldk, w.dk_sum + c * s.C * s.ldk};
  float* tiles[2] = {w.dq2, w.z};
  for (int side = 0; side < 2 && s.G > 1; ++side) {
    for (int64_t i = 0; i < count; i += s.ldk) {
      for_vectors(s.Kp, [&](int64_t k) HWY_ATTR {
        Vec sum = hn::Load(d, tiles[side] + i + k);
        if (g > 0) sum = hn::Add(hn::Load(d, sums[side] + i + k), sum);
        hn::Store(sum, d, (g + 1 < s.G ? sums[side] : tiles[side]) + i + k);
      });
    }
  }
  if (g + 1 < s.G) return;
  if (run.problem.qk_l2norm) {
    normalise_backward(w.chunk.q, w.dq2, s.ldk, rows, s.K, s.Kp, w.chunk.rq);
    normalise_backward(w.chunk.k, w.z, s.ldk, rows, s.K, s.Kp, w.chunk.rk);
  }
  store_tile(w.dq2, s.ldk, run.tokens(TensorId::kDq, chunk, head.h), chunk.tokens, s.K);
  store_tile(w.z, s.ldk, run.tokens(TensorId::kDk, chunk, head.h), chunk.tokens, s.K);
}

/// dg in w.dkc to the gradient of g as given; adds to the parameter gradients. Overwrites decay.
void gate_backward(const Run& run, const Head& head, const Chunk& chunk, const GateTerms& gate,
                   const BackwardScratch& w) {
  const Dims& s = run.dims;
  const Floats d;
  float* raw = w.chunk.decay;
  load_tile(run.tokens(TensorId::kG, chunk, head.hv), chunk.tokens, s.K, raw, s.ldk, chunk.tokens);
  Vec dA = hn::Zero(d);
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    const Vec bias = hn::Load(d, gate.bias + c);
    Vec ddt_bias = hn::Zero(d);
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      const int64_t at = i * s.ldk + c;
      const Vec z = hn::Add(hn::Load(d, raw + at), bias);
      const Vec g = log_decay(d, gate, z);
      const Vec least = hn::Set(d, kLeastLogDecay);
      const Vec dg = hn::IfThenZeroElse(hn::Lt(g, least), hn::Load(d, w.dkc + at));
      // Where dg is 0 its factors may be infinite; z may be where dz is 0, and dz where z is.
      const Vec zero = hn::Zero(d);
      const Vec dz =
          hn::IfThenZeroElse(hn::Eq(dg, zero), hn::Mul(dg, log_decay_slope(d, gate, z, g)));
      hn::Store(dz, d, w.dkc + at);
      ddt_bias = hn::Add(ddt_bias, dz);
      const Vec a = gate.kind == Gate::kSoftplus ? dg : dz;
      const Vec b = gate.kind == Gate::kSoftplus ? g : z;
      const auto none = hn::Or(hn::Eq(a, zero), hn::Eq(b, zero));
      dA = hn::Add(dA, hn::IfThenZeroElse(none, hn::Mul(a, b)));
    }
    alignas(64) float lanes[kPad];
    hn::Store(ddt_bias, d, lanes);
    for (int64_t l = 0; l < static_cast<int64_t>(hn::Lanes(d)); ++l) {
      head.ddt_bias[c + l] += static_cast<double>(lanes[l]);
    }
  });
  *head.dA += static_cast<double>(sum_lanes(d, dA));
  store_tile(w.dkc, s.ldk, run.tokens(TensorId::kDg, chunk, head.hv), chunk.tokens, s.K);
}

/// (3.13), then out.
void finish_beta(const Run& run, const Head& head, const Chunk& chunk, const BackwardScratch& w) {
  if (run.problem.beta_sigmoid) {
    const float most = run.problem.allow_neg_eigval ? 2.0f : 1.0f;
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      const float beta = w.chunk.beta[i];
      w.dbeta[i] *= beta * (1.0f - beta / most);
    }
  }
  store_column(w.dbeta, run.tokens(TensorId::kDbeta, chunk, head.hv), chunk.tokens);
}

/// Pass 2 for one chunk.
void backward_chunk(const Run& run, const Head& head, int64_t c, const GateTerms& gate,
                    const BackwardScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Chunk chunk = run.chunk(head.sequence, c);
  const int64_t rows = chunk.rows();
  load_chunk(run, chunk, head.hv, gate, t);
  gated_operands(run, rows, w);
  value_gradients(run, head, c, chunk, w);
  if (head.keys) state_products(run, head, c, chunk, w);
  gemm(s.Kp, s.Vp, 2 * rows, {w.x, 1, s.ldk}, w.do_r, s.ldv, w.dh, s.ldv,
       {1, true, t.pc + (rows - 1) * s.ldk, t.rest});
  if (!head.keys) return;
  score_products(s, rows, w.do_r, w.do_r + rows * s.ldv, w.store.v_new(c), run.scale, w.turned,
                 w.dP, w.dL);
  score_gradients(s, chunk.tokens, {t.q, t.k, t.decay, t.beta, w.dP, w.dL}, w.intra,
                  {w.dq2, w.z, w.dkc});
  combine_gradients(run, rows, w);
  accumulate_gate(s, rows, w.dkc, w.dkx, w.whole);
  finish_keys(run, head, c, chunk, w);
  finish_beta(run, head, chunk, w);
  gate_backward(run, head, chunk, gate, w);
}

/// Doubles of one (sequence, value head): dA_log and ddt_bias.
inline int64_t partial_size(const Dims& s) { return s.Kp + 1; }

void chunk_backward(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  Head head{};
  head.sequence = task.index / run.problem.sizes.H;
  head.h = task.index % run.problem.sizes.H;
  head.chunks = run.chunk_count(head.sequence);
  for (TensorId id : {TensorId::kDq, TensorId::kDk, TensorId::kDg, TensorId::kDbeta,
                      TensorId::kDALog, TensorId::kDdtBias}) {
    head.keys |= run.wants(id);
  }
  Arena arena(task.scratch);
  const BackwardScratch w(run.problem, s, arena);
  for (head.hv = head.h * s.G; head.hv < (head.h + 1) * s.G; ++head.hv) {
    const int64_t slot = head.sequence * run.problem.sizes.HV + head.hv;
    head.dA = reinterpret_cast<double*>(task.shared) + slot * partial_size(s);
    head.ddt_bias = head.dA + 1;
    std::fill_n(head.dA, partial_size(s), 0.0);
    const GateTerms gate = load_gate(run, head.hv, w.chunk.bias);
    load_state(run.state(TensorId::kInitialState, head.sequence, head.hv), s, w.h);
    for (int64_t c = 0; c < head.chunks; ++c) rebuild_chunk(run, head, c, gate, w);
    load_state(run.state(TensorId::kDfinalState, head.sequence, head.hv), s, w.dh);
    for (int64_t c = head.chunks - 1; c >= 0; --c) backward_chunk(run, head, c, gate, w);
    store_state(w.dh, s, run.state(TensorId::kDinitialState, head.sequence, head.hv));
  }
}

void sum_parameters(const Run& run, int64_t hv, const std::byte* shared, float* scratch) {
  const Dims& s = run.dims;
  const auto* partial = reinterpret_cast<const double*>(shared);
  const auto sum = [&](int64_t element) {
    double total = 0;
    for (int64_t i = 0; i < run.problem.sequences(); ++i) {
      total += partial[(i * run.problem.sizes.HV + hv) * partial_size(s) + element];
    }
    return static_cast<float>(total);
  };
  scratch[0] = sum(0);
  store_tile(scratch, 0, run.head_row(TensorId::kDALog, hv), 1, 1);
  for (int64_t k = 0; k < s.Kp; ++k) scratch[k] = sum(1 + k);
  store_tile(scratch, 0, run.head_row(TensorId::kDdtBias, hv), 1, s.K);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(chunk_backward);
HWY_EXPORT(sum_parameters);

Kernel chunk_backward_kernel() {
  return {Operation::kChunkBackward,
          TaskKind::kSequenceHead,
          [](const Problem& problem) { return scratch_floats<BackwardScratch>(problem); },
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(chunk_backward)
            (run, task);
          },
          [](const Problem& problem) {
            if (!has_work(problem, problem.sizes.T)) return int64_t{0};
            const Dims s(problem);
            return problem.sequences() * problem.sizes.HV * (s.Kp + 1) *
                   static_cast<int64_t>(sizeof(double));
          },
          [](const Run& run, int64_t hv, const std::byte* shared, float* scratch) {
            HWY_DYNAMIC_DISPATCH(sum_parameters)(run, hv, shared, scratch);
          }};
}

}  // namespace kda::cpu
#endif
