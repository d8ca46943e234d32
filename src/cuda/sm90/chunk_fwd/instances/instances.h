// The instances of sm90_chunk_fwd: element type and K a file, all kernels that have both in each.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"

namespace kda::cuda::sm90 {

struct ChunkForwardKernels {
  void (*prep)(PrepParams);
  void (*prep_beside)(PrepParams);
  std::size_t prep_shared_bytes;
  void (*scan)(ScanParams);
  void (*summary)(ScanParams);
};

struct ComposeKernel {
  void (*kernel)(ComposeParams);
  int threads;
  std::size_t (*shared_bytes)(int groups);
};

ChunkForwardKernels chunk_fwd_bf16_k64();
ChunkForwardKernels chunk_fwd_bf16_k128();
ChunkForwardKernels chunk_fwd_fp16_k64();
ChunkForwardKernels chunk_fwd_fp16_k128();
ComposeKernel compose_k64();
ComposeKernel compose_k128();
void (*clear_kernel())(ClearParams);

}  // namespace kda::cuda::sm90
