// Chunked forward and backward of the fast family against the float64 reference.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "cpu/element.h"
#include "fast_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;
constexpr DType kF32 = DType::kF32;

const FastCase kCases[] = {
    {"one_token", {1, 1, 1, 1, 64, 64}},
    {"two_chunks", {1, 130, 2, 2, 128, 128}},
    {"tail_of_one", {2, 65, 1, 1, 64, 32}},
    {"short_rows", {3, 17, 2, 2, 32, 48}},
    {"grouped", {1, 100, 2, 8, 64, 64}},
    {"K1_V1", {2, 70, 1, 2, 1, 1}},
    {"K3_V7", {1, 90, 1, 1, 3, 7}},
    {"K17_V100", {1, 90, 1, 1, 17, 100}},
    {"K255_V1", {1, 66, 1, 1, 255, 1}},
    {"K256_V100", {1, 80, 1, 1, 256, 100}},
    {"V300", {1, 64, 1, 1, 16, 300}},
    {"chunk_32", {1, 150, 1, 2, 48, 64}, kF32, Gate::kNone, false, true, false, 32},
    {"no_state", {1, 129, 1, 1, 64, 64}, kF32, Gate::kNone, false, false},
    {"v_first", {2, 70, 1, 1, 32, 80}, kF32, Gate::kNone, false, true, true},
    {"v_first_odd", {1, 70, 1, 1, 30, 81}, kF32, Gate::kNone, false, true, true},
    {"bf16", {1, 130, 2, 2, 64, 64}, kBF16, Gate::kSoftplus, true},
    {"fp16", {1, 130, 2, 2, 60, 50}, kF16, Gate::kLowerBound, true},
    {"softplus", {1, 100, 1, 3, 64, 64}, kF32, Gate::kSoftplus, true},
    {"lower_bound", {1, 100, 1, 1, 64, 64}, kF32, Gate::kLowerBound, true, false},
    {"packed",
     {1, 230, 2, 2, 32, 48},
     kF32,
     Gate::kSoftplus,
     true,
     true,
     false,
     64,
     {0, 1, 64, 0, 65, 70, 0}},
    {"packed_bf16", {1, 150, 1, 4, 32, 48}, kBF16, Gate::kNone, false, true, true, 32, {33, 0, 90}},
    {"empty", {2, 0, 1, 1, 16, 16}},
};

class FastChunk : public testing::TestWithParam<FastCase> {};

TEST_P(FastChunk, ForwardIsNearTheReference) {
  const Problem problem = problem_of(GetParam(), Operation::kChunkForward);
  const Tensors inputs = inputs_of(GetParam(), problem, 1);
  expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
}

TEST_P(FastChunk, BackwardIsNearTheReference) {
  const Problem problem = problem_of(GetParam(), Operation::kChunkBackward);
  const Tensors inputs = inputs_of(GetParam(), problem, 2);
  expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
}

TEST_P(FastChunk, BackwardTakesSavedStates) {
  const Problem forward = problem_of(GetParam(), Operation::kChunkForward);
  Problem backward = problem_of(GetParam(), Operation::kChunkBackward);
  Tensors inputs = inputs_of(GetParam(), backward, 3);
  const Tensors expected = run_reference(backward, inputs);
  inputs[kH] = run_fast(forward, inputs).at(kH);
  backward.set(kH, kF32);
  expect_close(expected, run_fast(backward, inputs));
}

