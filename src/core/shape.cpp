#include "core/shape.h"

#include <algorithm>
#include <limits>

namespace kda {
namespace {

std::size_t stored_rank(const TensorLayout& layout) {
  return static_cast<std::size_t>(std::clamp(layout.rank, 0, 4));
}

int64_t saturating_sum(int64_t a, int64_t b) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  return b > most - a ? most : a + b;
}

}  // namespace

int64_t saturating_product(int64_t a, int64_t b) {
  if (a <= 0 || b <= 0) return 0;
  const int64_t most = std::numeric_limits<int64_t>::max();
  return a > most / b ? most : a * b;
}

int64_t extent_of(const Problem& problem, std::string_view letter) {
  const Sizes& sizes = problem.sizes;
  if (letter == "B") return sizes.B;
  if (letter == "T") return sizes.T;
  if (letter == "H") return sizes.H;
  if (letter == "HV") return sizes.HV;
  if (letter == "K") return sizes.K;
  if (letter == "V") return sizes.V;
  if (letter == "C") return problem.chunk_size;
  if (letter == "N") return problem.sequences();
  if (letter == "N+1") return problem.sequences() + 1;
  if (letter == "NC") return problem.chunk_rows();
  if (letter == "S") {
    return problem.has(TensorId::kStateIndices) ? sizes.P : problem.sequences();
  }
  return 0;
}

DType default_dtype(DTypeRule rule, DType io) {
  switch (rule) {
    case DTypeRule::kIo:
    case DTypeRule::kSameAsQ:
    case DTypeRule::kFloatIo:
      return io;
    case DTypeRule::kFloat:
    case DTypeRule::kAccurate:
      return io == DType::kF64 ? DType::kF64 : DType::kF32;
    case DTypeRule::kIndex:
      return DType::kI64;
    case DTypeRule::kInt32:
      return DType::kI32;
  }
  return DType::kNone;
}

void set_contiguous_strides(TensorLayout& layout) {
  int64_t step = 1;
  for (std::size_t i = stored_rank(layout); i-- > 0;) {
    layout.stride[i] = step;
    step = saturating_product(step, layout.shape[i]);
  }
}

int64_t count_elements(const TensorLayout& layout) {
  int64_t count = 1;
  for (std::size_t i = 0; i < stored_rank(layout); ++i) {
    count = saturating_product(count, layout.shape[i]);
  }
  return count;
}

int64_t span_elements(const TensorLayout& layout) {
  int64_t last = 0;
  for (std::size_t i = 0; i < stored_rank(layout); ++i) {
    if (layout.shape[i] <= 0) return 0;
    last = saturating_sum(last, saturating_product(layout.shape[i] - 1, layout.stride[i]));
  }
  return saturating_sum(last, 1);
}

}  // namespace kda
