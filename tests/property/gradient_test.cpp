// The reference itself: its forward against the plain recurrence written out here, its gradients
// against central differences of its forward.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"
#include "random.h"

namespace kda::test {
namespace {

/// (3.1)-(3.12) on one number or row, then (2.1)-(2.5), token by token, in double.
class Recurrence {
 public:
  explicit Recurrence(const Case& c) : c_(c), p_(c.forward), s_(c.forward.sizes) {}

  /// o and final_state in fp64.
  TensorMap run() {
    const std::vector<cases::TokenRange> ranges = cases::sequences_of(c_);
    const auto count = static_cast<int64_t>(ranges.size());
    HostTensor o(DType::kF64, {s_.B, s_.T, s_.HV, s_.V});
    HostTensor states(DType::kF64, {count, s_.HV, p_.state_v_first ? s_.V : s_.K,
                                    p_.state_v_first ? s_.K : s_.V});
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t hv = 0; hv < s_.HV; ++hv) {
        run_head(ranges[static_cast<std::size_t>(n)], n, hv, o, states);
      }
    }
    return {{TensorId::kO, o}, {TensorId::kFinalState, states}};
  }

 private:
  double in(TensorId id, int64_t index) const { return c_.inputs.at(id).get(index); }
  double or_zero(TensorId id, int64_t index) const {
    const HostTensor* tensor = c_.input(id);
    return tensor == nullptr ? 0 : tensor->get(index);
  }

  std::vector<double> row(TensorId id, int64_t token, int64_t h) const {
    std::vector<double> x;
    double squares = 0;
    for (int64_t k = 0; k < s_.K; ++k) {
      x.push_back(in(id, (token * s_.H + h) * s_.K + k));
      squares += x.back() * x.back();
    }
    if (p_.qk_l2norm) {
      for (double& value : x) value /= std::sqrt(squares + 1e-6);
    }
    return x;
  }

  double gate(int64_t token, int64_t hv, int64_t k) const {
    const double g = in(TensorId::kG, (token * s_.HV + hv) * s_.K + k);
    const double z = g + or_zero(TensorId::kDtBias, hv * s_.K + k);
    const double a = std::exp(or_zero(TensorId::kALog, hv));
    switch (p_.gate) {
      case Gate::kNone:
        return g;
      case Gate::kSoftplus:
        return -a * (z > 20 ? z : std::log1p(std::exp(z)));
      case Gate::kLowerBound:
        return p_.lower_bound / (1 + std::exp(-a * z));
    }
    return 0;
  }

  double strength(int64_t token, int64_t hv) const {
    const double x = in(TensorId::kBeta, token * s_.HV + hv);
    if (!p_.beta_sigmoid) return x;
    return (p_.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-x));
  }

  int64_t state_index(int64_t n, int64_t hv, int64_t k, int64_t v) const {
    const int64_t inner = p_.state_v_first ? v * s_.K + k : k * s_.V + v;
    return (n * s_.HV + hv) * s_.K * s_.V + inner;
  }

  void run_head(const cases::TokenRange& range, int64_t n, int64_t hv, HostTensor& o,
                HostTensor& states) const {
    std::vector<std::vector<double>> S(static_cast<std::size_t>(s_.K));
    for (int64_t k = 0; k < s_.K; ++k) {
      for (int64_t v = 0; v < s_.V; ++v) {
        S[static_cast<std::size_t>(k)].push_back(
            or_zero(TensorId::kInitialState, state_index(n, hv, k, v)));
      }
    }
    for (int64_t t = range.begin; t < range.end; ++t) {
      step(range.batch * s_.T + t, hv, S, o);
    }
    for (int64_t k = 0; k < s_.K; ++k) {
      for (int64_t v = 0; v < s_.V; ++v) {
        states.set(state_index(n, hv, k, v),
                   S[static_cast<std::size_t>(k)][static_cast<std::size_t>(v)]);
      }
    }
  }

  void step(int64_t token, int64_t hv, std::vector<std::vector<double>>& S, HostTensor& o) const {
    const int64_t h = hv / (s_.HV / s_.H);
    const std::vector<double> q = row(TensorId::kQ, token, h);
    const std::vector<double> key = row(TensorId::kK, token, h);
    const double beta = strength(token, hv);
    for (std::size_t k = 0; k < S.size(); ++k) {
      const double decay = std::exp(gate(token, hv, static_cast<int64_t>(k)));
      for (double& x : S[k]) x *= decay;
    }
    for (std::size_t v = 0; v < static_cast<std::size_t>(s_.V); ++v) {
      const int64_t at = (token * s_.HV + hv) * s_.V + static_cast<int64_t>(v);
      double seen = 0;
      for (std::size_t k = 0; k < S.size(); ++k) seen += S[k][v] * key[k];
      const double u = beta * (in(TensorId::kV, at) - seen);
      double out = 0;
      for (std::size_t k = 0; k < S.size(); ++k) {
        S[k][v] += key[k] * u;
        out += S[k][v] * q[k];
      }
      o.set(at, p_.effective_scale() * out);
    }
  }

  const Case& c_;
  const Problem& p_;
  const Sizes& s_;
};

