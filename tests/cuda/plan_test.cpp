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

Problem chunked(Operation operation, const Sizes& sizes) {
  Problem problem = Problem::make(operation, sizes, DType::kBF16);
  problem.gate = Gate::kSoftplus;
  problem.set(TensorId::kALog, DType::kF32).set(TensorId::kInitialState, DType::kF32);
  if (sizes.N > 0) problem.set(TensorId::kCuSeqlens, DType::kI64);
  if (operation == Operation::kChunkForward) return problem.set(TensorId::kFinalState, DType::kF32);
  for (const TensorId id : {TensorId::kDq, TensorId::kDk, TensorId::kDv, TensorId::kDg}) {
    problem.set(id, DType::kBF16);
  }
  return problem.set(TensorId::kDALog, DType::kF32).set(TensorId::kDinitialState, DType::kF32);
}

Result<Plan> plan_within(const Problem& problem, std::size_t limit, const char* choice) {
  Options options;
  options.implementation = choice;
  options.workspace_limit = limit;
  return make_plan(problem, kGpu, options);
}

constexpr const char* kChoices[] = {"", "sm90", "cuda"};
constexpr Operation kChunked[] = {Operation::kChunkForward, Operation::kChunkBackward};

/// What the refusal of too low a limit names.
std::size_t least_of(const Problem& problem, const char* choice) {
  const Status refused = plan_within(problem, 1000, choice).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  const std::string text = "workspace_limit: found 1000 bytes, expected ";
  const std::size_t at = refused.message().find(text);
  if (at == std::string::npos) {
    ADD_FAILURE() << refused.message();
    return 0;
  }
  return std::stoul(refused.message().substr(at + text.size()));
}

// Of each row: any limit from what it needs without one down to the least it names.
TEST(CudaPlan, KeepsToALimitOfTheWorkspaceOrNamesTheLeast) {
  for (const Operation operation : kChunked) {
    const Problem problem = chunked(operation, {6, 2000, 4, 8, 128, 128, 0, 0});
    for (const char* choice : kChoices) {
      const std::string which = std::string(name_of(operation)) + " by \"" + choice + "\"";
      const Plan free = plan_within(problem, 0, choice).value();
      const std::size_t all = free.workspace_bytes();
      const Plan loose = plan_within(problem, all, choice).value();
      EXPECT_EQ(loose.workspace_bytes(), all) << which;
      for (const std::size_t part : {2U, 3U, 6U}) {
        const Result<Plan> plan = plan_within(problem, all / part, choice);
        ASSERT_TRUE(plan.ok()) << which << ": " << plan.status().message();
        EXPECT_EQ(plan->implementation(), free.implementation());
        EXPECT_LE(plan->workspace_bytes(), all / part) << which;
        // As much of it as slices allow: no further cut than needed.
        EXPECT_GE(3 * plan->workspace_bytes(), all / part) << which;
      }
      const std::size_t least = least_of(problem, choice);
      EXPECT_LT(least, all / 6) << which;
      EXPECT_EQ(plan_within(problem, least, choice).value().workspace_bytes(), least) << which;
      EXPECT_EQ(plan_within(problem, least, choice).value().implementation(),
                free.implementation());
    }
    EXPECT_LT(least_of(problem, "sm90"), least_of(problem, "")) << "without generic kernels";
  }
}

// S1 of the training benchmarks, which the row cuts by itself.
TEST(CudaPlan, ALimitThatIsKeptChangesNothing) {
  const Problem problem = chunked(Operation::kChunkBackward, {1, 8192, 96, 96, 128, 128, 0, 0});
  const std::size_t all = plan_within(problem, 0, "sm90").value().workspace_bytes();
  for (const std::size_t limit : {all, 10 * all}) {
    EXPECT_EQ(plan_within(problem, limit, "sm90").value().workspace_bytes(), all);
  }
}

// Within what one sequence needs all of its heads stay together.
TEST(CudaPlan, CutsSequencesBeforeHeads) {
  for (const char* choice : {"sm90", "cuda"}) {
    Problem one = chunked(Operation::kChunkForward, {1, 2000, 4, 8, 128, 128, 0, 0});
    const std::size_t of_one = plan_within(one, 0, choice).value().workspace_bytes();
    const Problem six = chunked(Operation::kChunkForward, {6, 2000, 4, 8, 128, 128, 0, 0});
    EXPECT_EQ(plan_within(six, of_one, choice).value().workspace_bytes(), of_one) << choice;
  }
}

