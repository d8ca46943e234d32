// setmaxnreg: moves registers between the warpgroups of a block. Every thread of a warpgroup calls
// it; the kernel needs a register cap at launch, and each role must be one branch of one if/else.
#pragma once

namespace kda::cuda {

template <int Registers>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace kda::cuda
