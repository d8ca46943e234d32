// Addresses of one run: presence, alignment, workspace, overlap.
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/executor.h"

namespace kda {
namespace {

using enum TensorId;

class CheckArgs : public testing::Test {
 protected:
  CheckArgs() : memory_(1 << 20) {
    problem_ = Problem::make(Operation::kChunkForward,
                             {.B = 1, .T = 8, .H = 2, .HV = 2, .K = 4, .V = 4}, DType::kF32);
    problem_.set(kInitialState, DType::kF32).set(kFinalState, DType::kF32);
    place_all();
  }

  /// Addresses far apart, 64-byte aligned; the workspace behind them.
  void place_all() {
    problem_ = problem_.validated().value();
    for (int i = 0; i < kTensorCount; ++i) {
      if (problem_.has(static_cast<TensorId>(i))) {
        args_.out(static_cast<TensorId>(i), at(static_cast<std::size_t>(i) * 4096));
      }
    }
    args_.workspace = at(kTensorCount * 4096);
    args_.workspace_bytes = kWorkspaceBytes;
  }

  std::byte* at(std::size_t offset) {
    const auto base = (reinterpret_cast<std::uintptr_t>(memory_.data()) + 63) / 64 * 64;
    return reinterpret_cast<std::byte*>(base + offset);
  }

  Status check() const { return check_args(problem_, args_, kWorkspaceBytes, 64); }

  void expect_refused(const std::vector<std::string>& parts) const {
    const Status status = check();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << parts.front();
    for (const std::string& part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << "\"" << part << "\" is missing in: " << status.message();
    }
  }

  static constexpr std::size_t kWorkspaceBytes = 1024;
  Problem problem_;
  Args args_;
  std::vector<std::byte> memory_;
};

TEST_F(CheckArgs, AcceptsApartBuffers) { EXPECT_TRUE(check().ok()) << check().message(); }

TEST_F(CheckArgs, RefusesNull) {
  args_.in(kV, nullptr);
  expect_refused({"v: null address", "expected 256 bytes"});
}

TEST_F(CheckArgs, IgnoresWhatTheProblemDoesNotName) {
  args_.in(kDh, at(1)).in(kCuSeqlens, at(3));
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, AcceptsNullForTensorsWithoutElements) {
  problem_.sizes.T = 0;
  for (TensorId id : {kQ, kK, kV, kG, kBeta, kO}) problem_.set(id, problem_[id].dtype);
  place_all();
  for (TensorId id : {kQ, kK, kV, kG, kBeta, kO}) args_.in(id, nullptr);
  EXPECT_TRUE(check().ok()) << check().message();
  args_.out(kFinalState, nullptr);
  expect_refused({"final_state: null address"});
}

TEST_F(CheckArgs, RefusesMisalignedElements) {
  args_.in(kG, at(kTensorCount * 2048 + 2));
  expect_refused({"g: address 0x", "expected a multiple of 4", "fp32"});
}

TEST_F(CheckArgs, AcceptsElementAlignment) {
  args_.in(kG, at(static_cast<std::size_t>(kG) * 4096 + 4));
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, RefusesSmallMissingOrMisalignedWorkspace) {
  args_.workspace_bytes = kWorkspaceBytes - 1;
  expect_refused({"workspace: found 1023 bytes", "expected 1024 bytes"});
  args_.workspace_bytes = kWorkspaceBytes;
  args_.workspace = nullptr;
  expect_refused({"workspace: null address", "expected 1024 bytes"});
  args_.workspace = at(kTensorCount * 4096 + 32);
  expect_refused({"workspace: address 0x", "expected a multiple of 64"});
  args_.workspace = nullptr;
  args_.workspace_bytes = 0;
  EXPECT_TRUE(check_args(problem_, args_, 0, 64).ok()) << "none is needed";
}

TEST_F(CheckArgs, RefusesWhatWrapsAroundTheAddressSpace) {
  const Args before = args_;
  args_.out(kQ, reinterpret_cast<void*>(~std::uintptr_t{3}));
  expect_refused({"q: 256 bytes from address 0xfff", "leave the address space"});
  args_ = before;
  args_.workspace = reinterpret_cast<void*>(~std::uintptr_t{63});
  expect_refused({"workspace: 1024 bytes from address 0xfff", "leave the address space"});
}

TEST_F(CheckArgs, RefusesOverlap) {
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 252);
  expect_refused({"o: its memory overlaps v"});
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 256);
  EXPECT_TRUE(check().ok()) << "touching is not overlapping: " << check().message();
  args_.out(kO, args_[kFinalState]);
  expect_refused({"o: its memory overlaps final_state"});
}

TEST_F(CheckArgs, RefusesOverlapWithTheWorkspace) {
  const auto place = static_cast<std::size_t>(kO) * 4096;
  args_.workspace = at(place);
  expect_refused({"o: its memory overlaps the workspace"});
  args_.workspace = at(static_cast<std::size_t>(kQ) * 4096);
  expect_refused({"q: its memory overlaps the workspace"});
}

TEST_F(CheckArgs, InputsMayShareMemory) {
  args_.in(kK, args_[kQ]);
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, StateInPlaceOnlyExactly) {
  args_.out(kFinalState, args_[kInitialState]);
  EXPECT_TRUE(check().ok()) << check().message();
  args_.out(kFinalState, static_cast<std::byte*>(args_[kInitialState]) + 64);
  expect_refused({"final_state: its memory overlaps initial_state"});
}

