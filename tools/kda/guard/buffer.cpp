#include "guard/buffer.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#if defined(KDA_GUARD_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace kda::cases {
namespace {

constexpr std::byte kFill{0xFF};

std::size_t span_bytes(const TensorLayout& layout) {
  int64_t last = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(layout.rank); ++i) {
    if (layout.shape[i] == 0) return 0;
    last += (layout.shape[i] - 1) * layout.stride[i];
  }
  return static_cast<std::size_t>(last + 1) * size_of(layout.dtype);
}

/// Byte offsets of the elements in index order.
std::vector<std::size_t> offsets_of(const TensorLayout& layout) {
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  std::copy_n(layout.shape.begin(), layout.rank, shape.begin());
  std::vector<std::size_t> offsets;
  std::array<int64_t, 4> i{};
  for (i[0] = 0; i[0] < shape[0]; ++i[0]) {
    for (i[1] = 0; i[1] < shape[1]; ++i[1]) {
      for (i[2] = 0; i[2] < shape[2]; ++i[2]) {
        for (i[3] = 0; i[3] < shape[3]; ++i[3]) {
          int64_t at = 0;
          for (std::size_t d = 0; d < 4; ++d) at += i[d] * layout.stride[d];
          offsets.push_back(static_cast<std::size_t>(at) * size_of(layout.dtype));
        }
      }
    }
  }
  return offsets;
}

}  // namespace

GuardedBuffer::GuardedBuffer(const TensorLayout& layout, int64_t offset)
    : layout_(layout),
      begin_(kGuardBytes + static_cast<std::size_t>(offset) * size_of(layout.dtype)),
      bytes_(span_bytes(layout)),
      offsets_(offsets_of(layout)),
      memory_(begin_ + bytes_ + kGuardBytes, kFill) {
  watch(true);
}

GuardedBuffer::GuardedBuffer(std::size_t bytes)
    : begin_(kGuardBytes), bytes_(bytes), memory_(begin_ + bytes_ + kGuardBytes, kFill) {
  watch(true);
}

GuardedBuffer::~GuardedBuffer() { watch(false); }

void GuardedBuffer::watch([[maybe_unused]] bool on) const {
#if defined(KDA_GUARD_ASAN)
  const std::byte* behind = memory_.data() + begin_ + bytes_;
  if (on) {
    ASAN_POISON_MEMORY_REGION(memory_.data(), begin_);
    ASAN_POISON_MEMORY_REGION(behind, kGuardBytes);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
  }
#endif
}

std::vector<int64_t> GuardedBuffer::shape() const {
  return {layout_.shape.begin(), layout_.shape.begin() + layout_.rank};
}

void GuardedBuffer::load(const HostTensor& tensor) {
  const std::size_t size = size_of(layout_.dtype);
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    std::memcpy(address() + offsets_[i], tensor.bytes.data() + i * size, size);
  }
}

void GuardedBuffer::poison() {
  for (const std::size_t offset : offsets_) {
    std::memset(address() + offset, 0xFF, size_of(layout_.dtype));
  }
  if (offsets_.empty()) std::memset(address(), 0xFF, bytes_);
}

HostTensor GuardedBuffer::store() const {
  HostTensor tensor(layout_.dtype, shape());
  const std::size_t size = size_of(layout_.dtype);
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    std::memcpy(tensor.bytes.data() + i * size, memory_.data() + begin_ + offsets_[i], size);
  }
  return tensor;
}

void GuardedBuffer::snapshot() {
  watch(false);
  before_ = memory_;
  watch(true);
}

std::string GuardedBuffer::changes(bool elements_too) const {
  watch(false);
  AlignedBytes expected = elements_too ? before_ : memory_;
  if (!elements_too) {
    std::fill(expected.begin(), expected.end(), kFill);
    const std::size_t size = size_of(layout_.dtype);
    for (const std::size_t offset : offsets_) {
      std::copy_n(memory_.begin() + static_cast<std::ptrdiff_t>(begin_ + offset), size,
                  expected.begin() + static_cast<std::ptrdiff_t>(begin_ + offset));
    }
    if (offsets_.empty()) {
      std::copy_n(memory_.begin() + static_cast<std::ptrdiff_t>(begin_), bytes_,
                  expected.begin() + static_cast<std::ptrdiff_t>(begin_));
    }
  }
  const auto [found, _] = std::mismatch(memory_.begin(), memory_.end(), expected.begin());
  std::string text;
  if (found != memory_.end()) {
    const auto at =
        static_cast<std::ptrdiff_t>(found - memory_.begin()) - static_cast<std::ptrdiff_t>(begin_);
    text = fmt::format("byte {} was written (the tensor has {} bytes)", at, bytes_);
  }
  watch(true);
  return text;
}

int64_t GuardedBuffer::unwritten() const {
  const std::size_t size = size_of(layout_.dtype);
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    const std::byte* element = memory_.data() + begin_ + offsets_[i];
    if (std::all_of(element, element + size, [](std::byte b) { return b == kFill; })) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

}  // namespace kda::cases
