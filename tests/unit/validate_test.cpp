// Every refusal of Problem::validated: the message names the argument, what was found and what was
// expected.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kda/problem.h"

namespace kda {
namespace {

using enum TensorId;

Problem forward() {
  return Problem::make(Operation::kChunkForward,
                       {.B = 2, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24}, DType::kF32);
}

Problem backward() {
  Problem problem = Problem::make(
      Operation::kChunkBackward, {.B = 2, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24}, DType::kF32);
  problem.set(kDq, DType::kF32);
  return problem;
}

Problem stage(Operation operation) {
  return Problem::make(operation, {.B = 1, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24},
                       DType::kF32);
}

void expect_refused(const Problem& problem, const std::vector<std::string>& parts) {
  const Result<Problem> result = problem.validated();
  ASSERT_FALSE(result.ok()) << "expected a refusal that says: " << parts.front();
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  for (const std::string& part : parts) {
    EXPECT_NE(result.status().message().find(part), std::string::npos)
        << "\"" << part << "\" is missing in: " << result.status().message();
  }
  EXPECT_EQ(result.status().message().find('\n'), std::string::npos);
}

struct Refusal {
  std::string name;
  Problem (*start)();
  std::function<void(Problem&)> spoil;
  std::vector<std::string> parts;

  friend void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }
};

class Refused : public testing::TestWithParam<Refusal> {};

TEST_P(Refused, NamesArgumentFoundAndExpected) {
  Problem problem = GetParam().start();
  ASSERT_TRUE(problem.validated().ok()) << problem.validated().status().message();
  GetParam().spoil(problem);
  expect_refused(problem, GetParam().parts);
}

const std::vector<Refusal> kSizes = {
    {"BZero", forward, [](Problem& p) { p.sizes.B = 0; }, {"size B", "found 0", "expected 1.."}},
    {"TNegative", forward, [](Problem& p) { p.sizes.T = -1; }, {"size T", "found -1", "0.."}},
    {"HZero", forward, [](Problem& p) { p.sizes.H = 0; }, {"size H", "found 0", "expected 1.."}},
    {"HVZero", forward, [](Problem& p) { p.sizes.HV = 0; }, {"size HV", "found 0", "1.."}},
    {"KZero", forward, [](Problem& p) { p.sizes.K = 0; }, {"size K", "found 0", "1..256"}},
    {"KPast256", forward, [](Problem& p) { p.sizes.K = 257; }, {"size K", "found 257", "1..256"}},
    {"VZero", forward, [](Problem& p) { p.sizes.V = 0; }, {"size V", "found 0", "expected 1.."}},
    {"GroupsUneven",
     forward,
     [](Problem& p) { p.sizes.HV = 5; },
     {"size HV", "found 5", "a multiple of H = 2"}},
    {"PackedBatch",
     forward,
     [](Problem& p) { p.set(kCuSeqlens, DType::kI64).sizes.N = 1; },
     {"size B", "found 2 with cu_seqlens", "expected 1"}},
    {"PackedNegativeN",
     forward,
     [](Problem& p) {
       p.set(kCuSeqlens, DType::kI64).sizes.N = -1;
       p.sizes.B = 1;
     },
     {"size N", "found -1", "expected 0.."}},
    {"PackedForgottenN",
     forward,
     [](Problem& p) {
       p.set(kCuSeqlens, DType::kI64).sizes.N = 0;
       p.sizes.B = 1;
     },
     {"size N", "found 0 with cu_seqlens and T = 70", "len(cu_seqlens) - 1"}},
    {"EmptyPool",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kStateIndices, DType::kI32)
           .set(kInitialState, DType::kF32)
           .set(kFinalState, DType::kF32);
     },
     {"size P", "found 0", "expected 1.."}},
    {"MostNegative",
     forward,
     [](Problem& p) { p.sizes.T = std::numeric_limits<int64_t>::min(); },
     {"size T", "found -9223372036854775808"}},
    {"LargestInt",
     forward,
     [](Problem& p) { p.sizes.B = std::numeric_limits<int64_t>::max(); },
     {"size B", "found 9223372036854775807"}},
    {"ProductTooLarge",
     forward,
     [](Problem& p) {
       p.sizes.B = int64_t{1} << 40;
       p.sizes.T = int64_t{1} << 40;
     },
     {"sizes: B = 1099511627776 is too large", "q would be [1099511627776,1099511627776,2,16]",
      "expected at most"}},
    {"AbsentStateTooLarge",
     forward,
     [](Problem& p) {
       p.sizes.T = 0;
       p.sizes.B = int64_t{1} << 40;
     },
     {"sizes: B = 1099511627776 is too large", "initial_state would be [1099511627776,4,16,24]",
      "absent"}},
};

