// The token recurrence of the fast family: decoding, pools, states in place.
#include <string>

#include <gtest/gtest.h>

#include "fast_support.h"

namespace kda {
namespace {

using enum TensorId;

const FastCase kCases[] = {
    {"decode", {4, 1, 2, 4, 128, 128}, DType::kBF16, Gate::kLowerBound, true},
    {"decode_v_first", {4, 1, 2, 4, 64, 96}, DType::kBF16, Gate::kSoftplus, true, true, true},
    {"forty", {1, 40, 1, 1, 64, 64}},
    {"odd", {1, 21, 1, 1, 37, 29}},
    {"V80", {1, 5, 1, 1, 16, 80}},
    {"no_state", {2, 3, 1, 1, 16, 16}, DType::kF32, Gate::kNone, false, false},
    {"packed",
     {1, 60, 1, 2, 24, 40},
     DType::kF16,
     Gate::kNone,
     false,
     true,
     false,
     64,
     {0, 33, 20}},
};

class FastRecurrent : public testing::TestWithParam<FastCase> {};

TEST_P(FastRecurrent, IsNearTheReference) {
  const Problem problem = problem_of(GetParam(), Operation::kRecurrent);
  const Tensors inputs = inputs_of(GetParam(), problem, 21);
  expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
}

TEST_P(FastRecurrent, InPlaceIsTheSame) {
  if (!GetParam().state) return;
  Problem problem = problem_of(GetParam(), Operation::kRecurrent);
  const Tensors inputs = inputs_of(GetParam(), problem, 22);
  want_all_in(problem, DType::kF32);
  expect_equal(run(problem, inputs, {0, false, "cpu"}), run(problem, inputs, {0, true, "cpu"}));
}

INSTANTIATE_TEST_SUITE_P(Cases, FastRecurrent, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

/// A pool of 5 states: slot 3 and slot 0 are used, -1 skips.
struct Pool {
  Problem problem;
  Tensors inputs;
};

Pool pool_of(const Values& indices) {
  const FastCase c{"pool", {3, 1, 1, 2, 16, 32, 0, 5}};
  Pool pool{problem_of(c, Operation::kRecurrent), {}};
  pool.problem.set(kStateIndices, DType::kI32);
  pool.inputs = inputs_of(c, pool.problem, 23);
  pool.inputs[kStateIndices] = indices;
  want_all_in(pool.problem, DType::kF32);
  return pool;
}

TEST(FastRecurrentPool, TouchesNamedSlotsOnly) {
  const Pool pool = pool_of({3, -1, 0});
  const Tensors reference = run(pool.problem, pool.inputs, {0, true, "reference"});
  expect_close(reference, run(pool.problem, pool.inputs, {0, true, "cpu"}));
}

// A draft is verified on the pool itself: nothing is written, and several drafts may start from one
// slot.
TEST(FastRecurrentPool, WithoutFinalStateItIsOnlyRead) {
  for (const char* family : {"cpu", "reference"}) {
    Pool pool = pool_of({3, -1, 0});
    const Tensors written = run(pool.problem, pool.inputs, {0, true, family});
    pool.problem.set(kFinalState, DType::kNone);
    const Tensors read = run(pool.problem, pool.inputs, {0, false, family});
    EXPECT_EQ(read.count(kFinalState), 0u);
    EXPECT_EQ(read.at(kO), written.at(kO));

    Pool twice = pool_of({3, 3, 3});
    twice.problem.set(kFinalState, DType::kNone);
    const Tensors same = run(twice.problem, twice.inputs, {0, false, family});
    const std::size_t row = same.at(kO).size() / 3;
    const Values first(same.at(kO).begin(), same.at(kO).begin() + static_cast<std::ptrdiff_t>(row));
    const Values expected(written.at(kO).begin(),
                          written.at(kO).begin() + static_cast<std::ptrdiff_t>(row));
    EXPECT_EQ(first, expected);
  }
}

TEST(FastRecurrentPool, RefusesWrongIndices) {
  for (const Values& indices : {Values{3, 5, 0}, Values{-2, 1, 0}, Values{3, 1, 3}}) {
    const Pool pool = pool_of(indices);
    std::vector<std::string> messages;
    for (const char* family : {"cpu", "reference"}) {
      const Status status = try_run(pool.problem, pool.inputs, {0, true, family}).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      messages.push_back(status.message());
    }
    EXPECT_EQ(messages.front(), messages.back());
  }
}

}  // namespace
}  // namespace kda