INSTANTIATE_TEST_SUITE_P(Cases, FastChunk, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

/// Gates that break sums of cumulative decays: strong, none, mixed, reset.
TEST(FastChunkGates, AnyDecayKeepsItsAccuracy) {
  const FastCase c{"gates", {1, 200, 1, 1, 64, 64}};
  const Problem problem = problem_of(c, Operation::kChunkBackward);
  for (const double strength : {0.0, -1e-4, -5.0, -28.0, -500.0, -HUGE_VAL}) {
    SCOPED_TRACE(strength);
    for (const std::size_t stride : {1, 2, 64 * 37}) {
      Tensors inputs = inputs_of(c, problem, 4);
      for (std::size_t i = 0; i < inputs[kG].size(); i += stride) inputs[kG][i] = strength;
      expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
    }
  }
}

/// A rounding of exp(g) that repeats at every token must not build up.
TEST(FastChunkGates, LongSlowDecayKeepsItsAccuracy) {
  const FastCase c{"slow", {1, 4096, 1, 1, 32, 32}};
  const Problem problem = problem_of(c, Operation::kChunkBackward);
  Tensors inputs = inputs_of(c, problem, 9);
  for (double& g : inputs[kG]) g = -1e-4;
  expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
}

TEST(FastChunkGates, ClampedTokensHaveNoGateGradient) {
  const FastCase c{"clamped", {1, 80, 1, 1, 16, 16}};
  const Problem problem = problem_of(c, Operation::kChunkBackward);
  Tensors inputs = inputs_of(c, problem, 5);
  for (std::size_t i = 0; i < inputs[kG].size(); i += 7) inputs[kG][i] = -41;
  const Tensors outputs = run_fast(problem, inputs);
  for (std::size_t i = 0; i < inputs[kG].size(); i += 7) EXPECT_EQ(outputs.at(kDg)[i], 0);
}

TEST(FastChunkKeys, EqualKeysStayExact) {
  const FastCase c{"same_keys", {1, 128, 1, 1, 64, 64}};
  const Problem problem = problem_of(c, Operation::kChunkBackward);
  Tensors inputs = inputs_of(c, problem, 6);
  for (std::size_t i = 64; i < inputs[kK].size(); ++i) inputs[kK][i] = inputs[kK][i - 64];
  for (double& g : inputs[kG]) g = 0;
  for (double& beta : inputs[kBeta]) beta = 1;
  expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
}

/// What is not asked for is not needed by what is.
TEST(FastChunkOutputs, EachGradientAlone) {
  const FastCase c{"alone", {1, 100, 1, 2, 32, 32}, kF32, Gate::kSoftplus, true};
  Problem problem = problem_of(c, Operation::kChunkBackward);
  const Tensors inputs = inputs_of(c, problem, 7);
  const Tensors all = run_fast(problem, inputs);
  for (const auto& [id, values] : all) {
    Problem one = problem;
    one.set(id, kF32);
    const Tensors alone = run(one, inputs, {0, false, "cpu"});
    ASSERT_EQ(alone.size(), 1u);
    EXPECT_EQ(alone.at(id), values) << name_of(id);
  }
}

/// Outputs in 16 bits are the fp32 ones, rounded once to nearest even.
TEST(FastChunkOutputs, RoundOnce) {
  const FastCase c{"round", {1, 80, 1, 1, 40, 70}};
  Problem problem = problem_of(c, Operation::kChunkForward);
  Tensors inputs = inputs_of(c, problem, 8);
  // From subnormal fp16 to beyond its largest number.
  for (std::size_t i = 0; i < inputs[kV].size(); ++i) {
    inputs[kV][i] *= std::pow(10.0, static_cast<double>(i / 70 % 14) - 8.0);
  }
  const Tensors wide = run_fast(problem, inputs);
  for (const DType dtype : {kBF16, kF16}) {
    Problem narrow = problem;
    narrow.set(kO, dtype);
    const Values rounded = run(narrow, inputs, {0, false, "cpu"}).at(kO);
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      const double x = wide.at(kO)[i];
      const float expected = dtype == kBF16 ? float_of_bf16(bf16_of(x)) : float_of_f16(f16_of(x));
      ASSERT_EQ(rounded[i], static_cast<double>(expected)) << x;
    }
  }
}

TEST(FastChunkFeatures, NamesTheFp64Tensor) {
  Problem problem = Problem::make(Operation::kChunkForward, {1, 8, 1, 1, 4, 4}, kF32);
  problem.set(kBeta, DType::kF64);
  const Status status = supports(problem, {}, {"cpu", 0});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("does not take fp64 tensors (beta)"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace kda
