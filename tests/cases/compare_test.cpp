// The comparison itself: does it see what it must see?
#include "compare.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "generate.h"

namespace kda::cases {
namespace {

/// A case of 2 sequences and 2 heads, and a tensor like its o with unit values.
struct Fixture {
  Case c;
  HostTensor o;

  Fixture() {
    CaseSpec spec;
    spec.sizes = {2, 128, 2, 2, 4, 8, 0, 0};
    c = generate(spec);
    o = HostTensor(DType::kF64, {2, 128, 2, 8});
    for (int64_t i = 0; i < o.count(); ++i) o.set(i, i % 2 == 0 ? 1 : -1);
  }
};

TEST(Compare, EqualTensorsDoNotDiffer) {
  const Fixture f;
  const Difference d = compare(f.c, TensorId::kO, f.o, f.o);
  EXPECT_EQ(d.ratio, 0);
  EXPECT_EQ(d.block_ratio, 0);
  EXPECT_EQ(d.max_error, 0);
  EXPECT_TRUE(d.finite);
}

TEST(Compare, RatioIsTheRmsOfTheErrorOverThatOfTheReference) {
  const Fixture f;
  HostTensor result = f.o;
  for (int64_t i = 0; i < result.count(); ++i) result.set(i, 1.25 * f.o.get(i));
  const Difference d = compare(f.c, TensorId::kO, result, f.o);
  EXPECT_NEAR(d.ratio, 0.25, 1e-7);
  EXPECT_NEAR(d.block_ratio, 0.25, 1e-7);
  EXPECT_NEAR(d.max_error, 0.25, 1e-12);
}

TEST(Compare, OneWrongBlockShowsInTheBlockRatio) {
  const Fixture f;
  HostTensor result = f.o;
  // Tokens 64.. of head 1 in the second sequence: one of eight blocks.
  for (int64_t t = 64; t < 128; ++t) {
    for (int64_t v = 0; v < 8; ++v) result.set(((128 + t) * 2 + 1) * 8 + v, 0);
  }
  const Difference d = compare(f.c, TensorId::kO, result, f.o);
  EXPECT_NEAR(d.ratio, std::sqrt(1.0 / 8), 1e-7);
  EXPECT_NEAR(d.block_ratio, 1, 1e-7);
}

TEST(Compare, SilentBlocksAreHeldToTheFloor) {
  Fixture f;
  for (int64_t v = 0; v < 8; ++v) {
    for (int64_t t = 0; t < 64; ++t) f.o.set(t * 16 + v, 0);
  }
  HostTensor result = f.o;
  for (int64_t v = 0; v < 8; ++v) {
    for (int64_t t = 0; t < 64; ++t) result.set(t * 16 + v, 1e-3);
  }
  const Difference d = compare(f.c, TensorId::kO, result, f.o);
  EXPECT_NEAR(d.block_ratio, 1e-3 / (kBlockFloor * std::sqrt(7.0 / 8)), 1e-6);
}

// A sequence of one token has one dbeta a head: its ratio alone would be a draw.
TEST(Compare, BlocksOfFewNumbersMayCountTogether) {
  CaseSpec spec;
  spec.sizes = {1, 130, 1, 1, 4, 8, 0, 0};
  spec.cu_seqlens = {0, 1, 2, 66, 130};
  const Case c = generate(spec);
  HostTensor dbeta(DType::kF64, {1, 130, 1});
  for (int64_t t = 0; t < 130; ++t) dbeta.set(t, 1);
  HostTensor result = dbeta;
  result.set(0, 2);
  EXPECT_NEAR(compare(c, TensorId::kDbeta, result, dbeta).block_ratio, 1, 1e-7);
  // Tokens 0, 1 and the sequence of 64 tokens behind them are one block.
  EXPECT_NEAR(compare(c, TensorId::kDbeta, result, dbeta, ShortBlocks::kPooled).block_ratio,
              std::sqrt(1.0 / 66), 1e-7);
  result = dbeta;
  result.set(129, 2);
  EXPECT_NEAR(compare(c, TensorId::kDbeta, result, dbeta, ShortBlocks::kPooled).block_ratio,
              std::sqrt(1.0 / 64), 1e-7);
}

TEST(Compare, NanAndInfinityAreNotFinite) {
  const Fixture f;
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    HostTensor result = f.o;
    result.set(77, bad);
    EXPECT_FALSE(compare(f.c, TensorId::kO, result, f.o).finite);
    EXPECT_FALSE(compare(f.c, TensorId::kO, f.o, result).finite);
  }
}

TEST(Compare, NanStaysNanInEveryNumber) {
  const Fixture f;
  for (const int64_t at : {int64_t{0}, int64_t{77}, f.o.count() - 1}) {
    HostTensor result = f.o;
    result.set(at, std::nan(""));
    for (const Difference& d :
         {compare(f.c, TensorId::kO, result, f.o), compare(f.c, TensorId::kO, f.o, result)}) {
      EXPECT_TRUE(std::isnan(d.ratio)) << at;
      EXPECT_TRUE(std::isnan(d.block_ratio)) << at;
      EXPECT_TRUE(std::isnan(d.max_error)) << at;
    }
  }
}

TEST(Compare, TokensThatNoSequenceOwnsCount) {
  CaseSpec spec;
  spec.sizes = {1, 100, 1, 1, 4, 8, 0, 0};
  spec.cu_seqlens = {0, 30, 30, 70};
  const Case c = generate(spec);
  HostTensor o(DType::kF64, {1, 100, 1, 8});
  for (int64_t i = 0; i < 70 * 8; ++i) o.set(i, 1);
  HostTensor result = o;
  result.set(99 * 8, 1);
  const Difference d = compare(c, TensorId::kO, result, o);
  EXPECT_GT(d.ratio, 0);
  EXPECT_GT(d.block_ratio, d.ratio);
}

TEST(Compare, AStateIsABlockPerSequenceAndHead) {
  const Fixture f;
  HostTensor state(DType::kF64, {2, 2, 8, 8});
  for (int64_t i = 0; i < state.count(); ++i) state.set(i, 1);
  HostTensor result = state;
  for (int64_t i = 128; i < 192; ++i) result.set(i, 2);  // sequence 1, head 0
  EXPECT_NEAR(compare(f.c, TensorId::kFinalState, result, state).block_ratio, 1, 1e-7);
}

TEST(Limits, FollowTheTable) {
  EXPECT_EQ(limit_of(Precision::kF64, TensorId::kDg), 1e-12);
  EXPECT_EQ(limit_of(Precision::kF32, TensorId::kDg), 3e-5);
  EXPECT_EQ(limit_of(Precision::kBF16, TensorId::kO), 5e-3);
  EXPECT_EQ(limit_of(Precision::kF16, TensorId::kDdtBias), 2e-3);
  EXPECT_EQ(limit_of(Precision::kBF16, TensorId::kDinitialState), 5e-3);
}

}  // namespace
}  // namespace kda::cases
