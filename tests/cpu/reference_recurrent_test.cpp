// Token-by-token decoding: steps, states in place, and the pool.
#include <array>
#include <string>

#include <gtest/gtest.h>

#include "reference_support.h"

namespace kda {
namespace {

using enum TensorId;

Problem decode(int64_t B, int64_t T) {
  Problem problem = Problem::make(Operation::kRecurrent,
                                  {.B = B, .T = T, .H = 1, .HV = 2, .K = 4, .V = 3}, DType::kF64);
  problem.gate = Gate::kSoftplus;
  problem.qk_l2norm = problem.beta_sigmoid = true;
  problem.set(kALog, DType::kF64).set(kInitialState, DType::kF64).set(kFinalState, DType::kF64);
  return problem;
}

TEST(ReferenceRecurrent, StepsGiveTheBitsOfTheChunkForward_DECODE_01) {
  const Problem whole = decode(1, 100);
  const Tensors inputs = random_inputs(whole, 41);
  Problem chunked = with_operation(whole, Operation::kChunkForward);
  chunked.set(kFinalState, DType::kF64);
  Values o;
  Values state = inputs.at(kInitialState);
  for (std::size_t t = 0; t < 100; ++t) {
    Tensors step{{kALog, inputs.at(kALog)}, {kInitialState, state}};
    for (TensorId id : {kQ, kK, kV, kG, kBeta}) {
      const Values& all = inputs.at(id);
      const std::size_t width = all.size() / 100;
      for (std::size_t i = 0; i < width; ++i) step[id].push_back(all[t * width + i]);
    }
    const Tensors outputs = run(decode(1, 1), step, {.in_place = true});
    state = outputs.at(kFinalState);
    o.insert(o.end(), outputs.at(kO).begin(), outputs.at(kO).end());
  }
  const Tensors expected = run(chunked, inputs);
  EXPECT_EQ(o, expected.at(kO));
  EXPECT_EQ(state, expected.at(kFinalState));
}

/// Three sequences in a pool of five states.
Problem pooled() {
  Problem problem = decode(3, 2);
  problem.sizes.P = 5;
  problem.set(kStateIndices, DType::kI32);
  return problem;
}

constexpr std::size_t kStateSize = std::size_t{2} * 4 * 3;  // HV, K, V

Values state_of(const Values& states, std::size_t slot) {
  Values state;
  for (std::size_t i = 0; i < kStateSize; ++i) state.push_back(states[slot * kStateSize + i]);
  return state;
}

TEST(ReferenceRecurrent, PoolSlotsAreReadAndWrittenInPlaceAndOthersStay) {
  const Problem problem = pooled();
  Tensors inputs = random_inputs(problem, 42);
  inputs[kStateIndices] = {4, -1, 0};
  const Tensors outputs = run(problem, inputs, {.in_place = true});
  Tensors separate = inputs;
  separate[kInitialState] = state_of(inputs[kInitialState], 4);
  for (double x : Values(kStateSize)) separate[kInitialState].push_back(x);
  for (double x : state_of(inputs[kInitialState], 0)) separate[kInitialState].push_back(x);
  const Tensors expected = run(decode(3, 2), separate);
  const Values& pool = outputs.at(kFinalState);
  EXPECT_EQ(state_of(pool, 4), state_of(expected.at(kFinalState), 0));
  EXPECT_EQ(state_of(pool, 0), state_of(expected.at(kFinalState), 2));
  for (std::size_t slot : {1u, 2u, 3u}) {
    EXPECT_EQ(state_of(pool, slot), state_of(inputs[kInitialState], slot));
  }
  constexpr std::size_t kRows = std::size_t{2} * 2 * 3;  // T, HV, V
  for (std::size_t i = 0; i < 3 * kRows; ++i) {
    EXPECT_EQ(outputs.at(kO)[i], i / kRows == 1 ? 0 : expected.at(kO)[i]);
  }
}

TEST(ReferenceRecurrent, WrongPoolSlotsAreNamed) {
  const Problem problem = pooled();
  Tensors inputs = random_inputs(problem, 43);
  const auto message = [&](const Values& indices) {
    inputs[kStateIndices] = indices;
    const Status status = try_run(problem, inputs, {.in_place = true}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message({0, 5, 1}), "state_indices[1]: found 5, expected -1..4");
  EXPECT_EQ(message({-2, 3, 1}), "state_indices[0]: found -2, expected -1..4");
  EXPECT_EQ(message({2, -1, 2}),
            "state_indices[2]: found 2, expected a slot that no earlier sequence has");
}

TEST(ReferenceRecurrent, OnlyAcceptedTokensRun) {
  Problem problem = decode(4, 3);
  problem.set(kNumAccepted, DType::kI32);
  Tensors inputs = random_inputs(problem, 45);
  inputs[kNumAccepted] = {2, 0, 3, 1};
  const Tensors outputs = run(problem, inputs, {.in_place = true});
  constexpr std::size_t kRow = std::size_t{2} * 3;  // HV, V
  for (std::size_t n = 0; n < 4; ++n) {
    const auto count = static_cast<std::size_t>(inputs[kNumAccepted][n]);
    Problem alone = decode(1, static_cast<int64_t>(count));
    Tensors part{{kALog, inputs.at(kALog)}, {kInitialState, state_of(inputs.at(kInitialState), n)}};
    for (TensorId id : {kQ, kK, kV, kG, kBeta}) {
      const Values& all = inputs.at(id);
      const std::size_t width = all.size() / 12;
      part[id] = Values(all.begin() + static_cast<std::ptrdiff_t>(n * 3 * width),
                        all.begin() + static_cast<std::ptrdiff_t>((n * 3 + count) * width));
    }
    const Tensors expected = run(alone, part);
    EXPECT_EQ(state_of(outputs.at(kFinalState), n), expected.at(kFinalState)) << n;
    for (std::size_t i = 0; i < 3 * kRow; ++i) {
      EXPECT_EQ(outputs.at(kO)[n * 3 * kRow + i], i < count * kRow ? expected.at(kO)[i] : 0) << n;
    }
  }
}

TEST(ReferenceRecurrent, WrongCountsOfAcceptedTokensAreNamed) {
  Problem problem = pooled();
  problem.set(kNumAccepted, DType::kI32);
  Tensors inputs = random_inputs(problem, 46);
  inputs[kStateIndices] = {4, -1, 0};
  const auto message = [&](const Values& counts) {
    inputs[kNumAccepted] = counts;
    return try_run(problem, inputs, {.in_place = true}).status().message();
  };
  EXPECT_EQ(message({0, 0, 3}),
            "num_accepted[2]: found 3, expected 0..2, the tokens of the sequence");
  EXPECT_EQ(message({-1, 0, 2}),
            "num_accepted[0]: found -1, expected 0..2, the tokens of the sequence");
  EXPECT_EQ(message({1, -7, 2}), "") << "a skipped sequence has no count";
}

TEST(ReferenceRecurrent, EmptyInputsKeepTheState) {
  const Problem nothing = decode(2, 0);
  const Tensors inputs = random_inputs(nothing, 44);
  EXPECT_EQ(run(nothing, inputs).at(kFinalState), inputs.at(kInitialState));
  Problem stateless = nothing;
  stateless.set(kInitialState, DType::kNone);
  EXPECT_EQ(run(stateless, inputs).at(kFinalState), Values(2 * kStateSize));
}

}  // namespace
}  // namespace kda
