// What a token, sequence or head may not reach: causality bit for bit, and NaN as a dye.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"

namespace kda::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Replaces the tokens [begin, end) of a batch row in every token input.
void overwrite(Case& c, int64_t batch, int64_t begin, int64_t end, double value) {
  for (auto& [id, tensor] : c.inputs) {
    if (!has_tokens(id) || tensor.count() == 0) continue;
    const int64_t row = tensor.count() / tensor.shape[0] / tensor.shape[1];
    // A gate above 0 is outside the contract.
    const double written = id == TensorId::kG && !std::isnan(value) ? -std::fabs(value) : value;
    for (int64_t i = (batch * tensor.shape[1] + begin) * row;
         i < (batch * tensor.shape[1] + end) * row; ++i) {
      tensor.set(i, written);
    }
  }
}

// What comes later never reaches o, not even as a rounding error or a NaN.
RC_GTEST_PROP(Causal, PrefixOfOIsBitwiseInvariant, ()) {
  CaseSpec spec = *any_case({.packed = false});
  spec.gradients = false;
  const Case c = cases::generate(spec);
  const int64_t T = c.forward.sizes.T;
  RC_PRE(T > 0);
  const int64_t cut = *rc::gen::inRange<int64_t>(0, T);
  const int64_t batch = *rc::gen::inRange<int64_t>(0, c.forward.sizes.B);
  const double value = *rc::gen::element(kNaN, 1e4, 0.0, -3.0);
  Case other = c;
  overwrite(other, batch, cut, T, value);
  for (const std::string& family : families()) {
    Problem problem = forward_problem(c);
    problem.set(TensorId::kFinalState, DType::kNone);
    const HostTensor before = run_operation(problem, c.inputs, choosing(family)).at(TensorId::kO);
    const HostTensor after =
        run_operation(problem, other.inputs, choosing(family)).at(TensorId::kO);
    for (int64_t b = 0; b < c.forward.sizes.B; ++b) {
      const int64_t end = b == batch ? cut : T;
      RC_ASSERT(other_bits(tokens_of(before, b, 0, end), tokens_of(after, b, 0, end)) == "");
    }
  }
}

// The gradient of a token comes from the outputs at and behind it: NaN in the do of earlier tokens
// stays away.
RC_GTEST_PROP(Causal, EarlierDoReachesNoLaterGradient, ()) {
  const Case c = cases::generate(*any_case({.packed = false}));
  const int64_t T = c.forward.sizes.T;
  const int64_t cut = *rc::gen::inRange<int64_t>(0, T + 1);
  const double value = *rc::gen::element(kNaN, 0.5);
  Case other = c;
  HostTensor& gradient = other.inputs.at(TensorId::kDo);
  const int64_t row = T == 0 ? 0 : gradient.count() / gradient.shape[0] / T;
  for (int64_t i = 0; i < cut * row; ++i) gradient.set(i, value);
  for (const std::string& family : families_of_cpu()) {
    const Problem problem = backward_problem(c);
    const TensorMap before = run_operation(problem, c.inputs, choosing(family));
    const TensorMap after = run_operation(problem, other.inputs, choosing(family));
    for (const TensorId id :
         {TensorId::kDq, TensorId::kDk, TensorId::kDv, TensorId::kDg, TensorId::kDbeta}) {
      RC_ASSERT(other_bits(tokens_of(before.at(id), 0, cut, T),
                           tokens_of(after.at(id), 0, cut, T)) == "");
    }
  }
}

// (2.7): dq of a token sees the do of that token alone.
RC_GTEST_PROP(Causal, GradientOfOReachesDqOnlyAtItsToken, ()) {
  CaseSpec spec = *any_case({.packed = false});
  const Case c = cases::generate(spec);
  const int64_t T = c.forward.sizes.T;
  RC_PRE(T > 0);
  const int64_t t = *rc::gen::inRange<int64_t>(0, T);
  Case other = c;
  HostTensor& gradient = other.inputs.at(TensorId::kDo);
  const int64_t row = gradient.count() / gradient.shape[0] / T;
  for (int64_t i = t * row; i < (t + 1) * row; ++i) gradient.set(i, kNaN);
  for (const std::string& family : families()) {
    Problem problem = backward_problem(c);
    for (const TensorId id : cases::kCaseOutputs) {
      if (id != TensorId::kDq) problem.set(id, DType::kNone);
    }
    const HostTensor before = run_operation(problem, c.inputs, choosing(family)).at(TensorId::kDq);
    const HostTensor after =
        run_operation(problem, other.inputs, choosing(family)).at(TensorId::kDq);
    RC_ASSERT(other_bits(tokens_of(before, 0, 0, t), tokens_of(after, 0, 0, t)) == "");
    RC_ASSERT(other_bits(tokens_of(before, 0, t + 1, T), tokens_of(after, 0, t + 1, T)) == "");
  }
}

