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

/// beta is 1.16 for every token, which bf16 rounds by 3e-3 and fp16 by 3e-4; keys nearly point the
/// same way and decays are slow, so that rounding errors of one sign add up.
inline Case one_beta_for_all_tokens(DType io) {
  CaseSpec spec;
  spec.family = Family::kCorr;
  spec.io = io;
  spec.sizes = {1, 512, 1, 2, 64, 64, 0, 0};
  spec.gradients = false;
  Case c = generate(spec);
  HostTensor& beta = c.inputs.at(TensorId::kBeta);
  for (int64_t i = 0; i < beta.count(); ++i) beta.set(i, 1.16);
  HostTensor& g = c.inputs.at(TensorId::kG);
  for (int64_t i = 0; i < g.count(); ++i) g.set(i, -0.01);
  return c;
}

}  // namespace kda::cases
