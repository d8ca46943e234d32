// kda bench: times operations from a cold cache.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "command.h"
#include "execute.h"
#include "kda/version.h"
#include "progress.h"
#include "workload.h"

namespace kda::program {
namespace {

using cases::HostCost;
using cases::Placement;
using cases::TensorMap;
using nlohmann::json;

constexpr double kEnoughSeconds = 10;  // of repeats of one operation; at least one is made

struct Bench {
  const BenchCommand& command;
  Device device;
  BenchOptions options;
  Suite suite = Suite::kShape;
  std::vector<BenchShape> shapes;
  double copy_bandwidth = 0;
  int unsupported = 0;
};

struct Timing {
  double median = 0;
  double p20 = 0;
  double p80 = 0;
  int repeats = 0;
  bool of_host = false;
  int64_t launches = 0;  ///< of_host only
};

Result<Suite> parse_suite(const std::string& text) {
  if (text.empty()) return Suite::kShape;
  if (text == "train") return Suite::kTrain;
  if (text == "prefill") return Suite::kPrefill;
  if (text == "decode") return Suite::kDecode;
  if (text == "stages") return Suite::kStages;
  if (text == "host") return Suite::kHost;
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("--suite: found {}, expected train, prefill, decode, stages or host", text));
}

Status check_checkpoints(const BenchCommand& command, Suite suite) {
  if (!command.checkpoints || suite == Suite::kShape || suite == Suite::kTrain) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("--checkpoints: saves states between the passes of suite train, found "
                      "--suite {}",
                      command.suite)};
}

/// The sum of --lengths.
Result<int64_t> total_of(const std::vector<int64_t>& lengths) {
  int64_t total = 0;
  for (const int64_t length : lengths) {
    if (length < 0) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--lengths: found {}, expected 0 or more", length));
    }
    if (length > std::numeric_limits<int64_t>::max() - total) {
      return Status(StatusCode::kInvalidArgument,
                    "--lengths: found a sum beyond 64 bits, expected T of --shape");
    }
    total += length;
  }
  return total;
}

/// Makes the one --shape a packed one if --lengths are given.
Status pack(const BenchCommand& command, Bench& bench) {
  if (command.lengths.empty()) return {};
  if (bench.suite != Suite::kShape && bench.suite != Suite::kTrain &&
      bench.suite != Suite::kPrefill) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--lengths: packs the sequences of suite train or prefill, found "
                        "--suite {}",
                        command.suite)};
  }
  if (bench.shapes.size() != 1) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--lengths: found {} of --shape, expected one, whose T is their sum",
                        bench.shapes.size())};
  }
  const Result<int64_t> total = total_of(command.lengths);
  if (!total.ok()) return total.status();
  const Sizes sizes = bench.shapes[0].sizes;
  if (sizes.B != 1 || sizes.T != *total) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--lengths: their sum is {}; found --shape with B = {} and T = {}, "
                        "expected B = 1 and T = {}",
                        *total, sizes.B, sizes.T, *total)};
  }
  bench.shapes[0] = packed_shape(sizes, command.lengths);
  return {};
}

