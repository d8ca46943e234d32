// What calls cost beside their kernels: host time, launches, first calls of a length, memory.
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "execute.h"
#include "generate.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using enum TensorId;

CaseSpec bf16_spec(const Sizes& sizes) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = spec.gate_dtype = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  return spec;
}

/// The least of many runs: others may use the processor too.
cases::HostCost least_cost(const Problem& problem, const cases::TensorMap& inputs) {
  constexpr int kRuns = 200;
  const Device device{DeviceType::kCuda, 0};
  const Plan plan = make_plan(problem, device).value();
  const std::unique_ptr<cases::Placement> placement = cases::make_placement(device).value();
  Args args;
  cases::TensorMap outputs;
  if (Status status = cases::bind(plan.problem(), inputs, outputs, *placement, args); !status.ok())
    throw Error(status);
  args.workspace = placement->workspace(plan.workspace_bytes()).value();
  args.workspace_bytes = plan.workspace_bytes();
  (void)placement->measure(plan, args).value();
  cases::HostCost least = placement->host_cost(plan, args).value();
  for (int i = 0; i < kRuns; ++i) {
    least.seconds = std::min(least.seconds, placement->host_cost(plan, args).value().seconds);
  }
  return least;
}

// Small calls are not held up by their host side: a forward takes at most 60 us of it, a step of
// decoding 15.
TEST(CudaReports, PERF_06_SmallCallsCostTheHostLittle) {
  KDA_NEEDS_GPU();
  const Case prefill = cases::generate(bf16_spec({1, 64, 4, 4, 128, 128, 0, 0}));
  const cases::HostCost forward = least_cost(forward_problem(prefill), prefill.inputs);
  EXPECT_LE(forward.seconds, 60e-6);
  EXPECT_LE(forward.launches, 5);
  const Case token = cases::generate(bf16_spec({1, 1, 4, 4, 128, 128, 0, 0}));
  const cases::HostCost step = least_cost(recurrent_problem(token), token.inputs);
  EXPECT_LE(step.seconds, 15e-6);
  EXPECT_LE(step.launches, 2);
}

/// Seconds of making a plan, running it and waiting.
double seconds_of_call(const Problem& problem, Args args, const DeviceBuffer& workspace) {
  require(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  const Plan plan = make_plan(problem, {DeviceType::kCuda, 0}).value();
  args.workspace = workspace.address();
  args.workspace_bytes = plan.workspace_bytes();
  if (Status status = plan.run(args); !status.ok()) throw Error(status);
  require(cudaDeviceSynchronize());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Nothing is compiled, tuned or looked up by length: the first call of one costs what the second
// does.
TEST(CudaReports, PERF_03_NewLengthsCostNoMore) {
  KDA_NEEDS_GPU();
  constexpr int64_t kMost = 8192;
  constexpr int kCalls = 200;
  const Case c = cases::generate(bf16_spec({1, kMost, 2, 2, 128, 128, 0, 0}));
  DeviceCase longest(forward_problem(c), c.inputs);
  const DeviceBuffer workspace(longest.plan().workspace_bytes());
  longest.run();
  std::vector<int64_t> slow;
  for (int i = 0; i < kCalls; ++i) {
    Problem problem = longest.plan().problem();
    problem.sizes.T = 1000 + i * 5099 % (kMost - 1000);  // 5099 and 7192 share no factor
    for (TensorLayout& layout : problem.tensors) {
      if (layout.present() && layout.rank >= 3 && layout.shape[1] == kMost)
        layout = {layout.dtype, 0, {}, {}};
    }
    const double first = seconds_of_call(problem, longest.args(), workspace);
    const double second = seconds_of_call(problem, longest.args(), workspace);
    if (first > 2 * second + 1e-4) slow.push_back(problem.sizes.T);
  }
  // An interrupt may hit a call; what grows with the number of lengths hits all.
  EXPECT_LE(slow.size(), kCalls / 20U);
}

// The report's shape, B1 T32768 H32 K = V = 128 in bf16. Nothing is kept between the directions;
// inside, no call takes more than six times its inputs (g, beta and scores in fp32, states).
TEST(CudaReports, MEM_03_LongContextsNeedAFewTimesTheirInputs) {
  KDA_NEEDS_GPU();
  const Sizes sizes{1, 32768, 32, 32, 128, 128, 0, 0};
  for (const Operation operation : {Operation::kChunkForward, Operation::kChunkBackward}) {
    Problem problem = Problem::make(operation, sizes, DType::kBF16);
    problem.qk_l2norm = problem.beta_sigmoid = true;
    problem.gate = Gate::kSoftplus;
    problem.set(kG, DType::kBF16).set(kBeta, DType::kBF16);
    problem.set(kALog, DType::kF32).set(kDtBias, DType::kF32);
    int64_t inputs = 0;
    for (const TensorSpec& spec : tensors_of(operation)) {
      if (spec.role == Role::kInput) inputs += problem.bytes(spec.id);
      if (operation == Operation::kChunkBackward && spec.role == Role::kOutput &&
          spec.id != kDALog && spec.id != kDdtBias && spec.id != kDinitialState) {
        problem.set(spec.id, DType::kBF16);
      }
    }
    const Plan plan = make_plan(problem, {DeviceType::kCuda, 0}).value();
    EXPECT_LE(plan.workspace_bytes(), static_cast<std::size_t>(6 * inputs)) << name_of(operation);
  }
}

}  // namespace
}  // namespace kda::test
