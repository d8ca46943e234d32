// Problem::validated: every check that needs neither a device nor tensor contents.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/shape.h"
#include "kda/problem.h"

namespace kda {
namespace {

// No machine holds a tensor of more elements. With every tensor of an operation below this, byte
// offsets and sums of several tensors (workspaces) stay far inside int64.
constexpr int64_t kMaxElements = int64_t{1} << 46;

template <class... Parts>
Status invalid(fmt::format_string<Parts...> text, Parts&&... parts) {
  return {StatusCode::kInvalidArgument, fmt::format(text, std::forward<Parts>(parts)...)};
}

bool is_stage(Operation operation) {
  return operation != Operation::kChunkForward && operation != Operation::kChunkBackward &&
         operation != Operation::kRecurrent;
}

bool uses_letter(Operation operation, std::string_view shape_part) {
  return std::any_of(tensors_of(operation).begin(), tensors_of(operation).end(),
                     [&](const TensorSpec& spec) {
                       return spec.shape.find(shape_part) != std::string_view::npos;
                     });
}

Status check_size(std::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid("size {}: found {}, expected {}..{}", name, value, least, most);
}

Status check_sizes(const Problem& problem) {
  const Sizes& s = problem.sizes;
  const int64_t least_v = uses_letter(problem.operation, ",V]") ? 1 : 0;
  for (const Status& status :
       {check_size("B", s.B, 1, kMaxElements), check_size("T", s.T, 0, kMaxElements),
        check_size("H", s.H, 1, kMaxElements), check_size("HV", s.HV, 1, kMaxElements),
        check_size("K", s.K, 1, 256), check_size("V", s.V, least_v, kMaxElements)}) {
    if (!status.ok()) return status;
  }
  if (s.HV % s.H != 0) {
    return invalid("size HV: found {}, expected a multiple of H = {} (grouped value heads)", s.HV,
                   s.H);
  }
  if (problem.packed()) {
    if (s.B != 1) {
      return invalid("size B: found {} with cu_seqlens, expected 1 (pack all sequences in one row)",
                     s.B);
    }
    if (Status status = check_size("N", s.N, 0, kMaxElements); !status.ok()) return status;
    // Every token would be padding: far more often a field that was not filled in.
    if (s.N == 0 && s.T > 0) {
      return invalid(
          "size N: found 0 with cu_seqlens and T = {}, expected the number of packed sequences, "
          "len(cu_seqlens) - 1; without sequences T is 0",
          s.T);
    }
  }
  if (problem.has(TensorId::kStateIndices)) {
    if (Status status = check_size("P", s.P, 1, kMaxElements); !status.ok()) return status;
  }
  // Work is handed out by sequence and head.
  if (saturating_product(problem.sequences(), s.HV) > kMaxElements) {
    return invalid("size {}: found {} with HV = {}, expected a product of at most {}",
                   problem.packed() ? "N" : "B", problem.sequences(), s.HV, kMaxElements);
  }
  return {};
}

/// What is not in fp64 is computed in fp32: a number beyond its range would be infinite there.
Status check_scale(const Problem& problem) {
  const double scale = problem.scale.value_or(1);
  const bool in_fp64 =
      std::any_of(problem.tensors.begin(), problem.tensors.end(),
                  [](const TensorLayout& layout) { return layout.dtype == DType::kF64; });
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (std::isfinite(scale) && (in_fp64 || std::abs(scale) <= kLargest)) return {};
  return invalid("scale: found {}, expected a finite number{}", scale,
                 std::isfinite(scale) ? " in the range of fp32, since no tensor is fp64" : "");
}

Status check_gate(const Problem& problem) {
  const bool has_gate = problem.gate != Gate::kNone;
  switch (problem.gate) {
    case Gate::kNone:
    case Gate::kSoftplus:
    case Gate::kLowerBound:
      break;
    default:
      return invalid("gate: found value {}, expected none, softplus or lower_bound",
                     static_cast<int32_t>(problem.gate));
  }
  if (problem.gate == Gate::kLowerBound) {
    // Beyond the range of fp32 too: gates that far are infinite, which all rows take.
    if (!std::isfinite(problem.lower_bound) || problem.lower_bound >= 0) {
      return invalid("lower_bound: found {}, expected a finite number below 0",
                     problem.lower_bound);
    }
  } else if (problem.lower_bound != 0) {
    return invalid("lower_bound: found {} with gate {}, expected it only with gate lower_bound",
                   problem.lower_bound, name_of(problem.gate));
  }
  if (problem.gate == Gate::kSoftplus && !problem.has(TensorId::kALog)) {
    return invalid("A_log: absent, expected [HV]: the softplus gate needs it");
  }
  for (TensorId id : {TensorId::kALog, TensorId::kDtBias}) {
    if (!has_gate && problem.has(id)) {
      return invalid(
          "{}: given with gate none, expected it only with a softplus or lower_bound "
          "gate",
          name_of(id));
    }
  }
  if (problem.has(TensorId::kDALog) && !problem.has(TensorId::kALog)) {
    return invalid("dA_log: asked for without A_log; give A_log or leave dA_log out");
  }
  if (problem.has(TensorId::kDdtBias) && !problem.has(TensorId::kDtBias)) {
    return invalid("ddt_bias: asked for without dt_bias; give dt_bias or leave ddt_bias out");
  }
  return {};
}

Status check_options(const Problem& problem) {
  if (problem.chunk_size != 64 && problem.chunk_size != 32) {
    return invalid("chunk_size: found {}, expected 64 or 32", problem.chunk_size);
  }
  if (Status status = check_scale(problem); !status.ok()) return status;
  if (is_stage(problem.operation)) {
    if (problem.qk_l2norm || problem.beta_sigmoid) {
      return invalid(
          "{}: found set for stage {}, expected stages to get normalised q, k and "
          "activated beta",
          problem.qk_l2norm ? "qk_l2norm" : "beta_sigmoid", name_of(problem.operation));
    }
    if (problem.gate != Gate::kNone && problem.operation != Operation::kGateCumsum) {
      return invalid("gate: found {} for stage {}, expected none: stage gate_cumsum applies it",
                     name_of(problem.gate), name_of(problem.operation));
    }
  }
  if (problem.allow_neg_eigval && !problem.beta_sigmoid) {
    return invalid(
        "allow_neg_eigval: set without beta_sigmoid, expected both (it doubles the "
        "sigmoid), or pass beta values up to 2 directly");
  }
  return check_gate(problem);
}

bool rule_accepts(DTypeRule rule, DType dtype, DType q) {
  const bool is_float =
      dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 || dtype == DType::kF64;
  switch (rule) {
    case DTypeRule::kIo:
    case DTypeRule::kFloatIo:
    case DTypeRule::kFloat:
      return is_float;
    case DTypeRule::kSameAsQ:
      return dtype == q;
    case DTypeRule::kAccurate:
      return dtype == DType::kF32 || dtype == DType::kF64;
    case DTypeRule::kIndex:
      return dtype == DType::kI32 || dtype == DType::kI64;
    case DTypeRule::kInt32:
      return dtype == DType::kI32;
  }
  return false;
}

auto extents(const TensorLayout& layout) {
  return fmt::join(layout.shape.begin(), layout.shape.begin() + layout.rank, ",");
}

/// The size behind the largest extent of a shape, as "T = 100".
std::string largest_size(const Problem& problem, const TensorSpec& spec) {
  const Sizes& s = problem.sizes;
  const bool pool = problem.has(TensorId::kStateIndices);
  struct Size {
    std::string_view name;
    int64_t value;
    bool used;
  };
  const auto has = [&](std::string_view part) {
    return spec.shape.find(part) != std::string_view::npos;
  };
  const bool sequences = (has("[S,") && !pool) || has("[NC,") || has("[N");
  const std::array<Size, 8> sizes = {{{"B", s.B, has("[B,") || (sequences && !problem.packed())},
                                      {"T", s.T, has(",T,") || has("[NC,")},
                                      {"H", s.H, has(",H,")},
                                      {"HV", s.HV, has("HV")},
                                      {"K", s.K, has("K")},
                                      {"V", s.V, has(",V]")},
                                      {"N", s.N, sequences && problem.packed()},
                                      {"P", s.P, has("[S,") && pool}}};
  const Size* most = &sizes.front();
  for (const Size& size : sizes) {
    if (size.used && (!most->used || size.value > most->value)) most = &size;
  }
  return fmt::format("{} = {}", most->name, most->value);
}

/// Of the tensors that are present or of the others.
Status check_canonical_sizes(const Problem& problem, bool present) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (problem.has(spec.id) != present) continue;
    const TensorLayout expected = problem.canonical_layout(spec.id);
    if (count_elements(expected) > kMaxElements) {
      return invalid(
          "sizes: {} is too large, {} would be [{}] = {}{}, expected at most {} elements",
          largest_size(problem, spec), name_of(spec.id), extents(expected), spec.shape,
          present ? "" : " (absent, but its size counts: work may take it)", kMaxElements);
    }
  }
  return {};
}