Result<Bench> set_up(const BenchCommand& command) {
  Bench bench{command, {}, {}, Suite::kShape, {}, 0, 0};
  Result<Suite> suite = parse_suite(command.suite);
  Result<DType> io = parse_dtype(command.dtype);
  Result<Gate> gate = parse_gate(command.gate);
  for (const Status& status : {suite.status(), io.status(), gate.status()}) {
    if (!status.ok()) return status;
  }
  bench.suite = *suite;
  bench.options = {*io, *gate, command.checkpoints};
  for (const std::vector<int64_t>& numbers : command.shapes) {
    Result<Sizes> sizes = parse_shape(numbers);
    if (!sizes.ok()) return sizes.status();
    bench.shapes.push_back({*sizes, {}});
  }
  if (Status status = check_checkpoints(command, bench.suite); !status.ok()) return status;
  if (Status status = pack(command, bench); !status.ok()) return status;
  const std::vector<BenchShape> probes =
      bench.shapes.empty()
          ? std::vector<BenchShape>{shapes_of(bench.suite, DeviceType::kCuda).front()}
          : bench.shapes;
  std::vector<Workload> workloads;
  for (const BenchShape& probe : probes) {
    for (Workload& workload : workloads_of(bench.suite, probe, bench.options)) {
      if (Status status = workload.problem.validated().status(); !status.ok()) return status;
      workloads.push_back(std::move(workload));
    }
  }
  if (Status status = check_common(command.common); !status.ok()) return status;
  Result<Device> device = choose_device(command.common, workloads.front().problem);
  if (!device.ok()) return device.status();
  bench.device = *device;
  if (bench.shapes.empty()) bench.shapes = shapes_of(bench.suite, device->type);
  return bench;
}

/// One run: from a cold cache on the device, or what it costs the host.
Result<double> time_run(const Plan& plan, const Args& args, Placement& placement, Timing& timing) {
  if (timing.of_host) {
    Result<HostCost> cost = placement.host_cost(plan, args);
    if (!cost.ok()) return cost.status();
    timing.launches = cost->launches;
    return cost->seconds;
  }
  if (Status status = placement.flush_cache(); !status.ok()) return status;
  return placement.measure(plan, args);
}

Result<Timing> time_runs(const Plan& plan, const Args& args, Placement& placement, int repeats,
                         bool of_host) {
  Result<double> warm = placement.measure(plan, args);
  if (!warm.ok()) return warm.status();
  Timing timing;
  timing.of_host = of_host;
  std::vector<double> seconds;
  const auto start = std::chrono::steady_clock::now();
  do {
    Result<double> once = time_run(plan, args, placement, timing);
    if (!once.ok()) return once.status();
    seconds.push_back(*once);
  } while (static_cast<int>(seconds.size()) < repeats &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
               kEnoughSeconds);
  std::sort(seconds.begin(), seconds.end());
  const auto quantile = [&seconds](double share) {
    return seconds[static_cast<std::size_t>(
        std::lround(share * static_cast<double>(seconds.size() - 1)))];
  };
  timing.median = quantile(0.5);
  timing.p20 = quantile(0.2);
  timing.p80 = quantile(0.8);
  timing.repeats = static_cast<int>(seconds.size());
  return timing;
}

/// A time of a wrong result is worth nothing: outputs must have been written with numbers. Of a
/// huge one a sample is read.
Status check_finite(const TensorMap& outputs) {
  for (const auto& [id, tensor] : outputs) {
    constexpr int64_t kEnough = int64_t{1} << 23;
    const int64_t step = (tensor.count() / kEnough) | 1;  // odd: visits every channel
    for (int64_t i = 0; i < tensor.count(); i += step) {
      if (!std::isfinite(tensor.get(i))) {
        return {StatusCode::kInternal,
                fmt::format("{}: found {} at element {}, expected a finite number",
                            kda::name_of(id), tensor.get(i), i)};
      }
    }
  }
  return {};
}

struct Measured {
  Timing timing;
  std::string implementation;
  std::size_t workspace_bytes = 0;
};

