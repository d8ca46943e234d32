// The stages, one after the other, are the whole forward and backward.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::TensorMap;

using enum TensorId;

/// Runs stages on a growing set of tensors; all intermediates have one dtype.
class Stages {
 public:
  Stages(const Case& c, const std::string& family, DType dtype)
      : c_(c), conditions_(choosing(family)), dtype_(dtype), tensors_(c.inputs) {
    conditions_.arrangement =
        *rc::gen::element(Arrangement::kContiguous, Arrangement::kPadded, Arrangement::kTransposed);
  }

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

 private:
  const Case& c_;
  Conditions conditions_;
  DType dtype_;
  TensorMap tensors_;
};

CaseSpec staged_case(bool gates) {
  CaseSpec spec = *any_case({.gates = gates, .reduced_types = false});
  spec.qk_l2norm = spec.beta_sigmoid = spec.allow_neg_eigval = false;
  if (spec.family == cases::Family::kSmall) spec.family = cases::Family::kUnit;
  return spec;
}

DType stage_dtype(const std::string& family) {
  return family == "reference" ? DType::kF64 : DType::kF32;
}

/// The chunked forms of section 4 and 5 clamp the decay at -40 and set dg to 0 there, the float64
/// recurrence does not; the difference is below 1e-15 of the outputs but not of dg in fp64.
void clamp(Case& c) {
  if (c.forward.gate != Gate::kNone) return;
  cases::HostTensor& g = c.inputs.at(kG);
  for (int64_t i = 0; i < g.count(); ++i) g.set(i, std::max(g.get(i), -39.0));
}

RC_GTEST_PROP(StagesComposed, AreTheForward, ()) {
  Case c = cases::generate(staged_case(true));
  clamp(c);
  TensorMap expected = cases::reference_outputs(c).value();
  std::erase_if(expected,
                [](const auto& row) { return row.first != kO && row.first != kFinalState; });
  for (const std::string& family : families()) {
    Stages stages(c, family, stage_dtype(family));
    stages.run(Operation::kGateCumsum, {kGamma})
        .run(Operation::kIntra, {kAqk, kA})
        .run(Operation::kWu, {kW, kU, kKg, kQg})
        .run(Operation::kStateScan, {kH, kVNew, kFinalState})
        .run(Operation::kOutput, {kO});
    RC_ASSERT(beyond_limits(c, stages.take({kO, kFinalState}), expected) == "");
  }
}

RC_GTEST_PROP(StagesComposed, AreTheBackward, ()) {
  Case c = cases::generate(staged_case(false));
  clamp(c);
  TensorMap expected = cases::reference_outputs(c).value();
  expected.erase(kO);
  expected.erase(kFinalState);
  for (const std::string& family : families()) {
    Stages stages(c, family, stage_dtype(family));
    stages.run(Operation::kGateCumsum, {kGamma})
        .run(Operation::kIntra, {kAqk, kA})
        .run(Operation::kWu, {kW, kU, kKg, kQg})
        .run(Operation::kStateScan, {kH, kVNew})
        .run(Operation::kReverseScan, {kDh, kDvNew, kDinitialState})
        .run(Operation::kWyBackward,
             {kDv, kDqPartial, kDkPartial, kDgPartial, kDbetaPartial, kDP, kDL})
        .run(Operation::kIntraBackward, {kDq, kDk, kDg, kDbeta});
    RC_ASSERT(beyond_limits(c, stages.take({kDq, kDk, kDv, kDg, kDbeta, kDinitialState}),
                            expected) == "");
  }
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
    const cases::HostTensor& raw = all.at(kDqRaw);
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
