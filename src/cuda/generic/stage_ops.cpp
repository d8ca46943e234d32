// The stages as operations of their own.
#include "cuda/generic/pipeline.h"

namespace kda::cuda {

using enum TensorId;

void stage_gate_cumsum(Pipeline& run) {
  ActivateParams params;
  params.gate = run.gate();
  params.gamma = run[kGamma];
  params.heads = run.heads();
  params.sequences = run.sequences();
  run(launch_activate, params);
  run.finish();
}

void stage_intra(Pipeline& run) {
  IntraWuParams params = intra_wu_inputs(run, {{}, {}, run[kBeta], run[kGamma]});
  params.Aqk = run[kAqk];
  params.A = run[kA];
  run(launch_intra_wu, params);
  run.finish();
}

void stage_wu(Pipeline& run) {
  IntraWuParams params = intra_wu_inputs(run, {{}, {}, run[kBeta], run[kGamma]});
  params.given_A = run[kA];
  params.w = run[kW];
  params.u = run[kU];
  params.kg = run[kKg];
  params.qg = run[kQg];
  run(launch_intra_wu, params);
  run.finish();
}

void stage_state_scan(Pipeline& run) {
  const bool raw = run.has(kDqRaw);
  const Tensor h = raw ? run.checkpoints() : run[kH];
  run(launch_state_scan,
      StateScanParams{run[kKg], run[kW], run[kU], run[kGamma], run.state(kInitialState), h,
                      run[kVNew], run.state(kFinalState), run.heads(), run.sequences()});
  if (raw) {
    run(launch_dq_raw, DqRawParams{run[kDo], h, run[kDqRaw], run.heads(), run.sequences()});
    run.copy_out(kH, h);
  }
  run.finish();
}

void stage_output(Pipeline& run) {
  run(launch_output, OutputParams{run[kQ],
                                  {},
                                  run[kGamma],
                                  run[kAqk],
                                  run[kH],
                                  run[kVNew],
                                  run[kO],
                                  run.scale(),
                                  run.heads(),
                                  run.sequences()});
  run.finish();
}

void stage_reverse_scan(Pipeline& run) {
  run(launch_reverse_scan,
      ReverseScanParams{run[kQg], run[kKg], run[kW], run[kGamma], run[kAqk], run[kDo],
                        run.state(kDfinalState), run[kDh], run[kDvNew], run.state(kDinitialState),
                        run.scale(), run.heads(), run.sequences()});
  run.finish();
}

void stage_wy_bwd(Pipeline& run) {
  const Sizes& sizes = run.problem().sizes;
  const Tensor R = run.tokens(sizes.HV, sizes.V);
  run(launch_wy_bwd, WyBackwardParams{run[kQ],
                                      run[kK],
                                      run[kV],
                                      {},
                                      {},
                                      run[kBeta],
                                      run[kGamma],
                                      run[kA],
                                      run[kVNew],
                                      run[kDvNew],
                                      run[kDo],
                                      run[kH],
                                      run[kDh],
                                      R,
                                      run[kDqPartial],
                                      run[kDkPartial],
                                      run[kDv],
                                      run[kDgPartial],
                                      run[kDbetaPartial],
                                      run[kDP],
                                      run[kDL],
                                      run.scale(),
                                      run.heads(),
                                      run.sequences()});
  run.finish();
}

void stage_intra_bwd(Pipeline& run) {
  const Sizes& sizes = run.problem().sizes;
  const bool grouped = sizes.HV != sizes.H;
  const auto per_value_head = [&](TensorId id) {
    return grouped && run.has(id) ? run.tokens(sizes.HV, sizes.K) : run[id];
  };
  const Tensor dq = per_value_head(kDq);
  const Tensor dk = per_value_head(kDk);
  run(launch_intra_bwd, IntraBackwardParams{run[kQ],
                                            run[kK],
                                            {},
                                            {},
                                            run[kBeta],
                                            run[kGamma],
                                            run[kDP],
                                            run[kDL],
                                            run[kDqPartial],
                                            run[kDkPartial],
                                            run[kDgPartial],
                                            run[kDbetaPartial],
                                            dq,
                                            dk,
                                            run[kDg],
                                            run[kDbeta],
                                            run.heads(),
                                            run.sequences()});
  if (grouped) {
    ActivateBackwardParams sums;
    sums.groups = run.group_sums({{{kDq, dq, {}, {}}, {kDk, dk, {}, {}}}});
    sums.heads = run.heads();
    sums.sequences = run.sequences();
    run(launch_activate_bwd, sums);
  }
  run.finish();
}

}  // namespace kda::cuda
