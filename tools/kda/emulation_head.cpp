#include "emulation_head.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <utility>

#include "random.h"

namespace kda::cases {

using enum TensorId;

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t p = 0; p < a.columns; ++p) {
      for (int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, p) * b(p, j);
    }
  }
  return c;
}

Matrix transposed(const Matrix& a) {
  Matrix b(a.columns, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.columns; ++j) b(j, i) = a(i, j);
  }
  return b;
}

Matrix difference(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] -= b.data[i];
  return a;
}

Matrix sum(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}

Matrix times(Matrix a, double factor) {
  for (double& x : a.data) x *= factor;
  return a;
}

Matrix by_rows(Matrix a, const std::vector<double>& x) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.columns; ++j) a(i, j) *= x[static_cast<std::size_t>(i)];
  }
  return a;
}

namespace {

/// To nearest, ties to even, of a finite number that is normal in the format.
double with_digits(double x, int digits) {
  const int dropped = 53 - digits;
  const uint64_t unit = uint64_t{1} << dropped;
  auto bits = std::bit_cast<uint64_t>(x);
  bits += unit / 2 - 1 + ((bits >> dropped) & 1);
  return std::bit_cast<double>(bits & ~(unit - 1));
}

}  // namespace

double rounded(double x, DType type) {
  if ((type != DType::kBF16 && type != DType::kF16) || x == 0) return x;
  const int digits = type == DType::kBF16 ? 8 : 11;
  const int least = type == DType::kBF16 ? -126 : -14;
  const double least_normal = type == DType::kBF16 ? 0x1p-126 : 0x1p-14;
  if (std::isfinite(x) && std::fabs(x) >= least_normal) return with_digits(x, digits);
  const int exponent = least - digits + 1;
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

Matrix rounded(Matrix m, DType type) {
  for (double& x : m.data) x = rounded(x, type);
  return m;
}

namespace {

constexpr uint64_t kErrors = 77;  // the stream of the errors of L

/// (I + L)^-1, L = strict lower triangle of diag(beta) scores; its elements have random errors.
Matrix inverse(const Matrix& kk, const std::vector<double>& beta, double error,
               const Random& random) {
  Matrix A(kk.rows, kk.rows);
  for (int64_t i = 0; i < kk.rows; ++i) {
    A(i, i) = 1;
    for (int64_t p = 0; p < i; ++p) {
      const double wrong = 1 + error * random.normal(static_cast<uint64_t>(i * kk.rows + p));
      const double L = beta[static_cast<std::size_t>(i)] * kk(i, p) * wrong;
      for (int64_t j = 0; j <= p; ++j) A(i, j) -= L * A(p, j);
    }
  }
  return A;
}

}  // namespace

PairDecays::PairDecays(Matrix G) : G_(std::move(G)), up_(G_.rows, G_.columns) {
  for (int64_t first = 0; first < G_.rows; first += kBlock) {
    Matrix down(G_.rows, G_.columns);
    for (int64_t i = 0; i < std::min(first + kBlock, G_.rows); ++i) {
      for (int64_t c = 0; c < G_.columns; ++c) {
        if (i >= first) up_(i, c) = std::exp(G_(i, c) - G_(first, c));
        down(i, c) = std::exp(G_(first, c) - G_(i, c));
      }
    }
    down_.push_back(std::move(down));
  }
}

PairDecays::Factors PairDecays::operator()(int64_t i, int64_t j, int64_t c) const {
  const int64_t block = i / kBlock;
  if (j >= block * kBlock && G_(block * kBlock, c) - G_(j, c) > 75) {
    return {true, std::exp(G_(i, c) - G_(j, c)), 1};
  }
  return {false, up_(i, c), down_[static_cast<std::size_t>(block)](j, c)};
}

Matrix EmulatedHead::state_of(TensorId id) const {
  Matrix state(s_.K, s_.V);
  each_of_state(state, [&](double& x, int64_t index) {
    if (const HostTensor* given = case_.input(id)) x = given->get(index);
  });
  return state;
}

Matrix EmulatedHead::values(TensorId id, int64_t begin, int64_t rows) const {
  Matrix m(rows, s_.V);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < s_.V; ++j) m(i, j) = case_.input(id)->get(row(begin + i) * s_.V + j);
  }
  return m;
}

/// Rows of q or k as the recurrence sees them: (3.2).
Matrix EmulatedHead::keys(TensorId id, int64_t begin, int64_t rows) const {
  const HostTensor& t = *case_.input(id);
  Matrix m(rows, s_.K);
  for (int64_t i = 0; i < rows; ++i) {
    double squares = 0;
    for (int64_t k = 0; k < s_.K; ++k) {
      m(i, k) = t.get(key_row(begin + i) * s_.K + k);
      squares += m(i, k) * m(i, k);
    }
    if (!case_.forward.qk_l2norm) continue;
    for (int64_t k = 0; k < s_.K; ++k) m(i, k) /= std::sqrt(squares + 1e-6);
  }
  return m;
}

double EmulatedHead::slope() const {
  const HostTensor* A_log = case_.input(kALog);
  return A_log == nullptr ? 1 : std::exp(A_log->get(hv_));
}

