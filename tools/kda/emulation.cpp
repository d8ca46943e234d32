#include "emulation.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kda::cases {
namespace {

using enum TensorId;

constexpr int64_t kBlock = 16;  ///< rows that refer to one row in the scores

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

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t p = 0; p < a.columns; ++p) {
      for (int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, p) * b(p, j);
    }
  }
  return c;
}

/// To nearest, ties to even, with the format's subnormals; no overflow.
double rounded(double x, DType type) {
  if (type == DType::kF64 || x == 0) return x;
  const int digits = type == DType::kBF16 ? 8 : 11;
  const int least = type == DType::kBF16 ? -126 : -14;
  const int exponent = std::max(std::ilogb(x), least) - digits + 1;
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

Matrix rounded(Matrix m, DType type) {
  for (double& x : m.data) x = rounded(x, type);
  return m;
}

/// One value head of one sequence.
class Head {
 public:
  Head(const Case& c, const Emulation& emulation, const TokenRange& range, int64_t n, int64_t hv)
      : case_(c),
        emulation_(emulation),
        s_(c.forward.sizes),
        range_(range),
        n_(n),
        hv_(hv),
        state_(s_.K, s_.V) {}

  /// Checkpoints go to rows `first` and following of h.
  void run(HostTensor& o, HostTensor& h, int64_t first, HostTensor& final_state) {
    each_of_state([&](double& x, int64_t index) {
      if (const HostTensor* h0 = case_.input(kInitialState)) x = h0->get(index);
    });
    const int64_t per_row = case_.forward.chunk_size;
    for (int64_t begin = range_.begin; begin < range_.end; begin += emulation_.chunk) {
      const int64_t done = begin - range_.begin;
      if (done % per_row == 0) store_checkpoint(h, first + done / per_row);
      const int64_t rows = std::min(emulation_.chunk, range_.end - begin);
      const Matrix out = chunk(begin, rows);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t v = 0; v < s_.V; ++v) o.set(row(begin + i) * s_.V + v, out(i, v));
      }
    }
    each_of_state([&](double& x, int64_t index) { final_state.set(index, x); });
  }

 private:
  template <class F>
  void each_of_state(F f) {
    for (int64_t k = 0; k < s_.K; ++k) {
      for (int64_t v = 0; v < s_.V; ++v) {
        const int64_t in_head = case_.forward.state_v_first ? v * s_.K + k : k * s_.V + v;
        f(state_(k, v), (n_ * s_.HV + hv_) * s_.K * s_.V + in_head);
      }
    }
  }

  void store_checkpoint(HostTensor& h, int64_t row) const {
    const int64_t size = s_.K * s_.V;
    for (int64_t i = 0; i < size; ++i) {
      h.set((row * s_.HV + hv_) * size + i,
            rounded(state_.data[static_cast<std::size_t>(i)], emulation_.type));
    }
  }

  int64_t row(int64_t token) const { return (range_.batch * s_.T + token) * s_.HV + hv_; }

  /// Rows of q or k as the recurrence sees them: (3.2).
  Matrix keys(TensorId id, int64_t begin, int64_t rows) const {
    const HostTensor& t = *case_.input(id);
    const int64_t head = hv_ / (s_.HV / s_.H);
    Matrix m(rows, s_.K);
    for (int64_t i = 0; i < rows; ++i) {
      double squares = 0;
      for (int64_t k = 0; k < s_.K; ++k) {
        m(i, k) = t.get(((range_.batch * s_.T + begin + i) * s_.H + head) * s_.K + k);
        squares += m(i, k) * m(i, k);
      }
      if (!case_.forward.qk_l2norm) continue;
      for (int64_t k = 0; k < s_.K; ++k) m(i, k) /= std::sqrt(squares + 1e-6);
    }
    return m;
  }

  /// (3.4), (3.8).
  double gate(int64_t token, int64_t k) const {
    const Problem& p = case_.forward;
    double z = case_.input(kG)->get(row(token) * s_.K + k);
    if (p.gate == Gate::kNone) return z;
    if (const HostTensor* bias = case_.input(kDtBias)) z += bias->get(hv_ * s_.K + k);
    const HostTensor* A_log = case_.input(kALog);
    const double a = A_log == nullptr ? 1 : std::exp(A_log->get(hv_));
    if (p.gate == Gate::kLowerBound) return p.lower_bound / (1 + std::exp(-a * z));
    return -a * (z > 30 ? z : std::log1p(std::exp(z)));
  }

  /// (4.1) with the clamp of 6.5, natural logarithm.
  Matrix cumulative(int64_t begin, int64_t rows) const {
    Matrix G(rows, s_.K);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < s_.K; ++k) {
        G(i, k) = std::max(gate(begin + i, k), -40.0) + (i > 0 ? G(i - 1, k) : 0.0);
      }
    }
    return G;
  }

  double beta(int64_t token) const {
    const double x = case_.input(kBeta)->get(row(token));
    if (!case_.forward.beta_sigmoid) return x;
    return (case_.forward.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-x));
  }

  /// x_i . k_j decayed from j to i, j <= i.
  Matrix scores(const Matrix& x, const Matrix& k, const Matrix& G) const {
    const DType type = emulation_.rounded_scores ? emulation_.type : DType::kF64;
    Matrix m(x.rows, x.rows);
    for (int64_t i = 0; i < x.rows; ++i) {
      const int64_t reference = i / kBlock * kBlock;
      for (int64_t j = 0; j <= i; ++j) {
        for (int64_t c = 0; c < s_.K; ++c) {
          const double between = G(reference, c);
          // Beyond this the columns of a diagonal block would overflow; such pairs are exact.
          const bool far = j >= reference && between - G(j, c) > 75;
          m(i, j) += far ? x(i, c) * k(j, c) * std::exp(G(i, c) - G(j, c))
                         : rounded(x(i, c) * std::exp(G(i, c) - between), type) *
                               rounded(k(j, c) * std::exp(between - G(j, c)), type);
        }
      }
    }
    return m;
  }

  /// (I + L)^-1, L = strict lower triangle of diag(beta) scores.
  static Matrix inverse(const Matrix& kk, const std::vector<double>& beta) {
    Matrix A(kk.rows, kk.rows);
    for (int64_t i = 0; i < kk.rows; ++i) {
      A(i, i) = 1;
      for (int64_t p = 0; p < i; ++p) {
        const double L = beta[static_cast<std::size_t>(i)] * kk(i, p);
        for (int64_t j = 0; j <= p; ++j) A(i, j) -= L * A(p, j);
      }
    }
    return A;
  }

  Matrix new_values(const Matrix& A, const Matrix& ke, const Matrix& v, const Matrix& h,
                    const std::vector<double>& beta) const {
    const DType type = emulation_.type;
    const auto by_rows = [&](Matrix m) {
      for (int64_t i = 0; i < m.rows; ++i) {
        for (int64_t j = 0; j < m.columns; ++j) m(i, j) *= beta[static_cast<std::size_t>(i)];
      }
      return rounded(std::move(m), type);
    };
    if (emulation_.form == Emulation::Form::kWu) {
      const Matrix stored = rounded(A, type);
      const Matrix w = rounded(product(stored, by_rows(ke)), type);
      const Matrix u = rounded(product(stored, by_rows(v)), type);
      return rounded(difference(u, product(w, h)), type);
    }
    Matrix T = A;
    for (int64_t i = 0; i < T.rows; ++i) {
      for (int64_t j = 0; j < T.columns; ++j) T(i, j) *= beta[static_cast<std::size_t>(j)];
    }
    const Matrix r = rounded(difference(v, product(rounded(ke, type), h)), type);
    return rounded(product(rounded(T, type), r), type);
  }

  static Matrix difference(Matrix a, const Matrix& b) {
    for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] -= b.data[i];
    return a;
  }

  /// o of a chunk; moves the state on: (4.14) to (4.17).
  Matrix chunk(int64_t begin, int64_t rows) {
    const DType type = emulation_.type;
    const Matrix G = cumulative(begin, rows);
    const Matrix q = keys(kQ, begin, rows);
    const Matrix k = keys(kK, begin, rows);
    Matrix qe = q;
    Matrix ke = k;
    Matrix update(s_.K, rows);  // kg, transposed
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < s_.K; ++c) {
        qe(i, c) *= std::exp(G(i, c));
        ke(i, c) *= std::exp(G(i, c));
        const double kg = k(i, c) * std::exp(G(rows - 1, c) - G(i, c));
        const double high = rounded(kg, type);
        update(c, i) = high + (emulation_.two_term_update ? rounded(kg - high, type) : 0);
      }
    }
    Matrix v(rows, s_.V);
    std::vector<double> betas;
    for (int64_t i = 0; i < rows; ++i) {
      betas.push_back(beta(begin + i));
      for (int64_t j = 0; j < s_.V; ++j) v(i, j) = case_.input(kV)->get(row(begin + i) * s_.V + j);
    }
    const Matrix h = rounded(state_, type);
    const Matrix v_new = new_values(inverse(scores(k, k, G), betas), ke, v, h, betas);
    const double scale = case_.forward.effective_scale();
    Matrix P = scores(q, k, G);
    // Aqk carries the scale before it is rounded; a factor on o beside it is the same up to fp32.
    for (double& x : P.data) x = rounded(x * scale, type) / scale;
    Matrix o = product(rounded(qe, type), h);
    const Matrix within = product(P, v_new);
    for (std::size_t i = 0; i < o.data.size(); ++i)
      o.data[i] = scale * (o.data[i] + within.data[i]);
    const Matrix change = product(update, v_new);
    for (int64_t c = 0; c < s_.K; ++c) {
      const double kept = std::exp(G(rows - 1, c));
      for (int64_t j = 0; j < s_.V; ++j) state_(c, j) = kept * state_(c, j) + change(c, j);
    }
    return o;
  }

  const Case& case_;
  const Emulation& emulation_;
  const Sizes s_;
  const TokenRange range_;
  int64_t n_;
  int64_t hv_;
  Matrix state_;
};

}  // namespace

TensorMap emulate(const Case& c, const Emulation& emulation) {
  const Sizes& s = c.forward.sizes;
  const std::vector<TokenRange> sequences = sequences_of(c);
  HostTensor o(DType::kF64, {s.B, s.T, s.HV, s.V});
  const auto N = static_cast<int64_t>(sequences.size());
  const bool v_first = c.forward.state_v_first;
  HostTensor state(DType::kF64, {N, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  HostTensor h(DType::kF64, {c.forward.chunk_rows(), s.HV, s.K, s.V});
  const int64_t per_row = c.forward.chunk_size;
  int64_t first = 0;
  for (int64_t n = 0; n < N; ++n) {
    const TokenRange& range = sequences[static_cast<std::size_t>(n)];
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      Head(c, emulation, range, n, hv).run(o, h, first, state);
    }
    first += (range.end - range.begin + per_row - 1) / per_row;
  }
  return {{kO, std::move(o)}, {kH, std::move(h)}, {kFinalState, std::move(state)}};
}

}  // namespace kda::cases
