// Inputs whose answer is known without running a recurrence.
#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "reference_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One head; every input zero.
Tensors zero_inputs(const Problem& problem) {
  Tensors inputs = random_inputs(problem, 21);
  for (auto& [id, values] : inputs) std::fill(values.begin(), values.end(), 0.0);
  return inputs;
}

Values rows(const Values& values, std::size_t begin, std::size_t end, std::size_t width) {
  return {values.begin() + static_cast<std::ptrdiff_t>(begin * width),
          values.begin() + static_cast<std::ptrdiff_t>(end * width)};
}

// Distinct one-hot keys never meet, so o_t = s beta_t v_t and no gate matters: dg is exactly 0.
TEST(ReferenceClosedForm, OneHotKeysSeeOnlyThemselves_GRAD_11) {
  Problem backward =
      Problem::make(Operation::kChunkBackward, {.T = 40, .K = 40, .V = 3}, DType::kF64);
  Tensors inputs = random_inputs(backward, 22);
  for (TensorId id : {kQ, kK}) {
    std::fill(inputs[id].begin(), inputs[id].end(), 0.0);
    for (std::size_t t = 0; t < 40; ++t) inputs[id][t * 40 + t] = 1;
  }
  const Tensors gradients = run(want_all(backward), inputs);
  EXPECT_EQ(gradients.at(kDg), Values(std::size_t{40} * 40));
  const Values o = run(with_operation(backward, Operation::kChunkForward), inputs).at(kO);
  Values expected = inputs[kV];
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] *= inputs[kBeta][i / 3] * backward.effective_scale();
  }
  EXPECT_LE(relative_error(expected, o), 1e-15);
}

TEST(ReferenceClosedForm, OneWriteDecays) {
  Problem forward =
      Problem::make(Operation::kChunkForward, {.T = 100, .K = 2, .V = 2}, DType::kF64);
  forward.set(kFinalState, DType::kF64);
  Tensors inputs = zero_inputs(forward);
  inputs[kK][0] = 1;
  inputs[kBeta][0] = 0.5;
  inputs[kV][0] = 4;
  inputs[kV][1] = -8;
  Values expected;
  for (std::size_t t = 0; t < 100; ++t) {
    inputs[kQ][2 * t] = 1;
    inputs[kG][2 * t] = -0.125;
    const double decay = std::exp(-0.125 * static_cast<double>(t)) / std::sqrt(2.0);
    expected.insert(expected.end(), {2 * decay, -4 * decay});
  }
  const Tensors outputs = run(forward, inputs);
  EXPECT_LE(relative_error(expected, outputs.at(kO)), 1e-14);
  const double left = std::exp(-0.125 * 99);
  EXPECT_LE(relative_error({2 * left, -4 * left, 0, 0}, outputs.at(kFinalState)), 1e-14);
}

// The state already maps k to v, so the token writes nothing.
TEST(ReferenceClosedForm, APredictedValueChangesNothing) {
  Problem forward = Problem::make(Operation::kChunkForward, {.T = 70, .K = 2, .V = 2}, DType::kF64);
  forward.scale = 1;
  forward.set(kInitialState, DType::kF64).set(kFinalState, DType::kF64);
  Tensors inputs = zero_inputs(forward);
  inputs[kInitialState] = {1, 2, 3, 4};
  for (std::size_t t = 0; t < 70; ++t) {
    inputs[kBeta][t] = 1;
    inputs[kK][2 * t + t % 2] = 1;
    inputs[kQ][2 * t + 1] = 2;
    inputs[kV][2 * t] = t % 2 == 0 ? 1 : 3;
    inputs[kV][2 * t + 1] = t % 2 == 0 ? 2 : 4;
  }
  const Tensors outputs = run(forward, inputs);
  EXPECT_EQ(outputs.at(kFinalState), inputs[kInitialState]);
  for (std::size_t t = 0; t < 70; ++t) EXPECT_EQ(rows(outputs.at(kO), t, t + 1, 2), Values({6, 8}));
}

// With beta = 2 and a unit key the state is reflected; two equal tokens restore it.
TEST(ReferenceClosedForm, BetaTwoReflects_BETA_01) {
  Problem forward = Problem::make(Operation::kChunkForward, {.T = 2, .K = 2, .V = 1}, DType::kF64);
  forward.set(kInitialState, DType::kF64).set(kFinalState, DType::kF64);
  Tensors inputs = zero_inputs(forward);
  inputs[kInitialState] = {3, 5};
  inputs[kBeta] = {2, 0};
  inputs[kK] = {1, 0, 1, 0};
  EXPECT_EQ(run(forward, inputs).at(kFinalState), Values({-3, 5}));
  inputs[kBeta] = {2, 2};
  EXPECT_EQ(run(forward, inputs).at(kFinalState), Values({3, 5}));
}

