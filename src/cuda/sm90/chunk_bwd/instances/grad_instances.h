// The instances of grad: bf16, K a file.
#pragma once

#include <cstddef>

#include "cuda/sm90/chunk_bwd/grad.h"

namespace kda::cuda::sm90 {

struct GradKernel {
  void (*kernel)(GradLaunchParams);
  std::size_t shared_bytes;
  int blocks_per_sm;
};

GradKernel grad_bf16_k64();
GradKernel grad_bf16_k128();

}  // namespace kda::cuda::sm90
