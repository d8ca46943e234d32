// The tensors of every operation: one table behind validation, program, tests and documentation.
#include <array>

#include "kda/problem.h"

namespace kda {
namespace {

using enum TensorId;
using enum DTypeRule;
constexpr Role kIn = Role::kInput;
constexpr Role kOut = Role::kOutput;
constexpr bool kReq = true;
constexpr bool kOpt = false;

constexpr std::string_view kQkShape = "[B,T,H,K]";
constexpr std::string_view kKeyShape = "[B,T,HV,K]";
constexpr std::string_view kValueShape = "[B,T,HV,V]";
constexpr std::string_view kRowShape = "[B,T,HV]";
constexpr std::string_view kScoreShape = "[B,T,HV,C]";
constexpr std::string_view kStateShape = "[S,HV,K,V]";
constexpr std::string_view kChunkShape = "[NC,HV,K,V]";

constexpr TensorSpec kSpecQ{kQ, kIn, kReq, kQkShape, kIo, "queries"};
constexpr TensorSpec kSpecK{kK, kIn, kReq, kQkShape, kSameAsQ, "keys"};
constexpr TensorSpec kSpecV{kV, kIn, kReq, kValueShape, kSameAsQ, "values"};
constexpr TensorSpec kSpecG{kG, kIn, kReq, kKeyShape, kFloat, "log decay, or raw gate input"};
constexpr TensorSpec kSpecBeta{kBeta, kIn, kReq, kRowShape, kFloat, "write strength, or its logit"};
constexpr TensorSpec kSpecALog{kALog, kIn, kOpt, "[HV]", kFloat, "log of the gate's slope"};
constexpr TensorSpec kSpecDtBias{kDtBias, kIn, kOpt, "[HV,K]", kFloat, "bias of the gate"};
constexpr TensorSpec kSpecH0{kInitialState, kIn, kOpt, kStateShape, kFloat, "state before"};
constexpr TensorSpec kSpecCu{kCuSeqlens, kIn, kOpt, "[N+1]", kIndex, "starts of packed sequences"};
constexpr TensorSpec kSpecGamma{kGamma,    kIn,       kReq,
                                kKeyShape, kAccurate, "log2 decay summed within the chunk"};

constexpr std::array kChunkForwardTensors = {
    kSpecQ,
    kSpecK,
    kSpecV,
    kSpecG,
    kSpecBeta,
    kSpecALog,
    kSpecDtBias,
    kSpecH0,
    kSpecCu,
    TensorSpec{kO, kOut, kReq, kValueShape, kFloatIo, "outputs"},
    TensorSpec{kFinalState, kOut, kOpt, kStateShape, kFloat, "state after"},
    TensorSpec{kH, kOut, kOpt, kChunkShape, kFloatIo, "state entering each chunk"},
    TensorSpec{kAqk, kOut, kOpt, kScoreShape, kFloatIo, "scaled causal scores"},
    TensorSpec{kA, kOut, kOpt, kScoreShape, kFloatIo, "inverse of I + L"},
};

constexpr std::array kChunkBackwardTensors = {
    kSpecQ,
    kSpecK,
    kSpecV,
    kSpecG,
    kSpecBeta,
    kSpecALog,
    kSpecDtBias,
    kSpecH0,
    kSpecCu,
    TensorSpec{kDo, kIn, kReq, kValueShape, kFloatIo, "gradient of o"},
    TensorSpec{kDfinalState, kIn, kOpt, kStateShape, kFloat, "gradient of final_state"},
    TensorSpec{kH, kIn, kOpt, kChunkShape, kFloatIo, "saved by the forward"},
    TensorSpec{kAqk, kIn, kOpt, kScoreShape, kFloatIo, "saved by the forward"},
    TensorSpec{kA, kIn, kOpt, kScoreShape, kFloatIo, "saved by the forward"},
    TensorSpec{kDq, kOut, kOpt, kQkShape, kFloatIo, "gradient of q"},
    TensorSpec{kDk, kOut, kOpt, kQkShape, kFloatIo, "gradient of k"},
    TensorSpec{kDv, kOut, kOpt, kValueShape, kFloatIo, "gradient of v"},
    TensorSpec{kDg, kOut, kOpt, kKeyShape, kFloat, "gradient of g as given"},
    TensorSpec{kDbeta, kOut, kOpt, kRowShape, kFloat, "gradient of beta as given"},
    TensorSpec{kDALog, kOut, kOpt, "[HV]", kFloat, "gradient of A_log"},
    TensorSpec{kDdtBias, kOut, kOpt, "[HV,K]", kFloat, "gradient of dt_bias"},
    TensorSpec{kDinitialState, kOut, kOpt, kStateShape, kFloat, "gradient of initial_state"},
};

constexpr std::array kRecurrentTensors = {
    kSpecQ,
    kSpecK,
    kSpecV,
    kSpecG,
    kSpecBeta,
    kSpecALog,
    kSpecDtBias,
    kSpecH0,
    kSpecCu,
    TensorSpec{kStateIndices, kIn, kOpt, "[N]", kInt32, "pool slot of each sequence; -1 skips it"},
    TensorSpec{kNumAccepted, kIn, kOpt, "[N]", kInt32,
               "how many first tokens of each sequence run"},
    TensorSpec{kO, kOut, kReq, kValueShape, kFloatIo, "outputs"},
    TensorSpec{kFinalState, kOut, kOpt, kStateShape, kFloat, "state after; may be initial_state"},
};

constexpr std::array kGateCumsumTensors = {
    kSpecG,
    kSpecALog,
    kSpecDtBias,
    kSpecCu,
    TensorSpec{kGamma, kOut, kReq, kKeyShape, kAccurate, "log2 decay summed within the chunk"},
};

constexpr std::array kIntraTensors = {
    kSpecQ,
    kSpecK,
    kSpecBeta,
    kSpecGamma,
    kSpecCu,
    TensorSpec{kAqk, kOut, kOpt, kScoreShape, kFloatIo, "scaled causal scores"},
    TensorSpec{kA, kOut, kOpt, kScoreShape, kFloatIo, "inverse of I + L"},
};

constexpr TensorSpec kSpecA{kA, kIn, kReq, kScoreShape, kFloatIo, "inverse of I + L"};
constexpr TensorSpec kSpecAqk{kAqk, kIn, kReq, kScoreShape, kFloatIo, "scaled causal scores"};

constexpr std::array kWuTensors = {
    TensorSpec{kQ, kIn, kOpt, kQkShape, kFloatIo, "queries; needed for qg"},
    TensorSpec{kK, kIn, kReq, kQkShape, kIo, "keys"},
    TensorSpec{kV, kIn, kOpt, kValueShape, kFloatIo, "values; needed for u"},
    kSpecBeta,
    kSpecGamma,
    kSpecA,
    kSpecCu,
    TensorSpec{kW, kOut, kOpt, kKeyShape, kFloatIo, "A (beta . ke)"},
    TensorSpec{kU, kOut, kOpt, kValueShape, kFloatIo, "A (beta . v)"},
    TensorSpec{kKg, kOut, kOpt, kKeyShape, kFloatIo, "keys as the leaving state sees them"},
    TensorSpec{kQg, kOut, kOpt, kKeyShape, kFloatIo, "queries as the entering state sees them"},
};

constexpr std::array kStateScanTensors = {
    TensorSpec{kKg, kIn, kReq, kKeyShape, kIo, "keys as the leaving state sees them"},
    TensorSpec{kW, kIn, kReq, kKeyShape, kFloatIo, "A (beta . ke)"},
    TensorSpec{kU, kIn, kReq, kValueShape, kFloatIo, "A (beta . v)"},
    TensorSpec{kGamma, kIn, kReq, kKeyShape, kAccurate, "log2 decay; last valid rows are read"},
    kSpecH0,
    kSpecCu,
    TensorSpec{kDo, kIn, kOpt, kValueShape, kFloatIo, "gradient of o; needed for dq_raw"},
    TensorSpec{kH, kOut, kOpt, kChunkShape, kFloatIo, "state entering each chunk"},
    TensorSpec{kVNew, kOut, kOpt, kValueShape, kFloatIo, "u - w h"},
    TensorSpec{kFinalState, kOut, kOpt, kStateShape, kFloat, "state after"},
    TensorSpec{kDqRaw, kOut, kOpt, kKeyShape, kAccurate, "do h^T, no gate, no scale"},
};

constexpr std::array kOutputTensors = {
    kSpecQ,
    kSpecGamma,
    kSpecAqk,
    TensorSpec{kH, kIn, kReq, kChunkShape, kFloatIo, "state entering each chunk"},
    TensorSpec{kVNew, kIn, kReq, kValueShape, kFloatIo, "u - w h"},
    kSpecCu,
    TensorSpec{kO, kOut, kReq, kValueShape, kFloatIo, "outputs"},
};

constexpr std::array kReverseScanTensors = {
    TensorSpec{kQg, kIn, kReq, kKeyShape, kIo, "queries as the entering state sees them"},
    TensorSpec{kKg, kIn, kReq, kKeyShape, kFloatIo, "keys as the leaving state sees them"},
    TensorSpec{kW, kIn, kReq, kKeyShape, kFloatIo, "A (beta . ke)"},
    TensorSpec{kGamma, kIn, kReq, kKeyShape, kAccurate, "log2 decay; last valid rows are read"},
    kSpecAqk,
    TensorSpec{kDo, kIn, kReq, kValueShape, kFloatIo, "gradient of o"},
    TensorSpec{kDfinalState, kIn, kOpt, kStateShape, kFloat, "gradient of final_state"},
    kSpecCu,
    TensorSpec{kDh, kOut, kOpt, kChunkShape, kFloatIo, "gradient of the state leaving each chunk"},
    TensorSpec{kDvNew, kOut, kOpt, kValueShape, kFloatIo, "gradient of v_new"},
    TensorSpec{kDinitialState, kOut, kOpt, kStateShape, kFloat, "gradient of initial_state"},
};

constexpr std::array kWyBackwardTensors = {
    kSpecQ,
    kSpecK,
    kSpecV,
    kSpecBeta,
    kSpecGamma,
    kSpecA,
    TensorSpec{kVNew, kIn, kReq, kValueShape, kFloatIo, "u - w h"},
    TensorSpec{kH, kIn, kReq, kChunkShape, kFloatIo, "state entering each chunk"},
    TensorSpec{kDh, kIn, kReq, kChunkShape, kFloatIo, "gradient of the state leaving each chunk"},
    TensorSpec{kDvNew, kIn, kReq, kValueShape, kFloatIo, "gradient of v_new"},
    TensorSpec{kDo, kIn, kReq, kValueShape, kFloatIo, "gradient of o"},
    kSpecCu,
    TensorSpec{kDv, kOut, kOpt, kValueShape, kFloatIo, "gradient of v"},
    TensorSpec{kDqPartial, kOut, kOpt, kKeyShape, kAccurate, "dq through the states"},
    TensorSpec{kDkPartial, kOut, kOpt, kKeyShape, kAccurate, "dk through states and WY form"},
    TensorSpec{kDgPartial, kOut, kOpt, kKeyShape, kAccurate, "dg through states and WY form"},
    TensorSpec{kDbetaPartial, kOut, kOpt, kRowShape, kAccurate, "dbeta through WY form"},
    TensorSpec{kDP, kOut, kOpt, kScoreShape, kAccurate, "gradient of P"},
    TensorSpec{kDL, kOut, kOpt, kScoreShape, kAccurate, "gradient of L"},
};

constexpr std::array kIntraBackwardTensors = {
    kSpecQ,
    kSpecK,
    kSpecBeta,
    kSpecGamma,
    TensorSpec{kDP, kIn, kReq, kScoreShape, kAccurate, "gradient of P"},
    TensorSpec{kDL, kIn, kReq, kScoreShape, kAccurate, "gradient of L"},
    TensorSpec{kDqPartial, kIn, kOpt, kKeyShape, kAccurate, "added to dq"},
    TensorSpec{kDkPartial, kIn, kOpt, kKeyShape, kAccurate, "added to dk"},
    TensorSpec{kDgPartial, kIn, kOpt, kKeyShape, kAccurate, "added to dg"},
    TensorSpec{kDbetaPartial, kIn, kOpt, kRowShape, kAccurate, "added to dbeta"},
    kSpecCu,
    TensorSpec{kDq, kOut, kOpt, kQkShape, kFloatIo, "gradient of q, summed over its value heads"},
    TensorSpec{kDk, kOut, kOpt, kQkShape, kFloatIo, "gradient of k, summed over its value heads"},
    TensorSpec{kDg, kOut, kOpt, kKeyShape, kFloat, "gradient of the natural-log decay"},
    TensorSpec{kDbeta, kOut, kOpt, kRowShape, kFloat, "gradient of beta"},
};

}  // namespace

std::span<const TensorSpec> tensors_of(Operation operation) {
  switch (operation) {
    case Operation::kChunkForward:
      return kChunkForwardTensors;
    case Operation::kChunkBackward:
      return kChunkBackwardTensors;
    case Operation::kRecurrent:
      return kRecurrentTensors;
    case Operation::kGateCumsum:
      return kGateCumsumTensors;
    case Operation::kIntra:
      return kIntraTensors;
    case Operation::kWu:
      return kWuTensors;
    case Operation::kStateScan:
      return kStateScanTensors;
    case Operation::kOutput:
      return kOutputTensors;
    case Operation::kReverseScan:
      return kReverseScanTensors;
    case Operation::kWyBackward:
      return kWyBackwardTensors;
    case Operation::kIntraBackward:
      return kIntraBackwardTensors;
  }
  return {};
}

std::string_view describe(DTypeRule rule) {
  switch (rule) {
    case kIo:
      return "bf16, fp16, fp32 or fp64";
    case kSameAsQ:
      return "as q";
    case kFloatIo:
    case kFloat:
      return "bf16, fp16, fp32 or fp64";
    case kAccurate:
      return "fp32 or fp64";
    case kIndex:
      return "int64 or int32";
    case kInt32:
      return "int32";
  }
  return "unknown rule";
}

}  // namespace kda
