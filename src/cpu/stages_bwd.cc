// The stages of the backward as operations of their own. A task is one chunk of one head, for the
// reverse scan one sequence of one value head; the mathematics is that of gradient-inl.h, fed from
// stage tensors.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stages_bwd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "cpu/cpu_kernels.h"
#include "cpu/cpu_scratch.h"
#include "cpu/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// One chunk of the reverse scan: (5.3)-(5.6), the state gradient in w.dh.
void reverse_chunk(const Run& run, const Chunk& chunk, int64_t hv, const StageScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  const float* d_o = w.do_r;
  float* dv_new = w.do_r + rows * s.ldv;
  store_tile(w.dh, s.ldv, run.state(TensorId::kDh, chunk.row, hv), s.K, s.V);
  load_tile(run.tokens(TensorId::kDo, chunk, hv), n, s.V, w.do_r, s.ldv, rows);
  load_tile(run.tokens(TensorId::kKg, chunk, hv), n, s.K, t.k, s.ldk, rows);
  load_tile(run.tokens(TensorId::kAqk, chunk, hv), n, s.C, w.aqk, s.ldc, rows);
  keep_lower(s, rows, w.aqk);
  gemm(rows, s.Vp, s.Kp, {t.k, s.ldk, 1}, w.dh, s.ldv, dv_new, s.ldv);
  multiply_lower_transposed(s, rows, w.aqk, d_o, dv_new, s.ldv, s.Vp, {1, true});
  store_tile(dv_new, s.ldv, run.tokens(TensorId::kDvNew, chunk, hv), n, s.V);
  load_tile(run.tokens(TensorId::kQg, chunk, hv), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kW, chunk, hv), n, s.K, w.x, s.ldk, rows);
  load_chunk_decay(run, chunk, hv, t.decay, t.rest);
  gemm(s.Kp, s.Vp, rows, {t.q, 1, s.ldk}, d_o, s.ldv, w.dh, s.ldv,
       {run.scale, true, t.decay, t.rest});
  gemm(s.Kp, s.Vp, rows, {w.x, 1, s.ldk}, dv_new, s.ldv, w.dh, s.ldv, {-1, true});
}

void reverse_scan(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const int64_t sequence = task.index / run.problem.sizes.HV;
  const int64_t hv = task.index % run.problem.sizes.HV;
  Arena arena(task.scratch);
  const StageScratch w(run.problem, s, arena);
  load_state(run.state(TensorId::kDfinalState, sequence, hv), s, w.dh);
  for (int64_t c = run.chunk_count(sequence) - 1; c >= 0; --c) {
    reverse_chunk(run, run.chunk(sequence, c), hv, w);
  }
  store_state(w.dh, s, run.state(TensorId::kDinitialState, sequence, hv));
}

/// Loads everything the WY stage reads; v' goes to w.y, dv' below it.
void load_wy(const Run& run, const Chunk& chunk, int64_t hv, const StageScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  load_tile(run.tokens(TensorId::kQ, chunk, hv / s.G), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kK, chunk, hv / s.G), n, s.K, t.k, s.ldk, rows);
  load_tile(run.tokens(TensorId::kV, chunk, hv), n, s.V, t.v, s.ldv, rows);
  load_tile(run.tokens(TensorId::kVNew, chunk, hv), n, s.V, w.y, s.ldv, rows);
  load_tile(run.tokens(TensorId::kDvNew, chunk, hv), n, s.V, w.y + rows * s.ldv, s.ldv, rows);
  load_tile(run.tokens(TensorId::kDo, chunk, hv), n, s.V, w.do_r, s.ldv, rows);
  load_tile(run.tokens(TensorId::kA, chunk, hv), n, s.C, w.a, s.ldc, rows);
  load_tile(run.state(TensorId::kH, chunk.row, hv), s.K, s.V, w.h, s.ldv, s.Kp);
  load_tile(run.state(TensorId::kDh, chunk.row, hv), s.K, s.V, w.dh, s.ldv, s.Kp);
  load_column(run.tokens(TensorId::kBeta, chunk, hv), n, t.beta, rows);
  load_gamma(run, chunk, hv, t.decay);
  build_decays(t, s.ldk, rows, s.Kp);
  keep_lower(s, rows, w.a);
}

