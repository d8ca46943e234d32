// sm90_chunk_fwd against the float64 reference on the same rounded inputs, in guarded memory and
// under graph capture, and what it leaves to the generic row.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "cuda/hopper_case.h"
#include "generate.h"
#include "support/correlated_keys.h"

namespace kda::test {
namespace {

Conditions on_hopper() { return on_row("sm90_chunk_fwd"); }

TEST(Sm90ChunkForward, AllFamiliesAndGates) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const DType io : {kBF16, kF16}) {
      for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
        CaseSpec spec = forward_spec({1, 140, 1, 2, 128, 64, 0, 0}, io, family);
        spec.gate = gate;
        spec.qk_l2norm = gate != Gate::kNone || family == Family::kSmall;
        expect_right_forward(spec);
        spec.sizes = {2, 97, 2, 2, 64, 128, 0, 0};
        expect_right_forward(spec);
      }
    }
  }
}

// (I + L)^-1 diag(beta) as one 16-bit operand would round beta alike in every token (decision
// 0013).
TEST(Sm90ChunkForward, OneBetaForAllTokens) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    const Case c = cases::one_beta_for_all_tokens(io);
    const auto outcome = run_guarded(forward_with_states(c, false), c.inputs, on_hopper());
    ASSERT_TRUE(outcome.ok()) << outcome.status().message();
    EXPECT_EQ(beyond_forward_limits(c, io, outcome->outputs), "");
  }
}

TEST(Sm90ChunkForward, LengthsAndPackedSequences) {
  KDA_NEEDS_HOPPER();
  for (const int64_t T : {1, 15, 16, 17, 31, 32, 33, 64, 65, 300}) {
    expect_right_forward(forward_spec({2, T, 1, 1, 128, 128, 0, 0}));
  }
  // Enough heads that a block takes 128 columns of V.
  expect_right_forward(forward_spec({1, 40, 67, 67, 128, 128, 0, 0}));
  expect_right_forward(forward_spec({1, 40, 67, 67, 128, 128, 0, 0}, kF16));
  // Too many chunks for prep to take all at once: scan runs beside it.
  expect_right_forward(forward_spec({1, 700, 32, 32, 128, 64, 0, 0}));
  for (const int64_t heads : {1, 8, 67}) {
    CaseSpec spec = forward_spec({1, 210, heads, heads, 64, 128, 0, 0});
    spec.cu_seqlens = {0, 0, 1, 64, 64, 129, 197, 197};
    if (heads == 8) {  // the same of packed sequences
      spec.sizes.T = 2700;
      spec.cu_seqlens = {0, 0, 1, 640, 640, 1300, 2690, 2690};
    }
    spec.poison_tail = true;
    expect_right_forward(spec);
    spec.cu_dtype = DType::kI32;
    spec.state_v_first = true;
    spec.chunk_size = 32;
    expect_right_forward(spec);
  }
}

// Of a workspace that says of every record that it is there, as an earlier run may leave it.
TEST(Sm90ChunkForward, BesidePrepWaitsForItsRecords) {
  KDA_NEEDS_HOPPER();
  const Case c = cases::generate(forward_spec({1, 700, 32, 32, 128, 64, 0, 0}));
  DeviceCase device(forward_with_states(c, false), c.inputs, 0, choosing("sm90_chunk_fwd"));
  device.run();
  const TensorMap first = device.outputs();
  for (int i = 0; i < 3; ++i) {  // now the kernels are loaded
    require(cudaMemset(device.args().workspace, 0xff, device.plan().workspace_bytes()));
    device.poison_outputs();
    device.run();
    const TensorMap again = device.outputs();
    EXPECT_EQ(again.at(kO).bytes, first.at(kO).bytes);
    EXPECT_EQ(again.at(kFinalState).bytes, first.at(kFinalState).bytes);
  }
}

TEST(Sm90ChunkForward, Options) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    CaseSpec spec = forward_spec({2, 100, 2, 4, 128, 192, 0, 0}, io);
    expect_right_forward(spec);
    spec.beta_sigmoid = true;
    expect_right_forward(spec);
    spec.allow_neg_eigval = true;
    spec.gate_dtype = io;
    spec.scale = 1.0;
    expect_right_forward(spec);
    spec.state_v_first = true;
    expect_right_forward(spec, true);
    spec.initial_state = false;
    expect_right_forward(spec);
  }
}

