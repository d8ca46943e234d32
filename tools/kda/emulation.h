// A float64 model of the chunked forward that rounds where a 16-bit path rounds (4.7 of
// docs/semantics.md), and nowhere else: how much error the rounding points themselves make.
#pragma once

#include "case.h"

namespace kda::cases {

struct Emulation {
  enum class Form {
    kWu,  ///< w, u and v' = u - w h: (4.11) to (4.14), beta ke and beta v rounded as operands
    kR,   ///< v' = T (v - ke h), T = A diag(beta): (4.16)
  };
  Form form = Form::kR;
  int64_t chunk = 32;
  DType type = DType::kBF16;     ///< what is rounded to; kF64 rounds nothing
  bool rounded_scores = false;   ///< the operands of L and P are of `type` too, else exact
  bool two_term_update = false;  ///< kg is the sum of two values of `type`
};

/// o, h and final_state as fp64 tensors. Takes every option of a forward case; its chunk_size must
/// be a multiple of `chunk`.
TensorMap emulate(const Case& c, const Emulation& emulation);

}  // namespace kda::cases
