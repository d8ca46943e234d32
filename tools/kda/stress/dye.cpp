#include "stress/dye.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "random.h"

namespace kda::stress {
namespace {

using cases::HostTensor;
using cases::TensorMap;
using cases::TokenRange;
using enum TensorId;

constexpr uint64_t kDyeStream = 204;  // beside those of inputs.cpp; one for each tensor
constexpr uint64_t kNanStream = 300;

/// How the rows of a tensor belong to sequences.
enum class Rows { kTokens, kStates, kChunks, kNone };

Rows rows_of(const Problem& problem, TensorId id) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.id != id) continue;
    if (spec.shape.starts_with("[B,T,")) return Rows::kTokens;
    if (spec.shape.starts_with("[NC,")) return Rows::kChunks;
    if (spec.shape.starts_with("[S,")) return Rows::kStates;
  }
  return Rows::kNone;
}

/// Rows [begin, end) of a tensor that belong to sequence n. A row of tokens is one token of a batch
/// row.
std::pair<int64_t, int64_t> rows_of_sequence(const Trial& trial, Rows rows, std::size_t n) {
  const Problem& problem = trial.draw.problem;
  const std::vector<TokenRange> sequences = cases::sequences_of(trial.inputs);
  const TokenRange& range = sequences[n];
  if (rows == Rows::kTokens) {
    const int64_t first = range.batch * problem.sizes.T;
    return {first + range.begin, first + range.end};
  }
  if (rows == Rows::kChunks) {
    const auto chunks = [&](const TokenRange& r) {
      return (r.end - r.begin + problem.chunk_size - 1) / problem.chunk_size;
    };
    int64_t first = 0;
    for (std::size_t i = 0; i < n; ++i) first += chunks(sequences[i]);
    return {first, first + chunks(range)};
  }
  auto row = static_cast<int64_t>(n);
  if (const HostTensor* slots = trial.inputs.input(kStateIndices)) row = slots->get_int(row);
  return {row, row < 0 ? row : row + 1};
}

/// Whether several places of the tensor are one, maybe of several sequences.
bool repeats_itself(const Draw& draw, TensorId id) {
  return std::any_of(draw.repeated.begin(), draw.repeated.end(),
                     [&](const auto& repeat) { return repeat.first == id; });
}

int64_t row_count(const Problem& problem, Rows rows, const HostTensor& tensor) {
  return rows == Rows::kTokens ? problem.sizes.B * problem.sizes.T : tensor.shape[0];
}

}  // namespace

TensorMap dyed_inputs(const Trial& trial) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array kDyes = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity,
                                1e30, -1e4};
  const Problem& problem = trial.draw.problem;
  TensorMap inputs = trial.inputs.inputs;
  for (auto& [id, tensor] : inputs) {
    const Rows rows = rows_of(problem, id);
    if (rows == Rows::kNone) continue;
    // Several sequences may read one slot.
    if (rows == Rows::kStates && problem.has(kStateIndices)) continue;
    if (repeats_itself(trial.draw, id)) continue;
    const auto [begin, end] =
        rows_of_sequence(trial, rows, static_cast<std::size_t>(trial.draw.dyed));
    if (begin == end) continue;
    const int64_t size = tensor.count() / row_count(problem, rows, tensor);
    const cases::Random random(trial.draw.spec.seed, kDyeStream + static_cast<uint64_t>(id));
    for (int64_t i = begin * size; i < end * size; ++i) {
      const uint64_t bits = random.bits(static_cast<uint64_t>(i));
      if (bits % 4 == 0) tensor.set(i, kDyes[bits / 4 % kDyes.size()]);
    }
  }
  return inputs;
}

TensorMap nan_inputs(const Trial& trial) {
  const Problem& problem = trial.draw.problem;
  // Given h, Aqk and A would be those of a forward without the NaN.
  const bool is_backward = problem.operation == Operation::kChunkBackward;
  if (is_backward && (problem.has(kH) || problem.has(kAqk) || problem.has(kA))) return {};
  TensorMap inputs = trial.inputs.inputs;
  for (const TensorId id : {kG, kGamma}) {
    const auto found = inputs.find(id);
    if (found == inputs.end() || !problem.has(id) || repeats_itself(trial.draw, id)) continue;
    const auto [begin, end] =
        rows_of_sequence(trial, Rows::kTokens, static_cast<std::size_t>(trial.draw.dyed));
    if (begin == end) continue;
    HostTensor& tensor = found->second;
    const int64_t size = tensor.count() / row_count(problem, Rows::kTokens, tensor);
    const cases::Random random(trial.draw.spec.seed, kNanStream);
    const auto within = static_cast<int64_t>(random.bits(0) % static_cast<uint64_t>(size));
    tensor.set((begin + end) / 2 * size + within, std::numeric_limits<double>::quiet_NaN());
    return inputs;
  }
  return {};
}

std::string hidden_nan(const TensorMap& expected, const TensorMap& outputs) {
  for (const auto& [id, tensor] : expected) {
    // dg of a clamped token is 0 whatever comes from behind it (6.5). Scores of tokens behind the
    // NaN, and kg of a chunk's last token, need it only where the decay between tokens is a
    // difference of sums.
    if (id == kDg || id == kDgPartial || id == kAqk || id == kA || id == kKg) continue;
    const HostTensor& found = outputs.at(id);
    for (int64_t i = 0; i < tensor.count(); ++i) {
      if (!std::isnan(tensor.get(i)) || !std::isfinite(found.get(i))) continue;
      return fmt::format("{}: element {} is {}, expected NaN", name_of(id), i, found.get(i));
    }
  }
  return "";
}

std::string trace_of_dye(const Trial& trial, const TensorMap& plain, const TensorMap& dyed) {
  const Problem& problem = trial.draw.problem;
  for (const auto& [id, tensor] : plain) {
    const Rows rows = rows_of(problem, id);
    if (rows == Rows::kNone || tensor.bytes.empty()) continue;
    const auto [begin, end] =
        rows_of_sequence(trial, rows, static_cast<std::size_t>(trial.draw.dyed));
    const int64_t count = row_count(problem, rows, tensor);
    const auto size = tensor.bytes.size() / static_cast<std::size_t>(count);
    for (int64_t row = 0; row < count; ++row) {
      if (row >= begin && row < end) continue;
      const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * size);
      const auto first = tensor.bytes.begin() + at;
      if (std::equal(first, first + static_cast<std::ptrdiff_t>(size),
                     dyed.at(id).bytes.begin() + at)) {
        continue;
      }
      return fmt::format("{}: bits of row {} depend on the values of sequence {} (rows {} to {})",
                         name_of(id), row, trial.draw.dyed, begin, end - 1);
    }
  }
  return "";
}

}  // namespace kda::stress