const std::vector<Refusal> kOptions = {
    {"Operation",
     forward,
     [](Problem& p) { p.operation = static_cast<Operation>(11); },
     {"operation", "found value 11", "expected 0..10"}},
    {"OperationNegative",
     forward,
     [](Problem& p) { p.operation = static_cast<Operation>(-1); },
     {"operation", "found value -1", "expected 0..10"}},
    {"Gate",
     forward,
     [](Problem& p) { p.gate = static_cast<Gate>(3); },
     {"gate", "found value 3", "softplus or lower_bound"}},
    {"ChunkSize16",
     forward,
     [](Problem& p) { p.chunk_size = 16; },
     {"chunk_size", "found 16", "expected 64 or 32"}},
    {"ChunkSizeZero",
     forward,
     [](Problem& p) { p.chunk_size = 0; },
     {"chunk_size", "found 0", "expected 64 or 32"}},
    {"ScaleNaN",
     forward,
     [](Problem& p) { p.scale = std::nan(""); },
     {"scale", "found nan", "expected a finite number"}},
    {"ScaleInfinite",
     forward,
     [](Problem& p) { p.scale = std::numeric_limits<double>::infinity(); },
     {"scale", "found inf", "expected a finite number"}},
    {"ScaleBeyondFp32",
     forward,
     [](Problem& p) { p.scale = -1e40; },
     {"scale", "found -1e+40", "expected a finite number in the range of fp32"}},
    {"SoftplusWithoutALog",
     forward,
     [](Problem& p) { p.gate = Gate::kSoftplus; },
     {"A_log", "absent", "expected [HV]"}},
    {"LowerBoundMissing",
     forward,
     [](Problem& p) { p.gate = Gate::kLowerBound; },
     {"lower_bound", "found 0", "below 0"}},
    {"LowerBoundNaN",
     forward,
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = std::nan("");
     },
     {"lower_bound", "found nan", "below 0"}},
    {"LowerBoundWithoutGate",
     forward,
     [](Problem& p) { p.lower_bound = -5; },
     {"lower_bound", "found -5 with gate none", "only with gate lower_bound"}},
    {"ALogWithoutGate",
     forward,
     [](Problem& p) { p.set(kALog, DType::kF32); },
     {"A_log", "given with gate none"}},
    {"DtBiasWithoutGate",
     forward,
     [](Problem& p) { p.set(kDtBias, DType::kF32); },
     {"dt_bias", "given with gate none"}},
    {"GradientOfAbsentALog",
     backward,
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = -5;
       p.set(kDALog, DType::kF32);
     },
     {"dA_log", "without A_log"}},
    {"GradientOfAbsentBias",
     backward,
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = -5;
       p.set(kDdtBias, DType::kF32);
     },
     {"ddt_bias", "without dt_bias"}},
    {"NegEigvalWithoutSigmoid",
     forward,
     [](Problem& p) { p.allow_neg_eigval = true; },
     {"allow_neg_eigval", "without beta_sigmoid"}},
    {"L2NormInStage",
     [] { return stage(Operation::kOutput); },
     [](Problem& p) { p.qk_l2norm = true; },
     {"qk_l2norm", "stage output"}},
    {"SigmoidInStage",
     [] { return stage(Operation::kOutput); },
     [](Problem& p) { p.beta_sigmoid = true; },
     {"beta_sigmoid", "stage output"}},
    {"GateInStage",
     [] { return stage(Operation::kOutput); },
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = -5;
     },
     {"gate", "found lower_bound for stage output", "gate_cumsum"}},
};

