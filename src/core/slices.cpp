#include "core/slices.h"

#include <algorithm>
#include <span>
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

/// Those that can be told apart.
int64_t heads_apart(const Problem& problem) {
  const std::span<const TensorSpec> specs = tensors_of(problem.operation);
  const bool grouped = std::any_of(specs.begin(), specs.end(), [](const TensorSpec& spec) {
    return dimension_of(spec.shape, "H") >= 0;
  });
  return grouped ? problem.sizes.H : problem.sizes.HV;
}

/// `size` and `first` of a dimension that a slice has a part of.
struct Part {
  int64_t first;
  int64_t size;

  Part times(int64_t factor) const { return {first * factor, size * factor}; }
};

Part part_of(int64_t whole, int64_t count, int64_t index) {
  const int64_t first = whole * index / count;
  return {first, whole * (index + 1) / count - first};
}

void narrow_dimension(Slice& slice, const TensorSpec& spec, std::string_view letter, Part part) {
  TensorLayout& layout = slice.problem.tensors[static_cast<std::size_t>(spec.id)];
  const int dimension = dimension_of(spec.shape, letter);
  if (!layout.present() || dimension < 0) return;
  const auto i = static_cast<std::size_t>(dimension);
  layout.shape[i] = part.size;
  slice.offset[static_cast<std::size_t>(spec.id)] +=
      part.first * layout.stride[i] * static_cast<int64_t>(size_of(layout.dtype));
}

void take_heads(Slice& slice, int64_t count, int64_t index) {
  Sizes& sizes = slice.problem.sizes;
  const int64_t apart = heads_apart(slice.problem);
  const Part keys = part_of(apart, count, index);
  const Part values = keys.times(sizes.HV / apart);
  sizes.H = keys.size;
  sizes.HV = values.size;
  for (const TensorSpec& spec : tensors_of(slice.problem.operation)) {
    narrow_dimension(slice, spec, "H", keys);
    narrow_dimension(slice, spec, "HV", values);
  }
}

void take_sequences(Slice& slice, int64_t count, int64_t index) {
  Sizes& sizes = slice.problem.sizes;
  const Part sequences = part_of(sizes.B, count, index);
  const Part rows = sequences.times(slice.problem.chunk_rows() / sizes.B);
  sizes.B = sequences.size;
  slice.first_sequence = sequences.first;
  for (const TensorSpec& spec : tensors_of(slice.problem.operation)) {
    narrow_dimension(slice, spec, "B", sequences);
    narrow_dimension(slice, spec, "S", sequences);
    narrow_dimension(slice, spec, "NC", rows);
  }
}

}  // namespace

Cut finest_cut(const Problem& problem) {
  const bool pool = problem.has(TensorId::kStateIndices);  // its slots are those of any sequence
  return {heads_apart(problem), pool ? 1 : std::max<int64_t>(problem.sizes.B, 1)};
}

Args Slice::narrow(Args args) const {
  for (std::size_t i = 0; i < kTensorCount; ++i) {
    if (args.data[i] != nullptr) args.data[i] = static_cast<std::byte*>(args.data[i]) + offset[i];
  }
  return args;
}

Slice slice_of(const Problem& problem, const Cut& cut, int64_t index) {
  Slice slice;
  slice.problem = problem;
  slice.all_sequences = problem.sizes.B;
  if (cut.heads > 1) take_heads(slice, cut.heads, index / cut.sequences);
  if (cut.sequences > 1) take_sequences(slice, cut.sequences, index % cut.sequences);
  return slice;
}

std::vector<Slice> slices_of(const Problem& problem, const Cut& cut) {
  std::vector<Slice> slices;
  slices.reserve(static_cast<std::size_t>(cut.slices()));
  for (int64_t i = 0; i < cut.slices(); ++i) slices.push_back(slice_of(problem, cut, i));
  return slices;
}

Cut cut_to_limit(const Problem& problem, std::size_t limit, const SliceWorkspace& workspace) {
  const auto keeps = [&](const Cut& cut) {
    const Result<std::size_t> bytes = workspace(slice_of(problem, cut, cut.slices() - 1));
    return bytes.ok() && *bytes <= limit;
  };
  const Cut finest = finest_cut(problem);
  Cut best = finest;
  for (int64_t heads = 1; heads <= std::min(finest.heads, best.slices() - 1); ++heads) {
    // The least number of slices of sequences is in (fails, fits].
    int64_t fails = 0;
    int64_t fits = std::min(finest.sequences, (best.slices() - 1) / heads);
    if (!keeps({heads, fits})) continue;
    while (fits - fails > 1) {
      const int64_t middle = fails + (fits - fails) / 2;
      (keeps({heads, middle}) ? fits : fails) = middle;
    }
    best = {heads, fits};
  }
  return best;
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
