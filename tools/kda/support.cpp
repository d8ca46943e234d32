// kda support: what there is, and for a problem what is chosen and why nothing else is.
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "command.h"

namespace kda::program {
namespace {

using nlohmann::json;

constexpr Operation kOperations[] = {
    Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent,
    Operation::kGateCumsum,   Operation::kIntra,         Operation::kWu,
    Operation::kStateScan,    Operation::kOutput,        Operation::kReverseScan,
    Operation::kWyBackward,   Operation::kIntraBackward};

Status check_operation(const std::string& name) {
  for (const Operation operation : kOperations) {
    if (name.empty() || name == kda::name_of(operation)) return {};
  }
  return {StatusCode::kInvalidArgument,
          fmt::format("--operation: found {}, expected chunk_fwd, chunk_bwd, recurrent or the name "
                      "of a stage (kda support lists them)",
                      name)};
}

bool has(Operation operation, TensorId id) {
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.id == id) return true;
  }
  return false;
}

bool has_states(Operation operation) {
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.shape.starts_with("[S,")) return true;
  }
  return false;
}

bool is_whole(Operation operation) {
  return operation == Operation::kChunkForward || operation == Operation::kChunkBackward ||
         operation == Operation::kRecurrent;
}

bool takes_gate(Operation operation) {
  return is_whole(operation) || operation == Operation::kGateCumsum;
}

bool takes_pool(Operation operation) { return has(operation, TensorId::kStateIndices); }

/// An option that some operations have.
struct Question {
  std::string_view option;
  bool given;
  std::string_view about;
  bool (*takes)(Operation);
};

/// Options that would be ignored: about what the operation lacks, or about no problem.
Status check_questions(const SupportCommand& command) {
  const Question questions[] = {
      {"--pool", command.pool != 0, "pool of states", takes_pool},
      {"--state-dtype", !command.state_dtype.empty(), "states", has_states},
      {"--state-v-first", command.state_v_first, "states", has_states},
      {"--gate", command.gate != "none", "gate", takes_gate},
      {"--qk-l2norm", command.qk_l2norm, "normalisation inside", is_whole},
      {"--beta-sigmoid", command.beta_sigmoid, "beta logits", is_whole},
      {"--sequences", command.sequences != 0, "", nullptr},
      {"--chunk-size", command.chunk_size != 64, "", nullptr},
  };
  for (const Question& question : questions) {
    if (!question.given) continue;
    std::string takers;
    bool taken = command.operation.empty() || question.takes == nullptr;
    for (const Operation operation : kOperations) {
      if (taken || !question.takes(operation)) continue;
      taken = command.operation == kda::name_of(operation);
      takers += fmt::format("{}{}", takers.empty() ? "" : " or ", kda::name_of(operation));
    }
    if (!taken) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: {} has no {}, expected --operation {}", question.option,
                          command.operation, question.about, takers)};
    }
    if (command.shape.empty()) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: found without --shape, expected --shape B,T,H,HV,K,V beside it",
                          question.option)};
    }
  }
  return {};
}

/// Whether the list shows the row: what --operation, --device and --impl leave.
bool listed(const SupportCommand& command, const ImplementationInfo& info) {
  const Common& common = command.common;
  const std::string_view device = kda::name_of(info.device);
  if (!command.operation.empty() && command.operation != kda::name_of(info.operation)) return false;
  if (common.device != "auto" && common.device.rfind(device, 0) != 0) return false;
  return is_chosen(common, info);
}

int list_all(const SupportCommand& command) {
  const Common& common = command.common;
  if (!common.json) {
    fmt::print("{:<13}{:<7}{:<28}{}\n", "operation", "device", "implementation", "takes");
  }
  for (const Operation operation : kOperations) {
    for (const ImplementationInfo& info : implementations()) {
      if (info.operation != operation || !listed(command, info)) continue;
      if (common.json) {
        print_json({{"operation", kda::name_of(operation)},
                    {"device", kda::name_of(info.device)},
                    {"impl", info.name},
                    {"family", info.family},
                    {"features", info.features}});
      } else {
        fmt::print("{:<13}{:<7}{:<28}{}\n", kda::name_of(operation), kda::name_of(info.device),
                   info.name, info.features);
      }
    }
  }
  const std::string reason = cuda_unavailable_reason();
  if (!common.json && !reason.empty()) fmt::print("\nCUDA cannot be used here: {}\n", reason);
  return kRight;
}