const std::vector<Refusal> kTensors = {
    {"RequiredAbsent",
     forward,
     [](Problem& p) { p.set(kV, DType::kNone); },
     {"v: absent", "expected [B,T,HV,V]"}},
    {"NotOfThisOperation",
     forward,
     [](Problem& p) { p.set(kDh, DType::kF32); },
     {"dh: given", "chunk_fwd does not use it"}},
    {"NoOutputWanted",
     backward,
     [](Problem& p) { p.set(kDq, DType::kNone); },
     {"outputs: none asked for", "chunk_bwd", "dq, dk, dv"}},
    {"DtypeOfQ",
     forward,
     [](Problem& p) { p.set(kQ, DType::kI32); },
     {"q: found dtype int32", "expected bf16, fp16, fp32 or fp64"}},
    {"DtypeUnknown",
     forward,
     [](Problem& p) { p.set(kQ, static_cast<DType>(99)); },
     {"q: found dtype value 99", "expected bf16"}},
    {"DtypeOfK",
     forward,
     [](Problem& p) { p.set(kK, DType::kBF16); },
     {"k: found dtype bf16", "expected fp32 as q"}},
    {"DtypeOfCuSeqlens",
     forward,
     [](Problem& p) {
       p.set(kCuSeqlens, DType::kF32).sizes.N = 1;
       p.sizes.B = 1;
     },
     {"cu_seqlens: found dtype fp32", "expected int64 or int32"}},
    {"DtypeOfGamma",
     [] { return stage(Operation::kGateCumsum); },
     [](Problem& p) { p.set(kGamma, DType::kBF16); },
     {"gamma: found dtype bf16", "expected fp32 or fp64"}},
    {"DtypeOfStateIndices",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kStateIndices, DType::kI64)
           .set(kInitialState, DType::kF32)
           .set(kFinalState, DType::kF32);
       p.sizes.P = 3;
     },
     {"state_indices: found dtype int64", "expected int32"}},
    {"ShapeOfG",
     forward,
     [](Problem& p) {
       p.set(kG, TensorLayout::contiguous(DType::kF32, {2, 70, 4}));
     },
     {"g: found shape [2,70,4]", "expected [2,70,4,16] = [B,T,HV,K]"}},
    {"HeadsOfQ",
     forward,
     [](Problem& p) {
       p.set(kQ, TensorLayout::contiguous(DType::kF32, {2, 70, 4, 16}));
     },
     {"q: found shape [2,70,4,16]", "expected [2,70,2,16] = [B,T,H,K]"}},
    {"LengthOfV",
     forward,
     [](Problem& p) {
       p.set(kV, TensorLayout::contiguous(DType::kF32, {2, 71, 4, 24}));
     },
     {"v: found shape [2,71,4,24]", "expected [2,70,4,24]"}},
    {"StateOfOtherLayout",
     forward,
     [](Problem& p) {
       p.set(kInitialState, TensorLayout::contiguous(DType::kF32, {2, 4, 16, 24}));
       p.state_v_first = true;
     },
     {"initial_state: found shape [2,4,16,24]", "expected [2,4,24,16]", "V before K"}},
    {"StatesOfOtherCount",
     forward,
     [](Problem& p) {
       p.set(kInitialState, TensorLayout::contiguous(DType::kF32, {3, 4, 16, 24}));
     },
     {"initial_state: found shape [3,4,16,24]", "expected [2,4,16,24]"}},
    {"RankFive",
     forward,
     [](Problem& p) {
       p.set(kG, TensorLayout::contiguous(DType::kF32, {2, 70, 4, 16, 1}));
     },
     {"g: found rank 5", "expected 4"}},
    {"RankNegative",
     forward,
     [](Problem& p) {
       p.set(kG, TensorLayout{DType::kF32, -1, {}, {}});
     },
     {"g: found rank -1", "expected 4"}},
    {"FlatBiasOfOtherLength",
     forward,
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = -5;
       p.set(kDtBias, TensorLayout::contiguous(DType::kF32, {65}));
     },
     {"dt_bias: found shape [65]", "expected [4,16] = [HV,K]"}},
    {"StrideNegative",
     forward,
     [](Problem& p) {
       p.set(kG, TensorLayout::strided(DType::kF32, {2, 70, 4, 16}, {4480, -64, 16, 1}));
     },
     {"g: stride -64 of dimension 1", "expected 0 or more"}},
    {"StrideTooLarge",
     forward,
     [](Problem& p) {
       p.set(kG, TensorLayout::strided(DType::kF32, {2, 70, 4, 16},
                                       {std::numeric_limits<int64_t>::max(), 64, 16, 1}));
     },
     {"g: stride 9223372036854775807 of dimension 0, expected at most ", "address space"}},
    {"FlatStrideTooLarge",
     forward,
     [](Problem& p) {
       p.gate = Gate::kLowerBound;
       p.lower_bound = -5;
       p.set(kDtBias,
             TensorLayout::strided(DType::kF32, {64}, {std::numeric_limits<int64_t>::max()}));
     },
     {"dt_bias: stride 9223372036854775807 of dimension 0, expected at most ", "address space"}},
    {"OutputOverlapsItself",
     forward,
     [](Problem& p) {
       p.set(kO, TensorLayout::strided(DType::kF32, {2, 70, 4, 24}, {6720, 96, 20, 1}));
     },
     {"o: strides [6720,96,20,1]", "overlap", "expected distinct"}},
    {"OutputBroadcast",
     forward,
     [](Problem& p) {
       p.set(kO, TensorLayout::strided(DType::kF32, {2, 70, 4, 24}, {0, 96, 24, 1}));
     },
     {"o: strides [0,96,24,1]", "overlap"}},
};

