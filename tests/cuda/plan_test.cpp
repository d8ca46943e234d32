// Plans on an H200 that is not there. The linker leads the runtime's calls of the library here
// (--wrap), so what making a plan asks, chooses and leaves behind shows without a GPU.
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kda/backend.h"
#include "kda/plan.h"

namespace {

constexpr int kDevices = 1;
constexpr int kMultiprocessors = 132;

/// The runtime's last error of the thread, which a failing call replaces.
cudaError_t pending = cudaSuccess;

cudaError_t fail(cudaError_t error) { return pending = error; }

}  // namespace

// Names that the linker makes.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {
cudaError_t __wrap_cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrMultiProcessorCount  ? kMultiprocessors
                                                          : 0;
  return cudaSuccess;
}

cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetLastError() {
  const cudaError_t error = pending;
  pending = cudaSuccess;
  return error;
}
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace kda {
namespace {

const Device kGpu{DeviceType::kCuda, 0};

Problem decode(int64_t B, int64_t T) {
  Problem problem =
      Problem::make(Operation::kRecurrent, {B, T, 4, 4, 128, 128, 0, 0}, DType::kBF16);
  return problem.set(TensorId::kInitialState, DType::kF32).set(TensorId::kFinalState, DType::kF32);
}

std::string row_of(const Problem& problem, const char* choice = "") {
  const Result<Plan> plan = make_plan(problem, kGpu, {choice, 0});
  return plan.ok() ? std::string(plan->implementation()) : plan.status().message();
}

// As running does not: what the caller has yet to ask the runtime is none of ours.
TEST(CudaPlan, AnErrorOfTheCallerStays) {
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent,
        Operation::kStateScan, Operation::kIntra}) {
    Problem problem = Problem::make(operation, {1, 100, 4, 4, 128, 128, 0, 0}, DType::kBF16);
    if (operation == Operation::kStateScan) problem.set(TensorId::kVNew, DType::kBF16);
    if (operation == Operation::kIntra) problem.set(TensorId::kA, DType::kBF16);
    if (operation == Operation::kChunkBackward) problem.set(TensorId::kDq, DType::kBF16);
    for (const int index : {0, 99, -1}) {
      pending = cudaErrorMemoryAllocation;
      const Status status = make_plan(problem, {DeviceType::kCuda, index}).status();
      EXPECT_EQ(status.ok(), index == 0) << status.message();
      EXPECT_EQ(pending, cudaErrorMemoryAllocation) << name_of(operation) << " on " << index;
    }
  }
}

// For speed alone no choice is refused.
TEST(CudaPlan, FewStatesGoToTheHopperRowByChoiceOnly) {
  for (const Problem& few : {decode(1, 1), decode(32, 3)}) {
    EXPECT_EQ(row_of(few), "cuda_recurrent");
    EXPECT_EQ(row_of(few, "sm90_recurrent"), "sm90_recurrent");
    EXPECT_EQ(row_of(few, "sm90"), "sm90_recurrent");
    EXPECT_EQ(row_of(few, "cuda"), "cuda_recurrent");
  }
  EXPECT_EQ(row_of(decode(33, 1)), "sm90_recurrent");
  EXPECT_EQ(row_of(decode(1, 4)), "sm90_recurrent");
}

TEST(CudaPlan, TheReasonOfFewStatesSaysWhen) {
  const Result<std::vector<Verdict>> verdicts = explain(decode(1, 1), kGpu);
  ASSERT_TRUE(verdicts.ok()) << verdicts.status().message();
  const std::string& reason = verdicts->front().reason;
  EXPECT_EQ(verdicts->front().name, "sm90_recurrent");
  EXPECT_NE(reason.find("4 states of 1 tokens: with fewer than 132 states, one for each SM, and "
                        "fewer than 4 tokens"),
            std::string::npos)
      << reason;
}

}  // namespace
}  // namespace kda
