// kda stress: random problems on every implementation that takes them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "command.h"
#include "kda/version.h"
#include "progress.h"
#include "stop.h"
#include "stress/draw.h"
#include "stress/judge.h"

namespace kda::program {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

/// An implementation and where it runs.
struct Row {
  ImplementationInfo info;
  Device device;
};

/// Of three problems the third is one that the row with the fewest calls takes: some take one of
/// hundreds.
constexpr int64_t kProblemsPerAim = 3;
/// After as many problems none of which a row takes it is given up, as on a device that it does not
/// run on.
constexpr int64_t kMostDrawsPerAim = 20'000;

struct Tally {
  int64_t calls = 0;
  int64_t by_default = 0;  ///< of calls, whose addresses the row refused
  int64_t faulty = 0;
  int64_t skipped = 0;
  std::map<std::string, int64_t> reasons;  ///< of skipping, numbers as #
};

/// Reasons that differ in numbers alone count as one. Digits of names (fp64, sm90) stay.
std::string without_numbers(const std::string& reason) {
  std::string text;
  bool in_word = false;
  for (const char c : reason) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit || in_word) {
      text += c;
    } else if (text.empty() || text.back() != '#') {
      text += '#';
    }
    in_word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (in_word && digit);
  }
  return text;
}

/// All implementations on all devices, or those of the choice.
Result<std::vector<Row>> chosen_rows(const Common& common) {
  if (Status status = check_common(common); !status.ok()) return status;
  std::vector<Device> wanted{Device{}};
  if (common.device != "auto") {
    Result<Device> device = choose_device(common, Problem{});
    if (!device.ok()) return device.status();
    wanted = {*device};
  } else if (cuda_unavailable_reason().empty()) {
    wanted.push_back({DeviceType::kCuda, 0});
  }
  std::vector<Row> rows;
  for (const Device& device : wanted) {
    for (const ImplementationInfo& info : implementations()) {
      if (info.device != device.type) continue;
      if (is_chosen(common, info)) rows.push_back({info, device});
    }
  }
  if (rows.empty()) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("--impl: found {}, which runs on CUDA alone: {}",
                              common.implementation, cuda_unavailable_reason()));
  }
  return rows;
}

class Stress {
 public:
  Stress(const StressCommand& command, std::vector<Row> rows)
      : command_(command), common_(command.common), rows_(std::move(rows)) {}

