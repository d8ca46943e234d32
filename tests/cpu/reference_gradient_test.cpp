// Every gradient of the reference against central differences of its forward.
#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "reference_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr std::array kGradients = {
    std::pair{kQ, kDq},           std::pair{kK, kDk},
    std::pair{kV, kDv},           std::pair{kG, kDg},
    std::pair{kBeta, kDbeta},     std::pair{kALog, kDALog},
    std::pair{kDtBias, kDdtBias}, std::pair{kInitialState, kDinitialState}};

/// A backward problem with its inputs.
struct Example {
  Problem backward;
  Tensors inputs;
};

double inner(const Values& x, const Values& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

/// <o, do> + <final_state, dfinal_state>.
double loss(const Problem& backward, const Tensors& inputs) {
  Problem forward = with_operation(backward, Operation::kChunkForward);
  forward.set(kFinalState, DType::kF64);
  Tensors given = inputs;
  given.erase(kDo);
  given.erase(kDfinalState);
  const Tensors outputs = run(forward, given);
  double sum = inner(outputs.at(kO), inputs.at(kDo));
  if (backward.has(kDfinalState)) sum += inner(outputs.at(kFinalState), inputs.at(kDfinalState));
  return sum;
}

/// d loss / d input along a direction.
double slope(const Example& example, TensorId id, const Values& direction) {
  constexpr double kStep = 1e-5;
  Tensors inputs = example.inputs;
  const auto at = [&](double step) {
    for (std::size_t i = 0; i < direction.size(); ++i) {
      inputs[id][i] = example.inputs.at(id)[i] + step * direction[i];
    }
    return loss(example.backward, inputs);
  };
  return (at(kStep) - at(-kStep)) / (2 * kStep);
}

Problem base(const Sizes& sizes) {
  Problem problem = Problem::make(Operation::kChunkBackward, sizes, DType::kF64);
  problem.set(kInitialState, DType::kF64).set(kDfinalState, DType::kF64);
  return problem;
}

Example plain(const Sizes& sizes) {
  Problem problem = base(sizes);
  return {problem, random_inputs(problem, 1)};
}

Example grouped(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.sizes.H = 2;
  problem.sizes.HV = 4;
  problem.sizes.B = 2;
  return {problem, random_inputs(problem, 2)};
}

Example softplus(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.gate = Gate::kSoftplus;
  problem.qk_l2norm = problem.beta_sigmoid = true;
  problem.set(kALog, DType::kF64).set(kDtBias, DType::kF64);
  return {problem, random_inputs(problem, 3)};
}

Example softplus_without_bias(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.gate = Gate::kSoftplus;
  problem.set(kALog, DType::kF64);
  return {problem, random_inputs(problem, 4)};
}

Example lower_bound(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.gate = Gate::kLowerBound;
  problem.lower_bound = -5;
  problem.qk_l2norm = problem.beta_sigmoid = problem.allow_neg_eigval = true;
  problem.set(kALog, DType::kF64).set(kDtBias, DType::kF64);
  return {problem, random_inputs(problem, 5)};
}

Example lower_bound_alone(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.gate = Gate::kLowerBound;
  problem.lower_bound = -3;
  problem.scale = 1;
  return {problem, random_inputs(problem, 6)};
}

Example packed(const Sizes& sizes) {
  Problem problem = base(sizes);
  problem.gate = Gate::kSoftplus;
  problem.state_v_first = true;
  problem.sizes.HV = 2;
  problem.set(kALog, DType::kF64).set(kDtBias, DType::kF64);
  const int64_t half = sizes.T / 2;
  const std::vector<int64_t> lengths{0, half, 0, sizes.T - half - 2, 0};
  pack(problem, lengths);
  Tensors inputs = random_inputs(problem, 7);
  inputs[kCuSeqlens] = starts_of(lengths);
  return {problem, inputs};
}

Example stateless(const Sizes& sizes) {
  Problem problem = Problem::make(Operation::kChunkBackward, sizes, DType::kF64);
  return {problem, random_inputs(problem, 8)};
}

struct Variant {
  const char* name;
  Example (*make)(const Sizes&);

  friend std::ostream& operator<<(std::ostream& stream, const Variant& variant) {
    return stream << variant.name;
  }
};

class Gradient : public testing::TestWithParam<Variant> {};

TEST_P(Gradient, OfEveryElementIsTheCentralDifference) {
  Example example = GetParam().make({.B = 1, .T = 7, .H = 1, .HV = 1, .K = 3, .V = 2});
  Problem backward = example.backward;
  const Tensors gradients = run(want_all(backward), example.inputs);
  for (const auto& [id, gradient_id] : kGradients) {
    if (!example.inputs.contains(id)) continue;
    Values differences(example.inputs.at(id).size());
    for (std::size_t i = 0; i < differences.size(); ++i) {
      Values direction(differences.size());
      direction[i] = 1;
      differences[i] = slope(example, id, direction);
    }
    EXPECT_LE(relative_error(differences, gradients.at(gradient_id)), 1e-8) << name_of(id);
  }
}

TEST_P(Gradient, OverSeveralChunksIsTheSlopeAlongADirection) {
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  Example example = GetParam().make({.B = 1, .T = 150, .H = 1, .HV = 1, .K = 5, .V = 6});
  Problem backward = example.backward;
  const Tensors gradients = run(want_all(backward), example.inputs);
  for (const auto& [id, gradient_id] : kGradients) {
    if (!example.inputs.contains(id)) continue;
    const Values& gradient = gradients.at(gradient_id);
    Values direction(gradient.size());
    for (double& x : direction) x = normal(random);
    EXPECT_NEAR(slope(example, id, direction), inner(gradient, direction),
                1e-8 * std::sqrt(inner(gradient, gradient)))
        << name_of(id);
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, Gradient,
                         testing::Values(Variant{"plain", plain}, Variant{"grouped", grouped},
                                         Variant{"softplus", softplus},
                                         Variant{"softplus_without_bias", softplus_without_bias},
                                         Variant{"lower_bound", lower_bound},
                                         Variant{"lower_bound_alone", lower_bound_alone},
                                         Variant{"packed", packed},
                                         Variant{"stateless", stateless}),
                         [](const auto& variant) { return std::string(variant.param.name); });

TEST(ReferenceGradient, OfAnAbsentStateIsTheOneAtZero) {
  Example example = stateless({.B = 2, .T = 70, .H = 1, .HV = 2, .K = 4, .V = 3});
  const Tensors without = run(want_all(example.backward), example.inputs);
  example.backward.set(kInitialState, DType::kF64).set(kDfinalState, DType::kF64);
  for (TensorId id : {kInitialState, kDfinalState}) {
    example.inputs[id].assign(static_cast<std::size_t>(elements(example.backward, id)), 0.0);
  }
  EXPECT_EQ(run(example.backward, example.inputs), without);
}

TEST(ReferenceGradient, DoesNotDependOnTheChunkSize) {
  Example example = plain({.B = 1, .T = 150, .H = 1, .HV = 2, .K = 4, .V = 3});
  const Tensors at_64 = run(want_all(example.backward), example.inputs);
  example.backward.chunk_size = 32;
  EXPECT_EQ(run(example.backward, example.inputs), at_64);
}

TEST(ReferenceGradient, EachCanBeAskedForAlone) {
  Example example = softplus({.B = 1, .T = 40, .H = 1, .HV = 2, .K = 4, .V = 3});
  Problem all = example.backward;
  const Tensors gradients = run(want_all(all), example.inputs);
  for (const auto& [id, gradient] : gradients) {
    Problem one = example.backward;
    one.set(id, DType::kF64);
    EXPECT_EQ(run(one, example.inputs).at(id), gradient) << name_of(id);
  }
}

}  // namespace
}  // namespace kda
