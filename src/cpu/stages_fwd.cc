// The stages of the forward as operations of their own. A task is one chunk (or, for the scan, one
// sequence) of one value head; the mathematics is that of chunk-inl.h, fed from stage tensors.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stages_fwd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "cpu/chunk-inl.h"
#include "cpu/cpu_kernels.h"
#include "cpu/cpu_scratch.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// A chunk task: which chunk, which value head, and scratch.
struct StagePlace {
  StagePlace(const Run& run, const Task& task)
      : chunk(run.chunks[static_cast<std::size_t>(task.index / run.problem.sizes.HV)]),
        hv(task.index % run.problem.sizes.HV),
        arena(task.scratch),
        w(run.problem, run.dims, arena) {}

  const Chunk& chunk;
  int64_t hv;
  Arena arena;
  StageScratch w;
};

/// (4.1)-(4.2). The sum carries its rounding error along: gamma is as good as one rounding.
void gate_cumsum(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const StagePlace place(run, task);
  const Chunk& chunk = place.chunk;
  float* tile = place.w.chunk.decay;
  const GateTerms gate = load_gate(run, place.hv, place.w.chunk.bias);
  load_tile(run.tokens(TensorId::kG, chunk, place.hv), chunk.tokens, s.K, tile, s.ldk,
            chunk.tokens);
  apply_gate(gate, tile, s.ldk, chunk.tokens, chunk.tokens, s.Kp);
  const Floats d;
  for_vectors(s.Kp, [&](int64_t c) HWY_ATTR {
    const Vec log2e = hn::Set(d, 0x1.715476p+0f);
    const Vec log2e_rest = hn::Set(d, 0x1.4ae0cp-26f);
    Vec sum = hn::Zero(d);
    Vec rest = hn::Zero(d);
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      const int64_t at = i * s.ldk + c;
      const Vec g = hn::Load(d, tile + at);
      const Vec next = hn::Add(sum, g);
      const Vec taken = hn::Sub(next, sum);
      rest = hn::Add(rest, hn::Add(hn::Sub(sum, hn::Sub(next, taken)), hn::Sub(g, taken)));
      sum = next;
      const Vec low = hn::MulAdd(sum, log2e_rest, hn::Mul(rest, log2e));
      hn::Store(hn::MulAdd(sum, log2e, low), d, tile + at);
    }
  });
  store_tile(tile, s.ldk, run.tokens(TensorId::kGamma, chunk, place.hv), chunk.tokens, s.K);
}

/// (4.4)-(4.7).
void intra(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const StagePlace place(run, task);
  const Chunk& chunk = place.chunk;
  const StageScratch& w = place.w;
  const ChunkTiles& t = w.chunk;
  const int64_t rows = chunk.rows();
  const int64_t h = place.hv / s.G;
  load_tile(run.tokens(TensorId::kQ, chunk, h), chunk.tokens, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kK, chunk, h), chunk.tokens, s.K, t.k, s.ldk, rows);
  load_column(run.tokens(TensorId::kBeta, chunk, place.hv), chunk.tokens, t.beta, rows);
  load_gamma(run, chunk, place.hv, t.decay);
  build_decays(t, s.ldk, rows, s.Kp);
  chunk_scores(s, chunk.tokens, t.q, t.k, t.decay, t.beta, run.scale, w.intra, w.aqk, w.a);
  store_tile(w.aqk, s.ldc, run.tokens(TensorId::kAqk, chunk, place.hv), chunk.tokens, s.C);
  if (!run.wants(TensorId::kA)) return;
  explicit_inverse(s, rows, w.a, w.intra.t, w.aqk);
  store_tile(w.aqk, s.ldc, run.tokens(TensorId::kA, chunk, place.hv), chunk.tokens, s.C);
}

/// A [C, C] stage tensor; what it holds above the diagonal does not count.
void load_lower(const Run& run, TensorId id, const Chunk& chunk, int64_t hv, float* tile) {
  const Dims& s = run.dims;
  load_tile(run.tokens(id, chunk, hv), chunk.tokens, s.C, tile, s.ldc, chunk.rows());
  keep_lower(s, chunk.rows(), tile);
}

/// (4.8)-(4.12).
void wu(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const StagePlace place(run, task);
  const Chunk& chunk = place.chunk;
  const StageScratch& w = place.w;
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  const int64_t hv = place.hv;
  load_tile(run.tokens(TensorId::kQ, chunk, hv / s.G), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kK, chunk, hv / s.G), n, s.K, t.k, s.ldk, rows);
  load_tile(run.tokens(TensorId::kV, chunk, hv), n, s.V, t.v, s.ldv, rows);
  load_column(run.tokens(TensorId::kBeta, chunk, hv), n, t.beta, rows);
  load_gamma(run, chunk, hv, t.decay);
  build_decays(t, s.ldk, rows, s.Kp);
  load_lower(run, TensorId::kA, chunk, hv, w.a);
  multiply_tiles(t.sc, t.k, 1.0f, w.x, s.ldk, rows, s.Kp);
  store_tile(w.x, s.ldk, run.tokens(TensorId::kKg, chunk, hv), n, s.K);
  multiply_tiles(t.pc, t.q, 1.0f, w.x, s.ldk, rows, s.Kp);
  store_tile(w.x, s.ldk, run.tokens(TensorId::kQg, chunk, hv), n, s.K);
  multiply_tiles(t.pc, t.k, 1.0f, w.x, s.ldk, rows, s.Kp);
  scale_rows(w.x, t.beta, s.ldk, rows, s.Kp);
  multiply_lower(s, rows, w.a, w.x, w.products, s.ldk, s.Kp);
  store_tile(w.products, s.ldk, run.tokens(TensorId::kW, chunk, hv), n, s.K);
  scale_rows(t.v, t.beta, s.ldv, rows, s.Vp);
  multiply_lower(s, rows, w.a, t.v, w.y, s.ldv, s.Vp);
  store_tile(w.y, s.ldv, run.tokens(TensorId::kU, chunk, hv), n, s.V);
}