/// What the flags say about types.
struct Types {
  DType io;
  DType state;
};

/// The problem of the flags with the required tensors, final states and every gradient.
Problem make_problem(const SupportCommand& command, Operation operation, Sizes sizes,
                     const Types& types, Gate gate) {
  const DType io = types.io;
  sizes.N = command.sequences;
  sizes.P = command.pool;
  Problem problem = Problem::make(operation, sizes, io);
  problem.chunk_size = command.chunk_size;
  problem.state_v_first = command.state_v_first;
  if (command.sequences > 0) problem.set(TensorId::kCuSeqlens, DType::kI64);
  const bool whole = is_whole(operation);
  const DType accurate = io == DType::kF64 ? DType::kF64 : DType::kF32;
  if (takes_pool(operation) && command.pool > 0) {
    problem.set(TensorId::kStateIndices, DType::kI32);
  }
  if (whole) {
    problem.qk_l2norm = command.qk_l2norm;
    problem.beta_sigmoid = command.beta_sigmoid;
  }
  if (gate != Gate::kNone && takes_gate(operation)) {
    problem.gate = gate;
    problem.lower_bound = gate == Gate::kLowerBound ? -5 : 0;
    problem.set(TensorId::kALog, DType::kF32).set(TensorId::kDtBias, DType::kF32);
  }
  for (const TensorSpec& spec : tensors_of(operation)) {
    const bool is_state = spec.shape.starts_with("[S,");
    const bool has_source =
        (spec.id != TensorId::kDALog && spec.id != TensorId::kDdtBias) || gate != Gate::kNone;
    const bool is_gradient = operation == Operation::kChunkBackward && has_source;
    if (spec.role == Role::kOutput && !spec.required && whole && (is_state || is_gradient)) {
      problem.set(spec.id, is_state                             ? types.state
                           : spec.dtypes == DTypeRule::kFloatIo ? io
                                                                : accurate);
    }
    if (spec.role == Role::kInput && whole && is_state) problem.set(spec.id, types.state);
  }
  if (!whole) {
    for (const TensorSpec& spec : tensors_of(operation)) {
      if (spec.role != Role::kOutput || spec.required) continue;
      const bool needs_input =
          spec.id == TensorId::kQg || spec.id == TensorId::kU || spec.id == TensorId::kDqRaw;
      if (needs_input) continue;
      problem.set(spec.id, spec.shape.starts_with("[S,")        ? types.state
                           : spec.dtypes == DTypeRule::kFloatIo ? io
                                                                : accurate);
    }
  }
  return problem;
}

void print_verdicts(const Common& common, const Problem& problem, const Device& device,
                    const std::vector<Verdict>& verdicts) {
  if (!common.json) {
    fmt::print("{} on {}, {}\n", kda::name_of(problem.operation), name_of(device),
               shape_text(problem));
    if (verdicts.empty()) fmt::print("  nothing in this build runs it there\n");
  }
  for (const Verdict& verdict : verdicts) {
    if (common.json) {
      print_json({{"operation", kda::name_of(problem.operation)},
                  {"device", kda::name_of(device.type)},
                  {"impl", verdict.name},
                  {"supported", verdict.supported},
                  {"chosen", verdict.chosen},
                  {"reason", verdict.reason},
                  {"workspace_bytes", verdict.workspace_bytes}});
      continue;
    }
    const std::string_view mark = verdict.chosen ? "chosen" : verdict.supported ? "can" : "cannot";
    const std::string workspace = fmt::format("workspace {} bytes", verdict.workspace_bytes);
    fmt::print("  {:<7}{:<28}{}\n", mark, verdict.name,
               verdict.supported ? workspace : verdict.reason);
  }
}

