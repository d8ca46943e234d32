// Inputs at the ends of their ranges: gates whose parts leave the range of floats, one channel.
#include <cmath>
#include <vector>

#include "check.h"
#include "property/reports.h"

namespace kda::test {
namespace {

class Extremes : public Judged {};

KDA_FOR_EACH_FAMILY(Extremes);

/// Gates whose parts leave the range of fp32, though the decay itself does not.
struct FarGate {
  const char* name;
  Gate gate;
  double lower_bound;
  double A_log;
  double raw;
};

constexpr FarGate kFar[] = {
    {"open", Gate::kLowerBound, -5, 0.5, HUGE_VAL},
    {"shut", Gate::kLowerBound, -5, 0.5, -HUGE_VAL},
    {"softplus_no_decay", Gate::kSoftplus, 0, 100, -200},
    {"softplus_some_decay", Gate::kSoftplus, 0, 100, -101},
    {"softplus_reset", Gate::kSoftplus, 0, 100, -1},
    {"softplus_infinite", Gate::kSoftplus, 0, 100, HUGE_VAL},
    {"softplus_shut", Gate::kSoftplus, 0, 100, -HUGE_VAL},
    {"softplus_flat", Gate::kSoftplus, 0, -200, HUGE_VAL},
    {"softplus_near_the_end", Gate::kSoftplus, 0, 88, -90},
    {"bound_no_decay", Gate::kLowerBound, -1e39, 0, -200},
    {"bound_some_decay", Gate::kLowerBound, -1e39, 0, -90},
    {"bound_reset", Gate::kLowerBound, -1e39, 0, 1},
    {"step_down", Gate::kLowerBound, -5, 100, -1},
    {"step_up", Gate::kLowerBound, -5, 100, 1},
    {"step_at_zero", Gate::kLowerBound, -5, 50, 0},
    {"bound_flat", Gate::kLowerBound, -5, -200, HUGE_VAL},
};

CaseSpec far_spec(const FarGate& far) {
  CaseSpec spec;
  spec.sizes = {1, 70, 1, 1, 16, 16, 0, 0};
  spec.gate = far.gate;
  spec.lower_bound = far.lower_bound;
  return spec;
}

/// Every third raw gate is `far.raw`, the others hardly decay at the largest slopes.
Case with_far_gates(Case c, const FarGate& far) {
  set_input(c, kALog, [&](int64_t) { return far.A_log; });
  set_input(c, kDtBias, [](int64_t) { return 0.0; });
  set_input(c, kG, [&](int64_t i) { return i % 3 == 0 ? far.raw : i % 3 == 1 ? -150.0 : -300.0; });
  return c;
}

TEST_P(Extremes, GatesBeyondTheRangeOfFloats) {
  for (const FarGate& far : kFar) {
    expect_right(with_far_gates(make(far_spec(far)), far), far.name);
  }
}

TEST_P(Extremes, GatesBeyondTheRangeOfFloatsTokenByToken) {
  for (const FarGate& far : kFar) {
    const Case c = with_far_gates(cases::generate(fitted_to_decode(far_spec(far), 70)), far);
    const TensorMap all = cases::reference_outputs(c).value();
    const TensorMap expected{{kO, all.at(kO)}, {kFinalState, all.at(kFinalState)}};
    attempt([&] {
      const TensorMap results = results_of(recurrent_problem(c), c.inputs);
      EXPECT_EQ(beyond_limits(c, results, expected), "") << far.name;
    });
  }
}

/// One channel, normalised: all that is left of a gradient comes from the epsilon of (3.1).
TEST_P(Extremes, OneNormalisedChannelKeepsItsGradient) {
  for (const double size : {1.0, 30.0}) {
    CaseSpec spec = small_spec(90);
    spec.sizes.HV = 2;
    spec.sizes.K = 1;
    spec.sizes.V = 8;
    spec.qk_l2norm = true;
    Case c = cases::generate(spec);
    for (const TensorId id : {kQ, kK}) {
      set_input(c, id, [&](int64_t i) {
        return size * (i % 2 == 0 ? 1.0 : -1.0) * (1.0 + 0.1 * static_cast<double>(i % 3));
      });
    }
    expect_right(c);
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      const TensorMap results = results_of(c);
      for (const TensorId id : {kDq, kDk}) {  // small numbers, so without the floor of (7.1)
        EXPECT_LT(cases::compare(c, id, results.at(id), expected.at(id)).max_error, 1e-5)
            << name_of(id);
      }
    });
  }
}

/// (I + L)^-1 keeps (1 - beta)^n of what token n before has written, so that errors of the sums
/// k . k come back as A dL A. Operands of 16 bits are too coarse for it (6.4).
TEST_P(Extremes, EqualKeysAndNegativeEigenvalues) {
  for (const double g : {-1e-5, -1e-4, -1e-3, -1e-2}) {
    CaseSpec spec = small_spec(65);
    spec.family = Family::kSame;
    spec.sizes = {1, 65, 3, 3, 256, 8, 0, 0};
    Case c = make(spec);
    set_input(c, kG, [&](int64_t) { return g; });
    set_input(c, kBeta, [](int64_t) { return 1.85; });
    const TensorMap expected = cases::reference_outputs(c).value();
    const TensorMap model = cases::score_errors_of(c);
    attempt([&] {
      for (const auto& [id, result] : results_of(c)) {
        const HostTensor& want = expected.at(id);
        const cases::Difference d = cases::compare(c, id, result, want);
        EXPECT_TRUE(d.finite) << name_of(id) << " at a gate of " << g;
        if (is_hopper()) continue;
        EXPECT_LE(d.ratio, cases::limit_beside(model, c, id, want, DType::kF32))
            << name_of(id) << " at a gate of " << g;
      }
    });
  }
}

