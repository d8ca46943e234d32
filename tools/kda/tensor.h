// A tensor in host memory, as the program, the tests and the benchmarks use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "kda/types.h"

namespace kda::cases {

/// Gives memory at multiples of 64 bytes, which is what the CPU implementations ask for.
template <class T>
struct AlignedAllocator {
  using value_type = T;  // NOLINT(readability-identifier-naming): as allocators call it
  static constexpr std::align_val_t kAlignment{64};

  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>& /*other*/) {}  // NOLINT(google-explicit-constructor)

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* address, std::size_t /*count*/) { ::operator delete(address, kAlignment); }
  /// resize() leaves new elements as the memory is: what is read from a file is not filled before.
  template <class U>
  void construct(U* address) {
    ::new (static_cast<void*>(address)) U;
  }
  template <class U>
  void construct(U* address, const U& value) {
    ::new (static_cast<void*>(address)) U(value);
  }
  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};

using AlignedBytes = std::vector<std::byte, AlignedAllocator<std::byte>>;

/// Elements in index order, last index fastest.
struct HostTensor {
  DType dtype = DType::kNone;
  std::vector<int64_t> shape;
  AlignedBytes bytes;

  HostTensor() = default;
  /// Zeroes. The product of the extents must fit memory.
  HostTensor(DType dtype, std::vector<int64_t> shape);

  /// The same with whatever the memory holds.
  static HostTensor uninitialised(DType dtype, std::vector<int64_t> shape);

  int64_t count() const;
  /// Element `index` in index order; integers beyond 2^53 lose precision.
  double get(int64_t index) const;
  /// Rounds to nearest, ties to even.
  void set(int64_t index, double value);
  /// Element `index` of an int32 or int64 tensor.
  int64_t get_int(int64_t index) const;
  /// Fills with 0xFF bytes: NaN in every floating-point dtype, -1 in the integers.
  void poison();
};

std::vector<double> to_doubles(const HostTensor& tensor);
HostTensor from_doubles(DType dtype, std::vector<int64_t> shape, std::span<const double> values);
/// The same values rounded to another dtype.
HostTensor converted(const HostTensor& tensor, DType dtype);

}  // namespace kda::cases