// A reset makes the rest a sequence of its own, bit for bit, in both directions.
TEST(ReferenceClosedForm, AnInfiniteGateStartsAnew) {
  constexpr std::size_t kAt = 70;
  Problem whole = Problem::make(Operation::kChunkBackward, {.T = 100, .K = 3, .V = 2}, DType::kF64);
  Tensors inputs = random_inputs(whole, 23);
  for (std::size_t k = 0; k < 3; ++k) inputs[kG][kAt * 3 + k] = -kInfinity;
  Problem split = whole;
  pack(split, {kAt, 100 - kAt});
  Tensors split_inputs = inputs;
  split_inputs[kCuSeqlens] = {0, kAt, 100};
  const Tensors gradients = run(want_all(whole), inputs);
  Tensors expected = run(want_all(split), split_inputs);
  expected[kDinitialState].resize(6);  // of the first sequence
  EXPECT_EQ(gradients, expected);
  EXPECT_EQ(rows(gradients.at(kDg), kAt, kAt + 1, 3), Values(3));
  EXPECT_EQ(run(with_operation(whole, Operation::kChunkForward), inputs).at(kO),
            run(with_operation(split, Operation::kChunkForward), split_inputs).at(kO));
}

// An infinite raw gate resets, too, and leaves every gradient finite.
TEST(ReferenceClosedForm, AnInfiniteRawGateHasFiniteGradients) {
  for (Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    Problem backward =
        Problem::make(Operation::kChunkBackward, {.T = 10, .K = 2, .V = 2}, DType::kF64);
    backward.gate = gate;
    backward.lower_bound = gate == Gate::kLowerBound ? -5 : 0;
    backward.set(kALog, DType::kF64).set(kDtBias, DType::kF64);
    Tensors inputs = random_inputs(backward, 24);
    inputs[kG][6] = kInfinity;
    inputs[kG][9] = -kInfinity;
    for (const auto& [id, values] : run(want_all(backward), inputs)) {
      for (double value : values) EXPECT_TRUE(std::isfinite(value)) << name_of(id);
    }
  }
}

// (3.4) at the threshold and far from it. One token, q = k = 0: final_state is exp(g) h0.
TEST(ReferenceClosedForm, SoftplusGateOfExtremeInputs_NUM_18) {
  for (double z : {19.0, 20.0, 21.0, 88.0, 1e4, -88.0, -104.0, -1e4}) {
    Problem forward =
        Problem::make(Operation::kChunkForward, {.T = 1, .K = 1, .V = 1}, DType::kF64);
    forward.gate = Gate::kSoftplus;
    forward.set(kALog, DType::kF64).set(kInitialState, DType::kF64).set(kFinalState, DType::kF64);
    Tensors inputs = zero_inputs(forward);
    inputs[kInitialState] = {1};
    inputs[kG] = {z};
    const double softplus = z > 20 ? z : std::log1p(std::exp(z));
    EXPECT_EQ(run(forward, inputs).at(kFinalState), Values({std::exp(-softplus)})) << z;
  }
}

// (3.1) puts eps under the root beside the sum, not the mean: visible for small vectors.
TEST(ReferenceClosedForm, NormOfSmallVectors_L2NORM_01) {
  for (double amplitude : {0.0, 1e-4, 1e-3, 1.0}) {
    Problem forward =
        Problem::make(Operation::kChunkForward, {.T = 1, .K = 4, .V = 1}, DType::kF64);
    forward.qk_l2norm = true;
    forward.scale = 1;
    forward.set(kInitialState, DType::kF64);
    Tensors inputs = zero_inputs(forward);
    inputs[kInitialState] = {1, 0, 0, 0};
    std::fill(inputs[kQ].begin(), inputs[kQ].end(), amplitude);
    const double expected = amplitude / std::sqrt(4 * amplitude * amplitude + 1e-6);
    EXPECT_NEAR(run(forward, inputs).at(kO)[0], expected, 1e-15) << amplitude;
  }
}

// (3.3) of one channel, one token: o = s q k beta v with q, k normalised. What the normalisation
// leaves of dq and dk is eps r^2 of it, which 1 - y^2 loses to the rounding of y.
TEST(ReferenceClosedForm, OneNormalisedChannelKeepsEveryDigitOfItsGradient) {
  Problem backward =
      Problem::make(Operation::kChunkBackward, {.T = 1, .K = 1, .V = 1}, DType::kF64);
  backward.qk_l2norm = true;
  want_all(backward);
  Tensors inputs = zero_inputs(backward);
  inputs[kBeta] = {0.7};
  inputs[kV] = {1.3};
  inputs[kDo] = {-0.9};
  const auto r = [](double x) { return 1 / std::sqrt(x * x + 1e-6); };
  for (const double q : {0.0, 1e-3, 0.3, -1.7, 60.0, -1e4}) {
    const double k = 0.9 - q;
    inputs[kQ] = {q};
    inputs[kK] = {k};
    const double slope = -0.9 * backward.effective_scale() * 0.7 * 1.3;
    const Tensors gradients = run(backward, inputs);
    const double dq = slope * k * r(k) * 1e-6 * std::pow(r(q), 3);
    const double dk = slope * q * r(q) * 1e-6 * std::pow(r(k), 3);
    EXPECT_LE(relative_error({dq}, gradients.at(kDq)), 1e-14) << q;
    EXPECT_LE(relative_error({dk}, gradients.at(kDk)), 1e-14) << q;
  }
}

}  // namespace
}  // namespace kda
