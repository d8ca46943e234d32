// The instances of recurrent_step: two layouts, two state types, K of 64 and 128.
#pragma once

#include <cstddef>

#include "cuda/recurrent/recurrent.h"

namespace kda::cuda {

struct RecurrentKernel {
  void (*kernel)(RecurrentParams);
  std::size_t shared_bytes;  ///< with one token
  std::size_t token_bytes;   ///< for each further one
};

RecurrentKernel recurrent_k_first_fp32(int32_t K);
RecurrentKernel recurrent_v_first_fp32(int32_t K);
RecurrentKernel recurrent_k_first_bf16(int32_t K);
RecurrentKernel recurrent_v_first_bf16(int32_t K);

/// Defines one of the functions above.
#define KDA_RECURRENT_INSTANCES(name, Layout, State)                                             \
  template <int K>                                                                               \
  static RecurrentKernel instance() {                                                            \
    using ThisLayout = Layout<State, K>;                                                         \
    return {recurrent_step<ThisLayout, State, K>, sizeof(RecurrentShared<ThisLayout, State, K>), \
            sizeof(RecurrentToken<K>)};                                                          \
  }                                                                                              \
  RecurrentKernel recurrent_##name(int32_t K) { return K == 64 ? instance<64>() : instance<128>(); }

}  // namespace kda::cuda
