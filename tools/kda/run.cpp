// kda run: computes a case and writes the results.
#include <sys/resource.h>

#include <cmath>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "atomic_file.h"
#include "command.h"
#include "compare.h"
#include "execute.h"
#include "kda/version.h"
#include "progress.h"

namespace kda::program {
namespace {

using cases::Case;
using cases::Outcome;
using nlohmann::json;

std::size_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

Result<Case> load(const RunCommand& command) {
  std::error_code ignored;
  if (std::filesystem::equivalent(command.case_path, command.out_path, ignored)) {
    return Status(StatusCode::kInvalidArgument,
                  "found as the output too, expected another file: it would replace the case");
  }
  Result<Case> c = cases::load_case(command.case_path);
  if (!c.ok() || command.dtype.empty()) return c;
  Result<DType> dtype = parse_dtype(command.dtype);
  if (!dtype.ok()) return dtype.status();
  return cases::with_dtype(*c, *dtype);
}

cases::TensorFile result_file(const Case& c, const Outcome& outcome, const Device& device) {
  cases::TensorFile file;
  file.metadata = {{"producer", fmt::format("native-kda {}", version())},
                   {"device", name_of(device)},
                   {"forward", outcome.forward_implementation}};
  if (!outcome.backward_implementation.empty()) {
    file.metadata["backward"] = outcome.backward_implementation;
  }
  for (const auto& [id, tensor] : outcome.outputs) {
    cases::HostTensor& written = file.tensors[std::string(kda::name_of(id))];
    written = tensor;
    // The bias may have come flat; its gradient has the same shape.
    if (id == TensorId::kDdtBias) written.shape = c.input(TensorId::kDtBias)->shape;
  }
  return file;
}

bool is_finite(const cases::HostTensor& tensor) {
  for (int64_t i = 0; i < tensor.count(); ++i) {
    if (!std::isfinite(tensor.get(i))) return false;
  }
  return true;
}

json describe(const cases::TensorMap& outputs) {
  json list = json::object();
  for (const auto& [id, tensor] : outputs) {
    list[std::string(kda::name_of(id))] = {{"dtype", kda::name_of(tensor.dtype)},
                                           {"finite", is_finite(tensor)}};
  }
  return list;
}

json errors_of(const Case& c, const Outcome& outcome) {
  json errors = json::object();
  for (const auto& [id, expected] : c.expected) {
    const auto found = outcome.outputs.find(id);
    if (found == outcome.outputs.end()) continue;
    const cases::HostTensor& tensor = found->second;
    const cases::Difference d = cases::compare(c, id, tensor, expected);
    json& error = errors[std::string(kda::name_of(id))];
    error = {{"ratio", d.ratio}, {"max_error", d.max_error}, {"finite", d.finite}};
    if (size_of(tensor.dtype) == 2) {
      // What the dtype alone costs: the exact values in it.
      const cases::HostTensor exact = cases::converted(expected, tensor.dtype);
      error["rounding"] = cases::compare(c, id, exact, expected).ratio;
    }
  }
  return errors;
}

void print_errors(const json& s) {
  std::string bad;
  for (const auto& [name, output] : s["outputs"].items()) {
    if (!output["finite"].get<bool>()) bad += (bad.empty() ? "" : ", ") + name;
  }
  if (!bad.empty()) fmt::print("warning    NaN or infinity in {}\n", bad);
  for (const auto& [name, error] : s["errors"].items()) {
    fmt::print("error      {:<15} ratio {:.2e}, max {:.2e}", name, error["ratio"].get<double>(),
               error["max_error"].get<double>());
    if (error.contains("rounding")) {
      fmt::print(" (rounding to {} alone: {:.2e})", s["outputs"][name]["dtype"].get<std::string>(),
                 error["rounding"].get<double>());
    }
    fmt::print("\n");
  }
}

void print_summary(const json& s) {
  fmt::print("case       {}\n", printable(s["case"].get<std::string>()));
  fmt::print("shape      {}, {}\n", s["shape"].get<std::string>(), s["dtype"].get<std::string>());
  fmt::print("device     {}\n", s["device"].get<std::string>());
  fmt::print("forward    {} in {:.3f} ms\n", s["forward"].get<std::string>(),
             s["forward_ms"].get<double>());
  if (s.contains("backward")) {
    fmt::print("backward   {} in {:.3f} ms\n", s["backward"].get<std::string>(),
               s["backward_ms"].get<double>());
  }
  constexpr double kMiB = 1024.0 * 1024.0;
  fmt::print("memory     {:.1f} MiB workspace, {:.1f} MiB peak of the process\n",
             s["workspace_bytes"].get<double>() / kMiB, s["peak_bytes"].get<double>() / kMiB);
  print_errors(s);
  fmt::print("written    {}\n", printable(s["out"].get<std::string>()));
}

}  // namespace

int run(const RunCommand& command) {
  Result<Case> c = load(command);
  if (!c.ok()) return fail(command.common, command.case_path, c.status());
  Result<Device> device = choose_device(command.common, c->forward);
  if (!device.ok()) return fail(command.common, "", device.status());
  cases::Execution execution{*device, command.common.options(), {}, true};
  cases::AtomicFile out;  // opened first: no computation for a place that cannot be written
  if (Status opened = out.open(command.out_path); !opened.ok()) {
    return fail(command.common, command.out_path.empty() ? "--out" : "", opened);
  }
  const DType io = c->input(TensorId::kQ)->dtype;
  if (io == DType::kF64) execution.types.all = DType::kF64;

  Progress progress("computing");
  progress.step(shape_text(c->forward));
  Result<Outcome> outcome = cases::execute(*c, execution);
  if (!outcome.ok()) return fail(command.common, command.case_path, outcome.status());
  const Status written = cases::write_safetensors(out, result_file(*c, *outcome, *device));
  if (!written.ok()) return fail(command.common, "", written);

  json summary = {{"case", command.case_path},
                  {"out", command.out_path},
                  {"shape", shape_text(c->forward)},
                  {"dtype", kda::name_of(io)},
                  {"device", name_of(*device)},
                  {"forward", outcome->forward_implementation},
                  {"forward_ms", outcome->forward_seconds * 1e3},
                  {"workspace_bytes", outcome->workspace_bytes},
                  {"peak_bytes", peak_memory_bytes()},
                  {"outputs", describe(outcome->outputs)},
                  {"errors", errors_of(*c, *outcome)}};
  if (!outcome->backward_implementation.empty()) {
    summary["backward"] = outcome->backward_implementation;
    summary["backward_ms"] = outcome->backward_seconds * 1e3;
  }
  if (command.common.json) {
    print_json(summary);
  } else {
    print_summary(summary);
  }
  return kRight;
}

}  // namespace kda::program
