// sm90_chunk_bwd against the float64 reference on the same rounded inputs, in guarded memory and
// under graph capture, and what it leaves to the generic row.
#include <algorithm>
#include <functional>
#include <iterator>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "cuda/hopper_case.h"
#include "emulation.h"
#include "execute.h"
#include "generate.h"
#include "support/correlated_keys.h"

namespace kda::test {
namespace {

Conditions on_hopper() { return on_row("sm90_chunk_bwd"); }

/// How far results are from the reference: "" or what is beyond limits.
using Judge = std::function<std::string(const TensorMap& results, const TensorMap& expected)>;

Judge within(const Case& c, const Limit& limit) {
  return [&c, limit](const TensorMap& results, const TensorMap& expected) {
    return beyond(limit, c, results, expected);
  };
}

/// 7.3 with its rules for few numbers and short blocks, as kda verify holds its suite; ordinary
/// families beside no rounding points.
Judge with_rules(const Case& c, const CaseSpec& spec) {
  return [&c, &spec](const TensorMap& results, const TensorMap& expected) {
    const TensorMap emulated = cases::emulated_rounding(c, spec.io);
    std::string text;
    for (const auto& [id, reference] : expected) {
      cases::CheckedOutput checked;
      checked.id = id;
      cases::look_again_beside(emulated, c, &spec, results.at(id), reference, spec.io, checked);
      const Difference& d = checked.difference;
      if (checked.pass) continue;
      text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}; ", name_of(id),
                          d.ratio, d.block_ratio, checked.limit);
    }
    return text;
  };
}

std::string beyond_limits(const Judge& judge, const Case& c, const TensorMap& results) {
  TensorMap expected = cases::execute_operation(backward_problem(c, {DType::kF64}), c.inputs, {},
                                                choosing("reference"))
                           .value()
                           .outputs;
  for (auto entry = expected.begin(); entry != expected.end();) {  // what was not asked for
    entry = results.count(entry->first) == 0 ? expected.erase(entry) : std::next(entry);
  }
  return judge(results, expected);
}

void expect_right(const Case& c, const Problem& problem, const Judge& judge) {
  SCOPED_TRACE(c.name);
  const auto outcome = run_guarded(problem, c.inputs, on_hopper());
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(outcome->implementation, "sm90_chunk_bwd");
  EXPECT_EQ(beyond_limits(judge, c, outcome->outputs), "");
}

/// In fp16 by the rules: rounding alone takes more of its limits than of those of bf16.
void expect_right(const CaseSpec& spec) {
  const Case c = cases::generate(spec);
  expect_right(c, backward_problem(c),
               spec.io == kF16 ? with_rules(c, spec) : within(c, limits_beside_rounding(c, kBF16)));
}

/// Every family and gate; of two shapes both, or one in turn.
void expect_families_right(DType io, bool both_shapes) {
  constexpr Sizes kShapes[] = {{1, 140, 1, 2, 128, 64, 0, 0}, {2, 97, 2, 2, 64, 128, 0, 0}};
  std::size_t turn = 0;
  for (const Family family : cases::kFamilies) {
    for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
      for (std::size_t shape = 0; shape < 2; ++shape) {
        if (!both_shapes && shape != turn % 2) continue;
        CaseSpec spec = spec_of(kShapes[shape], io, family);
        spec.gate = gate;
        spec.qk_l2norm = gate != Gate::kNone || family == Family::kSmall;
        expect_right(spec);
      }
      ++turn;
    }
  }
}

TEST(Sm90ChunkBackward, AllFamiliesAndGates) {
  KDA_NEEDS_HOPPER();
  expect_families_right(kBF16, true);
}

// The model of rounding has the same code for both types: the other half of the reference's time
// would find little.
TEST(Sm90ChunkBackward, AllFamiliesAndGatesInFp16) {
  KDA_NEEDS_HOPPER();
  expect_families_right(kF16, false);
}