// Prefix caching: what comes later changes no bit of o, neither through its values nor, at 1000
// nats a token, through another way of computing.
TEST(Sm90ChunkForward, OfAPrefixNoBitDependsOnWhatFollows) {
  KDA_NEEDS_HOPPER();
  for (const int64_t prefix : {1, 37, 70, 100}) {
    CaseSpec spec = forward_spec({1, 130, 1, 1, 128, 64, 0, 0});
    Case c = cases::generate(spec);
    const auto all = run_guarded(forward_with_states(c, false), c.inputs, on_hopper());
    ASSERT_TRUE(all.ok()) << all.status().message();
    const HostTensor kept = rows_of(all->outputs.at(kO), 1, 0, prefix);
    for (const TensorId id : {kQ, kK, kV, kG, kBeta}) {
      HostTensor& tensor = c.inputs.at(id);
      const int64_t row = tensor.count() / tensor.shape[1];
      for (int64_t i = prefix * row; i < tensor.count(); ++i) {
        tensor.set(i, id == kG ? -1000.0 : 0.5 * tensor.get(i) + 0.01);
      }
    }
    const auto changed = run_guarded(forward_with_states(c, false), c.inputs, on_hopper());
    ASSERT_TRUE(changed.ok()) << changed.status().message();
    EXPECT_EQ(rows_of(changed->outputs.at(kO), 1, 0, prefix).bytes, kept.bytes) << prefix;
  }
}

TensorMap run(const Case& c) {
  Conditions conditions = on_hopper();
  conditions.watch = cases::Watch::kNotUnwritten;
  return run_guarded(forward_with_states(c, false), c.inputs, conditions).value().outputs;
}

/// The case with a value in one element of a token.
Case spoilt(const Case& c, std::initializer_list<TensorId> ids, int64_t token, double value) {
  Case other = c;
  for (const TensorId id : ids) {
    HostTensor& tensor = other.inputs.at(id);
    const int64_t row = tensor.count() / tensor.shape[1];
    tensor.set(token * row + row / 3, value);
  }
  return other;
}

/// o is NaN where is_spoilt(token, column of the token's row) says so, and as in `clean` elsewhere.
template <class IsSpoilt>
void expect_spoilt(const HostTensor& o, const HostTensor& clean, IsSpoilt is_spoilt) {
  const int64_t row = o.count() / o.shape[1];
  for (int64_t i = 0; i < o.count(); ++i) {
    if (is_spoilt(i / row, i % row)) {
      ASSERT_TRUE(std::isnan(o.get(i))) << "token " << i / row << ", column " << i % row;
    } else {
      ASSERT_EQ(o.get(i), clean.get(i)) << "token " << i / row << ", column " << i % row;
    }
  }
}

/// Every tensor of a token in turn, not finite in one element.
void expect_contained(const Case& c, std::initializer_list<int64_t> tokens) {
  SCOPED_TRACE(c.name);
  const TensorMap clean = run(c);
  const HostTensor& o = clean.at(kO);
  for (const int64_t token : tokens) {
    const HostTensor before = rows_of(o, 1, 0, token);
    const auto expect_prefix = [&](std::initializer_list<TensorId> ids, double value) {
      SCOPED_TRACE(fmt::format("{} = {} at {}", name_of(*ids.begin()), value, token));
      TensorMap results = run(spoilt(c, ids, token, value));
      EXPECT_EQ(rows_of(results.at(kO), 1, 0, token).bytes, before.bytes);
      return results;
    };
    for (const TensorId id : {kK, kG, kBeta}) {
      const TensorMap results = expect_prefix({id}, std::nan(""));
      expect_spoilt(results.at(kO), o, [&](int64_t t, int64_t) { return t >= token; });
      const HostTensor& state = results.at(kFinalState);
      for (int64_t i = 0; i < state.count(); ++i) ASSERT_TRUE(std::isnan(state.get(i))) << i;
    }
    const TensorMap results = expect_prefix({kV}, std::nan(""));
    const int64_t spoilt_column = o.shape[3] / 3;
    expect_spoilt(results.at(kO), o,
                  [&](int64_t t, int64_t column) { return t >= token && column == spoilt_column; });
    const HostTensor q = expect_prefix({kQ}, std::nan("")).at(kO);
    const int64_t later = o.shape[1] - token - 1;
    EXPECT_EQ(rows_of(q, 1, token + 1, later).bytes, rows_of(o, 1, token + 1, later).bytes);
    expect_prefix({kQ, kK, kV, kG, kBeta}, std::nan(""));
    for (const TensorId id : {kQ, kK, kV, kBeta}) {
      expect_prefix({id}, std::numeric_limits<double>::infinity());
    }
  }
}

void expect_contained(DType io) {
  for (const int64_t K : {64, 128}) {
    const auto expect = [](const CaseSpec& each) {
      expect_contained(cases::generate(each), {1, 15, 16, 17, 31, 32, 50});
    };
    CaseSpec spec = forward_spec({1, 70, 1, 1, K, 64, 0, 0}, io);
    expect(spec);
    spec.family = Family::kDeep;
    expect(spec);
    spec.family = Family::kUnit;
    spec.gate = K == 64 ? Gate::kSoftplus : Gate::kLowerBound;
    spec.qk_l2norm = spec.beta_sigmoid = true;
    expect(spec);
    spec.sizes.T = 170;
    expect_contained(cases::generate(spec), {95, 128});
  }
}

