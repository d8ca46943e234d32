// How the kernels with one block a chunk and value head are launched.
#pragma once

#include "cuda/launch.h"

namespace kda::cuda {

/// The instance for the type that is computed in, with `elements` of it in shared memory.
template <class Params>
Status launch_chunks(const char* name, void (*fp32)(Params), void (*fp64_kernel)(Params),
                     int threads, int elements, const Params& p, bool fp64, cudaStream_t stream) {
  const std::size_t element = fp64 ? sizeof(double) : sizeof(float);
  const LaunchShape shape{name, p.sequences.chunk_rows * p.heads.HV, threads,
                          static_cast<std::size_t>(elements) * element};
  return launch(shape, fp64 ? fp64_kernel : fp32, p, stream);
}

}  // namespace kda::cuda
