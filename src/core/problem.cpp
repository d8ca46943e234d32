#include "kda/problem.h"

#include <cmath>
#include <string_view>

#include "core/shape.h"

namespace kda {

TensorLayout TensorLayout::contiguous(DType dtype, std::initializer_list<int64_t> shape) {
  TensorLayout layout;
  layout.dtype = dtype;
  // A rank past 4 is kept, for validated() to refuse.
  for (int64_t extent : shape) {
    if (layout.rank < 4) layout.shape[static_cast<std::size_t>(layout.rank)] = extent;
    ++layout.rank;
  }
  set_contiguous_strides(layout);
  return layout;
}

TensorLayout TensorLayout::strided(DType dtype, std::initializer_list<int64_t> shape,
                                   std::initializer_list<int64_t> stride) {
  TensorLayout layout = contiguous(dtype, shape);
  if (stride.size() != shape.size()) layout.rank = -1;  // for validated() to refuse
  std::size_t i = 0;
  for (int64_t step : stride) {
    if (i == 4) break;
    layout.stride[i++] = step;
  }
  return layout;
}

Problem Problem::make(Operation operation, const Sizes& sizes, DType io) {
  Problem problem;
  problem.operation = operation;
  problem.sizes = sizes;
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.required) problem.set(spec.id, default_dtype(spec.dtypes, io));
  }
  return problem;
}

Problem& Problem::set(TensorId id, DType dtype) {
  TensorLayout layout;
  layout.dtype = dtype;
  return set(id, layout);
}

Problem& Problem::set(TensorId id, const TensorLayout& layout) {
  tensors[static_cast<std::size_t>(id)] = layout;
  return *this;
}

int64_t Problem::chunk_rows() const {
  const int64_t C = chunk_size;
  if (C <= 0) return 0;
  if (packed()) return sizes.T / C + sizes.N;
  return saturating_product(sizes.B, sizes.T / C + (sizes.T % C != 0 ? 1 : 0));
}

double Problem::effective_scale() const {
  return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(sizes.K));
}

TensorLayout Problem::canonical_layout(TensorId id) const {
  TensorLayout layout;
  layout.dtype = (*this)[id].dtype;
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.id != id) continue;
    std::string_view rest = spec.shape.substr(1, spec.shape.size() - 2);
    while (!rest.empty()) {
      const std::size_t comma = rest.find(',');
      layout.shape[static_cast<std::size_t>(layout.rank++)] =
          extent_of(*this, rest.substr(0, comma));
      rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    }
    if (state_v_first && spec.shape == "[S,HV,K,V]") std::swap(layout.shape[2], layout.shape[3]);
    set_contiguous_strides(layout);
    return layout;
  }
  return layout;
}

int64_t Problem::bytes(TensorId id) const {
  const TensorLayout& given = (*this)[id];
  if (!given.present()) return 0;
  const TensorLayout layout = given.rank == 0 ? canonical_layout(id) : given;
  return saturating_product(span_elements(layout), static_cast<int64_t>(size_of(layout.dtype)));
}

}  // namespace kda