// Sums over all sequences need the parts of each until the last one is there.
TEST(CudaPlan, KeepsThePartsOfGateGradientsForTheWholeBatch) {
  const Problem with = chunked(Operation::kChunkBackward, {6, 2000, 1, 2, 128, 128, 0, 0});
  Problem without = with;
  without.set(TensorId::kDALog, DType::kNone);
  constexpr std::size_t kRow = 2 * (128 + 1) * sizeof(float);  // of two value heads
  constexpr std::size_t kRows = 6 * 32;                        // chunks of 64 tokens
  EXPECT_EQ(least_of(with, "cuda") - least_of(without, "cuda"), kRows * kRow);
  EXPECT_EQ(least_of(with, "sm90") - least_of(without, "sm90"), 2 * kRows * kRow);
}

// Where their sequences begin is known on the device only.
TEST(CudaPlan, PackedSequencesAreCutByHeadsAlone) {
  for (const Operation operation : kChunked) {
    for (const char* choice : {"sm90", "cuda"}) {
      const Problem whole = chunked(operation, {1, 12000, 4, 8, 128, 128, 6, 0});
      const Problem head = chunked(operation, {1, 12000, 1, 2, 128, 128, 6, 0});
      const std::size_t of_head = plan_within(head, 0, choice).value().workspace_bytes();
      EXPECT_EQ(plan_within(whole, of_head, choice).value().workspace_bytes(), of_head);
      const Status refused = plan_within(whole, of_head - 1, choice).status();
      EXPECT_NE(refused.message().find(std::to_string(of_head) + " or more"), std::string::npos)
          << refused.message();
    }
  }
}

// Rows that are not cut say what they need; those without a workspace keep to any limit.
TEST(CudaPlan, AnyRowKeepsToTheLimit) {
  EXPECT_EQ(plan_within(decode(64, 1), 1, "cuda").value().workspace_bytes(), 0U);
  const Problem many = decode(4096, 1);
  const std::size_t counter = plan_within(many, 0, "sm90").value().workspace_bytes();
  ASSERT_GT(counter, 1U);
  EXPECT_EQ(plan_within(many, 1, "sm90").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(plan_within(many, 1, "").value().implementation(), "cuda_recurrent");
  Problem scan =
      Problem::make(Operation::kStateScan, {2, 8192, 1, 96, 128, 128, 0, 0}, DType::kBF16);
  scan.set(TensorId::kDo, DType::kBF16).set(TensorId::kDqRaw, DType::kF32);
  const std::size_t all = plan_within(scan, 0, "cuda").value().workspace_bytes();
  EXPECT_LE(plan_within(scan, all / 100, "cuda").value().workspace_bytes(), all / 100);
}

TEST(CudaPlan, VerdictsHaveTheWorkspace) {
  const Problem problem = chunked(Operation::kChunkBackward, {6, 2000, 4, 8, 128, 128, 0, 0});
  Options options;
  options.workspace_limit = std::size_t{40} << 20;
  const std::vector<Verdict> verdicts = explain(problem, kGpu, options).value();
  for (const Verdict& verdict : verdicts) {
    const std::string name(verdict.name);
    EXPECT_TRUE(verdict.supported) << name << ": " << verdict.reason;
    EXPECT_GT(verdict.workspace_bytes, 0U) << name;
    EXPECT_LE(verdict.workspace_bytes, options.workspace_limit) << name;
  }
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
  const Result<Plan> plan = plan_within(problem, 0, "sm90_chunk_bwd");
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

// h is the caller's memory, outside of the limit, which a row that reads it keeps to with less.
TEST(CudaPlan, ALimitIsKeptBesideKeptCheckpoints) {
  const Sizes sizes{6, 2000, 4, 8, 128, 128, 0, 0};
  const Problem kept = backward(sizes, DType::kBF16);
  const std::size_t h_of_head =
      std::size_t{32} * 2 * 128 * 128 * 2;  // one sequence, two value heads
  EXPECT_EQ(least_of(kept, "sm90") + h_of_head, least_of(backward(sizes, DType::kNone), "sm90"));
  const std::size_t all = workspace_of(kept);
  for (const char* choice : {"", "sm90"}) {
    for (const std::size_t limit : {all, all / 2, all / 5, least_of(kept, choice)}) {
      const Result<Plan> plan = plan_within(kept, limit, choice);
      ASSERT_TRUE(plan.ok()) << choice << ": " << plan.status().message();
      EXPECT_EQ(plan->implementation(), "sm90_chunk_bwd");
      EXPECT_LE(plan->workspace_bytes(), limit) << choice;
      EXPECT_GE(3 * plan->workspace_bytes(), limit) << choice;
    }
  }
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
