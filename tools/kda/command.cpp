#include "command.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <ctime>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace kda::program {
namespace {

using nlohmann::json;

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

/// One token, and an output where none is required.
Problem smallest_problem(Operation operation) {
  Problem problem = Problem::make(operation, {1, 1, 1, 1, 1, 1, 0, 0}, DType::kF32);
  for (const TensorSpec& spec : tensors_of(operation)) {
    if (spec.role == Role::kInput) continue;
    if (!spec.required) problem.set(spec.id, DType::kF32);
    break;
  }
  return problem;
}

/// Whether the device is here.
Status check_present(const Device& device) {
  if (device.type == DeviceType::kCpu) return {};
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return {StatusCode::kUnsupported, "CUDA: " + reason};
  }
  for (const DeviceInfo& info : devices()) {
    if (info.device == device) return {};
  }
  return {StatusCode::kUnsupported, fmt::format("CUDA: there is no device {}", device.index)};
}

/// The device of --device, which is not "auto", if it is here.
Result<Device> present_device(const std::string& text) {
  Result<Device> device = parse_device(text);
  if (!device.ok()) return device;
  if (Status status = check_present(*device); !status.ok()) return status;
  return device;
}

}  // namespace

Result<Device> parse_device(const std::string& text) {
  if (text == "cpu") return Device{DeviceType::kCpu, 0};
  int32_t index = 0;
  if (text.rfind("cuda:", 0) == 0) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + 5, end, index);
    if (error != std::errc{} || stop != end || index < 0) {
      return invalid(fmt::format("--device: found {}, expected cuda:NUMBER", text));
    }
  } else if (text != "cuda") {
    return invalid(
        fmt::format("--device: found {}, expected auto, cpu, cuda or cuda:NUMBER", text));
  }
  return Device{DeviceType::kCuda, index};
}

int exit_code_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return kRight;
    case StatusCode::kInvalidArgument:
      return kBadInput;
    case StatusCode::kUnsupported:
      return kUnsupportedHere;
    default:
      return kDeviceFailure;
  }
}

int fail(const Common& common, const std::string& subject, const Status& status) {
  const std::string line = subject.empty() ? status.message() : subject + ": " + status.message();
  fmt::print(stderr, "kda: {}\n", printable(line));
  const int code = exit_code_of(status);
  if (common.json) {
    json object = {
        {"error", status.message()}, {"kind", kda::name_of(status.code())}, {"exit_code", code}};
    if (!subject.empty()) object["case"] = subject;
    print_json(object);
  }
  return code;
}

std::string printable(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      line += fmt::format("\\x{:02x}", byte);
    } else {
      line += c;
    }
  }
  return line;
}

void print_json(const json& object) {
  fmt::print("{}\n", object.dump(-1, ' ', false, json::error_handler_t::replace));
  std::fflush(stdout);
}

Result<Device> choose_device(const Common& common, const Problem& problem) {
  if (common.device != "auto") return present_device(common.device);
  const Device cuda{DeviceType::kCuda, 0};
  if (cuda_unavailable_reason().empty() && supports(problem, cuda, common.options()).ok()) {
    return cuda;
  }
  return Device{};
}

Status check_common(const Common& common) {
  Device device;
  if (common.device != "auto") {
    Result<Device> parsed = present_device(common.device);
    if (!parsed.ok()) return parsed.status();
    device = *parsed;
  }
  if (common.implementation.empty()) return {};
  Status refusal;
  for (const ImplementationInfo& info : implementations()) {
    if (info.device != device.type && common.device != "auto") continue;
    // A name of any operation will do; the refusal that is told is that of the first.
    const Problem problem = smallest_problem(info.operation);
    const Device its{info.device, info.device == device.type ? device.index : 0};
    const Status status = explain(problem, its, common.options()).status();
    if (status.ok()) return {};
    if (refusal.ok()) refusal = status;
  }
  return refusal;
}

bool is_chosen(const Common& common, const ImplementationInfo& info) {
  constexpr const char* kSeparators = ", ";
  const std::string_view list = common.implementation;
  bool any_word = false;
  std::size_t begin = list.find_first_not_of(kSeparators);
  while (begin < list.size()) {
    const std::size_t end = std::min(list.find_first_of(kSeparators, begin), list.size());
    const std::string_view word = list.substr(begin, end - begin);
    if (word == info.name || word == info.family) return true;
    any_word = true;
    begin = list.find_first_not_of(kSeparators, end);
  }
  return !any_word;
}

Status check_environment(const Common& common) {
  // A plan of KDA_IMPL may end at rows that are elsewhere before it reads the limit.
  std::vector<std::string> choices{"reference"};
  if (common.implementation.empty()) choices.emplace_back();
  for (const std::string& choice : choices) {
    Options options = common.options();
    options.implementation = choice;
    Status status = supports(smallest_problem(Operation::kChunkForward), Device{}, options);
    if (status.code() == StatusCode::kInvalidArgument) return status;
  }
  return {};
}

std::string name_of(const Device& device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return fmt::format("{}:{}", kda::name_of(device.type), device.index);
}

std::string machine_of(const Device& device) {
  for (const DeviceInfo& info : devices()) {
    if (info.device == device) return fmt::format("{}; {}", info.name, info.features);
  }
  return "";
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::string text(32, '\0');
  text.resize(std::strftime(text.data(), text.size(), "%FT%TZ", std::gmtime(&seconds)));
  return text;
}

Result<DType> parse_dtype(const std::string& text, std::string_view option) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    if (text == kda::name_of(dtype)) return dtype;
  }
  return invalid(fmt::format("{}: found {}, expected bf16, fp16, fp32 or fp64", option, text));
}

Result<Gate> parse_gate(const std::string& text) {
  for (const Gate gate : {Gate::kNone, Gate::kSoftplus, Gate::kLowerBound}) {
    if (text == kda::name_of(gate)) return gate;
  }
  return invalid(fmt::format("--gate: found {}, expected none, softplus or lower_bound", text));
}

Result<Sizes> parse_shape(const std::vector<int64_t>& numbers) {
  if (numbers.size() != 6) {
    return invalid(fmt::format("--shape: found {} numbers ({}), expected the six of B,T,H,HV,K,V",
                               numbers.size(), fmt::join(numbers, ",")));
  }
  return Sizes{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], 0, 0};
}

std::string shape_text(const Problem& problem) {
  const Sizes& s = problem.sizes;
  return fmt::format("B{} T{} H{} HV{} K{} V{}{}", s.B, s.T, s.H, s.HV, s.K, s.V,
                     problem.packed() ? fmt::format(" in {} sequences", s.N) : "");
}

bool is_reference(std::string_view implementation) {
  return implementation.substr(0, 10) == "reference_";
}

}  // namespace kda::program
