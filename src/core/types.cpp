#include "kda/types.h"

#include <array>

#include "kda/status.h"
#include "kda/version.h"

namespace kda {
namespace {

constexpr std::array<std::string_view, kTensorCount> kTensorNames = {
    "q",           "k",
    "v",           "g",
    "beta",        "A_log",
    "dt_bias",     "initial_state",
    "cu_seqlens",  "state_indices",
    "do",          "dfinal_state",
    "o",           "final_state",
    "dq",          "dk",
    "dv",          "dg",
    "dbeta",       "dA_log",
    "ddt_bias",    "dinitial_state",
    "gamma",       "Aqk",
    "A",           "w",
    "u",           "kg",
    "qg",          "h",
    "v_new",       "dq_raw",
    "dh",          "dv_new",
    "dP",          "dL",
    "dq_partial",  "dk_partial",
    "dg_partial",  "dbeta_partial",
    "num_accepted"};

constexpr std::array<std::string_view, kOperationCount> kOperationNames = {
    "chunk_fwd",  "chunk_bwd", "recurrent",    "gate_cumsum", "intra",    "wu",
    "state_scan", "output",    "reverse_scan", "wy_bwd",      "intra_bwd"};

}  // namespace

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kNone:
      break;
  }
  return 0;
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kNone:
      return "none";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kF32:
      return "fp32";
    case DType::kF64:
      return "fp64";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
  }
  return "unknown dtype";
}

std::string_view name_of(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda";
  }
  return "unknown device";
}

std::string_view name_of(Gate gate) {
  switch (gate) {
    case Gate::kNone:
      return "none";
    case Gate::kSoftplus:
      return "softplus";
    case Gate::kLowerBound:
      return "lower_bound";
  }
  return "unknown gate";
}

std::string_view name_of(Operation operation) {
  const auto index = static_cast<std::size_t>(operation);
  return index < kOperationNames.size() ? kOperationNames[index] : "unknown operation";
}

std::string_view name_of(TensorId id) {
  const auto index = static_cast<std::size_t>(id);
  return index < kTensorNames.size() ? kTensorNames[index] : "unknown tensor";
}

const char* name_of(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kDeviceError:
      return "device error";
    case StatusCode::kOutOfMemory:
      return "out of memory";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown status";
}

#define KDA_TEXT_(x) #x
#define KDA_TEXT(x) KDA_TEXT_(x)
const char* version() {
  return KDA_TEXT(KDA_VERSION_MAJOR) "." KDA_TEXT(KDA_VERSION_MINOR) "." KDA_TEXT(
      KDA_VERSION_PATCH);
}

}  // namespace kda
