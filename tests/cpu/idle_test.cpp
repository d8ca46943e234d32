// Without tokens a run costs what its tensors cost, however many heads and sequences there are.
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kda/kda.h"

namespace kda {
namespace {

using enum TensorId;

constexpr std::size_t kAlignment = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// Runs on one thread.
Status run_alone(const Problem& problem, Args args, const std::string& family) {
  Options options;
  options.implementation = family;
  options.threads = 1;
  Result<Plan> plan = make_plan(problem, {}, options);
  if (!plan.ok()) return plan.status();
  args.workspace_bytes = (plan->workspace_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  if (args.workspace_bytes > std::size_t{1} << 28) {
    return {StatusCode::kOutOfMemory, "a workspace that nothing needs"};
  }
  const std::unique_ptr<void, Free> workspace(std::aligned_alloc(kAlignment, args.workspace_bytes));
  args.workspace = workspace.get();
  return plan->run(args);
}

class WithoutTokens : public testing::TestWithParam<const char*> {};

/// All tensors that have no element without a token.
void set_rows_of_tokens(Problem& problem) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const bool rows = spec.shape.starts_with("[B,T,") || spec.shape.starts_with("[NC,");
    if (rows) problem.set(spec.id, DType::kF32);
  }
}

// A loop over heads or batches would not end.
TEST_P(WithoutTokens, HeadsAndBatchesCostNothing) {
  constexpr int64_t kMany = int64_t{1} << 40;
  for (std::size_t number = 0; number < kOperationCount; ++number) {
    const auto operation = static_cast<Operation>(number);
    for (const bool heads : {true, false}) {
      Problem problem = Problem::make(operation,
                                      {.B = heads ? 1 : kMany,
                                       .T = 0,
                                       .H = heads ? kMany : 1,
                                       .HV = heads ? kMany : 1,
                                       .K = 4,
                                       .V = 4},
                                      DType::kF32);
      set_rows_of_tokens(problem);
      const Status status = run_alone(problem, {}, GetParam());
      EXPECT_TRUE(status.ok()) << name_of(operation) << ": " << status.message();
    }
  }
}

TEST_P(WithoutTokens, PackedListsAreReadAndHeadsCostNothing) {
  constexpr int64_t kMany = int64_t{1} << 40;
  Problem problem =
      Problem::make(Operation::kChunkForward,
                    {.B = 1, .T = 0, .H = kMany, .HV = kMany, .K = 4, .V = 4, .N = 2}, DType::kF32);
  problem.set(kCuSeqlens, DType::kI64);
  std::vector<int64_t> starts{0, 0, 0};
  Args args;
  args.in(kCuSeqlens, starts.data());
  EXPECT_TRUE(run_alone(problem, args, GetParam()).ok());
  starts[1] = 1;
  EXPECT_EQ(run_alone(problem, args, GetParam()).message(),
            "cu_seqlens[1]: found 1, expected at most T = 0");
}

TEST_P(WithoutTokens, GradientsOfParametersAreZero) {
  for (const int64_t B : {int64_t{2}, int64_t{1} << 40}) {
    Problem problem = Problem::make(Operation::kChunkBackward,
                                    {.B = B, .T = 0, .H = 3, .HV = 3, .K = 4, .V = 4}, DType::kF32);
    problem.gate = Gate::kSoftplus;
    for (const TensorId id : {kALog, kDtBias, kDALog, kDdtBias}) problem.set(id, DType::kF32);
    problem.set(kDdtBias, TensorLayout::strided(DType::kF32, {3, 4}, {5, 1}));
    const std::vector<float> A_log(3, 1.0f);
    const std::vector<float> dt_bias(12, 1.0f);
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> dA_log(3, kNan);
    std::vector<float> ddt_bias(15, kNan);
    Args args;
    args.in(kALog, A_log.data()).in(kDtBias, dt_bias.data());
    args.out(kDALog, dA_log.data()).out(kDdtBias, ddt_bias.data());
    const Status status = run_alone(problem, args, GetParam());
    ASSERT_TRUE(status.ok()) << status.message();
    for (const float x : dA_log) EXPECT_EQ(x, 0);
    for (std::size_t i = 0; i < ddt_bias.size(); ++i) {
      if (i % 5 != 4) {
        EXPECT_EQ(ddt_bias[i], 0) << i;
      }
    }
  }
}

TEST_P(WithoutTokens, StatesAreStillCopied) {
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kRecurrent, Operation::kStateScan}) {
    Problem problem =
        Problem::make(operation, {.B = 2, .T = 0, .H = 1, .HV = 1, .K = 2, .V = 2}, DType::kF32);
    problem.set(kInitialState, DType::kF32).set(kFinalState, DType::kF32);
    const std::vector<float> before{1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<float> after(8);
    Args args;
    args.in(kInitialState, before.data()).out(kFinalState, after.data());
    const Status status = run_alone(problem, args, GetParam());
    ASSERT_TRUE(status.ok()) << name_of(operation) << ": " << status.message();
    EXPECT_EQ(before, after) << name_of(operation);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, WithoutTokens, testing::Values("cpu", "reference"),
                         [](const auto& family) { return std::string(family.param); });

}  // namespace
}  // namespace kda
