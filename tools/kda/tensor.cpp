#include "tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "blocks.h"

namespace kda::cases {
namespace {

static_assert(std::endian::native == std::endian::little, "case files hold little-endian data");

/// A binary floating-point format of 16 bits with subnormals.
struct Format {
  int mantissa_bits;
  int bias;

  int least_exponent() const { return 1 - bias; }
  uint32_t infinity() const { return static_cast<uint32_t>(2 * bias + 1) << mantissa_bits; }
};
constexpr Format kBF16Format{7, 127};
constexpr Format kF16Format{10, 15};

uint16_t encode(double value, Format format) {
  const uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
  uint32_t magnitude = format.infinity();
  if (std::isnan(value)) {
    magnitude |= 1U << (format.mantissa_bits - 1);
  } else if (value == 0) {
    magnitude = 0;
  } else if (std::isfinite(value)) {
    const int exponent = std::max(std::ilogb(value), format.least_exponent());
    const double steps = std::ldexp(std::fabs(value), format.mantissa_bits - exponent);
    if (exponent <= format.bias) {
      // Carries of the rounding run into the exponent, up to infinity, as they should.
      const auto field = static_cast<uint32_t>(exponent + format.bias - 1);
      magnitude = (field << format.mantissa_bits) + static_cast<uint32_t>(std::nearbyint(steps));
      magnitude = std::min(magnitude, format.infinity());
    }
  }
  return static_cast<uint16_t>(sign | magnitude);
}

double decode(uint16_t bits, Format format) {
  const uint32_t magnitude = bits & 0x7FFFU;
  const auto field = static_cast<int>(magnitude >> format.mantissa_bits);
  const uint32_t fraction = magnitude & ((1U << format.mantissa_bits) - 1U);
  double value = 0;
  if (magnitude > format.infinity()) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == format.infinity()) {
    value = std::numeric_limits<double>::infinity();
  } else {
    const uint32_t hidden = field == 0 ? 0U : 1U << format.mantissa_bits;
    value = std::ldexp(static_cast<double>(hidden + fraction),
                       std::max(field, 1) - format.bias - format.mantissa_bits);
  }
  return (bits & 0x8000U) != 0 ? -value : value;
}

template <class T>
T load(const HostTensor& tensor, int64_t index) {
  T value;
  std::memcpy(&value, tensor.bytes.data() + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(HostTensor& tensor, int64_t index, T value) {
  std::memcpy(tensor.bytes.data() + static_cast<std::size_t>(index) * sizeof(T), &value, sizeof(T));
}

}  // namespace

HostTensor::HostTensor(DType dtype_in, std::vector<int64_t> shape_in)
    : dtype(dtype_in), shape(std::move(shape_in)) {
  bytes.assign(static_cast<std::size_t>(count()) * size_of(dtype), std::byte{0});
}

HostTensor HostTensor::uninitialised(DType dtype, std::vector<int64_t> shape) {
  HostTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(static_cast<std::size_t>(tensor.count()) * size_of(dtype));
  return tensor;
}

int64_t HostTensor::count() const {
  // Extents beside a 0 may be so large that their product overflows.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>{});
}

double HostTensor::get(int64_t index) const {
  switch (dtype) {
    case DType::kBF16:
      return decode(load<uint16_t>(*this, index), kBF16Format);
    case DType::kF16:
      return decode(load<uint16_t>(*this, index), kF16Format);
    case DType::kF32:
      return static_cast<double>(load<float>(*this, index));
    case DType::kF64:
      return load<double>(*this, index);
    case DType::kI32:
    case DType::kI64:
      return static_cast<double>(get_int(index));
    case DType::kNone:
      break;
  }
  return 0;
}

void HostTensor::set(int64_t index, double value) {
  switch (dtype) {
    case DType::kBF16:
      return store(*this, index, encode(value, kBF16Format));
    case DType::kF16:
      return store(*this, index, encode(value, kF16Format));
    case DType::kF32:
      return store(*this, index, static_cast<float>(value));
    case DType::kF64:
      return store(*this, index, value);
    case DType::kI32:
      return store(*this, index, static_cast<int32_t>(value));
    case DType::kI64:
      return store(*this, index, static_cast<int64_t>(value));
    case DType::kNone:
      break;
  }
}

int64_t HostTensor::get_int(int64_t index) const {
  return dtype == DType::kI32 ? load<int32_t>(*this, index) : load<int64_t>(*this, index);
}

void HostTensor::poison() {
  if (bytes.empty()) return;
  constexpr int64_t kLine = 64;
  const auto size = static_cast<int64_t>(bytes.size());
  in_blocks((size + kLine - 1) / kLine, 1, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<std::size_t>(begin * kLine);
    const auto last = static_cast<std::size_t>(std::min(end * kLine, size));
    std::memset(bytes.data() + first, 0xFF, last - first);
  });
}

std::vector<double> to_doubles(const HostTensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.count()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = tensor.get(static_cast<int64_t>(i));
  return values;
}

HostTensor from_doubles(DType dtype, std::vector<int64_t> shape, std::span<const double> values) {
  HostTensor tensor(dtype, std::move(shape));
  for (std::size_t i = 0; i < values.size(); ++i) tensor.set(static_cast<int64_t>(i), values[i]);
  return tensor;
}

HostTensor converted(const HostTensor& tensor, DType dtype) {
  if (dtype == tensor.dtype) return tensor;
  HostTensor result(dtype, tensor.shape);
  for (int64_t i = 0; i < tensor.count(); ++i) result.set(i, tensor.get(i));
  return result;
}

}  // namespace kda::cases