/// One chunk of the scan: (4.13)-(4.15) and (5.1), the state in w.h.
void scan_chunk(const Run& run, const Chunk& chunk, int64_t hv, const StageScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  store_tile(w.h, s.ldv, run.state(TensorId::kH, chunk.row, hv), s.K, s.V);
  if (run.wants(TensorId::kDqRaw)) {
    load_tile(run.tokens(TensorId::kDo, chunk, hv), n, s.V, w.y, s.ldv, rows);
    transpose(w.h, s.ldv, s.Kp, s.Vp, w.turned, s.ldk);
    gemm(rows, s.Kp, s.Vp, {w.y, s.ldv, 1}, w.turned, s.ldk, w.products, s.ldk);
    store_tile(w.products, s.ldk, run.tokens(TensorId::kDqRaw, chunk, hv), n, s.K);
  }
  load_tile(run.tokens(TensorId::kKg, chunk, hv), n, s.K, t.k, s.ldk, rows);
  load_tile(run.tokens(TensorId::kW, chunk, hv), n, s.K, w.x, s.ldk, rows);
  load_tile(run.tokens(TensorId::kU, chunk, hv), n, s.V, t.v, s.ldv, rows);
  gemm(rows, s.Vp, s.Kp, {w.x, s.ldk, 1}, w.h, s.ldv, t.v, s.ldv, {-1, true});
  store_tile(t.v, s.ldv, run.tokens(TensorId::kVNew, chunk, hv), n, s.V);
  load_chunk_decay(run, chunk, hv, t.decay, t.rest);
  gemm(s.Kp, s.Vp, rows, {t.k, 1, s.ldk}, t.v, s.ldv, w.h, s.ldv, {1, true, t.decay, t.rest});
}

void state_scan(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const int64_t sequence = task.index / run.problem.sizes.HV;
  const int64_t hv = task.index % run.problem.sizes.HV;
  Arena arena(task.scratch);
  const StageScratch w(run.problem, s, arena);
  load_state(run.state(TensorId::kInitialState, sequence, hv), s, w.h);
  for (int64_t c = 0; c < run.chunk_count(sequence); ++c) {
    scan_chunk(run, run.chunk(sequence, c), hv, w);
  }
  store_state(w.h, s, run.state(TensorId::kFinalState, sequence, hv));
}

/// (4.17).
void output(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const StagePlace place(run, task);
  const Chunk& chunk = place.chunk;
  const StageScratch& w = place.w;
  const ChunkTiles& t = w.chunk;
  const int64_t n = chunk.tokens;
  const int64_t rows = chunk.rows();
  load_tile(run.tokens(TensorId::kQ, chunk, place.hv / s.G), n, s.K, t.q, s.ldk, rows);
  load_tile(run.tokens(TensorId::kVNew, chunk, place.hv), n, s.V, t.v, s.ldv, rows);
  load_tile(run.state(TensorId::kH, chunk.row, place.hv), s.K, s.V, w.h, s.ldv, s.Kp);
  load_gamma(run, chunk, place.hv, t.decay);
  build_decays(t, s.ldk, rows, s.Kp);
  load_lower(run, TensorId::kAqk, chunk, place.hv, w.aqk);
  multiply_tiles(t.pc, t.q, run.scale, w.x, s.ldk, rows, s.Kp);
  gemm(rows, s.Vp, s.Kp, {w.x, s.ldk, 1}, w.h, s.ldv, w.y, s.ldv);
  multiply_lower(s, rows, w.aqk, t.v, w.y, s.ldv, s.Vp, {1, true});
  store_tile(w.y, s.ldv, run.tokens(TensorId::kO, chunk, place.hv), n, s.V);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(gate_cumsum);
HWY_EXPORT(intra);
HWY_EXPORT(wu);
HWY_EXPORT(state_scan);
HWY_EXPORT(output);

Kernel gate_cumsum_kernel() {
  return {Operation::kGateCumsum, TaskKind::kChunkValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(gate_cumsum)
            (run, task);
          }};
}

Kernel intra_kernel() {
  return {Operation::kIntra, TaskKind::kChunkValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(intra)
            (run, task);
          }};
}

Kernel wu_kernel() {
  return {Operation::kWu, TaskKind::kChunkValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(wu)
            (run, task);
          }};
}

Kernel state_scan_kernel() {
  return {Operation::kStateScan, TaskKind::kSequenceValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(state_scan)
            (run, task);
          }};
}

Kernel output_kernel() {
  return {Operation::kOutput, TaskKind::kChunkValueHead, scratch_floats<StageScratch>,
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(output)
            (run, task);
          }};
}

}  // namespace kda::cpu
#endif
