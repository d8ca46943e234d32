// Fault reports on states, decoding and pools of states. Each name carries its id.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "property/reports.h"
#include "support/calls.h"

namespace kda::test {
namespace {

/// Hands `state` over tokens [begin, end) of a one-row case, by chunks or token by token.
struct Hand {
  const Case& c;
  std::string family;
  HostTensor state;
  TensorMap last;

  void go(int64_t begin, int64_t end, bool chunks) {
    Case part = part_of(c, 0, begin, end, 0);
    part.inputs[kInitialState] = state;
    part.forward = forward_problem(part);
    last = run_operation(chunks ? forward_problem(part) : recurrent_problem(part), part.inputs,
                         choosing(family));
    state = last.at(kFinalState);
  }
};

TEST_P(Reports, DECODE_01_PrefillAndDecodeAgree) {
  const int64_t T = is_hopper() ? 136 : 256;  // of many heads
  CaseSpec spec = small_spec(T);
  spec.io = DType::kBF16;
  spec.gradients = false;
  const Case c = cases::generate(fitted_to_decode(spec));
  const TensorMap expected = cases::reference_outputs(c).value();
  expect_right(c, "chunks");
  attempt([&] {
    TensorMap results = results_of(recurrent_problem(c), c.inputs);
    EXPECT_EQ(beyond_limits(c, results, expected), "") << "step by step";
    const TensorMap whole = results_of(c);
    Hand hand{c, family(), c.inputs.at(kInitialState), {}};
    hand.go(0, 128, true);
    hand.go(128, T, true);
    if (!is_reference()) {  // whose state was rounded to fp32 on the way
      EXPECT_EQ(other_bits(tokens_of(whole.at(kO), 0, 128, T), hand.last.at(kO)), "")
          << "a replay from a boundary of chunks repeats the tail";
    }
    // Hopper rows take single tokens of many heads, of which the reference takes its time.
    const std::vector<int64_t> prefills =
        is_hopper() ? std::vector<int64_t>{128} : std::vector<int64_t>{0, 64, 128, 192};
    for (const int64_t prefill : prefills) {
      hand.state = c.inputs.at(kInitialState);
      hand.go(0, prefill, true);
      TensorMap stepped{{kO, hand.last.at(kO)}};
      for (int64_t t = prefill; t < T; ++t) {
        hand.go(t, t + 1, false);
        HostTensor& o = stepped.at(kO);
        o.bytes.insert(o.bytes.end(), hand.last.at(kO).bytes.begin(), hand.last.at(kO).bytes.end());
      }
      stepped.at(kO).shape[1] = T;
      stepped[kFinalState] = hand.state;
      EXPECT_EQ(beyond(c, stepped, expected), "") << prefill << " tokens at once, then steps";
    }
  });
}

TEST_P(Reports, DECODE_02_OneMoreTokenIsOneStep) {
  for (const int64_t T : {1, 2, 63, 64, 65, 100, 128, 129}) {
    CaseSpec spec = small_spec(T);
    spec.gradients = false;
    const Case c = cases::generate(fitted_to_decode(spec));
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      Hand hand{c, family(), c.inputs.at(kInitialState), {}};
      hand.go(0, T - 1, true);
      hand.go(T - 1, T, false);
      TensorMap results = results_of(c);
      EXPECT_EQ(beyond(c, results, expected), "");
      results[kFinalState] = hand.state;
      std::copy(
          hand.last.at(kO).bytes.begin(), hand.last.at(kO).bytes.end(),
          results.at(kO).bytes.end() - static_cast<std::ptrdiff_t>(hand.last.at(kO).bytes.size()));
      EXPECT_EQ(beyond(c, results, expected), "") << "T " << T;
    });
  }
}

