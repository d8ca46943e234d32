// Loads and stores of single elements: every 16-bit pattern, ties, subnormals, overflow, NaN.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "cpu/element.h"

namespace kda {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Format {
  const char* name;
  std::uint16_t (*of)(double);
  float (*float_of)(std::uint16_t);
  std::uint16_t infinity;
};

constexpr Format kBf16{"bf16", bf16_of, float_of_bf16, 0x7f80};
constexpr Format kF16{"fp16", f16_of, float_of_f16, 0x7c00};

class HalfFormat : public testing::TestWithParam<Format> {};

TEST_P(HalfFormat, EveryPatternSurvivesARoundTrip) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float value = format.float_of(pattern);
    const bool nan = (bits & 0x7fff) > format.infinity;
    ASSERT_EQ(std::isnan(value), nan) << bits;
    if (nan) {
      ASSERT_GT(format.of(value) & 0x7fff, format.infinity) << bits;
    } else {
      ASSERT_EQ(format.of(value), pattern);
    }
  }
}

// Neighbours differ by a gap that a double halves exactly, so the tie, and the doubles next to it,
// have a known right answer. Passing through float would turn the latter into ties.
TEST_P(HalfFormat, RoundsTiesToEvenAndNothingElse) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits + 1 < format.infinity; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const double tie = (static_cast<double>(format.float_of(low)) + format.float_of(high)) / 2;
    ASSERT_EQ(format.of(tie), bits % 2 == 0 ? low : high) << bits;
    ASSERT_EQ(format.of(std::nextafter(tie, 0.0)), low) << bits;
    ASSERT_EQ(format.of(std::nextafter(tie, kInf)), high) << bits;
    ASSERT_EQ(format.of(-tie), 0x8000 | format.of(tie)) << bits;
  }
}

TEST_P(HalfFormat, OverflowsToInfinityFromHalfAStepAboveTheLargest) {
  const Format& format = GetParam();
  const auto largest = static_cast<std::uint16_t>(format.infinity - 1);
  const double top = format.float_of(largest);
  const double edge = top + (top - format.float_of(static_cast<std::uint16_t>(largest - 1))) / 2;
  EXPECT_EQ(format.of(std::nextafter(edge, 0.0)), largest);
  EXPECT_EQ(format.of(edge), format.infinity);
  EXPECT_EQ(format.of(std::numeric_limits<double>::max()), format.infinity);
  EXPECT_EQ(format.of(kInf), format.infinity);
  EXPECT_EQ(format.of(-kInf), 0x8000 | format.infinity);
}

TEST_P(HalfFormat, KeepsNanAndSignedZero) {
  const Format& format = GetParam();
  const auto low_payload = std::bit_cast<double>(std::uint64_t{0x7ff0000000000001});
  EXPECT_TRUE(std::isnan(format.float_of(format.of(low_payload))));
  EXPECT_TRUE(std::isnan(format.float_of(format.of(std::numeric_limits<double>::quiet_NaN()))));
  EXPECT_EQ(format.of(0.0), 0);
  EXPECT_EQ(format.of(-0.0), 0x8000);
  EXPECT_EQ(format.of(std::numeric_limits<double>::denorm_min()), 0);
  EXPECT_EQ(format.of(-std::numeric_limits<double>::denorm_min()), 0x8000);
}

INSTANTIATE_TEST_SUITE_P(Element, HalfFormat, testing::Values(kBf16, kF16),
                         [](const auto& format) { return std::string(format.param.name); });

#if defined(__FLT16_MANT_DIG__) && !defined(__clang__)
TEST(Element, Fp16AgreesWithTheCompiler) {
  using Half = decltype(__builtin_nanf16(""));
  const auto pattern_of = [](Half half) { return std::bit_cast<std::uint16_t>(half); };
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const auto expected = static_cast<float>(std::bit_cast<Half>(pattern));
    if (std::isnan(expected)) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(float_of_f16(pattern)),
              std::bit_cast<std::uint32_t>(expected));
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double mantissa = std::uniform_real_distribution<double>(-2, 2)(random);
    const double value = std::ldexp(mantissa, static_cast<int>(random() % 48) - 28);
    ASSERT_EQ(f16_of(value), pattern_of(static_cast<Half>(value))) << value;
  }
}
#endif

TEST(Element, RowsOfEveryDtypeWithAStride) {
  const std::array<double, 4> values{0.5, -3, 0, 1024};
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    std::array<std::byte, 80> memory{};
    store_row(memory.data(), dtype, values.data(), 4, 2);
    std::array<double, 4> doubles{};
    std::array<float, 4> floats{};
    load_row(doubles.data(), memory.data(), dtype, 4, 2);
    load_row(floats.data(), memory.data(), dtype, 4, 2);
    EXPECT_EQ(doubles, values) << name_of(dtype);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(floats[i], values[i]) << name_of(dtype);
    EXPECT_EQ(load_element(memory.data() + size_of(dtype), dtype), 0) << "a gap was written";
  }
}

TEST(Element, IntegersAreRead) {
  const std::array<std::int32_t, 2> narrow{-1, 7};
  const std::array<std::int64_t, 2> wide{-1, int64_t{1} << 40};
  EXPECT_EQ(load_element(reinterpret_cast<const std::byte*>(&narrow[0]), DType::kI32), -1);
  EXPECT_EQ(load_element(reinterpret_cast<const std::byte*>(&wide[1]), DType::kI64), 0x1p40);
}

}  // namespace
}  // namespace kda