/// Slow decays that are alike in every token, of other tokens and of one over and over: exp(g) as
/// one fp32 number has an error of up to 2^-25, which adds up over the tokens. Slower decays than
/// these are lost in the states' own rounding.
TEST_P(Extremes, LongMemoryTokenByToken) {
  constexpr int64_t kTokens = 16384;
  CaseSpec spec = small_spec(kTokens);
  spec.sizes.K = spec.sizes.V = 8;
  for (const double g : {-1e-5, -3e-5, -1e-4, -1e-3}) {
    for (const bool one_key : {false, true}) {
      spec.family = one_key ? Family::kSame : Family::kUnit;
      Case c = cases::generate(fitted_to_decode(spec, 70));
      set_input(c, kG, [&](int64_t) { return g; });
      set_input(c, kBeta, [&](int64_t) { return one_key ? 0.5 : 0.0; });
      const TensorMap all = cases::reference_outputs(c).value();
      attempt([&] {
        const TensorMap results = results_of(recurrent_problem(c), c.inputs);
        for (const TensorId id : {kO, kFinalState}) {
          if (size_of(results.at(id).dtype) == 2) continue;  // o of Hopper rows
          EXPECT_LE(cases::compare(c, id, results.at(id), all.at(id)).ratio, 1e-5)
              << name_of(id) << " at a gate of " << g << (one_key ? ", one key" : "");
        }
      });
    }
  }
}

TEST_P(Extremes, LongMemory) {
  CaseSpec spec = small_spec(16384);
  spec.sizes.K = spec.sizes.V = 8;
  Case c = make(spec);
  set_input(c, kG, [](int64_t) { return -3e-5; });
  set_input(c, kBeta, [](int64_t) { return 0.0; });
  expect_right(c);
}

/// The same of chunks, whose whole decays are alike too. Nothing is written where beta is 0, so the
/// rounding of what tokens write does not cover that of the decays.
TEST_P(Extremes, LongMemoryInChunks) {
  // The limits of Hopper rows are far above this, and their widths slow down the recurrence.
  CaseSpec spec = small_spec(is_hopper() ? 8192 : 131072);
  spec.sizes.K = spec.sizes.V = 8;
  Case c = make(spec);
  set_input(c, kBeta, [](int64_t) { return 0.0; });
  for (const double g : {-1e-6, -1e-5, -1e-4}) {
    set_input(c, kG, [&](int64_t) { return g; });
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      const TensorMap results = results_of(c);
      for (const TensorId id : {kO, kFinalState, kDq, kDinitialState}) {
        EXPECT_LE(cases::compare(c, id, results.at(id), expected.at(id)).ratio, limit(1e-5, id))
            << name_of(id) << " at a gate of " << g;
      }
    });
  }
}

/// The scans by themselves, where no token writes: a state decays, and no more. Of gamma they read
/// the last row of each chunk.
TEST_P(Extremes, LongMemoryOfScans) {
  constexpr int64_t kChunks = 2048;
  struct Scan {
    Operation operation;
    std::vector<TensorId> zeros;
    TensorId from;
    TensorId to;
  };
  const Scan scans[] = {
      {Operation::kStateScan, {kKg, kW, kU}, kInitialState, kFinalState},
      {Operation::kReverseScan, {kQg, kKg, kW, kAqk, kDo}, kDfinalState, kDinitialState}};
  CaseSpec spec = small_spec(64);
  spec.sizes.K = spec.sizes.V = 8;
  const Case c = make(spec);
  for (const Scan& scan : scans) {
    Problem problem = c.forward;
    problem.operation = scan.operation;
    problem.sizes.T = 64 * kChunks;
    problem.tensors = {};
    TensorMap inputs;
    const auto give_zeros = [&](TensorId id) {
      problem.set(id, DType::kF32);
      const TensorLayout layout = problem.canonical_layout(id);
      const auto* const shape = layout.shape.data();
      inputs[id] = HostTensor(layout.dtype, {shape, shape + layout.rank});
    };
    for (const TensorId id : scan.zeros) give_zeros(id);
    give_zeros(kGamma);
    HostTensor& gammas = inputs.at(kGamma);
    const HostTensor& state = inputs[scan.from] = c.inputs.at(scan.from);
    problem.set(scan.from, state.dtype);
    problem.set(scan.to, DType::kF32);
    for (const double gamma : {-0x1p-14, -0x1.5p-10, -0x1.3p-7}) {
      for (int64_t i = 0; i < gammas.count(); ++i) gammas.set(i, gamma);
      HostTensor expected(DType::kF64, state.shape);
      for (int64_t i = 0; i < state.count(); ++i) {
        expected.set(i, state.get(i) * std::exp2(gamma * kChunks));
      }
      attempt([&] {
        const HostTensor result = results_of(problem, inputs).at(scan.to);
        EXPECT_LE(cases::compare(c, scan.to, result, expected).ratio, 1e-5)
            << name_of(scan.to) << " at a gamma of " << gamma;
      });
    }
  }
}

}  // namespace
}  // namespace kda::test