/// Also of absent tensors: implementations make some of them in their workspace.
Status check_all_sizes(const Problem& problem) {
  if (Status status = check_canonical_sizes(problem, true); !status.ok()) return status;
  return check_canonical_sizes(problem, false);
}

/// Sufficient and, for slices and permutations of dense tensors, necessary.
bool overlaps_itself(const TensorLayout& layout) {
  std::array<std::size_t, 4> order{0, 1, 2, 3};
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return layout.stride[a] < layout.stride[b]; });
  int64_t reach = 0;  // largest offset inside one step of the next dimension
  for (const std::size_t dim : order) {
    if (layout.shape[dim] <= 1) continue;  // also the dimensions beyond the rank
    if (layout.stride[dim] <= reach) return true;
    reach += (layout.shape[dim] - 1) * layout.stride[dim];
  }
  return false;
}

Status check_strides(const TensorSpec& spec, const TensorLayout& layout) {
  int64_t span = 1;
  for (int32_t i = 0; i < layout.rank; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const int64_t steps = layout.shape[index] - 1;
    const int64_t stride = layout.stride[index];
    if (stride < 0) {
      return invalid("{}: stride {} of dimension {}, expected 0 or more", name_of(spec.id), stride,
                     i);
    }
    if (steps > 0 && stride > (kMaxElements - span) / steps) {
      return invalid(
          "{}: stride {} of dimension {}, expected at most {}: the tensor leaves the "
          "address space",
          name_of(spec.id), stride, i, (kMaxElements - span) / steps);
    }
    if (steps > 0) span += steps * stride;
  }
  if (spec.role == Role::kOutput && count_elements(layout) > 0 && overlaps_itself(layout)) {
    return invalid(
        "{}: strides [{}] make elements of the output overlap, expected distinct "
        "addresses",
        name_of(spec.id),
        fmt::join(layout.stride.begin(), layout.stride.begin() + layout.rank, ","));
  }
  return {};
}

