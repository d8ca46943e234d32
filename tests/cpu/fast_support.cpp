#include "fast_support.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace kda {

using enum TensorId;

Problem problem_of(const FastCase& c, Operation operation) {
  Problem problem = Problem::make(operation, c.sizes, c.io);
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.role == Role::kOutput) problem.set(spec.id, DType::kNone);
  }
  problem.gate = c.gate;
  if (c.gate == Gate::kLowerBound) problem.lower_bound = -5;
  if (c.gate != Gate::kNone) problem.set(kALog, DType::kF32).set(kDtBias, DType::kBF16);
  problem.qk_l2norm = problem.beta_sigmoid = problem.allow_neg_eigval = c.activations;
  problem.state_v_first = c.v_first;
  problem.chunk_size = c.chunk_size;
  if (c.state) problem.set(kInitialState, DType::kF32);
  if (c.state && operation == Operation::kChunkBackward) problem.set(kDfinalState, DType::kF32);
  if (!c.lengths.empty()) pack(problem, c.lengths);
  return problem;
}

Tensors inputs_of(const FastCase& c, const Problem& problem, unsigned seed) {
  Tensors inputs = random_inputs(problem, seed);
  if (!c.lengths.empty()) inputs[kCuSeqlens] = starts_of(c.lengths);
  return inputs;
}

Problem& want_all_in(Problem& problem, DType dtype) {
  want_all(problem);
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kOutput && problem.has(spec.id)) problem.set(spec.id, dtype);
  }
  return problem;
}

Tensors run_fast(Problem problem, const Tensors& inputs, int32_t threads) {
  return run(want_all_in(problem, DType::kF32), inputs, {threads, false, "cpu"});
}

Tensors run_reference(Problem problem, const Tensors& inputs) {
  return run(want_all(problem), inputs);
}

double rms_ratio(const Values& reference, const Values& x) {
  if (reference.size() != x.size()) return std::numeric_limits<double>::infinity();
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (reference[i] - x[i]) * (reference[i] - x[i]);
    size += reference[i] * reference[i];
  }
  const double count = std::max<double>(1, static_cast<double>(x.size()));
  return std::sqrt(error / count) / (std::sqrt(size / count) + 1e-8);
}

double limit_of(TensorId id) {
  if (id == kDg || id == kDgPartial) return 3e-5;
  if (id == kDALog) return 2e-4;
  if (id == kDdtBias) return 3e-4;
  return 1e-5;
}

void expect_close(const Tensors& reference, const Tensors& x) {
  ASSERT_EQ(reference.size(), x.size());
  for (const auto& [id, values] : reference) {
    ASSERT_TRUE(x.contains(id)) << name_of(id);
    // Written so that a NaN fails.
    EXPECT_TRUE(rms_ratio(values, x.at(id)) <= limit_of(id))
        << name_of(id) << ": ratio " << rms_ratio(values, x.at(id));
  }
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, values] : a) {
    const Values& others = b.at(id);
    ASSERT_EQ(values.size(), others.size()) << name_of(id);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], others[i]) << name_of(id) << "[" << i << "]";
    }
  }
}

}  // namespace kda