Result<Measured> measure(const Bench& bench, const Workload& workload, TensorMap& tensors) {
  Result<Plan> plan = make_plan(workload.problem, bench.device, bench.command.common.options());
  if (!plan.ok()) return plan.status();
  Result<std::unique_ptr<Placement>> placement =
      cases::make_placement(bench.device, bench.command.common.threads);
  if (!placement.ok()) return placement.status();
  Args args;
  TensorMap outputs;
  Problem bound = workload.problem;
  if (workload.state_in_place) bound.set(TensorId::kFinalState, DType::kNone);
  Status status = cases::bind(bound, tensors, outputs, **placement, args);
  if (!status.ok()) return status;
  if (workload.state_in_place) {
    args.out(TensorId::kFinalState, args[TensorId::kInitialState]);
  }
  Result<void*> workspace = (*placement)->workspace(plan->workspace_bytes());
  if (!workspace.ok()) return workspace.status();
  args.workspace = *workspace;
  args.workspace_bytes = plan->workspace_bytes();
  Result<Timing> timing =
      time_runs(*plan, args, **placement, bench.command.repeat, bench.suite == Suite::kHost);
  if (!timing.ok()) return timing.status();
  if (status = (*placement)->fetch(); !status.ok()) return status;
  if (status = check_finite(outputs); !status.ok()) return status;
  for (auto& [id, tensor] : outputs) tensors[id] = std::move(tensor);  // later stages read them
  return Measured{*timing, std::string(plan->implementation()), plan->workspace_bytes()};
}

void print_machine(const Bench& bench) {
  const BenchCommand& command = bench.command;
  const std::string machine = machine_of(bench.device);
  const std::string date = now();
  if (command.common.json) {
    print_json({{"machine", machine},
                {"device", name_of(bench.device)},
                {"version", version()},
                {"date", date},
                {"command", command.line},
                {"dtype", command.dtype},
                {"gate", command.gate},
                {"copy_gb_per_s", bench.copy_bandwidth * 1e-9}});
    return;
  }
  fmt::print("{}: {}\n{} {}; {} {} gate; copy {:.1f} GB/s (read + write)\n\n",
             name_of(bench.device), machine, version(), date, command.dtype, command.gate,
             bench.copy_bandwidth * 1e-9);
  if (bench.suite == Suite::kHost) {
    fmt::print("{:<13}{:<30}{:<24}{:>10}{:>10}{:>10}{:>10}\n", "operation", "shape",
               "implementation", "host us", "p20", "p80", "launches");
    return;
  }
  fmt::print("{:<13}{:<48}{:<30}{:>10}{:>10}{:>10}{:>9}{:>9}{:>8}{:>10}\n", "operation", "shape",
             "implementation", "median ms", "p20", "p80", "MB", "GFLOP", "copy %", "GFLOP/s");
}

void print_host_row(const Bench& bench, const Workload& workload, const Measured& measured) {
  const Problem& problem = workload.problem;
  const Sizes& s = problem.sizes;
  const Timing& t = measured.timing;
  if (bench.command.common.json) {
    print_json({{"operation", kda::name_of(problem.operation)},
                {"shape", {s.B, s.T, s.H, s.HV, s.K, s.V}},
                {"impl", measured.implementation},
                {"host_us", t.median * 1e6},
                {"p20_us", t.p20 * 1e6},
                {"p80_us", t.p80 * 1e6},
                {"repeats", t.repeats},
                {"launches", t.launches}});
    return;
  }
  fmt::print("{:<13}{:<30}{:<24}{:>10.1f}{:>10.1f}{:>10.1f}{:>10}\n",
             kda::name_of(problem.operation), shape_text(problem), measured.implementation,
             t.median * 1e6, t.p20 * 1e6, t.p80 * 1e6, t.launches);
}

/// Type and layout of the states, where they are updated in place; "" elsewhere.
std::string state_text(const Workload& workload) {
  if (!workload.state_in_place) return "";
  const Problem& problem = workload.problem;
  return fmt::format("{} {}{}", name_of(problem[TensorId::kInitialState].dtype),
                     problem.state_v_first ? "[V,K]" : "[K,V]",
                     problem.has(TensorId::kStateIndices) ? " pool" : "");
}

