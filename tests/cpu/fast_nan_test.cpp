// A NaN in an input shows wherever the float64 reference shows it, on every instruction set: a
// vector function that takes it for a small number would hide what went wrong before.
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "fast_support.h"
#include "fast_target.h"

namespace kda {
namespace {

using enum TensorId;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Past one chunk, and with columns of padding.
FastCase case_of(Gate gate) {
  return {"nan", {1, 70, 1, 2, 13, 19}, DType::kF32, gate, gate != Gate::kNone};
}

/// One element in the middle of what the first value head reads becomes `value`.
Tensors spoilt(Tensors inputs, TensorId id, double value, int64_t per_token) {
  Values& values = inputs.at(id);
  const bool tokens = id != kALog && id != kDtBias && id != kInitialState;
  values[tokens ? static_cast<std::size_t>(35 * per_token) : 0] = value;
  return inputs;
}

/// NaN in x wherever the reference has one; nowhere else, where `exactly`.
void expect_nan_of(const Tensors& reference, const Tensors& x, bool exactly) {
  for (const auto& [id, expected] : reference) {
    // Scores between tokens behind a NaN: the decay between them is known without it.
    if (id == kAqk || id == kA) continue;
    const Values& found = x.at(id);
    int64_t hidden = 0;
    int64_t spread = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      hidden += std::isnan(expected[i]) && !std::isnan(found[i]);
      spread += !std::isnan(expected[i]) && std::isnan(found[i]);
    }
    EXPECT_EQ(hidden, 0) << name_of(id) << ": of " << expected.size();
    EXPECT_TRUE(spread == 0 || !exactly) << name_of(id) << ": " << spread << " more NaN";
  }
}

void check(Operation operation, Gate gate, TensorId id, double value) {
  const Problem problem = problem_of(case_of(gate), operation);
  if (!problem.has(id)) return;
  SCOPED_TRACE(std::string(name_of(operation)) + ", gate " + std::string(name_of(gate)) + ", " +
               std::string(name_of(id)) + " holds " + std::to_string(value));
  const int64_t per_token = problem.canonical_layout(id).stride[1];
  const Tensors inputs = spoilt(inputs_of(case_of(gate), problem, 51), id, value, per_token);
  // In the chunked backward a row of a sub-chunk may carry what only a later one needs.
  const bool exactly = operation != Operation::kChunkBackward;
  expect_nan_of(run_reference(problem, inputs), run_fast(problem, inputs), exactly);
}

void check_all(TensorId id, double value) {
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
    for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
      check(operation, gate, id, value);
    }
  }
}

TEST(FastNaN, ShowsWhereTheReferenceShowsIt) {
  for_each_target([] {
    for (const TensorId id : {kQ, kK, kV, kG, kBeta, kDo, kALog, kDtBias, kInitialState}) {
      check_all(id, kNaN);
    }
  });
}

// exp(A_log) 0 is undefined there, and nothing but that is.
TEST(FastNaN, InfiniteALogIsThatOfTheReference) {
  for_each_target([] {
    for (const double value : {kInfinity, -kInfinity}) check_all(kALog, value);
  });
}

// An infinite slope forgets everything, also where exp(z) is next to nothing.
TEST(FastNaN, InfiniteALogForgetsBehindShutGates) {
  for_each_target([] {
    const Problem problem = problem_of(case_of(Gate::kSoftplus), Operation::kChunkForward);
    Tensors inputs = inputs_of(case_of(Gate::kSoftplus), problem, 54);
    inputs.at(kALog)[0] = kInfinity;
    for (double& g : inputs.at(kG)) g = -30;
    expect_nan_of(run_reference(problem, inputs), run_fast(problem, inputs), true);
  });
}

// Rounding up would carry into the sign.
TEST(FastNaN, OfEveryPayloadStaysOneInHalves) {
  for_each_target([] {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Problem problem = problem_of(case_of(Gate::kNone), Operation::kChunkForward);
      const Tensors inputs =
          spoilt(inputs_of(case_of(Gate::kNone), problem, 52), kV,
                 std::bit_cast<double>(~0ull >> 1), problem.canonical_layout(kV).stride[1]);
      want_all_in(problem, dtype);
      const Tensors out = run(problem, inputs, {0, false, "cpu"});
      expect_nan_of(run_reference(problem, inputs), out, true);
    }
  });
}

// The sums of the parameters drop what an infinite gate makes, not what a NaN makes.
TEST(FastNaN, ReachesTheGradientsOfTheParameters) {
  for (const Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    Problem problem = problem_of(case_of(gate), Operation::kChunkBackward);
    Tensors inputs = inputs_of(case_of(gate), problem, 53);
    for (double& g : inputs.at(kG)) g = kNaN;
    for (const Tensors& out : {run_reference(problem, inputs), run_fast(problem, inputs)}) {
      for (const TensorId id : {kDALog, kDdtBias}) {
        for (const double x : out.at(id)) EXPECT_TRUE(std::isnan(x)) << name_of(id) << " " << x;
      }
    }
  }
}

}  // namespace
}  // namespace kda
