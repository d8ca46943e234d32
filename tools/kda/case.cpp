#include "case.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace kda::cases {
namespace {

using Metadata = std::map<std::string, std::string>;

template <class... Parts>
Status invalid(fmt::format_string<Parts...> text, Parts&&... parts) {
  return {StatusCode::kInvalidArgument, fmt::format(text, std::forward<Parts>(parts)...)};
}

std::string shown(const std::string& text) {
  std::string result = text.substr(0, 40);
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return '"' + result + (text.size() > 40 ? "...\"" : "\"");
}

Status read_bool(const std::string& key, const std::string& text, bool& value) {
  if (text != "true" && text != "false") {
    return invalid("metadata {}: found {}, expected true or false", key, shown(text));
  }
  value = text == "true";
  return {};
}

template <class Number>
Status read_number(const std::string& key, const std::string& text, Number& value) {
  constexpr std::string_view kForm = std::is_integral_v<Number>
                                         ? "digits alone, as in 64"
                                         : "a finite decimal number as in 0.125 or 1e-3, without "
                                           "+ or spaces";
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || !std::isfinite(static_cast<double>(value))) {
    return invalid("metadata {}: found {}, expected {}", key, shown(text), kForm);
  }
  return {};
}

Status read_gate(const std::string& text, Gate& gate) {
  for (const Gate known : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
    if (text == name_of(known)) {
      gate = known;
      return {};
    }
  }
  return invalid("metadata gate: found {}, expected none, softplus or lower_bound", shown(text));
}

