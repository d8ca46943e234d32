// Choosing an implementation and running it.
#include "kda/plan.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/executor.h"
#include "core/log.h"
#include "core/shown.h"
#include "kda/backend.h"

namespace kda {
namespace {

constexpr std::size_t kCpuWorkspaceAlignment = 64;
constexpr std::size_t kCudaWorkspaceAlignment = 256;
// OpenMP ends the process when the system refuses a thread, so that a slip must not ask for
// millions.
constexpr int32_t kMaxThreads = 1024;

/// The words of a list separated by commas or spaces.
std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find_first_of(", ", begin), list.size());
    if (end > begin) words.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// The caller's choice and where it comes from.
struct Request {
  std::string text;
  std::string_view source;
};

Request requested_implementation(const Options& options) {
  if (!options.implementation.empty()) return {options.implementation, "implementation"};
  const char* value = std::getenv("KDA_IMPL");
  return {value != nullptr ? value : "", "environment variable KDA_IMPL"};
}

std::string_view without_spaces_around(std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
}

/// The caller's limit, or that of the environment; 0: none.
Result<std::size_t> requested_limit(const Options& options) {
  constexpr const char* kVariable = "KDA_WORKSPACE_LIMIT";
  const char* value = std::getenv(kVariable);
  const std::string_view text = without_spaces_around(value != nullptr ? value : "");
  if (options.workspace_limit > 0 || text.empty()) return options.workspace_limit;
  std::size_t bytes = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error == std::errc{} && stop == text.data() + text.size()) return bytes;
  return Status(StatusCode::kInvalidArgument,
                fmt::format("environment variable {}: found \"{}\", expected a number of bytes, or "
                            "0 for no limit",
                            kVariable, shown(value)));
}

bool names(const std::vector<std::string_view>& words, const Implementation& row) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return word == row.name || word == row.family; });
}

/// The first word that is neither the name nor the family of a row, whatever its operation; "" if
/// there is none.
std::string_view unknown_word(const std::vector<std::string_view>& words) {
  const auto rows = all_implementations();
  for (const std::string_view word : words) {
    if (std::none_of(rows.begin(), rows.end(),
                     [&](const Implementation& row) { return names({word}, row); })) {
      return word;
    }
  }
  return {};
}

std::string families() {
  std::vector<std::string_view> names;
  for (const Implementation& row : all_implementations()) {
    if (std::find(names.begin(), names.end(), row.family) == names.end()) {
      names.push_back(row.family);
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

/// The rows of an operation: those on the device, and those on others that the words name.
struct Rows {
  std::vector<std::string_view> here;
  std::vector<const Implementation*> chosen;  ///< of those here, in order
  std::vector<std::string_view> elsewhere;
};

Rows rows_of(const Problem& problem, const Device& device,
             const std::vector<std::string_view>& words) {
  Rows rows;
  for (const Implementation& row : all_implementations()) {
    if (row.operation != problem.operation) continue;
    if (row.device != device.type) {
      if (names(words, row)) rows.elsewhere.push_back(row.name);
      continue;
    }
    rows.here.push_back(row.name);
    if (words.empty() || names(words, row)) rows.chosen.push_back(&row);
  }
  return rows;
}

Status refuse_word(const Request& request, std::string_view word, const Rows& rows,
                   const Problem& problem, const Device& device) {
  const auto all = all_implementations();
  const bool has_cuda = std::any_of(all.begin(), all.end(), [](const Implementation& row) {
    return row.device == DeviceType::kCuda;
  });
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: found \"{}\", expected one of the families {}, or for {} on {} one of "
                      "{}{}",
                      request.source, shown(word), families(), name_of(problem.operation),
                      name_of(device.type),
                      rows.here.empty() ? "none" : fmt::format("{}", fmt::join(rows.here, ", ")),
                      has_cuda ? "" : "; " + cuda_unavailable_reason())};
}

/// Every word exists, but names no row here.
Status refuse_choice(const Request& request, const Rows& rows, const Problem& problem,
                     const Device& device) {
  const bool on_cpu = device.type == DeviceType::kCpu;
  const std::string_view other = name_of(on_cpu ? DeviceType::kCuda : DeviceType::kCpu);
  const std::string absent = on_cpu ? cuda_unavailable_reason() : "";
  std::string text =
      fmt::format("{}: \"{}\" has no row for {} on {}", request.source, shown(request.text),
                  name_of(problem.operation), name_of(device.type));
  if (!rows.elsewhere.empty()) {
    text += fmt::format("; {} runs on {}", fmt::join(rows.elsewhere, ", "), other);
    if (!absent.empty()) text += ", which cannot be used here: " + absent;
  }
  text += fmt::format("; choose {}", fmt::join(rows.here, " or "));
  if (!rows.elsewhere.empty() && absent.empty()) text += fmt::format(", or device {}", other);
  return {StatusCode::kUnsupported, text};
}

/// The rows of an operation and device that the caller's choice leaves, in order.
Result<std::vector<const Implementation*>> candidates(const Problem& problem, const Device& device,
                                                      const Options& options) {
  const Request request = requested_implementation(options);
  const std::vector<std::string_view> words = split(request.text);
  Rows rows = rows_of(problem, device, words);
  if (const std::string_view unknown = unknown_word(words); !unknown.empty()) {
    return refuse_word(request, unknown, rows, problem, device);
  }
  if (!rows.chosen.empty()) return std::move(rows.chosen);
  if (!rows.here.empty()) return refuse_choice(request, rows, problem, device);
  const bool no_cuda = device.type == DeviceType::kCuda && !cuda_unavailable_reason().empty();
  return Status(StatusCode::kUnsupported,
                fmt::format("device {}: nothing runs {} there{}{}", name_of(device.type),
                            name_of(problem.operation), no_cuda ? ": " : "",
                            no_cuda ? cuda_unavailable_reason() : ""));
}

Status check_device(const Device& device) {
  switch (device.type) {
    case DeviceType::kCpu:
      if (device.index == 0) return {};
      return {StatusCode::kInvalidArgument,
              fmt::format("device index: found {} for the cpu, expected 0", device.index)};
    case DeviceType::kCuda:
      if (device.index >= 0) return {};
      return {StatusCode::kInvalidArgument,
              fmt::format("device index: found {}, expected 0 or more", device.index)};
  }
  return {StatusCode::kInvalidArgument,
          fmt::format("device type: found value {}, expected cpu or cuda",
                      static_cast<int32_t>(device.type))};
}

/// What is left to decide after the checks that need no implementation.
struct Question {
  Problem problem;
  Options options;  ///< with the choice and the limit that the environment sets
  std::vector<const Implementation*> rows;
};

Result<Question> prepare(const Problem& problem, const Device& device, const Options& options) {
  if (Status status = check_device(device); !status.ok()) return status;
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("threads: found {}, expected 0..{}", options.threads, kMaxThreads));
  }
  Result<Problem> validated = problem.validated();
  if (!validated.ok()) return validated.status();
  Result<std::vector<const Implementation*>> rows = candidates(*validated, device, options);
  if (!rows.ok()) return rows.status();
  const Result<std::size_t> limit = requested_limit(options);
  if (!limit.ok()) return limit.status();
  Options with_choice = options;
  with_choice.workspace_limit = *limit;
  std::string text = requested_implementation(options).text;
  if (split(text).empty()) text.clear();  // separators alone choose nothing
  with_choice.implementation = std::move(text);
  return Question{*validated, std::move(with_choice), std::move(*rows)};
}