/// Where v is not finite.
struct Spot {
  int64_t token;
  int64_t column;  ///< of the token's row
  double value;
  int64_t end;  ///< of its sequence
};

/// Only these columns change: o from their tokens on, and the final state of each sequence.
void expect_columns_contained(const CaseSpec& spec, std::initializer_list<Spot> spots) {
  SCOPED_TRACE(cases::describe(spec));
  const Case c = cases::generate(spec);
  const TensorMap clean = run(c);
  Case other = c;
  HostTensor& v = other.inputs.at(kV);
  const int64_t row = v.count() / v.shape[1];
  for (const Spot& spot : spots) v.set(spot.token * row + spot.column, spot.value);
  const TensorMap results = run(other);
  expect_spoilt(results.at(kO), clean.at(kO), [&](int64_t token, int64_t column) {
    return std::any_of(spots.begin(), spots.end(), [&](const Spot& spot) {
      return column == spot.column && token >= spot.token && token < spot.end;
    });
  });
  const HostTensor& state = results.at(kFinalState);
  const int64_t V = state.shape[3];
  const int64_t head = state.shape[2] * V;
  for (int64_t i = 0; i < state.count(); ++i) {
    const int64_t sequence = i / (head * state.shape[1]);
    const int64_t column = i / head % state.shape[1] * V + i % V;
    const int64_t end = spec.cu_seqlens.empty() ? spec.sizes.T : spec.cu_seqlens[sequence + 1];
    const bool is_spoilt = std::any_of(spots.begin(), spots.end(), [&](const Spot& spot) {
      return column == spot.column && end == spot.end;
    });
    const bool is_right =
        is_spoilt ? std::isnan(state.get(i)) : state.get(i) == clean.at(kFinalState).get(i);
    ASSERT_TRUE(is_right) << "sequence " << sequence << ", column " << column;
  }
}

// The forward takes v for finite at first: what is not, in the midst of a sequence, at its end, in
// chunks one after the other, and in one of two warpgroups.
TEST(Sm90ChunkForward, SpoiltChunksAmongPlainOnes) {
  KDA_NEEDS_HOPPER();
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType io : {kBF16, kF16}) {
    for (const int64_t heads : {1, 67}) {
      CaseSpec spec = forward_spec({1, 170, heads, heads, 128, 128, 0, 0}, io);
      const int64_t last = heads * 128 - 1;
      expect_columns_contained(spec, {{70, 0, nan, 170}, {130, last, infinity, 170}});
      expect_columns_contained(spec, {{31, 5, nan, 170}, {32, 70, nan, 170}, {165, 9, nan, 170}});
      spec.sizes.T = 340;
      spec.cu_seqlens = {0, 0, 150, 332, 337};
      spec.poison_tail = true;
      expect_columns_contained(spec, {{40, 3, nan, 150}, {280, 90, -infinity, 332}});
    }
  }
}

// CAUSAL-02: what is not finite never shows before its token, not even within the same 32.
TEST(Sm90ChunkForward, NoTokenReachesBack) {
  KDA_NEEDS_HOPPER();
  expect_contained(kBF16);
}

TEST(Sm90ChunkForward, NoFp16TokenReachesBack) {
  KDA_NEEDS_HOPPER();
  expect_contained(kF16);
}

TEST(Sm90ChunkForward, ReasonsNameTheFeature) {
  KDA_NEEDS_HOPPER();
  const auto reason = [](Sizes sizes, DType io, auto change) {
    Problem problem = Problem::make(Operation::kChunkForward, sizes, io);
    change(problem);
    return supports(problem, {DeviceType::kCuda, 0}, choosing("sm90_chunk_fwd")).message();
  };
  const auto names = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const auto as_is = [](Problem&) {};
  const Sizes sizes{1, 100, 1, 1, 128, 128, 0, 0};
  EXPECT_EQ(reason(sizes, kBF16, as_is), "");
  EXPECT_TRUE(names(reason(sizes, DType::kF32, as_is), "fp32 tensors (q)"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 96, 128, 0, 0}, kBF16, as_is), "K = 96"));
  EXPECT_TRUE(names(reason({1, 100, 1, 1, 128, 100, 0, 0}, kBF16, as_is), "V = 100"));
  EXPECT_TRUE(names(reason(sizes, kBF16, [](Problem& p) { p.set(kAqk, kBF16); }), "Aqk"));
  EXPECT_TRUE(names(reason(sizes, kBF16, [](Problem& p) { p.set(kO, DType::kF32); }),
                    "fp32 tensors beside bf16 ones (o)"));
}

}  // namespace
}  // namespace kda::test
