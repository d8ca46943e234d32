// The stages, run one after another, against the token recurrence and its exact gradient.
#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "reference_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr double kTolerance = 1e-12;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr std::array kForwardStages = {Operation::kGateCumsum, Operation::kIntra, Operation::kWu,
                                       Operation::kStateScan, Operation::kOutput};
constexpr std::array kBackwardStages = {Operation::kReverseScan, Operation::kWyBackward,
                                        Operation::kIntraBackward};

/// Runs the stages on whatever is in `tensors`, adding every output to it.
template <std::size_t count>
void run_stages(const Problem& whole, const std::array<Operation, count>& stages,
                Tensors& tensors) {
  for (const Operation operation : stages) {
    Problem stage = Problem::make(operation, whole.sizes, DType::kF64);
    stage.scale = whole.scale;
    stage.chunk_size = whole.chunk_size;
    stage.state_v_first = whole.state_v_first;
    for (const TensorSpec& spec : tensors_of(operation)) {
      if (spec.role == Role::kInput && tensors.contains(spec.id)) {
        stage.set(spec.id, spec.id == kCuSeqlens ? DType::kI64 : DType::kF64);
      }
    }
    for (auto& [id, values] : run(want_all(stage), tensors)) tensors[id] = std::move(values);
  }
}

void expect_near(const Tensors& reference, const Tensors& tensors) {
  for (const auto& [id, values] : reference) {
    if (!tensors.contains(id)) continue;
    EXPECT_LE(relative_error(values, tensors.at(id)), kTolerance) << name_of(id);
  }
}

struct Variant {
  const char* name;
  int64_t T;
  int32_t chunk_size;
  int64_t H;
  int64_t HV;
  double gate;   ///< factor of the ordinary gates
  double reset;  ///< gate of every 37th token
  double beta;   ///< factor of the ordinary write strengths
  bool with_state;
  std::vector<int64_t> lengths;  ///< packed if there are any

  friend std::ostream& operator<<(std::ostream& stream, const Variant& variant) {
    return stream << variant.name;
  }
};

class Stages : public testing::TestWithParam<Variant> {
 protected:
  Stages() : whole_(Problem::make(Operation::kChunkBackward, sizes(), DType::kF64)) {
    const Variant& variant = GetParam();
    whole_.chunk_size = variant.chunk_size;
    if (variant.with_state) {
      whole_.set(kInitialState, DType::kF64).set(kDfinalState, DType::kF64);
    }
    if (!variant.lengths.empty()) pack(whole_, variant.lengths);
    inputs_ = random_inputs(whole_, 11);
    if (!variant.lengths.empty()) inputs_[kCuSeqlens] = starts_of(variant.lengths);
    for (double& beta : inputs_[kBeta]) beta *= variant.beta;
    Values& g = inputs_[kG];
    const auto row = static_cast<std::size_t>(variant.HV * whole_.sizes.K);
    for (std::size_t i = 0; i < g.size(); ++i) {
      g[i] = variant.reset != 0 && i / row % 37 == 5 ? variant.reset : variant.gate * g[i];
    }
  }

  static Sizes sizes() {
    const Variant& variant = GetParam();
    return {.B = variant.lengths.empty() ? 2 : 1,
            .T = variant.T,
            .H = variant.H,
            .HV = variant.HV,
            .K = 6,
            .V = 5};
  }

  /// The forward inputs of the whole problem.
  Problem forward() const {
    Problem problem = with_operation(whole_, Operation::kChunkForward);
    return want_all(problem);
  }

  Problem whole_;
  Tensors inputs_;
};

TEST_P(Stages, ComposeToTheForward) {
  Tensors tensors = inputs_;
  run_stages(whole_, kForwardStages, tensors);
  const Tensors expected = run(forward(), inputs_);
  ASSERT_EQ(expected.size(), 5u);  // o, final_state, h, Aqk, A
  expect_near(expected, tensors);
  EXPECT_EQ(expected.at(kAqk), tensors.at(kAqk));
  EXPECT_EQ(expected.at(kA), tensors.at(kA));
}

TEST_P(Stages, ComposeToTheBackward) {
  Tensors tensors = inputs_;
  run_stages(whole_, kForwardStages, tensors);
  run_stages(whole_, kBackwardStages, tensors);
  const Tensors expected = run(want_all(whole_), inputs_);
  ASSERT_EQ(expected.size(), 6u);  // dq, dk, dv, dg, dbeta, dinitial_state
  expect_near(expected, tensors);
}

