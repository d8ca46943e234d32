// Sequences in pieces: carried states, packing, order, and the recurrent operation.
#include <algorithm>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "property/drawing.h"
#include "property/running.h"

namespace kda::test {
namespace {

/// The dtype in which a family carries its state without loss.
DType state_dtype(const std::string& family) {
  return family == "reference" ? DType::kF64 : DType::kF32;
}

/// Parameter gradients add up over pieces in another order; everything else must be bits.
void drop_parameter_gradients(TensorMap& outputs) {
  outputs.erase(TensorId::kDALog);
  outputs.erase(TensorId::kDdtBias);
}

/// Runs [0, cut) and [cut, T) of a one-row case with the state and its gradient handed over.
TensorMap run_in_two(const Case& c, int64_t cut, const std::string& family) {
  const DType dtype = state_dtype(family);
  const Conditions conditions = choosing(family);
  const int64_t T = c.forward.sizes.T;
  Case first = part_of(c, 0, 0, cut, 0);
  Case second = part_of(c, 0, cut, T, 0);
  const auto forward = [&](const Case& part) {
    Problem problem = forward_problem(part);
    problem.set(TensorId::kFinalState, dtype);
    return run_operation(problem, part.inputs, conditions);
  };
  const auto backward = [&](const Case& part) {
    Problem problem = backward_problem(part);
    problem.set(TensorId::kDinitialState, dtype);
    return run_operation(problem, part.inputs, conditions);
  };
  TensorMap one = forward(first);
  second.inputs[TensorId::kInitialState] = one.at(TensorId::kFinalState);
  TensorMap two = forward(second);
  two.merge(backward(second));
  first.inputs[TensorId::kDfinalState] = two.at(TensorId::kDinitialState);
  one.merge(backward(first));
  TensorMap joined;
  for (const auto& [id, tensor] : one) {
    if (!has_tokens(id)) continue;
    HostTensor whole(tensor.dtype, tensor.shape);
    whole.shape[1] = T;
    whole.bytes.insert(whole.bytes.end(), two.at(id).bytes.begin(), two.at(id).bytes.end());
    std::copy(tensor.bytes.begin(), tensor.bytes.end(), whole.bytes.begin());
    joined[id] = whole;
  }
  joined[TensorId::kFinalState] = two.at(TensorId::kFinalState);
  joined[TensorId::kDinitialState] = one.at(TensorId::kDinitialState);
  return joined;
}

TensorMap run_whole(const Case& c, const std::string& family) {
  const DType dtype = state_dtype(family);
  Problem forward = forward_problem(c);
  forward.set(TensorId::kFinalState, dtype);
  Problem backward = backward_problem(c);
  backward.set(TensorId::kDinitialState, dtype);
  TensorMap outputs = run_operation(forward, c.inputs, choosing(family));
  outputs.merge(run_operation(backward, c.inputs, choosing(family)));
  drop_parameter_gradients(outputs);
  return outputs;
}

CaseSpec one_row(bool reduced_types = true) {
  CaseSpec spec = *any_case({.packed = false, .reduced_types = reduced_types});
  spec.sizes.B = 1;
  return spec;
}

RC_GTEST_PROP(Carry, RunsWithACarriedStateAreOneRun, ()) {
  const Case c = cases::generate(one_row(false));
  const int64_t cut = *rc::gen::inRange<int64_t>(0, c.forward.sizes.T + 1);
  const TensorMap expected = cases::reference_outputs(c).value();
  for (const std::string& family : families()) {
    TensorMap wanted = expected;
    drop_parameter_gradients(wanted);
    // With an fp32 state the limits of fp32, whatever the dtype of the carried state.
    TensorMap joined = run_in_two(c, cut, family);
    for (auto& [id, tensor] : joined) tensor = cases::converted(tensor, DType::kF32);
    RC_ASSERT(beyond_limits(c, joined, wanted) == "");
  }
}

RC_GTEST_PROP(Carry, CutsBetweenChunksChangeNoBit, ()) {
  const Case c = cases::generate(one_row());
  const int64_t chunks = c.forward.sizes.T / c.forward.chunk_size;
  const int64_t cut = *rc::gen::inRange<int64_t>(0, chunks + 1) * c.forward.chunk_size;
  for (const std::string& family : families()) {
    RC_ASSERT(other_bits(run_in_two(c, cut, family), run_whole(c, family)) == "");
  }
}

/// The rows of a run over several sequences that belong to sequence n.
TensorMap rows_of_sequence(const Case& c, const TensorMap& outputs, std::size_t n) {
  const cases::TokenRange range = cases::sequences_of(c)[n];
  TensorMap rows;
  for (const auto& [id, tensor] : outputs) {
    if (has_tokens(id)) rows[id] = tokens_of(tensor, range.batch, range.begin, range.end);
    if (has_states(id)) rows[id] = row_of(tensor, static_cast<int64_t>(n));
  }
  return rows;
}

RC_GTEST_PROP(Packed, EachSequenceIsAsIfAlone, ()) {
  const Case c = cases::generate(*any_case());
  for (const std::string& family : families()) {
    const TensorMap together = run_case(c, family);
    for (std::size_t n = 0; n < cases::sequences_of(c).size(); ++n) {
      TensorMap alone = run_case(sequence_of(c, n), family);
      drop_parameter_gradients(alone);
      RC_ASSERT(other_bits(alone, rows_of_sequence(c, together, n)) == "");
    }
  }
}

RC_GTEST_PROP(Packed, RowsBehindTheLastSequenceAreZero, ()) {
  CaseSpec spec = *any_case({.only_packed = true});
  spec.poison_tail = true;
  const Case c = cases::generate(spec);
  for (const std::string& family : families()) {
    for (const auto& [id, tensor] : run_case(c, family)) {
      if (has_tokens(id)) {
        const HostTensor tail = tokens_of(tensor, 0, spec.cu_seqlens.back(), c.forward.sizes.T);
        for (int64_t i = 0; i < tail.count(); ++i) RC_ASSERT(tail.get(i) == 0);
      } else {
        for (int64_t i = 0; i < tensor.count(); ++i) RC_ASSERT(std::isfinite(tensor.get(i)));
      }
    }
  }
}

RC_GTEST_PROP(Packed, EmptySequencesPassTheirStatesOn, ()) {
  const Case c = cases::generate(*any_case({.only_packed = true}));
  const std::vector<cases::TokenRange> ranges = cases::sequences_of(c);
  const auto row_or_zero = [&](TensorId id, std::size_t n, const HostTensor& like) {
    const HostTensor* tensor = c.input(id);
    if (tensor == nullptr) return HostTensor(like.dtype, row_of(like, 0).shape);
    return row_of(*tensor, static_cast<int64_t>(n));
  };
  for (const std::string& family : families()) {
    const TensorMap outputs = run_case(c, family);
    for (std::size_t n = 0; n < ranges.size(); ++n) {
      if (ranges[n].begin != ranges[n].end) continue;
      const HostTensor& after = outputs.at(TensorId::kFinalState);
      const HostTensor& gradient = outputs.at(TensorId::kDinitialState);
      const auto row = static_cast<int64_t>(n);
      RC_ASSERT(other_bits(row_of(after, row), row_or_zero(TensorId::kInitialState, n, after)) ==
                "");
      RC_ASSERT(other_bits(row_of(gradient, row),
                           row_or_zero(TensorId::kDfinalState, n, gradient)) == "");
    }
  }
}

/// The sequences of a case in another order, packed again.
Case reordered(const Case& c, const std::vector<std::size_t>& order) {
  Case result = c;
  std::vector<int64_t> cu{0};
  std::map<TensorId, std::vector<HostTensor>> parts;
  for (const std::size_t n : order) {
    const Case one = sequence_of(c, n);
    cu.push_back(cu.back() + one.forward.sizes.T);
    for (const auto& [id, tensor] : one.inputs) parts[id].push_back(tensor);
  }
  for (auto& [id, rows] : parts) {
    if (has_states(id)) result.inputs[id] = stacked(rows);
    if (!has_tokens(id)) continue;
    HostTensor& tensor = result.inputs[id];
    auto at = tensor.bytes.begin();
    for (const HostTensor& row : rows) at = std::copy(row.bytes.begin(), row.bytes.end(), at);
  }
  HostTensor& list = result.inputs[TensorId::kCuSeqlens];
  for (std::size_t i = 0; i < cu.size(); ++i) {
    list.set(static_cast<int64_t>(i), static_cast<double>(cu[i]));
  }
  return result;
}

RC_GTEST_PROP(Packed, OrderOfSequencesDoesNotMatter, ()) {
  const Case c = cases::generate(*any_case({.only_packed = true}));
  const std::size_t count = cases::sequences_of(c).size();
  std::vector<std::size_t> order;
  for (std::size_t n = 0; n < count; ++n) order.push_back(n);
  const auto turn = *rc::gen::inRange<std::size_t>(0, count + 1);
  std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(turn), order.end());
  if (*rc::gen::inRange(0, 2) == 1) std::reverse(order.begin(), order.end());
  const Case other = reordered(c, order);
  for (const std::string& family : families()) {
    const TensorMap before = run_case(c, family);
    const TensorMap after = run_case(other, family);
    for (std::size_t n = 0; n < count; ++n) {
      RC_ASSERT(other_bits(rows_of_sequence(c, before, order[n]),
                           rows_of_sequence(other, after, n)) == "");
    }
  }
}

RC_GTEST_PROP(Recurrent, AgreesWithChunks, ()) {
  CaseSpec spec = *any_case();
  spec.gradients = false;
  const Case c = cases::generate(spec);
  const TensorMap expected = cases::reference_outputs(c).value();
  for (const std::string& family : families()) {
    const TensorMap results = run_operation(recurrent_problem(c), c.inputs, choosing(family));
    RC_ASSERT(beyond_limits(c, results, expected) == "");
  }
}

// Any cut of the token recurrence, with an fp32 or fp64 state in place, gives the same bits.
RC_GTEST_PROP(Recurrent, StepsAreOneRun, ()) {
  CaseSpec spec = one_row();
  spec.gradients = false;
  spec.initial_state = true;
  spec.sizes.T = std::min<int64_t>(spec.sizes.T, 20);
  const Case c = cases::generate(spec);
  for (const std::string& family : families()) {
    const DType dtype = state_dtype(family);
    Case exact = c;
    exact.inputs[TensorId::kInitialState] =
        cases::converted(c.inputs.at(TensorId::kInitialState), dtype);
    exact.forward = forward_problem(exact);
    Conditions in_place = choosing(family);
    in_place.state_in_place = true;
    const TensorMap whole = run_operation(recurrent_problem(exact), exact.inputs, choosing(family));
    HostTensor state = exact.inputs.at(TensorId::kInitialState);
    for (int64_t t = 0; t < spec.sizes.T; ++t) {
      Case step = part_of(exact, 0, t, t + 1, 0);
      step.inputs[TensorId::kInitialState] = state;
      const TensorMap out = run_operation(recurrent_problem(step), step.inputs, in_place);
      RC_ASSERT(other_bits(tokens_of(whole.at(TensorId::kO), 0, t, t + 1), out.at(TensorId::kO)) ==
                "");
      state = out.at(TensorId::kFinalState);
    }
    RC_ASSERT(other_bits(state, whole.at(TensorId::kFinalState)) == "");
  }
}

// A pool of states, some sequences skipped, slots in any order.
RC_GTEST_PROP(Recurrent, PoolOfStates, ()) {
  CaseSpec spec = *any_case({.most_tokens = 20});
  spec.gradients = false;
  spec.initial_state = true;
  const Case c = cases::generate(spec);
  const auto count = static_cast<int64_t>(cases::sequences_of(c).size());
  const int64_t slots = count + *rc::gen::inRange<int64_t>(1, 4);
  HostTensor indices(DType::kI32, {count});
  const int64_t shift = *rc::gen::inRange<int64_t>(0, slots);
  for (int64_t n = 0; n < count; ++n) {
    const bool skipped = *rc::gen::inRange(0, 3) == 0;
    indices.set(n, skipped ? -1.0 : static_cast<double>((n + shift) % slots));
  }
  for (const std::string& family : families()) {
    Problem problem = recurrent_problem(c);
    const TensorMap plain = run_operation(problem, c.inputs, choosing(family));
    TensorMap inputs = c.inputs;
    const HostTensor& states = c.inputs.at(TensorId::kInitialState);
    std::vector<HostTensor> pool;
    for (int64_t slot = 0; slot < slots; ++slot) {
      pool.emplace_back(states.dtype,
                        std::vector<int64_t>{1, states.shape[1], states.shape[2], states.shape[3]});
      for (int64_t i = 0; i < pool.back().count(); ++i) {
        pool.back().set(i, static_cast<double>(slot) + 0.25);
      }
    }
    for (int64_t n = 0; n < count; ++n) {
      const int64_t slot = indices.get_int(n);
      if (slot >= 0) pool[static_cast<std::size_t>(slot)] = row_of(states, n);
    }
    inputs[TensorId::kInitialState] = stacked(pool);
    inputs[TensorId::kStateIndices] = indices;
    problem.sizes.P = slots;
    problem.set(TensorId::kStateIndices, DType::kI32);
    Conditions conditions = choosing(family);
    conditions.state_in_place = true;
    const TensorMap results = run_operation(problem, inputs, conditions);
    for (int64_t n = 0; n < count; ++n) {
      const cases::TokenRange range = cases::sequences_of(c)[static_cast<std::size_t>(n)];
      const HostTensor o = tokens_of(results.at(TensorId::kO), range.batch, range.begin, range.end);
      const int64_t slot = indices.get_int(n);
      if (slot < 0) {
        for (int64_t i = 0; i < o.count(); ++i) RC_ASSERT(o.get(i) == 0);
        continue;
      }
      RC_ASSERT(other_bits(o, tokens_of(plain.at(TensorId::kO), range.batch, range.begin,
                                        range.end)) == "");
      pool[static_cast<std::size_t>(slot)] = row_of(plain.at(TensorId::kFinalState), n);
    }
    RC_ASSERT(other_bits(results.at(TensorId::kFinalState), stacked(pool)) == "");
  }
}

// The accepted tokens of each sequence, alone, give its state and its outputs; the rest of o is
// zero.
RC_GTEST_PROP(Recurrent, AcceptedTokens, ()) {
  CaseSpec spec = *any_case({.most_tokens = 20});
  spec.gradients = false;
  spec.initial_state = true;
  const Case c = cases::generate(spec);
  const std::vector<cases::TokenRange> ranges = cases::sequences_of(c);
  HostTensor accepted(DType::kI32, {static_cast<int64_t>(ranges.size())});
  for (std::size_t n = 0; n < ranges.size(); ++n) {
    const int64_t length = ranges[n].end - ranges[n].begin;
    accepted.set(static_cast<int64_t>(n),
                 static_cast<double>(*rc::gen::inRange<int64_t>(0, length + 1)));
  }
  for (const std::string& family : families()) {
    Problem problem = recurrent_problem(c);
    problem.set(TensorId::kNumAccepted, DType::kI32);
    TensorMap inputs = c.inputs;
    inputs[TensorId::kNumAccepted] = accepted;
    Conditions conditions = choosing(family);
    conditions.state_in_place = true;
    const TensorMap results = run_operation(problem, inputs, conditions);
    for (std::size_t n = 0; n < ranges.size(); ++n) {
      const auto row = static_cast<int64_t>(n);
      const auto& [batch, begin, end] = ranges[n];
      const int64_t stop = begin + accepted.get_int(row);
      const Case head = part_of(c, batch, begin, stop, row);
      const TensorMap alone = run_operation(recurrent_problem(head), head.inputs, choosing(family));
      RC_ASSERT(other_bits(row_of(results.at(TensorId::kFinalState), row),
                           alone.at(TensorId::kFinalState)) == "");
      const HostTensor& o = results.at(TensorId::kO);
      RC_ASSERT(other_bits(tokens_of(o, batch, begin, stop), alone.at(TensorId::kO)) == "");
      const HostTensor rest = tokens_of(o, batch, stop, end);
      for (int64_t i = 0; i < rest.count(); ++i) RC_ASSERT(rest.get(i) == 0);
    }
  }
}

}  // namespace
}  // namespace kda::test
