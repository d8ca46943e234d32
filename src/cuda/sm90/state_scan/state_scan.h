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
  CUtensorMap kg, w;  ///< boxes of 64 channels x 64 tokens
  CUtensorMap u;      ///< boxes of 64 columns x 64 tokens
  CUtensorMap h;      ///< boxes of 64 columns x K channels
  CUtensorMap v_new;  ///< as u
  Tensor gamma;
  Tensor initial_state;
  Tensor final_state;
  Tensor v_new_rows;  ///< absent: v_new is not wanted
  Heads heads;
  Sequences sequences;
  bool has_h;
};

/// A kernel and what its launch needs.
struct ScanKernel {
  void (*kernel)(ScanParams);
  int32_t v_tile;
  int32_t threads;
  std::size_t shared_bytes;
};

/// "" or the feature of the problem that the kernel lacks.
std::string state_scan_obstacle(const Problem& problem);

/// Every address can be reached by TMA: multiples of 16.
bool state_scan_takes(const StateScanParams& params);

/// The scan of a problem without obstacle, the same as the generic launch_state_scan.
Status launch_state_scan(const StateScanParams& params, bool fp64, cudaStream_t stream);

/// The same with a shape of the caller's choice; V must be a multiple of v_tile * cluster.
Status launch_state_scan(const StateScanParams& params, const ScanKernel& kernel,
                         cudaStream_t stream);

}  // namespace kda::cuda::sm90