void print_refusal(const Common& common, const Problem& problem, const Device& device,
                   const Status& status) {
  if (common.json) {
    print_json({{"operation", kda::name_of(problem.operation)},
                {"device", kda::name_of(device.type)},
                {"error", status.message()},
                {"kind", kda::name_of(status.code())},
                {"exit_code", exit_code_of(status)}});
    return;
  }
  fmt::print("{} on {}, {}\n  unsupported: {}\n", kda::name_of(problem.operation), name_of(device),
             shape_text(problem), status.message());
}

/// The device asked about, which check_request let pass: the verdicts of one that is not here say
/// what else its implementations lack. So do those of the GPU where the choice names rows there
/// alone.
Result<Device> device_of(const Common& common, const Problem& problem) {
  if (common.device != "auto") return parse_device(common.device);
  const Device gpu{DeviceType::kCuda, 0};
  Result<Device> device = choose_device(common, problem);
  const Options options = common.options();
  if (device.ok() && !explain(problem, *device, options).ok() &&
      explain(problem, gpu, options).ok()) {
    return gpu;
  }
  return device;
}

/// Asks about one operation; sets `none` if nothing runs it.
Status ask(const SupportCommand& command, const Problem& problem, bool& none) {
  Result<Device> device = device_of(command.common, problem);
  if (!device.ok()) return device.status();
  Result<std::vector<Verdict>> verdicts = explain(problem, *device, command.common.options());
  if (!verdicts.ok() && verdicts.status().code() == StatusCode::kUnsupported) {
    print_refusal(command.common, problem, *device, verdicts.status());
    none = true;
    return {};
  }
  if (!verdicts.ok()) return verdicts.status();
  print_verdicts(command.common, problem, *device, *verdicts);
  bool chosen = false;
  for (const Verdict& verdict : *verdicts) chosen = chosen || verdict.chosen;
  none = none || !chosen;
  return {};
}

/// check_common, but a problem may be asked about rows whose driver or GPU this machine lacks.
Status check_request(const SupportCommand& command) {
  const Common& common = command.common;
  const bool unusable = !cuda_unavailable_reason().empty();
  if (!command.shape.empty() && common.device != "auto" && unusable) {
    Result<Device> device = parse_device(common.device);
    if (!device.ok()) return device.status();
    for (const ImplementationInfo& info : implementations()) {
      if (info.device == device->type) return {};
    }
  }
  return check_common(common);
}

}  // namespace

int support(const SupportCommand& command) {
  const Common& common = command.common;
  Result<Sizes> sizes = command.shape.empty() ? Sizes{} : parse_shape(command.shape);
  Result<DType> io = parse_dtype(command.dtype);
  Result<Gate> gate = parse_gate(command.gate);
  Result<DType> state = io.ok() && *io == DType::kF64 ? DType::kF64 : DType::kF32;
  if (!command.state_dtype.empty()) state = parse_dtype(command.state_dtype, "--state-dtype");
  for (const Status& status : {sizes.status(), io.status(), gate.status(), state.status(),
                               check_operation(command.operation), check_request(command)}) {
    if (!status.ok()) return fail(common, "", status);
  }
  for (const auto& [option, value] :
       {std::pair{"--sequences", command.sequences}, {"--pool", command.pool}}) {
    if (value >= 0) continue;
    return fail(common, "",
                {StatusCode::kInvalidArgument,
                 fmt::format("{}: found {}, expected 0 or more", option, value)});
  }
  if (Status status = check_questions(command); !status.ok()) return fail(common, "", status);
  if (command.shape.empty()) return list_all(command);
  bool none = false;
  for (const Operation operation : kOperations) {
    if (!command.operation.empty() && command.operation != kda::name_of(operation)) continue;
    const Problem problem = make_problem(command, operation, *sizes, {*io, *state}, *gate);
    if (Status status = ask(command, problem, none); !status.ok()) {
      return fail(common, std::string(kda::name_of(operation)), status);
    }
  }
  return none ? kUnsupportedHere : kRight;
}

}  // namespace kda::program
