// The decode step: the Hopper row against the float64 recurrence and against cuda_recurrent, bit
// for bit; pools, counts of accepted tokens, graphs.
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "compare.h"
#include "cuda/device_case.h"
#include "execute.h"
#include "generate.h"
#include "kda/backend.h"
#include "support/calls.h"

namespace kda::test {
namespace {

constexpr const char* kHopper = "sm90_recurrent";
constexpr const char* kPortable = "cuda_recurrent";

CaseSpec decode_spec(int64_t B, int64_t T, int64_t H, int64_t HV) {
  CaseSpec spec;
  spec.sizes = {B, T, H, HV, 128, 128, 0, 0};
  spec.io = DType::kBF16;
  spec.gate_dtype = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  spec.gradients = false;
  return spec;
}

/// The recurrent operation of a case with states of another type.
struct Decode {
  Decode(const CaseSpec& spec, DType state) : c(cases::generate(spec)) {
    problem = recurrent_problem(c);
    problem.set(kInitialState, state).set(kFinalState, state);
    HostTensor& initial = c.inputs.at(kInitialState);
    initial = cases::converted(initial, state);
  }

  void give(TensorId id, const std::vector<double>& values) {
    c.inputs[id] = cases::from_doubles(DType::kI32, {static_cast<int64_t>(values.size())}, values);
    problem.set(id, DType::kI32);
  }

  TensorMap run(const char* implementation, bool in_place = true) const {
    Conditions conditions;
    conditions.device = {DeviceType::kCuda, 0};
    conditions.options.implementation = implementation;
    conditions.state_in_place = in_place;
    conditions.repeat = true;
    return run_counted(problem, c.inputs, conditions).value().outputs;
  }

  Case c;
  Problem problem;
};

/// A Hopper GPU is enough: there a refusal is a fault.
#define KDA_NEEDS_HOPPER_FOR(decode) \
  KDA_NEEDS_HOPPER();                \
  ASSERT_EQ(supports((decode).problem, {DeviceType::kCuda, 0}, {kHopper, 0}).message(), "")

void expect_same_bits(const TensorMap& a, const TensorMap& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, tensor] : a) {
    EXPECT_TRUE(tensor.bytes == b.at(id).bytes) << what << ": " << name_of(id);
  }
}

/// Within 7.3 of the float64 recurrence, state limits by the type of the states.
void expect_right(const Decode& decode, const TensorMap& results, const std::string& what) {
  Problem exact = decode.problem;
  exact.set(kO, DType::kF64).set(kFinalState, DType::kF64);
  const TensorMap expected =
      cases::execute_operation(exact, decode.c.inputs, {}, {"reference", 0}).value().outputs;
  for (const auto& [id, tensor] : results) {
    const Difference difference = cases::compare(decode.c, id, tensor, expected.at(id));
    EXPECT_LE(difference.ratio, cases::limit_of(cases::precision_of(tensor.dtype), id))
        << what << ": " << name_of(id);
    EXPECT_TRUE(difference.finite) << what << ": " << name_of(id);
  }
}

struct Variant {
  DType state;
  bool v_first;
};

std::vector<Variant> variants() {
  return {{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}, {DType::kBF16, true}};
}

std::string describe(const Variant& v, int64_t T) {
  return std::string(name_of(v.state)) + (v.v_first ? " [V,K]" : " [K,V]") + " T " +
         std::to_string(T);
}

TEST(CudaRecurrent, HopperIsRightAndHasTheBitsOfThePortableKernel) {
  for (const Variant& variant : variants()) {
    for (const int64_t T : {1, 2, 3, 8, 19}) {  // 19: more tokens than the ring has slots
      CaseSpec spec = decode_spec(9, T, 8, 16);
      spec.state_v_first = variant.v_first;
      if (T == 3) spec.gate = Gate::kLowerBound;
      if (T == 2) spec.io = spec.gate_dtype = DType::kF32;
      Decode decode(spec, variant.state);
      KDA_NEEDS_HOPPER_FOR(decode);
      const TensorMap hopper = decode.run(kHopper, T != 8);
      expect_right(decode, hopper, describe(variant, T));
      expect_same_bits(hopper, decode.run(kPortable, T != 8), describe(variant, T));
    }
  }
}

// Fewer than the default would give it.
TEST(CudaRecurrent, HopperTakesFewStatesByChoice) {
  for (const Variant& variant : variants()) {
    for (const int64_t T : {1, 3}) {
      CaseSpec spec = decode_spec(2, T, 1, 2);
      spec.state_v_first = variant.v_first;
      const Decode decode(spec, variant.state);
      KDA_NEEDS_HOPPER_FOR(decode);
      const TensorMap hopper = decode.run(kHopper);
      expect_right(decode, hopper, describe(variant, T));
      expect_same_bits(hopper, decode.run(kPortable), describe(variant, T));
    }
  }
}

