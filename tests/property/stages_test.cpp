// The stages, one after the other, are the whole forward and backward.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"

namespace kda::test {
namespace {

/// Runs stages on a growing set of tensors; all intermediates have one dtype.
class Stages {
 public:
  Stages(const Case& c, const std::string& family, DType dtype)
      : c_(c), conditions_(choosing(family)), dtype_(dtype), tensors_(c.inputs) {
    conditions_.arrangement =
        *rc::gen::element(Arrangement::kContiguous, Arrangement::kPadded, Arrangement::kTransposed);
  }

  /// Puts a tensor in place of a stage's output, as fp64.
  Stages& give(TensorId id, const HostTensor& tensor) {
    HostTensor wide(DType::kF64, tensor.shape);
    for (int64_t i = 0; i < tensor.count(); ++i) wide.set(i, tensor.get(i));
    tensors_[id] = std::move(wide);
    return *this;
  }

  const HostTensor& operator[](TensorId id) const { return tensors_.at(id); }

  /// Runs a stage with all its inputs that are there, for the outputs given.
  Stages& run(Operation operation, std::initializer_list<TensorId> outputs) {
    Problem problem = c_.forward;
    problem.operation = operation;
    problem.tensors = {};
    if (operation != Operation::kGateCumsum) {
      problem.gate = Gate::kNone;
      problem.lower_bound = 0;
    }
    for (const TensorSpec& spec : tensors_of(operation)) {
      const auto found = tensors_.find(spec.id);
      if (spec.role == Role::kInput && found != tensors_.end()) {
        problem.set(spec.id, found->second.dtype);
      }
    }
    for (const TensorId id : outputs) problem.set(id, dtype_);
    for (auto& [id, tensor] : run_operation(problem, tensors_, conditions_)) {
      tensors_[id] = std::move(tensor);
    }
    return *this;
  }

  TensorMap take(std::initializer_list<TensorId> ids) const {
    TensorMap taken;
    for (const TensorId id : ids) taken[id] = tensors_.at(id);
    return taken;
  }

  /// The tensors that `names` has.
  TensorMap take(const TensorMap& names) const {
    TensorMap taken;
    for (const auto& [id, tensor] : names) taken[id] = tensors_.at(id);
    return taken;
  }

