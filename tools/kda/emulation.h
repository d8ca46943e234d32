// A float64 model of the chunked forward and backward that rounds where a 16-bit path rounds (4.7
// and 5.4 of docs/semantics.md), and nowhere else: how much error the rounding points themselves
// make.
#pragma once

#include "case.h"

namespace kda::cases {

struct Emulation {
  enum class Form {
    kWu,  ///< w, u and v' = u - w h: (4.11) to (4.14), beta ke and beta v rounded as operands;
          ///< backward by stages: (5.2) to (5.26)
    kR,   ///< v' = r + (A - I) r, r = beta (v - ke h), the first r not rounded: (4.16); backward
          ///< (5.27) to (5.33), R likewise
  };
  Form form = Form::kR;
  int64_t chunk = 32;
  DType type = DType::kBF16;     ///< what is rounded to; kF64 rounds nothing
  DType scores = DType::kF64;    ///< of the operands of L and P; as `type`
  bool two_term_update = false;  ///< kg is the sum of two values of `type`
  DType intra = DType::kF64;  ///< of dP, dL and the keys and queries that they multiply; kF64: sums
                              ///< of two bf16 numbers, which leave nothing that counts
  bool matched_pairs = true;  ///< W multiplies by these as they were rounded
  int64_t segment = 0;  ///< forward: tokens, a multiple of chunk; segments start from Phi S + B
  bool tf32_scores = false;  ///< operands of L and P are tf32, whatever `scores` says
  int64_t kept = 0;  ///< backward, kR: tokens, a multiple of chunk. h is the forward's, from which
                     ///< the walk for v_new starts again so often
  bool fp32_gamma = false;  ///< the sums of (4.1) are rounded to fp32, in log2 units
  double score_error = 0;   ///< relative, standard deviation: of each element of L, at random
};

/// o, h and final_state as fp64 tensors. Takes every option of a forward case; its chunk_size must
/// be a multiple of `chunk`.
TensorMap emulate(const Case& c, const Emulation& emulation);

/// Every gradient of backward_problem as fp64 tensors that hold values of the outputs' dtypes.
TensorMap emulate_backward(const Case& c, const Emulation& emulation);

}  // namespace kda::cases
