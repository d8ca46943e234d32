#include "cpu/reference_preprocess.h"

#include <array>
#include <cmath>
#include <numbers>

#include "cpu/element.h"

namespace kda::reference {
namespace {

constexpr std::size_t kMostK = 256;  // Problem::validated
constexpr double kNormEpsilon = 1e-6;
constexpr double kLeastGate = -40;  // e^-40 is below fp32 resolution: 6.5

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// With PyTorch's threshold: (3.4).
double softplus(double z) { return z > 20 ? z : std::log1p(std::exp(z)); }

/// (3.1).
double inverse_norm(const double* x, int64_t K) {
  double sum = 0;
  for (int64_t i = 0; i < K; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum + kNormEpsilon);
}

}  // namespace

Preprocess::Preprocess(const Problem& problem, const Args& args)
    : problem_(problem),
      group_(problem.sizes.HV / problem.sizes.H),
      q_(view_of(problem, args, TensorId::kQ)),
      k_(view_of(problem, args, TensorId::kK)),
      v_(view_of(problem, args, TensorId::kV)),
      g_(view_of(problem, args, TensorId::kG)),
      beta_(view_of(problem, args, TensorId::kBeta)),
      A_log_(view_of(problem, args, TensorId::kALog)),
      dt_bias_(view_of(problem, args, TensorId::kDtBias)) {}

void Preprocess::normalised(const View& view, const Position& at, double* y) const {
  const int64_t K = problem_.sizes.K;
  load_row(y, view.at(at.batch, at.token, at.head / group_), view.dtype, K, view.stride[3]);
  if (!problem_.qk_l2norm) return;
  const double r = inverse_norm(y, K);
  for (int64_t i = 0; i < K; ++i) y[i] *= r;
}

void Preprocess::query(const Position& at, double* q) const { normalised(q_, at, q); }
void Preprocess::key(const Position& at, double* k) const { normalised(k_, at, k); }

void Preprocess::value(const Position& at, double* v) const {
  load_row(v, v_.at(at.batch, at.token, at.head), v_.dtype, problem_.sizes.V, v_.stride[3]);
}

double Preprocess::gate_slope(int64_t head) const {
  return A_log_ ? std::exp(load_element(A_log_.at(head), A_log_.dtype)) : 1;
}

double Preprocess::gate_input(const Position& at, int64_t channel) const {
  const double raw = load_element(g_.at(at.batch, at.token, at.head, channel), g_.dtype);
  return dt_bias_ ? raw + load_element(dt_bias_.at(at.head, channel), dt_bias_.dtype) : raw;
}

void Preprocess::gate(const Position& at, double* g) const {
  const int64_t K = problem_.sizes.K;
  const double a = gate_slope(at.head);
  for (int64_t i = 0; i < K; ++i) {
    const double z = gate_input(at, i);
    switch (problem_.gate) {
      case Gate::kNone:
        g[i] = z;
        break;
      case Gate::kSoftplus:
        g[i] = -a * softplus(z);
        break;
      case Gate::kLowerBound:
        g[i] = problem_.lower_bound * sigmoid(a * z);
        break;
    }
  }
}

double Preprocess::beta(const Position& at) const {
  const double x = load_element(beta_.at(at.batch, at.token, at.head), beta_.dtype);
  if (!problem_.beta_sigmoid) return x;
  return (problem_.allow_neg_eigval ? 2 : 1) * sigmoid(x);
}

void Preprocess::normalised_gradient(const View& view, const Position& at, double* dy) const {
  if (!problem_.qk_l2norm) return;
  const int64_t K = problem_.sizes.K;
  std::array<double, kMostK> y;
  load_row(y.data(), view.at(at.batch, at.token, at.head / group_), view.dtype, K, view.stride[3]);
  const double r = inverse_norm(y.data(), K);
  if (K == 1) {  // dy lies along y: 1 - y^2 = eps r^2 exactly, but a rounded y loses it
    dy[0] *= kNormEpsilon * r * r * r;
    return;
  }
  double inner = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(K); ++i) {
    y[i] *= r;
    inner += y[i] * dy[i];
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(K); ++i) dy[i] = r * (dy[i] - y[i] * inner);
}

void Preprocess::query_gradient(const Position& at, double* dq) const {
  normalised_gradient(q_, at, dq);
}

void Preprocess::key_gradient(const Position& at, double* dk) const {
  normalised_gradient(k_, at, dk);
}

void Preprocess::gate_gradient(const Position& at, double* dg, double& dA_log,
                               double* ddt_bias) const {
  if (problem_.gate == Gate::kNone) return;
  const double a = gate_slope(at.head);
  for (int64_t i = 0; i < problem_.sizes.K; ++i) {
    // Nothing depends on this gate, whose slope may be infinite.
    if (dg[i] == 0) continue;
    const double z = gate_input(at, i);
    double dz;
    double slope_term;
    if (problem_.gate == Gate::kSoftplus) {
      dz = -a * sigmoid(z) * dg[i];
      slope_term = dg[i] * (-a * softplus(z));
    } else {
      // sigmoid(-x) instead of 1 - sigmoid(x), which cancels where the gate is at its bound.
      dz = dg[i] * problem_.lower_bound * sigmoid(a * z) * sigmoid(-a * z) * a;
      slope_term = dz * z;
    }
    // An infinite input has a constant gate next to it: no gradient, where 0 inf would be NaN. A
    // NaN is nothing of that kind.
    if (!std::isinf(z)) dA_log += slope_term;
    ddt_bias[i] += dz;
    dg[i] = dz;
  }
}

double Preprocess::beta_gradient(const Position& at, double dbeta) const {
  if (!problem_.beta_sigmoid) return dbeta;
  const double x = load_element(beta_.at(at.batch, at.token, at.head), beta_.dtype);
  return dbeta * (problem_.allow_neg_eigval ? 2 : 1) * sigmoid(x) * sigmoid(-x);
}

void cumulative_gate(const Preprocess& inputs, const Chunk& chunk, int64_t head, int64_t K,
                     double* gamma) {
  for (int64_t i = 0; i < chunk.n; ++i) {
    double* row = gamma + i * K;
    inputs.gate({chunk.batch, chunk.begin + i, head}, row);
    for (int64_t k = 0; k < K; ++k) {
      // std::max would turn a NaN into the bound.
      const double g = row[k] < kLeastGate ? kLeastGate : row[k];
      row[k] = g / std::numbers::ln2 + (i > 0 ? row[k - K] : 0);
    }
  }
}

}  // namespace kda::reference
