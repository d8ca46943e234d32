// Plans with a limit of the workspace: the bits of those without one, however many slices of
// sequences and heads they run in, in guarded memory and as a graph.
#include <array>
#include <string>

#include <gtest/gtest.h>

#include "core/slices.h"
#include "cuda/device_case.h"
#include "cuda/generic/pipeline.h"
#include "execute.h"
#include "generate.h"
#include "support/names.h"
#include "support/per_family.h"

namespace kda::test {
namespace {

class WorkspaceLimit : public PerFamily {
 protected:
  std::size_t workspace_of(const Problem& problem, std::size_t limit) const {
    Options within = options();
    within.workspace_limit = limit;
    return make_plan(problem, device(), within).value().workspace_bytes();
  }

  /// The outputs of a problem within parts of its workspace, at last within little more than
  /// `smallest` needs, are those without a limit.
  void expect_same(const Problem& problem, const Problem& smallest, const Case& c) const {
    const std::size_t all = workspace_of(problem, 0);
    Conditions conditions;
    conditions.options = options();
    conditions.device = device();
    const auto whole = run_guarded(problem, c.inputs, conditions);
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    const std::size_t least = workspace_of(smallest, 0);
    for (const std::size_t limit : {all * 2 / 3, all * 2 / 5, least + least / 8}) {
      ASSERT_LT(workspace_of(problem, limit), all);
      conditions.options.workspace_limit = limit;
      const auto parts = run_guarded(problem, c.inputs, conditions);
      ASSERT_TRUE(parts.ok()) << parts.status().message();
      SCOPED_TRACE(std::string(name_of(problem.operation)) + " within " + std::to_string(limit));
      expect_same_bits(whole->outputs, parts->outputs);
    }
  }
};

/// The same problem with one sequence and key head.
Problem one_head(Problem problem) {
  problem.sizes.HV /= problem.sizes.H;
  problem.sizes.H = 1;
  if (!problem.packed()) problem.sizes.B = 1;
  return problem;
}

// The gradients of the gate's parameters are sums over all sequences.
TEST_P(WorkspaceLimit, NoBitDependsOnIt) {
  CaseSpec spec;
  spec.sizes = {5, 200, 2, 4, 64, 128, 0, 0};
  spec.io = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  const Case c = cases::generate(spec);
  for (const Problem& problem : {cases::forward_problem(c), cases::backward_problem(c)}) {
    expect_same(problem, one_head(problem), c);
  }
}

TEST_P(WorkspaceLimit, OfPackedSequencesHeadsAreCut) {
  CaseSpec spec = fitted(packed_spec({0, 65, 65, 200, 290}));
  spec.sizes.H = 4;
  spec.sizes.HV = 8;
  const Case c = cases::generate(spec);
  for (const Problem& problem : {cases::forward_problem(c), cases::backward_problem(c)}) {
    expect_same(problem, one_head(problem), c);
  }
}

// On Hopper these are walked in segments.
TEST_P(WorkspaceLimit, LongSequencesAreCutApart) {
  CaseSpec spec;
  spec.sizes = {3, 4200, 1, 1, 64, 64, 0, 0};
  spec.io = DType::kBF16;
  const Case c = cases::generate(spec);
  const Problem problem = cases::forward_problem(c);
  expect_same(problem, one_head(problem), c);
}

KDA_FOR_EACH_CUDA_FAMILY(WorkspaceLimit);

// Needs no GPU: where the slices put what their sums over the batch are made of.
TEST(PipelineSlices, PartsOfGateGradientsLieAsInOnePiece) {
  constexpr int64_t kRowsOfSequence = 2;
  Problem problem =
      Problem::make(Operation::kChunkBackward, {5, 100, 2, 4, 16, 16, 0, 0}, DType::kBF16);
  problem = problem.set(TensorId::kDv, DType::kBF16).validated().value();
  std::array<float, 4096> kept{};
  const int64_t row = (problem.sizes.HV / 2) * (problem.sizes.K + 1);
  for (const Slice& slice : slices_of(problem, {2, 3})) {
    const int64_t rows = kRowsOfSequence * slice.problem.sizes.B;
    cuda::Pipeline pipeline(slice, {}, kept.data(), nullptr);
    const cuda::Tensor parts = pipeline.gate_partials(rows);
    EXPECT_EQ(static_cast<float*>(parts.data),
              kept.data() + kRowsOfSequence * slice.first_sequence * row);
    const cuda::PipelineWorkspace workspace = pipeline.workspace().value();
    EXPECT_EQ(workspace.own, 0U);
    EXPECT_EQ(workspace.kept, (kRowsOfSequence * 5 * row * sizeof(float) + 255) / 256 * 256);
  }
}

}  // namespace
}  // namespace kda::test