RC_GTEST_PROP(Containment, ASequenceOfNaNReachesNoOther, ()) {
  const Case c = cases::generate(*any_case());
  const std::vector<cases::TokenRange> ranges = cases::sequences_of(c);
  RC_PRE(!ranges.empty());
  const auto dyed = *rc::gen::inRange<std::size_t>(0, ranges.size());
  Case other = c;
  overwrite(other, ranges[dyed].batch, ranges[dyed].begin, ranges[dyed].end, kNaN);
  for (const TensorId id : {TensorId::kInitialState, TensorId::kDfinalState}) {
    const auto found = other.inputs.find(id);
    if (found == other.inputs.end()) continue;
    const int64_t size = row_of(found->second, 0).count();
    const auto first = static_cast<int64_t>(dyed) * size;
    for (int64_t i = first; i < first + size; ++i) found->second.set(i, kNaN);
  }
  for (const std::string& family : families()) {
    const TensorMap before = run_case(c, family);
    const TensorMap after = run_case(other, family);
    for (std::size_t n = 0; n < ranges.size(); ++n) {
      if (n == dyed) continue;
      for (const auto& [id, tensor] : before) {
        const cases::TokenRange& r = ranges[n];
        const auto row = static_cast<int64_t>(n);
        if (has_tokens(id)) {
          RC_ASSERT(other_bits(tokens_of(tensor, r.batch, r.begin, r.end),
                               tokens_of(after.at(id), r.batch, r.begin, r.end)) == "");
        } else if (has_states(id)) {
          RC_ASSERT(other_bits(row_of(tensor, row), row_of(after.at(id), row)) == "");
        }
      }
    }
  }
}

RC_GTEST_PROP(Containment, AValueHeadOfNaNReachesNoOther, ()) {
  const Case c = cases::generate(*any_case());
  const Sizes& s = c.forward.sizes;
  RC_PRE(s.HV > 1);
  const int64_t dyed = *rc::gen::inRange<int64_t>(0, s.HV);
  const auto head_of = [&](TensorId id, const HostTensor& tensor, int64_t i) {
    const auto& shape = tensor.shape;
    if (id == TensorId::kDALog) return i;
    if (id == TensorId::kDdtBias) return i / s.K;
    if (has_states(id)) return i / (shape[2] * shape[3]) % s.HV;
    return i / (shape.size() > 3 ? shape[3] : 1) % s.HV;
  };
  Case other = c;
  for (const TensorId id : {TensorId::kV, TensorId::kG, TensorId::kBeta, TensorId::kDo}) {
    HostTensor& tensor = other.inputs.at(id);
    for (int64_t i = 0; i < tensor.count(); ++i) {
      if (head_of(id, tensor, i) == dyed) tensor.set(i, kNaN);
    }
  }
  for (const std::string& family : families()) {
    const TensorMap before = run_case(c, family);
    const TensorMap after = run_case(other, family);
    for (const auto& [id, tensor] : before) {
      if (id == TensorId::kDq || id == TensorId::kDk) continue;  // sums over a group
      for (int64_t i = 0; i < tensor.count(); ++i) {
        if (head_of(id, tensor, i) == dyed) continue;
        RC_ASSERT(tensor.get(i) == after.at(id).get(i));
      }
    }
  }
}

// beta = 0 writes nothing: the state only decays, and nothing depends on k or v.
RC_GTEST_PROP(Masks, BetaZeroWritesNothing, ()) {
  CaseSpec spec = *any_case();
  spec.beta_sigmoid = spec.allow_neg_eigval = false;
  spec.initial_state = true;
  Case c = cases::generate(spec);
  HostTensor& beta = c.inputs.at(TensorId::kBeta);
  for (int64_t i = 0; i < beta.count(); ++i) beta.set(i, 0);
  Case other = c;
  for (const TensorId id : {TensorId::kK, TensorId::kV}) {
    HostTensor& tensor = other.inputs.at(id);
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, -tensor.get(i));
  }
  for (const std::string& family : families()) {
    const TensorMap results = run_case(c, family);
    for (const TensorId id : {TensorId::kDv, TensorId::kDk}) {
      const HostTensor& gradient = results.at(id);
      for (int64_t i = 0; i < gradient.count(); ++i) RC_ASSERT(gradient.get(i) == 0);
    }
    TensorMap flipped = run_case(other, family);
    for (const TensorId id : {TensorId::kO, TensorId::kFinalState, TensorId::kDq}) {
      // As values: the sign of a zero may follow that of k.
      RC_ASSERT(cases::to_doubles(results.at(id)) == cases::to_doubles(flipped.at(id)));
    }
  }
}

}  // namespace
}  // namespace kda::test