Status read_options(const Metadata& metadata, Case& c) {
  Problem& p = c.forward;
  for (const auto& [key, text] : metadata) {
    if (text.empty()) continue;
    Status status;
    if (key == "scale") {
      double scale = 0;
      status = read_number(key, text, scale);
      p.scale = scale;
    } else if (key == "lower_bound") {
      status = read_number(key, text, p.lower_bound);
    } else if (key == "chunk_size") {
      status = read_number(key, text, p.chunk_size);
    } else if (key == "gate") {
      status = read_gate(text, p.gate);
    } else if (key == "qk_l2norm") {
      status = read_bool(key, text, p.qk_l2norm);
    } else if (key == "beta_sigmoid") {
      status = read_bool(key, text, p.beta_sigmoid);
    } else if (key == "allow_neg_eigval") {
      status = read_bool(key, text, p.allow_neg_eigval);
    } else if (key == "state_v_first") {
      status = read_bool(key, text, p.state_v_first);
    } else if (key == "note") {
      c.note = text;
    } else if (key != "format") {  // which writers of safetensors files add
      status = invalid(
          "metadata {}: found this key, expected scale, qk_l2norm, gate, lower_bound, "
          "beta_sigmoid, allow_neg_eigval, state_v_first, chunk_size, note or format",
          shown(key));
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status take_tensors(std::map<std::string, HostTensor>&& tensors, Case& c) {
  constexpr std::string_view kExpected = "expected.";
  for (auto& [name, tensor] : tensors) {
    const bool is_expected = name.rfind(kExpected, 0) == 0;
    const std::string stem = is_expected ? name.substr(kExpected.size()) : name;
    const std::span<const TensorId> ids = is_expected ? std::span<const TensorId>(kCaseOutputs)
                                                      : std::span<const TensorId>(kCaseInputs);
    const auto id = std::find_if(ids.begin(), ids.end(),
                                 [&](TensorId known) { return name_of(known) == stem; });
    if (id == ids.end()) {
      return invalid(
          "{}: found a tensor of this name, expected an input of a case or expected.NAME",
          shown(name));
    }
    (is_expected ? c.expected : c.inputs)[*id] = std::move(tensor);
  }
  return {};
}

std::string shape_text(const HostTensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ","));
}

Status check_rank(const Case& c, TensorId id, std::size_t rank, std::string_view shape) {
  const HostTensor* tensor = c.input(id);
  if (tensor == nullptr) return invalid("{}: absent, expected {}", name_of(id), shape);
  if (tensor->shape.size() == rank) return {};
  return invalid("{}: found shape {}, expected {}", name_of(id), shape_text(*tensor), shape);
}

Status read_sizes(Case& c) {
  if (Status s = check_rank(c, TensorId::kQ, 4, "[B,T,H,K]"); !s.ok()) return s;
  if (Status s = check_rank(c, TensorId::kV, 4, "[B,T,HV,V]"); !s.ok()) return s;
  const auto& q = c.input(TensorId::kQ)->shape;
  const auto& v = c.input(TensorId::kV)->shape;
  Sizes sizes;
  sizes.B = q[0];
  sizes.T = q[1];
  sizes.H = q[2];
  sizes.K = q[3];
  sizes.HV = v[2];
  sizes.V = v[3];
  if (c.input(TensorId::kCuSeqlens) != nullptr) {
    if (Status s = check_rank(c, TensorId::kCuSeqlens, 1, "[N+1]"); !s.ok()) return s;
    const int64_t entries = c.input(TensorId::kCuSeqlens)->shape[0];
    if (entries < 1) return invalid("cu_seqlens: found shape [0], expected [N+1]");
    sizes.N = entries - 1;
  }
  c.forward.sizes = sizes;
  return {};
}

bool is_float(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 ||
         dtype == DType::kF64;
}

Status check_dtype(TensorId id, DType dtype, DType q) {
  const auto complain = [&](std::string_view expected) {
    return invalid("{}: found dtype {}, expected {}", name_of(id), name_of(dtype), expected);
  };
  switch (id) {
    case TensorId::kK:
    case TensorId::kV:
    case TensorId::kDo:
      return dtype == q ? Status{} : complain(fmt::format("{} as q", name_of(q)));
    case TensorId::kALog:
    case TensorId::kDtBias:
      return dtype == DType::kF32 || dtype == DType::kBF16 ? Status{} : complain("fp32 or bf16");
    case TensorId::kInitialState:
    case TensorId::kDfinalState:
      return dtype == DType::kF32 ? Status{} : complain("fp32");
    case TensorId::kCuSeqlens:
      return dtype == DType::kI64 || dtype == DType::kI32 ? Status{} : complain("int64 or int32");
    default:
      return is_float(dtype) ? Status{} : complain("bf16, fp16, fp32 or fp64");
  }
}

/// The layout of a tensor as it lies in the file, for Problem::validated to check.
Result<TensorLayout> layout_of(TensorId id, const HostTensor& tensor) {
  if (tensor.shape.empty() || tensor.shape.size() > 4) {
    return invalid("{}: found shape {}, expected 1 to 4 dimensions", name_of(id),
                   shape_text(tensor));
  }
  TensorLayout layout;
  layout.dtype = tensor.dtype;
  layout.rank = static_cast<int32_t>(tensor.shape.size());
  int64_t stride = 1;
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    layout.shape[i] = tensor.shape[i];
    layout.stride[i] = stride;
    stride *= std::max<int64_t>(tensor.shape[i], 1);
    if (tensor.count() == 0) stride = 1;  // nothing is addressed; the product might overflow
  }
  return layout;
}

/// The shapes that a file and the library name differently.
Status check_shape(const Case& c, TensorId id, const HostTensor& tensor) {
  const Sizes& s = c.forward.sizes;
  const int64_t N = c.input(TensorId::kCuSeqlens) != nullptr ? s.N : s.B;
  const auto hold_to = [&](const std::vector<int64_t>& expected, std::string_view text) {
    if (tensor.shape == expected) return Status{};
    return invalid("{}: found shape {}, expected [{}] = {}", name_of(id), shape_text(tensor),
                   fmt::join(expected, ","), text);
  };
  if (id == TensorId::kDtBias && tensor.shape.size() != 2 && s.K > 0 && s.K <= 256) {
    return hold_to({std::min(s.HV, int64_t{1} << 46) * s.K}, "[HV*K]");
  }
  if (id != TensorId::kInitialState && id != TensorId::kDfinalState) return {};
  return c.forward.state_v_first ? hold_to({N, s.HV, s.V, s.K}, "[N,HV,V,K] (state_v_first)")
                                 : hold_to({N, s.HV, s.K, s.V}, "[N,HV,K,V]");
}

