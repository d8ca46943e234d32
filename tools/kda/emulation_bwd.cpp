#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "emulation.h"
#include "emulation_head.h"

namespace kda::cases {
namespace {

using enum TensorId;

Matrix lower(Matrix m, int64_t diagonal) {
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = std::max<int64_t>(i + diagonal + 1, 0); j < m.columns; ++j) m(i, j) = 0;
  }
  return m;
}

double sum_of_products(const Matrix& a, const Matrix& b, int64_t row) {
  double sum = 0;
  for (int64_t j = 0; j < a.columns; ++j) sum += a(row, j) * b(row, j);
  return sum;
}

void add(HostTensor& t, int64_t index, double x) { t.set(index, t.get(index) + x); }

/// What the walks leave of a chunk, at full scale.
struct ChunkGradients {
  Matrix R;       ///< A^T dv'
  Matrix Y;       ///< A^T dw = -R h^T
  Matrix dP, dL;  ///< lower triangles, that of dL strict
  Matrix h, dh, v_new;
};

/// (5.19), (5.20), (5.23) without the diagonal, and the pairs' part of W.
struct IntraSums {
  Matrix dq2, z, dkc, W;
};

class BackwardHead : public EmulatedHead {
 public:
  using EmulatedHead::EmulatedHead;

  /// dq and dk are those of the normalised rows.
  void run(TensorMap& out) {
    Matrix state = state_of(kInitialState);
    Matrix forward = state;
    std::vector<ChunkOperands> chunks;
    std::vector<ChunkGradients> gradients;
    for (int64_t begin = range_.begin; begin < range_.end; begin += emulation_.chunk) {
      chunks.push_back(operands(begin, std::min(emulation_.chunk, range_.end - begin)));
      const Matrix kept = rounded(forward, emulation_.type);
      const int64_t done = begin - range_.begin;
      if (emulation_.kept > 0 && done > 0 && done % emulation_.kept == 0) state = kept;
      const Matrix h = rounded(state, emulation_.type);
      const Matrix v_new = new_values(chunks.back(), h);
      move_on(state, chunks.back(), v_new);
      if (emulation_.kept > 0) move_on(forward, chunks.back(), new_values(chunks.back(), kept));
      const Matrix none(0, 0);
      gradients.push_back({none, none, none, none, emulation_.kept > 0 ? kept : h, none, v_new});
    }
    Matrix D = times(state_of(kDfinalState), 1 / mantissa());
    for (std::size_t c = chunks.size(); c-- > 0;) {
      gradients[c].dh = rounded(D, emulation_.type);
      if (emulation_.form == Emulation::Form::kWu) {
        step_wu(D, chunks[c], gradients[c]);
      } else {
        step_compact(D, chunks[c], gradients[c]);
      }
      finish(chunks[c], gradients[c], out);
    }
    each_of_state(
        D, [&](double& x, int64_t index) { out.at(kDinitialState).set(index, mantissa() * x); });
  }

 private:
  /// The compact form walks with the scale's power of two alone.
  double mantissa() const {
    if (emulation_.form == Emulation::Form::kWu) return 1;
    int exponent = 0;
    return 2 * std::frexp(scale(), &exponent);
  }
  double scale() const { return case_.forward.effective_scale(); }

  void decay(Matrix& D, const ChunkOperands& x) const {
    for (int64_t c = 0; c < s_.K; ++c) {
      for (int64_t j = 0; j < s_.V; ++j) D(c, j) *= std::exp(x.G(x.rows - 1, c));
    }
  }

  /// B2 to B4 of 5.2, rounded as 5.4 says.
  void step_wu(Matrix& D, const ChunkOperands& x, ChunkGradients& g) const {
    const DType type = emulation_.type;
    const Matrix grad_o = values(kDo, x.begin, x.rows);
    const Matrix A = rounded(x.A, type);
    const Matrix Aqk = rounded(times(x.P, scale()), type);
    const Matrix kg = transposed(x.update);
    const Matrix dva = rounded(product(transposed(Aqk), grad_o), type);
    const Matrix dv_new = rounded(sum(dva, product(kg, g.dh)), type);
    decay(D, x);
    D = difference(D, times(product(transposed(rounded(x.qe, type)), grad_o), -scale()));
    D = difference(D, product(transposed(w_of(x)), dv_new));
    const Matrix dw = rounded(times(product(dv_new, transposed(g.h)), -1), type);
    g.R = product(transposed(A), dv_new);
    g.Y = product(transposed(A), dw);
    g.dP = lower(times(product(grad_o, transposed(g.v_new)), scale()), 0);
    const Matrix vb = rounded(by_rows(x.v, x.beta), type);
    const Matrix kb = rounded(by_rows(x.ke, x.beta), type);
    const Matrix M = sum(product(dv_new, transposed(vb)), product(dw, transposed(kb)));
    const Matrix inner = rounded(product(rounded(lower(M, -1), type), transposed(A)), type);
    g.dL = lower(times(product(transposed(A), inner), -1), -1);
  }