RC_GTEST_PROP(Reference, ForwardIsTheRecurrence, ()) {
  CaseSpec spec = *any_case({.most_tokens = 60});
  spec.gradients = false;
  const Case c = cases::generate(spec);
  const TensorMap results = cases::reference_outputs(c).value();
  RC_ASSERT(beyond_limits(c, results, Recurrence(c).run()) == "");
}

/// The case with every tensor in fp64.
Case exact(const Case& c) {
  Case result = c;
  for (auto& [id, tensor] : result.inputs) {
    if (id != TensorId::kCuSeqlens) tensor = cases::converted(tensor, DType::kF64);
  }
  result.forward = forward_problem(result);
  return result;
}

/// o and final_state in fp64.
TensorMap outputs_of(const Case& c) {
  return run_operation(forward_problem(c, {DType::kF64}), c.inputs, choosing("reference"));
}

/// <after - before, gradient>: the differences first, so that the sum rounds no more than they do.
double dot_between(const HostTensor& after, const HostTensor& before, const HostTensor& gradient) {
  double sum = 0;
  for (int64_t i = 0; i < gradient.count(); ++i) {
    sum += (after.get(i) - before.get(i)) * gradient.get(i);
  }
  return sum;
}

/// What <o, do> + <final_state, dfinal_state> grows by.
double loss_between(const Case& c, const TensorMap& after, const TensorMap& before) {
  const auto between = [&](TensorId id, const HostTensor& gradient) {
    return dot_between(after.at(id), before.at(id), gradient);
  };
  double sum = between(TensorId::kO, c.inputs.at(TensorId::kDo));
  if (const HostTensor* gradient = c.input(TensorId::kDfinalState)) {
    sum += between(TensorId::kFinalState, *gradient);
  }
  return sum;
}

// Central differences along a random direction of each input.
RC_GTEST_PROP(Reference, GradientsAreDifferencesOfTheForward, ()) {
  CaseSpec spec = *any_case({.extreme = false, .reduced_types = false, .most_tokens = 30});
  // Rows of zeros are where normalisation bends most: no place for differences.
  if (spec.family == Family::kZero) spec.family = Family::kUnit;
  spec.poison_tail = false;
  Case c = exact(cases::generate(spec));
  const TensorMap gradients =
      run_operation(backward_problem(c, {DType::kF64}), c.inputs, choosing("reference"));
  const std::pair<TensorId, TensorId> kPairs[] = {
      {TensorId::kQ, TensorId::kDq},           {TensorId::kK, TensorId::kDk},
      {TensorId::kV, TensorId::kDv},           {TensorId::kG, TensorId::kDg},
      {TensorId::kBeta, TensorId::kDbeta},     {TensorId::kALog, TensorId::kDALog},
      {TensorId::kDtBias, TensorId::kDdtBias}, {TensorId::kInitialState, TensorId::kDinitialState}};
  for (const auto& pair : kPairs) {
    const TensorId input = pair.first;
    const TensorId gradient = pair.second;
    if (c.input(input) == nullptr || c.input(input)->count() == 0) continue;
    const HostTensor original = c.inputs.at(input);
    const cases::Random random(spec.seed, 500 + static_cast<uint64_t>(input));
    const auto outputs_at = [&](double step) {
      HostTensor& tensor = c.inputs.at(input);
      for (int64_t i = 0; i < tensor.count(); ++i) {
        tensor.set(i, original.get(i) + step * random.normal(static_cast<uint64_t>(i)));
      }
      TensorMap outputs = outputs_of(c);
      tensor = original;
      return outputs;
    };
    // Of fourth order; what is normalised bends within the root of epsilon, all else over about 1.
    const bool normalised = c.forward.qk_l2norm && (input == TensorId::kQ || input == TensorId::kK);
    const double step = normalised ? 2e-5 : 1e-3;
    const double near = loss_between(c, outputs_at(step), outputs_at(-step));
    const double far = loss_between(c, outputs_at(2 * step), outputs_at(-2 * step));
    const double difference = (8 * near - far) / (12 * step);
    double product = 0;
    double size = 0;
    for (int64_t i = 0; i < original.count(); ++i) {
      const double term = gradients.at(gradient).get(i) * random.normal(static_cast<uint64_t>(i));
      product += term;
      size += std::fabs(term);
    }
    const std::string report = fmt::format("{}: difference {}, gradient {}, size {}",
                                           name_of(gradient), difference, product, size);
    RC_ASSERT((std::fabs(difference - product) <= 1e-6 * (size + 1e-3) ? "" : report) == "");
  }
}

}  // namespace
}  // namespace kda::test
