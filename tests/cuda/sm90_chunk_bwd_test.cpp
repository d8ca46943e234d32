// sm90_chunk_bwd against the float64 reference on the same rounded inputs, in guarded memory and
// under graph capture, and what it leaves to the generic row.
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "execute.h"
#include "generate.h"
#include "support/guarded_run.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::Family;
using cases::TensorMap;
using enum TensorId;

constexpr DType kBF16 = DType::kBF16;

CaseSpec spec_of(Sizes sizes, Family family = Family::kUnit) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = kBF16;
  spec.family = family;
  return spec;
}

/// "" or what is further from the reference than 7.3 allows, for ill-conditioned families than
/// rounding alone makes of the same inputs.
std::string beyond_limits(const Case& c, const TensorMap& results) {
  const TensorMap expected = cases::execute_operation(backward_problem(c, {DType::kF64}), c.inputs,
                                                      {}, choosing("reference"))
                                 .value()
                                 .outputs;
  const TensorMap emulated = cases::emulated_rounding(c, kBF16);
  std::string text;
  for (const auto& [id, reference] : expected) {
    const cases::Difference d = cases::compare(c, id, results.at(id), reference);
    const double limit = cases::limit_beside(emulated, c, id, reference, kBF16);
    if (d.finite && d.ratio <= limit && d.block_ratio <= cases::kBlockFactor * limit) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, limit, d.finite ? "" : ", not finite");
  }
  return text;
}

void expect_right(const CaseSpec& spec) {
  SCOPED_TRACE(cases::describe(spec));
  const Case c = cases::generate(spec);
  Conditions conditions;
  conditions.options = choosing("sm90_chunk_bwd");
  conditions.device = {DeviceType::kCuda, 0};
  conditions.repeat = true;
  const auto outcome = run_guarded(backward_problem(c), c.inputs, conditions);
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(outcome->implementation, "sm90_chunk_bwd");
  EXPECT_EQ(beyond_limits(c, outcome->outputs), "");
}

TEST(Sm90ChunkBackward, AllFamiliesAndGates) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
      CaseSpec spec = spec_of({1, 140, 1, 2, 128, 64, 0, 0}, family);
      spec.gate = gate;
      spec.qk_l2norm = gate != Gate::kNone || family == Family::kSmall;
      expect_right(spec);
      spec.sizes = {2, 97, 2, 2, 64, 128, 0, 0};
      expect_right(spec);
    }
  }
}

TEST(Sm90ChunkBackward, LengthsAndPackedSequences) {
  KDA_NEEDS_HOPPER();
  for (const int64_t T : {1, 16, 17, 32, 33, 65}) {
    expect_right(spec_of({2, T, 1, 1, 128, 128, 0, 0}));
  }
  for (const int32_t chunk_size : {64, 32}) {
    CaseSpec spec = spec_of({1, 210, 1, 1, 64, 128, 0, 0});
    spec.cu_seqlens = {0, 0, 1, 64, 64, 129, 197, 197};
    spec.poison_tail = true;
    spec.chunk_size = chunk_size;
    spec.state_v_first = chunk_size == 32;
    expect_right(spec);
  }
}

TEST(Sm90ChunkBackward, Options) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({2, 100, 2, 4, 128, 192, 0, 0});
  expect_right(spec);
  spec.beta_sigmoid = true;
  spec.qk_l2norm = true;
  expect_right(spec);
  spec.allow_neg_eigval = true;
  spec.gate_dtype = kBF16;
  spec.scale = -0.3;
  expect_right(spec);
  spec.state_v_first = true;
  spec.initial_state = false;
  spec.dfinal_state = false;
  expect_right(spec);
}

TEST(Sm90ChunkBackward, EachGradientAlone) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({1, 70, 1, 2, 64, 64, 0, 0});
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  for (const int64_t group : {1, 2}) {
    spec.sizes.H = 2 / group;
    const Case c = cases::generate(spec);
    const Problem all = backward_problem(c);
    const auto options = choosing("sm90_chunk_bwd");
    const auto expected = cases::execute_operation(all, c.inputs, {DeviceType::kCuda, 0}, options);
    ASSERT_TRUE(expected.ok()) << expected.status().message();
    for (const auto& [id, tensor] : expected->outputs) {
      Problem one = all;
      for (const auto& [other, unused] : expected->outputs) {
        if (other != id) one.tensors[static_cast<std::size_t>(other)] = {};
      }
      const auto alone = cases::execute_operation(one, c.inputs, {DeviceType::kCuda, 0}, options);
      ASSERT_TRUE(alone.ok()) << name_of(id) << ": " << alone.status().message();
      const cases::Difference d = cases::compare(c, id, alone->outputs.at(id), tensor);
      EXPECT_LE(d.ratio, cases::limit_of(cases::Precision::kBF16, id)) << name_of(id);
    }
  }
}

TEST(Sm90ChunkBackward, ReasonsNameTheFeature) {
  KDA_NEEDS_HOPPER();
  const auto reason = [](Sizes sizes, DType io, double scale) {
    Problem problem = Problem::make(Operation::kChunkBackward, sizes, io);
    problem.set(kDq, io);
    problem.scale = scale;
    return supports(problem, {DeviceType::kCuda, 0}, choosing("sm90_chunk_bwd")).message();
  };
  const auto names = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const Sizes sizes{1, 100, 1, 1, 128, 128, 0, 0};
  EXPECT_EQ(reason(sizes, kBF16, 0.5), "");
  EXPECT_TRUE(names(reason(sizes, DType::kF16, 0.5), "fp16 tensors (q)"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 96, 128, 0, 0}, kBF16, 0.5), "K = 96"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 128, 100, 0, 0}, kBF16, 0.5), "V = 100"));
  EXPECT_TRUE(names(reason(sizes, kBF16, 0.0), "scale = 0"));
}

}  // namespace
}  // namespace kda::test