 private:
  const Case& c_;
  Conditions conditions_;
  DType dtype_;
  TensorMap tensors_;
};

CaseSpec staged_case(bool gates) {
  CaseSpec spec = *any_case({.gates = gates, .reduced_types = false});
  spec.qk_l2norm = spec.beta_sigmoid = spec.allow_neg_eigval = false;
  if (spec.family == Family::kSmall) spec.family = Family::kUnit;
  return spec;
}

DType stage_dtype(const std::string& family) {
  return family == "reference" ? DType::kF64 : DType::kF32;
}

/// The chunked forms of section 4 and 5 clamp the decay at -40 and set dg to 0 there, the float64
/// recurrence does not; the difference is below 1e-15 of the outputs but not of dg in fp64.
void clamp(Case& c) {
  if (c.forward.gate != Gate::kNone) return;
  HostTensor& g = c.inputs.at(kG);
  for (int64_t i = 0; i < g.count(); ++i) g.set(i, std::max(g.get(i), -39.0));
}

Stages& forward(Stages& stages) {
  return stages.run(Operation::kIntra, {kAqk, kA})
      .run(Operation::kWu, {kW, kU, kKg, kQg})
      .run(Operation::kStateScan, {kH, kVNew, kFinalState})
      .run(Operation::kOutput, {kO});
}

Stages& backward(Stages& stages) {
  return stages.run(Operation::kIntra, {kAqk, kA})
      .run(Operation::kWu, {kW, kU, kKg, kQg})
      .run(Operation::kStateScan, {kH, kVNew})
      .run(Operation::kReverseScan, {kDh, kDvNew, kDinitialState})
      .run(Operation::kWyBackward,
           {kDv, kDqPartial, kDkPartial, kDgPartial, kDbetaPartial, kDP, kDL})
      .run(Operation::kIntraBackward, {kDq, kDk, kDg, kDbeta});
}

/// The largest error of an element of gamma in units of 2^-24, relative where |gamma| > 1: a sum of
/// terms of one sign has no more than its terms, and its rounding to fp32.
double units_of_error(const HostTensor& gamma, const HostTensor& exact) {
  double worst = 0;
  for (int64_t i = 0; i < exact.count(); ++i) {
    const double error = std::fabs(gamma.get(i) - exact.get(i));
    worst = std::max(worst, error / std::max(1.0, std::fabs(exact.get(i))) * 0x1p24);
  }
  return worst;
}

/// The rounding of gamma is an input of all later stages: 2^(Gamma_i - Gamma_j) has the absolute
/// error of Gamma as its relative one (6.5). With gates of -40 a token one rounding to fp32 costs
/// more than the limit of fp32 arithmetic, in float64 too: 1.02e-5 of final_state for
/// "deep B1 T96 H1 HV1 K3 V1 fp32 no-h0 seed 49", where the fp32 stages have 1.01e-5 and against
/// the float64 stages of the same gamma 8.7e-8. So gamma is held to its rounding, and what follows
/// to the float64 stages of the same gamma (7.3: the same rounded inputs). Those of family
/// `reference` are held to the whole operation, with nothing rounded.
void check_composition(const Case& c, const TensorMap& whole, Stages& (*rest)(Stages&)) {
  Stages exact(c, "reference", DType::kF64);
  exact.run(Operation::kGateCumsum, {kGamma});
  // A sum of given gates is rounded once; a gate inside comes from exp and log1p of fp32.
  const double most_units = c.forward.gate == Gate::kNone ? 1.01 : 8;  // found: 0.998, 4.8
  for (const std::string& family : families()) {
    Stages stages(c, family, stage_dtype(family));
    stages.run(Operation::kGateCumsum, {kGamma});
    RC_ASSERT(units_of_error(stages[kGamma], exact[kGamma]) <= most_units);
    TensorMap results = rest(stages).take(whole);
    if (family == "reference") {
      RC_ASSERT(beyond_limits(c, results, whole) == "");
      continue;
    }
    Stages same_gamma(c, "reference", DType::kF64);
    same_gamma.give(kGamma, stages[kGamma]);
    RC_ASSERT(beyond_limits(c, results, rest(same_gamma).take(whole)) == "");
  }
}

RC_GTEST_PROP(StagesComposed, AreTheForward, ()) {
  Case c = cases::generate(staged_case(true));
  clamp(c);
  TensorMap whole = cases::reference_outputs(c).value();
  std::erase_if(whole, [](const auto& row) { return row.first != kO && row.first != kFinalState; });
  check_composition(c, whole, forward);
}

RC_GTEST_PROP(StagesComposed, AreTheBackward, ()) {
  Case c = cases::generate(staged_case(false));
  clamp(c);
  TensorMap whole = cases::reference_outputs(c).value();
  whole.erase(kO);
  whole.erase(kFinalState);
  check_composition(c, whole, backward);
}

// (5.1): the raw dq of the scan, gated and scaled, is the part of dq through the states.
RC_GTEST_PROP(StagesComposed, RawDqIsThePartialOne, ()) {
  Case c = cases::generate(staged_case(false));
  clamp(c);
  for (const std::string& family : families()) {
    Stages stages(c, family, stage_dtype(family));
    stages.run(Operation::kGateCumsum, {kGamma})
        .run(Operation::kIntra, {kAqk, kA})
        .run(Operation::kWu, {kW, kU, kKg, kQg})
        .run(Operation::kStateScan, {kH, kVNew, kDqRaw})
        .run(Operation::kReverseScan, {kDh, kDvNew})
        .run(Operation::kWyBackward, {kDqPartial});
    TensorMap all = stages.take({kDqRaw, kGamma, kDqPartial});
    const HostTensor& raw = all.at(kDqRaw);
    double error = 0;
    double size = 0;
    for (int64_t i = 0; i < raw.count(); ++i) {
      const double finished =
          c.forward.effective_scale() * std::exp2(all.at(kGamma).get(i)) * raw.get(i);
      const double difference = finished - all.at(kDqPartial).get(i);
      error += difference * difference;
      size += finished * finished;
    }
    RC_ASSERT(std::sqrt(error) <= 1e-6 * std::sqrt(size));
  }
}

}  // namespace
}  // namespace kda::test
