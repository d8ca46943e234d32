// Fixed-length rows and cu_seqlens.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/sequences.h"

namespace kda {
namespace {

using enum TensorId;

template <class Index>
Result<SequenceList> packed(const std::vector<Index>& cu, int64_t T, int32_t chunk_size = 64,
                            int64_t stride = 1) {
  Problem problem = Problem::make(
      Operation::kChunkForward,
      {.T = T, .K = 4, .V = 4, .N = static_cast<int64_t>(cu.size()) / stride - 1}, DType::kF32);
  problem.chunk_size = chunk_size;
  const DType dtype = sizeof(Index) == 4 ? DType::kI32 : DType::kI64;
  problem.set(kCuSeqlens, TensorLayout::strided(dtype, {problem.sizes.N + 1}, {stride}));
  Args args;
  args.in(kCuSeqlens, cu.data());
  return read_sequences(problem.validated().value(), args);
}

template <class Index>
class Packed : public testing::Test {};
using IndexTypes = testing::Types<int32_t, int64_t>;
TYPED_TEST_SUITE(Packed, IndexTypes);

TYPED_TEST(Packed, CountsChunksAndTokens) {
  const auto list = packed<TypeParam>({0, 0, 64, 64, 129, 130}, 200);
  ASSERT_TRUE(list.ok()) << list.status().message();
  ASSERT_EQ(list->sequences.size(), 5u);
  const std::vector<int64_t> first_chunks{0, 0, 1, 1, 3};
  const std::vector<int64_t> lengths{0, 64, 0, 65, 1};
  for (std::size_t i = 0; i < 5; ++i) {
    const Sequence& sequence = list->sequences[i];
    EXPECT_EQ(sequence.index, static_cast<int64_t>(i));
    EXPECT_EQ(sequence.batch, 0);
    EXPECT_EQ(sequence.length(), lengths[i]) << i;
    EXPECT_EQ(sequence.first_chunk, first_chunks[i]) << i;
  }
  EXPECT_EQ(list->chunk_rows_used, 4);
  EXPECT_EQ(list->tokens_used, 130);
  const auto smaller = packed<TypeParam>({0, 0, 64, 64, 129, 130}, 200, 32);
  EXPECT_EQ(smaller->chunk_rows_used, 2 + 3 + 1);
}

TYPED_TEST(Packed, RowsStayInsideTheBound) {
  // One chunk a token is the worst case of floor(T / C) + N.
  std::vector<TypeParam> cu;
  for (TypeParam i = 0; i <= 130; ++i) cu.push_back(i);
  const auto list = packed<TypeParam>(cu, 130);
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(list->chunk_rows_used, 130);
  EXPECT_LE(list->chunk_rows_used, 130 / 64 + 130);
}

TYPED_TEST(Packed, RefusesWrongEntries) {
  const auto message = [](const std::vector<TypeParam>& cu) {
    const auto list = packed<TypeParam>(cu, 100);
    EXPECT_FALSE(list.ok());
    EXPECT_EQ(list.status().code(), StatusCode::kInvalidArgument);
    return list.status().message();
  };
  EXPECT_EQ(message({1, 50}), "cu_seqlens[0]: found 1, expected 0");
  EXPECT_EQ(message({-1, 50}), "cu_seqlens[0]: found -1, expected 0");
  EXPECT_EQ(message({0, 50, 49, 100}), "cu_seqlens[2]: found 49, expected 50 or more");
  EXPECT_EQ(message({0, 50, 101}), "cu_seqlens[2]: found 101, expected at most T = 100");
  EXPECT_EQ(message({0, -5}), "cu_seqlens[1]: found -5, expected 0 or more");
  EXPECT_EQ(message({0, std::numeric_limits<TypeParam>::max()}),
            "cu_seqlens[1]: found " + std::to_string(std::numeric_limits<TypeParam>::max()) +
                ", expected at most T = 100");
}

TYPED_TEST(Packed, NoSequencesAndNoTokens) {
  const auto none = packed<TypeParam>({0}, 0);
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_TRUE(none->sequences.empty());
  EXPECT_EQ(none->tokens_used, 0);
  const auto empty = packed<TypeParam>({0, 0, 0}, 0);
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  EXPECT_EQ(empty->sequences.size(), 2u);
  EXPECT_EQ(empty->chunk_rows_used, 0);
}

// Every second entry of a longer list, in either integer type.
TYPED_TEST(Packed, VARLEN_16_StridedList) {
  const auto list = packed<TypeParam>({0, 999, 65, 999, 128, 999}, 128, 64, 2);
  ASSERT_TRUE(list.ok()) << list.status().message();
  EXPECT_EQ(list->sequences[1].begin, 65);
  EXPECT_EQ(list->sequences[1].end, 128);
}

// There may be 2^40 of them, in no memory at all.
TEST(FixedLength, NoListOfBatchRowsThatNothingHas) {
  Problem problem = Problem::make(Operation::kChunkForward,
                                  {.B = int64_t{1} << 40, .T = 0, .K = 4, .V = 4}, DType::kF32);
  const auto list = read_sequences(problem.validated().value(), {});
  ASSERT_TRUE(list.ok());
  EXPECT_TRUE(list->sequences.empty());
  EXPECT_FALSE(has_work(problem, 0));
  problem.sizes.B = 2;
  problem.set(kInitialState, DType::kF32);
  EXPECT_EQ(read_sequences(problem.validated().value(), {})->sequences.size(), 2u);
  EXPECT_FALSE(has_work(problem, 0));
  EXPECT_TRUE(has_work(problem, 1));
  problem.set(kFinalState, DType::kF32);
  EXPECT_TRUE(has_work(problem, 0));
}

TEST(FixedLength, OneSequenceABatchRow) {
  Problem problem =
      Problem::make(Operation::kChunkForward, {.B = 3, .T = 65, .K = 4, .V = 4}, DType::kF32);
  const auto list = read_sequences(problem.validated().value(), {});
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->sequences.size(), 3u);
  EXPECT_EQ(list->sequences[2].batch, 2);
  EXPECT_EQ(list->sequences[2].begin, 0);
  EXPECT_EQ(list->sequences[2].end, 65);
  EXPECT_EQ(list->sequences[2].first_chunk, 4);
  EXPECT_EQ(list->chunk_rows_used, 6);
  EXPECT_EQ(list->tokens_used, 65);
}

}  // namespace
}  // namespace kda