TEST_P(Reports, STATE_01_BothStateLayouts) {
  for (const int64_t V : {64, 128}) {
    for (const bool v_first : {false, true}) {
      CaseSpec spec = small_spec(130);
      spec.sizes.K = 128;
      spec.sizes.V = V;
      spec.state_v_first = v_first;
      expect_right(make(spec));
      spec.gradients = false;
      const Case c = cases::generate(fitted_to_decode(spec));
      const TensorMap expected = cases::reference_outputs(c).value();
      attempt([&] {
        Hand hand{c, family(), c.inputs.at(kInitialState), {}};
        hand.go(0, 128, true);
        hand.go(128, 129, false);
        hand.go(129, 130, false);
        const Difference d = cases::compare(c, kFinalState, hand.state, expected.at(kFinalState));
        EXPECT_LT(d.ratio, limit(1e-5, kFinalState));
      });
    }
  }
}

TEST_P(Reports, STATE_03_FinalStateOnlyIfAskedFor) {
  for (const bool asked : {false, true}) {
    for (const bool state : {false, true}) {
      for (const bool packed : {false, true}) {
        CaseSpec spec = small_spec(70);
        spec.initial_state = state;
        if (packed) spec.cu_seqlens = {0, 20, 70};
        const Case c = make(spec);
        const TensorMap expected = cases::reference_outputs(c).value();
        Problem problem = forward_problem(c);
        if (!asked) problem.set(kFinalState, DType::kNone);
        attempt([&] {
          const TensorMap results = results_of(problem, c.inputs);
          EXPECT_EQ(results.count(kFinalState), asked ? 1u : 0u);
          TensorMap wanted{{kO, expected.at(kO)}};
          if (asked) wanted[kFinalState] = expected.at(kFinalState);
          EXPECT_EQ(beyond(c, results, wanted), "");
          if (asked) {
            EXPECT_EQ(results.at(kFinalState).dtype, DType::kF32);
            EXPECT_EQ(results.at(kFinalState).shape[0], packed ? 2 : 1);
          }
        });
      }
    }
  }
}

TEST_P(Reports, STATE_04_ReducedStatesAreTaken) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Case c = make(small_spec(100));
    give_input(c, kInitialState, cases::converted(c.inputs.at(kInitialState), dtype));
    give_input(c, kDfinalState, cases::converted(c.inputs.at(kDfinalState), dtype));
    expect_right(c);
  }
}

TEST_P(Reports, STATE_05_TwoCallsAreEqualAndInputsStay) {
  for (const bool gradients : {false, true}) {
    CaseSpec spec = small_spec(100);
    spec.gradients = gradients;
    const Case c = make(spec);
    attempt([&] {
      Conditions conditions = choosing(family());
      conditions.repeat = true;  // the harness compares inputs and both results bit for bit
      run_case(c, conditions);
    });
  }
}

// Results do not depend on what outputs and workspace held before: NaN here, zeros there.
TEST_P(Reports, STATE_09_PoisonChangesNothing) {
  CaseSpec spec = small_spec(100);
  spec.gate = Gate::kSoftplus;
  const Case c = make(spec);
  attempt([&] {
    const Conditions conditions = choosing(family());
    for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
      const auto clean =
          cases::execute_operation(problem, c.inputs, conditions.device, conditions.options);
      ASSERT_TRUE(clean.ok()) << clean.status().message();
      EXPECT_EQ(other_bits(clean->outputs, results_of(problem, c.inputs)), "");
    }
  });
}

// The decay of a whole chunk comes from its last row, whichever row that is.
TEST_P(Reports, STATE_11_ChunkDecayIsThatOfItsLastRow) {
  for (const int64_t T : {64, 128, 192, 192 + 61}) {
    CaseSpec spec = small_spec(T);
    spec.initial_state = spec.gradients = false;
    Case c = make(spec);
    const auto decayed = [](int64_t t) { return t % 64 >= 57; };
    set_input(c, kG, [&](int64_t i) { return decayed(i / 64) ? -1.0 : 0.0; });
    set_input(c, kBeta, [](int64_t t) { return t == 0 ? 1.0 : 0.0; });
    double log_decay = 0;
    for (int64_t t = 1; t < T; ++t) log_decay -= decayed(t) ? 1 : 0;
    attempt([&] {
      const HostTensor state = results_of(c).at(kFinalState);
      for (int64_t k = 0; k < 64; ++k) {
        for (int64_t v = 0; v < 64; ++v) {
          const double exact =
              std::exp(log_decay) * c.inputs.at(kK).get(k) * c.inputs.at(kV).get(v);
          EXPECT_NEAR(state.get(k * 64 + v), exact, limit(3e-6, kFinalState) * std::fabs(exact));
        }
      }
    });
  }
}

