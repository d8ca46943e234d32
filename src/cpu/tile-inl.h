// Tiles in and out of tensors of any dtype and stride, transposition, the gate.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <hwy/cache_control.h>
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "cpu/gemm-inl.h"

#if defined(KDA_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_TILE_INL_H_
#undef KDA_CPU_TILE_INL_H_
#else
#define KDA_CPU_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

/// Calls body(c) for each vector of a padded row.
template <class Body>
HWY_INLINE void for_vectors(int64_t columns, const Body& body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Floats()));
  for (int64_t c = 0; c < columns; c += lanes) body(c);
}

/// fp16 bits in 32-bit lanes to fp32, exactly; subnormals by a multiplication, Inf and NaN kept.
HWY_INLINE Vec decode_f16(Floats d, hn::Vec<hn::RebindToUnsigned<Floats>> bits) {
  const hn::RebindToUnsigned<Floats> du;
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du, 0x7fffu)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const Vec value = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f));
  const auto special = hn::Ge(value, hn::Set(d, 65536.0f));
  const Vec infinite = hn::BitCast(d, hn::Or(magnitude, hn::Set(du, 0x7f800000u)));
  return hn::Or(hn::IfThenElse(special, infinite, value), hn::BitCast(d, sign));
}

/// fp32 to fp16 bits, to nearest even; too large becomes Inf, NaN stays NaN.
HWY_INLINE hn::Vec<hn::RebindToSigned<Floats>> encode_f16(Floats d, Vec x) {
  const hn::RebindToSigned<Floats> di;
  const Vec magnitude = hn::Abs(x);
  const auto sign = hn::ShiftRight<16>(hn::And(hn::BitCast(di, x), hn::Set(di, INT32_MIN)));
  const auto bits = hn::BitCast(di, magnitude);
  const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(di, 1));
  const auto rebias = hn::Set(di, ((15 - 127) * (1 << 23)) + 0xfff);
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(bits, rebias), odd));
  // Added to 0.5, the last bit of a subnormal fp16 meets that of the sum: the addition rounds.
  const auto magic = hn::Set(di, ((127 - 15) + (23 - 10) + 1) << 23);
  const Vec aligned = hn::Add(magnitude, hn::BitCast(d, magic));
  const auto subnormal = hn::Sub(hn::BitCast(di, aligned), magic);
  const auto large = hn::Set(di, 0x7c00);
  auto out = hn::IfThenElse(hn::Lt(bits, hn::Set(di, 113 << 23)), subnormal, normal);
  out = hn::IfThenElse(hn::Gt(bits, hn::Set(di, ((127 + 16) << 23) - 1)), large, out);
  out = hn::IfThenElse(hn::Gt(bits, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7e00), out);
  return hn::Or(out, hn::And(sign, hn::Set(di, 0x8000)));
}

/// fp32 to bf16 bits, to nearest even; NaN stays NaN.
HWY_INLINE hn::Vec<hn::RebindToSigned<Floats>> encode_bf16(Vec x) {
  const hn::RebindToSigned<Floats> di;
  const hn::RebindToUnsigned<Floats> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  // hn::Ne(x, x) would not do: it is false for NaN on AVX.
  const auto number = hn::RebindMask(du, hn::Eq(x, x));
  return hn::BitCast(di, hn::IfThenElse(number, rounded, quiet));
}

/// kPad contiguous elements to floats.
HWY_INLINE void decode(DType dtype, const std::byte* from, float* to) {
  const Floats d;
  const hn::RebindToUnsigned<Floats> du;
  const hn::Rebind<uint16_t, Floats> d16;
  if (dtype == DType::kF32) {
    const auto* source = reinterpret_cast<const float*>(from);
    for_vectors(kPad, [&](int64_t c) HWY_ATTR { hn::Store(hn::LoadU(d, source + c), d, to + c); });
    return;
  }
  const auto* source = reinterpret_cast<const uint16_t*>(from);
  for_vectors(kPad, [&](int64_t c) HWY_ATTR {
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, source + c));
    const Vec value =
        dtype == DType::kBF16 ? hn::BitCast(d, hn::ShiftLeft<16>(bits)) : decode_f16(d, bits);
    hn::Store(value, d, to + c);
  });
}

