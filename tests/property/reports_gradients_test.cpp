// Fault reports on gradients. Each name carries its id.
#include <algorithm>
#include <cmath>

#include "property/reports.h"
#include "support/calls.h"

namespace kda::test {
namespace {

TEST_P(Reports, GRAD_01_GateGradientUnderMixedDecay) {
  CaseSpec spec = small_spec(256);
  spec.initial_state = false;
  Case c = make(spec);
  set_input(c, kG, [](int64_t i) {
    return uniform(i + 1'000'000, 0, 1) < 0.5 ? uniform(i, -5, -2) : uniform(i, -0.01, 0);
  });
  expect_right(c);
  // Nothing decays at the first token of a sequence without a state.
  const HostTensor exact = cases::reference_outputs(c).value().at(kDg);
  double largest = 0;
  for (int64_t i = 0; i < exact.count(); ++i) {
    largest = std::max(largest, std::fabs(exact.get(i)));
  }
  attempt([&] {
    const HostTensor dg = results_of(c).at(kDg);
    for (int64_t i = 0; i < dg.count(); ++i) {
      EXPECT_NEAR(dg.get(i), exact.get(i), limit(1e-4, kDg) * largest) << i;
    }
    for (int64_t k = 0; k < 64; ++k) EXPECT_NEAR(dg.get(k), 0, limit(1e-5, kDg) * largest);
  });
}

TEST_P(Reports, GRAD_04_EveryGradientOfOrdinaryInput) {
  for (const DType io : {DType::kBF16, DType::kF16}) {
    for (const int64_t K : {64, 128}) {
      CaseSpec spec = small_spec(1024);
      spec.sizes.K = spec.sizes.V = K;
      spec.io = io;
      spec.gate = Gate::kSoftplus;
      spec.qk_l2norm = spec.beta_sigmoid = true;
      const CaseSpec made = fitted(spec);
      const Case c = cases::generate(made);
      expect_right(c, c.name, &made);
    }
  }
}

// Every combination of optional inputs: gradients have the shapes and dtypes of their inputs.
TEST_P(Reports, GRAD_07_EveryCombinationOfOptionalInputs) {
  for (int mask = 0; mask < 32; ++mask) {
    const auto given = [&](int bit) { return (mask >> bit & 1) != 0; };
    CaseSpec spec = small_spec(40);
    spec.sizes.K = 16;
    spec.sizes.V = 8;
    spec.gate = Gate::kLowerBound;
    spec.a_log = given(0);
    spec.dt_bias = given(1);
    spec.initial_state = given(2);
    spec.dfinal_state = given(3);
    if (given(4)) spec.cu_seqlens = {0, 15, 40};
    const CaseSpec made = fitted(spec);
    const Case c = cases::generate(made);
    expect_right(c, c.name, &made);
    const std::pair<TensorId, TensorId> kPairs[] = {{kQ, kDq}, {kK, kDk},       {kV, kDv},
                                                    {kG, kDg}, {kBeta, kDbeta}, {kALog, kDALog}};
    attempt([&] {
      const TensorMap results = results_of(c);
      for (const auto& [input, gradient] : kPairs) {
        EXPECT_EQ(results.count(gradient), c.inputs.count(input));
        if (c.input(input) == nullptr) continue;
        EXPECT_EQ(results.at(gradient).shape, c.inputs.at(input).shape);
        EXPECT_EQ(results.at(gradient).dtype, c.inputs.at(input).dtype);
      }
      EXPECT_EQ(results.count(kDdtBias), c.inputs.count(kDtBias));
    });
  }
}

TEST_P(Reports, GRAD_06_OnlyTheGradientsAskedFor) {
  CaseSpec spec = small_spec(100);
  spec.family = Family::kNoDecay;
  const Case c = make(spec);
  expect_right(c);
  const Problem all = backward_problem(c);
  attempt([&] {
    const TensorMap every = results_of(all, c.inputs);
    for (const auto& [id, tensor] : every) {
      Problem one = all;
      for (const auto& [other, unused] : every) {
        if (other != id) one.set(other, DType::kNone);
      }
      EXPECT_EQ(other_bits(results_of(one, c.inputs), every), "");
    }
  });
}

TEST_P(Reports, GRAD_09_ParameterGradientsSkipPadding) {
  for (const Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    const auto expect = [&](const CaseSpec& spec, const char* what) {
      const CaseSpec made = fitted(spec);
      expect_right(cases::generate(made), what, &made);
    };
    CaseSpec spec = small_spec(130);
    spec.gate = gate;
    spec.sizes.B = 2;
    expect(spec, "B 2");
    spec.sizes.B = 1;
    spec.sizes.T = 300;
    spec.cu_seqlens = {0, 1, 130, 260};
    spec.poison_tail = true;
    expect(spec, "packed");
    CaseSpec small = small_spec(8192);
    small.sizes.K = small.sizes.V = 8;
    small.gate = gate;
    small.family = Family::kSlow;
    expect(small, "8192 tokens");
  }
}

// Thousands of small terms of one sign: a sum in low precision would stop to grow.
TEST_P(Reports, GRAD_09_TermsOfOneSignAddUp) {
  for (const Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    CaseSpec spec = small_spec(8192);
    spec.sizes.K = spec.sizes.V = 8;
    spec.gate = gate;
    Case c = make(spec);
    // Nothing is negative and little is erased: each state grows by each token, and so does the
    // loss by each channel that decays less.
    for (const TensorId id : {kQ, kK, kV, kDo, kInitialState, kDfinalState}) {
      const HostTensor drawn = c.inputs.at(id);
      set_input(c, id, [&](int64_t i) { return 0.25 + std::fabs(drawn.get(i)); });
    }
    for (const TensorId id : {kQ, kK}) {
      const HostTensor longer = c.inputs.at(id);
      const double length = std::sqrt(static_cast<double>(c.forward.sizes.K));
      set_input(c, id, [&](int64_t i) { return longer.get(i) / length; });
    }
    const HostTensor beta = c.inputs.at(kBeta);
    set_input(c, kBeta, [&](int64_t i) { return 0.1 * beta.get(i); });
    const HostTensor dg = cases::reference_outputs(c).value().at(kDg);
    double sum = 0;
    double sum_of_sizes = 0;
    for (int64_t i = 0; i < dg.count(); ++i) {
      sum += dg.get(i);
      sum_of_sizes += std::fabs(dg.get(i));
    }
    EXPECT_GT(std::fabs(sum), 0.99 * sum_of_sizes);
    expect_right(c);
  }
}

TEST_P(Reports, GRAD_11_SaturatedGates) {
  for (const DType io : {DType::kBF16, DType::kF16}) {
    CaseSpec spec = small_spec(128);
    spec.sizes.H = spec.sizes.HV = 2;
    spec.family = Family::kBound;
    spec.io = io;
    expect_right(make(spec));
  }
  // k_t = q_t = e_t and no state: tokens do not meet, and the gate has no gradient.
  CaseSpec spec = small_spec(64);
  spec.initial_state = spec.dfinal_state = false;
  Case c = make(spec);
  for (const TensorId id : {kQ, kK}) {
    set_input(c, id, [](int64_t i) { return i / 64 == i % 64 ? 1.0 : 0.0; });
  }
  double largest = 0;
  for (int64_t t = 0; t < 64; ++t) {
    double product = 0;
    for (int64_t v = 0; v < 64; ++v) {
      product += c.inputs.at(kDo).get(t * 64 + v) * c.inputs.at(kV).get(t * 64 + v);
    }
    largest = std::max(largest, std::fabs(product));
  }
  attempt([&] {
    const HostTensor dg = results_of(c).at(kDg);
    for (int64_t i = 0; i < dg.count(); ++i) EXPECT_NEAR(dg.get(i), 0, limit(1e-5, kDg) * largest);
  });
}

TEST_P(Reports, GRAD_13_TailsOfPackedBackward) {
  for (const int64_t tail : {0, 15, 24, 56}) {
    CaseSpec spec = small_spec(192 + 128 + tail);
    spec.sizes.K = 32;
    spec.cu_seqlens = {0, 192, 192 + 128 + tail};
    const Case c = make(spec);
    expect_right(c, "tail " + std::to_string(tail));
    attempt([&] {
      const TensorMap together = results_of(c);
      const TensorMap alone = results_of(sequence_of(c, 1));
      for (const TensorId id : {kO, kDq, kDk, kDv, kDg, kDbeta}) {
        EXPECT_EQ(other_bits(tokens_of(together.at(id), 0, 192, 320 + tail), alone.at(id)), "");
      }
    });
  }
}

}  // namespace
}  // namespace kda::test
