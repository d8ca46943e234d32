// (4.13)-(4.15) on Hopper: what the launch takes, and the kernel's parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "cuda/generic/stages.h"
#include "cuda/sm90/state_scan/config.h"
#include "kda/problem.h"

namespace kda::cuda::sm90 {

/// Tensor maps are rank 4, innermost dimension first: (K, HV, T, B), (V, HV, T, B), (V, K, HV, NC).
struct ScanParams {
  CUtensorMap kg, w;   ///< boxes of 64 channels x 64 tokens
  CUtensorMap u;       ///< boxes of 64 columns x 64 tokens
  CUtensorMap grad_o;  ///< as u; only with dq_raw
  CUtensorMap h;       ///< boxes of 64 columns x K channels
  CUtensorMap v_new;   ///< as u
  Tensor gamma;
  Tensor initial_state;
  Tensor final_state;
  Tensor v_new_rows;  ///< absent: v_new is not wanted
  Tensor dq_raw;
  Heads heads;
  Sequences sequences;
  bool has_h;
  int64_t dq_part;  ///< elements between the parts of dq_raw; 0: there is one
};

/// A kernel and what its launch needs.
struct ScanKernel {
  void (*kernel)(ScanParams);
  int32_t v_tile;
  int32_t threads;
  std::size_t shared_bytes;
};

/// A scan, and dq_raw if both its tensors are there.
struct ScanRequest {
  StateScanParams scan;
  Tensor grad_o, dq_raw;
  int64_t dq_part = 0;  ///< as in ScanParams
};

/// Parts of dq_raw that a scan of V columns leaves, each a sum over as many of them.
int64_t raw_dq_parts(int64_t V);

/// dq_raw as the sum of its parts [B,T,HV,K] in their order.
struct RawDqSumParams {
  Tensor part;   ///< the first
  int64_t step;  ///< elements to the next
  int64_t parts;
  Tensor dq_raw;
  Heads heads;
  Sequences sequences;
};
Status launch_raw_dq_sum(const RawDqSumParams& params, bool fp64, cudaStream_t stream);

/// "" or the feature of the problem that the kernel lacks.
std::string state_scan_obstacle(const Problem& problem);

/// The scan of a problem without obstacle.
Status launch_state_scan(const ScanRequest& request, bool fp64, cudaStream_t stream);

/// The same by a kernel of the caller's choice.
Status launch_state_scan(const ScanRequest& request, const ScanKernel& kernel, cudaStream_t stream);

}  // namespace kda::cuda::sm90
