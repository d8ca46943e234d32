#include "stress/judge.h"

#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "stress/dye.h"
#include "stress/wrong_list.h"

namespace kda::stress {
namespace {

using cases::TensorMap;

/// Whose kernels run by default where a row does not take the addresses.
constexpr std::string_view kGenericFamily = "cuda";

/// Computes in fp32 whatever the outputs are. In 16 bits these hide errors of up to 2e-3.
constexpr std::string_view kFp32Family = "cpu";

/// Rows that need aligned addresses say so at the run, which alone knows them, and refuse where
/// they were chosen by name. By default they are taken (docs/api.md).
bool is_about_alignment(const Status& status, const ImplementationInfo& implementation) {
  return status.code() == StatusCode::kInvalidArgument &&
         status.message().find(fmt::format("expected a multiple of 16 for {}",
                                           implementation.name)) != std::string::npos;
}

void add_failure(const Status& status, Judgement& judgement) {
  judgement.device_lost |= status.code() == StatusCode::kDeviceError;
  judgement.faults.push_back({"", status.message()});
}

/// The same run with outputs that show the arithmetic alone.
void run_in_fp32(const Trial& trial, const cases::Conditions& plain, Judgement& judgement) {
  const std::optional<Problem> problem = with_fp32_outputs(trial.draw);
  if (!problem) return;
  cases::Conditions conditions = plain;
  conditions.repeat = false;
  Result<cases::GuardedOutcome> outcome = run_guarded(*problem, trial.inputs.inputs, conditions);
  constexpr std::string_view kHow = "with outputs in fp32: ";
  if (!outcome.ok()) {
    const std::string text = fmt::format("{}{}", kHow, outcome.status().message());
    add_failure({outcome.status().code(), text}, judgement);
    return;
  }
  for (Fault& fault : faults_of(trial, kFp32Family, outcome->outputs)) {
    fault.text.insert(0, kHow);
    judgement.faults.push_back(std::move(fault));
  }
}

/// The same run with one sequence spoilt.
void run_dyed(const Trial& trial, const cases::Conditions& plain, const TensorMap& outputs,
              Judgement& judgement) {
  cases::Conditions conditions = plain;
  conditions.repeat = false;
  conditions.watch = cases::Watch::kNotUnwritten;
  conditions.copies = 1;
  Result<cases::GuardedOutcome> outcome =
      run_guarded(trial.draw.problem, dyed_inputs(trial), conditions);
  if (!outcome.ok()) {
    add_failure({outcome.status().code(), fmt::format("with NaN in sequence {}: {}",
                                                      trial.draw.dyed, outcome.status().message())},
                judgement);
    return;
  }
  const std::string trace = trace_of_dye(trial, outputs, outcome->outputs);
  if (!trace.empty()) judgement.faults.push_back({"", trace});
}

/// The same run with one NaN among the gates: it shows wherever the reference has it.
void run_with_nan(const Trial& trial, const cases::Conditions& plain, Judgement& judgement) {
  const TensorMap inputs = nan_inputs(trial);
  if (inputs.empty()) return;
  cases::Conditions conditions = plain;
  conditions.repeat = false;
  conditions.watch = cases::Watch::kNotUnwritten;
  conditions.copies = 1;
  Result<TensorMap> expected = expected_of(trial.draw, inputs);
  Result<cases::GuardedOutcome> outcome = run_guarded(trial.draw.problem, inputs, conditions);
  for (const Status& status : {expected.status(), outcome.status()}) {
    if (!status.ok()) return add_failure(status, judgement);
  }
  const std::string hidden = hidden_nan(*expected, outcome->outputs);
  if (hidden.empty()) return;
  judgement.faults.push_back({"", fmt::format("with one NaN among the gates of sequence {}: {}",
                                              trial.draw.dyed, hidden)});
}

/// The same run with a wrong list: the CPU refuses it, a device stays in bounds.
void run_with_wrong_list(const Trial& trial, const cases::Conditions& plain, Judgement& judgement) {
  const std::optional<WrongList> wrong = with_wrong_list(trial);
  if (!wrong) return;
  cases::Conditions conditions = plain;
  conditions.watch = cases::Watch::kBounds;
  conditions.copies = 1;
  const Status status = run_guarded(trial.draw.problem, wrong->inputs, conditions).status();
  const bool on_cpu = plain.device.type == DeviceType::kCpu;
  const bool refused = status.code() == StatusCode::kInvalidArgument &&
                       status.message().starts_with(name_of(wrong->id));
  if (on_cpu ? refused : status.ok()) return;
  add_failure({status.code(), fmt::format("with a wrong {}: {}", name_of(wrong->id),
                                          status.ok() ? "was taken" : status.message())},
              judgement);
}

}  // namespace

Judgement judge(const Trial& trial, const ImplementationInfo& implementation, const Device& device,
                int threads) {
  cases::Conditions conditions = conditions_of(trial.draw);
  conditions.options.implementation = implementation.name;
  if (threads > 0) conditions.options.threads = conditions.repeat_threads = threads;
  conditions.device = device;
  conditions.repeat = true;
  if (!trial.earlier.empty()) conditions.earlier = &trial.earlier;
  Judgement judgement;
  std::string_view family = implementation.family;
  Result<cases::GuardedOutcome> outcome =
      run_guarded(trial.draw.problem, trial.inputs.inputs, conditions);
  if (is_about_alignment(outcome.status(), implementation)) {
    conditions.options.implementation.clear();
    judgement.by_default = true;
    family = kGenericFamily;
    outcome = run_guarded(trial.draw.problem, trial.inputs.inputs, conditions);
  }
  if (outcome.ok()) {
    judgement.ran = true;
    judgement.faults = faults_of(trial, family, outcome->outputs);
    if (family == kFp32Family && judgement.faults.empty()) {
      run_in_fp32(trial, conditions, judgement);
    }
    if (trial.draw.dyed >= 0) {
      run_dyed(trial, conditions, outcome->outputs, judgement);
      run_with_nan(trial, conditions, judgement);
    }
    if (trial.draw.wrong_list) run_with_wrong_list(trial, conditions, judgement);
    return judgement;
  }
  if (outcome.status().code() == StatusCode::kUnsupported) {
    judgement.refusal = outcome.status().message();
  } else {
    judgement.ran = true;
    add_failure(outcome.status(), judgement);
  }
  return judgement;
}

}  // namespace kda::stress