TEST_P(Reports, PAGED_01_PAGED_02_NegativeIndexTouchesNoSlot) {
  CaseSpec spec = small_spec(1);
  spec.sizes.B = 2;
  spec.gradients = false;
  const Case c = cases::generate(fitted_to_decode(spec));
  attempt([&] {
    Problem problem = recurrent_problem(c);
    problem.sizes.P = 5;
    problem.set(kStateIndices, DType::kI32);
    TensorMap inputs = c.inputs;
    HostTensor pool(DType::kF32, {5, problem.sizes.HV, problem.sizes.K, problem.sizes.V});
    for (int64_t i = 0; i < pool.count(); ++i) pool.set(i, static_cast<double>(i % 97));
    inputs[kInitialState] = pool;
    inputs[kStateIndices] = cases::from_doubles(DType::kI32, {2}, std::vector<double>{-1, 3});
    Conditions conditions = choosing(family());
    conditions.state_in_place = true;
    const TensorMap results = run_operation(problem, inputs, conditions);
    for (const int64_t slot : {0, 1, 2, 4}) {
      EXPECT_EQ(other_bits(row_of(pool, slot), row_of(results.at(kFinalState), slot)), "");
    }
    EXPECT_NE(other_bits(row_of(pool, 3), row_of(results.at(kFinalState), 3)), "");
    const int64_t row = problem.sizes.HV * problem.sizes.V;
    for (int64_t i = 0; i < row; ++i) EXPECT_EQ(results.at(kO).get(i), 0);

    problem.set(kFinalState, DType::kNone);  // a draft is verified: the pool is only read
    const TensorMap read = results_of(problem, inputs);
    EXPECT_EQ(other_bits(read.at(kO), results.at(kO)), "");
  });
}

// Slot 0 is a slot like any other: rows of padding, which have -1, leave it alone, and a sequence
// that names it reads and writes it. Drafts, which write no state, may share it.
TEST_P(Reports, PAGED_02_SlotZeroIsAnOrdinarySlot) {
  CaseSpec spec = small_spec(1);
  spec.sizes.B = 4;
  spec.gradients = false;
  const Case c = cases::generate(fitted_to_decode(spec));
  const HostTensor& pool = c.inputs.at(kInitialState);
  const auto with_slots = [&](const std::vector<double>& slots) {
    TensorMap inputs = c.inputs;
    inputs[kStateIndices] = cases::from_doubles(DType::kI32, {4}, slots);
    return inputs;
  };
  const auto row_alone = [&](int64_t row, int64_t slot) {
    const Case one = part_of(c, row, 0, 1, slot);
    return results_of(recurrent_problem(one), one.inputs);
  };
  Problem problem = recurrent_problem(c);
  problem.sizes.P = 4;
  problem.set(kStateIndices, DType::kI32);
  attempt([&] {
    Conditions conditions = choosing(family());
    conditions.state_in_place = true;
    for (const auto& slots : {std::vector<double>{-1, 3, -1, -1}, {-1, 0, -1, 3}}) {
      const TensorMap results = run_operation(problem, with_slots(slots), conditions);
      HostTensor expected = pool;
      for (int64_t row = 0; row < 4; ++row) {
        const HostTensor o = row_of(results.at(kO), row);
        const auto slot = static_cast<int64_t>(slots[static_cast<std::size_t>(row)]);
        if (slot < 0) {
          for (int64_t i = 0; i < o.count(); ++i) EXPECT_EQ(o.get(i), 0) << "row " << row;
          continue;
        }
        const TensorMap alone = row_alone(row, slot);
        EXPECT_EQ(other_bits(o, alone.at(kO)), "") << "row " << row;
        const HostTensor& state = alone.at(kFinalState);
        std::copy(state.bytes.begin(), state.bytes.end(),
                  expected.bytes.begin() + slot * static_cast<std::ptrdiff_t>(state.bytes.size()));
      }
      EXPECT_EQ(other_bits(results.at(kFinalState), expected), "");
    }
    Problem verify = problem;
    verify.set(kFinalState, DType::kNone);
    const HostTensor o = results_of(verify, with_slots({0, 0, 3, 0})).at(kO);
    for (int64_t row = 0; row < 4; ++row) {
      const HostTensor alone = row_alone(row, row == 2 ? 3 : 0).at(kO);
      EXPECT_EQ(other_bits(row_of(o, row), alone), "") << "draft " << row;
    }
  });
}

