// The forward pass as a composition of the stages, all intermediates in the compute type.
#include "cuda/generic/pipeline.h"

namespace kda::cuda {

using enum TensorId;

void chunk_fwd(Pipeline& run) {
  const Sizes& sizes = run.problem().sizes;
  const int64_t C = run.problem().chunk_size;
  const Heads heads = run.heads();
  const Activations x = activate(run);
  const Tensor Aqk = run.tokens(sizes.HV, C);
  const Tensor A = run.has(kA) ? run.tokens(sizes.HV, C) : Tensor{};
  const Tensor w = run.tokens(sizes.HV, sizes.K);
  const Tensor kg = run.tokens(sizes.HV, sizes.K);
  const Tensor u = run.tokens(sizes.HV, sizes.V);
  IntraWuParams params = intra_wu_inputs(run, x);
  params.Aqk = Aqk;
  params.A = A;
  params.w = w;
  params.u = u;
  params.kg = kg;
  run(launch_intra_wu, params);
  const Tensor h = run.checkpoints();
  const Tensor& v_new = u;
  run(launch_state_scan, StateScanParams{kg, w, u, x.gamma, run.state(kInitialState), h, v_new,
                                         run.state(kFinalState), heads, run.sequences()});
  run(launch_output, OutputParams{run[kQ], x.rq, x.gamma, Aqk, h, v_new, run[kO], run.scale(),
                                  heads, run.sequences()});
  run.copy_out(kH, h);
  run.copy_out(kAqk, Aqk);
  run.copy_out(kA, A);
  run.finish();
}

}  // namespace kda::cuda
