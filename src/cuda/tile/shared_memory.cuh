#pragma once

namespace kda::cuda {

/// The dynamic shared memory of a kernel.
template <class Real>
__device__ __forceinline__ Real* shared_memory() {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return reinterpret_cast<Real*>(shared_bytes);
}

}  // namespace kda::cuda