/// kPad floats to contiguous elements.
HWY_INLINE void encode(DType dtype, const float* from, std::byte* to) {
  const Floats d;
  const hn::Rebind<uint16_t, Floats> d16;
  if (dtype == DType::kF32) {
    auto* target = reinterpret_cast<float*>(to);
    for_vectors(kPad,
                [&](int64_t c) HWY_ATTR { hn::StoreU(hn::Load(d, from + c), d, target + c); });
    return;
  }
  auto* target = reinterpret_cast<uint16_t*>(to);
  for_vectors(kPad, [&](int64_t c) HWY_ATTR {
    const Vec x = hn::Load(d, from + c);
    const auto bits = dtype == DType::kBF16 ? encode_bf16(x) : encode_f16(d, x);
    hn::StoreU(hn::DemoteTo(d16, bits), d16, target + c);
  });
}

/// Copies elements of 2 or 4 bytes between two strided places.
template <class Word>
inline void copy_words(const std::byte* from, int64_t from_step, std::byte* to, int64_t to_step,
                       int64_t count) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step * kBytes, from + i * from_step * kBytes, sizeof(Word));
  }
}

inline void copy_elements(int64_t bytes, const std::byte* from, int64_t from_step, std::byte* to,
                          int64_t to_step, int64_t count) {
  if (bytes == 2) return copy_words<uint16_t>(from, from_step, to, to_step, count);
  return copy_words<uint32_t>(from, from_step, to, to_step, count);
}

/// Rows that load_tile asks for ahead of use.
constexpr int64_t kAhead = 8;

/// Rows 0..rows-1 of a tile, columns padded; whatever lies beyond `valid` rows and `columns` is 0.
HWY_NOINLINE inline void load_tile(const Rows& source, int64_t valid, int64_t columns, float* tile,
                                   int64_t ld, int64_t rows) {
  const auto bytes = static_cast<int64_t>(size_of(source.dtype));
  const int64_t width = padded(columns);
  for (int64_t r = 0; r < rows; ++r, tile += ld) {
    if (r >= valid || !source) {
      std::memset(tile, 0, static_cast<std::size_t>(width) * sizeof(float));
      continue;
    }
    const std::byte* row = source.data + r * source.row * bytes;
    if (source.col == 1 && r + kAhead < valid) {
      // Rows of one head lie apart in memory, which hardware prefetchers do not follow.
      for (int64_t b = 0; b < columns * bytes; b += 64) {
        hwy::Prefetch(row + kAhead * source.row * bytes + b);
      }
    }
    for (int64_t c = 0; c < columns; c += kPad) {
      const std::byte* from = row + c * source.col * bytes;
      alignas(64) std::byte gathered[kPad * 4];
      const int64_t count = std::min(kPad, columns - c);
      if (source.col != 1 || count < kPad) {
        std::memset(gathered, 0, sizeof gathered);
        copy_elements(bytes, from, source.col, gathered, 1, count);
        from = gathered;
      }
      decode(source.dtype, from, tile + c);
    }
  }
}

/// Writes `valid` rows and `columns` columns of a tile.
HWY_NOINLINE inline void store_tile(const float* tile, int64_t ld, const Rows& target,
                                    int64_t valid, int64_t columns) {
  if (!target) return;
  const auto bytes = static_cast<int64_t>(size_of(target.dtype));
  for (int64_t r = 0; r < valid; ++r, tile += ld) {
    std::byte* row = target.data + r * target.row * bytes;
    for (int64_t c = 0; c < columns; c += kPad) {
      std::byte* to = row + c * target.col * bytes;
      const int64_t count = std::min(kPad, columns - c);
      if (target.col == 1 && count == kPad) {
        encode(target.dtype, tile + c, to);
        continue;
      }
      alignas(64) std::byte packed[kPad * 4];
      encode(target.dtype, tile + c, packed);
      copy_elements(bytes, packed, 1, to, target.col, count);
    }
  }
}