// PAGED-02: a slot that two sequences would write, 0 among them, is refused.
// CUDA reads the slots on the device only: tests/cuda/contract_test.cpp.
TEST(ReportsOnCpu, PAGED_03_WrongSlotsAreRefused) {
  CaseSpec spec = small_spec(1);
  spec.sizes.B = 2;
  spec.gradients = false;
  const Case c = cases::generate(spec);
  for (const std::string& family : families_of_cpu()) {
    Problem problem = recurrent_problem(c);
    problem.sizes.P = 2;
    problem.set(kStateIndices, DType::kI32);
    for (const auto& wrong : {std::vector<double>{0, 2}, {-2, 0}, {1, 1}, {0, 0}}) {
      TensorMap inputs = c.inputs;
      inputs[kStateIndices] = cases::from_doubles(DType::kI32, {2}, wrong);
      Conditions conditions = choosing(family);
      conditions.state_in_place = true;
      const auto result = run_counted(problem, inputs, conditions);
      EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << family;
      EXPECT_EQ(result.status().message().rfind("state_indices[", 0), 0u)
          << result.status().message();
    }
  }
}

/// The recurrent operation with states in place and num_accepted.
TensorMap commit(const Case& c, const std::string& family, const std::vector<double>& accepted) {
  Problem problem = recurrent_problem(c);
  problem.set(kNumAccepted, DType::kI32);
  TensorMap inputs = c.inputs;
  inputs[kNumAccepted] =
      cases::from_doubles(DType::kI32, {static_cast<int64_t>(accepted.size())}, accepted);
  Conditions conditions = choosing(family);
  conditions.state_in_place = true;
  conditions.repeat = true;
  return run_operation(problem, inputs, conditions);
}

TEST_P(Reports, PAGED_03_NoAcceptedTokenLeavesTheState) {
  CaseSpec spec = small_spec(4);
  spec.sizes.B = 4;
  spec.gradients = false;
  const Case c = cases::generate(fitted_to_decode(spec));
  const HostTensor& before = c.inputs.at(kInitialState);
  attempt([&] {
    const TensorMap results = commit(c, family(), {0, 1, 3, 4});
    EXPECT_EQ(other_bits(row_of(before, 0), row_of(results.at(kFinalState), 0)), "");
    for (int64_t n = 1; n < 4; ++n) {
      EXPECT_NE(other_bits(row_of(before, n), row_of(results.at(kFinalState), n)), "");
    }
  });
}

// CUDA reads the counts on the device only: tests/cuda/recurrent_test.cpp.
TEST(ReportsOnCpu, PAGED_03_CountsBeyondTheTokensAreRefused) {
  CaseSpec spec = small_spec(4);
  spec.sizes.B = 4;
  spec.gradients = false;
  const Case c = cases::generate(spec);
  for (const std::string& family : families_of_cpu()) {
    EXPECT_THROW(commit(c, family, {0, 5, 3, 4}), Error) << family;
    EXPECT_THROW(commit(c, family, {0, 1, -1, 4}), Error) << family;
  }
}