const std::vector<Refusal> kNeeds = {
    {"QgNeedsQ",
     [] { return stage(Operation::kWu).set(kW, DType::kF32); },
     [](Problem& p) { p.set(kQg, DType::kF32); },
     {"q: absent", "because qg is present"}},
    {"UNeedsV",
     [] { return stage(Operation::kWu).set(kW, DType::kF32); },
     [](Problem& p) { p.set(kU, DType::kF32); },
     {"v: absent", "because u is present"}},
    {"DqRawNeedsDo",
     [] { return stage(Operation::kStateScan).set(kVNew, DType::kF32); },
     [](Problem& p) { p.set(kDqRaw, DType::kF32); },
     {"do: absent", "because dq_raw is present"}},
    {"PoolNeedsInitialState",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kStateIndices, DType::kI32).set(kFinalState, DType::kF32);
       p.sizes.P = 3;
     },
     {"initial_state: absent", "because state_indices is present"}},
    {"PoolOfOneType",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kStateIndices, DType::kI32).set(kInitialState, DType::kF32);
       p.set(kFinalState, DType::kBF16);
       p.sizes.P = 3;
     },
     {"final_state: found dtype bf16", "expected fp32", "with state_indices"}},
    {"AcceptedStatesOfOneType",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kNumAccepted, DType::kI32).set(kInitialState, DType::kBF16);
       p.set(kFinalState, DType::kF32);
     },
     {"final_state: found dtype fp32", "expected bf16", "with num_accepted"}},
    {"DtypeOfNumAccepted",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) {
       p.set(kNumAccepted, DType::kI64)
           .set(kInitialState, DType::kF32)
           .set(kFinalState, DType::kF32);
     },
     {"num_accepted: found dtype int64", "expected int32"}},
    {"NumAcceptedNeedsInitialState",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) { p.set(kNumAccepted, DType::kI32).set(kFinalState, DType::kF32); },
     {"initial_state: absent", "because num_accepted is present"}},
    {"NumAcceptedNeedsFinalState",
     [] { return stage(Operation::kRecurrent); },
     [](Problem& p) { p.set(kNumAccepted, DType::kI32).set(kInitialState, DType::kF32); },
     {"final_state: absent", "because num_accepted is present"}},
    {"NumAcceptedIsForTheRecurrence",
     forward,
     [](Problem& p) { p.set(kNumAccepted, DType::kI32); },
     {"num_accepted: given, but chunk_fwd does not use it", "leave it out", "none but q, k, v"}},
};

std::string name_of_refusal(const testing::TestParamInfo<Refusal>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Sizes, Refused, testing::ValuesIn(kSizes), name_of_refusal);
INSTANTIATE_TEST_SUITE_P(Options, Refused, testing::ValuesIn(kOptions), name_of_refusal);
INSTANTIATE_TEST_SUITE_P(Tensors, Refused, testing::ValuesIn(kTensors), name_of_refusal);
INSTANTIATE_TEST_SUITE_P(Needs, Refused, testing::ValuesIn(kNeeds), name_of_refusal);

