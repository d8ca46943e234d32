// The instances of sm90_recurrent: two layouts, two state types.
#pragma once

#include <cstddef>

#include "cuda/recurrent/recurrent.h"

namespace kda::cuda::sm90 {

struct Params : RecurrentParams {
  unsigned long long* taken = nullptr;  ///< items beyond one a stage; absent if there are none
};

/// Zeroes the counter. The next kernel may start at once.
Status launch_recurrent_start(unsigned long long* taken, cudaStream_t stream);

struct RecurrentKernel {
  void (*kernel)(Params);
  std::size_t shared_bytes;
};

RecurrentKernel recurrent_k_first_fp32();
RecurrentKernel recurrent_v_first_fp32();
RecurrentKernel recurrent_k_first_bf16();
RecurrentKernel recurrent_v_first_bf16();

/// Defines one of the functions above.
#define KDA_SM90_RECURRENT_INSTANCE(name, Layout, State)                  \
  RecurrentKernel recurrent_##name() {                                    \
    return {sm90_recurrent<Layout<State>, State>, sizeof(Shared<State>)}; \
  }

}  // namespace kda::cuda::sm90
