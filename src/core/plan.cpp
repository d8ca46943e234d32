// Choosing an implementation and running it.
#include "kda/plan.h"

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/executor.h"
#include "core/log.h"
#include "kda/backend.h"

namespace kda {
namespace {

constexpr std::size_t kCpuWorkspaceAlignment = 64;
constexpr std::size_t kCudaWorkspaceAlignment = 256;

/// The words of a comma-separated list.
std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> words;
  while (!list.empty()) {
    const std::size_t comma = list.find(',');
    if (comma != 0) words.push_back(list.substr(0, comma));
    list = comma == std::string_view::npos ? std::string_view{} : list.substr(comma + 1);
  }
  return words;
}

std::string requested_implementation(const Options& options) {
  if (!options.implementation.empty()) return options.implementation;
  const char* value = std::getenv("KDA_IMPL");
  return value != nullptr ? value : "";
}

/// The rows of an operation and device that the caller's choice leaves, in order.
Result<std::vector<const Implementation*>> candidates(const Problem& problem, const Device& device,
                                                      const Options& options) {
  const std::string request = requested_implementation(options);
  const std::vector<std::string_view> words = split(request);
  std::vector<const Implementation*> chosen;
  std::string available;
  for (const Implementation& row : all_implementations()) {
    if (row.operation != problem.operation || row.device != device.type) continue;
    available += fmt::format("{}{}", available.empty() ? "" : ", ", row.name);
    bool wanted = words.empty();
    for (std::string_view word : words) wanted |= word == row.name || word == row.family;
    if (wanted) chosen.push_back(&row);
  }
  if (!chosen.empty()) return chosen;
  if (available.empty()) {
    const bool no_cuda = device.type == DeviceType::kCuda && !cuda_unavailable_reason().empty();
    return Status(StatusCode::kUnsupported,
                  fmt::format("device {}: nothing runs {} there{}{}", name_of(device.type),
                              name_of(problem.operation), no_cuda ? ": " : "",
                              no_cuda ? cuda_unavailable_reason() : ""));
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("implementation: found \"{}\", expected one of {} for {} on {}",
                            request, available, name_of(problem.operation), name_of(device.type)));
}

Status check_device(const Device& device) {
  switch (device.type) {
    case DeviceType::kCpu:
      if (device.index == 0) return {};
      return {StatusCode::kInvalidArgument,
              fmt::format("device index: found {} for the cpu, expected 0", device.index)};
    case DeviceType::kCuda:
      return {};
  }
  return {StatusCode::kInvalidArgument,
          fmt::format("device type: found value {}, expected cpu or cuda",
                      static_cast<int32_t>(device.type))};
}

}  // namespace

const Problem& Plan::problem() const { return executor_->problem(); }
const Device& Plan::device() const { return executor_->device(); }
std::string_view Plan::implementation() const { return executor_->name(); }
std::size_t Plan::workspace_bytes() const { return executor_->workspace_bytes(); }

Status Plan::run(const Args& args, void* stream) const {
  const bool cuda = executor_->device().type == DeviceType::kCuda;
  if (Status status = check_args(problem(), args, workspace_bytes(),
                                 cuda ? kCudaWorkspaceAlignment : kCpuWorkspaceAlignment);
      !status.ok()) {
    return status;
  }
  if (!log::exec_enabled()) return executor_->run(args, stream);
  const auto start = std::chrono::steady_clock::now();
  Status status = executor_->run(args, stream);
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  log::write(fmt::format("exec {} {:.3f} ms{}{}", implementation(), elapsed.count(),
                         cuda ? " (host)" : "", status.ok() ? "" : ": " + status.message()));
  return status;
}

Result<Plan> make_plan(const Problem& problem, const Device& device, const Options& options) {
  if (Status status = check_device(device); !status.ok()) return status;
  if (options.threads < 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("threads: found {}, expected 0 or more", options.threads));
  }
  Result<Problem> validated = problem.validated();
  if (!validated.ok()) return validated.status();
  Result<std::vector<const Implementation*>> rows = candidates(*validated, device, options);
  if (!rows.ok()) return rows.status();
  std::string reasons;
  for (const Implementation* row : *rows) {
    Result<std::unique_ptr<Executor>> executor = row->create(*validated, device, options);
    if (executor.ok()) {
      (*executor)->set_name(row->name);
      if (log::dispatch_enabled()) {
        log::write(fmt::format("dispatch {} -> {}{}", name_of(problem.operation), row->name,
                               reasons.empty() ? "" : " because " + reasons));
      }
      return Plan(std::shared_ptr<const Executor>(std::move(*executor)));
    }
    if (executor.status().code() != StatusCode::kUnsupported) return executor.status();
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", row->name,
                           executor.status().message());
  }
  return Status(StatusCode::kUnsupported, reasons);
}

Status supports(const Problem& problem, const Device& device, const Options& options) {
  return make_plan(problem, device, options).status();
}

Result<std::vector<Verdict>> explain(const Problem& problem, const Device& device,
                                     const Options& options) {
  if (Status status = check_device(device); !status.ok()) return status;
  Result<Problem> validated = problem.validated();
  if (!validated.ok()) return validated.status();
  Result<std::vector<const Implementation*>> wanted = candidates(*validated, device, options);
  if (!wanted.ok()) return wanted.status();
  std::vector<Verdict> verdicts;
  bool found = false;
  for (const Implementation& row : all_implementations()) {
    if (row.operation != problem.operation || row.device != device.type) continue;
    Status status = row.create(*validated, device, options).status();
    bool selectable = false;
    for (const Implementation* choice : *wanted) selectable |= choice == &row;
    const bool chosen = status.ok() && selectable && !found;
    found |= chosen;
    verdicts.push_back({row.name, status.ok(), chosen, status.message()});
  }
  return verdicts;
}

}  // namespace kda