/// Sizes come from q, v and cu_seqlens: says which, where one is refused.
Status with_source(const Case& c, const Status& status) {
  const std::string& text = status.message();
  if (status.ok() || text.rfind("size ", 0) != 0) return status;
  const std::string name = text.substr(5, text.find(':') - 5);
  const TensorId id = name == "N"                   ? TensorId::kCuSeqlens
                      : name == "HV" || name == "V" ? TensorId::kV
                                                    : TensorId::kQ;
  return {status.code(),
          fmt::format("{} of shape {}: {}", name_of(id), shape_text(*c.input(id)), text)};
}

Status check_inputs(const Case& c) {
  // The backward takes every input of the forward, so its table checks them all.
  Problem problem = c.has_gradients() ? backward_problem(c) : forward_problem(c);
  const DType q = c.input(TensorId::kQ)->dtype;
  for (const auto& [id, tensor] : c.inputs) {
    if (Status status = check_dtype(id, tensor.dtype, q); !status.ok()) return status;
    if (Status status = check_shape(c, id, tensor); !status.ok()) return status;
    Result<TensorLayout> layout = layout_of(id, tensor);
    if (!layout.ok()) return layout.status();
    problem.set(id, *layout);
  }
  return with_source(c, problem.validated().status());
}

Status check_expected(const Case& c) {
  const Problem forward = forward_problem(c);
  const Problem backward = c.has_gradients() ? backward_problem(c) : Problem{};
  for (const auto& [id, tensor] : c.expected) {
    const Problem& owner = forward.has(id) ? forward : backward;
    if (!owner.has(id)) {
      return invalid("expected.{}: found, but the case does not ask for {}", name_of(id),
                     name_of(id));
    }
    if (tensor.dtype != DType::kF32 && tensor.dtype != DType::kF64) {
      return invalid("expected.{}: found dtype {}, expected fp32 or fp64", name_of(id),
                     name_of(tensor.dtype));
    }
    const TensorLayout layout = owner.canonical_layout(id);
    const std::vector<int64_t> shape(layout.shape.begin(), layout.shape.begin() + layout.rank);
    const bool flat = id == TensorId::kDdtBias && tensor.shape.size() == 1 &&
                      tensor.shape[0] == shape[0] * shape[1];
    if (!flat && tensor.shape != shape) {
      return invalid("expected.{}: found shape {}, expected [{}]", name_of(id), shape_text(tensor),
                     fmt::join(shape, ","));
    }
  }
  return {};
}

Status check_cu_seqlens(const Case& c) {
  const HostTensor* cu = c.input(TensorId::kCuSeqlens);
  if (cu == nullptr) return {};
  const int64_t T = c.forward.sizes.T;
  for (int64_t i = 0; i < cu->count(); ++i) {
    const int64_t entry = cu->get_int(i);
    const int64_t least = i == 0 ? 0 : cu->get_int(i - 1);
    const int64_t most = i == 0 ? 0 : T;
    if (entry < least || entry > most) {
      return invalid("cu_seqlens: found {} at index {}, expected {}", entry, i,
                     i == 0 ? "0" : fmt::format("{} to T = {}", least, T));
    }
  }
  return {};
}

DType or_default(const Case& c, TensorId id, DType fallback) {
  const HostTensor* tensor = c.input(id);
  return tensor == nullptr ? fallback : tensor->dtype;
}

/// The tensor whose dtype the public output has.
DType public_dtype(const Case& c, TensorId output) {
  switch (output) {
    case TensorId::kDg:
      return or_default(c, TensorId::kG, DType::kF32);
    case TensorId::kDbeta:
      return or_default(c, TensorId::kBeta, DType::kF32);
    case TensorId::kDALog:
      return or_default(c, TensorId::kALog, DType::kF32);
    case TensorId::kDdtBias:
      return or_default(c, TensorId::kDtBias, DType::kF32);
    case TensorId::kFinalState:
    case TensorId::kDinitialState:
      return or_default(c, TensorId::kInitialState, DType::kF32);
    default:
      return or_default(c, TensorId::kQ, DType::kF32);
  }
}

Problem problem_for(const Case& c, Operation operation, OutputTypes types) {
  Problem problem = c.forward;
  problem.operation = operation;
  problem.tensors = {};
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.role == Role::kInput) {
      if (const HostTensor* tensor = c.input(spec.id)) problem.set(spec.id, tensor->dtype);
      continue;
    }
    const bool is_case_output = std::find(std::begin(kCaseOutputs), std::end(kCaseOutputs),
                                          spec.id) != std::end(kCaseOutputs);
    const bool has_parameter =
        (spec.id != TensorId::kDALog || c.input(TensorId::kALog) != nullptr) &&
        (spec.id != TensorId::kDdtBias || c.input(TensorId::kDtBias) != nullptr);
    if (is_case_output && has_parameter) {
      problem.set(spec.id, types.all.value_or(public_dtype(c, spec.id)));
    }
  }
  return problem;
}

}  // namespace