/// dq, dk and dg through the states: dq1 into dq2, dk into z, W into dkc, k . dkx into dkx.
void combine_wy(const Run& run, int64_t rows, const StageScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Floats d;
  const Vec scale = hn::Set(d, run.scale);
  const float* R = w.do_r + rows * s.ldv;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec b = hn::Set(d, t.beta[i]);
    Vec dbeta = hn::Zero(d);
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldk + c;
      const Vec q = hn::Load(d, t.q + at);
      const Vec k = hn::Load(d, t.k + at);
      const Vec pc = hn::Load(d, t.pc + at);
      const Vec dkx = hn::Mul(hn::Load(d, t.sc + at), hn::Load(d, w.dkx + at));
      const Vec kr = hn::Neg(hn::Mul(pc, hn::Load(d, w.products + rows * s.ldk + at)));
      const Vec dq1 = hn::Mul(hn::Mul(scale, pc), hn::Load(d, w.products + at));
      const Vec row = hn::Mul(b, kr);
      dbeta = hn::MulAdd(kr, k, dbeta);
      hn::Store(dq1, d, w.dq2 + at);
      hn::Store(hn::Add(row, dkx), d, w.z + at);
      hn::Store(hn::MulAdd(q, dq1, hn::Mul(k, row)), d, w.dkc + at);
      hn::Store(hn::Mul(k, dkx), d, w.dkx + at);
    });
    w.dbeta[i] = sum_lanes(d, dbeta) + dot(R + i * s.ldv, t.v + i * s.ldv, s.Vp);
  }
}

/// (5.2), (5.7)-(5.13), (5.27)-(5.29).
void wy_backward(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const Chunk& chunk = run.chunks[static_cast<std::size_t>(task.index / run.problem.sizes.HV)];
  const int64_t hv = task.index % run.problem.sizes.HV;
  Arena arena(task.scratch);
  const StageScratch w(run.problem, s, arena);
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  load_wy(run, chunk, hv, w);
  float* R = w.do_r + rows * s.ldv;
  multiply_lower_transposed(s, rows, w.a, w.y + rows * s.ldv, R, s.ldv, s.Vp);
  transpose(w.h, s.ldv, s.Kp, s.Vp, w.turned, s.ldk);
  gemm(2 * rows, s.Kp, s.Vp, {w.do_r, s.ldv, 1}, w.turned, s.ldk, w.products, s.ldk);
  transpose(w.dh, s.ldv, s.Kp, s.Vp, w.turned, s.ldk);
  gemm(rows, s.Kp, s.Vp, {w.y, s.ldv, 1}, w.turned, s.ldk, w.dkx, s.ldk);
  state_overlap(s, w.h, w.dh, t.pc + (rows - 1) * s.ldk, w.whole);
  zero_tile(w.aqk, s.ldc, rows, s.C);
  zero_tile(w.a, s.ldc, rows, s.C);
  score_products(s, rows, w.do_r, R, w.y, run.scale, w.turned, w.aqk, w.a);
  keep_lower(s, rows, w.aqk);
  keep_lower(s, rows, w.a);
  for (int64_t i = 0; i < rows; ++i) w.a[i * s.ldc + i] = 0;
  combine_wy(run, rows, w);
  accumulate_gate(s, rows, w.dkc, w.dkx, w.whole);
  scale_rows(R, t.beta, s.ldv, rows, s.Vp);
  store_tile(R, s.ldv, run.tokens(TensorId::kDv, chunk, hv), n, s.V);
  store_tile(w.dq2, s.ldk, run.tokens(TensorId::kDqPartial, chunk, hv), n, s.K);
  store_tile(w.z, s.ldk, run.tokens(TensorId::kDkPartial, chunk, hv), n, s.K);
  store_tile(w.dkc, s.ldk, run.tokens(TensorId::kDgPartial, chunk, hv), n, s.K);
  store_column(w.dbeta, run.tokens(TensorId::kDbetaPartial, chunk, hv), n);
  store_tile(w.aqk, s.ldc, run.tokens(TensorId::kDP, chunk, hv), n, s.C);
  store_tile(w.a, s.ldc, run.tokens(TensorId::kDL, chunk, hv), n, s.C);
}

