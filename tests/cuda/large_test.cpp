// Sizes beyond 32 bits and beyond the limits of a grid.
#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "generate.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

/// Skips where the GPU has less free memory.
#define KDA_NEEDS_MEMORY(gigabytes)                                                        \
  KDA_NEEDS_GPU();                                                                         \
  if (std::size_t free = 0, total = 0;                                                     \
      cudaMemGetInfo(&free, &total) != cudaSuccess || free < (gigabytes)*1'000'000'000ULL) \
  GTEST_SKIP() << "needs " << (gigabytes) << " GB of free device memory"

std::vector<int64_t> equal_lengths(int64_t count, int64_t length) {
  std::vector<int64_t> cu;
  for (int64_t i = 0; i <= count; ++i) cu.push_back(i * length);
  return cu;
}

HostTensor rows_of(const HostTensor& tensor, int64_t dim, int64_t begin, int64_t count) {
  std::vector<int64_t> shape = tensor.shape;
  const auto at = static_cast<std::size_t>(dim);
  std::size_t row = size_of(tensor.dtype);
  for (std::size_t i = at + 1; i < shape.size(); ++i) row *= static_cast<std::size_t>(shape[i]);
  shape[at] = count;
  HostTensor part(tensor.dtype, shape);
  std::copy_n(tensor.bytes.begin() + static_cast<std::ptrdiff_t>(row) * begin, part.bytes.size(),
              part.bytes.begin());
  return part;
}

bool by_token(TensorId id) {
  return id != kFinalState && id != kDinitialState && id != kInitialState && id != kDfinalState;
}

/// Sequence i of equal lengths, alone, gives the same bits.
void expect_alone(const Case& c, const Problem& problem, const TensorMap& all, int64_t i,
                  int64_t length) {
  TensorMap inputs;
  for (const auto& [id, tensor] : c.inputs) {
    if (!problem.has(id) || id == kCuSeqlens) continue;
    inputs[id] = by_token(id) ? rows_of(tensor, 1, i * length, length) : rows_of(tensor, 0, i, 1);
  }
  Problem alone = problem;
  alone.sizes.T = length;
  alone.set(kCuSeqlens, DType::kNone);
  DeviceCase device(alone, inputs);
  device.run();
  for (const auto& [id, tensor] : device.outputs()) {
    const HostTensor part =
        by_token(id) ? rows_of(all.at(id), 1, i * length, length) : rows_of(all.at(id), 0, i, 1);
    EXPECT_EQ(part.bytes, tensor.bytes) << name_of(id) << " of sequence " << i;
  }
}

TEST(CudaReports, VARLEN_09_ManySequencesTimesHeads) {
  KDA_NEEDS_GPU();
  constexpr int64_t kCount = 2050;
  constexpr int64_t kLength = 16;
  CaseSpec spec;
  spec.sizes = {1, kCount * kLength, 32, 32, 16, 16, 0, 0};
  spec.io = DType::kBF16;
  spec.cu_seqlens = equal_lengths(kCount, kLength);
  const Case c = cases::generate(spec);
  for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
    DeviceCase device(problem, c.inputs);
    device.run();
    const TensorMap all = device.outputs();
    for (const int64_t i : {int64_t{0}, int64_t{777}, kCount - 1}) {
      expect_alone(c, problem, all, i, kLength);
    }
  }
}

TEST(CudaReports, VARLEN_10_DecodeOfSeventyThousandSequences) {
  KDA_NEEDS_GPU();
  constexpr int64_t kCount = 70000;
  CaseSpec spec;
  spec.sizes = {1, kCount, 1, 1, 16, 16, 0, 0};
  spec.gradients = false;
  spec.cu_seqlens = equal_lengths(kCount, 1);
  const Case c = cases::generate(spec);
  const Problem problem = recurrent_problem(c);
  DeviceCase device(problem, c.inputs);
  device.run();
  const TensorMap all = device.outputs();
  for (const int64_t i : {int64_t{0}, int64_t{65536}, kCount - 1}) {
    expect_alone(c, problem, all, i, 1);
  }
}