  int run() {
    Progress progress("stressing");
    if (command_.number >= 0) {
      try_problem(stress::draw(command_.seed, command_.number));
    } else {
      while (!over()) {
        progress.step(fmt::format("{:.0f} s, {} problems, {} calls, {} failures", elapsed(),
                                  problems_, calls_, failures_));
        try_problem(next_draw());
      }
    }
    summarise();
    if (device_lost_) return kDeviceFailure;
    if (failures_ > 0) return kMismatch;
    if (calls_ > 0) return kRight;
    const std::string why =
        stop_wanted() ? fmt::format("a signal came after {} problems", problems_)
                      : fmt::format(
                            "nothing of the choice takes any of the {} problems; try more "
                            "of them or another --impl or --device",
                            problems_);
    return fail(common_, "", {StatusCode::kUnsupported, "nothing was tested: " + why});
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  bool over() const {
    if (device_lost_ || stop_wanted()) return true;
    if (command_.problems > 0 && problems_ >= command_.problems) return true;
    // A number of problems is a limit of its own.
    return (command_.problems == 0 || command_.seconds_given) && elapsed() >= command_.seconds;
  }

  /// The next problem, or the next one that the row with the fewest calls takes.
  stress::Draw next_draw() {
    if (problems_ % kProblemsPerAim == kProblemsPerAim - 1) {
      if (const Row* row = row_with_fewest_calls()) {
        if (std::optional<stress::Draw> found = next_draw_for(*row)) return std::move(*found);
        given_up_.insert(row);
      }
    }
    return stress::draw(command_.seed, number_++);
  }

  const Row* row_with_fewest_calls() {
    const Row* fewest = nullptr;
    int64_t least = 0;
    for (const Row& row : rows_) {
      if (given_up_.contains(&row)) continue;
      const Tally& tally = tallies_[std::string(row.info.name)];
      const int64_t calls = tally.calls - tally.by_default;
      if (fewest == nullptr || calls < least) {
        fewest = &row;
        least = calls;
      }
    }
    return fewest;
  }

  /// The first problem from here on that the row takes.
  std::optional<stress::Draw> next_draw_for(const Row& row) {
    for (int64_t number = number_; number < number_ + kMostDrawsPerAim; ++number) {
      stress::Draw draw = stress::draw(command_.seed, number);
      if (draw.problem.operation != row.info.operation || !verdict(draw, row).ok()) continue;
      number_ = number + 1;
      return draw;
    }
    return std::nullopt;
  }

  /// Whether the row takes the problem with the strides that it has; that needs no inputs.
  static Status verdict(const stress::Draw& draw, const Row& row) {
    Options only;
    only.implementation = row.info.name;
    return supports(cases::arranged(draw.problem, conditions_of(draw)), row.device, only);
  }

  void try_problem(const stress::Draw& draw) {
    std::vector<const Row*> candidates;
    bool on_device = false;
    for (const Row& row : rows_) {
      if (row.info.operation != draw.problem.operation) continue;
      const Status status = verdict(draw, row);
      if (status.code() == StatusCode::kUnsupported) {
        skip(draw, row, status.message());
        continue;
      }
      candidates.push_back(&row);
      on_device |= row.device.type != DeviceType::kCpu;
    }
    ++problems_;
    if (candidates.empty()) {
      if (command_.number >= 0 && !common_.json) {
        fmt::print("nothing of the choice takes {}\n", stress::describe(draw));
      }
      return;
    }
    Result<stress::Trial> trial = stress::prepare(draw, on_device);
    if (!trial.ok()) {
      report(draw, "reference", Device{}, {"", trial.status().message(), 0, 0});
      return;
    }
    for (const Row* row : candidates) {
      if (!device_lost_) try_row(*trial, *row);
    }
  }

  void try_row(const stress::Trial& trial, const Row& row) {
    const stress::Judgement judgement = stress::judge(trial, row.info, row.device, common_.threads);
    if (!judgement.ran) {
      skip(trial.draw, row, judgement.refusal);
      return;
    }
    Tally& tally = tallies_[std::string(row.info.name)];
    ++tally.calls;
    tally.by_default += judgement.by_default ? 1 : 0;
    ++calls_;
    if (!judgement.faults.empty()) ++tally.faulty;
    for (const stress::Fault& fault : judgement.faults) {
      report(trial.draw, row.info.name, row.device, fault);
    }
    device_lost_ |= judgement.device_lost;
    if (command_.number >= 0 && judgement.faults.empty() && !common_.json) {
      fmt::print("right: {} on {}: {}\n", row.info.name, name_of(row.device),
                 stress::describe(trial.draw));
    }
  }

  void skip(const stress::Draw& draw, const Row& row, const std::string& reason) {
    // "name: reason", and the name is known.
    const std::string name(row.info.name);
    const std::string text =
        reason.rfind(name + ": ", 0) == 0 ? reason.substr(name.size() + 2) : reason;
    Tally& tally = tallies_[name];
    ++tally.skipped;
    ++tally.reasons[without_numbers(text)];
    if (command_.number >= 0 && !common_.json) {
      fmt::print("skipped: {}: {}: {}\n", name, text, stress::describe(draw));
    }
  }

  std::string reproducer(const stress::Draw& draw, std::string_view implementation,
                         const Device& device) const {
    return fmt::format("kda stress --seed {} --case {} --device {} --impl {}{}", draw.seed,
                       draw.number, name_of(device), implementation,
                       common_.threads > 0 ? fmt::format(" --threads {}", common_.threads) : "");
  }

  void report(const stress::Draw& draw, std::string_view implementation, const Device& device,
              const stress::Fault& fault) {
    ++failures_;
    const std::string again = reproducer(draw, implementation, device);
    if (common_.json) {
      json object = {{"case", draw.number},
                     {"impl", implementation},
                     {"device", name_of(device)},
                     {"fault", fault.text},
                     {"problem", stress::describe(draw)},
                     {"reproduce", again}};
      if (!fault.output.empty()) object["output"] = fault.output;
      if (fault.limit > 0) {
        object["ratio"] = fault.ratio;
        object["limit"] = fault.limit;
      }
      print_json(object);
      return;
    }
    fmt::print("FAIL {} {}{}{}\n  {}\n  {}\n", implementation, fault.output,
               fault.output.empty() ? "" : ": ", printable(fault.text), stress::describe(draw),
               again);
    std::fflush(stdout);
  }

  void summarise() const {
    if (common_.json) {
      json rows = json::array();
      for (const auto& [name, tally] : tallies_) {
        rows.push_back({{"impl", name},
                        {"calls", tally.calls},
                        {"by_default", tally.by_default},
                        {"faulty", tally.faulty},
                        {"skipped", tally.skipped},
                        {"reasons", tally.reasons}});
      }
      print_json({{"machine", machines()},
                  {"version", version()},
                  {"date", now()},
                  {"command", command_.line},
                  {"seed", command_.seed},
                  {"problems", problems_},
                  {"calls", calls_},
                  {"failures", failures_},
                  {"seconds", elapsed()},
                  {"interrupted", stop_wanted()},
                  {"implementations", rows}});
      return;
    }
    fmt::print("\n{:<24} {:>7} {:>10} {:>7} {:>7}  most often because\n", "implementation", "calls",
               "by default", "faulty", "skipped");
    for (const auto& [name, tally] : tallies_) {
      const auto most =
          std::max_element(tally.reasons.begin(), tally.reasons.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
      fmt::print("{:<24} {:>7} {:>10} {:>7} {:>7}  {}\n", name, tally.calls, tally.by_default,
                 tally.faulty, tally.skipped,
                 most == tally.reasons.end()
                     ? ""
                     : fmt::format("{} ({})", printable(most->first), most->second));
    }
    fmt::print("\nseed {}: {} problems, {} calls, {} failures in {:.1f} s{}{}\n", command_.seed,
               problems_, calls_, failures_, elapsed(),
               device_lost_ ? "; the device cannot be used any more" : "",
               stop_wanted() ? "; a signal came" : "");
  }

  /// The devices of the rows, by name.
  json machines() const {
    json found = json::object();
    for (const Row& row : rows_) {
      const std::string name = name_of(row.device);
      if (!found.contains(name)) found[name] = machine_of(row.device);
    }
    return found;
  }

  const StressCommand& command_;
  const Common& common_;
  std::vector<Row> rows_;
  Clock::time_point start_ = Clock::now();
  std::map<std::string, Tally> tallies_;
  std::set<const Row*> given_up_;  ///< rows that took none of many problems
  int64_t number_ = 0;             ///< of the next problem
  int64_t problems_ = 0;
  int64_t calls_ = 0;
  int64_t failures_ = 0;
  bool device_lost_ = false;
};

}  // namespace

int stress(const StressCommand& command) {
  stop_on_signals();
  if (Status status = check_environment(command.common); !status.ok()) {
    return fail(command.common, "", status);
  }
  // What is tried depends on the command alone. Before CUDA starts threads, which may read others.
  for (const char* name : {"KDA_IMPL", "KDA_WORKSPACE_LIMIT"}) ::unsetenv(name);
  Result<std::vector<Row>> rows = chosen_rows(command.common);
  if (!rows.ok()) return fail(command.common, "", rows.status());
  return Stress(command, std::move(*rows)).run();
}

}  // namespace kda::program