TEST_F(CheckArgs, StateInPlaceNeedsTheSameLayout) {
  problem_.set(kFinalState, DType::kF64);
  place_all();
  args_.out(kFinalState, args_[kInitialState]);
  expect_refused({"final_state: its memory overlaps initial_state"});
  problem_.set(kFinalState, TensorLayout::strided(DType::kF32, {1, 2, 4, 4}, {64, 32, 8, 1}));
  place_all();
  args_.out(kFinalState, args_[kInitialState]);
  expect_refused({"final_state: its memory overlaps initial_state"});
}

TEST_F(CheckArgs, StateInPlaceIgnoresStridesThatAreNeverTaken) {
  problem_.set(kInitialState, TensorLayout::strided(DType::kF32, {1, 2, 4, 4}, {7, 16, 4, 1}));
  place_all();
  args_.out(kFinalState, args_[kInitialState]);
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, OverlapOfStatesSaysWhatIsAllowed) {
  args_.out(kFinalState, static_cast<std::byte*>(args_[kInitialState]) + 64);
  expect_refused({"final_state: its memory overlaps initial_state",
                  "or both the same memory: address, dtype and strides"});
}

TEST_F(CheckArgs, APoolIsUpdatedInPlace) {
  problem_ = Problem::make(Operation::kRecurrent,
                           {.B = 1, .T = 1, .H = 2, .HV = 2, .K = 4, .V = 4, .P = 3}, DType::kF32);
  problem_.set(kInitialState, DType::kF32).set(kFinalState, DType::kF32);
  problem_.set(kStateIndices, DType::kI32);
  place_all();
  expect_refused({"final_state: with state_indices", "the same memory as initial_state"});
  args_.out(kFinalState, args_[kInitialState]);
  EXPECT_TRUE(check().ok()) << check().message();
  problem_.set(kFinalState, TensorLayout::strided(DType::kF32, {3, 2, 4, 4}, {40, 20, 4, 1}));
  place_all();
  args_.out(kFinalState, args_[kInitialState]);
  expect_refused({"final_state: with state_indices", "address, dtype and strides"});
  problem_.set(kFinalState, DType::kNone);  // only read
  place_all();
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, StatesWithCountsOfAcceptedTokensAreUpdatedInPlace) {
  problem_ = Problem::make(Operation::kRecurrent, {.B = 2, .T = 3, .H = 2, .HV = 2, .K = 4, .V = 4},
                           DType::kF32);
  problem_.set(kInitialState, DType::kF32).set(kFinalState, DType::kF32);
  problem_.set(kNumAccepted, DType::kI32);
  place_all();
  expect_refused({"final_state: with num_accepted", "the same memory as initial_state"});
  args_.out(kFinalState, args_[kInitialState]);
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, RepeatedInputsLeaveTheirGapsFree) {
  // Every token of v is the same pair of elements, three apart; o lies between them.
  problem_ = Problem::make(Operation::kChunkForward,
                           {.B = 1, .T = 2, .H = 1, .HV = 1, .K = 4, .V = 2}, DType::kF32);
  problem_.set(kV, TensorLayout::strided(DType::kF32, {1, 2, 1, 2}, {0, 0, 0, 3}));
  problem_.set(kO, TensorLayout::strided(DType::kF32, {1, 2, 1, 2}, {0, 4, 0, 1}));
  place_all();
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 4);
  EXPECT_TRUE(check().ok()) << check().message();
  args_.out(kO, args_[kV]);
  expect_refused({"o: its memory overlaps v"});
  // A pair side by side has no gap, however often it repeats.
  problem_.set(kV, TensorLayout::strided(DType::kF32, {1, 2, 1, 2}, {0, 0, 0, 1}));
  place_all();
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 4);
  expect_refused({"o: its memory overlaps v"});
}

TEST_F(CheckArgs, ManyShortSteppedInputsMayLeaveGaps) {
  // As many elements as places, but places 3 and 4 stay empty.
  problem_ = Problem::make(Operation::kChunkForward,
                           {.B = 1, .T = 2, .H = 1, .HV = 2, .K = 4, .V = 2}, DType::kF32);
  problem_.set(kV, TensorLayout::strided(DType::kF32, {1, 2, 2, 2}, {0, 1, 1, 5}));
  problem_.set(kO, TensorLayout::strided(DType::kF32, {1, 2, 2, 2}, {0, 40, 20, 1}));
  place_all();
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 12);
  EXPECT_TRUE(check().ok()) << check().message();
}

TEST_F(CheckArgs, InterleavedHeadsDoNotOverlap) {
  // v and o as the two halves of each row of one [T, HV, 8] buffer.
  const auto half = TensorLayout::strided(DType::kF32, {1, 8, 2, 4}, {128, 16, 8, 1});
  problem_.set(kV, half).set(kO, half);
  place_all();
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + 16);
  EXPECT_TRUE(check().ok()) << check().message();
  args_.out(kO, args_[kV]);
  expect_refused({"o: its memory overlaps v"});
}

TEST_F(CheckArgs, StridedAndDenseOverlap) {
  problem_.set(kV, TensorLayout::strided(DType::kF32, {1, 8, 2, 4}, {128, 16, 8, 1}));
  place_all();
  // A dense o whose memory holds the first or the last element of v.
  args_.out(kO, static_cast<std::byte*>(args_[kV]) - 128);
  expect_refused({"o: its memory overlaps v"});
  const auto last = static_cast<std::size_t>(problem_.bytes(kV)) - 4;
  args_.out(kO, static_cast<std::byte*>(args_[kV]) + last);
  expect_refused({"o: its memory overlaps v"});
}

}  // namespace
}  // namespace kda
