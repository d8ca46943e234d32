// kda doctor: what a bug report needs to say about a machine.
#include <sys/utsname.h>

#include <chrono>
#include <cstdlib>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "check.h"
#include "command.h"
#include "generate.h"
#include "kda/version.h"

namespace kda::program {
namespace {

using cases::CaseSpec;
using cases::CheckedOutput;
using nlohmann::json;

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang {}", __clang_version__);
#elif defined(__GNUC__)
  return fmt::format("gcc {}", __VERSION__);
#else
  return "unknown";
#endif
}

std::string system_name() {
  utsname name{};
  if (uname(&name) != 0) return "unknown";
  return fmt::format("{} {} {}", name.sysname, name.release, name.machine);
}

/// The settings that change what is chosen or how fast it is.
json environment() {
  json set = json::object();
  for (const char* name : {"KDA_IMPL", "KDA_WORKSPACE_LIMIT", "KDA_LOG", "OMP_NUM_THREADS",
                           "OMP_PROC_BIND", "CUDA_VISIBLE_DEVICES"}) {
    if (const char* value = std::getenv(name)) set[name] = value;
  }
  return set;
}

std::vector<CaseSpec> self_test_specs(DeviceType device) {
  CaseSpec plain;
  plain.sizes = {1, 100, 1, 2, 64, 64, 0, 0};
  CaseSpec full = plain;
  full.seed = 2;
  full.gate = Gate::kLowerBound;
  full.qk_l2norm = true;
  full.beta_sigmoid = true;
  full.cu_seqlens = {0, 30, 30, 100};
  if (device == DeviceType::kCuda) {
    plain.io = DType::kBF16;
    full.io = DType::kBF16;
  }
  return {plain, full};
}

/// Forward, backward and every gradient against the float64 recurrence. "passed", or what is wrong.
struct SelfTest {
  std::string verdict = "passed";
  std::vector<std::string> implementations;
  double seconds = 0;
  int code = kRight;

  void note(const std::string& implementation) {
    for (const std::string& known : implementations) {
      if (known == implementation) return;
    }
    implementations.push_back(implementation);
  }
};

SelfTest self_test(const Common& common, const Device& device) {
  SelfTest test;
  const auto start = std::chrono::steady_clock::now();
  for (const CaseSpec& spec : self_test_specs(device.type)) {
    const cases::Case c = cases::generate(spec);
    Result<std::vector<CheckedOutput>> checked = cases::check_case(c, device, common.options());
    if (!checked.ok()) {
      test.verdict = checked.status().message();
      test.code = exit_code_of(checked.status());
      break;
    }
    for (const CheckedOutput& row : *checked) {
      test.note(row.implementation);
      if (row.pass) continue;
      test.verdict = fmt::format("{}: ratio {:.2e}, block {:.2e}, limit {:.2e} ({})",
                                 kda::name_of(row.id), row.difference.ratio,
                                 row.difference.block_ratio, row.limit, row.implementation);
      test.code = kMismatch;
    }
  }
  test.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return test;
}

json device_report(const Common& common, const DeviceInfo& info, int& code) {
  const SelfTest test = self_test(common, info.device);
  if (code == kRight) code = test.code;
  return {{"device", name_of(info.device)},
          {"name", info.name},
          {"features", info.features},
          {"memory_bytes", info.memory_bytes},
          {"self_test", test.verdict},
          {"self_test_seconds", test.seconds},
          {"implementations", test.implementations}};
}

void print_report(const json& r) {
  fmt::print("kda          {}\n", r["version"].get<std::string>());
  fmt::print("compiler     {}\n", r["compiler"].get<std::string>());
  fmt::print("system       {}\n", r["system"].get<std::string>());
  fmt::print("CUDA build   {}\n", r["cuda_build"].get<std::string>());
  fmt::print("CUDA here    {}\n", r["cuda"].get<std::string>());
  for (const auto& [name, value] : r["environment"].items()) {
    fmt::print("environment  {}={}\n", name, value.get<std::string>());
  }
  for (const json& d : r["devices"]) {
    constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
    fmt::print("{:<13}{}; {}; {:.1f} GiB\n", d["device"].get<std::string>(),
               d["name"].get<std::string>(), d["features"].get<std::string>(),
               d["memory_bytes"].get<double>() / kGiB);
    std::string names;
    for (const json& name : d["implementations"])
      names += fmt::format(" {}", name.get<std::string>());
    fmt::print("self-test    {} in {:.2f} s{}{}\n", d["self_test"].get<std::string>(),
               d["self_test_seconds"].get<double>(), names.empty() ? "" : ":", names);
  }
}

}  // namespace

int doctor(const Common& common) {
  if (Status status = check_common(common); !status.ok()) return fail(common, "", status);
  const std::string reason = cuda_unavailable_reason();
  json report = {{"version", version()},
                 {"compiler", compiler()},
                 {"system", system_name()},
                 {"cuda_build", KDA_CUDA_BUILD},
                 {"cuda", reason.empty() ? "usable" : reason},
                 {"environment", environment()},
                 {"devices", json::array()}};
  int code = kRight;
  for (const DeviceInfo& info : devices()) {
    const bool wanted = common.device == "auto" || name_of(info.device) == common.device ||
                        kda::name_of(info.device.type) == common.device;
    if (wanted) report["devices"].push_back(device_report(common, info, code));
  }
  if (common.json) {
    print_json(report);
  } else {
    print_report(report);
  }
  return code;
}

}  // namespace kda::program