/// Of 32 heads: more states than all blocks of an H200 have stages, so that rings go round and the
/// counter gives out the rest.
int64_t enough_sequences(const Variant& variant) { return variant.state == DType::kF32 ? 14 : 27; }

TEST(CudaRecurrent, HopperKeepsItsRingsApart) {
  for (const Variant& variant : variants()) {
    const int64_t T = variant.v_first ? 1 : 3;
    CaseSpec spec = decode_spec(enough_sequences(variant), T, 32, 32);
    spec.state_v_first = variant.v_first;
    const Decode decode(spec, variant.state);
    KDA_NEEDS_HOPPER_FOR(decode);
    expect_same_bits(decode.run(kHopper), decode.run(kPortable), describe(variant, T));
  }
}

TEST(CudaRecurrent, HopperTakesPackedAndAbsentStates) {
  CaseSpec spec = decode_spec(1, 40, 4, 32);
  spec.cu_seqlens = {0, 3, 3, 4, 20, 33};
  spec.poison_tail = true;
  Decode decode(spec, DType::kF32);
  KDA_NEEDS_HOPPER_FOR(decode);
  for (const bool in_place : {false, true}) {
    expect_same_bits(decode.run(kHopper, in_place), decode.run(kPortable, in_place), "packed");
  }
  Decode verify = decode;
  verify.problem.set(kFinalState, DType::kNone);
  expect_same_bits(verify.run(kHopper, false), verify.run(kPortable, false), "no final state");
  Decode start = decode;
  start.problem.set(kInitialState, DType::kNone);
  start.c.inputs.erase(kInitialState);
  expect_same_bits(start.run(kHopper, false), start.run(kPortable, false), "no initial state");
}