/// A tensor [.., T, HV] of one head as a column; 0 beyond `valid`.
inline void load_column(Rows source, int64_t valid, float* column, int64_t rows) {
  std::swap(source.row, source.col);
  load_tile(source, 1, valid, column, 0, 1);
  for (int64_t r = padded(valid); r < rows; ++r) column[r] = 0;
}

inline void store_column(const float* column, Rows target, int64_t valid) {
  std::swap(target.row, target.col);
  store_tile(column, 0, target, 1, valid);
}

inline void zero_tile(float* tile, int64_t ld, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memset(tile + r * ld, 0, static_cast<std::size_t>(width) * sizeof(float));
  }
}

/// to [columns, rows] = from [rows, columns]^T; both extents multiples of 4.
HWY_NOINLINE inline void transpose(const float* from, int64_t ld_from, int64_t rows,
                                   int64_t columns, float* to, int64_t ld_to) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[c * ld_to + r] = from[r * ld_from + c];
  }
#else
  const hn::FixedTag<float, 4> d;
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < columns; c += 4) {
      const float* source = from + r * ld_from + c;
      const auto r0 = hn::LoadU(d, source);
      const auto r1 = hn::LoadU(d, source + ld_from);
      const auto r2 = hn::LoadU(d, source + 2 * ld_from);
      const auto r3 = hn::LoadU(d, source + 3 * ld_from);
      const auto low02 = hn::InterleaveLower(d, r0, r2);
      const auto low13 = hn::InterleaveLower(d, r1, r3);
      const auto high02 = hn::InterleaveUpper(d, r0, r2);
      const auto high13 = hn::InterleaveUpper(d, r1, r3);
      float* target = to + c * ld_to + r;
      hn::StoreU(hn::InterleaveLower(d, low02, low13), d, target);
      hn::StoreU(hn::InterleaveUpper(d, low02, low13), d, target + ld_to);
      hn::StoreU(hn::InterleaveLower(d, high02, high13), d, target + 2 * ld_to);
      hn::StoreU(hn::InterleaveUpper(d, high02, high13), d, target + 3 * ld_to);
    }
  }
#endif
}

/// A state from memory to a [Kp, ldv] tile; V-first states are transposed.
inline void load_state(const Rows& source, const Dims& s, float* tile) {
  const bool turn =
      source && source.row == 1 && source.dtype == DType::kF32 && s.K % 4 == 0 && s.V % kPad == 0;
  if (!turn) return load_tile(source, s.K, s.V, tile, s.ldv, s.Kp);
  transpose(reinterpret_cast<const float*>(source.data), source.col, s.V, s.K, tile, s.ldv);
  zero_tile(tile + s.K * s.ldv, s.ldv, s.Kp - s.K, s.Vp);
}

inline void store_state(const float* tile, const Dims& s, const Rows& target) {
  const bool turn =
      target && target.row == 1 && target.dtype == DType::kF32 && s.K % 4 == 0 && s.V % kPad == 0;
  if (!turn) return store_tile(tile, s.ldv, target, s.K, s.V);
  transpose(tile, s.ldv, s.K, s.V, reinterpret_cast<float*>(target.data), target.col);
}

HWY_INLINE float sum_lanes(Floats d, Vec x) { return hn::GetLane(hn::SumOfLanes(d, x)); }

inline float dot(const float* a, const float* b, int64_t width) {
  const Floats d;
  Vec sum = hn::Zero(d);
  for_vectors(width, [&](int64_t c) HWY_ATTR {
    sum = hn::MulAdd(hn::Load(d, a + c), hn::Load(d, b + c), sum);
  });
  return sum_lanes(d, sum);
}

