// sm90_chunk_fwd against the float64 reference on the same rounded inputs, in guarded memory and
// under graph capture, and what it leaves to the generic row.
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "cuda/generic/pipeline.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "execute.h"
#include "generate.h"
#include "support/guarded_run.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::Family;
using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;

Conditions on_hopper() {
  Conditions conditions;
  conditions.options = choosing("sm90_chunk_fwd");
  conditions.device = {DeviceType::kCuda, 0};
  conditions.repeat = true;
  return conditions;
}

CaseSpec spec_of(Sizes sizes, DType io = kBF16, Family family = Family::kUnit) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = io;
  spec.family = family;
  spec.gradients = false;
  return spec;
}

/// o, final_state and h of a case; all in fp64 for the reference.
Problem problem_of(const Case& c, bool exact) {
  Problem problem = forward_problem(c);
  const DType io = exact ? DType::kF64 : problem[kQ].dtype;
  problem.set(kO, io).set(kH, io);
  problem.set(kFinalState, exact ? DType::kF64 : DType::kF32);
  return problem;
}

/// "" or what is further from the reference than 7.3 allows, for ill-conditioned families than
/// rounding alone makes of the same inputs.
std::string beyond_limits(const Case& c, const CaseSpec& spec, const TensorMap& results) {
  const TensorMap expected =
      cases::execute_operation(problem_of(c, true), c.inputs, {}, choosing("reference"))
          .value()
          .outputs;
  const TensorMap emulated = cases::emulated_rounding(c, spec.io);
  std::string text;
  for (const auto& [id, reference] : expected) {
    const TensorId row = id == kH ? kFinalState : id;
    const cases::Difference d = cases::compare(c, row, results.at(id), reference);
    const double limit = cases::limit_beside(emulated, c, id, reference, spec.io);
    if (d.finite && d.ratio <= limit && d.block_ratio <= cases::kBlockFactor * limit) continue;
    text += fmt::format("{}: ratio {:.3g}, worst block {:.3g}, limit {:.3g}{}; ", name_of(id),
                        d.ratio, d.block_ratio, limit, d.finite ? "" : ", not finite");
  }
  return text;
}

void expect_right(const CaseSpec& spec, bool in_place = false) {
  SCOPED_TRACE(cases::describe(spec));
  const Case c = cases::generate(spec);
  Conditions conditions = on_hopper();
  conditions.state_in_place = in_place;
  const auto outcome = run_guarded(problem_of(c, false), c.inputs, conditions);
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(outcome->implementation, "sm90_chunk_fwd");
  EXPECT_EQ(beyond_limits(c, spec, outcome->outputs), "");
}

TEST(Sm90ChunkForward, AllFamiliesAndGates) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const DType io : {kBF16, kF16}) {
      for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
        CaseSpec spec = spec_of({1, 140, 1, 2, 128, 64, 0, 0}, io, family);
        spec.gate = gate;
        spec.qk_l2norm = gate != Gate::kNone || family == Family::kSmall;
        expect_right(spec);
        spec.sizes = {2, 97, 2, 2, 64, 128, 0, 0};
        expect_right(spec);
      }
    }
  }
}

TEST(Sm90ChunkForward, LengthsAndPackedSequences) {
  KDA_NEEDS_HOPPER();
  for (const int64_t T : {1, 15, 16, 17, 31, 32, 33, 64, 65, 300}) {
    expect_right(spec_of({2, T, 1, 1, 128, 128, 0, 0}));
  }
  // Enough heads that a block takes 128 columns of V.
  expect_right(spec_of({1, 40, 67, 67, 128, 128, 0, 0}));
  expect_right(spec_of({1, 40, 67, 67, 128, 128, 0, 0}, kF16));
  for (const int64_t heads : {1, 67}) {
    CaseSpec spec = spec_of({1, 210, heads, heads, 64, 128, 0, 0});
    spec.cu_seqlens = {0, 0, 1, 64, 64, 129, 197, 197};
    spec.poison_tail = true;
    expect_right(spec);
    spec.cu_dtype = DType::kI32;
    spec.state_v_first = true;
    spec.chunk_size = 32;
    expect_right(spec);
  }
}

