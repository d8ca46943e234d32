// Data types, devices, operations and tensor names of the public interface.
//
// The letters are those of the KDA literature and of docs/semantics.md:
//   q k v g beta A_log dt_bias gamma Aqk A w u kg qg h v_new o, sizes B T H HV K V C N.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kda {

/// Element type of a tensor. `kNone` marks a tensor as absent. Values are part of the C ABI.
enum class DType : int32_t {
  kNone = 0,
  kBF16 = 1,
  kF16 = 2,
  kF32 = 3,
  kF64 = 4,
  kI32 = 5,
  kI64 = 6
};

/// Bytes of one element; 0 for kNone.
std::size_t size_of(DType dtype);
/// "bf16", "fp16", "fp32", "fp64", "int32", "int64", "none".
std::string_view name_of(DType dtype);

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1 };

/// A place where tensors live and work runs. `index` is the CUDA ordinal; 0 for the CPU.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda".
std::string_view name_of(DeviceType type);

/// How the natural-log decay of a token and key channel is formed from tensor g.
enum class Gate : int32_t {
  kNone = 0,        ///< g is the log decay itself (<= 0, -inf allowed).
  kSoftplus = 1,    ///< -exp(A_log) softplus(g + dt_bias), unbounded below: (3.4).
  kLowerBound = 2,  ///< lower_bound sigmoid(exp(A_log) (g + dt_bias)): (3.8).
};

/// "none", "softplus" or "lower_bound".
std::string_view name_of(Gate gate);

/// What can be asked for. Equation numbers are those of docs/semantics.md.
enum class Operation : int32_t {
  kChunkForward = 0,   ///< Whole forward over chunks: (2.1)-(2.5), with all options of section 3.
  kChunkBackward = 1,  ///< All gradients of kChunkForward: (2.6)-(2.13), (3.3)-(3.13).
  kRecurrent = 2,    ///< Token by token, for decoding; states may be updated in place or in a pool.
  kGateCumsum = 3,   ///< Stage: gate and chunk-local cumulative sum -> gamma, (4.1)-(4.2).
  kIntra = 4,        ///< Stage: score matrices and inverse -> Aqk, A, (4.4)-(4.7).
  kWu = 5,           ///< Stage: gated operands -> w, u, kg, qg, (4.9)-(4.12).
  kStateScan = 6,    ///< Stage: serial scan -> h, v_new, final_state, dq_raw, (4.13)-(4.15), (5.1).
  kOutput = 7,       ///< Stage: o from states and scores, (4.17).
  kReverseScan = 8,  ///< Stage: reverse serial scan -> dh, dv_new, dinitial_state, (5.3)-(5.6).
  kWyBackward =
      9,  ///< Stage: gradients through states and WY form -> partials, (5.2), (5.7)-(5.17).
  kIntraBackward =
      10,  ///< Stage: gradients through the scores -> dq, dk, dg, dbeta, (5.19)-(5.26).
};
inline constexpr int kOperationCount = 11;

/// Stem used in implementation names, logs and the command line, for example "chunk_fwd".
std::string_view name_of(Operation operation);

/// Every tensor an operation can read or write. New names are appended; values are part of the C
/// ABI. Shapes, roles and permitted dtypes per operation: `tensors_of` in problem.h. Where one is
/// passed, it must be one of these: no range is checked.
enum class TensorId : int32_t {
  kQ = 0,
  kK,
  kV,
  kG,
  kBeta,
  kALog,
  kDtBias,
  kInitialState,
  kCuSeqlens,
  kStateIndices,
  kDo,
  kDfinalState,
  kO,
  kFinalState,
  kDq,
  kDk,
  kDv,
  kDg,
  kDbeta,
  kDALog,
  kDdtBias,
  kDinitialState,
  kGamma,
  kAqk,
  kA,
  kW,
  kU,
  kKg,
  kQg,
  kH,
  kVNew,
  kDqRaw,
  kDh,
  kDvNew,
  kDP,
  kDL,
  kDqPartial,
  kDkPartial,
  kDgPartial,
  kDbetaPartial,
  kNumAccepted,
};
inline constexpr int kTensorCount = 41;

/// The name used in messages and case files, for example "A_log" or "initial_state".
std::string_view name_of(TensorId id);

}  // namespace kda