void print_row(const Bench& bench, const Workload& workload, const Measured& measured) {
  const Problem& problem = workload.problem;
  const Sizes& s = problem.sizes;
  const Timing& t = measured.timing;
  const double bytes = bytes_of(problem) * workload.active;
  const double flop = flop_of(problem) * workload.active;
  const double share = bytes / t.median / bench.copy_bandwidth;
  if (bench.command.common.json) {
    print_json({{"operation", kda::name_of(problem.operation)},
                {"shape", {s.B, s.T, s.H, s.HV, s.K, s.V}},
                {"sequences", problem.packed() ? s.N : 0},
                {"state", state_text(workload)},
                {"impl", measured.implementation},
                {"median_ms", t.median * 1e3},
                {"p20_ms", t.p20 * 1e3},
                {"p80_ms", t.p80 * 1e3},
                {"repeats", t.repeats},
                {"floor_ms", bytes / bench.copy_bandwidth * 1e3},
                {"bytes", bytes},
                {"flop", flop},
                {"gb_per_s", bytes / t.median * 1e-9},
                {"copy_share", share},
                {"gflop_per_s", flop / t.median * 1e-9},
                {"workspace_bytes", measured.workspace_bytes}});
    return;
  }
  fmt::print("{:<13}{:<48}{:<30}{:>10.4f}{:>10.3f}{:>10.3f}{:>9.1f}{:>9.2f}{:>7.1f}%{:>10.1f}\n",
             kda::name_of(problem.operation), shape_text(problem),
             fmt::format("{} {}", measured.implementation, state_text(workload)), t.median * 1e3,
             t.p20 * 1e3, t.p80 * 1e3, bytes * 1e-6, flop * 1e-9, share * 100,
             flop / t.median * 1e-9);
  std::fflush(stdout);
}

void print_unsupported(Bench& bench, const Workload& workload, const Status& status) {
  ++bench.unsupported;
  const Problem& problem = workload.problem;
  if (bench.command.common.json) {
    print_json({{"operation", kda::name_of(problem.operation)},
                {"error", status.message()},
                {"kind", kda::name_of(status.code())},
                {"exit_code", exit_code_of(status)}});
  } else {
    fmt::print("{:<13}{:<48}unsupported: {}\n", kda::name_of(problem.operation),
               shape_text(problem), status.message());
  }
}

}  // namespace

int bench(const BenchCommand& command) {
  Result<Bench> bench = set_up(command);
  if (!bench.ok()) return fail(command.common, "", bench.status());
  {
    Result<std::unique_ptr<Placement>> placement =
        cases::make_placement(bench->device, command.common.threads);
    if (!placement.ok()) return fail(command.common, "", placement.status());
    Result<double> bandwidth = (*placement)->copy_bandwidth();
    if (!bandwidth.ok()) return fail(command.common, "", bandwidth.status());
    bench->copy_bandwidth = *bandwidth;
  }
  print_machine(*bench);
  Progress progress("timing");
  for (const BenchShape& shape : bench->shapes) {
    progress.step("(making inputs)");
    TensorMap tensors = inputs_of(bench->suite, shape, bench->options);
    for (const Workload& workload : workloads_of(bench->suite, shape, bench->options)) {
      progress.step(fmt::format("{} {}", kda::name_of(workload.problem.operation),
                                shape_text(workload.problem)));
      if (workload.state_in_place) {
        tensors.erase(TensorId::kInitialState);  // before the next is made: it may be large
        tensors[TensorId::kInitialState] = initial_state_of(workload.problem);
        if (workload.problem.has(TensorId::kStateIndices)) {
          tensors[TensorId::kStateIndices] = state_indices_of(workload.problem);
        }
      }
      Result<Measured> measured = measure(*bench, workload, tensors);
      if (measured.ok()) {
        (bench->suite == Suite::kHost ? print_host_row : print_row)(*bench, workload, *measured);
      } else if (measured.status().code() == StatusCode::kUnsupported) {
        print_unsupported(*bench, workload, measured.status());
        if (bench->suite == Suite::kStages) break;  // the later stages read its outputs
      } else {
        return fail(command.common, std::string(kda::name_of(workload.problem.operation)),
                    measured.status());
      }
    }
  }
  return bench->unsupported > 0 ? kUnsupportedHere : kRight;
}

}  // namespace kda::program
