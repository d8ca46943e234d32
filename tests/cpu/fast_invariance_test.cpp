// What must not change a bit: threads, packing, neighbours, layout, later tokens.
#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "fast_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const FastCase kGrouped{"grouped", {2, 150, 2, 4, 64, 48}, DType::kBF16, Gate::kSoftplus, true};

/// Elements of one token over all heads.
std::size_t token_size(const Problem& problem, TensorId id) {
  return static_cast<std::size_t>(elements(problem, id) / (problem.sizes.B * problem.sizes.T));
}

bool token_indexed(const Problem& problem, TensorId id) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.id == id) return spec.shape.starts_with("[B,T,");
  }
  return false;
}

Values slice(const Values& values, std::size_t begin, std::size_t count) {
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

TEST(FastInvariance, ThreadsDoNotMatter) {
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
    const Problem problem = problem_of(kGrouped, operation);
    const Tensors inputs = inputs_of(kGrouped, problem, 11);
    const Tensors one = run_fast(problem, inputs, 1);
    for (const int32_t threads : {2, 3, 8}) expect_equal(one, run_fast(problem, inputs, threads));
  }
}

/// Runs each packed sequence alone and compares its rows and states bit for bit.
TEST(FastInvariance, PackedIsSeparate) {
  const FastCase packed{
      "packed", {1, 240, 1, 2, 32, 48}, DType::kF32, Gate::kNone, false, true, false,
      64,       {70, 0, 1, 129}};
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
    Problem problem = problem_of(packed, operation);
    const Tensors inputs = inputs_of(packed, problem, 12);
    const Tensors whole = run_fast(problem, inputs);
    int64_t begin = 0;
    for (std::size_t n = 0; n < packed.lengths.size(); ++n) {
      FastCase alone = packed;
      alone.sizes.T = packed.lengths[n];
      alone.lengths.clear();
      const Problem single = problem_of(alone, operation);
      Tensors part;
      for (const auto& [id, values] : inputs) {
        if (id == kCuSeqlens) continue;
        const auto size = static_cast<std::size_t>(elements(single, id));
        const std::size_t at = token_indexed(problem, id)
                                   ? static_cast<std::size_t>(begin) * token_size(problem, id)
                                   : n * size;
        part[id] = slice(values, at, size);
      }
      for (const auto& [id, values] : run_fast(single, part)) {
        if (id == kH) continue;
        const std::size_t at = token_indexed(problem, id)
                                   ? static_cast<std::size_t>(begin) * token_size(problem, id)
                                   : n * values.size();
        EXPECT_EQ(slice(whole.at(id), at, values.size()), values) << name_of(id) << " of " << n;
      }
      begin += packed.lengths[n];
    }
  }
}

TEST(FastInvariance, PrefixOfODoesNotSeeLaterTokens) {
  const FastCase c{"prefix", {1, 200, 1, 1, 64, 64}, DType::kF32, Gate::kSoftplus, true};
  const Problem problem = problem_of(c, Operation::kChunkForward);
  const Tensors inputs = inputs_of(c, problem, 13);
  const Tensors whole = run_fast(problem, inputs);
  for (const int64_t T : {1, 15, 16, 17, 40, 63, 64, 65, 100, 130, 199}) {
    FastCase shorter = c;
    shorter.sizes.T = T;
    const Problem prefix = problem_of(shorter, Operation::kChunkForward);
    Tensors part = inputs;
    for (auto& [id, values] : part) values.resize(static_cast<std::size_t>(elements(prefix, id)));
    const Values o = run_fast(prefix, part).at(kO);
    EXPECT_EQ(slice(whole.at(kO), 0, o.size()), o) << T;
  }
}

/// A NaN in one sequence, and in the padding behind all of them, stays there.
TEST(FastInvariance, NaNStaysInItsSequence) {
  const FastCase c{
      "nan",       {1, 200, 1, 2, 32, 32}, DType::kF32, Gate::kNone, false, true, false, 64,
      {70, 30, 65}};
  for (const Operation operation :
       {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
    const Problem problem = problem_of(c, operation);
    Tensors inputs = inputs_of(c, problem, 14);
    const Tensors clean = run_fast(problem, inputs);
    for (auto& [id, values] : inputs) {
      if (!token_indexed(problem, id)) continue;
      const std::size_t size = token_size(problem, id);
      std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(70 * size), 30 * size, kNaN);
      std::fill(values.begin() + static_cast<std::ptrdiff_t>(165 * size), values.end(), kNaN);
    }
    const Tensors poisoned = run_fast(problem, inputs);
    for (const auto& [id, values] : clean) {
      if (!token_indexed(problem, id)) continue;
      const std::size_t size = token_size(problem, id);
      const Values& others = poisoned.at(id);
      EXPECT_EQ(slice(values, 0, 70 * size), slice(others, 0, 70 * size)) << name_of(id);
      EXPECT_EQ(slice(values, 100 * size, 65 * size), slice(others, 100 * size, 65 * size))
          << name_of(id);
      EXPECT_EQ(slice(others, 165 * size, 35 * size), Values(35 * size, 0.0)) << name_of(id);
    }
  }
}

/// Strides that a view of a larger tensor has, in every dtype.
TEST(FastInvariance, StridesDoNotMatter) {
  for (const DType io : {DType::kBF16, DType::kF16, DType::kF32}) {
    const FastCase c{"strided", {2, 70, 2, 2, 40, 24}, io};
    for (const Operation operation :
         {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
      Problem problem = problem_of(c, operation);
      const Tensors inputs = inputs_of(c, problem, 15);
      const Tensors plain = run_fast(problem, inputs);
      want_all_in(problem, DType::kF32);
      for (const TensorSpec& spec : tensors_of(operation)) {
        if (!problem.has(spec.id)) continue;
        TensorLayout layout = problem.canonical_layout(spec.id);
        if (layout.rank != 4) continue;
        // Heads outermost, the last index spread by 2.
        const int64_t row = layout.shape[3] * 2 + 1;
        const bool state = spec.shape.starts_with("[S") || spec.shape.starts_with("[NC");
        layout.stride = {layout.shape[1] * layout.shape[2] * row, layout.shape[2] * row, row, 2};
        if (!state) layout.stride = {layout.shape[1] * row, row, 2 * 70 * row, 2};
        problem.set(spec.id, layout);
      }
      expect_equal(plain, run(problem, inputs, {0, false, "cpu"}));
    }
  }
}

}  // namespace
}  // namespace kda
