// Memory for one tensor in which every byte that is not an element is watched.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kda/problem.h"
#include "tensor.h"

#if defined(__SANITIZE_ADDRESS__)
#define KDA_GUARD_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KDA_GUARD_ASAN 1
#endif
#endif

namespace kda::cases {

/// The bytes before, between and behind the elements are 0xFF: NaN to whoever reads them, and a
/// write shows. Under AddressSanitizer those before and behind may not be touched at all.
class GuardedBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 128;

  /// `offset` elements past a 64-byte boundary.
  GuardedBuffer(const TensorLayout& layout, int64_t offset);
  /// Plain bytes at a 64-byte boundary: a workspace.
  explicit GuardedBuffer(std::size_t bytes);
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer();

  std::byte* address() { return memory_.data() + begin_; }
  /// Everything, guards included.
  std::span<std::byte> memory() { return memory_; }

  void load(const HostTensor& tensor);
  /// Elements become 0xFF bytes.
  void poison();
  HostTensor store() const;

  /// Remembers all bytes, to compare them later.
  void snapshot();
  /// "" or what was written that must not be: anything but the elements, or with `elements_too`
  /// anything.
  std::string changes(bool elements_too) const;
  /// The index of an element that still is 0xFF all over; -1 if there is none.
  int64_t unwritten() const;

 private:
  std::vector<int64_t> shape() const;
  void watch(bool on) const;

  TensorLayout layout_;
  std::size_t begin_;                 // of the first element
  std::size_t bytes_;                 // from the first to the last element
  std::vector<std::size_t> offsets_;  // of each element, in index order
  AlignedBytes memory_;
  AlignedBytes before_;
};

}  // namespace kda::cases