/// A bias or its gradient may come flat, as [HV*K].
bool is_flat(const TensorSpec& spec, const TensorLayout& expected, const TensorLayout& layout) {
  return spec.shape == "[HV,K]" && layout.rank == 1 &&
         layout.shape[0] == expected.shape[0] * expected.shape[1];
}

TensorLayout unflatten(const TensorLayout& expected, const TensorLayout& flat) {
  TensorLayout layout = expected;
  layout.stride[1] = flat.stride[0];
  layout.stride[0] = saturating_product(flat.stride[0], expected.shape[1]);
  return layout;
}

/// Entries past the rank mean nothing; callers may leave anything there.
void clear_past_rank(TensorLayout& layout) {
  for (auto i = static_cast<std::size_t>(layout.rank); i < 4; ++i) {
    layout.shape[i] = layout.stride[i] = 0;
  }
}

Status resolve_tensor(Problem& problem, const TensorSpec& spec) {
  TensorLayout layout = problem[spec.id];
  const std::string_view name = name_of(spec.id);
  if (!layout.present()) {
    if (!spec.required) return {};
    return invalid("{}: absent, expected {} ({})", name, spec.shape, spec.about);
  }
  const DType q = tensors_of(problem.operation).front().dtypes == DTypeRule::kIo
                      ? problem[tensors_of(problem.operation).front().id].dtype
                      : DType::kNone;
  if (!rule_accepts(spec.dtypes, layout.dtype, q)) {
    const bool known = size_of(layout.dtype) != 0;
    return invalid("{}: found dtype {}, expected {}", name,
                   known ? std::string(name_of(layout.dtype))
                         : fmt::format("value {}", static_cast<int32_t>(layout.dtype)),
                   spec.dtypes == DTypeRule::kSameAsQ ? fmt::format("{} as q", name_of(q))
                                                      : std::string(describe(spec.dtypes)));
  }
  const TensorLayout expected = problem.canonical_layout(spec.id);
  if (layout.rank == 0) layout = expected;
  if (layout.rank < 0) {
    return invalid("{}: found rank {}{}, expected {}", name, layout.rank,
                   layout.rank == -1 ? ", as strides of another number than the extents have" : "",
                   expected.rank);
  }
  if (layout.rank > 4) {
    return invalid("{}: found rank {}, expected {}", name, layout.rank, expected.rank);
  }
  clear_past_rank(layout);
  const bool flat = is_flat(spec, expected, layout);
  if (!flat && (layout.rank != expected.rank || layout.shape != expected.shape)) {
    return invalid("{}: found shape [{}], expected [{}] = {}{}", name, extents(layout),
                   extents(expected), spec.shape,
                   problem.state_v_first && spec.shape == "[S,HV,K,V]" ? " with V before K" : "");
  }
  if (Status status = check_strides(spec, layout); !status.ok()) return status;
  problem.set(spec.id, flat ? unflatten(expected, layout) : layout);
  return {};
}

