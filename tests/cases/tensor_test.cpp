// Conversion of 16-bit elements: all of them, and the rounding between them.
#include "tensor.h"

#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

namespace kda::cases {
namespace {

HostTensor one(DType dtype, double value) {
  HostTensor tensor(dtype, {1});
  tensor.set(0, value);
  return tensor;
}

double rounded(DType dtype, double value) { return one(dtype, value).get(0); }

class SixteenBits : public testing::TestWithParam<DType> {};

TEST_P(SixteenBits, EveryValueSurvivesARoundTrip) {
  HostTensor all(GetParam(), {65536});
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(all.bytes.data() + 2 * i, &bits, 2);
  }
  for (int64_t i = 0; i < 65536; ++i) {
    const double value = all.get(i);
    const HostTensor again = one(GetParam(), value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(again.get(0))) << i;
    } else {
      EXPECT_EQ(std::memcmp(again.bytes.data(), all.bytes.data() + 2 * i, 2), 0) << i;
    }
  }
}

TEST_P(SixteenBits, RoundsToTheNearestAndTiesToEven) {
  const double ulp = GetParam() == DType::kBF16 ? 0x1p-7 : 0x1p-10;
  EXPECT_EQ(rounded(GetParam(), 1 + 0.5 * ulp), 1);
  EXPECT_EQ(rounded(GetParam(), 1 + 1.5 * ulp), 1 + 2 * ulp);
  EXPECT_EQ(rounded(GetParam(), 1 + 0.5 * ulp + 1e-12), 1 + ulp);
  EXPECT_EQ(rounded(GetParam(), -(1 + 1.5 * ulp)), -(1 + 2 * ulp));
}

TEST_P(SixteenBits, KeepsSpecialValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(rounded(GetParam(), infinity), infinity);
  EXPECT_EQ(rounded(GetParam(), -infinity), -infinity);
  EXPECT_EQ(rounded(GetParam(), 1e300), infinity);
  EXPECT_EQ(rounded(GetParam(), 1e-300), 0);
  EXPECT_TRUE(std::signbit(rounded(GetParam(), -0.0)));
  EXPECT_TRUE(std::isnan(rounded(GetParam(), std::numeric_limits<double>::quiet_NaN())));
}

INSTANTIATE_TEST_SUITE_P(All, SixteenBits, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(SixteenBits, KnowsTheLimitsOfFp16) {
  EXPECT_EQ(rounded(DType::kF16, 65519), 65504);
  EXPECT_EQ(rounded(DType::kF16, 65520), std::numeric_limits<double>::infinity());
  EXPECT_EQ(rounded(DType::kF16, 0x1p-24), 0x1p-24);
  EXPECT_EQ(rounded(DType::kF16, 0x1p-25), 0);
}

TEST(HostTensor, PoisonIsNaN) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    HostTensor tensor(dtype, {3});
    tensor.poison();
    EXPECT_TRUE(std::isnan(tensor.get(2)));
  }
}

TEST(HostTensor, CountIsZeroBesideExtentsThatWouldOverflow) {
  const int64_t huge = int64_t{1} << 62;
  EXPECT_EQ(HostTensor(DType::kF32, {huge, huge, 0}).count(), 0);
}

}  // namespace
}  // namespace kda::cases
