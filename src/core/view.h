// A tensor at run time: address and resolved layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kda/plan.h"
#include "kda/problem.h"

namespace kda {

struct View {
  std::byte* data = nullptr;  ///< null if the tensor is absent
  DType dtype = DType::kNone;
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};

  explicit operator bool() const { return data != nullptr; }

  /// Address of element (i, j, k, l); indices beyond the rank are left at 0.
  std::byte* at(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const {
    const int64_t offset = i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
    return data + offset * static_cast<int64_t>(size_of(dtype));
  }
};

/// The view of a tensor of a validated problem. An absent tensor gives a false view; a present
/// tensor without elements may give one too.
inline View view_of(const Problem& problem, const Args& args, TensorId id) {
  const TensorLayout& layout = problem[id];
  if (!layout.present()) return {};
  return {static_cast<std::byte*>(args[id]), layout.dtype, layout.shape, layout.stride};
}

/// A state with its last two indices as (k, v), whatever the layout in memory.
inline View state_view_of(const Problem& problem, const Args& args, TensorId id) {
  View view = view_of(problem, args, id);
  if (problem.state_v_first) {
    std::swap(view.shape[2], view.shape[3]);
    std::swap(view.stride[2], view.stride[3]);
  }
  return view;
}

}  // namespace kda