const HostTensor* Case::input(TensorId id) const {
  const auto found = inputs.find(id);
  return found == inputs.end() ? nullptr : &found->second;
}

Problem forward_problem(const Case& c, OutputTypes types) {
  return problem_for(c, Operation::kChunkForward, types);
}

Problem recurrent_problem(const Case& c, OutputTypes types) {
  return problem_for(c, Operation::kRecurrent, types);
}

Problem backward_problem(const Case& c, OutputTypes types) {
  return problem_for(c, Operation::kChunkBackward, types);
}

namespace {

/// Everything but the values of cu_seqlens: a header without data is enough.
Result<Case> case_of_header(const std::string& name, TensorFile file) {
  Case c;
  c.name = name;
  if (Status status = read_options(file.metadata, c); !status.ok()) return status;
  if (Status status = take_tensors(std::move(file.tensors), c); !status.ok()) return status;
  if (Status status = read_sizes(c); !status.ok()) return status;
  if (c.input(TensorId::kDfinalState) != nullptr && !c.has_gradients()) {
    return invalid("dfinal_state: found without do, expected both (do asks for gradients)");
  }
  if (Status status = check_inputs(c); !status.ok()) return status;
  if (Status status = check_expected(c); !status.ok()) return status;
  c.forward = forward_problem(c);
  return c;
}

}  // namespace

Result<Case> make_case(const std::string& name, TensorFile file) {
  Result<Case> c = case_of_header(name, std::move(file));
  if (!c.ok()) return c;
  if (Status status = check_cu_seqlens(*c); !status.ok()) return status;
  return c;
}

Result<Case> load_case(const std::string& path) {
  Result<TensorFile> file = read_safetensors(
      path, [&path](const TensorFile& header) { return case_of_header(path, header).status(); });
  if (!file.ok()) return file.status();
  return make_case(path, std::move(*file));
}

TensorFile to_file(const Case& c) {
  const Problem& p = c.forward;
  const auto text = [](bool value) { return std::string(value ? "true" : "false"); };
  TensorFile file;
  file.metadata = {{"gate", std::string(name_of(p.gate))},
                   {"qk_l2norm", text(p.qk_l2norm)},
                   {"beta_sigmoid", text(p.beta_sigmoid)},
                   {"allow_neg_eigval", text(p.allow_neg_eigval)},
                   {"state_v_first", text(p.state_v_first)},
                   {"chunk_size", fmt::to_string(p.chunk_size)},
                   {"note", c.note}};
  if (p.scale) file.metadata["scale"] = fmt::to_string(*p.scale);
  if (p.gate == Gate::kLowerBound) file.metadata["lower_bound"] = fmt::to_string(p.lower_bound);
  for (const auto& [id, tensor] : c.inputs) file.tensors[std::string(name_of(id))] = tensor;
  for (const auto& [id, tensor] : c.expected) {
    file.tensors["expected." + std::string(name_of(id))] = tensor;
  }
  return file;
}

Case with_dtype(const Case& c, DType dtype) {
  Case result = c;
  for (const TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV, TensorId::kDo}) {
    const auto found = result.inputs.find(id);
    if (found != result.inputs.end()) found->second = converted(found->second, dtype);
  }
  result.forward = forward_problem(result);
  return result;
}

std::vector<TokenRange> sequences_of(const Case& c) {
  std::vector<TokenRange> ranges;
  if (const HostTensor* cu = c.input(TensorId::kCuSeqlens)) {
    for (int64_t i = 0; i + 1 < cu->count(); ++i) {
      ranges.push_back({0, cu->get_int(i), cu->get_int(i + 1)});
    }
    return ranges;
  }
  for (int64_t b = 0; b < c.forward.sizes.B; ++b) ranges.push_back({b, 0, c.forward.sizes.T});
  return ranges;
}

}  // namespace kda::cases