/// Sequence i of a batch, alone, its first `tokens` tokens.
Decode alone(const Decode& batch, int64_t i, int64_t tokens) {
  Decode one = batch;
  one.problem.sizes.B = 1;
  one.problem.sizes.T = tokens;
  one.problem.set(kNumAccepted, DType::kNone);
  one.c.forward.sizes.B = 1;
  for (auto& [id, tensor] : one.c.inputs) {
    if (id == kALog || id == kDtBias || id == kNumAccepted) continue;
    tensor = row_of(tensor, i);
    if (id == kInitialState) continue;
    const std::size_t token = tensor.bytes.size() / static_cast<std::size_t>(tensor.shape[1]);
    tensor.shape[1] = tokens;
    tensor.bytes.resize(token * static_cast<std::size_t>(tokens));
  }
  return one;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// Whichever row runs a batch, a sequence has the bits that it has alone.
TEST(CudaRecurrent, NeighboursInTheBatchDoNotMatter) {
  for (const Variant& variant : variants()) {
    CaseSpec spec = decode_spec(enough_sequences(variant), 2, 32, 32);
    spec.state_v_first = variant.v_first;
    const Decode batch(spec, variant.state);
    KDA_NEEDS_HOPPER_FOR(batch);
    const TensorMap all = batch.run(kHopper);
    for (const int64_t i : {int64_t{0}, spec.sizes.B - 1}) {
      const TensorMap own = alone(batch, i, 2).run("");
      for (const TensorId id : {kO, kFinalState}) {
        EXPECT_TRUE(own.at(id).bytes == row_of(all.at(id), i).bytes)
            << describe(variant, 2) << ", sequence " << i << ": " << name_of(id);
      }
    }
  }
}

// PAGED-04: a draft, verified and committed, and the same tokens one by one.
TEST(CudaRecurrent, StepsGiveTheBitsOfADraft) {
  constexpr int64_t kTokens = 4;
  for (const bool v_first : {false, true}) {
    CaseSpec spec = decode_spec(10, kTokens, 32, 32);
    spec.state_v_first = v_first;
    Decode draft(spec, DType::kF32);
    draft.give(kNumAccepted, std::vector<double>(10, 3));
    KDA_NEEDS_HOPPER_FOR(draft);
    Decode verify = draft;
    verify.problem.set(kNumAccepted, DType::kNone).set(kFinalState, DType::kNone);
    const HostTensor drafted = verify.run(kHopper, false).at(kO);
    const TensorMap committed = draft.run(kHopper);
    for (const int64_t i : {0, 9}) {
      HostTensor state = row_of(draft.c.inputs.at(kInitialState), i);
      for (int64_t t = 0; t < 3; ++t) {
        Decode step = alone(draft, i, t + 1);
        for (const TensorId id : {kQ, kK, kV, kG, kBeta}) {
          HostTensor& tokens = step.c.inputs.at(id);
          const auto token = static_cast<std::ptrdiff_t>(tokens.bytes.size()) / (t + 1);
          tokens.bytes.erase(tokens.bytes.begin(), tokens.bytes.end() - token);
          tokens.shape[1] = 1;
        }
        step.problem.sizes.T = 1;
        step.c.inputs[kInitialState] = state;
        const TensorMap results = step.run("");
        state = results.at(kFinalState);
        const HostTensor& o = results.at(kO);
        const auto at = static_cast<std::ptrdiff_t>(o.bytes.size()) * (i * kTokens + t);
        EXPECT_TRUE(std::equal(o.bytes.begin(), o.bytes.end(), drafted.bytes.begin() + at))
            << "sequence " << i << ", token " << t;
      }
      EXPECT_TRUE(state.bytes == row_of(committed.at(kFinalState), i).bytes) << "sequence " << i;
    }
  }
}

// PAGED-03: without a token the state stays, and a count that no host check sees writes nothing.
TEST(CudaRecurrent, CountsOfAcceptedTokens) {
  constexpr int64_t kTokens = 4;
  const std::vector<double> counts{0, 1, 4, 5, -1, 2147483647, 3, -2147483648.0};
  for (const Variant& variant : variants()) {
    CaseSpec spec = decode_spec(static_cast<int64_t>(counts.size()), kTokens, 2, 32);
    spec.state_v_first = variant.v_first;
    Decode batch(spec, variant.state);
    batch.give(kNumAccepted, counts);
    KDA_NEEDS_HOPPER_FOR(batch);
    for (const char* implementation : {kHopper, kPortable}) {
      const TensorMap results = batch.run(implementation);
      for (std::size_t n = 0; n < counts.size(); ++n) {
        const auto row = static_cast<int64_t>(n);
        const std::string what = describe(variant, kTokens) + ", " + implementation + ", count " +
                                 std::to_string(counts[n]);
        const int64_t ran = counts[n] > 0 && counts[n] <= kTokens ? int64_t(counts[n]) : 0;
        const HostTensor o = row_of(results.at(kO), row);
        const HostTensor state = row_of(results.at(kFinalState), row);
        const std::size_t written = o.bytes.size() / kTokens * static_cast<std::size_t>(ran);
        EXPECT_TRUE(all_zero(std::span(o.bytes).subspan(written))) << what;
        if (ran == 0) {
          EXPECT_TRUE(state.bytes == row_of(batch.c.inputs.at(kInitialState), row).bytes) << what;
          continue;
        }
        const TensorMap own = alone(batch, row, ran).run("");
        EXPECT_TRUE(state.bytes == own.at(kFinalState).bytes) << what;
        EXPECT_TRUE(std::equal(own.at(kO).bytes.begin(), own.at(kO).bytes.end(), o.bytes.begin()))
            << what;
      }
    }
  }
}

// PAGED-01..03 in a pool whose slots have gaps: neither gaps nor slots that nobody names change.
TEST(CudaRecurrent, StridedPoolKeepsItsGaps) {
  constexpr int64_t kSlots = 30;
  constexpr int64_t kGap = 64;
  const CaseSpec spec = decode_spec(20, 2, 16, 32);
  Decode decode(spec, DType::kF32);
  const int64_t state = decode.c.inputs.at(kInitialState).count() / spec.sizes.B;
  std::vector<double> slots;
  for (int64_t n = 0; n < spec.sizes.B; ++n)
    slots.push_back(n % 7 == 3 ? -1.0 : static_cast<double>((n * 11 + 5) % kSlots));
  decode.give(kStateIndices, slots);
  decode.problem.sizes.P = kSlots;
  const TensorLayout pool =
      TensorLayout::strided(DType::kF32, {kSlots, 32, 128, 128}, {state + kGap, 128 * 128, 128, 1});
  decode.problem.set(kInitialState, pool).set(kFinalState, pool);
  KDA_NEEDS_HOPPER_FOR(decode);
  HostTensor before(DType::kF32, {kSlots, state + kGap});
  before.poison();
  for (std::size_t n = 0; n < slots.size(); ++n) {
    if (slots[n] < 0) continue;
    const HostTensor own = row_of(decode.c.inputs.at(kInitialState), static_cast<int64_t>(n));
    std::copy(own.bytes.begin(), own.bytes.end(),
              before.bytes.begin() + static_cast<std::ptrdiff_t>(slots[n]) * (state + kGap) * 4);
  }
  TensorMap inputs = decode.c.inputs;
  inputs[kInitialState] = before;
  DeviceCase device(decode.problem, inputs, 0, {kHopper, 0});
  Args args = device.args();
  args.out(kFinalState, args[kInitialState]);
  ASSERT_EQ(device.plan().run(args).message(), "");
  require(cudaDeviceSynchronize());
  const HostTensor o = device.outputs().at(kO);
  const HostTensor after = device[kInitialState].store(before.dtype, before.shape);
  HostTensor expected = before;
  Decode dense(spec, DType::kF32);
  const TensorMap plain = dense.run(kPortable);
  for (std::size_t n = 0; n < slots.size(); ++n) {
    const auto row = static_cast<int64_t>(n);
    if (slots[n] < 0) {
      EXPECT_TRUE(all_zero(row_of(o, row).bytes)) << n;
      continue;
    }
    EXPECT_TRUE(row_of(o, row).bytes == row_of(plain.at(kO), row).bytes) << n;
    const HostTensor own = row_of(plain.at(kFinalState), row);
    std::copy(own.bytes.begin(), own.bytes.end(),
              expected.bytes.begin() + static_cast<std::ptrdiff_t>(slots[n]) * (state + kGap) * 4);
  }
  EXPECT_TRUE(after.bytes == expected.bytes);
}

// A pool that is only read, as a draft is verified: the outputs are those of the step that writes,
// and no byte of the pool changes. PAGED-04.
TEST(CudaRecurrent, APoolWithoutFinalStateIsOnlyRead) {
  constexpr int64_t kSlots = 12;
  for (const Variant& variant : variants()) {
    CaseSpec spec = decode_spec(kSlots, 3, 8, 16);
    spec.state_v_first = variant.v_first;
    Decode decode(spec, variant.state);
    decode.problem.sizes.P = kSlots;
    decode.give(kStateIndices, {7, -1, 0, 3, 11, 5, -1, 2, 9, 12, 1, 4});  // 12: no slot
    KDA_NEEDS_HOPPER_FOR(decode);
    const HostTensor& pool = decode.c.inputs.at(kInitialState);
    const HostTensor stepped = decode.run(kPortable).at(kO);
    Decode verify = decode;
    verify.problem.set(kFinalState, DType::kNone);
    for (const char* implementation : {kHopper, kPortable}) {
      const std::string what = describe(variant, 3) + ", " + implementation;
      DeviceCase device(verify.problem, verify.c.inputs, 0, {implementation, 0});
      device.run();
      EXPECT_TRUE(device.outputs().at(kO).bytes == stepped.bytes) << what;
      EXPECT_TRUE(device[kInitialState].store(pool.dtype, pool.shape).bytes == pool.bytes) << what;
    }
  }
}

// GRAPH-04: slots and counts are read by the kernel, so a captured graph follows them.
TEST(CudaRecurrent, GraphFollowsOtherSlotsAndCounts) {
  constexpr int kSequences = 14;
  const CaseSpec spec = decode_spec(kSequences, 3, 32, 32);
  Decode decode(spec, DType::kF32);
  decode.problem.sizes.P = kSequences;
  decode.give(kStateIndices, std::vector<double>(kSequences, -1));
  decode.give(kNumAccepted, std::vector<double>(kSequences, 0));
  KDA_NEEDS_HOPPER_FOR(decode);
  DeviceCase device(decode.problem, decode.c.inputs, 0, {kHopper, 0});
  Args args = device.args();
  args.out(kFinalState, args[kInitialState]);
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Graph graph(device.plan(), args, stream);
  for (int round = 0; round < 3; ++round) {
    std::vector<double> slots, counts;
    for (int n = 0; n < kSequences; ++n) {
      slots.push_back((n + round) % 5 == 0 ? -1 : (n * 3 + round) % kSequences);
      counts.push_back((n + round) % 4);
    }
    decode.give(kStateIndices, slots);
    decode.give(kNumAccepted, counts);
    TensorMap replayed;
    for (const bool replay : {true, false}) {
      for (const TensorId id : {kStateIndices, kNumAccepted, kInitialState}) {
        device[id].load(decode.c.inputs.at(id));
      }
      device.poison_outputs();
      if (replay) {
        graph.launch(stream);
      } else {
        ASSERT_EQ(device.plan().run(args, stream).message(), "");
        require(cudaStreamSynchronize(stream));
      }
      const HostTensor& pool = decode.c.inputs.at(kInitialState);
      const TensorMap now{{kO, device.outputs().at(kO)},
                          {kFinalState, device[kInitialState].store(pool.dtype, pool.shape)}};
      if (!replay) expect_same_bits(replayed, now, "round " + std::to_string(round));
      replayed = now;
    }
    expect_same_bits(replayed, decode.run(kPortable), "portable, round " + std::to_string(round));
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace kda::test
