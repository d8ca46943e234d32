// Shapes, strides and bytes; names; the version.
#include <limits>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "core/shape.h"
#include "core/view.h"
#include "kda/kda.h"

namespace kda {
namespace {

using enum TensorId;
using Four = std::array<int64_t, 4>;

Problem forward() {
  return Problem::make(Operation::kChunkForward,
                       {.B = 2, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24}, DType::kBF16);
}

TEST(Layout, ContiguousAndStrided) {
  const TensorLayout dense = TensorLayout::contiguous(DType::kF32, {2, 3, 4});
  EXPECT_EQ(dense.rank, 3);
  EXPECT_EQ(dense.stride, (Four{12, 4, 1, 0}));
  EXPECT_EQ(count_elements(dense), 24);
  EXPECT_EQ(span_elements(dense), 24);
  const TensorLayout padded = TensorLayout::strided(DType::kF32, {2, 3, 4}, {40, 8, 2});
  EXPECT_EQ(span_elements(padded), 40 + 2 * 8 + 3 * 2 + 1);
  EXPECT_EQ(span_elements(TensorLayout::contiguous(DType::kF32, {2, 0, 4})), 0);
  EXPECT_EQ(span_elements(TensorLayout::strided(DType::kF32, {2, 3}, {0, 1})), 3);
}

TEST(Layout, AsManyStridesAsExtents) {
  using List = std::initializer_list<int64_t>;
  const auto verdict = [](List stride) {
    Problem problem = forward();
    problem.set(kQ, TensorLayout::strided(DType::kBF16, {2, 70, 2, 16}, stride));
    return problem.validated().status().message();
  };
  const std::string refusal =
      "q: found rank -1, as strides of another number than the extents have, expected 4";
  EXPECT_EQ(verdict({}).rfind(refusal, 0), 0u) << verdict({});
  EXPECT_EQ(verdict({2240, 32, 16}).rfind(refusal, 0), 0u);
  EXPECT_EQ(verdict({2240, 32, 16, 1, 1}).rfind(refusal, 0), 0u);
  EXPECT_EQ(verdict({2240, 32, 16, 1}), "");
}

TEST(Layout, SizesThatOverflowSaturate) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(saturating_product(kMost, 2), kMost);
  EXPECT_EQ(saturating_product(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(saturating_product(int64_t{1} << 32, int64_t{1} << 31), kMost);
  EXPECT_EQ(saturating_product(kMost, 0), 0);
  EXPECT_EQ(span_elements(TensorLayout::contiguous(DType::kF32, {kMost, kMost})), kMost);
  Problem problem = forward();
  problem.sizes = {.B = kMost, .T = kMost, .H = kMost, .HV = kMost, .K = kMost, .V = kMost};
  EXPECT_EQ(problem.bytes(kQ), kMost);
  EXPECT_EQ(problem.chunk_rows(), kMost);
  problem.chunk_size = 0;
  EXPECT_EQ(problem.chunk_rows(), 0);
}

TEST(Layout, CanonicalShapes) {
  Problem problem = forward();
  EXPECT_EQ(problem.canonical_layout(kQ).shape, (Four{2, 70, 2, 16}));
  EXPECT_EQ(problem.canonical_layout(kO).shape, (Four{2, 70, 4, 24}));
  EXPECT_EQ(problem.canonical_layout(kBeta).shape, (Four{2, 70, 4, 0}));
  EXPECT_EQ(problem.canonical_layout(kA).shape, (Four{2, 70, 4, 64}));
  EXPECT_EQ(problem.canonical_layout(kInitialState).shape, (Four{2, 4, 16, 24}));
  EXPECT_EQ(problem.canonical_layout(kH).shape, (Four{4, 4, 16, 24}));
  EXPECT_EQ(problem.canonical_layout(kH).stride, (Four{4 * 16 * 24, 16 * 24, 24, 1}));
  problem.state_v_first = true;
  EXPECT_EQ(problem.canonical_layout(kFinalState).shape, (Four{2, 4, 24, 16}));
  EXPECT_EQ(problem.canonical_layout(kH).shape, (Four{4, 4, 16, 24})) << "checkpoints stay K first";
  EXPECT_EQ(problem.canonical_layout(kDh).rank, 0) << "dh is no tensor of chunk_fwd";
}

TEST(Layout, ChunkRows) {
  Problem problem = forward();
  EXPECT_EQ(problem.chunk_rows(), 2 * 2);
  problem.chunk_size = 32;
  EXPECT_EQ(problem.chunk_rows(), 2 * 3);
  problem.sizes.T = 0;
  EXPECT_EQ(problem.chunk_rows(), 0);
  problem.set(kCuSeqlens, DType::kI32);
  problem.sizes = {.B = 1, .T = 129, .H = 1, .HV = 1, .K = 8, .V = 8, .N = 5};
  EXPECT_EQ(problem.chunk_rows(), 129 / 32 + 5);
  EXPECT_EQ(problem.canonical_layout(kCuSeqlens).shape[0], 6);
}

TEST(Layout, StatesOfAPool) {
  Problem problem =
      Problem::make(Operation::kRecurrent,
                    {.B = 3, .T = 1, .H = 1, .HV = 2, .K = 8, .V = 4, .P = 9}, DType::kF32);
  EXPECT_EQ(problem.canonical_layout(kInitialState).shape, (Four{3, 2, 8, 4}));
  problem.set(kStateIndices, DType::kI32);
  EXPECT_EQ(problem.canonical_layout(kInitialState).shape, (Four{9, 2, 8, 4}));
  EXPECT_EQ(problem.canonical_layout(kStateIndices).shape, (Four{3, 0, 0, 0}));
}

TEST(Layout, BytesCountStrides) {
  Problem problem = forward();
  EXPECT_EQ(problem.bytes(kQ), 2 * 70 * 2 * 16 * 2);
  EXPECT_EQ(problem.bytes(kG), 2 * 70 * 4 * 16 * 4);
  EXPECT_EQ(problem.bytes(kInitialState), 0) << "absent";
  problem.set(kQ, TensorLayout::strided(DType::kBF16, {2, 70, 2, 16}, {70 * 64, 64, 16, 1}));
  EXPECT_EQ(problem.bytes(kQ), ((1 * 70 + 69) * 64 + 16 + 15 + 1) * 2);
}

TEST(Layout, DefaultDtypes) {
  const Problem half = forward();
  EXPECT_EQ(half[kV].dtype, DType::kBF16);
  EXPECT_EQ(half[kG].dtype, DType::kF32);
  EXPECT_EQ(half[kBeta].dtype, DType::kF32);
  EXPECT_EQ(half[kO].dtype, DType::kBF16);
  EXPECT_FALSE(half.has(kFinalState));
  const Problem full = Problem::make(Operation::kGateCumsum, {.T = 4, .K = 8}, DType::kF64);
  EXPECT_EQ(full[kG].dtype, DType::kF64);
  EXPECT_EQ(full[kGamma].dtype, DType::kF64);
}

TEST(Layout, Scale) {
  Problem problem = forward();
  EXPECT_DOUBLE_EQ(problem.effective_scale(), 0.25);
  problem.scale = 0.0;
  EXPECT_EQ(problem.effective_scale(), 0.0);
}

TEST(View, AddressesAndStateLayout) {
  Problem problem = forward();
  problem.set(kInitialState, DType::kF32).state_v_first = true;
  const Problem validated = problem.validated().value();
  std::array<float, 2 * 4 * 24 * 16> buffer{};
  Args args;
  args.in(kInitialState, buffer.data());
  const View view = state_view_of(validated, args, kInitialState);
  ASSERT_TRUE(view);
  EXPECT_EQ(view.shape, (Four{2, 4, 16, 24})) << "as (K, V)";
  // Element (n, hv, k, v) lies at [n, hv, v, k].
  EXPECT_EQ(reinterpret_cast<float*>(view.at(1, 2, 3, 5)) - buffer.data(),
            ((1 * 4 + 2) * 24 + 5) * 16 + 3);
  EXPECT_FALSE(view_of(validated, args, kFinalState));
}

TEST(Signature, EveryOperationHasATable) {
  for (int i = 0; i < kOperationCount; ++i) {
    const auto operation = static_cast<Operation>(i);
    const auto specs = tensors_of(operation);
    ASSERT_FALSE(specs.empty()) << name_of(operation);
    std::set<TensorId> seen;
    bool output = false;
    for (const TensorSpec& spec : specs) {
      EXPECT_TRUE(seen.insert(spec.id).second) << name_of(spec.id) << " twice";
      EXPECT_FALSE(spec.about.empty());
      EXPECT_EQ(spec.shape.front(), '[');
      EXPECT_EQ(spec.shape.back(), ']');
      output |= spec.role == Role::kOutput;
    }
    EXPECT_TRUE(output) << name_of(operation);
  }
  EXPECT_TRUE(tensors_of(static_cast<Operation>(kOperationCount)).empty());
  EXPECT_TRUE(tensors_of(static_cast<Operation>(-1)).empty());
}

TEST(Names, AreDistinctAndTotal) {
  std::set<std::string_view> tensors;
  for (int i = 0; i < kTensorCount; ++i) tensors.insert(name_of(static_cast<TensorId>(i)));
  EXPECT_EQ(tensors.size(), static_cast<std::size_t>(kTensorCount));
  EXPECT_EQ(tensors.count(""), 0u);
  std::set<std::string_view> operations;
  for (int i = 0; i < kOperationCount; ++i) operations.insert(name_of(static_cast<Operation>(i)));
  EXPECT_EQ(operations.size(), static_cast<std::size_t>(kOperationCount));
  EXPECT_EQ(name_of(kQ), "q");
  EXPECT_EQ(name_of(kALog), "A_log");
  EXPECT_EQ(name_of(kDbetaPartial), "dbeta_partial");
  EXPECT_EQ(name_of(Operation::kIntraBackward), "intra_bwd");
  EXPECT_EQ(name_of(static_cast<TensorId>(-1)), "unknown tensor");
  EXPECT_EQ(name_of(static_cast<TensorId>(kTensorCount)), "unknown tensor");
  EXPECT_EQ(name_of(static_cast<Operation>(99)), "unknown operation");
  EXPECT_EQ(name_of(static_cast<DType>(99)), "unknown dtype");
  EXPECT_EQ(name_of(static_cast<Gate>(99)), "unknown gate");
  EXPECT_EQ(name_of(static_cast<DeviceType>(99)), "unknown device");
  EXPECT_STREQ(name_of(static_cast<StatusCode>(99)), "unknown status");
  EXPECT_STREQ(name_of(StatusCode::kUnsupported), "unsupported");
}

TEST(Version, LibraryMatchesHeaders) {
  const std::string headers = std::to_string(KDA_VERSION_MAJOR) + "." +
                              std::to_string(KDA_VERSION_MINOR) + "." +
                              std::to_string(KDA_VERSION_PATCH);
  EXPECT_EQ(version(), headers);
}

TEST(Result, ValueThrowsTheStatus) {
  const Result<int> good = 3;
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(good.value(), 3);
  EXPECT_TRUE(good.status().ok());
  const Result<int> bad = Status(StatusCode::kUnsupported, "no such thing");
  EXPECT_FALSE(bad.ok());
  try {
    (void)bad.value();
    FAIL() << "expected kda::Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), StatusCode::kUnsupported);
    EXPECT_STREQ(error.what(), "no such thing");
  }
}

}  // namespace
}  // namespace kda
