// The instances of recurrent_step: two layouts, two state types, K of 64 and 128.
#pragma once

#include "cuda/recurrent/recurrent.h"

namespace kda::cuda {

using RecurrentKernel = void (*)(RecurrentParams);

RecurrentKernel recurrent_k_first_fp32(int32_t K);
RecurrentKernel recurrent_v_first_fp32(int32_t K);
RecurrentKernel recurrent_k_first_bf16(int32_t K);
RecurrentKernel recurrent_v_first_bf16(int32_t K);

/// Defines one of the functions above.
#define KDA_RECURRENT_INSTANCES(name, Layout, State)                 \
  RecurrentKernel recurrent_##name(int32_t K) {                      \
    return K == 64 ? recurrent_step<Layout<State, 64>, State, 64>    \
                   : recurrent_step<Layout<State, 128>, State, 128>; \
  }

}  // namespace kda::cuda
