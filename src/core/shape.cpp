#include "core/shape.h"

namespace kda {

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
  for (int32_t i = layout.rank; i-- > 0;) {
    const auto index = static_cast<std::size_t>(i);
    layout.stride[index] = step;
    step *= layout.shape[index];
  }
}

int64_t count_elements(const TensorLayout& layout) {
  int64_t count = 1;
  for (int32_t i = 0; i < layout.rank; ++i) count *= layout.shape[static_cast<std::size_t>(i)];
  return count;
}

int64_t span_elements(const TensorLayout& layout) {
  int64_t last = 0;
  for (int32_t i = 0; i < layout.rank; ++i) {
    const auto index = static_cast<std::size_t>(i);
    if (layout.shape[index] == 0) return 0;
    last += (layout.shape[index] - 1) * layout.stride[index];
  }
  return last + 1;
}

}  // namespace kda
