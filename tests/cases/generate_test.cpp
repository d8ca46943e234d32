// Generated cases: the same everywhere, valid, and what their family says.
#include "generate.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "random.h"
#include "suite.h"

namespace kda::cases {
namespace {

TEST(Random, IsTheSameEverywhere) {
  const Random random(1, 2);
  EXPECT_EQ(random.bits(0), 0x2BA98B4A92374867U);
  EXPECT_EQ(random.bits(1000000), 0x09178BCDAEB5EA87U);
  EXPECT_EQ(random.normal(7), -0x1.5cbp-2);
}

TEST(Random, NormalHasMeanZeroAndVarianceOne) {
  const Random random(3, 4);
  double sum = 0;
  double squares = 0;
  constexpr int kCount = 100000;
  for (uint64_t i = 0; i < kCount; ++i) {
    sum += random.normal(i);
    squares += random.normal(i) * random.normal(i);
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Random, SeedsAndStreamsDiffer) {
  EXPECT_NE(Random(1, 2).bits(0), Random(1, 3).bits(0));
  EXPECT_NE(Random(1, 2).bits(0), Random(2, 2).bits(0));
}

TEST(Suite, EveryCaseIsValidAndSurvivesAFile) {
  for (const DType io : {DType::kF32, DType::kBF16}) {
    for (const CaseSpec& spec : builtin_suite(io)) {
      const Case c = generate(spec);
      EXPECT_TRUE(forward_problem(c).validated().ok()) << c.name;
      EXPECT_TRUE(backward_problem(c).validated().ok()) << c.name;
      Result<Case> again = make_case(c.name, to_file(c));
      ASSERT_TRUE(again.ok()) << c.name << ": " << again.status().message();
      EXPECT_EQ(again->inputs.size(), c.inputs.size());
      for (const auto& [id, tensor] : c.inputs) {
        EXPECT_EQ(again->input(id)->bytes, tensor.bytes) << c.name << " " << name_of(id);
      }
      EXPECT_EQ(again->forward.effective_scale(), c.forward.effective_scale());
      EXPECT_EQ(again->forward.gate, c.forward.gate);
      EXPECT_EQ(again->forward.lower_bound, c.forward.lower_bound);
      EXPECT_EQ(again->forward.chunk_size, c.forward.chunk_size);
    }
  }
}

TEST(Generate, RawGateGivesTheDecayOfTheFamily) {
  CaseSpec spec;
  spec.family = Family::kSlow;
  spec.gate_dtype = DType::kF64;
  for (const Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    spec.gate = gate;
    const Case c = generate(spec);
    const int64_t K = spec.sizes.K;
    for (const int64_t i : {int64_t{0}, K + 3, 7 * K}) {
      const int64_t hv = i / K % spec.sizes.HV;
      const double a = std::exp(c.input(TensorId::kALog)->get(hv));
      const double z =
          c.input(TensorId::kG)->get(i) + c.input(TensorId::kDtBias)->get(hv * K + i % K);
      const double g = gate == Gate::kSoftplus ? -a * std::log1p(std::exp(z))
                                               : spec.lower_bound / (1 + std::exp(-a * z));
      EXPECT_NEAR(g, -1e-4, 1e-9);
    }
  }
}

TEST(Generate, ResetTokensForgetEverything) {
  CaseSpec spec;
  spec.family = Family::kReset;
  const Case c = generate(spec);
  const int64_t row = spec.sizes.HV * spec.sizes.K;
  EXPECT_EQ(c.input(TensorId::kG)->get(21 * row), -std::numeric_limits<double>::infinity());
  EXPECT_GT(c.input(TensorId::kG)->get(20 * row), -1.0001);
}

TEST(Generate, KeysAreUnitVectorsUnlessTheyAreNormalisedInside) {
  const Case c = generate({});
  double squares = 0;
  for (int64_t i = 0; i < 64; ++i) squares += std::pow(c.input(TensorId::kK)->get(i), 2);
  EXPECT_NEAR(squares, 1, 1e-6);
}

}  // namespace
}  // namespace kda::cases
