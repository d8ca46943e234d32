// Token by token: (2.1)-(2.5) with all options of section 3 inside. One launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "kda/plan.h"
#include "kda/problem.h"
#include "kda/status.h"

namespace kda::cuda {

struct RecurrentParams {
  Tensor q, k, v, beta;
  GateParams gate;
  Tensor initial_state, final_state;  ///< strides in the order (state, head, k, v)
  Tensor indices;                     ///< absent: sequence i uses state i
  Tensor num_accepted;                ///< absent: all tokens of a sequence run
  Tensor o;
  Sequences sequences;
  Heads heads;
  int32_t columns = 0;      ///< of V, a block of recurrent_step
  int32_t token_block = 0;  ///< tokens in its shared memory together
  int64_t states = 0;       ///< an index outside 0..states-1 skips the sequence
  double scale = 1;
  double beta_factor = 1;
  bool qk_l2norm = false;
  bool beta_sigmoid = false;
  bool copies_states = false;  ///< final_state is memory of its own: also without tokens written
};

RecurrentParams recurrent_params(const Problem& problem, const Args& args);

/// recurrent_step where it takes the problem, else recurrent_any.
Status launch_recurrent(const RecurrentParams& params, bool state_v_first, bool fp64,
                        cudaStream_t stream);

/// Vectorised kernels: K of 64 or 128, fp32 or bf16 states with 16-byte rows.
bool recurrent_step_takes(const RecurrentParams& params, bool state_v_first, bool fp64);
Status launch_recurrent_step(const RecurrentParams& params, bool state_v_first,
                             cudaStream_t stream);

/// Everything else.
Status launch_recurrent_any(const RecurrentParams& params, bool fp64, cudaStream_t stream);

}  // namespace kda::cuda