/// e^x. hn::Exp takes a NaN for a number below its range and answers 0.
HWY_INLINE Vec exp_of(Floats d, Vec x) { return hn::IfThenElse(hn::Eq(x, x), hn::Exp(d, x), x); }

/// What `power`, e^x as one number, lacks of e^x: a slow decay loses the same again in every step.
/// Below e^-0.5 few steps share a state, and one number is enough.
HWY_INLINE Vec rest_of_exp(Floats d, Vec x, Vec power) {
  const Vec rest = hn::Sub(hn::Expm1(d, x), hn::Sub(power, hn::Set(d, 1.0f)));
  return hn::IfThenElseZero(hn::Gt(x, hn::Set(d, -0.5f)), rest);
}

/// The larger one; NaN if x is. hn::Max leaves open which operand it takes then.
HWY_INLINE Vec at_least(Vec least, Vec x) { return hn::IfThenElse(hn::Lt(x, least), least, x); }

/// (3.1)-(3.2): normalises rows, keeps 1 / norm.
inline void normalise_rows(float* tile, int64_t ld, int64_t rows, int64_t width, float* r) {
  const Floats d;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = tile + i * ld;
    r[i] = 1.0f / std::sqrt(dot(row, row, width) + 1e-6f);
    const Vec factor = hn::Set(d, r[i]);
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      hn::Store(hn::Mul(hn::Load(d, row + c), factor), d, row + c);
    });
  }
}

/// (3.3): dy to dx in place, y the normalised rows of K values padded to width.
inline void normalise_backward(const float* y, float* dy, int64_t ld, int64_t rows, int64_t K,
                               int64_t width, const float* r) {
  const Floats d;
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = y + i * ld;
    float* gradient = dy + i * ld;
    if (K == 1) {  // dy lies along y: 1 - y^2 = eps r^2 exactly, but a rounded y loses it
      gradient[0] *= 1e-6f * r[i] * r[i] * r[i];
      continue;
    }
    const Vec along = hn::Set(d, dot(row, gradient, width));
    const Vec factor = hn::Set(d, r[i]);
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      const Vec rest = hn::NegMulAdd(hn::Load(d, row + c), along, hn::Load(d, gradient + c));
      hn::Store(hn::Mul(rest, factor), d, gradient + c);
    });
  }
}

inline float sigmoid(float x) {
  const float e = std::exp(-std::fabs(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

/// The gate of one value head: g = -scale y(x), y = softplus or sigmoid, x = slope z.
struct GateTerms {
  Gate kind;
  float slope;         ///< of x; 1 for softplus
  float scale;         ///< exp(A_log) for softplus, else -lower_bound
  bool far;            ///< the scale is beyond the range of floats
  float log_scale[2];  ///< its logarithm as a sum: large + small
  const float* bias;
};

/// As a float, neither 0 nor infinite unless x is: infinity and 0 keep their meaning times it.
inline float factor_of(double x) {
  constexpr double kLeast = std::numeric_limits<float>::min();
  constexpr double kMost = std::numeric_limits<float>::max();
  return static_cast<float>(x == 0 || std::isinf(x) ? x : std::clamp(x, kLeast, kMost));
}

inline GateTerms load_gate(const Run& run, int64_t hv, float* bias) {
  load_tile(run.head_row(TensorId::kDtBias, hv), 1, run.dims.K, bias, 0, 1);
  alignas(64) float a_log[kPad];
  load_tile(run.head_row(TensorId::kALog, hv), 1, 1, a_log, 0, 1);
  const auto A_log = static_cast<double>(a_log[0]);
  const bool softplus = run.problem.gate == Gate::kSoftplus;
  const double scale = softplus ? std::exp(A_log) : -run.problem.lower_bound;
  const double log_scale = softplus ? A_log : std::log(scale);
  GateTerms gate{run.problem.gate,
                 1.0f,
                 factor_of(scale),
                 scale > static_cast<double>(std::numeric_limits<float>::max()),
                 {static_cast<float>(log_scale), 0.0f},
                 bias};
  if (std::isfinite(log_scale)) {
    gate.log_scale[1] = static_cast<float>(log_scale - static_cast<double>(gate.log_scale[0]));
  }
  if (softplus) return gate;
  gate.slope = factor_of(std::exp(A_log));
  // The columns beyond K stay finite: 0 times an infinite slope would be NaN.
  if (std::isinf(gate.slope)) std::fill(bias + run.dims.K, bias + run.dims.Kp, 1.0f);
  return gate;
}

/// Below this natural-log decay a token is clamped (docs/semantics.md 6.5).
constexpr float kLeastLogDecay = -40.0f;

/// -scale y, where y = softplus(x) or sigmoid(x).
HWY_INLINE Vec times_scale(Floats d, const GateTerms& gate, Vec x, Vec y) {
  const Vec plain = hn::Mul(hn::Set(d, -gate.scale), y);
  if (!gate.far) return plain;
  // Where y makes up for such a scale it is exp(x), and leaves the range of floats too.
  Vec power = hn::Add(x, hn::Set(d, gate.log_scale[0]));
  power = hn::Add(power, hn::Set(d, gate.log_scale[1]));
  const Vec tail = hn::Neg(exp_of(d, hn::Neg(at_least(hn::Set(d, -80.0f), hn::Neg(power)))));
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, -20.0f)), tail, plain);
}