/// The executor of a row, if it keeps to the limit of workspace.
Result<std::unique_ptr<Executor>> create(const Implementation& row, const Question& question,
                                         const Device& device) {
  Result<std::unique_ptr<Executor>> executor =
      row.create(question.problem, device, question.options);
  if (!executor.ok()) return executor;
  const std::size_t least = (*executor)->workspace_bytes();
  const std::size_t limit = question.options.workspace_limit;
  if (limit > 0 && least > limit) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("workspace_limit: found {} bytes, expected {} or more, the least "
                              "workspace of this row here",
                              limit, least));
  }
  (*executor)->set_name(row.name);
  return executor;
}

}  // namespace

const Problem& Plan::problem() const { return executor_->problem(); }
const Device& Plan::device() const { return executor_->device(); }
std::string_view Plan::implementation() const { return executor_->name(); }
std::size_t Plan::workspace_bytes() const { return executor_->workspace_bytes(); }

Status Plan::run(const Args& args, void* stream) const {
  if (executor_ == nullptr) {
    return {StatusCode::kInvalidArgument, "plan: moved from, expected one that make_plan returned"};
  }
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
  Result<Question> question = prepare(problem, device, options);
  if (!question.ok()) return question.status();
  std::string reasons;
  for (const Implementation* row : question->rows) {
    Result<std::unique_ptr<Executor>> executor = create(*row, *question, device);
    if (executor.ok()) {
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
  Result<Question> question = prepare(problem, device, options);
  if (!question.ok()) return question.status();
  const std::vector<const Implementation*>& wanted = question->rows;
  std::vector<Verdict> verdicts;
  bool found = false;
  for (const Implementation& row : all_implementations()) {
    if (row.operation != problem.operation || row.device != device.type) continue;
    const Result<std::unique_ptr<Executor>> executor = create(row, *question, device);
    const Status& status = executor.status();
    const bool candidate = !found && std::find(wanted.begin(), wanted.end(), &row) != wanted.end();
    if (candidate && !status.ok() && status.code() != StatusCode::kUnsupported) return status;
    const bool chosen = candidate && status.ok();
    found |= chosen;
    verdicts.push_back({row.name, status.ok(), chosen, status.message(),
                        status.ok() ? (*executor)->workspace_bytes() : 0});
  }
  return verdicts;
}

}  // namespace kda
