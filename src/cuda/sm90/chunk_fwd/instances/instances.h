// The instances of sm90_chunk_fwd: element type and K a file, both kernels in each.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"

namespace kda::cuda::sm90 {

struct ChunkForwardKernels {
  void (*prep)(PrepParams);
  std::size_t prep_shared_bytes;
  void (*scan)(ScanParams);
};

ChunkForwardKernels chunk_fwd_bf16_k64();
ChunkForwardKernels chunk_fwd_bf16_k128();
ChunkForwardKernels chunk_fwd_fp16_k64();
ChunkForwardKernels chunk_fwd_fp16_k128();

}  // namespace kda::cuda::sm90