double EmulatedHead::gate_input(int64_t token, int64_t k) const {
  const HostTensor* bias = case_.input(kDtBias);
  return case_.input(kG)->get(row(token) * s_.K + k) +
         (bias == nullptr ? 0 : bias->get(hv_ * s_.K + k));
}

double EmulatedHead::gate(int64_t token, int64_t k) const {
  const Problem& p = case_.forward;
  const double z = gate_input(token, k);
  if (p.gate == Gate::kNone) return z;
  const double a = slope();
  if (p.gate == Gate::kLowerBound) return p.lower_bound / (1 + std::exp(-a * z));
  return -a * (z > 30 ? z : std::log1p(std::exp(z)));
}

/// (4.1) with the clamp of 6.5, natural logarithm.
Matrix EmulatedHead::cumulative(int64_t begin, int64_t rows) const {
  Matrix G(rows, s_.K);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < s_.K; ++k) {
      G(i, k) = std::max(gate(begin + i, k), -40.0) + (i > 0 ? G(i - 1, k) : 0.0);
    }
  }
  if (emulation_.fp32_gamma) {
    for (double& x : G.data) x = std::numbers::ln2 * static_cast<float>(x / std::numbers::ln2);
  }
  return G;
}

double EmulatedHead::beta(int64_t token) const {
  const double x = case_.input(kBeta)->get(row(token));
  if (!case_.forward.beta_sigmoid) return x;
  return (case_.forward.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-x));
}

double EmulatedHead::score_operand(double x) const {
  constexpr int kTf32Digits = 11;
  if (!emulation_.tf32_scores) return rounded(x, emulation_.scores);
  // What is below the range of fp32 leaves nothing beside the other terms.
  return std::fabs(x) < 0x1p-126 ? 0 : with_digits(x, kTf32Digits);
}

/// x_i . k_j decayed from j to i, j <= i.
Matrix EmulatedHead::scores(const Matrix& x, const Matrix& k, const PairDecays& decays) const {
  Matrix m(x.rows, x.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      for (int64_t c = 0; c < s_.K; ++c) {
        const PairDecays::Factors f = decays(i, j, c);
        const double up = x(i, c) * f.up;
        const double down = k(j, c) * f.down;
        m(i, j) += f.far ? up * down : score_operand(up) * score_operand(down);
      }
    }
  }
  return m;
}

ChunkOperands EmulatedHead::operands(int64_t begin, int64_t rows) const {
  const DType type = emulation_.type;
  const Matrix G = cumulative(begin, rows);
  const Matrix q = keys(kQ, begin, rows);
  const Matrix k = keys(kK, begin, rows);
  std::vector<double> betas;
  for (int64_t i = 0; i < rows; ++i) betas.push_back(beta(begin + i));
  Matrix qe = q;
  Matrix ke = k;
  Matrix update(s_.K, rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < s_.K; ++c) {
      qe(i, c) *= std::exp(G(i, c));
      ke(i, c) *= std::exp(G(i, c));
      const double kg = k(i, c) * std::exp(G(rows - 1, c) - G(i, c));
      const double high = rounded(kg, type);
      update(c, i) = high + (emulation_.two_term_update ? rounded(kg - high, type) : 0);
    }
  }
  const PairDecays decays(G);
  Matrix A = inverse(scores(k, k, decays), betas, emulation_.score_error,
                     Random(static_cast<uint64_t>(row(begin)), kErrors));
  return {begin,
          rows,
          G,
          q,
          k,
          values(kV, begin, rows),
          decays,
          std::move(betas),
          std::move(qe),
          std::move(ke),
          std::move(update),
          std::move(A),
          scores(q, k, decays)};
}

Matrix EmulatedHead::w_of(const ChunkOperands& x) const {
  const DType type = emulation_.type;
  return rounded(product(rounded(x.A, type), rounded(by_rows(x.ke, x.beta), type)), type);
}

Matrix EmulatedHead::below_diagonal(const ChunkOperands& x) const {
  Matrix below = x.A;
  for (int64_t i = 0; i < below.rows; ++i) below(i, i) = 0;
  return rounded(std::move(below), emulation_.type);
}

Matrix EmulatedHead::new_values(const ChunkOperands& x, const Matrix& h) const {
  const DType type = emulation_.type;
  if (emulation_.form == Emulation::Form::kWu) {
    const Matrix u =
        rounded(product(rounded(x.A, type), rounded(by_rows(x.v, x.beta), type)), type);
    return rounded(difference(u, product(w_of(x), h)), type);
  }
  const Matrix r = by_rows(difference(x.v, product(rounded(x.ke, type), h)), x.beta);
  return rounded(sum(r, product(below_diagonal(x), rounded(r, type))), type);
}

/// (4.15).
void EmulatedHead::move_on(Matrix& state, const ChunkOperands& x, const Matrix& v_new) const {
  const Matrix change = product(x.update, v_new);
  for (int64_t c = 0; c < s_.K; ++c) {
    const double kept = std::exp(x.G(x.rows - 1, c));
    for (int64_t j = 0; j < state.columns; ++j) state(c, j) = kept * state(c, j) + change(c, j);
  }
}

}  // namespace kda::cases
