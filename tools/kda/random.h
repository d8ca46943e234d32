// Numbers that depend on a seed and a position alone: the same on every machine and for every
// standard library, whatever is drawn before.
#pragma once

#include <cstdint>

namespace kda::cases {

/// One stream of a seed. Element `index` does not depend on the others.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : key_(mix(seed + mix(stream + kStep))) {}

  uint64_t bits(uint64_t index) const { return mix(key_ + index * kStep); }

  /// In [0, 1), 53 bits.
  double uniform(uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }
  double uniform(uint64_t index, double low, double high) const {
    return low + (high - low) * uniform(index);
  }

  /// Close to the standard normal: the sum of twelve 16-bit uniforms (Irwin-Hall), which needs no
  /// library function and is the same to the last bit everywhere. |x| <= 6.
  double normal(uint64_t index) const {
    int64_t sum = 0;
    for (uint64_t part = 0; part < 3; ++part) {
      const uint64_t word = mix(bits(index) + (part + 1) * kPart);
      for (int shift = 0; shift < 64; shift += 16) {
        sum += static_cast<int64_t>((word >> shift) & 0xFFFF);
      }
    }
    return static_cast<double>(2 * sum + 12 - (int64_t{12} << 16)) * 0x1p-17;
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15;  // the golden ratio, as in SplitMix64
  static constexpr uint64_t kPart = 0xD1B54A32D192ED03;

  /// The finaliser of SplitMix64: every output bit depends on every input bit.
  static constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  uint64_t key_;
};

}  // namespace kda::cases
