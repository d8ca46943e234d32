// sm90_chunk_fwd with its sequences cut into segments: against the float64 reference, and which
// bits do not depend on the cuts.
#include <string>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "cuda/generic/pipeline.h"
#include "cuda/hopper_case.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "generate.h"

namespace kda::test {
namespace {

// The segments that the row itself takes.
TEST(Sm90Segments, LongSequencesOfFewHeads) {
  KDA_NEEDS_HOPPER();
  expect_right_forward(forward_spec({1, 6200, 1, 1, 128, 64, 0, 0}));
  CaseSpec spec = forward_spec({1, 9100, 1, 1, 64, 64, 0, 0}, kF16, Family::kSlow);
  spec.cu_seqlens = {0, 10, 10, 6500, 9000};
  spec.poison_tail = true;
  expect_right_forward(spec, true);
}

template <int32_t kTokens>
void forward_in_segments(cuda::Pipeline& run) {
  cuda::sm90::forward_in_segments(run, kTokens);
}

/// With segments of another length than the row would take.
TensorMap in_segments(const Case& c, cuda::PipelineFunction forward) {
  DeviceCase device(forward_with_states(c, false), c.inputs, 0, choosing("sm90_chunk_fwd"));
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

TEST(Sm90Segments, ShortSegments) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const DType io : {kBF16, kF16}) {
      CaseSpec spec = forward_spec({1, 300, 1, 2, 128, 64, 0, 0}, io, family);
      spec.qk_l2norm = family == Family::kSmall;
      SCOPED_TRACE(cases::describe(spec));
      const Case c = cases::generate(spec);
      EXPECT_EQ(beyond_forward_limits(c, spec.io, in_segments(c, forward_in_segments<64>)), "");
      spec.sizes = {2, 257, 2, 2, 64, 128, 0, 0};
      spec.gate = Gate::kSoftplus;
      spec.qk_l2norm = true;
      spec.state_v_first = true;
      spec.chunk_size = 32;
      const Case other = cases::generate(spec);
      EXPECT_EQ(beyond_forward_limits(other, spec.io, in_segments(other, forward_in_segments<64>)),
                "");
    }
  }
}

// Packed, the segments of a sequence are where they are when it is alone.
TEST(Sm90Segments, SegmentsOfPackedSequences) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = forward_spec({1, 700, 1, 1, 128, 128, 0, 0}, kBF16, Family::kSlow);
  spec.cu_seqlens = {0, 0, 1, 64, 129, 450, 450, 690};
  spec.poison_tail = true;
  const Case c = cases::generate(spec);
  const TensorMap packed = in_segments(c, forward_in_segments<64>);
  EXPECT_EQ(beyond_forward_limits(c, spec.io, packed), "");
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
      tensor =
          is_state ? row_of(c.inputs.at(id), n) : rows_of(c.inputs.at(id), 1, first, end - first);
    }
    const TensorMap separate = in_segments(one, forward_in_segments<64>);
    EXPECT_EQ(separate.at(kO).bytes, rows_of(packed.at(kO), 1, first, end - first).bytes) << i;
    EXPECT_EQ(separate.at(kFinalState).bytes,
              row_of(packed.at(kFinalState), static_cast<int64_t>(i)).bytes)
        << i;
  }
}

// Where a cut changes bits at all: at the third segment. So short sequences need none.
TEST(Sm90Segments, TwoSegmentsHaveTheBitsOfOne) {
  KDA_NEEDS_HOPPER();
  for (const int32_t K : {64, 128}) {
    const Case c =
        cases::generate(forward_spec({2, 128, 1, 2, K, 128, 0, 0}, kBF16, Family::kSlow));
    expect_same_bits(in_segments(c, forward_in_segments<64>),
                     in_segments(c, forward_in_segments<0>));
  }
}

TEST(Sm90Segments, SegmentsOfAPrefixKeepItsBits) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = forward_spec({1, 400, 1, 1, 128, 64, 0, 0}, kBF16, Family::kSlow);
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
