#include "cuda/launch.h"
#include "cuda/sm90/recurrent/instances/instances.h"

namespace kda::cuda::sm90 {
namespace {

__global__ void sm90_recurrent_start(unsigned long long* taken) {
  cudaTriggerProgrammaticLaunchCompletion();
  *taken = 0;
}

}  // namespace

Status launch_recurrent_start(unsigned long long* taken, cudaStream_t stream) {
  return launch({"sm90_recurrent_start", 1, 1}, sm90_recurrent_start, taken, stream);
}

}  // namespace kda::cuda::sm90
