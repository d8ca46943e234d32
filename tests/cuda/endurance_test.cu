// A long run on a GPU: thousands of calls of changing shapes, many threads, and errors of others.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "support/calls.h"
#include "support/steps.h"
#include "support/together.h"

namespace kda::test {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;

/// Device memory for the tensors of any step, filled once.
class Steps {
 public:
  Steps() : workspace_(kWorkspaceBytes) {
    for (int id = 0; id < kTensorCount; ++id) {
      memory_.emplace_back(kStepBytes);
      require(cudaMemset(memory_.back().address(), fill_of(static_cast<TensorId>(id)), kStepBytes));
    }
    require(cudaDeviceSynchronize());
  }

  /// Enqueues the step: "" or what went wrong. `implementation` "" takes the default.
  std::string run(int64_t step, const char* implementation) {
    const Problem problem = problem_of_step(step, StepSizes::kModels);
    const Result<Plan> plan = make_plan(problem, {DeviceType::kCuda, 0}, choosing(implementation));
    if (!plan.ok()) return plan.status().message();
    if (plan->workspace_bytes() > kWorkspaceBytes) return "the test's workspace is too small";
    Args args;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (problem.has(spec.id)) args.out(spec.id, memory_[index(spec.id)].address());
    }
    const auto starts = starts_of_step(step);
    require(cudaMemcpyAsync(memory_[index(kCuSeqlens)].address(), starts.data(), sizeof starts,
                            cudaMemcpyHostToDevice, stream_));
    args.workspace = workspace_.address();
    args.workspace_bytes = kWorkspaceBytes;
    count_call(plan->implementation());
    return plan->run(args, stream_).message();
  }

  void wait() const { require(cudaStreamSynchronize(stream_)); }

  /// The bytes of all outputs of a step.
  std::string outputs(int64_t step) const {
    wait();
    const Problem problem = problem_of_step(step, StepSizes::kModels).validated().value();
    std::string bytes;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (spec.role == Role::kInput || !problem.has(spec.id)) continue;
      const std::size_t begin = bytes.size();
      bytes.resize(begin + static_cast<std::size_t>(problem.bytes(spec.id)));
      require(cudaMemcpy(bytes.data() + begin, memory_[index(spec.id)].address(),
                         bytes.size() - begin, cudaMemcpyDeviceToHost));
    }
    return bytes;
  }

 private:
  static std::size_t index(TensorId id) { return static_cast<std::size_t>(id); }

  std::vector<DeviceBuffer> memory_;
  DeviceBuffer workspace_;
  Stream stream_;
};

std::size_t used_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total));
  return total - free;
}

/// By turns: the default, which on Hopper takes the rows made for it where they take the step, and
/// the generic rows.
const char* implementation_of(int64_t step) { return step % 2 == 0 ? "" : "cuda"; }

// MEM-01, over a long run.
TEST(CudaEndurance, TenThousandCallsLeaveNoMemoryBehind) {
  KDA_NEEDS_GPU();
  constexpr int64_t kWarmUp = 1500;  // more than the steps repeat after
  constexpr int64_t kCalls = 10000;
  constexpr int64_t kMostGrowth = 4 << 20;  // of the host: the driver's pools are in it
  Steps steps;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      ASSERT_EQ(steps.run(step, implementation_of(step / 3)), "") << step;
      if (step % 64 == 0) steps.wait();
    }
    steps.wait();
  };
  run(0, kWarmUp);
  const std::size_t device = used_memory();
  const int64_t host = resident_bytes();
  run(kWarmUp, kCalls);
  EXPECT_LE(used_memory(), device);
  EXPECT_LE(resident_bytes() - host, kMostGrowth);
}

TEST(CudaEndurance, SixtyFourThreadsAtOnceGetTheirOwnBits) {
  KDA_NEEDS_GPU();
  constexpr int64_t kTurns = 6;
  expect_own_outputs<Steps>(
      kTurns, [](Steps& steps, int64_t step) { return steps.run(step, implementation_of(step)); },
      [](const Steps& steps, int64_t step) { return steps.outputs(step); });
}

__global__ void nothing() {}
__global__ void fault() { __trap(); }

// A launch that fails in the caller's code, or in a kernel of ours, is that call's error alone.
TEST(CudaErrors, AFailedLaunchDoesNotFailTheNextCall) {
  KDA_NEEDS_GPU();
  const Case c = cases::generate(packed_spec({0, 65, 65, 193, 300}));
  DeviceCase device(backward_problem(c), c.inputs);
  device.run();
  const TensorMap right = device.outputs();
  device.poison_outputs();
  nothing<<<1, 4096>>>();  // no GPU has blocks of so many threads
  const cudaError_t left = cudaPeekAtLastError();
  ASSERT_NE(left, cudaSuccess);
  const Status status = device.plan().run(device.args());
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(cudaGetLastError(), left) << "the caller's error is gone";
  require(cudaDeviceSynchronize());
  expect_same_bits(right, device.outputs());
}

/// In a process of its own, whose context is lost: 0 if every later call says so.
int use_a_lost_context() {
  const Case c = cases::generate(packed_spec({0, 65, 65, 193, 300}));
  DeviceCase device(backward_problem(c), c.inputs);
  device.run();
  fault<<<1, 1>>>();
  if (cudaDeviceSynchronize() == cudaSuccess) return 2;
  for (int call = 0; call < 2; ++call) {
    const Status ran = device.plan().run(device.args());
    const Status planned = supports(device.plan().problem(), {DeviceType::kCuda, 0});
    std::fprintf(stderr, "run: %s\nplan: %s\n", ran.message().c_str(), planned.message().c_str());
    if (ran.code() != StatusCode::kDeviceError || planned.ok()) return 3;
    if (ran.message().find("restart the process") == std::string::npos) return 4;
  }
  return 0;
}

TEST(CudaErrors, AFaultOfAKernelIsSaidByEveryLaterCall) {
  KDA_NEEDS_GPU();
  testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a process without this one's context
  EXPECT_EXIT(std::_Exit(use_a_lost_context()), testing::ExitedWithCode(0), "restart the process");
}

/// In a process of its own: 0 if a child of its fork is told that it cannot use CUDA, and the
/// parent still can.
int fork_after_cuda() {
  const Case c = cases::generate(packed_spec({0, 65, 65, 193, 300}));
  DeviceCase device(backward_problem(c), c.inputs);
  device.run();
  const pid_t child = fork();
  if (child == 0) {
    const Status ran = device.plan().run(device.args());
    const Status planned = supports(device.plan().problem(), {DeviceType::kCuda, 0});
    for (const Status& status : {ran, planned}) {
      std::fprintf(stderr, "child: %s\n", status.message().c_str());
      if (status.code() != StatusCode::kDeviceError) std::_Exit(2);
      if (status.message().find("child of a fork") == std::string::npos) std::_Exit(3);
    }
    std::_Exit(0);
  }
  int status = 1;
  if (waitpid(child, &status, 0) != child || status != 0) return 4;
  device.run();
  return 0;
}

TEST(CudaErrors, AChildOfAForkIsToldThatItCannotUseCuda) {
  KDA_NEEDS_GPU();
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(std::_Exit(fork_after_cuda()), testing::ExitedWithCode(0), "child: ");
}

}  // namespace
}  // namespace kda::test
