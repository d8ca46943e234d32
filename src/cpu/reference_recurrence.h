// One token of the recurrence, shared by the forward and by the backward's recomputation.
#pragma once

#include <cstdint>

#include "cpu/reference_preprocess.h"

namespace kda::reference {

/// The inputs of one token, after section 3.
struct Token {
  Token(const Problem& problem, Carver& carver)
      : q(carver.take(problem.sizes.K)),
        k(carver.take(problem.sizes.K)),
        decay(carver.take(problem.sizes.K)),
        v(carver.take(problem.sizes.V)) {}

  void load(const Preprocess& inputs, const Position& at, int64_t K);

  double* q;
  double* k;
  double* decay;  ///< exp(g)
  double* v;
  double beta = 0;
};

/// (2.1)-(2.4): moves S [K,V] over the token; e and u [V] are its prediction error and its write.
void advance(const Token& token, int64_t K, int64_t V, double* S, double* e, double* u);

}  // namespace kda::reference
