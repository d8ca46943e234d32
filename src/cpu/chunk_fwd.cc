// Chunked forward of one sequence and value head: a task walks over its chunks.
//
//   per chunk   load q k v g beta -> scores aqk, system I + L
//               [ke; qg] h         one product against the entering state
//               r = beta (v - ke h), v' = A r        (4.16)
//               o = s qg h + Aqk v'                  (4.17)
//               h = 2^gamma h + kg^T v'              (4.15)
//
// Scratch in floats, at K = V = 128, C = 64: chunk tiles 55 k, score tiles 39 k, x [2C, K] 18 k,
// y [2C, V] 18 k, v' 9 k, aqk, solver 5 k each, h [K, V] 18 k: 168 k floats, 0.66 MB a thread.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_fwd.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <hwy/highway.h>

#include "cpu/chunk-inl.h"
#include "cpu/cpu_kernels.h"
#include "cpu/cpu_scratch.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// What the forward leaves behind where it is asked for.
void save_chunk(const Run& run, const Chunk& chunk, int64_t hv, const ForwardScratch& w) {
  const Dims& s = run.dims;
  store_tile(w.aqk, s.ldc, run.tokens(TensorId::kAqk, chunk, hv), chunk.tokens, s.C);
  if (!run.wants(TensorId::kA)) return;
  // aqk has been used by now: its tile takes A.
  explicit_inverse(s, chunk.rows(), w.solver, w.intra.t, w.aqk);
  store_tile(w.aqk, s.ldc, run.tokens(TensorId::kA, chunk, hv), chunk.tokens, s.C);
}

void forward_chunk(const Run& run, const Chunk& chunk, int64_t hv, const GateTerms& gate,
                   const ForwardScratch& w) {
  const Dims& s = run.dims;
  const ChunkTiles& t = w.chunk;
  const int64_t rows = chunk.rows();
  load_chunk(run, chunk, hv, gate, t);
  chunk_scores(s, chunk.tokens, t.q, t.k, t.decay, t.beta, run.scale, w.intra, w.aqk, w.solver);
  multiply_tiles(t.pc, t.k, 1.0f, w.x, s.ldk, rows, s.Kp);
  multiply_tiles(t.pc, t.q, run.scale, w.x + rows * s.ldk, s.ldk, rows, s.Kp);
  gemm(2 * rows, s.Vp, s.Kp, {w.x, s.ldk, 1}, w.h, s.ldv, w.y, s.ldv);
  residual(s, rows, t.v, t.beta, w.y);
  solve(s, rows, w.solver, w.y, w.v_new, s.ldv, s.Vp);
  float* o = w.y + rows * s.ldv;
  multiply_lower(s, rows, w.aqk, w.v_new, o, s.ldv, s.Vp, {1, true});
  store_tile(o, s.ldv, run.tokens(TensorId::kO, chunk, hv), chunk.tokens, s.V);
  multiply_tiles(t.sc, t.k, 1.0f, w.x, s.ldk, rows, s.Kp);
  gemm(s.Kp, s.Vp, rows, {w.x, 1, s.ldk}, w.v_new, s.ldv, w.h, s.ldv,
       {1, true, t.pc + (rows - 1) * s.ldk, t.rest});
  save_chunk(run, chunk, hv, w);
}

void chunk_forward(const Run& run, const Task& task) {
  const Dims& s = run.dims;
  const int64_t HV = run.problem.sizes.HV;
  const int64_t sequence = task.index / HV;
  const int64_t hv = task.index % HV;
  Arena arena(task.scratch);
  const ForwardScratch w(run.problem, s, arena);
  const GateTerms gate = load_gate(run, hv, w.chunk.bias);
  load_state(run.state(TensorId::kInitialState, sequence, hv), s, w.h);
  for (int64_t c = 0; c < run.chunk_count(sequence); ++c) {
    const Chunk chunk = run.chunk(sequence, c);
    store_tile(w.h, s.ldv, run.state(TensorId::kH, chunk.row, hv), s.K, s.V);
    forward_chunk(run, chunk, hv, gate, w);
  }
  store_state(w.h, s, run.state(TensorId::kFinalState, sequence, hv));
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

HWY_EXPORT(chunk_forward);

Kernel chunk_forward_kernel() {
  return {Operation::kChunkForward, TaskKind::kSequenceValueHead,
          [](const Problem& problem) { return scratch_floats<ForwardScratch>(problem); },
          [](const Run& run, const Task& task) {
            HWY_DYNAMIC_DISPATCH(chunk_forward)
            (run, task);
          }};
}

}  // namespace kda::cpu
#endif