// The solve below its diagonal blocks is in tf32, whose rounding is that of fp16: keys that point
// the same way with beta up to 2 showed it, and twice of it in dk, unless its operands have two
// terms.
TEST(Sm90ChunkBackward, TheSolveAddsNothingToTheRoundingOfFp16) {
  KDA_NEEDS_HOPPER();
  for (const uint64_t seed : {1, 2, 3}) {
    CaseSpec spec = spec_of({1, 64, 2, 2, 128, 64, 0, 0}, kF16, Family::kCorr);
    spec.seed = seed;
    spec.gate = Gate::kSoftplus;
    spec.qk_l2norm = spec.beta_sigmoid = spec.allow_neg_eigval = true;
    const Case c = cases::generate(spec);
    cases::Emulation rounding;
    rounding.type = kF16;
    const TensorMap model = cases::emulate_backward(c, rounding);
    const auto judge = [&](const TensorMap& results, const TensorMap& expected) -> std::string {
      const HostTensor& dk = expected.at(TensorId::kDk);
      const double found = cases::compare(c, TensorId::kDk, results.at(TensorId::kDk), dk).ratio;
      const double rounded = cases::compare(c, TensorId::kDk, model.at(TensorId::kDk), dk).ratio;
      if (found <= 1.3 * rounded) return "";
      return fmt::format("dk: ratio {:.3g}, rounding alone {:.3g}", found, rounded);
    };
    expect_right(c, backward_problem(c), judge);
  }
}

TEST(Sm90ChunkBackward, LengthsAndPackedSequences) {
  KDA_NEEDS_HOPPER();
  for (const int64_t T : {1, 16, 17, 32, 33, 65}) {
    expect_right(spec_of({2, T, 1, 1, 128, 128, 0, 0}));
    expect_right(spec_of({2, T, 1, 1, 64, 128, 0, 0}, kF16));
  }
  for (const int32_t chunk_size : {64, 32}) {
    CaseSpec spec = spec_of({1, 210, 1, 1, 64, 128, 0, 0}, chunk_size == 32 ? kF16 : kBF16);
    spec.cu_seqlens = {0, 0, 1, 64, 64, 129, 197, 197};
    spec.poison_tail = true;
    spec.chunk_size = chunk_size;
    spec.state_v_first = chunk_size == 32;
    expect_right(spec);
    spec.gate = Gate::kSoftplus;  // chunks without tokens have a part of the parameters' sums
    expect_right(spec);
  }
}

bool is_state(TensorId id) {
  return id == kInitialState || id == kDfinalState || id == kDinitialState;
}

TEST(Sm90ChunkBackward, PackedSequencesHaveTheBitsOfSeparateOnes) {
  KDA_NEEDS_HOPPER();
  for (const int64_t H : {1, 2}) {
    CaseSpec spec = spec_of({1, 300, H, 2, 128, 128, 0, 0}, H == 1 ? kF16 : kBF16);
    spec.cu_seqlens = {0, 5, 69, 133, 290};
    spec.gate = Gate::kSoftplus;
    spec.qk_l2norm = spec.beta_sigmoid = true;
    const Case c = cases::generate(spec);
    const Problem packed = backward_problem(c);
    const auto together = run_guarded(packed, c.inputs, on_hopper());
    ASSERT_TRUE(together.ok()) << together.status().message();
    for (std::size_t n = 0; n + 1 < spec.cu_seqlens.size(); ++n) {
      const int64_t begin = spec.cu_seqlens[n];
      const int64_t length = spec.cu_seqlens[n + 1] - begin;
      const auto of_sequence = [&](TensorId id, const HostTensor& t) {
        if (id == kALog || id == kDtBias) return t;
        const auto row = static_cast<int64_t>(n);
        return is_state(id) ? row_of(t, row) : rows_of(t, 1, begin, length);
      };
      Problem alone = packed;
      alone.sizes.T = length;
      alone.sizes.N = 0;
      alone.set(kCuSeqlens, DType::kNone);
      TensorMap inputs;
      for (const auto& [id, tensor] : c.inputs) {
        if (id != kCuSeqlens) inputs[id] = of_sequence(id, tensor);
      }
      const auto separate = run_guarded(alone, inputs, on_hopper());
      ASSERT_TRUE(separate.ok()) << separate.status().message();
      for (const auto& [id, tensor] : separate->outputs) {
        if (id == kDALog || id == kDdtBias) continue;  // sums over all sequences
        EXPECT_EQ(of_sequence(id, together->outputs.at(id)).bytes, tensor.bytes)
            << name_of(id) << " of sequence " << n;
      }
    }
  }
}