/// sigmoid(x); of -x where `mirrored`.
HWY_INLINE Vec sigmoid_of(Floats d, Vec x, bool mirrored = false) {
  const Vec one = hn::Set(d, 1.0f);
  const Vec e = exp_of(d, hn::Neg(hn::Abs(x)));
  const auto upper = mirrored ? hn::Lt(x, hn::Zero(d)) : hn::Ge(x, hn::Zero(d));
  return hn::Div(hn::IfThenElse(upper, one, e), hn::Add(one, e));
}

/// (3.4) or (3.8): the natural-log decay, not yet clamped; z is the raw input plus bias.
HWY_INLINE Vec log_decay(Floats d, const GateTerms& gate, Vec z) {
  if (gate.kind == Gate::kNone) return z;
  if (gate.kind == Gate::kSoftplus) {
    const Vec tail = hn::Log1p(d, hn::Exp(d, hn::Neg(hn::Abs(z))));
    return times_scale(d, gate, z, hn::Add(at_least(hn::Zero(d), z), tail));
  }
  const Vec x = hn::Mul(hn::Set(d, gate.slope), z);
  return times_scale(d, gate, x, sigmoid_of(d, x));
}

/// dg / dz, (3.5) or (3.9); g is log_decay of z. Means nothing where g is clamped.
HWY_INLINE Vec log_decay_slope(Floats d, const GateTerms& gate, Vec z, Vec g) {
  if (gate.kind == Gate::kNone) return hn::Set(d, 1.0f);
  if (gate.kind == Gate::kSoftplus) return times_scale(d, gate, z, sigmoid_of(d, z));
  const Vec slope = hn::Set(d, gate.slope);
  return hn::Mul(slope, hn::Mul(g, sigmoid_of(d, hn::Mul(slope, z), true)));
}

/// Raw gate rows to clamped natural-log decays, in place; rows from `valid` on become 0.
inline void apply_gate(const GateTerms& gate, float* tile, int64_t ld, int64_t valid, int64_t rows,
                       int64_t width) {
  const Floats d;
  for (int64_t i = 0; i < valid; ++i, tile += ld) {
    for_vectors(width, [&](int64_t c) HWY_ATTR {
      const Vec z = hn::Add(hn::Load(d, tile + c), hn::Load(d, gate.bias + c));
      hn::Store(at_least(hn::Set(d, kLeastLogDecay), log_decay(d, gate, z)), d, tile + c);
    });
  }
  zero_tile(tile, ld, rows - valid, width);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_TILE_INL_H_
