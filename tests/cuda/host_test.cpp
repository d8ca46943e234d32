// What calls cost beside their kernels, as far as it does not depend on the machine: launches, what
// a new length needs, memory. The host time itself is measured by `kda bench --suite host`.
#include <algorithm>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "generate.h"
#include "support/calls.h"

namespace kda::test {
namespace {

CaseSpec bf16_spec(const Sizes& sizes) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = spec.gate_dtype = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  return spec;
}

struct Launches {
  std::vector<void*> kernels;  ///< sorted
  std::size_t memsets = 0;
};

/// What a run puts on the stream. The capture is global: it fails if the run waits for the device,
/// allocates or copies to the host; and all it may enqueue are kernels and memsets of its
/// workspace.
Launches launches_of(const Plan& plan, const Args& args) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status status = plan.run(args, stream);
  require(cudaStreamEndCapture(stream, &graph));
  if (!status.ok()) throw Error(status);
  count_call(plan.implementation());
  std::size_t count = 0;
  require(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  require(cudaGraphGetNodes(graph, nodes.data(), &count));
  Launches launches;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    require(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset) {
      ++launches.memsets;
      continue;
    }
    EXPECT_EQ(type, cudaGraphNodeTypeKernel);
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    require(cudaGraphKernelNodeGetParams(node, &params));
    launches.kernels.push_back(params.func);
  }
  require(cudaGraphDestroy(graph));
  std::sort(launches.kernels.begin(), launches.kernels.end());
  return launches;
}

std::size_t count_launches(const DeviceCase& device) {
  const Launches launches = launches_of(device.plan(), device.args());
  return launches.kernels.size() + launches.memsets;
}

// The host's part of a small call is its launches: 4 us each on an H200's host.
TEST_P(CudaReports, PERF_06_SmallCallsTakeFewLaunches) {
  const Case c = cases::generate(bf16_spec({1, 64, 4, 4, 128, 128, 0, 0}));
  EXPECT_LE(count_launches(on_device(forward_problem(c), c.inputs)), 4U);
  EXPECT_LE(count_launches(on_device(backward_problem(c), c.inputs)), 8U);
  const Case token = cases::generate(bf16_spec({1, 1, 4, 4, 128, 128, 0, 0}));
  attempt(
      [&] { EXPECT_LE(count_launches(on_device(recurrent_problem(token), token.inputs)), 1U); });
}

// Nothing is compiled, tuned or looked up by length: every length takes kernels that the longest
// one has loaded, with nothing in between. A short one may need fewer: it is not cut into segments.
TEST_P(CudaReports, PERF_03_NewLengthsTakeTheSameKernels) {
  constexpr int64_t kMost = 8192;
  constexpr int kCalls = 200;
  const Case c = cases::generate(bf16_spec({1, kMost, 2, 2, 128, 128, 0, 0}));
  const DeviceCase longest = on_device(forward_problem(c), c.inputs);
  const std::vector<void*> loaded = launches_of(longest.plan(), longest.args()).kernels;
  for (int i = 0; i < kCalls; ++i) {
    Problem problem = longest.plan().problem();
    problem.sizes.T = 1000 + i * 5099 % (kMost - 1000);  // 5099 and 7192 share no factor
    for (TensorLayout& layout : problem.tensors) {
      if (layout.present() && layout.rank >= 3 && layout.shape[1] == kMost)
        layout = {layout.dtype, 0, {}, {}};
    }
    const Plan plan = make_plan(problem, device(), options()).value();
    EXPECT_LE(plan.workspace_bytes(), longest.plan().workspace_bytes());
    const std::vector<void*> taken = launches_of(plan, longest.args()).kernels;
    EXPECT_FALSE(taken.empty());
    EXPECT_TRUE(std::includes(loaded.begin(), loaded.end(), taken.begin(), taken.end()))
        << "T = " << problem.sizes.T;
  }
}

// The report's shape, B1 T32768 H32 K = V = 128 in bf16. Nothing is kept between the directions;
// inside, no call takes more than six times its inputs (g, beta and scores in fp32, states).
TEST_P(CudaReports, MEM_03_LongContextsNeedAFewTimesTheirInputs) {
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
    const Plan plan = make_plan(problem, device(), options()).value();
    count_call(plan.implementation());
    EXPECT_LE(plan.workspace_bytes(), static_cast<std::size_t>(6 * inputs)) << name_of(operation);
  }
}

/// All tensors that have no element without a token, of 2^40 heads or batches without one.
Problem without_tokens(Operation operation, bool many_heads) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const int64_t heads = many_heads ? kMany : 1;
  Problem problem = Problem::make(
      operation, {.B = many_heads ? 1 : kMany, .T = 0, .H = heads, .HV = heads, .K = 4, .V = 4},
      DType::kF32);
  for (const TensorSpec& spec : tensors_of(operation)) {
    const bool rows = spec.shape.starts_with("[B,T,") || spec.shape.starts_with("[NC,");
    if (rows) problem.set(spec.id, DType::kF32);
  }
  return problem;
}

// However many heads and sequences there are: kernels that walk over them would not end.
TEST(CudaHost, WithoutTokensOnlyStatesAndParametersAreWork) {
  KDA_NEEDS_GPU();
  const Device device{DeviceType::kCuda, 0};
  for (std::size_t number = 0; number < kOperationCount; ++number) {
    const auto operation = static_cast<Operation>(number);
    for (const bool many_heads : {true, false}) {
      const Problem problem = without_tokens(operation, many_heads);
      const Launches launches =
          launches_of(make_plan(problem, device, choosing("cuda")).value(), {});
      EXPECT_TRUE(launches.kernels.empty() && launches.memsets == 0) << name_of(operation);
    }
  }
  // The parameters' gradients are zero, which one kernel writes.
  Problem problem = without_tokens(Operation::kChunkBackward, false);
  problem.gate = Gate::kSoftplus;
  for (const TensorId id : {kALog, kDtBias, kDALog, kDdtBias}) problem.set(id, DType::kF32);
  constexpr std::size_t kEach = 256;
  void* memory = nullptr;
  require(cudaMalloc(&memory, 4 * kEach));
  const auto part = [&](std::size_t i) { return static_cast<std::byte*>(memory) + i * kEach; };
  Args args;
  args.in(kALog, part(0)).in(kDtBias, part(1)).out(kDALog, part(2)).out(kDdtBias, part(3));
  const Launches launches = launches_of(make_plan(problem, device, choosing("cuda")).value(), args);
  EXPECT_EQ(launches.kernels.size(), 1U);
  require(cudaFree(memory));
}

}  // namespace
}  // namespace kda::test