TEST(Sm90ChunkForward, Options) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {kBF16, kF16}) {
    CaseSpec spec = spec_of({2, 100, 2, 4, 128, 192, 0, 0}, io);
    expect_right(spec);
    spec.beta_sigmoid = true;
    expect_right(spec);
    spec.allow_neg_eigval = true;
    spec.gate_dtype = io;
    spec.scale = 1.0;
    expect_right(spec);
    spec.state_v_first = true;
    expect_right(spec, true);
    spec.initial_state = false;
    expect_right(spec);
  }
}

/// The first `tokens` tokens of dimension 1.
HostTensor prefix_of(const HostTensor& t, int64_t tokens) {
  HostTensor part(t.dtype, t.shape);
  part.shape[1] = tokens;
  const auto row = static_cast<std::ptrdiff_t>(t.bytes.size()) / t.shape[1];
  part.bytes.assign(t.bytes.begin(), t.bytes.begin() + row * tokens);
  return part;
}

// Prefix caching: what comes later changes no bit of o, neither through its values nor, at 1000
// nats a token, through another way of computing.
TEST(Sm90ChunkForward, OfAPrefixNoBitDependsOnWhatFollows) {
  KDA_NEEDS_HOPPER();
  for (const int64_t prefix : {1, 37, 70, 100}) {
    CaseSpec spec = spec_of({1, 130, 1, 1, 128, 64, 0, 0});
    Case c = cases::generate(spec);
    const auto all = run_guarded(problem_of(c, false), c.inputs, on_hopper());
    ASSERT_TRUE(all.ok()) << all.status().message();
    const HostTensor kept = prefix_of(all->outputs.at(kO), prefix);
    for (const TensorId id : {kQ, kK, kV, kG, kBeta}) {
      HostTensor& tensor = c.inputs.at(id);
      const int64_t row = tensor.count() / tensor.shape[1];
      for (int64_t i = prefix * row; i < tensor.count(); ++i) {
        tensor.set(i, id == kG ? -1000.0 : 0.5 * tensor.get(i) + 0.01);
      }
    }
    const auto changed = run_guarded(problem_of(c, false), c.inputs, on_hopper());
    ASSERT_TRUE(changed.ok()) << changed.status().message();
    EXPECT_EQ(prefix_of(changed->outputs.at(kO), prefix).bytes, kept.bytes) << prefix;
  }
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

TEST(Sm90ChunkForward, UnalignedTensorsAreNamed) {
  KDA_NEEDS_HOPPER();
  const Case c = cases::generate(spec_of({1, 64, 1, 1, 64, 64, 0, 0}));
  DeviceCase device(forward_problem(c), c.inputs, 0, choosing("sm90_chunk_fwd"));
  Args args = device.args();
  args.in(kK, device[kK].at(2));
  const Status status = device.plan().run(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message().rfind("k: ", 0), 0u) << status.message();
  EXPECT_NO_THROW(device.run());
}

// The segments that the row itself takes, in guarded memory and as a graph; in the last case
// initial_state and final_state are the same memory.
TEST(Sm90ChunkForward, LongSequencesOfFewHeads) {
  KDA_NEEDS_HOPPER();
  expect_right(spec_of({1, 3100, 1, 1, 128, 64, 0, 0}));
  CaseSpec spec = spec_of({1, 6000, 1, 1, 64, 64, 0, 0}, kF16, Family::kSlow);
  spec.cu_seqlens = {0, 10, 10, 2500, 5900};
  spec.poison_tail = true;
  expect_right(spec, true);
}

template <int32_t kTokens>
void forward_in_segments(cuda::Pipeline& run) {
  cuda::sm90::forward_in_segments(run, kTokens);
}

/// With segments of another length than the row would take.
TensorMap in_segments(const Case& c, cuda::PipelineFunction forward) {
  DeviceCase device(problem_of(c, false), c.inputs, 0, choosing("sm90_chunk_fwd"));
  const Problem& problem = device.plan().problem();
  const auto executor = cuda::make_pipeline(problem, {DeviceType::kCuda, 0}, forward).value();
  const DeviceBuffer workspace(executor->workspace_bytes());
  Args args = device.args();
  args.workspace = workspace.address();
  args.workspace_bytes = executor->workspace_bytes();
  const Status status = executor->run(args, nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  require(cudaDeviceSynchronize());
  return device.outputs();
}

TEST(Sm90ChunkForward, ShortSegments) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const DType io : {kBF16, kF16}) {
      CaseSpec spec = spec_of({1, 300, 1, 2, 128, 64, 0, 0}, io, family);
      spec.qk_l2norm = family == Family::kSmall;
      SCOPED_TRACE(cases::describe(spec));
      const Case c = cases::generate(spec);
      EXPECT_EQ(beyond_limits(c, spec, in_segments(c, forward_in_segments<64>)), "");
      spec.sizes = {2, 257, 2, 2, 64, 128, 0, 0};
      spec.gate = Gate::kSoftplus;
      spec.qk_l2norm = true;
      spec.state_v_first = true;
      spec.chunk_size = 32;
      const Case other = cases::generate(spec);
      EXPECT_EQ(beyond_limits(other, spec, in_segments(other, forward_in_segments<64>)), "");
    }
  }
}

