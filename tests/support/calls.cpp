#include "support/calls.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

namespace kda::test {
namespace {

/// Properties of the test that runs, from any thread of it.
class Counts : public testing::EmptyTestEventListener {
 public:
  void add(const std::string& property) {
    const std::lock_guard lock(mutex_);
    ++counts_[property];
  }

  void OnTestEnd(const testing::TestInfo&) override {
    const std::lock_guard lock(mutex_);
    for (const auto& [property, count] : counts_) testing::Test::RecordProperty(property, count);
    counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> counts_;
};

/// gtest owns the listener.
Counts* const counts = [] {
  auto* listener = new Counts;
  testing::UnitTest::GetInstance()->listeners().Append(listener);
  return listener;
}();

/// "K = 16 (64 or 128)" and "K = 32 (64 or 128)" are one reason. gtest does not escape names.
std::string without_found_sizes(std::string_view reason) {
  std::string text(reason);
  std::replace(text.begin(), text.end(), '"', '\'');
  for (std::size_t at = text.find(" = "); at != std::string::npos; at = text.find(" = ", at + 1)) {
    std::size_t end = at + 3;
    while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) ++end;
    text.erase(at, end - at);
  }
  return text;
}

}  // namespace

void count_call(std::string_view row) { counts->add("calls." + std::string(row)); }

void count_refusal(std::string_view choice, std::string_view reason) {
  counts->add("refused." + std::string(choice) + ": " + without_found_sizes(reason));
}

void note_limit(std::string_view family, std::string_view text) {
  counts->add("note." + std::string(family) + ": " + std::string(text));
}

Result<GuardedOutcome> run_counted(const Problem& problem, const TensorMap& inputs,
                                   const Conditions& conditions) {
  Result<GuardedOutcome> outcome = run_guarded(problem, inputs, conditions);
  if (outcome.ok()) {
    count_call(outcome->implementation);
  } else if (outcome.status().code() != StatusCode::kUnsupported) {
    const Result<Plan> plan = make_plan(problem, conditions.device, conditions.options);
    if (plan.ok()) count_call(plan->implementation());
  }
  return outcome;
}

}  // namespace kda::test
