// Chunked forward and backward against the float64 recurrence and against themselves.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"

namespace kda::test {
namespace {

Conditions any_conditions(const std::string& implementation) {
  Conditions conditions = choosing(implementation);
  conditions.arrangement =
      *rc::gen::element(Arrangement::kContiguous, Arrangement::kPadded, Arrangement::kTransposed);
  conditions.seed = *rc::gen::inRange<uint64_t>(1, 100);
  conditions.options.threads = *rc::gen::inRange(0, 4);
  return conditions;
}

TEST(Families, AreCpuAndReference) {
  EXPECT_EQ(families_of_cpu(), (std::vector<std::string>{"cpu", "reference"}));
}

// Section 7.3 of docs/semantics.md, row "fp32 CPU" for fp32 results, the rows of the 16-bit types
// for theirs.
RC_GTEST_PROP(Chunk, AgreesWithTheFloat64Recurrence, ()) {
  const Case c = cases::generate(*any_case());
  const TensorMap expected = cases::reference_outputs(c).value();
  for (const std::string& family : families()) {
    OutputTypes types;
    if (*rc::gen::inRange(0, 2) == 1) types.all = DType::kF32;
    const TensorMap results = run_case(c, any_conditions(family), types);
    RC_ASSERT(beyond_limits(c, results, expected) == "");
  }
}

// Options say how, not what: neither strides nor threads change a bit.
RC_GTEST_PROP(Chunk, StridesAndThreadsChangeNoBit, ()) {
  const Case c = cases::generate(*any_case());
  for (const std::string& family : families()) {
    const TensorMap plain = run_case(c, family);
    const TensorMap other = run_case(c, any_conditions(family));
    RC_ASSERT(other_bits(plain, other) == "");
  }
}

RC_GTEST_PROP(Chunk, RepeatedRunsChangeNoBit, ()) {
  const Case c = cases::generate(*any_case());
  for (const std::string& family : families()) {
    Conditions conditions = any_conditions(family);
    conditions.repeat = true;
    run_case(c, conditions);
  }
}

RC_GTEST_PROP(Chunk, StateInPlaceGivesTheSameBits, ()) {
  Wanted wanted;
  CaseSpec spec = *any_case(wanted);
  spec.initial_state = true;
  const Case c = cases::generate(spec);
  for (const std::string& family : families()) {
    Conditions in_place = any_conditions(family);
    const Problem problem = forward_problem(c);
    const TensorMap apart = run_operation(problem, c.inputs, in_place);
    in_place.state_in_place = true;
    RC_ASSERT(other_bits(apart, run_operation(problem, c.inputs, in_place)) == "");
  }
}

RC_GTEST_PROP(Chunk, StateLayoutsAgree, ()) {
  CaseSpec spec = *any_case();
  spec.state_v_first = false;
  const Case k_first = cases::generate(spec);
  Case v_first = k_first;
  v_first.forward.state_v_first = true;
  const auto transposed = [](const HostTensor& states) {
    const int64_t rows = states.shape[0] * states.shape[1];
    const int64_t m = states.shape[2];
    const int64_t n = states.shape[3];
    HostTensor result(states.dtype, {states.shape[0], states.shape[1], n, m});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          result.set((r * n + j) * m + i, states.get((r * m + i) * n + j));
        }
      }
    }
    return result;
  };
  for (auto& [id, tensor] : v_first.inputs) {
    if (has_states(id)) tensor = transposed(tensor);
  }
  for (const std::string& family : families()) {
    TensorMap results = run_case(v_first, family);
    for (auto& [id, tensor] : results) {
      if (has_states(id)) tensor = transposed(tensor);
    }
    RC_ASSERT(other_bits(run_case(k_first, family), results) == "");
  }
}

RC_GTEST_PROP(Chunk, EitherIntegerTypeOfCuSeqlens, ()) {
  CaseSpec spec = *any_case({.only_packed = true});
  spec.cu_dtype = DType::kI32;
  const Case narrow = cases::generate(spec);
  spec.cu_dtype = DType::kI64;
  const Case wide = cases::generate(spec);
  for (const std::string& family : families()) {
    RC_ASSERT(other_bits(run_case(narrow, family), run_case(wide, family)) == "");
  }
}

// Each gradient is what it is, whichever others are asked for.
RC_GTEST_PROP(Chunk, AnySubsetOfGradientsHasTheSameBits, ()) {
  const Case c = cases::generate(*any_case());
  const Problem all = backward_problem(c);
  Problem some = all;
  bool any = false;
  for (const TensorSpec& spec : tensors_of(all.operation)) {
    if (spec.role == Role::kInput || !all.has(spec.id)) continue;
    if (*rc::gen::inRange(0, 2) == 1) {
      some.set(spec.id, DType::kNone);
    } else {
      any = true;
    }
  }
  RC_PRE(any);
  for (const std::string& family : families()) {
    const Conditions conditions = choosing(family);
    RC_ASSERT(other_bits(run_operation(some, c.inputs, conditions),
                         run_operation(all, c.inputs, conditions)) == "");
  }
}

