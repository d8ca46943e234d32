// Kernels of the generic CUDA leaf: one launcher a stage. Absent tensors have null data. `fp64`
// picks the type that the kernel computes in, fp32 or fp64.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "kda/status.h"

namespace kda::cuda {

/// Packed problems: fills Sequences::offsets and ::entries.
Status launch_chunk_table(const Sequences& sequences, cudaStream_t stream);
/// One of its kernels, to ask whether this build has code for a GPU.
const void* chunk_table_kernel();

/// Copies with conversion and writes zeros from the last used row on.
struct CopyRowsParams {
  static constexpr int kMaxJobs = 12;
  struct Job {
    Tensor source;  ///< absent: only the unused rows are written
    Tensor target;
    int64_t shape[4];
    int32_t row_dim;  ///< 1: tokens are dimension 1; 0: chunk rows are dimension 0
  };
  Job jobs[kMaxJobs];
  int32_t count = 0;
  Sequences sequences;
};
Status launch_copy_rows(const CopyRowsParams& params, bool fp64, cudaStream_t stream);

/// What the chunks need of section 3: gamma (4.1), (4.2) with the gate inside, and where its result
/// is asked for beta = factor sigmoid(logit) (3.12) and 1 / sqrt(sum x^2 + 1e-6) of q and k (3.1).
struct ActivateParams {
  GateParams gate;
  Tensor gamma;        ///< [B,T,HV,K]
  Tensor q, k;         ///< [B,T,H,K]
  Tensor rq, rk;       ///< [B,T,H]; both or neither
  Tensor logit, beta;  ///< [B,T,HV]; both or neither
  double beta_factor = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_activate(const ActivateParams& params, bool fp64, cudaStream_t stream);

/// (4.4)-(4.7) and (4.9)-(4.12). With `given_A` the first half is left out; what is absent of the
/// results is not computed.
struct IntraWuParams {
  Tensor q, k, v, rq, rk, beta, gamma;
  Tensor given_A;  ///< [B,T,HV,C]
  Tensor Aqk, A;   ///< [B,T,HV,C]
  Tensor w, u, kg, qg;
  double scale = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_intra_wu(const IntraWuParams& params, bool fp64, cudaStream_t stream);

/// (4.13)-(4.15). v_new may be u.
struct StateScanParams {
  Tensor kg, w, u, gamma, initial_state;
  Tensor h, v_new, final_state;
  Heads heads;
  Sequences sequences;
};
Status launch_state_scan(const StateScanParams& params, bool fp64, cudaStream_t stream);

/// (5.1).
struct DqRawParams {
  Tensor grad_o, h, dq_raw;
  Heads heads;
  Sequences sequences;
};
Status launch_dq_raw(const DqRawParams& params, bool fp64, cudaStream_t stream);

/// (4.17).
struct OutputParams {
  Tensor q, rq, gamma, Aqk, h, v_new, o;
  double scale = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_output(const OutputParams& params, bool fp64, cudaStream_t stream);

/// (5.3)-(5.6).
struct ReverseScanParams {
  Tensor qg, kg, w, gamma, Aqk, grad_o, dfinal_state;
  Tensor dh, dv_new, dinitial_state;
  double scale = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_reverse_scan(const ReverseScanParams& params, bool fp64, cudaStream_t stream);

/// The WY backward: R = A^T dv_new (5.10), dv (5.11), dP (5.2), dL (5.28); Y = -R h^T (5.29),
/// (5.7), (5.8), (5.13), dbeta with (5.12), and the sums over rows of (5.33). R may be dv_new.
struct WyBackwardParams {
  Tensor q, k, v, rq, rk, beta, gamma, A, v_new, dv_new, grad_o, h, dh;
  Tensor R;
  Tensor dq, dk, dv, dg, dbeta, dP, dL;
  double scale = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_wy_bwd(const WyBackwardParams& params, bool fp64, cudaStream_t stream);

/// (5.19)-(5.25), (5.32), added to the partials; dq and dk per value head.
struct IntraBackwardParams {
  Tensor q, k, rq, rk, beta, gamma, dP, dL;
  Tensor dq_partial, dk_partial, dg_partial, dbeta_partial;  ///< absent: 0
  Tensor dq, dk, dg, dbeta;
  Heads heads;
  Sequences sequences;
};
Status launch_intra_bwd(const IntraBackwardParams& params, bool fp64, cudaStream_t stream);

/// Sums over the value heads of a group in order, then (3.3) where x and r are given.
struct GroupSums {
  struct Job {
    Tensor source;  ///< [B,T,HV,K]
    Tensor x, r;    ///< [B,T,H,K], [B,T,H]
    Tensor target;  ///< [B,T,H,K]
  };
  Job jobs[2];
  int32_t count = 0;
  int64_t B = 1, T = 0;
};

/// (3.5)-(3.7), (3.9)-(3.11), 0 at clamped tokens: dg and `partial`. `partial` [chunk rows, HV,
/// K + 1] receives the sums over the rows of a chunk: K of dz, then one for dA_log. And dlogit by
/// (3.13), and the sums over groups. What is absent is left out.
struct ActivateBackwardParams {
  GroupSums groups;
  GateParams gate;
  Tensor dg_decay;  ///< gradient of the natural-log decay
  Tensor dg;        ///< gradient of the raw gate input
  Tensor partial;
  Tensor logit, dbeta, dlogit;  ///< [B,T,HV]
  double beta_factor = 1;
  Heads heads;
  Sequences sequences;
};
Status launch_activate_bwd(const ActivateBackwardParams& params, bool fp64, cudaStream_t stream);

/// The second stage of the sums over all rows, in fixed order.
struct GateReduceParams {
  Tensor partial, dA_log, ddt_bias;
  int64_t chunk_rows = 0;
  Heads heads;
};
Status launch_gate_reduce(const GateReduceParams& params, bool fp64, cudaStream_t stream);

}  // namespace kda::cuda