TEST(Validated, AcceptsTheLargestAndSmallestSizes) {
  Problem problem = forward();
  problem.sizes = {.B = 1, .T = 0, .H = 1, .HV = 1, .K = 1, .V = 1};
  EXPECT_TRUE(problem.validated().ok());
  problem.sizes = {.B = 4, .T = 1 << 20, .H = 8, .HV = 32, .K = 256, .V = 512};
  EXPECT_TRUE(problem.validated().ok());
  problem.sizes = {.B = 1, .T = 0, .H = 1, .HV = 1, .K = 8, .V = 8, .N = 0};
  problem.set(kCuSeqlens, DType::kI32);
  EXPECT_TRUE(problem.validated().ok());
}

TEST(Validated, Fp64TensorsTakeNumbersBeyondFp32) {
  Problem problem =
      Problem::make(Operation::kChunkForward, {.T = 70, .HV = 1, .K = 16, .V = 24}, DType::kF64);
  problem.scale = 1e40;
  problem.gate = Gate::kLowerBound;
  problem.lower_bound = -1e40;
  EXPECT_TRUE(problem.validated().ok()) << problem.validated().status().message();
}

TEST(Validated, IgnoresEntriesPastTheRank) {
  Problem problem = forward();
  TensorLayout layout = TensorLayout::contiguous(DType::kF32, {2, 70, 4});
  layout.shape[3] = -7;
  layout.stride[3] = std::numeric_limits<int64_t>::min();
  problem.set(kBeta, layout);
  const Result<Problem> result = problem.validated();
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ((*result)[kBeta].shape[3], 0);
  EXPECT_EQ((*result)[kBeta].stride[3], 0);
}

TEST(Validated, AcceptsBroadcastInputsAndTransposedHeads) {
  Problem problem = forward();
  problem.set(kBeta, TensorLayout::strided(DType::kF32, {2, 70, 4}, {0, 0, 0}));
  problem.set(kG, TensorLayout::strided(DType::kF32, {2, 70, 4, 16}, {4480, 16, 1120, 1}));
  problem.set(kO, TensorLayout::strided(DType::kF32, {2, 70, 4, 24}, {6720, 24, 1680, 1}));
  const Result<Problem> result = problem.validated();
  EXPECT_TRUE(result.ok()) << result.status().message();
}

TEST(Validated, UnflattensTheBias) {
  Problem problem = forward();
  problem.gate = Gate::kLowerBound;
  problem.lower_bound = -5;
  problem.set(kDtBias, TensorLayout::strided(DType::kF32, {64}, {3}));
  const Result<Problem> result = problem.validated();
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ((*result)[kDtBias].rank, 2);
  EXPECT_EQ((*result)[kDtBias].shape, (std::array<int64_t, 4>{4, 16, 0, 0}));
  EXPECT_EQ((*result)[kDtBias].stride, (std::array<int64_t, 4>{48, 3, 0, 0}));
}

TEST(Validated, FillsLayoutsOfEveryPresentTensorAndIsStable) {
  for (int i = 0; i < kOperationCount; ++i) {
    Problem problem = stage(static_cast<Operation>(i));
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (spec.role == Role::kOutput && !spec.required) problem.set(spec.id, DType::kF32);
    }
    problem.set(kDALog, DType::kNone).set(kDdtBias, DType::kNone);
    for (TensorId id : {kQ, kV, kDo}) {
      if (problem.canonical_layout(id).rank != 0) problem.set(id, DType::kF32);
    }
    const Result<Problem> once = problem.validated();
    ASSERT_TRUE(once.ok()) << name_of(problem.operation) << ": " << once.status().message();
    const Result<Problem> twice = once->validated();
    ASSERT_TRUE(twice.ok()) << twice.status().message();
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      EXPECT_EQ((*once)[spec.id].rank != 0, once->has(spec.id)) << name_of(spec.id);
      EXPECT_EQ((*once)[spec.id].stride, (*twice)[spec.id].stride) << name_of(spec.id);
    }
  }
}