// h, Aqk and A of the forward, in fp32, spare the backward their computation and change nothing
// beyond rounding.
RC_GTEST_PROP(Chunk, SavedTensorsGiveTheSameGradients, ()) {
  const Case c = cases::generate(*any_case());
  const TensorMap expected = cases::reference_outputs(c).value();
  for (const std::string& family : families()) {
    const Conditions conditions = choosing(family);
    Problem forward = forward_problem(c);
    forward.set(TensorId::kH, DType::kF32).set(TensorId::kAqk, DType::kF32);
    forward.set(TensorId::kA, DType::kF32);
    TensorMap saved = run_operation(forward, c.inputs, conditions);
    TensorMap inputs = c.inputs;
    Problem backward = backward_problem(c);
    for (TensorId id : {TensorId::kH, TensorId::kAqk, TensorId::kA}) {
      if (*rc::gen::inRange(0, 3) == 0) continue;
      inputs[id] = saved.at(id);
      backward.set(id, DType::kF32);
    }
    TensorMap results = run_operation(backward, inputs, conditions);
    results[TensorId::kO] = saved.at(TensorId::kO);
    results[TensorId::kFinalState] = saved.at(TensorId::kFinalState);
    RC_ASSERT(beyond_limits(c, results, expected) == "");
  }
}

// Rows of h beyond the chunks that exist, and the scores above the diagonal, are zeros.
RC_GTEST_PROP(Chunk, SavedTensorsAreZeroWhereNothingIs, ()) {
  const Case c = cases::generate(*any_case());
  for (const std::string& family : families()) {
    Problem forward = forward_problem(c);
    forward.set(TensorId::kH, DType::kF32).set(TensorId::kAqk, DType::kF32);
    forward.set(TensorId::kA, DType::kF32);
    const TensorMap saved = run_operation(forward, c.inputs, choosing(family));
    const Sizes& s = c.forward.sizes;
    const int64_t C = c.forward.chunk_size;
    int64_t chunks = 0;
    std::vector<int64_t> row_in_chunk(static_cast<std::size_t>(s.B * s.T), -1);
    for (const cases::TokenRange& range : cases::sequences_of(c)) {
      chunks += (range.end - range.begin + C - 1) / C;
      for (int64_t t = range.begin; t < range.end; ++t) {
        row_in_chunk[static_cast<std::size_t>(range.batch * s.T + t)] = (t - range.begin) % C;
      }
    }
    const HostTensor& h = saved.at(TensorId::kH);
    for (int64_t i = chunks * s.HV * s.K * s.V; i < h.count(); ++i) RC_ASSERT(h.get(i) == 0);
    for (TensorId id : {TensorId::kAqk, TensorId::kA}) {
      const HostTensor& scores = saved.at(id);
      for (int64_t i = 0; i < scores.count(); ++i) {
        const int64_t row = row_in_chunk[static_cast<std::size_t>(i / C / s.HV)];
        if (i % C > row) RC_ASSERT(scores.get(i) == 0);
        if (id == TensorId::kA && i % C == row) RC_ASSERT(scores.get(i) == 1);
      }
    }
  }
}

// One head of queries and keys for G value heads is the same as G equal heads.
RC_GTEST_PROP(Chunk, GroupedHeadsAreRepeatedHeads, ()) {
  CaseSpec spec = *any_case({.reduced_types = false});
  const Case grouped = cases::generate(spec);
  const Sizes& s = grouped.forward.sizes;
  const int64_t G = s.HV / s.H;
  Case repeated = grouped;
  repeated.forward.sizes.H = s.HV;
  for (TensorId id : {TensorId::kQ, TensorId::kK}) {
    const HostTensor& few = grouped.inputs.at(id);
    HostTensor many(few.dtype, {s.B, s.T, s.HV, s.K});
    for (int64_t i = 0; i < many.count(); ++i) {
      const int64_t row = i / s.K / s.HV;
      const int64_t head = i / s.K % s.HV / G;
      many.set(i, few.get((row * s.H + head) * s.K + i % s.K));
    }
    repeated.inputs[id] = many;
  }
  repeated.forward = forward_problem(repeated);
  for (const std::string& family : families()) {
    TensorMap one = run_case(grouped, family);
    TensorMap other = run_case(repeated, family);
    for (TensorId id : {TensorId::kDq, TensorId::kDk}) {
      const HostTensor many = other.at(id);
      std::vector<double> sums(static_cast<std::size_t>(one.at(id).count()));
      for (int64_t i = 0; i < many.count(); ++i) {
        const int64_t row = i / s.K / s.HV;
        const int64_t head = i / s.K % s.HV / G;
        sums[static_cast<std::size_t>((row * s.H + head) * s.K + i % s.K)] += many.get(i);
      }
      const TensorMap sum{{id, cases::from_doubles(DType::kF64, one.at(id).shape, sums)}};
      RC_ASSERT(beyond_limits(grouped, one, sum) == "");
      one.erase(id);
      other.erase(id);
    }
    RC_ASSERT(other_bits(one, other) == "");
  }
}

}  // namespace
}  // namespace kda::test
