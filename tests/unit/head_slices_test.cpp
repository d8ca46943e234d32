// Slices of heads: which part of each tensor they take, and how many there are.
#include <array>
#include <cstddef>

#include <gtest/gtest.h>

#include "core/head_slices.h"
#include "kda/kda.h"

namespace kda {
namespace {

using enum TensorId;

Problem backward(const Sizes& sizes) {
  Problem problem = Problem::make(Operation::kChunkBackward, sizes, DType::kBF16);
  problem.gate = Gate::kSoftplus;
  problem.state_v_first = true;
  problem.set(kALog, DType::kF32).set(kDdtBias, DType::kF32).set(kDtBias, DType::kF32);
  for (const TensorId id : {kDq, kDv, kDg}) problem.set(id, DType::kBF16);
  problem.set(kDinitialState, DType::kF32);
  Result<Problem> result = problem.validated();
  EXPECT_TRUE(result.ok()) << result.status().message();
  return *result;
}

int64_t offset_of(const HeadSlice& slice, TensorId id) {
  return slice.offset[static_cast<std::size_t>(id)];
}

TEST(HeadSlices, ArePartsOfTheSameMemory) {
  const Problem whole = backward({.B = 2, .T = 70, .H = 5, .HV = 10, .K = 16, .V = 24});
  const std::vector<HeadSlice> slices = slice_heads(whole, 3);
  ASSERT_EQ(slices.size(), 3U);
  const std::array<int64_t, 4> first = {0, 1, 3, 5};
  for (std::size_t i = 0; i < 3; ++i) {
    const HeadSlice& slice = slices[i];
    const int64_t heads = first[i + 1] - first[i];
    EXPECT_EQ(slice.problem.sizes.H, heads);
    EXPECT_EQ(slice.problem.sizes.HV, 2 * heads);
    EXPECT_TRUE(slice.problem.validated().ok()) << slice.problem.validated().status().message();
    EXPECT_EQ(slice.problem[kQ].shape[2], heads);
    EXPECT_EQ(slice.problem[kQ].stride, whole[kQ].stride);
    EXPECT_EQ(offset_of(slice, kQ), first[i] * 16 * 2);
    EXPECT_EQ(offset_of(slice, kDv), 2 * first[i] * 24 * 2);
    EXPECT_EQ(offset_of(slice, kBeta), 2 * first[i] * 4);
    EXPECT_EQ(offset_of(slice, kALog), 2 * first[i] * 4);
    EXPECT_EQ(offset_of(slice, kDtBias), 2 * first[i] * 16 * 4);
    EXPECT_EQ(offset_of(slice, kDinitialState), 2 * first[i] * 16 * 24 * 4);
    EXPECT_EQ(slice.problem[kDinitialState].shape, (std::array<int64_t, 4>{2, 2 * heads, 24, 16}));
  }
  std::array<std::byte, 4096> memory;
  Args args;
  args.in(kQ, memory.data()).in(kCuSeqlens, memory.data());
  const Args last = slices[2].narrow(args);
  EXPECT_EQ(last[kQ], memory.data() + 3 * 16 * 2);
  EXPECT_EQ(last[kCuSeqlens], memory.data());
  EXPECT_EQ(last[kV], nullptr);
}

TEST(HeadSlices, KeepToTheLimitAndFillTheMultiprocessors) {
  constexpr int64_t kGb = 1'000'000'000;
  EXPECT_EQ(count_slices({96, 2 * kGb, 3 * kGb, 2, 132}), 1);
  EXPECT_EQ(count_slices({96, 3 * kGb, 2 * kGb, 2, 132}), 2);
  // 16 heads of 64 blocks: 6 + 5 + 5 heads take 9 waves, 4 times 4 heads take 8.
  EXPECT_EQ(count_slices({16, 12 * kGb, 5 * kGb, 64, 132}), 4);
  // No slice is smaller than a head.
  EXPECT_EQ(count_slices({2, 12 * kGb, kGb, 1, 132}), 2);
  EXPECT_EQ(count_slices({1, 12 * kGb, kGb, 1, 132}), 1);
}

}  // namespace
}  // namespace kda
