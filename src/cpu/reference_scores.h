// Scores of one chunk and their triangular inverse.
#pragma once

#include <cstdint>

#include "cpu/reference_preprocess.h"

namespace kda::reference {

/// (4.4)-(4.7) of one chunk and value head. Fill gamma, load, compute, store.
struct Scores {
  Scores(const Problem& problem, Carver& carver);

  /// q, k and beta of the rows.
  void load(const Preprocess& inputs, const Chunk& chunk, int64_t head);
  /// Aqk and A from n rows.
  void compute(const Problem& problem, int64_t n);
  /// Either view may be false.
  void store(const Chunk& chunk, int64_t head, const View& Aqk_view, const View& A_view) const;

  int64_t K;
  int64_t C;
  double* q;      ///< [C,K]
  double* k;      ///< [C,K]
  double* gamma;  ///< [C,K]
  double* beta;   ///< [C]
  double* Aqk;    ///< [C,C], zero above the diagonal
  double* A;      ///< [C,C], zero above the diagonal
};

}  // namespace kda::reference
