// sm90_chunk_bwd from the checkpoints that a forward kept: against the float64 reference, and which
// h it takes.
#include <limits>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "cuda/hopper_case.h"
#include "execute.h"
#include "generate.h"

namespace kda::test {
namespace {

/// As models have it: with a gate and normalised keys.
CaseSpec model_spec(Sizes sizes, DType io = kBF16, Family family = Family::kUnit) {
  CaseSpec spec = spec_of(sizes, io, family);
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  return spec;
}

/// The inputs of the backward and the forward's h, rounded to `dtype`.
TensorMap with_checkpoints(const Case& c, DType dtype) {
  Problem problem = forward_problem(c);
  problem.set(kH, dtype);
  TensorMap inputs = c.inputs;
  inputs[kH] = cases::execute_operation(problem, c.inputs, {DeviceType::kCuda, 0}, {})
                   .value()
                   .outputs.at(kH);
  return inputs;
}

Problem from_checkpoints(const Case& c, DType dtype) { return backward_problem(c).set(kH, dtype); }

TensorMap gradients(const Problem& problem, const TensorMap& inputs) {
  const auto outcome = run_guarded(problem, inputs, on_row("sm90_chunk_bwd"));
  EXPECT_TRUE(outcome.ok()) << outcome.status().message();
  if (!outcome.ok()) return {};
  EXPECT_EQ(outcome->implementation, "sm90_chunk_bwd");
  return outcome->outputs;
}

/// "" or what is beyond 7.3, its rules for few numbers included: one head has one dA_log.
std::string beyond_limits(const CaseSpec& spec, const Case& c, const TensorMap& results,
                          const TensorMap& expected) {
  const Limit limit = limits_beside_rounding(c, spec.io);
  std::string text;
  for (const auto& [id, reference] : expected) {
    if (beyond(limit, c, results, {{id, reference}}).empty()) continue;
    cases::CheckedOutput checked;
    checked.id = id;
    cases::look_again(c, &spec, results.at(id), reference, spec.io, checked);
    if (checked.pass) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}; ", name_of(id),
                        checked.difference.ratio, checked.difference.block_ratio, checked.limit);
  }
  return text;
}

void expect_right(const CaseSpec& spec) {
  const Case c = cases::generate(spec);
  SCOPED_TRACE(cases::describe(spec));
  const TensorMap results = gradients(from_checkpoints(c, spec.io), with_checkpoints(c, spec.io));
  ASSERT_FALSE(results.empty());
  const TensorMap expected = cases::execute_operation(backward_problem(c, {DType::kF64}), c.inputs,
                                                      {}, choosing("reference"))
                                 .value()
                                 .outputs;
  EXPECT_EQ(beyond_limits(spec, c, results, expected), "");
}

// Three segments, the last one short.
TEST(Sm90Checkpoints, GradientsOfEveryFamily) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    expect_right(model_spec({1, 1100, 1, 1, 64, 64, 0, 0}, kBF16, family));
  }
  expect_right(model_spec({1, 1100, 1, 1, 64, 64, 0, 0}, kF16));
  expect_right(model_spec({1, 1100, 1, 1, 64, 64, 0, 0}, kF16, Family::kMix));
}

TEST(Sm90Checkpoints, Options) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = model_spec({2, 577, 1, 2, 128, 192, 0, 0});
  expect_right(spec);
  spec.gate = Gate::kNone;
  spec.initial_state = false;
  spec.state_v_first = true;
  spec.sizes = {1, 577, 2, 2, 64, 128, 0, 0};
  spec.io = kF16;
  expect_right(spec);
  spec.sizes.T = 1;
  expect_right(spec);
}

// Packed, a sequence has the bits that it has alone.
TEST(Sm90Checkpoints, PackedSequences) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = model_spec({1, 1400, 1, 1, 128, 64, 0, 0});
  spec.cu_seqlens = {0, 0, 5, 600, 600, 1240};
  spec.poison_tail = true;
  expect_right(spec);
  const Case c = cases::generate(spec);
  const TensorMap inputs = with_checkpoints(c, kBF16);
  const Problem packed = from_checkpoints(c, kBF16);
  const TensorMap together = gradients(packed, inputs);
  ASSERT_FALSE(together.empty());
  int64_t first_row = 0;
  for (std::size_t n = 0; n + 1 < spec.cu_seqlens.size(); ++n) {
    const int64_t begin = spec.cu_seqlens[n];
    const int64_t length = spec.cu_seqlens[n + 1] - begin;
    if (length == 0) continue;
    const int64_t rows = (length + 63) / 64;
    const auto of_sequence = [&](TensorId id, const HostTensor& t) {
      if (id == kALog || id == kDtBias) return t;
      if (id == kH) return rows_of(t, 0, first_row, rows);
      const bool is_state = id == kInitialState || id == kDfinalState || id == kDinitialState;
      return is_state ? row_of(t, static_cast<int64_t>(n)) : rows_of(t, 1, begin, length);
    };
    Problem alone = packed;
    alone.sizes.T = length;
    alone.sizes.N = 0;
    alone.set(kCuSeqlens, DType::kNone);
    TensorMap own;
    for (const auto& [id, tensor] : inputs) {
      if (id != kCuSeqlens) own[id] = of_sequence(id, tensor);
    }
    for (const auto& [id, tensor] : gradients(alone, own)) {
      if (id == kDALog || id == kDdtBias) continue;  // sums over all sequences
      EXPECT_EQ(of_sequence(id, together.at(id)).bytes, tensor.bytes)
          << name_of(id) << " of sequence " << n;
    }
    first_row += rows;
  }
}

