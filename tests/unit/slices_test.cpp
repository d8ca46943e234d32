// Slices of heads and sequences: which part of each tensor they take, that they compute what the
// whole does, and how many there are.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/slices.h"
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

int64_t offset_of(const Slice& slice, TensorId id) {
  return slice.offset[static_cast<std::size_t>(id)];
}

TEST(Slices, OfHeadsArePartsOfTheSameMemory) {
  const Problem whole = backward({.B = 2, .T = 70, .H = 5, .HV = 10, .K = 16, .V = 24});
  const std::vector<Slice> slices = slices_of(whole, {3, 1});
  ASSERT_EQ(slices.size(), 3U);
  const std::array<int64_t, 4> first = {0, 1, 3, 5};
  for (std::size_t i = 0; i < 3; ++i) {
    const Slice& slice = slices[i];
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

TEST(Slices, OfSequencesArePartsOfTheSameMemory) {
  const Problem whole = backward({.B = 5, .T = 70, .H = 3, .HV = 3, .K = 16, .V = 24});
  const std::vector<Slice> slices = slices_of(whole, {3, 2});
  ASSERT_EQ(slices.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    const Slice& slice = slices[i];
    const auto head = static_cast<int64_t>(i / 2);
    const int64_t first = i % 2 == 0 ? 0 : 2;
    EXPECT_EQ(slice.problem.sizes.HV, 1);
    EXPECT_EQ(slice.problem.sizes.B, i % 2 == 0 ? 2 : 3);
    EXPECT_EQ(slice.first_sequence, first);
    EXPECT_EQ(slice.all_sequences, 5);
    EXPECT_EQ(slice.ends_batch(), i % 2 == 1);
    EXPECT_TRUE(slice.problem.validated().ok()) << slice.problem.validated().status().message();
    EXPECT_EQ(offset_of(slice, kQ), (first * 70 * 3 + head) * 16 * 2);
    EXPECT_EQ(offset_of(slice, kBeta), (first * 70 * 3 + head) * 4);
    EXPECT_EQ(offset_of(slice, kALog), head * 4);
    EXPECT_EQ(offset_of(slice, kDinitialState), (first * 3 + head) * 16 * 24 * 4);
  }
}

/// Numbers from 0.25 to 0.75 in memory for every tensor of a problem.
class Memory {
 public:
  explicit Memory(const Problem& problem) : problem_(problem) {
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (!problem.has(spec.id)) continue;
      std::vector<float>& numbers = (*this)[spec.id];
      numbers.resize(static_cast<std::size_t>(problem.bytes(spec.id)) / sizeof(float));
      for (float& number : numbers) number = next() * (spec.id == kG ? -1.0F : 1.0F);
      args_.data[static_cast<std::size_t>(spec.id)] = numbers.data();
    }
  }

  std::vector<float>& operator[](TensorId id) { return numbers_[static_cast<std::size_t>(id)]; }

  /// Runs a part of the problem on its part of the memory.
  void run(const Slice& slice) {
    Options options;
    options.implementation = "cpu";
    const Plan plan = make_plan(slice.problem, {}, options).value();
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> workspace(plan.workspace_bytes() / sizeof(Line) + 1);
    Args args = slice.narrow(args_);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size() * sizeof(Line);
    const Status status = plan.run(args);
    EXPECT_TRUE(status.ok()) << status.message();
  }

 private:
  float next() {
    state_ = state_ * 1664525U + 1013904223U;
    return 0.25F + static_cast<float>(state_ >> 8) / static_cast<float>(1U << 25);
  }

  Problem problem_;
  std::array<std::vector<float>, kTensorCount> numbers_;
  Args args_;
  uint32_t state_ = 7;
};

// Rows of h included, of which a sequence has as many as chunks.
TEST(Slices, ComputeWhatTheWholeDoes) {
  Problem problem = Problem::make(Operation::kChunkForward,
                                  {.B = 3, .T = 70, .H = 2, .HV = 4, .K = 8, .V = 12}, DType::kF32);
  problem.state_v_first = true;
  for (const TensorId id : {kInitialState, kFinalState, kH, kAqk}) problem.set(id, DType::kF32);
  problem = problem.validated().value();
  Memory whole(problem);
  whole.run(slice_of(problem, {}, 0));
  for (const Cut& cut : {Cut{2, 1}, Cut{1, 2}, Cut{2, 3}}) {
    Memory parts(problem);
    for (const Slice& slice : slices_of(problem, cut)) parts.run(slice);
    for (const TensorId id : {kO, kFinalState, kH, kAqk}) {
      EXPECT_EQ(parts[id], whole[id])
          << name_of(id) << " in " << cut.heads << " x " << cut.sequences;
    }
  }
}

TEST(Slices, TheFinestCut) {
  const Sizes sizes{.B = 5, .T = 70, .H = 3, .HV = 6, .K = 16, .V = 24};
  EXPECT_EQ(finest_cut(backward(sizes)), (Cut{3, 5}));
  // No tensor has key heads.
  EXPECT_EQ(finest_cut(Problem::make(Operation::kStateScan, sizes, DType::kF32)), (Cut{6, 5}));
  Problem packed =
      Problem::make(Operation::kChunkForward, {1, 70, 3, 6, 16, 24, 4, 0}, DType::kF32);
  packed.set(kCuSeqlens, DType::kI64);
  EXPECT_EQ(finest_cut(packed), (Cut{3, 1}));
  Problem pool = Problem::make(Operation::kRecurrent, {5, 1, 3, 6, 16, 24, 0, 9}, DType::kF32);
  pool.set(kStateIndices, DType::kI32);
  EXPECT_EQ(finest_cut(pool), (Cut{3, 1}));
}

TEST(Slices, FewestKeepToALimit) {
  const Problem problem = backward({.B = 6, .T = 70, .H = 4, .HV = 4, .K = 16, .V = 24});
  const SliceWorkspace pairs = [](const Slice& slice) -> Result<std::size_t> {
    return static_cast<std::size_t>(slice.problem.sizes.B * slice.problem.sizes.H);
  };
  for (std::size_t limit = 1; limit <= 24; ++limit) {
    const Cut cut = cut_to_limit(problem, limit, pairs);
    EXPECT_LE(pairs(slice_of(problem, cut, cut.slices() - 1)).value(), limit);
    for (int64_t heads = 1; heads <= 4; ++heads) {
      for (int64_t sequences = 1; sequences <= 6; ++sequences) {
        const Cut other{heads, sequences};
        if (other.slices() >= cut.slices()) continue;
        EXPECT_GT(pairs(slice_of(problem, other, other.slices() - 1)).value(), limit)
            << heads << " x " << sequences;
      }
    }
  }
  EXPECT_EQ(cut_to_limit(problem, 12, pairs), (Cut{1, 2})) << "sequences first";
  EXPECT_EQ(cut_to_limit(problem, 0, pairs), (Cut{4, 6})) << "the finest";
  // What cannot be counted keeps to no limit.
  const SliceWorkspace beyond = [&](const Slice& slice) -> Result<std::size_t> {
    if (slice.problem.sizes.B > 1) return Status(StatusCode::kUnsupported, "too much");
    return pairs(slice);
  };
  EXPECT_EQ(cut_to_limit(problem, 24, beyond), (Cut{1, 6}));
}

TEST(Slices, KeepToTheLimitAndFillTheMultiprocessors) {
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