/// A key head of `heads` and the value heads that belong to it.
HostTensor head_of(TensorId id, const HostTensor& t, int64_t head, int64_t heads) {
  const bool is_parameter = id == kALog || id == kDtBias || id == kDALog || id == kDdtBias;
  const std::size_t dim = is_parameter ? 0 : is_state(id) ? 1 : 2;
  HostTensor part(t.dtype, t.shape);
  part.shape[dim] /= heads;
  int64_t outer = 1;
  for (std::size_t i = 0; i < dim; ++i) outer *= t.shape[i];
  const auto bytes = static_cast<std::ptrdiff_t>(t.bytes.size()) / (outer * heads);
  part.bytes.clear();
  for (int64_t i = 0; i < outer; ++i) {
    const auto from = t.bytes.begin() + bytes * (i * heads + head);
    part.bytes.insert(part.bytes.end(), from, from + bytes);
  }
  return part;
}

// Large enough for two slices of eight key heads.
TEST(Sm90ChunkBackward, HeadsHaveTheSameBitsInEverySlice) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    CaseSpec spec = spec_of({1, 1900, 16, 32, 128, 256, 0, 0}, io);
    spec.gate = Gate::kSoftplus;
    spec.qk_l2norm = spec.beta_sigmoid = true;
    const Case c = cases::generate(spec);
    const Problem whole = backward_problem(c);
    const auto together = run_guarded(whole, c.inputs, on_hopper());
    ASSERT_TRUE(together.ok()) << together.status().message();
    Problem alone = whole;
    alone.sizes.H = 1;
    alone.sizes.HV = 2;
    const auto workspace_of = [&](const Problem& problem) {
      return make_plan(problem, on_hopper().device, on_hopper().options)->workspace_bytes();
    };
    EXPECT_LT(workspace_of(whole), 10 * workspace_of(alone));
    for (const int64_t head : {3, 7, 8, 12}) {
      TensorMap inputs;
      for (const auto& [id, tensor] : c.inputs) inputs[id] = head_of(id, tensor, head, 16);
      const auto separate = run_guarded(alone, inputs, on_hopper());
      ASSERT_TRUE(separate.ok()) << separate.status().message();
      for (const auto& [id, tensor] : separate->outputs) {
        EXPECT_EQ(head_of(id, together->outputs.at(id), head, 16).bytes, tensor.bytes)
            << name_of(id) << " of head " << head;
      }
    }
  }
}

// exp(A_log) or the bound are beyond what fp32 holds once multiplied; the decays are ordinary.
TEST(Sm90ChunkBackward, GateFactorsBeyondFp32) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({1, 100, 1, 2, 64, 64, 0, 0});
  spec.gate = Gate::kLowerBound;
  spec.lower_bound = -1e38;
  expect_right(spec);
  spec.gate = Gate::kSoftplus;
  Case c = cases::generate(spec);
  constexpr double kALogFar = 80;
  HostTensor& g = c.inputs.at(kG);
  for (int64_t i = 0; i < g.count(); ++i) g.set(i, g.get(i) - kALogFar);
  for (int64_t hv = 0; hv < 2; ++hv) c.inputs.at(kALog).set(hv, kALogFar);
  expect_right(c, backward_problem(c), within(c, limits_beside_rounding(c, kBF16)));
}

TEST(Sm90ChunkBackward, ShortSequencesOfCorrelatedKeys) {
  KDA_NEEDS_HOPPER();
  for (const CaseSpec& spec : cases::short_sequences_of_correlated_keys()) {
    const Case c = cases::generate(spec);
    expect_right(c, backward_problem(c), with_rules(c, spec));
  }
}