  /// (5.31); dh and D are those of the scale's power of two until the end.
  void step_compact(Matrix& D, const ChunkOperands& x, ChunkGradients& g) const {
    const DType type = emulation_.type;
    const double m = mantissa();
    const Matrix grad_o = values(kDo, x.begin, x.rows);
    const Matrix shifted = times(grad_o, scale() / m);
    const Matrix kg = transposed(x.update);
    const Matrix within = product(transposed(rounded(x.P, type)), shifted);
    const Matrix dv_new = sum(within, product(kg, g.dh));
    const Matrix exact_R =
        sum(dv_new, product(transposed(below_diagonal(x)), rounded(dv_new, type)));
    const Matrix R = rounded(exact_R, type);
    decay(D, x);
    D = sum(D, product(transposed(rounded(x.qe, type)), shifted));
    D = difference(
        D, product(transposed(rounded(x.ke, type)), rounded(by_rows(exact_R, x.beta), type)));
    g.dh = times(g.dh, m);
    g.R = times(R, m);
    g.Y = times(product(g.R, transposed(g.h)), -1);
    g.dP = lower(times(product(grad_o, transposed(g.v_new)), scale()), 0);
    g.dL = lower(times(product(g.R, transposed(g.v_new)), -1), -1);
  }

  IntraSums intra(const ChunkOperands& x, const ChunkGradients& g) const {
    IntraSums s{{x.rows, s_.K}, {x.rows, s_.K}, {x.rows, s_.K}, {x.rows, s_.K}};
    for (int64_t i = 0; i < x.rows; ++i) {
      const double beta = x.beta[static_cast<std::size_t>(i)];
      for (int64_t j = 0; j < i; ++j) {
        const double dP = rounded(g.dP(i, j), emulation_.intra);
        const double dL = rounded(g.dL(i, j), emulation_.intra);
        for (int64_t c = 0; c < s_.K; ++c) {
          const PairDecays::Factors f = x.decays(i, j, c);
          const DType type = f.far ? DType::kF64 : emulation_.intra;
          const double q = rounded(x.q(i, c) * f.up, type);
          const double kb = rounded(x.k(i, c) * f.up * beta, type);
          const double k = rounded(x.k(j, c) * f.down, type);
          s.dq2(i, c) += dP * k * f.up;
          s.z(i, c) += dL * k * f.up;
          s.dkc(j, c) += (dP * q + dL * kb) * f.down;
          if (emulation_.matched_pairs) {
            s.W(i, c) += (dP * q + dL * kb) * k;
            s.W(j, c) -= (dP * q + dL * kb) * k;
          } else {
            s.W(i, c) += (dP * x.q(i, c) + dL * beta * x.k(i, c)) * f.up * k;
            s.W(j, c) -= (dP * q + dL * kb) * f.down * x.k(j, c);
          }
        }
      }
    }
    return s;
  }

  /// (5.32), (5.33) and section 3 behind them.
  void finish(const ChunkOperands& x, const ChunkGradients& g, TensorMap& out) const {
    const IntraSums intra_sums = intra(x, g);
    const auto& [dq2, z, dkc, pairs] = intra_sums;
    const Matrix grad_o = values(kDo, x.begin, x.rows);
    const Matrix dqe = product(grad_o, transposed(g.h));
    const Matrix dkg = product(g.v_new, transposed(g.dh));
    Matrix W = pairs;
    Matrix kdkx(x.rows, s_.K);
    Matrix kr(x.rows, s_.K);
    for (int64_t i = 0; i < x.rows; ++i) {
      const double beta = x.beta[static_cast<std::size_t>(i)];
      const double d = g.dP(i, i);
      for (int64_t c = 0; c < s_.K; ++c) {
        const double entering = std::exp(x.G(i, c));
        const double dq1 = scale() * entering * dqe(i, c);
        const double dkx = std::exp(x.G(x.rows - 1, c) - x.G(i, c)) * dkg(i, c);
        kr(i, c) = entering * g.Y(i, c) + z(i, c);
        kdkx(i, c) = x.k(i, c) * dkx;
        W(i, c) += x.q(i, c) * dq1 + x.k(i, c) * beta * entering * g.Y(i, c);
        const int64_t at = key_row(x.begin + i) * s_.K + c;
        add(out.at(kDq), at, dq1 + dq2(i, c) + d * x.k(i, c));
        add(out.at(kDk), at, beta * kr(i, c) + dkx + dkc(i, c) + d * x.q(i, c));
      }
      for (int64_t j = 0; j < s_.V; ++j) {
        out.at(kDv).set(row(x.begin + i) * s_.V + j, beta * g.R(i, j));
      }
      put_beta(x, i, sum_of_products(g.R, x.v, i) + sum_of_products(kr, x.k, i), out);
    }
    put_decays(x, g, W, kdkx, out);
  }

