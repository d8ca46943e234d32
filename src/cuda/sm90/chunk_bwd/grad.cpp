#include "cuda/sm90/chunk_bwd/grad.h"

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/sm90/chunk_bwd/instances/grad_instances.h"

namespace kda::cuda::sm90 {

Status launch_grad(const GradParams& params, bool, cudaStream_t stream) {
  const GradKernel grad = params.heads.K == 64 ? grad_bf16_k64() : grad_bf16_k128();
  int device = 0;
  int sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t items = params.sequences.chunk_rows * params.heads.HV;
  return launch({"sm90_chunk_bwd_grad", std::min(items, int64_t{sms} * grad.blocks_per_sm),
                 2 * params.heads.K, grad.shared_bytes},
                grad.kernel, params, stream);
}

}  // namespace kda::cuda::sm90
