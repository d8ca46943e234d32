// Wrong calls on a GPU: each is refused by name, nothing is launched, and the next call works.
#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "kda/backend.h"

namespace kda::test {
namespace {

/// Runs wrong calls and right ones by turns.
class CudaFaults : public PerFamily {
 protected:
  void SetUp() override {
    PerFamily::SetUp();
    if (IsSkipped()) return;
    case_ = cases::generate(fitted(packed_spec({0, 65, 65, 193, 300})));
    device_.emplace(backward_problem(case_), case_.inputs, 0, options());
    device_->run();
    right_ = device_->outputs();
  }

  void expect_refused(const Args& args, std::string_view words) {
    const Status status = device_->plan().run(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
    EXPECT_EQ(status.message().rfind(words, 0), 0U)
        << status.message() << ", expected " << words << "...";
    expect_next_call_works();
  }

  void expect_next_call_works() {
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    device_->poison_outputs();
    ASSERT_NO_THROW(device_->run());
    expect_same_bits(right_, device_->outputs());
  }

  Case case_;
  std::optional<DeviceCase> device_;
  TensorMap right_;
};

KDA_FOR_EACH_CUDA_FAMILY(CudaFaults);

TEST_P(CudaFaults, EveryMisalignedTensorIsNamed) {
  for (const TensorSpec& spec : tensors_of(Operation::kChunkBackward)) {
    if (!device_->plan().problem().has(spec.id)) continue;
    Args args = device_->args();
    args.out(spec.id, (*device_)[spec.id].at(1));
    expect_refused(args, std::string(name_of(spec.id)) + ": address ");
  }
}

TEST_P(CudaFaults, EveryMissingTensorIsNamed) {
  for (const TensorSpec& spec : tensors_of(Operation::kChunkBackward)) {
    if (!device_->plan().problem().has(spec.id)) continue;
    Args args = device_->args();
    args.out(spec.id, nullptr);
    expect_refused(args, std::string(name_of(spec.id)) + ": null address");
  }
}

TEST_P(CudaFaults, TheWorkspaceIsChecked) {
  Args args = device_->args();
  args.workspace_bytes -= 1;
  expect_refused(args, "workspace: found ");
  args = device_->args();
  args.workspace = static_cast<std::byte*>(args.workspace) + 64;
  expect_refused(args, "workspace: address ");
  args = device_->args();
  std::vector<std::byte> host(args.workspace_bytes + 256);
  void* aligned = host.data();
  std::size_t space = host.size();
  args.workspace = std::align(256, args.workspace_bytes, aligned, space);
  int pageable = 0;
  require(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
  if (pageable == 0) expect_refused(args, "workspace: address ");
}

// Shapes of other conventions are refused before anything is launched, and the context lives.
TEST_P(CudaFaults, STATE_07_WrongShapesReachNoKernel) {
  const Problem& good = device_->plan().problem();
  const auto shaped = [&](TensorId id, std::initializer_list<int64_t> shape) {
    return std::pair{id, TensorLayout::contiguous(good[id].dtype, shape)};
  };
  for (const auto& [id, layout] :
       {shaped(kG, {1, 300, 4}), shaped(kBeta, {1, 300, 4, 1}),
        shaped(kV, {1, 299, 4, good.sizes.V}), shaped(kQ, {1, 300, 3, 64})}) {
    Problem problem = good;
    problem.set(id, layout);
    const Status status = supports(problem, {DeviceType::kCuda, 0}, options());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().rfind(name_of(id), 0), 0U) << status.message();
    expect_next_call_works();
  }
}

// An error that the caller left behind is not ours, and ours do not stay behind.
TEST_P(CudaFaults, AnEarlierErrorOfTheCallerDoesNotFailTheRun) {
  void* nothing = nullptr;
  ASSERT_NE(cudaMalloc(&nothing, ~std::size_t{0} / 2), cudaSuccess);
  const Device gpu{DeviceType::kCuda, 0};
  const Result<Plan> plan = make_plan(device_->plan().problem(), gpu, options());
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_FALSE(supports(device_->plan().problem(), {DeviceType::kCuda, 99}, options()).ok());
  const Status status = device_->plan().run(device_->args());
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation) << "the caller's error is gone";
  expect_next_call_works();
}

TEST_P(CudaFaults, DEV_01_ADeviceThatIsNotThereIsNamed) {
  const Status status = supports(device_->plan().problem(), {DeviceType::kCuda, 99}, options());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message().rfind("device index: found 99", 0), 0U) << status.message();
  expect_next_call_works();
}

// Current device 0, tensors on 1; first use on 1, then on 0.
TEST_P(CudaFaults, DEV_01_TheSecondDeviceWorksWhileTheFirstIsCurrent) {
  int count = 0;
  require(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "needs two GPUs, found " << count;
  require(cudaSetDevice(1));
  DeviceCase other(backward_problem(case_), case_.inputs, 1, options());
  require(cudaSetDevice(0));
  other.run();
  expect_same_bits(right_, other.outputs());
  Args mixed = device_->args();
  mixed.in(kQ, other.args()[kQ]);
  expect_refused(mixed, "q: its memory is on cuda:1");
}

}  // namespace
}  // namespace kda::test
