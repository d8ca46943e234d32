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

/// The backward of a training step that keeps h of that type; kNone: the inputs alone.
Problem backward(const Sizes& sizes, DType h, int32_t chunk_size = 64) {
  Problem problem = Problem::make(Operation::kChunkBackward, sizes, DType::kBF16);
  problem.chunk_size = chunk_size;
  problem.gate = Gate::kSoftplus;
  problem.set(TensorId::kG, DType::kBF16).set(TensorId::kBeta, DType::kBF16);
  problem.set(TensorId::kALog, DType::kF32).set(TensorId::kDALog, DType::kF32);
  for (const TensorId id : {TensorId::kDq, TensorId::kDk, TensorId::kDv, TensorId::kDg}) {
    problem.set(id, DType::kBF16);
  }
  return problem.set(TensorId::kH, h);
}

std::size_t workspace_of(const Problem& problem) {
  const Result<Plan> plan = make_plan(problem, kGpu, {"sm90_chunk_bwd", 0});
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? plan->workspace_bytes() : 0;
}

// One slice of heads with either.
TEST(CudaPlan, KeptCheckpointsTakeNoWorkspace) {
  const Sizes sizes{1, 1000, 4, 4, 128, 128, 0, 0};
  const std::size_t h_bytes = 16 * 4 * 128 * 128 * 2;
  const std::size_t recomputed = workspace_of(backward(sizes, DType::kNone));
  EXPECT_EQ(workspace_of(backward(sizes, DType::kBF16)) + h_bytes, recomputed);
  EXPECT_EQ(workspace_of(backward(sizes, DType::kF32)), recomputed);
  EXPECT_EQ(workspace_of(backward(sizes, DType::kBF16, 32)),
            workspace_of(backward(sizes, DType::kNone, 32)));
}

// o, the gradients, the workspace and a kept h, GB, of the shapes of the performance suite.
TEST(CudaPlan, ATrainingStepKeepsToItsMemory) {
  struct Shape {
    const char* name;
    Sizes sizes;
    double most;
  };
  const Shape shapes[] = {{"S1", {1, 8192, 96, 96, 128, 128, 0, 0}, 2.5},
                          {"S2", {16, 8192, 16, 16, 128, 256, 0, 0}, 9},
                          {"S3", {1, 4096, 16, 16, 128, 128, 0, 0}, 0.3},
                          {"S4", {2, 4096, 64, 64, 128, 128, 0, 0}, 1.7},
                          {"S5", {1, 131072, 32, 32, 128, 128, 0, 0}, 14}};
  for (const Shape& shape : shapes) {
    for (const DType h : {DType::kNone, DType::kBF16}) {
      const Problem problem = backward(shape.sizes, h).validated().value();
      int64_t bytes = problem.bytes(TensorId::kV) + problem.bytes(TensorId::kH);  // o as v
      for (const TensorSpec& spec : tensors_of(problem.operation)) {
        if (spec.role == Role::kOutput) bytes += problem.bytes(spec.id);
      }
      const auto workspace = static_cast<double>(workspace_of(problem));
      const double total = 1e-9 * (static_cast<double>(bytes) + workspace);
      EXPECT_LE(total, shape.most) << shape.name << ", h " << name_of(h);
      RecordProperty(std::string(shape.name) + "_h_" + std::string(name_of(h)),
                     std::to_string(1e-9 * workspace) + " of " + std::to_string(total));
    }
  }
}

}  // namespace
}  // namespace kda
