#include "stress/trial.h"

#include <algorithm>
#include <array>
#include <utility>

#include "check.h"
#include "stress/inputs.h"

namespace kda::stress {

using cases::Case;
using cases::TensorMap;
using enum TensorId;

namespace {

/// The problem in float64, states updated in place included.
Problem exact_problem(const Draw& draw) {
  Problem problem = draw.problem;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kOutput && problem.has(spec.id)) problem.set(spec.id, DType::kF64);
  }
  if (draw.state_in_place) problem.set(kInitialState, DType::kF64);
  return problem;
}

}  // namespace

Result<TensorMap> expected_of(const Draw& draw, const Case& inputs) {
  return expected_of(draw, inputs.inputs);
}

Result<TensorMap> expected_of(const Draw& draw, const TensorMap& inputs) {
  TensorMap exact = inputs;
  if (draw.state_in_place) {
    exact[kInitialState] = cases::converted(exact.at(kInitialState), DType::kF64);
  }
  cases::Conditions conditions;
  conditions.options.implementation = "reference";
  conditions.state_in_place = draw.state_in_place;
  Result<cases::GuardedOutcome> outcome = run_guarded(exact_problem(draw), exact, conditions);
  if (!outcome.ok()) return outcome.status();
  return std::move(outcome->outputs);
}

DType coarser(DType a, DType b) {
  constexpr std::array kOrder = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  const auto rank = [&](DType dtype) { return std::find(kOrder.begin(), kOrder.end(), dtype); };
  return rank(a) < rank(b) ? b : a;
}

DType io_of(const Problem& problem) {
  return problem[tensors_of(problem.operation).front().id].dtype;
}

DType saved_dtype(const Problem& problem) {
  DType coarsest = DType::kF64;
  if (problem.operation != Operation::kChunkBackward) return coarsest;
  for (const TensorId id : {kH, kAqk, kA}) {
    if (problem.has(id)) coarsest = coarser(coarsest, problem[id].dtype);
  }
  return coarsest;
}

bool is_whole(Operation operation) {
  return operation == Operation::kChunkForward || operation == Operation::kChunkBackward;
}

Result<Trial> prepare(const Draw& draw, bool on_device) {
  Trial trial;
  trial.draw = draw;
  Result<Case> inputs = inputs_of(draw);
  if (!inputs.ok()) return inputs.status();
  trial.inputs = std::move(*inputs);
  if (on_device) {
    Result<Case> earlier = inputs_of(draw, 1);
    if (!earlier.ok()) return earlier.status();
    trial.earlier = std::move(earlier->inputs);
  }
  Result<TensorMap> expected = expected_of(draw, trial.inputs);
  if (!expected.ok()) return expected.status();
  trial.expected = std::move(*expected);
  const DType halves = coarser(io_of(draw.problem), saved_dtype(draw.problem));
  const bool needed = on_device || size_of(saved_dtype(draw.problem)) == 2;
  if (needed && is_whole(draw.problem.operation) && size_of(halves) == 2) {
    trial.emulated = cases::rounding_of(trial.inputs, halves);
  }
  return trial;
}

}  // namespace kda::stress