// The optional arguments in pairs: legal pairs pass, illegal ones name the argument needed.
TEST(Reports, STATE_08_OptionalArgumentsInPairs) {
  const std::vector<std::pair<std::string, std::function<void(Problem&)>>> parts = {
      {"A_log", [](Problem& p) { p.set(kALog, DType::kF32); }},
      {"dt_bias", [](Problem& p) { p.set(kDtBias, DType::kF32); }},
      {"initial_state", [](Problem& p) { p.set(kInitialState, DType::kF32); }},
      {"cu_seqlens",
       [](Problem& p) {
         p.set(kCuSeqlens, DType::kI64);
         p.sizes.N = 2;
       }},
      {"scale", [](Problem& p) { p.scale = 1.0; }},
      {"lower_bound", [](Problem& p) { p.lower_bound = -5; }},
  };
  for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
    for (std::size_t mask = 0; mask < std::size_t{1} << parts.size(); ++mask) {
      Problem problem = forward();
      problem.sizes.B = 1;
      problem.gate = gate;
      const auto given = [&](std::size_t i) { return (mask >> i & 1) != 0; };
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (given(i)) parts[i].second(problem);
      }
      std::vector<std::string> offenders;
      if (gate == Gate::kNone && given(0)) offenders.push_back("A_log");
      if (gate == Gate::kNone && given(1)) offenders.push_back("dt_bias");
      if (gate == Gate::kSoftplus && !given(0)) offenders.push_back("A_log");
      if ((gate == Gate::kLowerBound) != given(5)) offenders.push_back("lower_bound");
      const Result<Problem> result = problem.validated();
      EXPECT_EQ(result.ok(), offenders.empty()) << name_of(gate) << " " << mask;
      if (result.ok() || offenders.empty()) continue;
      bool named = false;
      for (const std::string& offender : offenders) {
        named |= result.status().message().rfind(offender + ":", 0) == 0;
      }
      EXPECT_TRUE(named) << result.status().message();
    }
  }
}

// A gate per head (as other operators take it), beta with a spare dimension, other head counts.
TEST(Reports, STATE_07_WrongShapesAreRefusedByName) {
  Problem problem =
      Problem::make(Operation::kChunkForward,
                    {.B = 4, .T = 2048, .H = 4, .HV = 4, .K = 128, .V = 512}, DType::kBF16);
  Problem scalar_gate = problem;
  scalar_gate.set(kG, TensorLayout::contiguous(DType::kF32, {4, 2048, 4}));
  expect_refused(scalar_gate, {"g: found shape [4,2048,4]", "[4,2048,4,128]"});
  Problem spare = problem;
  spare.set(kBeta, TensorLayout::contiguous(DType::kF32, {4, 2048, 4, 1}));
  expect_refused(spare, {"beta: found shape [4,2048,4,1]", "[4,2048,4] = [B,T,HV]"});
  Problem heads = problem;
  heads.set(kK, TensorLayout::contiguous(DType::kBF16, {4, 2048, 2, 128}));
  expect_refused(heads, {"k: found shape [4,2048,2,128]", "[4,2048,4,128]"});
  Problem length = problem;
  length.set(kV, TensorLayout::contiguous(DType::kBF16, {4, 2047, 4, 512}));
  expect_refused(length, {"v: found shape [4,2047,4,512]", "[4,2048,4,512]"});
}

TEST(Reports, STATE_04_HeadSize512IsRefusedByName) {
  Problem problem = forward();
  problem.sizes.K = 512;
  expect_refused(problem, {"size K: found 512", "1..256"});
}

TEST(Reports, VARLEN_12_PackedInputOfSeveralRowsIsRefused) {
  Problem problem = forward();
  problem.set(kCuSeqlens, DType::kI64).sizes.N = 2;
  expect_refused(problem, {"size B: found 2 with cu_seqlens", "expected 1"});
  problem.sizes.B = 1;
  ASSERT_TRUE(problem.validated().ok());
  problem.set(kInitialState, TensorLayout::contiguous(DType::kF32, {3, 4, 16, 24}));
  expect_refused(problem, {"initial_state: found shape [3,4,16,24]", "[2,4,16,24]"});
  problem.set(kInitialState, DType::kNone);
  problem.set(kCuSeqlens, TensorLayout::contiguous(DType::kI64, {1, 3}));
  expect_refused(problem, {"cu_seqlens: found shape [1,3]", "expected [3] = [N+1]"});
}

TEST(Reports, DIM_04_OtherChunkSizesAreRefused) {
  for (const int32_t chunk_size : {0, 1, 8, 16, 48, 128, -64}) {
    Problem problem = forward();
    problem.chunk_size = chunk_size;
    expect_refused(problem,
                   {"chunk_size: found " + std::to_string(chunk_size), "expected 64 or 32"});
  }
}

}  // namespace
}  // namespace kda