// Large enough for slices of heads, between whose rows of h others stand.
TEST(Sm90Checkpoints, HeadsOfASliceReadTheirOwn) {
  KDA_NEEDS_HOPPER();
  const CaseSpec spec = model_spec({1, 3700, 32, 32, 128, 256, 0, 0});
  const Case c = cases::generate(spec);
  const TensorMap inputs = with_checkpoints(c, kBF16);
  const Problem whole = from_checkpoints(c, kBF16);
  Problem alone = whole;
  alone.sizes.H = alone.sizes.HV = 1;
  const auto workspace_of = [](const Problem& problem) {
    return make_plan(problem, {DeviceType::kCuda, 0}, choosing("sm90_chunk_bwd"))
        ->workspace_bytes();
  };
  EXPECT_LT(workspace_of(whole), 20 * workspace_of(alone));
  const TensorMap kept = gradients(whole, inputs);
  const TensorMap recomputed = gradients(backward_problem(c), c.inputs);
  ASSERT_FALSE(kept.empty() || recomputed.empty());
  const Limit limit = [](TensorId id, const HostTensor&) {
    return cases::limit_of(cases::Precision::kBF16, id);
  };
  EXPECT_EQ(beyond(limit, c, kept, recomputed), "");
}

// A limit of the workspace cuts sequences and heads apart, and no bit depends on it.
TEST(Sm90Checkpoints, WithinALimitOfTheWorkspace) {
  KDA_NEEDS_HOPPER();
  const Case c = cases::generate(model_spec({3, 577, 2, 4, 64, 128, 0, 0}));
  const Problem problem = from_checkpoints(c, kBF16);
  const TensorMap inputs = with_checkpoints(c, kBF16);
  const TensorMap whole = gradients(problem, inputs);
  ASSERT_FALSE(whole.empty());
  Conditions conditions = on_row("sm90_chunk_bwd");
  const auto workspace = [&] {
    return make_plan(problem, conditions.device, conditions.options)->workspace_bytes();
  };
  const std::size_t all = workspace();
  for (const std::size_t limit : {all * 2 / 3, all / 2, all / 4}) {
    conditions.options.workspace_limit = limit;
    ASSERT_LE(workspace(), limit);
    const auto parts = run_guarded(problem, inputs, conditions);
    ASSERT_TRUE(parts.ok()) << parts.status().message();
    SCOPED_TRACE("within " + std::to_string(limit));
    expect_same_bits(whole, parts->outputs);
  }
}

// What the row does not take as h changes no bit; what it takes is what it reads.
TEST(Sm90Checkpoints, OnlyRowsOf64TokensInTheTypeOfQ) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = model_spec({1, 600, 1, 1, 64, 64, 0, 0});
  for (const int32_t chunk_size : {64, 32}) {
    spec.chunk_size = chunk_size;
    const Case c = cases::generate(spec);
    const TensorMap recomputed = gradients(backward_problem(c), c.inputs);
    for (const DType dtype : {DType::kF32, kBF16}) {
      const bool taken = chunk_size == 64 && dtype == kBF16;
      TensorMap inputs = with_checkpoints(c, dtype);
      HostTensor& h = inputs.at(kH);
      const double wrong = taken ? 0 : std::numeric_limits<double>::quiet_NaN();
      for (int64_t i = 0; i < h.count(); ++i) h.set(i, wrong);
      const TensorMap results = gradients(from_checkpoints(c, dtype), inputs);
      ASSERT_FALSE(results.empty());
      for (const TensorId id : {kDq, kDk, kDg}) {
        EXPECT_EQ(results.at(id).bytes == recomputed.at(id).bytes, !taken)
            << name_of(id) << ", chunk_size " << chunk_size << ", " << name_of(dtype);
      }
    }
  }
}

}  // namespace
}  // namespace kda::test