std::vector<std::string_view> names_of(std::span<const TensorSpec> specs) {
  std::vector<std::string_view> names;
  for (const TensorSpec& spec : specs) names.push_back(name_of(spec.id));
  return names;
}

Status check_membership(const Problem& problem) {
  const auto specs = tensors_of(problem.operation);
  for (int i = 0; i < kTensorCount; ++i) {
    const auto id = static_cast<TensorId>(i);
    if (!problem.has(id)) continue;
    if (std::none_of(specs.begin(), specs.end(),
                     [&](const TensorSpec& spec) { return spec.id == id; })) {
      return invalid(
          "{}: given, but {} does not use it; leave it out (dtype none), expected none but {}",
          name_of(id), name_of(problem.operation), fmt::join(names_of(specs), ", "));
    }
  }
  if (std::none_of(specs.begin(), specs.end(), [&](const TensorSpec& spec) {
        return spec.role == Role::kOutput && (spec.required || problem.has(spec.id));
      })) {
    std::vector<std::string_view> outputs;
    for (const TensorSpec& spec : specs) {
      if (spec.role == Role::kOutput) outputs.push_back(name_of(spec.id));
    }
    return invalid("outputs: none asked for, expected {} to have at least one of {}",
                   name_of(problem.operation), fmt::join(outputs, ", "));
  }
  return {};
}

/// Inputs that only some outputs need.
Status check_needs(const Problem& problem) {
  struct Need {
    Operation operation;
    TensorId output;
    TensorId input;
  };
  constexpr std::array kNeeds = {
      Need{Operation::kWu, TensorId::kQg, TensorId::kQ},
      Need{Operation::kWu, TensorId::kU, TensorId::kV},
      Need{Operation::kStateScan, TensorId::kDqRaw, TensorId::kDo},
      Need{Operation::kRecurrent, TensorId::kStateIndices, TensorId::kInitialState},
      Need{Operation::kRecurrent, TensorId::kNumAccepted, TensorId::kInitialState},
      Need{Operation::kRecurrent, TensorId::kNumAccepted, TensorId::kFinalState},
  };
  for (const Need& need : kNeeds) {
    if (problem.operation == need.operation && problem.has(need.output) &&
        !problem.has(need.input)) {
      return invalid("{}: absent, expected it because {} is present", name_of(need.input),
                     name_of(need.output));
    }
  }
  return {};
}

/// States that are updated in place have one type. Their addresses are checked at the run.
Status check_in_place_types(const Problem& problem) {
  const DType initial = problem[TensorId::kInitialState].dtype;
  const DType final = problem[TensorId::kFinalState].dtype;
  for (const TensorId id : {TensorId::kStateIndices, TensorId::kNumAccepted}) {
    if (!problem.has(id) || final == DType::kNone || final == initial) continue;
    return invalid(
        "final_state: found dtype {}, expected {} like initial_state: with {} it is the "
        "same memory",
        name_of(final), name_of(initial), name_of(id));
  }
  return {};
}

}  // namespace

Result<Problem> Problem::validated() const {
  Problem problem = *this;
  if (tensors_of(operation).empty()) {
    return invalid("operation: found value {}, expected 0..{}", static_cast<int32_t>(operation),
                   kOperationCount - 1);
  }
  for (auto* check : {check_membership, check_sizes, check_options, check_all_sizes}) {
    if (Status status = check(problem); !status.ok()) return status;
  }
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (Status status = resolve_tensor(problem, spec); !status.ok()) return status;
  }
  if (Status status = check_needs(problem); !status.ok()) return status;
  if (Status status = check_in_place_types(problem); !status.ok()) return status;
  return problem;
}

}  // namespace kda
