// Cases that the Hopper backward and the model of its rounding are both tried on.
#pragma once

#include <vector>

#include "generate.h"

namespace kda::cases {

/// ddt_bias is a small rest of the sums of pairs of tokens here, 128 numbers.
inline std::vector<CaseSpec> short_sequences_of_correlated_keys() {
  CaseSpec spec;
  spec.family = Family::kCorr;
  spec.io = DType::kBF16;
  spec.sizes = {1, 62, 1, 1, 128, 64, 0, 0};
  spec.cu_seqlens = {0, 1, 44, 44, 45, 48, 62};
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  spec.initial_state = spec.dfinal_state = false;
  std::vector<CaseSpec> specs;
  for (const uint64_t seed : {3, 46}) {
    spec.seed = seed;
    specs.push_back(spec);
  }
  return specs;
}

}  // namespace kda::cases
