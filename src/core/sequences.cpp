#include "core/sequences.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/view.h"

namespace kda {
namespace {

int64_t load_index(const View& view, int64_t i) {
  if (view.dtype == DType::kI32) {
    int32_t value;
    std::memcpy(&value, view.at(i), sizeof value);
    return value;
  }
  int64_t value;
  std::memcpy(&value, view.at(i), sizeof value);
  return value;
}

Status wrong_entry(int64_t i, int64_t found, const std::string& expected) {
  return {StatusCode::kInvalidArgument,
          fmt::format("cu_seqlens[{}]: found {}, expected {}", i, found, expected)};
}

int64_t chunks_of(int64_t length, int64_t C) { return length / C + (length % C != 0 ? 1 : 0); }

/// Whether a tensor, in memory, bounds the number of sequences though there is no token.
bool has_rows_of_sequences(const Problem& problem) {
  const auto specs = tensors_of(problem.operation);
  return std::any_of(specs.begin(), specs.end(), [&](const TensorSpec& spec) {
    return problem.has(spec.id) && (spec.shape.starts_with("[S,") || spec.shape == "[N]");
  });
}

}  // namespace

bool has_work(const Problem& problem, int64_t tokens) {
  const auto specs = tensors_of(problem.operation);
  return tokens > 0 || std::any_of(specs.begin(), specs.end(), [&](const TensorSpec& spec) {
           return spec.role == Role::kOutput && problem.has(spec.id) &&
                  spec.shape.starts_with("[S,");
         });
}

Result<SequenceList> read_sequences(const Problem& problem, const Args& args) {
  SequenceList list;
  const int64_t count = problem.sequences();
  const int64_t T = problem.sizes.T;
  const int64_t C = problem.chunk_size;
  if (!problem.packed() && T == 0 && !has_rows_of_sequences(problem)) return list;
  list.sequences.reserve(static_cast<std::size_t>(count));
  if (!problem.packed()) {
    for (int64_t b = 0; b < count; ++b) {
      list.sequences.push_back({b, b, 0, T, b * chunks_of(T, C)});
    }
    list.chunk_rows_used = count * chunks_of(T, C);
    list.tokens_used = T;
    return list;
  }
  const View cu = view_of(problem, args, TensorId::kCuSeqlens);
  int64_t begin = load_index(cu, 0);
  if (begin != 0) return wrong_entry(0, begin, "0");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = load_index(cu, i + 1);
    if (end < begin) return wrong_entry(i + 1, end, fmt::format("{} or more", begin));
    if (end > T) return wrong_entry(i + 1, end, fmt::format("at most T = {}", T));
    list.sequences.push_back({i, 0, begin, end, list.chunk_rows_used});
    list.chunk_rows_used += chunks_of(end - begin, C);
    begin = end;
  }
  list.tokens_used = begin;
  return list;
}

}  // namespace kda