  /// (3.13).
  void put_beta(const ChunkOperands& x, int64_t i, double gradient, TensorMap& out) const {
    const int64_t at = row(x.begin + i);
    if (case_.forward.beta_sigmoid) {
      const double most = case_.forward.allow_neg_eigval ? 2 : 1;
      const double y = x.beta[static_cast<std::size_t>(i)] / most;
      gradient *= most * y * (1 - y);
    }
    out.at(kDbeta).set(at, gradient);
  }

  void put_decays(const ChunkOperands& x, const ChunkGradients& g, const Matrix& W,
                  const Matrix& kdkx, TensorMap& out) const {
    for (int64_t c = 0; c < s_.K; ++c) {
      double before = std::exp(x.G(x.rows - 1, c)) * sum_of_products(g.h, g.dh, c);
      std::vector<double> dg(static_cast<std::size_t>(x.rows));
      for (std::size_t i = 0; i < dg.size(); ++i) {
        dg[i] = before;
        before += kdkx(static_cast<int64_t>(i), c);
      }
      double after = 0;
      for (std::size_t i = dg.size(); i-- > 0;) {
        after += W(static_cast<int64_t>(i), c);
        put_gate(x.begin + static_cast<int64_t>(i), c, dg[i] + after, out);
      }
    }
  }

  /// (3.5) to (3.7), (3.9) to (3.11).
  void put_gate(int64_t token, int64_t c, double dg, TensorMap& out) const {
    const Gate kind = case_.forward.gate;
    const double g = gate(token, c);
    if (g < -40) dg = 0;
    double dz = dg;
    if (kind != Gate::kNone && dg != 0) {
      const double z = gate_input(token, c);
      const double a = slope();
      dz *= kind == Gate::kSoftplus ? -a / (1 + std::exp(-z)) : a * g / (1 + std::exp(a * z));
      if (out.count(kDALog) != 0) {
        add(out.at(kDALog), hv_, kind == Gate::kSoftplus ? dg * g : dz * z);
      }
      if (out.count(kDdtBias) != 0) add(out.at(kDdtBias), hv_ * s_.K + c, dz);
    }
    out.at(kDg).set(row(token) * s_.K + c, dz);
  }
};

/// (3.3) for every row of x. One that no sequence owns may be NaN; its gradient stays 0.
void undo_norm(HostTensor& dx, const HostTensor& x) {
  const int64_t K = x.shape[3];
  for (int64_t first = 0; first < x.count(); first += K) {
    bool is_zero = true;
    for (int64_t c = first; c < first + K; ++c) is_zero = is_zero && dx.get(c) == 0;
    if (is_zero) continue;
    double squares = 1e-6;
    double dot = 0;
    for (int64_t c = first; c < first + K; ++c) {
      squares += x.get(c) * x.get(c);
      dot += x.get(c) * dx.get(c);
    }
    for (int64_t c = first; c < first + K; ++c) {
      dx.set(c, (dx.get(c) - x.get(c) * dot / squares) / std::sqrt(squares));
    }
  }
}

}  // namespace

TensorMap emulate_backward(const Case& c, const Emulation& emulation) {
  TensorMap out;
  constexpr std::pair<TensorId, TensorId> kPairs[] = {
      {kDq, kQ},       {kDk, kK},       {kDv, kV},          {kDg, kG},
      {kDbeta, kBeta}, {kDALog, kALog}, {kDdtBias, kDtBias}};
  for (const auto& [id, input] : kPairs) {
    if (const HostTensor* x = c.input(input)) out[id] = HostTensor(DType::kF64, x->shape);
  }
  const Sizes& s = c.forward.sizes;
  const std::vector<TokenRange> sequences = sequences_of(c);
  const auto N = static_cast<int64_t>(sequences.size());
  const bool v_first = c.forward.state_v_first;
  out[kDinitialState] =
      HostTensor(DType::kF64, {N, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      BackwardHead(c, emulation, sequences[n], static_cast<int64_t>(n), hv).run(out);
    }
  }
  if (c.forward.qk_l2norm) {
    undo_norm(out.at(kDq), *c.input(kQ));
    undo_norm(out.at(kDk), *c.input(kK));
  }
  if (emulation.type == DType::kF64) return out;
  const Problem problem = backward_problem(c);
  for (auto& [id, tensor] : out) {
    for (int64_t i = 0; i < tensor.count(); ++i) {
      tensor.set(i, rounded(tensor.get(i), problem[id].dtype));
    }
  }
  return out;
}

}  // namespace kda::cases
