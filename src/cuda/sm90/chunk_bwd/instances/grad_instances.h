// The instances of grad: element type and K a file; a kernel each kind of gate, because the code of
// all kinds would not stay in the instruction cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/chunk_bwd/grad.h"

namespace kda::cuda::sm90 {

struct GradKernel {
  void (*kernel)(GradLaunchParams);
  std::size_t shared_bytes;
  int blocks_per_sm;
};

/// gate: a value of GateParams::kind.
GradKernel grad_bf16_k64(int32_t gate);
GradKernel grad_bf16_k128(int32_t gate);
GradKernel grad_fp16_k64(int32_t gate);
GradKernel grad_fp16_k128(int32_t gate);

}  // namespace kda::cuda::sm90
