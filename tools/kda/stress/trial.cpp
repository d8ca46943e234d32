#include "stress/trial.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "check.h"
#include "stress/inputs.h"

namespace kda::stress {

using cases::Case;
using cases::HostTensor;
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

/// Each row times r of (3.1) of the row of x.
void scale_by_norm(HostTensor& tensor, const HostTensor& x) {
  const int64_t K = x.shape.back();
  for (int64_t row = 0; row < x.count(); row += K) {
    double squares = 1e-6;
    for (int64_t i = row; i < row + K; ++i) squares += x.get(i) * x.get(i);
    for (int64_t i = row; i < row + K; ++i) tensor.set(i, tensor.get(i) / std::sqrt(squares));
  }
}

/// q and k of a backward as the recurrence sees them, and the gradients of those.
struct SeenRows {
  TensorMap inputs;
  TensorMap gradients;
};

Result<SeenRows> seen_rows(const Trial& trial) {
  Draw draw = trial.draw;
  Problem& problem = draw.problem;
  SeenRows seen{trial.inputs.inputs, {}};
  for (const TensorId id : {kQ, kK, kV, kDo}) {  // of one type
    problem.set(id, DType::kF64);
    seen.inputs.at(id) = cases::converted(seen.inputs.at(id), DType::kF64);
  }
  if (problem.qk_l2norm) {
    for (const TensorId id : {kQ, kK}) {
      scale_by_norm(seen.inputs.at(id), HostTensor(seen.inputs.at(id)));
    }
  }
  problem.qk_l2norm = false;
  problem.set(kDq, DType::kF64).set(kDk, DType::kF64);
  Result<TensorMap> outputs = expected_of(draw, seen.inputs);
  if (!outputs.ok()) return outputs.status();
  seen.gradients = std::move(*outputs);
  return seen;
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

Result<double> largest_term_of_dg(const Trial& trial) {
  const Result<SeenRows> seen = seen_rows(trial);
  if (!seen.ok()) return seen.status();
  double largest = 0;
  for (const auto& [rows, gradient] : {std::pair{kQ, kDq}, std::pair{kK, kDk}}) {
    const HostTensor& x = seen->inputs.at(rows);
    const HostTensor& dx = seen->gradients.at(gradient);
    for (int64_t i = 0; i < x.count(); ++i) {
      largest = std::max(largest, std::fabs(x.get(i) * dx.get(i)));
    }
  }
  return largest;
}

Result<HostTensor> gradient_before_norm(const Trial& trial, TensorId gradient) {
  Result<SeenRows> seen = seen_rows(trial);
  if (!seen.ok()) return seen.status();
  HostTensor dy = std::move(seen->gradients.at(gradient));
  scale_by_norm(dy, trial.inputs.inputs.at(gradient == kDq ? kQ : kK));
  return dy;
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
    for (auto& [id, tensor] : trial.emulated) {
      const DType asked = draw.problem[id].dtype;
      if (size_of(asked) == 2) tensor = cases::converted(tensor, asked);
    }
  }
  return trial;
}

}  // namespace kda::stress