/// Rows first .. end - 1 of dimension `dim`, with the dimensions before it of extent 1.
HostTensor rows_of(const HostTensor& t, int64_t dim, int64_t first, int64_t end) {
  std::vector<int64_t> shape = t.shape;
  const auto row =
      static_cast<std::ptrdiff_t>(t.bytes.size()) / shape[static_cast<std::size_t>(dim)];
  shape[static_cast<std::size_t>(dim)] = end - first;
  HostTensor part(t.dtype, shape);
  part.bytes.assign(t.bytes.begin() + row * first, t.bytes.begin() + row * end);
  return part;
}

// Packed, the segments of a sequence are where they are when it is alone.
TEST(Sm90ChunkForward, SegmentsOfPackedSequences) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({1, 700, 1, 1, 128, 128, 0, 0}, kBF16, Family::kSlow);
  spec.cu_seqlens = {0, 0, 1, 64, 129, 450, 450, 690};
  spec.poison_tail = true;
  const Case c = cases::generate(spec);
  const TensorMap packed = in_segments(c, forward_in_segments<64>);
  EXPECT_EQ(beyond_limits(c, spec, packed), "");
  for (std::size_t i = 0; i + 1 < spec.cu_seqlens.size(); ++i) {
    const int64_t first = spec.cu_seqlens[i];
    const int64_t end = spec.cu_seqlens[i + 1];
    if (first == end) continue;
    CaseSpec alone = spec;
    alone.cu_seqlens.clear();
    alone.sizes.T = end - first;
    Case one = cases::generate(alone);
    for (auto& [id, tensor] : one.inputs) {
      const bool is_state = id == kInitialState;
      const auto n = static_cast<int64_t>(i);
      tensor = is_state ? rows_of(c.inputs.at(id), 0, n, n + 1)
                        : rows_of(c.inputs.at(id), 1, first, end);
    }
    const TensorMap separate = in_segments(one, forward_in_segments<64>);
    EXPECT_EQ(separate.at(kO).bytes, rows_of(packed.at(kO), 1, first, end).bytes) << i;
    EXPECT_EQ(
        separate.at(kFinalState).bytes,
        rows_of(packed.at(kFinalState), 0, static_cast<int64_t>(i), static_cast<int64_t>(i) + 1)
            .bytes)
        << i;
  }
}

// Where a cut changes bits at all: at the third segment. So short sequences need none.
TEST(Sm90ChunkForward, TwoSegmentsHaveTheBitsOfOne) {
  KDA_NEEDS_HOPPER();
  for (const int32_t K : {64, 128}) {
    const Case c = cases::generate(spec_of({2, 128, 1, 2, K, 128, 0, 0}, kBF16, Family::kSlow));
    expect_same_bits(in_segments(c, forward_in_segments<64>),
                     in_segments(c, forward_in_segments<0>));
  }
}

TEST(Sm90ChunkForward, SegmentsOfAPrefixKeepItsBits) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({1, 400, 1, 1, 128, 64, 0, 0}, kBF16, Family::kSlow);
  const Case c = cases::generate(spec);
  const TensorMap all = in_segments(c, forward_in_segments<64>);
  for (const int64_t tokens : {100, 192, 333}) {
    spec.sizes.T = tokens;
    Case part = cases::generate(spec);
    for (auto& [id, tensor] : part.inputs) {
      const HostTensor& whole = c.inputs.at(id);
      tensor = id == kInitialState ? whole : rows_of(whole, 1, 0, tokens);
    }
    const TensorMap results = in_segments(part, forward_in_segments<64>);
    EXPECT_EQ(results.at(kO).bytes, rows_of(all.at(kO), 1, 0, tokens).bytes) << tokens;
  }
}

}  // namespace
}  // namespace kda::test
