// The walks of sm90_chunk_bwd: element type and K a file.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"

namespace kda::cuda::sm90 {

struct BackwardScans {
  void (*rescan)(ScanParams);
  void (*reverse)(ScanParams);
};

BackwardScans backward_scans_bf16_k64();
BackwardScans backward_scans_bf16_k128();
BackwardScans backward_scans_fp16_k64();
BackwardScans backward_scans_fp16_k128();

}  // namespace kda::cuda::sm90
