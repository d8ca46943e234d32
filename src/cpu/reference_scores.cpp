#include "cpu/reference_scores.h"

#include <algorithm>
#include <cmath>

namespace kda::reference {

Scores::Scores(const Problem& problem, Carver& carver)
    : K(problem.sizes.K),
      C(problem.chunk_size),
      q(carver.take(C, K)),
      k(carver.take(C, K)),
      gamma(carver.take(C, K)),
      beta(carver.take(C)),
      Aqk(carver.take(C, C)),
      A(carver.take(C, C)) {}

void Scores::load(const Preprocess& inputs, const Chunk& chunk, int64_t head) {
  for (int64_t i = 0; i < chunk.n; ++i) {
    const Position at{chunk.batch, chunk.begin + i, head};
    inputs.query(at, q + i * K);
    inputs.key(at, k + i * K);
    beta[i] = inputs.beta(at);
  }
}

void Scores::compute(const Problem& problem, int64_t n) {
  const double s = problem.effective_scale();
  std::fill_n(Aqk, C * C, 0.0);
  std::fill_n(A, C * C, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    double* row = A + i * C;
    row[i] = 1;
    for (int64_t j = 0; j <= i; ++j) {
      double P = 0;
      double L = 0;
      for (int64_t x = 0; x < K; ++x) {
        // j <= i: the exponent is not positive, so nothing overflows.
        const double E = std::exp2(gamma[i * K + x] - gamma[j * K + x]);
        P += q[i * K + x] * k[j * K + x] * E;
        L += k[i * K + x] * k[j * K + x] * E;
      }
      Aqk[i * C + j] = s * P;  // (4.5)
      if (j == i) continue;
      L *= beta[i];  // (4.6)
      // (4.7) by forward substitution: row i of A is e_i minus L_ij times the rows above.
      for (int64_t x = 0; x <= j; ++x) row[x] -= L * A[j * C + x];
    }
  }
}

void Scores::store(const Chunk& chunk, int64_t head, const View& Aqk_view,
                   const View& A_view) const {
  store_chunk(Aqk_view, chunk, head, C, Aqk);
  store_chunk(A_view, chunk, head, C, A);
}

}  // namespace kda::reference
