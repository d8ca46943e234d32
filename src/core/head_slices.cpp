#include "core/head_slices.h"

#include <algorithm>
#include <string_view>

namespace kda {
namespace {

/// Which dimension of "[B,T,H,K]" is `letter`; -1 if none is.
int dimension_of(std::string_view shape, std::string_view letter) {
  shape = shape.substr(1, shape.size() - 2);
  for (int i = 0;; ++i) {
    const std::size_t end = shape.find(',');
    if (shape.substr(0, end) == letter) return i;
    if (end == std::string_view::npos) return -1;
    shape.remove_prefix(end + 1);
  }
}

/// Heads of the largest slice.
int64_t most_heads(int64_t heads, int64_t slices) { return (heads + slices - 1) / slices; }

int64_t waves(const SliceCosts& costs, int64_t slices) {
  int64_t sum = 0;
  for (int64_t i = 0; i < slices; ++i) {
    const int64_t heads = costs.heads * (i + 1) / slices - costs.heads * i / slices;
    sum += (heads * costs.blocks_per_head + costs.sms - 1) / costs.sms;
  }
  return sum;
}

}  // namespace

Args HeadSlice::narrow(Args args) const {
  for (std::size_t i = 0; i < kTensorCount; ++i) {
    if (args.data[i] != nullptr) args.data[i] = static_cast<std::byte*>(args.data[i]) + offset[i];
  }
  return args;
}

HeadSlice head_slice(const Problem& problem, int64_t index, int64_t count) {
  const int64_t group = problem.sizes.HV / problem.sizes.H;
  const int64_t first = problem.sizes.H * index / count;
  HeadSlice slice;
  slice.problem = problem;
  slice.problem.sizes.H = problem.sizes.H * (index + 1) / count - first;
  slice.problem.sizes.HV = slice.problem.sizes.H * group;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    TensorLayout& layout = slice.problem.tensors[static_cast<std::size_t>(spec.id)];
    const int key = dimension_of(spec.shape, "H");
    const int value = dimension_of(spec.shape, "HV");
    if (!layout.present() || (key < 0 && value < 0)) continue;
    const auto dim = static_cast<std::size_t>(std::max(key, value));
    layout.shape[dim] = key >= 0 ? slice.problem.sizes.H : slice.problem.sizes.HV;
    slice.offset[static_cast<std::size_t>(spec.id)] = (key >= 0 ? first : first * group) *
                                                      layout.stride[dim] *
                                                      static_cast<int64_t>(size_of(layout.dtype));
  }
  return slice;
}

std::vector<HeadSlice> slice_heads(const Problem& problem, int64_t count) {
  std::vector<HeadSlice> slices;
  slices.reserve(static_cast<std::size_t>(count));
  for (int64_t i = 0; i < count; ++i) slices.push_back(head_slice(problem, i, count));
  return slices;
}

int64_t count_slices(const SliceCosts& costs) {
  int64_t least = 1;
  const double bytes = static_cast<double>(costs.workspace) / static_cast<double>(costs.heads);
  while (least<costs.heads&& static_cast<double>(most_heads(costs.heads, least)) *
               bytes> static_cast<double>(costs.limit)) {
    ++least;
  }
  int64_t best = least;
  for (int64_t n = least; n <= std::min(2 * least, costs.heads); ++n) {
    if (waves(costs, n) < waves(costs, best)) best = n;
  }
  return best;
}

}  // namespace kda