// A draft of N tokens is verified without a final state; then m of them are committed. State and
// next output must be those of m ordinary steps.
TEST_P(Reports, PAGED_04_RejectedDraftsLeaveNoTrace) {
  for (const int64_t N : {1, 3, 7}) {
    CaseSpec spec = small_spec(N + 1);
    spec.gradients = false;
    const Case c = cases::generate(fitted_to_decode(spec));
    const Case draft = part_of(c, 0, 0, N, 0);
    attempt([&] {
      Problem verify = recurrent_problem(draft);
      verify.set(kFinalState, DType::kNone);
      const HostTensor drafted = results_of(verify, draft.inputs).at(kO);
      Hand steps{c, family(), c.inputs.at(kInitialState), {}};
      for (int64_t m = 0; m <= N; ++m) {
        const TensorMap committed = commit(draft, family(), {static_cast<double>(m)});
        Hand next{c, family(), committed.at(kFinalState), {}};
        const Hand ordinary = steps;
        steps.go(m, m + 1, false);
        next.go(m, m + 1, false);
        TensorMap expected{{kFinalState, ordinary.state}, {kO, steps.last.at(kO)}};
        const TensorMap results{{kFinalState, committed.at(kFinalState)}, {kO, next.last.at(kO)}};
        if (is_reference()) {  // a step rounds its state to fp32, a commit only the last one
          EXPECT_EQ(beyond_limits(part_of(c, 0, m, m + 1, 0), results, expected), "") << m;
        } else {
          EXPECT_EQ(other_bits(results, expected), "") << m << " of " << N;
        }
        if (m == N || is_reference()) continue;
        EXPECT_EQ(other_bits(tokens_of(drafted, 0, m, m + 1), steps.last.at(kO)), "");
      }
    });
  }
}

// The state at each boundary of chunks is the final state of the call that ends there.
TEST_P(Reports, PAGED_06_CheckpointsAreFinalStates) {
  CaseSpec spec = small_spec(130);
  spec.gradients = false;
  const Case c = make(spec);
  attempt([&] {
    const DType h = is_hopper() ? DType::kBF16 : DType::kF32;
    Problem problem = forward_problem(c);
    problem.set(kH, h);
    const TensorMap results = results_of(problem, c.inputs);
    for (const int64_t chunk : {1, 2}) {
      const TensorMap head = results_of(part_of(c, 0, 0, 64 * chunk, 0));
      EXPECT_EQ(
          other_bits(row_of(results.at(kH), chunk), cases::converted(head.at(kFinalState), h)), "");
    }
  });
}

// Token by token, the state after any prefix is the final state of the call that ends there.
TEST_P(Reports, PAGED_06_StatesInsidePackedSequences) {
  CaseSpec spec = small_spec(327);
  spec.gradients = false;
  spec.cu_seqlens = {0, 63, 127, 327};
  const Case c = cases::generate(fitted_to_decode(spec));
  attempt([&] {
    for (const auto& counts : {std::vector<double>{63, 64, 64}, {0, 64, 128}, {63, 0, 200}}) {
      const HostTensor states = commit(c, family(), counts).at(kFinalState);
      for (int64_t n = 0; n < 3; ++n) {
        const int64_t begin = spec.cu_seqlens[static_cast<std::size_t>(n)];
        const auto count = static_cast<int64_t>(counts[static_cast<std::size_t>(n)]);
        const Case head = part_of(c, 0, begin, begin + count, n);
        const TensorMap alone = results_of(recurrent_problem(head), head.inputs);
        EXPECT_EQ(other_bits(row_of(states, n), alone.at(kFinalState)), "") << n;
      }
    }
  });
}

}  // namespace
}  // namespace kda::test
