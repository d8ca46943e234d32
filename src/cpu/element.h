// Elements of tensors on the CPU: exact loads, stores that round once to nearest even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kda/types.h"

namespace kda {

/// Rounds to a 16-bit format with `kMantissa` stored mantissa bits and smallest normal exponent
/// `kMinExponent`. Going straight from the double avoids rounding twice; a float converts exactly.
template <int kMantissa, int kMinExponent>
constexpr std::uint16_t round_to_16_bits(double value) {
  constexpr std::uint64_t kFraction = (std::uint64_t{1} << 52) - 1;
  constexpr std::uint32_t kInfinity = 0x7fffu >> kMantissa << kMantissa;
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto sign = static_cast<std::uint32_t>(bits >> 63) << 15;
  const int biased = static_cast<int>(bits >> 52 & 0x7ff);
  if (biased == 0x7ff) {
    // The quiet bit keeps a NaN whose payload sits in the dropped bits a NaN.
    const auto payload = static_cast<std::uint32_t>((bits & kFraction) >> (52 - kMantissa));
    const std::uint32_t nan = payload | 1u << (kMantissa - 1);
    return static_cast<std::uint16_t>(sign | kInfinity | ((bits & kFraction) != 0 ? nan : 0));
  }
  const int exponent = biased - 1023;
  const bool normal = exponent >= kMinExponent;
  const int shift = 52 - kMantissa + (normal ? 0 : kMinExponent - exponent);
  if (shift > 53) return static_cast<std::uint16_t>(sign);  // below half of the least subnormal
  const std::uint64_t significand = (bits & kFraction) | (biased != 0 ? kFraction + 1 : 0);
  const std::uint64_t rest = significand & ((std::uint64_t{1} << shift) - 1);
  const std::uint64_t half = std::uint64_t{1} << (shift - 1);
  auto kept = static_cast<std::uint32_t>(significand >> shift);
  kept += rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  // A carry out of the mantissa moves on into the exponent, and from there to infinity.
  if (normal) kept += static_cast<std::uint32_t>(exponent - kMinExponent) << kMantissa;
  return static_cast<std::uint16_t>(sign | (kept < kInfinity ? kept : kInfinity));
}

constexpr std::uint16_t bf16_of(double value) { return round_to_16_bits<7, -126>(value); }
constexpr std::uint16_t f16_of(double value) { return round_to_16_bits<10, -14>(value); }

constexpr float float_of_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr float float_of_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t rebased = exponent == 0x1f ? 0xffu : exponent + 127 - 15;
  return std::bit_cast<float>(sign | rebased << 23 | mantissa << 13);
}

/// Reads `count` elements that lie `stride` elements apart. `Real` is float or double; a double
/// element read as float is rounded.
template <class Real>
void load_row(Real* out, const std::byte* in, DType dtype, std::int64_t count,
              std::int64_t stride = 1) {
  const auto convert = [&]<class Element>(Element, auto&& real_of) {
    for (std::int64_t i = 0; i < count; ++i) {
      Element element;
      std::memcpy(&element, in + i * stride * static_cast<std::int64_t>(sizeof element),
                  sizeof element);
      out[i] = static_cast<Real>(real_of(element));
    }
  };
  const auto same = [](auto element) { return element; };
  switch (dtype) {
    case DType::kBF16:
      return convert(std::uint16_t{}, float_of_bf16);
    case DType::kF16:
      return convert(std::uint16_t{}, float_of_f16);
    case DType::kF32:
      return convert(float{}, same);
    case DType::kF64:
      return convert(double{}, same);
    case DType::kI32:
      return convert(std::int32_t{}, same);
    case DType::kI64:
      return convert(std::int64_t{}, same);
    case DType::kNone:
      return;
  }
}

/// Writes `count` values of a float dtype, each rounded once, `stride` elements apart.
template <class Real>
void store_row(std::byte* out, DType dtype, const Real* in, std::int64_t count,
               std::int64_t stride = 1) {
  const auto convert = [&]<class Element>(Element, auto&& element_of) {
    for (std::int64_t i = 0; i < count; ++i) {
      const Element element = element_of(in[i]);
      std::memcpy(out + i * stride * static_cast<std::int64_t>(sizeof element), &element,
                  sizeof element);
    }
  };
  switch (dtype) {
    case DType::kBF16:
      return convert(std::uint16_t{}, bf16_of);
    case DType::kF16:
      return convert(std::uint16_t{}, f16_of);
    case DType::kF32:
      return convert(float{}, [](Real value) { return static_cast<float>(value); });
    case DType::kF64:
      return convert(double{}, [](Real value) { return static_cast<double>(value); });
    case DType::kI32:
    case DType::kI64:
    case DType::kNone:
      return;
  }
}

inline double load_element(const std::byte* in, DType dtype) {
  double value = 0;
  load_row(&value, in, dtype, 1);
  return value;
}

inline void store_element(std::byte* out, DType dtype, double value) {
  store_row(out, dtype, &value, 1);
}

}  // namespace kda
