// What the models of emulation.h share: matrices, rounding, and one value head of a sequence cut
// into chunks, from the inputs to v_new.
#pragma once

#include <cstdint>
#include <vector>

#include "emulation.h"

namespace kda::cases {

struct Matrix {
  int64_t rows, columns;
  std::vector<double> data;

  Matrix(int64_t m, int64_t n)
      : rows(m), columns(n), data(static_cast<std::size_t>(m) * static_cast<std::size_t>(n)) {}
  double& operator()(int64_t i, int64_t j) {
    return data[static_cast<std::size_t>(i * columns + j)];
  }
  double operator()(int64_t i, int64_t j) const {
    return data[static_cast<std::size_t>(i * columns + j)];
  }
};

Matrix product(const Matrix& a, const Matrix& b);
Matrix transposed(const Matrix& a);
Matrix sum(Matrix a, const Matrix& b);
Matrix difference(Matrix a, const Matrix& b);
Matrix times(Matrix a, double factor);
/// Row i times x[i].
Matrix by_rows(Matrix a, const std::vector<double>& x);

/// To nearest, ties to even, with the format's subnormals; no overflow. Other types than bf16 and
/// fp16 keep the value.
double rounded(double x, DType type);
Matrix rounded(Matrix m, DType type);

/// The decay from row j to row i >= j of a chunk as the scores take it: by the first row of i's
/// block of 16.
class PairDecays {
 public:
  struct Factors {
    bool far;  ///< the columns would overflow; such pairs are exact
    double up, down;
  };

  explicit PairDecays(Matrix G);
  Factors operator()(int64_t i, int64_t j, int64_t c) const;

 private:
  static constexpr int64_t kBlock = 16;
  Matrix G_;
  Matrix up_;
  std::vector<Matrix> down_;  ///< of a block's reference
};

/// One chunk. The letters are those of docs/semantics.md 4, natural logarithms; not rounded but for
/// kg.
struct ChunkOperands {
  int64_t begin, rows;
  Matrix G, q, k, v;
  PairDecays decays;
  std::vector<double> beta;
  Matrix qe, ke;
  Matrix update;  ///< kg, transposed
  Matrix A;       ///< (I + L)^-1
  Matrix P;       ///< scores of q and k, without the scale
};

/// One value head of one sequence.
class EmulatedHead {
 public:
  EmulatedHead(const Case& c, const Emulation& emulation, const TokenRange& range, int64_t n,
               int64_t hv)
      : case_(c), emulation_(emulation), s_(c.forward.sizes), range_(range), n_(n), hv_(hv) {}

 protected:
  /// A state of this head: f(element (k, v), index in the tensor).
  template <class F>
  void each_of_state(Matrix& state, F f) const {
    for (int64_t k = 0; k < s_.K; ++k) {
      for (int64_t v = 0; v < s_.V; ++v) {
        const int64_t in_head = case_.forward.state_v_first ? v * s_.K + k : k * s_.V + v;
        f(state(k, v), (n_ * s_.HV + hv_) * s_.K * s_.V + in_head);
      }
    }
  }
  Matrix state_of(TensorId id) const;

  int64_t row(int64_t token) const { return (range_.batch * s_.T + token) * s_.HV + hv_; }
  int64_t key_row(int64_t token) const {
    return (range_.batch * s_.T + token) * s_.H + hv_ / (s_.HV / s_.H);
  }
  /// Rows of v or do.
  Matrix values(TensorId id, int64_t begin, int64_t rows) const;
  /// The natural-log decay of (3.4), (3.8), not clamped.
  double gate(int64_t token, int64_t k) const;
  double slope() const;
  /// Raw gate plus bias.
  double gate_input(int64_t token, int64_t k) const;

  ChunkOperands operands(int64_t begin, int64_t rows) const;
  Matrix new_values(const ChunkOperands& x, const Matrix& h) const;
  /// A - I, rounded.
  Matrix below_diagonal(const ChunkOperands& x) const;
  /// (4.11), rounded, and A beside it.
  Matrix w_of(const ChunkOperands& x) const;
  void move_on(Matrix& state, const ChunkOperands& x, const Matrix& v_new) const;

  const Case& case_;
  const Emulation& emulation_;
  const Sizes s_;
  const TokenRange range_;
  int64_t n_;
  int64_t hv_;

 private:
  Matrix keys(TensorId id, int64_t begin, int64_t rows) const;
  Matrix cumulative(int64_t begin, int64_t rows) const;
  double beta(int64_t token) const;
  double score_operand(double x) const;
  Matrix scores(const Matrix& x, const Matrix& k, const PairDecays& decays) const;
};

}  // namespace kda::cases