/// Adds the gradients through the scores to the partials in x (dq above dk); W into dkc.
void combine_intra(const Run& run, int64_t rows, bool first, const StageScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const Floats d;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec b = hn::Set(d, t.beta[i]);
    const Vec diagonal = hn::Set(d, w.aqk[i * s.ldc + i]);
    Vec dbeta = hn::Zero(d);
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldk + c;
      const Vec q = hn::Load(d, t.q + at);
      const Vec k = hn::Load(d, t.k + at);
      const Vec dq2 = hn::Load(d, w.dq2 + at);
      const Vec z = hn::Load(d, w.z + at);
      const Vec dkc = hn::Load(d, w.dkc + at);
      const Vec row = hn::Mul(b, z);
      dbeta = hn::MulAdd(z, k, dbeta);
      Vec dq = hn::Add(hn::Load(d, w.x + at), hn::MulAdd(diagonal, k, dq2));
      Vec dk =
          hn::Add(hn::Load(d, w.x + rows * s.ldk + at), hn::MulAdd(diagonal, q, hn::Add(row, dkc)));
      if (!first) {
        dq = hn::Add(hn::Load(d, w.dq_sum + at), dq);
        dk = hn::Add(hn::Load(d, w.dk_sum + at), dk);
      }
      hn::Store(dq, d, w.dq_sum + at);
      hn::Store(dk, d, w.dk_sum + at);
      hn::Store(hn::MulAdd(q, dq2, hn::Mul(k, hn::Sub(row, dkc))), d, w.dkc + at);
    });
    w.dbeta[i] += sum_lanes(d, dbeta);
  }
}

/// dg of one value head: what the partial holds plus suffix sums of W.
void store_gate(const Run& run, const Chunk& chunk, int64_t hv, const StageScratch& w) {
  const Dims& s = run.dims;
  const Floats d;
  accumulate_gate(s, chunk.rows(), w.dkc, nullptr, nullptr);
  load_tile(run.tokens(TensorId::kDgPartial, chunk, hv), chunk.tokens, s.K, w.dkx, s.ldk,
            chunk.rows());
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
      const int64_t at = i * s.ldk + c;
      hn::Store(hn::Add(hn::Load(d, w.dkx + at), hn::Load(d, w.dkc + at)), d, w.dkc + at);
    });
  }
  store_tile(w.dkc, s.ldk, run.tokens(TensorId::kDg, chunk, hv), chunk.tokens, s.K);
}

/// (5.19)-(5.26) and the sums over the value heads of a group.
void intra_backward(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const Chunk& chunk = run.chunks[static_cast<std::size_t>(task.index / run.problem.sizes.H)];
  const int64_t h = task.index % run.problem.sizes.H;
  Arena arena(task.scratch);
  const StageScratch w(run.problem, s, arena);
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  load_tile(run.tokens(TensorId::kQ, chunk, h), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kK, chunk, h), n, s.K, t.k, s.ldk, rows);
  for (int64_t hv = h * s.G; hv < (h + 1) * s.G; ++hv) {
    load_column(run.tokens(TensorId::kBeta, chunk, hv), n, t.beta, rows);
    load_gamma(run, chunk, hv, t.decay);
    build_decays(t, s.ldk, rows, s.Kp);
    load_tile(run.tokens(TensorId::kDP, chunk, hv), n, s.C, w.aqk, s.ldc, rows);
    load_tile(run.tokens(TensorId::kDL, chunk, hv), n, s.C, w.a, s.ldc, rows);
    float* dk = w.x + rows * s.ldk;
    load_tile(run.tokens(TensorId::kDqPartial, chunk, hv), n, s.K, w.x, s.ldk, rows);
    load_tile(run.tokens(TensorId::kDkPartial, chunk, hv), n, s.K, dk, s.ldk, rows);
    load_column(run.tokens(TensorId::kDbetaPartial, chunk, hv), n, w.dbeta, rows);
    score_gradients(s, n, {t.q, t.k, t.decay, t.beta, w.aqk, w.a}, w.intra, {w.dq2, w.z, w.dkc});
    combine_intra(run, rows, hv == h * s.G, w);
    store_column(w.dbeta, run.tokens(TensorId::kDbeta, chunk, hv), n);
    store_gate(run, chunk, hv, w);
  }
  store_tile(w.dq_sum, s.ldk, run.tokens(TensorId::kDq, chunk, h), n, s.K);
  store_tile(w.dk_sum, s.ldk, run.tokens(TensorId::kDk, chunk, h), n, s.K);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(reverse_scan);
HWY_EXPORT(wy_backward);
HWY_EXPORT(intra_backward);

Kernel reverse_scan_kernel() {
  return {Operation::kReverseScan, TaskKind::kSequenceValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(reverse_scan)
            (run, task);
          }};
}

Kernel wy_backward_kernel() {
  return {Operation::kWyBackward, TaskKind::kChunkValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(wy_backward)
            (run, task);
          }};
}

Kernel intra_backward_kernel() {
  return {Operation::kIntraBackward, TaskKind::kChunkHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(intra_backward)(run, task);
          }};
}

}  // namespace kda::cpu
#endif