// slot x HV x K x V passes 2^31 from slot 2048 on.
TEST(CudaReports, INDEX_04_PoolBeyondTwoToThe31Elements) {
  KDA_NEEDS_MEMORY(10);
  constexpr int64_t kSlots = 2100;
  constexpr int64_t kHeads = 64;
  constexpr std::size_t kSlotBytes = kHeads * 128 * 128 * sizeof(float);
  CaseSpec spec;
  spec.sizes = {3, 2, kHeads, kHeads, 128, 128, 0, 0};
  spec.gradients = false;
  Case c = cases::generate(spec);
  DeviceCase small(recurrent_problem(c), c.inputs);
  small.run();
  const TensorMap expected = small.outputs();

  HostTensor indices(DType::kI32, {3});
  const std::array<int32_t, 3> slots{2048, 2099, 2047};
  std::copy(slots.begin(), slots.end(), reinterpret_cast<int32_t*>(indices.bytes.data()));
  Problem problem = recurrent_problem(c);
  problem.sizes.P = kSlots;
  problem.set(kStateIndices, DType::kI32);
  const Plan plan = make_plan(problem, {DeviceType::kCuda, 0}).value();
  const DeviceBuffer pool(kSlots * kSlotBytes);
  const DeviceBuffer device_indices(indices);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    require(cudaMemcpy(pool.at(static_cast<std::size_t>(slots[i]) * kSlotBytes),
                       c.inputs.at(kInitialState).bytes.data() + i * kSlotBytes, kSlotBytes,
                       cudaMemcpyHostToDevice));
  }
  Args args = small.args();
  args.in(kStateIndices, device_indices.address());
  args.in(kInitialState, pool.address()).out(kFinalState, pool.address());
  ASSERT_TRUE(plan.run(args).ok());
  require(cudaDeviceSynchronize());
  EXPECT_EQ(small.outputs().at(kO).bytes, expected.at(kO).bytes);
  std::vector<std::byte> slot(kSlotBytes);
  for (int64_t i = 0; i < kSlots; ++i) {
    require(cudaMemcpy(slot.data(), pool.at(static_cast<std::size_t>(i) * kSlotBytes), kSlotBytes,
                       cudaMemcpyDeviceToHost));
    const auto used = std::find(slots.begin(), slots.end(), i);
    if (used == slots.end()) {
      ASSERT_TRUE(
          std::all_of(slot.begin(), slot.end(), [](auto b) { return b == std::byte{0xFF}; }))
          << "slot " << i << " changed";
      continue;
    }
    const auto* want = expected.at(kFinalState).bytes.data() + (used - slots.begin()) * kSlotBytes;
    ASSERT_TRUE(std::equal(slot.begin(), slot.end(), want)) << "slot " << i;
  }
}

// T HV K and NC HV K V pass 2^31. The inputs are windows that slide over little memory.
TEST(CudaReports, INDEX_01_SequenceBeyondTwoToThe31Elements) {
  KDA_NEEDS_MEMORY(95);
  constexpr int64_t kHeads = 96;
  constexpr int64_t kTokens = 180224;
  constexpr int64_t kDim = 128;
  constexpr int64_t kStep = 8;
  CaseSpec spec;
  spec.sizes = {1, 4096, 4, 4, kDim, kDim, 0, 0};
  spec.io = DType::kBF16;
  spec.qk_l2norm = true;
  spec.gradients = false;
  spec.initial_state = false;
  const Case source = cases::generate(spec);
  Problem problem = forward_problem(source);
  problem.sizes.T = kTokens;
  problem.sizes.H = problem.sizes.HV = kHeads;
  problem.set(kFinalState, DType::kNone);
  for (const TensorId id : {kQ, kK, kV, kG}) {
    problem.set(id, TensorLayout::strided(source.input(id)->dtype, {1, kTokens, kHeads, kDim},
                                          {1, kStep, kDim, 1}));
  }
  problem.set(kBeta, TensorLayout::strided(DType::kF32, {1, kTokens, kHeads}, {1, 0, 1}));
  problem.set(kO, DType::kBF16).set(kH, DType::kF32);
  const Plan plan = make_plan(problem, {DeviceType::kCuda, 0}).value();

  std::map<TensorId, DeviceBuffer> buffers;
  Args args;
  for (const TensorId id : {kQ, kK, kV, kG, kBeta}) {
    args.in(id, buffers.emplace(id, DeviceBuffer(*source.input(id))).first->second.address());
  }
  const DeviceBuffer o(static_cast<std::size_t>(plan.problem().bytes(kO)));
  const DeviceBuffer h(static_cast<std::size_t>(plan.problem().bytes(kH)));
  const DeviceBuffer workspace(plan.workspace_bytes());
  args.out(kO, o.address()).out(kH, h.address());
  args.workspace = workspace.address();
  args.workspace_bytes = plan.workspace_bytes();
  ASSERT_TRUE(plan.run(args).ok());
  require(cudaDeviceSynchronize());

  // The last chunk again, from the state that entered it.
  Problem last = problem;
  constexpr int64_t kBegin = kTokens - 64;
  last.sizes.T = 64;
  for (const TensorId id : {kQ, kK, kV, kG}) {
    last.set(id,
             TensorLayout::strided(problem[id].dtype, {1, 64, kHeads, kDim}, {1, kStep, kDim, 1}));
    args.in(id, buffers.at(id).at(static_cast<std::size_t>(kBegin * kStep) *
                                  size_of(problem[id].dtype)));
  }
  last.set(kBeta, TensorLayout::strided(DType::kF32, {1, 64, kHeads}, {1, 0, 1}));
  last.set(kH, DType::kNone).set(kInitialState, DType::kF32);
  const Plan again = make_plan(last, {DeviceType::kCuda, 0}).value();
  const auto bytes = static_cast<std::size_t>(again.problem().bytes(kO));
  const DeviceBuffer tail(bytes);
  args.out(kO, tail.address());
  args.in(kInitialState, h.at((kTokens / 64 - 1) * std::size_t{kHeads * kDim * kDim} * 4));
  ASSERT_TRUE(again.run(args).ok());
  require(cudaDeviceSynchronize());
  std::vector<std::byte> whole_tail(bytes), own(bytes);
  require(cudaMemcpy(whole_tail.data(), o.at(kBegin * std::size_t{kHeads * kDim} * 2), bytes,
                     cudaMemcpyDeviceToHost));
  require(cudaMemcpy(own.data(), tail.address(), bytes, cudaMemcpyDeviceToHost));
  EXPECT_EQ(whole_tail, own);
}

}  // namespace
}  // namespace kda::test