// fp16 reaches from 6e-5 to 65504 with all its bits; the units of the reverse scan follow gradients
// beyond both ends. dq and dk are fp32 here, dv does not exist where fp16 would not hold it.
TEST(Sm90ChunkBackward, GradientsBeyondTheRangeOfFp16) {
  KDA_NEEDS_HOPPER();
  for (const double size : {1e6, 1e4, 1e-4, 1e-7}) {
    CaseSpec spec = spec_of({1, 100, 1, 1, 64, 128, 0, 0}, kF16);
    Case c = cases::generate(spec);
    const auto multiply = [&](TensorId id, double factor) {
      HostTensor& t = c.inputs.at(id);
      for (int64_t i = 0; i < t.count(); ++i) t.set(i, factor * t.get(i));
    };
    multiply(kDfinalState, size);
    multiply(kDo, size > 1 ? std::min(size, 1e4) : std::max(size, 1e-4));
    Problem problem = backward_problem(c);
    problem.set(kDq, DType::kF32).set(kDk, DType::kF32);
    if (size != 1e4) problem.set(kDv, DType::kNone);
    expect_right(c, problem, within(c, limits_beside_rounding(c, kF16)));
  }
  // Columns of V that differ as much, so that the 64-column tiles of a chunk have other units.
  CaseSpec spec = spec_of({1, 70, 1, 2, 128, 192, 0, 0}, kF16);
  Case c = cases::generate(spec);
  HostTensor& grad_o = c.inputs.at(kDo);
  HostTensor& state = c.inputs.at(kDfinalState);
  const auto factor = [](int64_t i) { return i % 192 < 64 ? 1e-3 : i % 192 < 128 ? 1e3 : 1; };
  for (int64_t i = 0; i < grad_o.count(); ++i) grad_o.set(i, factor(i) * grad_o.get(i));
  for (int64_t i = 0; i < state.count(); ++i) state.set(i, factor(i) * state.get(i));
  expect_right(c, backward_problem(c), within(c, limits_beside_rounding(c, kF16)));
}

TEST(Sm90ChunkBackward, Options) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    CaseSpec spec = spec_of({2, 100, 2, 4, 128, 192, 0, 0}, io);
    expect_right(spec);
    spec.beta_sigmoid = true;
    spec.qk_l2norm = true;
    expect_right(spec);
    spec.allow_neg_eigval = true;
    spec.gate_dtype = io;
    spec.scale = -0.3;
    expect_right(spec);
    spec.state_v_first = true;
    spec.initial_state = false;
    spec.dfinal_state = false;
    expect_right(spec);
  }
}

// Only the gradient of the final state reaches the inputs.
TEST(Sm90ChunkBackward, ScaleZero) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    CaseSpec spec = spec_of({1, 70, 1, 2, 64, 64, 0, 0}, io);
    spec.scale = 0;
    expect_right(spec);
  }
}

TEST(Sm90ChunkBackward, EachGradientAlone) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({1, 70, 1, 2, 64, 64, 0, 0});
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  for (const int64_t group : {1, 2}) {
    spec.sizes.H = 2 / group;
    spec.io = group == 1 ? kF16 : kBF16;
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
      const Difference d = cases::compare(c, id, alone->outputs.at(id), tensor);
      EXPECT_LE(d.ratio, cases::limit_of(cases::precision_of(spec.io), id)) << name_of(id);
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
  EXPECT_EQ(reason(sizes, kF16, 0.0), "");
  EXPECT_TRUE(names(reason(sizes, DType::kF32, 0.5), "fp32 tensors (q)"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 96, 128, 0, 0}, kBF16, 0.5), "K = 96"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 128, 100, 0, 0}, kBF16, 0.5), "V = 100"));
  EXPECT_TRUE(names(reason(sizes, kBF16, 1e30), "scale = 1e+30"));
}

}  // namespace
}  // namespace kda::test
