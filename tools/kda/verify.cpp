// kda verify: compares what the library computes with what is right.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "check.h"
#include "command.h"
#include "progress.h"
#include "suite.h"

namespace kda::program {
namespace {

using cases::Case;
using cases::CheckedOutput;
using nlohmann::json;

struct Counts {
  int cases = 0;
  int outputs = 0;
  int failed = 0;
  int unsupported = 0;
  int bad_files = 0;
  int bad_file_code = kRight;  ///< of the first
};

void print_header(const Common& common) {
  if (common.json) return;
  fmt::print("{:<15} {:<22} {:>9} {:>9} {:>9}  {}\n", "output", "implementation", "ratio", "block",
             "limit", "");
}

void print_row(const Common& common, const Case& c, const Device& device,
               const CheckedOutput& row) {
  const cases::Difference& d = row.difference;
  if (common.json) {
    print_json({{"case", c.name},
                {"output", kda::name_of(row.id)},
                {"device", kda::name_of(device.type)},
                {"impl", row.implementation},
                {"metric", row.exact ? "max_error" : "ratio"},
                {"ratio", d.ratio},
                {"block_ratio", d.block_ratio},
                {"max_error", d.max_error},
                {"finite", d.finite},
                {"limit", row.limit},
                {"pass", row.pass}});
    return;
  }
  fmt::print("{:<15} {:<22} {:>9.2e} {:>9.2e} {:>9.2e}  {}\n", kda::name_of(row.id),
             row.implementation, row.exact ? d.max_error : d.ratio, d.block_ratio, row.limit,
             row.pass ? "pass" : (d.finite ? "FAIL" : "FAIL: not finite"));
}

void print_unsupported(const Common& common, const Case& c, const Status& status) {
  if (common.json) {
    print_json({{"case", c.name},
                {"error", status.message()},
                {"kind", kda::name_of(status.code())},
                {"exit_code", exit_code_of(status)}});
  } else {
    fmt::print("unsupported: {}\n", status.message());
  }
}

/// An exit code other than kRight stops the run.
int verify_case(const Common& common, const Case& c, Counts& counts,
                const cases::CaseSpec* spec = nullptr) {
  Result<Device> device = choose_device(common, c.forward);
  if (!device.ok()) return fail(common, "", device.status());
  ++counts.cases;
  if (!common.json) {
    fmt::print("\n{}  ({}, {})\n", printable(c.name), shape_text(c.forward), name_of(*device));
  }
  Result<std::vector<CheckedOutput>> checked =
      cases::check_case(c, *device, common.options(), spec);
  if (!checked.ok()) {
    if (checked.status().code() != StatusCode::kUnsupported) {
      return fail(common, c.name, checked.status());
    }
    print_unsupported(common, c, checked.status());
    ++counts.unsupported;
    return kRight;
  }
  for (const CheckedOutput& row : *checked) {
    print_row(common, c, *device, row);
    ++counts.outputs;
    if (!row.pass) ++counts.failed;
  }
  return kRight;
}

/// The built-in cases, in the dtype that the device is for.
int verify_suite(const Common& common, Counts& counts, Progress& progress) {
  cases::CaseSpec probe;
  probe.io = DType::kBF16;
  Result<Device> device = choose_device(common, cases::generate(probe).forward);
  if (!device.ok()) return fail(common, "", device.status());
  const DType io = device->type == DeviceType::kCuda ? DType::kBF16 : DType::kF32;
  const std::vector<cases::CaseSpec> suite = cases::builtin_suite(io);
  for (std::size_t i = 0; i < suite.size(); ++i) {
    progress.step(fmt::format("{}/{} {}", i + 1, suite.size(), cases::describe(suite[i])));
    const Case c = cases::generate(suite[i]);
    if (const int code = verify_case(common, c, counts, &suite[i]); code != kRight) return code;
  }
  return kRight;
}

int finish(const Common& common, const Counts& counts) {
  if (common.json) {
    json summary = {
        {"cases", counts.cases}, {"outputs", counts.outputs}, {"failed", counts.failed}};
    if (counts.unsupported > 0) summary["unsupported"] = counts.unsupported;
    if (counts.bad_files > 0) summary["bad_files"] = counts.bad_files;
    print_json(summary);
  } else {
    fmt::print(
        "\n{} cases, {} outputs: {} failed{}{}\n", counts.cases, counts.outputs, counts.failed,
        counts.unsupported > 0 ? fmt::format(", {} cases unsupported", counts.unsupported) : "",
        counts.bad_files > 0 ? fmt::format(", {} bad files", counts.bad_files) : "");
  }
  if (counts.bad_files > 0) return counts.bad_file_code;
  if (counts.failed > 0) return kMismatch;
  return counts.unsupported > 0 ? kUnsupportedHere : kRight;
}

}  // namespace

int verify(const VerifyCommand& command) {
  const Common& common = command.common;
  if (Status status = check_common(common); !status.ok()) return fail(common, "", status);
  Counts counts;
  Progress progress("verifying");
  print_header(common);
  const std::size_t given = command.case_paths.size();
  for (std::size_t i = 0; i < given; ++i) {
    progress.step(fmt::format("{}/{} {}", i + 1, given, command.case_paths[i]));
    Result<Case> c = cases::load_case(command.case_paths[i]);
    if (!c.ok()) {
      const int code = fail(common, command.case_paths[i], c.status());
      if (++counts.bad_files == 1) counts.bad_file_code = code;
      continue;
    }
    if (const int code = verify_case(common, *c, counts); code != kRight) return code;
  }
  if (given == 0) {
    const int code = verify_suite(common, counts, progress);
    if (code != kRight) return code;
  }
  return finish(common, counts);
}

}  // namespace kda::program
