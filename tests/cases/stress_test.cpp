// The problems that `kda stress` draws, and that its judge sees what is wrong.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "chance.h"
#include "check.h"
#include "compare.h"
#include "kda/backend.h"
#include "stress/draw.h"
#include "stress/dye.h"
#include "stress/inputs.h"
#include "stress/judge.h"
#include "stress/wrong_list.h"

namespace kda::stress {
namespace {

using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

/// The first problem that a condition holds for.
template <class Condition>
Draw first(const Condition& condition) {
  for (int64_t number = 0; number < 20000; ++number) {
    Draw found = draw(11, number);
    if (condition(found)) return found;
  }
  throw std::runtime_error("no such problem");
}

/// The reference's own outputs, which are right.
TensorMap right_outputs(const Trial& trial) {
  TensorMap outputs;
  for (const auto& [id, tensor] : trial.expected) {
    outputs[id] = cases::converted(tensor, trial.draw.problem[id].dtype);
  }
  return outputs;
}

/// Names of the outputs with faults.
std::set<std::string> faulty(const Trial& trial, const TensorMap& outputs,
                             std::string_view family = "cpu") {
  std::set<std::string> names;
  for (const Fault& fault : faults_of(trial, family, outputs)) names.insert(fault.output);
  return names;
}

using Names = std::set<std::string>;

TEST(StressDraw, OneSeedGivesTheSameProblemEverywhere) {
  EXPECT_EQ(describe(draw(1, 21)),
            "recurrent predicted B1 T69 H3 HV3 K128 V64 bf16 softplus beta-sigmoid cu=0,4,7"
            ",7,13,15,16,20,24,24,25,25,26,30,31,34,35,36,36,36,38,38,40,40,44,47,49,54,57,"
            "58,58,64,64,66,69 seed 10901941715188119463 scale=0 in place NaN in sequence 1"
            "5 workspace x 0.25; transposed; q:bf16 k:bf16 v:bf16 g:fp32 beta:fp32 A_log:fp32 "
            "dt_bias:fp32 initi"
            "al_state:fp32 cu_seqlens:int64 o:bf16 final_state:fp32");
  EXPECT_NE(describe(draw(1, 17)), describe(draw(2, 17)));
  EXPECT_NE(describe(draw(1, 17)), describe(draw(1, 18)));
}

TEST(StressDraw, EveryProblemIsValidAndEveryKindOccurs) {
  std::map<std::string, int> seen;
  for (int64_t number = 0; number < 3000; ++number) {
    const Draw d = draw(5, number);
    const Result<Problem> problem = d.problem.validated();
    ASSERT_TRUE(problem.ok()) << describe(d) << ": " << problem.status().message();
    ++seen[std::string(name_of(d.problem.operation))];
    ++seen[std::string(name_of(d.spec.family))];
    ++seen[std::string(name_of(d.spec.io))];
    ++seen[std::string(name_of(d.problem.gate))];
    ++seen["arrangement " + std::to_string(static_cast<int>(d.arrangement))];
    for (const TensorSpec& spec : tensors_of(d.problem.operation)) {
      if (d.problem.has(spec.id)) ++seen[std::string(name_of(spec.id))];
    }
    seen["V first"] += d.problem.state_v_first;
    seen["in place"] += d.state_in_place;
    seen["no token"] += d.problem.sizes.T == 0;
    seen["less workspace"] += d.repeat_workspace > 0;
    seen["long"] += d.problem.sizes.T > 2000;
    seen["grouped"] += d.problem.sizes.HV > d.problem.sizes.H;
    seen["dyed"] += d.dyed >= 0;
    seen["wrong list"] += d.wrong_list;
    seen["stride 0"] += !d.repeated.empty();
  }
  // Operations, families, dtypes of q, gates, arrangements, tensors and the nine above.
  EXPECT_EQ(seen.size(), kOperationCount + cases::kFamilies.size() + 4 + 3 + 6 + kTensorCount + 9);
  for (const auto& [kind, count] : seen) EXPECT_GE(count, 15) << kind;
}

TEST(StressDraw, StridesAreKnownBeforeTheRun) {
  const Draw repeated = first([](const Draw& d) {
    return !d.repeated.empty() && d.repeated[0].second == 1 && d.problem.sizes.T > 2;
  });
  const TensorId id = repeated.repeated[0].first;
  EXPECT_EQ(arranged(repeated.problem, conditions_of(repeated))[id].stride[1], 0);
  const Draw in_place = first([](const Draw& d) {
    return d.state_in_place && d.repeated.empty() &&
           d.arrangement == cases::Arrangement::kTransposed;
  });
  const Problem problem = arranged(in_place.problem, conditions_of(in_place));
  EXPECT_NE(problem[kInitialState].stride, in_place.problem[kInitialState].stride);
  EXPECT_EQ(problem[kInitialState].stride, problem[kFinalState].stride);
}

TEST(StressInputs, OtherVariantsHaveTheSameShapes) {
  for (int64_t number = 0; number < 20; ++number) {
    const Draw d = draw(3, number);
    const cases::Case plain = inputs_of(d).value();
    const cases::Case other = inputs_of(d, 1).value();
    ASSERT_EQ(plain.inputs.size(), other.inputs.size());
    for (const auto& [id, tensor] : plain.inputs) {
      EXPECT_EQ(tensor.shape, other.inputs.at(id).shape) << name_of(id);
      EXPECT_EQ(tensor.dtype, d.problem[id].dtype) << name_of(id);
    }
  }
}

TEST(StressJudge, RightOutputsHaveNoFault) {
  for (int64_t number = 0; number < 40; ++number) {
    const Trial trial = prepare(draw(3, number), false).value();
    EXPECT_EQ(faulty(trial, right_outputs(trial)), Names{}) << describe(trial.draw);
  }
}

TEST(StressJudge, SeesWrongNumbers) {
  const Trial trial = prepare(first([](const Draw& d) {
                                const Sizes& s = d.problem.sizes;
                                return d.problem.operation == Operation::kChunkForward &&
                                       d.spec.family == cases::Family::kUnit && s.T > 64 &&
                                       s.V > 16 && d.problem.effective_scale() != 0;
                              }),
                              false)
                          .value();
  TensorMap outputs = right_outputs(trial);
  HostTensor& o = outputs.at(kO);
  // One row of one head.
  const int64_t V = trial.draw.problem.sizes.V;
  for (int64_t i = 0; i < V; ++i) o.set(i, 2 * o.get(i));
  EXPECT_EQ(faulty(trial, outputs), Names{"o"});
  o.set(0, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(faulty(trial, outputs), Names{"o"});
}

/// The row of the family that has the operation.
ImplementationInfo row_of(std::string_view family, Operation operation) {
  for (const ImplementationInfo& info : implementations()) {
    if (info.family == family && info.operation == operation) return info;
  }
  throw std::runtime_error("no such row");
}

// beta x 1.0005 is less than bf16 shows. The row is right, so the expectation is made wrong.
TEST(StressJudge, SeesBehind16BitOutputsOnTheCpu) {
  Trial trial = prepare(first([](const Draw& d) {
                          return d.problem.operation == Operation::kRecurrent &&
                                 !d.problem.beta_sigmoid && d.spec.family == cases::Family::kUnit &&
                                 d.problem.sizes.T > 64 && d.problem[kO].dtype == DType::kBF16 &&
                                 !d.problem.has(kFinalState) && d.dyed < 0 &&
                                 d.problem.effective_scale() != 0;
                        }),
                        false)
                    .value();
  const ImplementationInfo cpu = row_of("cpu", Operation::kRecurrent);
  EXPECT_TRUE(judge(trial, cpu, Device{}).faults.empty());
  TensorMap other = trial.inputs.inputs;
  HostTensor& beta = other.at(kBeta);
  beta = cases::converted(beta, DType::kF64);
  for (int64_t i = 0; i < beta.count(); ++i) beta.set(i, 1.0005 * beta.get(i));
  Draw with_fp64_beta = trial.draw;
  with_fp64_beta.problem.set(kBeta, DType::kF64);
  trial.expected = expected_of(with_fp64_beta, other).value();
  const Judgement judgement = judge(trial, cpu, Device{});
  ASSERT_EQ(judgement.faults.size(), 1U) << describe(trial.draw);
  EXPECT_EQ(judgement.faults[0].output, "o");
  EXPECT_EQ(judgement.faults[0].text.rfind("with outputs in fp32: ratio ", 0), 0U)
      << judgement.faults[0].text;
}

TEST(StressDraw, TakesFp32ForOutputsThatStandAlone) {
  int changed = 0;
  for (int64_t number = 0; number < 1000; ++number) {
    const Draw d = draw(5, number);
    const std::optional<Problem> problem = with_fp32_outputs(d);
    if (!problem) continue;
    ++changed;
    EXPECT_TRUE(problem->validated().ok()) << describe(d);
    for (const TensorSpec& spec : tensors_of(d.problem.operation)) {
      const bool kept = spec.role == Role::kInput || size_of(d.problem[spec.id].dtype) != 2 ||
                        (spec.id == kFinalState && d.state_in_place);
      EXPECT_EQ((*problem)[spec.id].dtype, kept ? d.problem[spec.id].dtype : DType::kF32);
    }
  }
  EXPECT_GT(changed, 300);
}

// One channel, normalised, and beta = 1: dg is 6e-5 in size, a difference of terms up to 370 whose
// last bit in fp32 is 2e-5.
TEST(StressJudge, KnowsWhatCancelsInDg) {
  const Trial trial = prepare(draw(103, 153), false).value();
  const auto with_error = [&](double error) {
    TensorMap outputs = right_outputs(trial);
    HostTensor& dg = outputs.at(kDg);
    for (int64_t i = 0; i < dg.count(); ++i) {
      if (dg.get(i) != 0) dg.set(i, dg.get(i) + (i % 2 == 0 ? error : -error));  // but no padding
    }
    return faulty(trial, outputs);
  };
  EXPECT_EQ(with_error(1e-4), Names{});
  EXPECT_EQ(with_error(1e-2), Names{"dg"});
}

/// What is faulty where an output is off by `error`, up and down in turns.
Names faulty_by(double error, TensorId id, const Trial& trial) {
  TensorMap outputs = right_outputs(trial);
  HostTensor& output = outputs.at(id);
  for (int64_t i = 0; i < output.count(); ++i) {
    output.set(i, output.get(i) + (i % 2 == 0 ? error : -error));
  }
  return faulty(trial, outputs);
}

// Seed 8001, problem 49578: twelve equal keys, of which initial_state is a multiple, leave a
// sixteenth of it.
TEST(StressJudge, KnowsThatTokensMayEraseAState) {
  const Trial trial = prepare(draw(8001, 49578), false).value();
  const double size = cases::rms(trial.expected.at(kFinalState));
  EXPECT_LT(10 * size, cases::rms(*trial.inputs.input(kInitialState)));
  EXPECT_EQ(faulty_by(4e-5 * size, kFinalState, trial), Names{});
  EXPECT_EQ(faulty_by(4e-4 * size, kFinalState, trial), Names{"final_state"});
}

// Seed 9601, problem 66125, in fp64: all channels of q are alike, and so are all of k, so that the
// gradient of the normalised q points along it and a millionth is left of it.
TEST(StressJudge, KnowsWhatTheNormLeavesOfAGradient) {
  const Trial trial = prepare(draw(9601, 66125), false).value();
  const double size = cases::rms(trial.expected.at(kDq));
  EXPECT_LT(1e4 * size, cases::rms(gradient_before_norm(trial, kDq).value()));
  EXPECT_EQ(faulty_by(1e-9 * size, kDq, trial), Names{});
  EXPECT_EQ(faulty_by(1e-3 * size, kDq, trial), Names{"dq"});
}

// Seed 8103, problem 40206: all keys of a head are one vector and beta is up to 1.9.
TEST(StressJudge, KnowsWhatScoresOfRepeatedKeysDo) {
  const Trial trial = prepare(draw(8103, 40206), false).value();
  const TensorMap model = cases::score_errors_of(trial.inputs);
  const auto with_error = [&](double factor) {
    TensorMap outputs = right_outputs(trial);
    HostTensor& dv = outputs.at(kDv);
    for (int64_t i = 0; i < dv.count(); ++i) {
      dv.set(i, dv.get(i) + factor * (model.at(kDv).get(i) - dv.get(i)));
    }
    return faulty(trial, outputs);
  };
  const double error =
      cases::compare(trial.inputs, kDv, model.at(kDv), trial.expected.at(kDv)).ratio;
  EXPECT_GT(error, 1e-5);
  EXPECT_LT(error, 1.3e-5);
  EXPECT_EQ(with_error(1.4), Names{});
  EXPECT_EQ(with_error(2.5), Names{"dv"});
}

// Problems of unit keys and beta of at most 1 have next to nothing of it.
TEST(StressJudge, ScoresOfOtherKeysRaiseNoLimit) {
  const Trial trial = prepare(first([](const Draw& d) {
                                return d.problem.operation == Operation::kChunkBackward &&
                                       d.spec.family == cases::Family::kUnit &&
                                       d.problem.sizes.T > 64 && d.problem.sizes.K > 64 &&
                                       d.repeated.empty() && !d.problem.allow_neg_eigval &&
                                       !d.problem.packed() && d.problem.effective_scale() != 0;
                              }),
                              false)
                          .value();
  const TensorMap model = cases::score_errors_of(trial.inputs);
  EXPECT_LT(cases::compare(trial.inputs, kDv, model.at(kDv), trial.expected.at(kDv)).ratio, 1e-6);
}

// Seed 8004, problem 130483: h of 0.1 behind others of 1, whose errors it has.
TEST(StressJudge, KnowsTheWorstBlockOfTheModel) {
  const Trial trial = prepare(draw(8004, 130483), true).value();
  const auto with_error = [&](double factor) {
    TensorMap outputs = right_outputs(trial);
    HostTensor& h = outputs.at(kH);
    const HostTensor& model = trial.emulated.at(kH);
    for (int64_t i = 0; i < h.count(); ++i) {
      h.set(i, h.get(i) + factor * (model.get(i) - h.get(i)));
    }
    return faulty(trial, outputs, "sm90");
  };
  EXPECT_EQ(with_error(1.4), Names{});
  EXPECT_EQ(with_error(1.7), Names{"h"});
}

// Seed 2004, problem 136063: a state in bf16 has 1.7e-3 of its own, which the model's must have
// too.
TEST(StressJudge, TheModelRoundsWhatIsAskedForIn16Bits) {
  const Trial trial = prepare(draw(2004, 136063), true).value();
  const auto error = [&](const HostTensor& state) {
    return cases::compare(trial.inputs, kFinalState, state, trial.expected.at(kFinalState)).ratio;
  };
  const HostTensor& emulated = trial.emulated.at(kFinalState);
  EXPECT_EQ(emulated.dtype, DType::kBF16);
  EXPECT_GT(error(emulated), error(right_outputs(trial).at(kFinalState)));
  EXPECT_GT(error(emulated), 4.2e-3);
}

TEST(StressJudge, SeesNumbersInThePadding) {
  const Trial trial = prepare(first([](const Draw& d) {
                                return d.problem.operation == Operation::kChunkForward &&
                                       d.problem.has(kH) && d.problem.packed() &&
                                       d.spec.cu_seqlens.back() < d.problem.sizes.T;
                              }),
                              false)
                          .value();
  const TensorMap right = right_outputs(trial);
  for (const TensorId id : {kO, kH}) {
    TensorMap outputs = right;
    HostTensor& tensor = outputs.at(id);
    tensor.set(tensor.count() - 1, 1e-7);
    EXPECT_EQ(faulty(trial, outputs), Names{std::string(name_of(id))});
  }
}

TEST(StressJudge, SeesStatesThatShouldHaveStayed) {
  const Trial trial = prepare(first([](const Draw& d) {
                                return d.problem.has(kStateIndices) && d.problem.has(kFinalState) &&
                                       d.problem.sizes.P > d.problem.sequences();
                              }),
                              false)
                          .value();
  const HostTensor& slots = *trial.inputs.input(kStateIndices);
  std::set<int64_t> used;
  for (int64_t i = 0; i < slots.count(); ++i) used.insert(slots.get_int(i));
  TensorMap outputs = right_outputs(trial);
  HostTensor& pool = outputs.at(kFinalState);
  const int64_t size = pool.count() / pool.shape[0];
  for (int64_t slot = 0; slot < pool.shape[0]; ++slot) {
    if (used.count(slot) == 0) pool.set(slot * size, pool.get(slot * size) * (1 + 0x1p-6));
  }
  EXPECT_EQ(faulty(trial, outputs), Names{"final_state"});
}

TEST(StressJudge, SeesTokensThatShouldNotHaveRun) {
  const Trial trial = prepare(first([](const Draw& d) {
                                return d.problem.has(kNumAccepted) && !d.problem.packed() &&
                                       d.problem.sizes.T > 2 && d.problem.sizes.B > 2;
                              }),
                              false)
                          .value();
  const HostTensor& counts = *trial.inputs.input(kNumAccepted);
  const Sizes& s = trial.draw.problem.sizes;
  for (int64_t b = 0; b < s.B; ++b) {
    if (counts.get_int(b) == s.T) continue;
    TensorMap outputs = right_outputs(trial);
    outputs.at(kO).set(((b + 1) * s.T - 1) * s.HV * s.V, 1e-7);
    EXPECT_EQ(faulty(trial, outputs), Names{"o"});
  }
}

TEST(StressInputs, RepeatThemselvesWhereTheStrideIsZero) {
  const Draw d = first([](const Draw& found) {
    return !found.repeated.empty() && found.repeated[0].first == kQ &&
           found.repeated[0].second == 1 && found.problem.sizes.T > 2;
  });
  const cases::Case c = inputs_of(d).value();
  const HostTensor& q = *c.input(kQ);
  const Sizes& s = d.problem.sizes;
  for (int64_t i = 0; i < q.count(); ++i) {
    const int64_t row = s.H * s.K;
    ASSERT_EQ(q.get(i), q.get(i / (s.T * row) * s.T * row + i % row)) << i;
  }
}

TEST(StressInputs, KeysOfEqualChannelsAreNotLong) {
  const Draw d = first([](const Draw& found) {
    const bool repeats = std::count(found.repeated.begin(), found.repeated.end(),
                                    std::pair<TensorId, std::size_t>{kK, 3}) != 0;
    return repeats && !found.problem.qk_l2norm && found.problem.sizes.K > 16 &&
           found.problem.sizes.T > 16;
  });
  const cases::Case c = inputs_of(d).value();
  const HostTensor& k = *c.input(kK);
  const auto K = static_cast<double>(d.problem.sizes.K);
  for (int64_t i = 0; i < k.count(); ++i) ASSERT_LE(K * k.get(i) * k.get(i), 1.01) << i;
}

TEST(StressWrongList, HasOneEntryOutOfRangeWhichTheCpuRefuses) {
  int tried = 0;
  for (int64_t number = 0; number < 200; ++number) {
    const Draw d = draw(12, number);
    if (!d.wrong_list) continue;
    const Trial trial = prepare(d, false).value();
    const std::optional<WrongList> wrong = with_wrong_list(trial);
    if (!wrong) continue;
    const HostTensor& list = wrong->inputs.at(wrong->id);
    int changed = 0;
    for (int64_t i = 0; i < list.count(); ++i) {
      changed += list.get_int(i) != trial.inputs.input(wrong->id)->get_int(i);
    }
    EXPECT_EQ(changed, 1) << describe(d);
    cases::Conditions conditions;
    conditions.options.implementation = "reference";
    conditions.state_in_place = d.state_in_place;
    const Status status = run_guarded(d.problem, wrong->inputs, conditions).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << describe(d);
    EXPECT_EQ(status.message().rfind(name_of(wrong->id), 0), 0U) << status.message();
    ++tried;
  }
  EXPECT_GT(tried, 10);
}

TEST(StressDye, StaysInItsSequenceAndIsSeenInOthers) {
  const Trial trial =
      prepare(first([](const Draw& d) {
                return d.dyed >= 0 && d.problem.operation == Operation::kChunkForward &&
                       !d.problem.packed() && d.problem.sizes.T > 0 && d.spec.io == DType::kF32;
              }),
              false)
          .value();
  const TensorMap dyed = dyed_inputs(trial);
  const HostTensor& plain_v = *trial.inputs.input(kV);
  const int64_t row = plain_v.count() / plain_v.shape[0];
  bool changed = false;
  for (int64_t i = 0; i < plain_v.count(); ++i) {
    const bool own = i / row == trial.draw.dyed;
    const bool same = plain_v.get(i) == dyed.at(kV).get(i);
    EXPECT_TRUE(same || own) << i;
    changed = changed || !same;
  }
  EXPECT_TRUE(changed);

  const TensorMap right = right_outputs(trial);
  TensorMap traced = right;
  HostTensor& o = traced.at(kO);
  o.set(trial.draw.dyed * row, 7);
  EXPECT_EQ(trace_of_dye(trial, right, traced), "");
  o.set((trial.draw.dyed == 0 ? 1 : 0) * row, 7);
  EXPECT_NE(trace_of_dye(trial, right, traced), "");
}

TEST(StressNan, IsOneGateAndMayNotBeHidden) {
  const Trial trial =
      prepare(first([](const Draw& d) {
                return d.dyed >= 0 && d.problem.operation == Operation::kChunkForward &&
                       !d.problem.packed() && d.problem.sizes.T > 1 && d.spec.io == DType::kF32;
              }),
              false)
          .value();
  const TensorMap inputs = nan_inputs(trial);
  int64_t changed = 0;
  for (int64_t i = 0; i < inputs.at(kG).count(); ++i) {
    changed += std::isnan(inputs.at(kG).get(i)) && !std::isnan(trial.inputs.input(kG)->get(i));
  }
  EXPECT_EQ(changed, 1);
  const TensorMap expected = expected_of(trial.draw, inputs).value();
  TensorMap outputs = expected;
  EXPECT_EQ(hidden_nan(expected, outputs), "");
  HostTensor& o = outputs.at(kO);
  int64_t last = o.count() - 1;
  while (last >= 0 && !std::isnan(o.get(last))) --last;
  ASSERT_GE(last, 0);
  o.set(last, 0);
  EXPECT_NE(hidden_nan(expected, outputs), "");
}

// A backward that reads kept checkpoints would have to find the NaN in them.
TEST(StressNan, IsNotAmongGatesOfAForwardThatIsOver) {
  const auto backward = [](bool kept) {
    return prepare(first([kept](const Draw& d) {
                     return d.dyed >= 0 && d.problem.operation == Operation::kChunkBackward &&
                            d.problem.has(kH) == kept && !d.problem.has(kAqk) &&
                            !d.problem.has(kA) && !d.problem.packed() && d.problem.sizes.T > 1 &&
                            d.repeated.empty();
                   }),
                   false)
        .value();
  };
  EXPECT_FALSE(nan_inputs(backward(false)).empty());
  EXPECT_TRUE(nan_inputs(backward(true)).empty());
}

// Between a chunk's last token and its end lies no gate: 2^0, or the difference of two NaN.
TEST(StressNan, MayBeAbsentFromKgOfALastToken) {
  HostTensor nan(DType::kF32, {1, 1, 1, 1});
  HostTensor number = nan;
  nan.set(0, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(hidden_nan({{kKg, nan}}, {{kKg, number}}), "");
  EXPECT_NE(hidden_nan({{kW, nan}}, {{kW, number}}), "");
}

}  // namespace
}  // namespace kda::stress
