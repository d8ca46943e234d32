#include "property/running.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "kda/backend.h"
#include "support/calls.h"

namespace kda::test {

const std::vector<std::string>& families_of_cpu() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const ImplementationInfo& row : implementations()) {
      const std::string family(row.family);
      if (row.device == DeviceType::kCpu &&
          std::find(found.begin(), found.end(), family) == found.end()) {
        found.push_back(family);
      }
    }
    return found;
  }();
  return names;
}

const std::vector<std::string>& families() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found = families_of_cpu();
    if (cuda_unavailable_reason().empty()) found.insert(found.begin(), "cuda");
    return found;
  }();
  return names;
}

Conditions choosing(const std::string& implementation) {
  Conditions conditions;
  const bool on_gpu = implementation.starts_with("cuda") || implementation.starts_with("sm90");
  if (on_gpu) conditions.device = {DeviceType::kCuda, 0};
  conditions.options.implementation = implementation;
  return conditions;
}

TensorMap run_operation(const Problem& problem, const TensorMap& inputs,
                        const Conditions& conditions) {
  return run_counted(problem, inputs, conditions).value().outputs;
}

TensorMap run_case(const Case& c, const Conditions& conditions, OutputTypes types) {
  TensorMap outputs = run_operation(forward_problem(c, types), c.inputs, conditions);
  if (c.has_gradients()) {
    outputs.merge(run_operation(backward_problem(c, types), c.inputs, conditions));
  }
  return outputs;
}

TensorMap run_case(const Case& c, const std::string& implementation, OutputTypes types) {
  return run_case(c, choosing(implementation), types);
}

std::string beyond_limits(const Case& c, const TensorMap& results, const TensorMap& expected) {
  std::string text;
  for (const auto& [id, reference] : expected) {
    const HostTensor& result = results.at(id);
    const Difference d = cases::compare(c, id, result, reference);
    const double limit = cases::limit_of(cases::precision_of(result.dtype), id);
    const double found = result.dtype == DType::kF64 ? d.max_error : d.ratio;
    const double worst_block = result.dtype == DType::kF64 ? 0 : d.block_ratio;
    if (d.finite && found <= limit && worst_block <= cases::kBlockFactor * limit) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        found, worst_block, limit, d.finite ? "" : ", not finite");
  }
  return text;
}

HostTensor tokens_of(const HostTensor& tensor, int64_t batch, int64_t begin, int64_t end) {
  std::vector<int64_t> shape = tensor.shape;
  shape[0] = 1;
  shape[1] = end - begin;
  HostTensor part(tensor.dtype, shape);
  if (part.bytes.empty()) return part;
  const auto row = part.bytes.size() / static_cast<std::size_t>(end - begin);
  const auto first = static_cast<std::size_t>(batch * tensor.shape[1] + begin) * row;
  std::copy_n(tensor.bytes.begin() + static_cast<std::ptrdiff_t>(first), part.bytes.size(),
              part.bytes.begin());
  return part;
}

HostTensor row_of(const HostTensor& tensor, int64_t index) {
  std::vector<int64_t> shape = tensor.shape;
  shape[0] = 1;
  HostTensor part(tensor.dtype, shape);
  std::copy_n(tensor.bytes.begin() + static_cast<std::ptrdiff_t>(part.bytes.size()) * index,
              part.bytes.size(), part.bytes.begin());
  return part;
}

HostTensor stacked(const std::vector<HostTensor>& rows) {
  std::vector<int64_t> shape = rows.at(0).shape;
  shape[0] = 0;
  for (const HostTensor& row : rows) shape[0] += row.shape[0];
  HostTensor all(rows[0].dtype, shape);
  auto at = all.bytes.begin();
  for (const HostTensor& row : rows) at = std::copy(row.bytes.begin(), row.bytes.end(), at);
  return all;
}

bool has_tokens(TensorId id) {
  switch (id) {
    case TensorId::kQ:
    case TensorId::kK:
    case TensorId::kV:
    case TensorId::kG:
    case TensorId::kBeta:
    case TensorId::kDo:
    case TensorId::kO:
    case TensorId::kDq:
    case TensorId::kDk:
    case TensorId::kDv:
    case TensorId::kDg:
    case TensorId::kDbeta:
      return true;
    default:
      return false;
  }
}

bool has_states(TensorId id) {
  return id == TensorId::kInitialState || id == TensorId::kFinalState ||
         id == TensorId::kDfinalState || id == TensorId::kDinitialState;
}

Case part_of(const Case& c, int64_t batch, int64_t begin, int64_t end, int64_t state) {
  Case part = c;
  part.expected.clear();
  part.inputs.erase(TensorId::kCuSeqlens);
  part.forward.sizes.B = 1;
  part.forward.sizes.T = end - begin;
  for (auto& [id, tensor] : part.inputs) {
    if (has_tokens(id)) tensor = tokens_of(tensor, batch, begin, end);
    if (has_states(id)) tensor = row_of(tensor, state);
  }
  part.forward = forward_problem(part);
  return part;
}

Case sequence_of(const Case& c, std::size_t n) {
  const cases::TokenRange range = cases::sequences_of(c)[n];
  return part_of(c, range.batch, range.begin, range.end, static_cast<int64_t>(n));
}

std::string other_bits(const HostTensor& a, const HostTensor& b) {
  if (a.bytes == b.bytes) return "";
  const auto size = size_of(a.dtype);
  std::size_t i = 0;
  while (std::memcmp(a.bytes.data() + i * size, b.bytes.data() + i * size, size) == 0) ++i;
  const auto index = static_cast<int64_t>(i);
  return fmt::format("element {}: {} and {}", index, a.get(index), b.get(index));
}

std::string other_bits(const TensorMap& a, const TensorMap& b) {
  for (const auto& [id, tensor] : a) {
    const auto found = b.find(id);
    if (found == b.end()) return fmt::format("{} is missing", name_of(id));
    const std::string difference = other_bits(tensor, found->second);
    if (!difference.empty()) return fmt::format("{} {}", name_of(id), difference);
  }
  return "";
}

}  // namespace kda::test
