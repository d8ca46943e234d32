#include "cuda/sm90/chunk_fwd/compose.cuh"
#include "cuda/sm90/chunk_fwd/instances/instances.h"

namespace kda::cuda::sm90 {
ComposeKernel compose_k64() {
  return {sm90_chunk_fwd_compose<64>, kComposeThreads<64>, ComposeShared<64>::bytes};
}
ComposeKernel compose_k128() {
  return {sm90_chunk_fwd_compose<128>, kComposeThreads<128>, ComposeShared<128>::bytes};
}
}  // namespace kda::cuda::sm90
