// The backward pass as a composition of the stages, in the compact form of (5.27)-(5.33). It
// recomputes h, Aqk and A in the compute type: v_new needs the scan over the states anyway, and a
// saved 16-bit copy would only lose accuracy.
#include "cuda/generic/pipeline.h"

namespace kda::cuda {

using enum TensorId;

namespace {

/// What the forward leaves for the backward.
struct Recomputed {
  Activations x;
  Tensor Aqk, A, w, kg, qg, h, v_new;
};

Recomputed recompute(Pipeline& run) {
  const Sizes& sizes = run.problem().sizes;
  const int64_t C = run.problem().chunk_size;
  const Heads heads = run.heads();
  Recomputed f;
  f.x = activate(run);
  f.Aqk = run.tokens(sizes.HV, C);
  f.A = run.tokens(sizes.HV, C);
  f.w = run.tokens(sizes.HV, sizes.K);
  f.kg = run.tokens(sizes.HV, sizes.K);
  f.qg = run.tokens(sizes.HV, sizes.K);
  f.v_new = run.tokens(sizes.HV, sizes.V);
  const Tensor& u = f.v_new;
  IntraWuParams params = intra_wu_inputs(run, f.x);
  params.Aqk = f.Aqk;
  params.A = f.A;
  params.w = f.w;
  params.u = u;
  params.kg = f.kg;
  params.qg = f.qg;
  run(launch_intra_wu, params);
  f.h = run.checkpoints();
  run(launch_state_scan, StateScanParams{f.kg,
                                         f.w,
                                         u,
                                         f.x.gamma,
                                         run.state(kInitialState),
                                         f.h,
                                         f.v_new,
                                         {},
                                         heads,
                                         run.sequences()});
  return f;
}

}  // namespace

void activations_backward(Pipeline& run, const Tensor& dg_decay, const Tensor& dbeta,
                          const GroupSums& groups) {
  const bool parameters = run.has(kDALog) || run.has(kDdtBias);
  const bool beta = run.problem().beta_sigmoid && run.has(kDbeta);
  if (!run.has(kDg) && !parameters && !beta && groups.count == 0) return;
  ActivateBackwardParams params;
  params.groups = groups;
  params.gate = run.gate();
  params.dg_decay = dg_decay;
  params.dg = run[kDg];
  if (parameters) params.partial = run.gate_partials(run.problem().chunk_rows());
  params.logit = run[kBeta];
  params.dbeta = dbeta;
  if (beta) params.dlogit = run[kDbeta];
  params.beta_factor = run.beta_factor();
  params.heads = run.heads();
  params.sequences = run.sequences();
  run(launch_activate_bwd, params);
  if (parameters) run.reduce_gate(run.problem().chunk_rows());
}

void chunk_bwd(Pipeline& run) {
  const Problem& problem = run.problem();
  const Sizes& sizes = problem.sizes;
  const int64_t C = problem.chunk_size;
  const Heads heads = run.heads();
  const Recomputed f = recompute(run);
  const Activations& x = f.x;
  const Tensor dh = run.checkpoints();
  const Tensor dv_new = run.tokens(sizes.HV, sizes.V);
  run(launch_reverse_scan,
      ReverseScanParams{f.qg, f.kg, f.w, x.gamma, f.Aqk, run[kDo], run.state(kDfinalState), dh,
                        dv_new, run.state(kDinitialState), run.scale(), heads, run.sequences()});
  const Tensor& R = dv_new;  // a block reads its tile of dv_new before it writes that of R
  const Tensor dP = run.tokens(sizes.HV, C);
  const Tensor dL = run.tokens(sizes.HV, C);
  const Tensor dbeta = run.scalars(sizes.HV);
  // The operands of the scans are no longer needed.
  const Tensor& dq = f.qg;
  const Tensor& dk = f.kg;
  const Tensor& dg = f.w;
  run(launch_wy_bwd,
      WyBackwardParams{run[kQ], run[kK], run[kV], x.rq,        x.rk,     x.beta,
                       x.gamma, f.A,     f.v_new, dv_new,      run[kDo], f.h,
                       dh,      R,       dq,      dk,          run[kDv], dg,
                       dbeta,   dP,      dL,      run.scale(), heads,    run.sequences()});
  run(launch_intra_bwd,
      IntraBackwardParams{run[kQ], run[kK], x.rq, x.rk, x.beta, x.gamma, dP, dL, dq, dk, dg, dbeta,
                          dq, dk, dg, problem.beta_sigmoid ? dbeta : run[kDbeta], heads,
                          run.sequences()});
  activations_backward(run, dg, dbeta,
                       run.group_sums({{{kDq, dq, run[kQ], x.rq}, {kDk, dk, run[kK], x.rk}}}));
  run.finish();
}

}  // namespace kda::cuda