// (5.7): dq_partial is s 2^Gamma dq_raw.
TEST_P(Stages, RawDqIsTheStatePartOfDqWithoutGateAndScale) {
  Tensors tensors = inputs_;
  run_stages(whole_, kForwardStages, tensors);
  run_stages(whole_, kBackwardStages, tensors);
  Values dq = tensors.at(kDqRaw);
  for (std::size_t i = 0; i < dq.size(); ++i) {
    dq[i] *= whole_.effective_scale() * std::exp2(tensors.at(kGamma)[i]);
  }
  EXPECT_LE(relative_error(dq, tensors.at(kDqPartial)), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Reference, Stages,
    testing::Values(Variant{"tail", 150, 64, 1, 2, 1, 0, 1, true, {}},
                    Variant{"grouped", 97, 32, 2, 4, 1, 0, 1, true, {}},
                    Variant{"one_token", 1, 64, 1, 1, 1, 0, 1, true, {}},
                    Variant{"no_state", 128, 64, 1, 1, 1, 0, 1, false, {}},
                    Variant{"no_decay", 130, 64, 1, 1, 0, 0, 1, true, {}},
                    Variant{"strong_decay", 150, 64, 1, 2, 39, 0, 1, true, {}},
                    Variant{"large_beta", 150, 64, 1, 2, 0.1, 0, 2, true, {}},
                    Variant{"deep", 150, 64, 1, 2, 1, -1000, 1, true, {}},
                    Variant{"reset", 150, 64, 1, 2, 1, -kInfinity, 1, true, {}},
                    Variant{"packed", 300, 64, 1, 2, 1, 0, 1, true, {0, 1, 64, 0, 65, 130, 0}},
                    Variant{"packed_32", 260, 32, 2, 2, 1, -60, 1, false, {33, 0, 31, 190}}),
    [](const auto& variant) { return std::string(variant.param.name); });

// (4.7) by its definition: (I + L) A = I with L from (4.6).
TEST(ReferenceStages, TheInverseTimesItsMatrixIsOne) {
  Problem intra = Problem::make(Operation::kIntra, {.T = 64, .K = 4, .V = 1}, DType::kF64);
  Tensors tensors = random_inputs(intra, 12);
  tensors[kGamma].assign(tensors[kGamma].size(), 0.0);
  for (double& beta : tensors[kBeta]) beta *= 2;
  const Values A = run(want_all(intra), tensors).at(kA);
  const Values& k = tensors.at(kK);
  Values product(std::size_t{64} * 64);
  Values identity(std::size_t{64} * 64);
  for (std::size_t i = 0; i < 64; ++i) {
    identity[i * 64 + i] = 1;
    for (std::size_t j = 0; j < 64; ++j) {
      product[i * 64 + j] = A[i * 64 + j];
      for (std::size_t m = 0; m < i; ++m) {
        double L = 0;
        for (std::size_t x = 0; x < 4; ++x) L += k[i * 4 + x] * k[m * 4 + x];
        product[i * 64 + j] += tensors.at(kBeta)[i] * L * A[m * 64 + j];
      }
    }
  }
  EXPECT_LE(relative_error(identity, product), 1e-13);
}

// (5.14)-(5.15), which the stage replaces by (5.28).
TEST(ReferenceStages, TheGradientOfLIsTheSandwichOfM) {
  Problem whole = Problem::make(Operation::kChunkBackward, {.T = 20, .K = 3, .V = 4}, DType::kF64);
  Tensors t = random_inputs(whole, 13);
  run_stages(whole, kForwardStages, t);
  run_stages(whole, kBackwardStages, t);
  constexpr std::size_t kRows = 20;
  constexpr std::size_t kC = 64;
  Values inner(kRows * kRows);  // tril(M . beta, -1); h = 0, so that M is dv' v^T
  for (std::size_t i = 0; i < kRows; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      for (std::size_t x = 0; x < 4; ++x) {
        inner[i * kRows + j] += t[kDvNew][i * 4 + x] * t[kV][j * 4 + x] * t[kBeta][j];
      }
    }
  }
  Values dL(kRows * kC);
  for (std::size_t i = 0; i < kRows; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      for (std::size_t a = 0; a < kRows; ++a) {
        for (std::size_t b = 0; b < kRows; ++b) {
          dL[i * kC + j] -= t[kA][a * kC + i] * inner[a * kRows + b] * t[kA][j * kC + b];
        }
      }
    }
  }
  EXPECT_LE(relative_error(dL, t[kDL]), kTolerance);
}

// What is left out of the signature counts as zero, so the parts add up.
TEST(ReferenceStages, IntraBackwardAddsThePartials) {
  Problem problem = Problem::make(Operation::kIntraBackward,
                                  {.T = 70, .H = 1, .HV = 2, .K = 3, .V = 1}, DType::kF64);
  want_all(problem);
  Problem with_partials = problem;
  for (TensorId id : {kDqPartial, kDkPartial, kDgPartial, kDbetaPartial}) {
    with_partials.set(id, DType::kF64);
  }
  Tensors inputs = random_inputs(with_partials, 14);
  for (double& gamma : inputs[kGamma]) gamma = 0;
  Tensors without = run(problem, inputs);
  const Tensors with = run(with_partials, inputs);
  for (std::size_t i = 0; i < without[kDg].size(); ++i) without[kDg][i] += inputs[kDgPartial][i];
  for (std::size_t i = 0; i < without[kDbeta].size(); ++i) {
    without[kDbeta][i] += inputs[kDbetaPartial][i];
  }
  for (std::size_t i = 0; i < without[kDq].size(); ++i) {
    for (std::size_t head = 0; head < 2; ++head) {
      const std::size_t at = (i / 3 * 2 + head) * 3 + i % 3;
      without[kDq][i] += inputs[kDqPartial][at];
      without[kDk][i] += inputs[kDkPartial][at];
    }
  }
  expect_near(without, with);
}

}  // namespace
}  // namespace kda
