// Choosing an implementation: order, names, families, KDA_IMPL, explain.
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kda/kda.h"

namespace kda {
namespace {

/// A variable for the length of a test; restored after it.
class Environment {
 public:
  explicit Environment(const char* value, const char* variable = "KDA_IMPL") : variable_(variable) {
    if (const char* old = std::getenv(variable_)) old_ = old;
    set(value);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { set(old_ ? old_->c_str() : nullptr); }

 private:
  void set(const char* value) const {
    if (value == nullptr) {
      unsetenv(variable_);
    } else {
      setenv(variable_, value, 1);
    }
  }
  const char* variable_;
  std::optional<std::string> old_;
};

/// Any valid problem of an operation.
Problem problem_of(Operation operation) {
  Problem problem =
      Problem::make(operation, {.B = 1, .T = 5, .H = 1, .HV = 2, .K = 8, .V = 6}, DType::kF32);
  for (const TensorSpec& spec : tensors_of(operation)) {
    const bool parameter = spec.id == TensorId::kDALog || spec.id == TensorId::kDdtBias;
    if (spec.role == Role::kOutput && !parameter) problem.set(spec.id, DType::kF32);
    if (spec.id == TensorId::kQ || spec.id == TensorId::kV || spec.id == TensorId::kDo) {
      problem.set(spec.id, DType::kF32);
    }
  }
  return problem;
}

std::vector<ImplementationInfo> rows_of(Operation operation) {
  std::vector<ImplementationInfo> rows;
  for (const ImplementationInfo& row : implementations()) {
    if (row.operation == operation && row.device == DeviceType::kCpu) rows.push_back(row);
  }
  return rows;
}

bool has_rows_on(DeviceType device) {
  const std::vector<ImplementationInfo> rows = implementations();
  return std::any_of(rows.begin(), rows.end(),
                     [&](const ImplementationInfo& row) { return row.device == device; });
}

Options choosing(std::string_view name) {
  Options options;
  options.implementation = name;
  return options;
}

TEST(Implementations, NamesAreFamilyAndStem) {
  std::set<std::string_view> names;
  for (const ImplementationInfo& row : implementations()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name << " twice";
    EXPECT_EQ(row.name, std::string(row.family) + "_" + std::string(name_of(row.operation)));
    EXPECT_FALSE(row.features.empty()) << row.name;
    EXPECT_EQ(row.name.data()[row.name.size()], '\0') << "the C interface hands out the pointer";
    EXPECT_EQ(row.family.data()[row.family.size()], '\0');
    EXPECT_EQ(row.features.data()[row.features.size()], '\0');
  }
}

TEST(Implementations, ReferenceIsLastAndCoversEverything) {
  for (int i = 0; i < kOperationCount; ++i) {
    const auto rows = rows_of(static_cast<Operation>(i));
    ASSERT_FALSE(rows.empty()) << name_of(static_cast<Operation>(i));
    EXPECT_EQ(rows.back().family, "reference");
  }
}

TEST(MakePlan, EveryRowCanBeChosenByNameAndFamily) {
  const Environment environment(nullptr);
  for (const ImplementationInfo& row : implementations()) {
    if (row.device != DeviceType::kCpu) continue;
    const Problem problem = problem_of(row.operation);
    for (std::string_view choice : {row.name, row.family}) {
      const Result<Plan> plan = make_plan(problem, {}, choosing(choice));
      ASSERT_TRUE(plan.ok()) << choice << ": " << plan.status().message();
      EXPECT_EQ(plan->implementation(), row.name);
      EXPECT_EQ(plan->device(), Device{});
      EXPECT_EQ(plan->problem().operation, row.operation);
    }
  }
}

TEST(MakePlan, TakesTheFirstThatSupports) {
  const Environment environment(nullptr);
  for (int i = 0; i < kOperationCount; ++i) {
    const Problem problem = problem_of(static_cast<Operation>(i));
    const Result<Plan> plan = make_plan(problem);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Result<std::vector<Verdict>> verdicts = explain(problem);
    ASSERT_TRUE(verdicts.ok());
    const auto first = std::find_if(verdicts->begin(), verdicts->end(),
                                    [](const Verdict& verdict) { return verdict.supported; });
    ASSERT_NE(first, verdicts->end());
    EXPECT_EQ(first->name, plan->implementation());
  }
}

TEST(MakePlan, ListsAndSpaces) {
  const Environment environment(nullptr);
  const Problem problem = problem_of(Operation::kChunkForward);
  for (const char* list :
       {"reference,cpu", "cpu,reference", "reference_chunk_bwd, reference_chunk_fwd,,"}) {
    const Result<Plan> plan = make_plan(problem, {}, choosing(list));
    ASSERT_TRUE(plan.ok()) << list << ": " << plan.status().message();
  }
  EXPECT_EQ(make_plan(problem, {}, choosing(" reference ")).value().implementation(),
            "reference_chunk_fwd");
}

TEST(MakePlan, UnknownNamesAreRefusedWithTheList) {
  const Environment environment(nullptr);
  const Problem problem = problem_of(Operation::kChunkForward);
  for (const char* name : {"fastest", "CPU", "cpu_chunk"}) {
    const Status status = supports(problem, {}, choosing(name));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(status.message().rfind("implementation: found \"" + std::string(name) + "\"", 0), 0u)
        << status.message();
    EXPECT_NE(status.message().find("reference_chunk_fwd"), std::string::npos);
    EXPECT_EQ(status.message().find("this build has no CUDA") == std::string::npos,
              has_rows_on(DeviceType::kCuda))
        << status.message();
  }
}

// The word exists, so that the refusal is about this operation and device.
TEST(MakePlan, NamesOfOtherOperationsAndDevicesAreUnsupported) {
  const Environment environment("reference_chunk_bwd");
  const Problem problem = problem_of(Operation::kChunkForward);
  const Status status = supports(problem);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "environment variable KDA_IMPL: \"reference_chunk_bwd\" has no row for chunk_fwd on "
            "cpu; choose cpu_chunk_fwd or reference_chunk_fwd");
  EXPECT_EQ(explain(problem).status().message(), status.message());

  const std::string absent = cuda_unavailable_reason();
  for (const ImplementationInfo& row : implementations()) {
    if (row.device != DeviceType::kCuda) continue;
    const std::string name(row.name);
    const Status refused = supports(problem_of(row.operation), {}, choosing(name));
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << refused.message();
    const std::string start =
        "implementation: \"" + name + "\" has no row for " + std::string(name_of(row.operation)) +
        " on cpu; " + name + " runs on cuda" +
        (absent.empty() ? "" : ", which cannot be used here: " + absent) + "; choose ";
    EXPECT_EQ(refused.message().rfind(start, 0), 0U) << refused.message();
    EXPECT_EQ(refused.message().ends_with(", or device cuda"), absent.empty());
  }
  if (!has_rows_on(DeviceType::kCuda)) return;
  const Status reverse = supports(problem, {DeviceType::kCuda, 0}, choosing("reference"));
  EXPECT_EQ(reverse.code(), StatusCode::kUnsupported);
  EXPECT_NE(reverse.message().find("; reference_chunk_fwd runs on cpu; choose sm90_chunk_fwd or "
                                   "cuda_chunk_fwd, or device cpu"),
            std::string::npos)
      << reverse.message();
}

TEST(MakePlan, ADeviceWithoutRowsSaysWhy) {
  const auto rows = implementations();
  if (std::any_of(rows.begin(), rows.end(),
                  [](const auto& row) { return row.device == DeviceType::kCuda; })) {
    GTEST_SKIP() << "this build has rows for CUDA";
  }
  const Environment environment(nullptr);
  const Status status = supports(problem_of(Operation::kWu), {DeviceType::kCuda, 0});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "device cuda: nothing runs wu there: " + cuda_unavailable_reason());
}

TEST(MakePlan, WhatIsFoundIsShownPrintableAndShort) {
  const Environment environment(nullptr);
  const Problem problem = problem_of(Operation::kChunkForward);
  const std::string message = supports(problem, {}, choosing("a\nb\xff")).message();
  EXPECT_EQ(message.rfind("implementation: found \"a\\x0ab\\xff\", expected", 0), 0u) << message;
  const std::string longest(10'000'000, 'x');
  const std::string cut = supports(problem, {}, choosing(longest.c_str())).message();
  EXPECT_NE(cut.find("x... (10000000 bytes)"), std::string::npos);
  EXPECT_LT(cut.size(), 600u);
}

TEST(MakePlan, EnvironmentVariableChooses) {
  const Problem problem = problem_of(Operation::kChunkForward);
  {
    const Environment environment("reference");
    EXPECT_EQ(make_plan(problem).value().implementation(), "reference_chunk_fwd");
  }
  for (const std::string word : {"fastest", "x"}) {
    const Environment environment(word.c_str());
    const Status status = supports(problem);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().rfind("environment variable KDA_IMPL: found \"" + word + "\"", 0),
              0u)
        << status.message();
    EXPECT_TRUE(supports(problem, {}, choosing("reference")).ok()) << "options win";
  }
  {
    const Environment environment("");
    EXPECT_TRUE(supports(problem).ok());
  }
}

TEST(MakePlan, AWordThatNoOperationKnowsIsRefused) {
  const Environment environment(nullptr);
  const Problem problem = problem_of(Operation::kChunkForward);
  const Status status = supports(problem, {}, choosing("cpu, fastest"));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message().rfind("implementation: found \"fastest\"", 0), 0u) << status.message();
  EXPECT_NE(status.message().find("cpu, reference"), std::string::npos) << status.message();
  EXPECT_TRUE(supports(problem, {}, choosing("cpu_chunk_fwd,cpu_chunk_bwd")).ok());
  for (const char* unset : {",", " , "}) EXPECT_TRUE(supports(problem, {}, choosing(unset)).ok());
}

// The widths of tensors that an operation does not have cost it nothing.
TEST(MakePlan, ValueWidthIsIgnoredWithoutValues) {
  Options options = choosing("cpu");
  options.threads = 1024;
  for (const Operation operation :
       {Operation::kIntra, Operation::kGateCumsum, Operation::kIntraBackward}) {
    Sizes sizes{.B = 1, .T = 65536, .H = 1, .HV = 1, .K = 256, .V = 1};
    Problem problem = Problem::make(operation, sizes, DType::kF32);
    if (operation == Operation::kIntra) problem.set(TensorId::kA, DType::kF32);
    if (operation == Operation::kIntraBackward) problem.set(TensorId::kDq, DType::kF32);
    const Result<Plan> narrow = make_plan(problem, {}, options);
    ASSERT_TRUE(narrow.ok()) << narrow.status().message();
    problem.sizes.V = 65269559816640;
    const Result<Plan> wide = make_plan(problem, {}, options);
    ASSERT_TRUE(wide.ok()) << wide.status().message();
    EXPECT_EQ(narrow->workspace_bytes(), wide->workspace_bytes());
  }
}

TEST(MakePlan, AWorkspaceBeyondAnyMachineIsUnsupported) {
  Problem problem = Problem::make(
      Operation::kChunkForward,
      {.B = 1, .T = 0, .H = 1, .HV = 1, .K = 256, .V = int64_t{1} << 46, .N = 0}, DType::kF32);
  problem.set(TensorId::kCuSeqlens, DType::kI64);
  for (const char* family : {"cpu", "reference"}) {
    problem.sizes.K = 256;
    const Status status = supports(problem, {}, choosing(family));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << family << ": " << status.message();
    EXPECT_NE(status.message().find("does not take sizes that need a workspace"), std::string::npos)
        << status.message();
  }
}

TEST(MakePlan, MoreSequencesTimesHeadsThanCanBeCountedAreRefused) {
  Problem problem =
      Problem::make(Operation::kGateCumsum,
                    {.B = 1, .T = 0, .H = 1, .HV = int64_t{1} << 46, .K = 1, .V = 1}, DType::kF32);
  problem.set(TensorId::kCuSeqlens, DType::kI64).sizes.N = (int64_t{1} << 46) - 1;
  for (const char* family : {"cpu", "reference"}) {
    const Status status = supports(problem, {}, choosing(family));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << family;
    EXPECT_EQ(status.message().rfind("size N: found 70368744177663", 0), 0u) << status.message();
  }
  problem.set(TensorId::kCuSeqlens, DType::kNone).sizes.B = int64_t{1} << 46;
  EXPECT_EQ(supports(problem).message().rfind("size B: found 70368744177664", 0), 0u)
      << supports(problem).message();
}

TEST(MakePlan, RefusesWrongDevicesAndThreads) {
  const Problem problem = problem_of(Operation::kChunkForward);
  const auto message = [&](Device device, Options options = {}) {
    const Status status = supports(problem, device, options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message({DeviceType::kCpu, 1}), "device index: found 1 for the cpu, expected 0");
  EXPECT_EQ(message({DeviceType::kCuda, -1}), "device index: found -1, expected 0 or more");
  EXPECT_EQ(message({static_cast<DeviceType>(5), 0}),
            "device type: found value 5, expected cpu or cuda");
  Options options;
  options.threads = -2;
  EXPECT_EQ(message({}, options), "threads: found -2, expected 0..1024");
  EXPECT_FALSE(explain(problem, {}, options).ok()) << "explain asks what make_plan asks";
  options.threads = 1025;
  EXPECT_EQ(message({}, options), "threads: found 1025, expected 0..1024");
}

// Each thread has scratch of its own, beside what all share (the backward has some).
TEST(MakePlan, FewerThreadsKeepToALimitOfTheWorkspace) {
  const Environment environment(nullptr, "KDA_WORKSPACE_LIMIT");
  for (const Operation operation : {Operation::kChunkForward, Operation::kChunkBackward}) {
    Problem problem =
        Problem::make(operation, {.B = 4, .T = 70, .H = 4, .HV = 4, .K = 8, .V = 6}, DType::kF32);
    problem.gate = Gate::kSoftplus;
    problem.set(TensorId::kALog, DType::kF32);
    if (operation == Operation::kChunkBackward) problem.set(TensorId::kDALog, DType::kF32);
    for (const char* family : {"cpu", "reference"}) {
      const auto bytes = [&](int32_t threads, std::size_t limit) {
        Options options = choosing(family);
        options.threads = threads;
        options.workspace_limit = limit;
        return make_plan(problem, {}, options).value().workspace_bytes();
      };
      const std::size_t one = bytes(1, 0);
      const std::size_t three = bytes(3, 0);
      const std::size_t eight = bytes(8, 0);
      ASSERT_LT(one, three) << family;
      EXPECT_EQ(bytes(8, eight), eight) << family;
      EXPECT_EQ(bytes(8, three), three) << family;
      EXPECT_EQ(bytes(8, three + 1), three) << family;
      EXPECT_EQ(bytes(8, three - 1), bytes(2, 0)) << family;
      EXPECT_EQ(bytes(8, one), one) << family;
      Options options = choosing(family);
      options.workspace_limit = one - 1;
      const Status refused = supports(problem, {}, options);
      EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
      EXPECT_NE(refused.message().find("workspace_limit: found " + std::to_string(one - 1) +
                                       " bytes, expected " + std::to_string(one) + " or more"),
                std::string::npos)
          << refused.message();
    }
  }
}

TEST(MakePlan, TheEnvironmentLimitsTheWorkspaceUnlessTheCallerDoes) {
  const Problem problem = problem_of(Operation::kChunkForward);
  const std::string variable = "KDA_WORKSPACE_LIMIT";
  Options generous;
  generous.workspace_limit = std::size_t{1} << 40;
  for (const char* one : {"1", " 1", "1 ", " 1\t\n"}) {
    const Environment environment(one, variable.c_str());
    EXPECT_EQ(supports(problem).code(), StatusCode::kUnsupported) << "\"" << one << "\"";
    EXPECT_TRUE(supports(problem, {}, generous).ok()) << "\"" << one << "\"";
  }
  for (const char* none : {"", "0", " ", " 0 "}) {
    const Environment environment(none, variable.c_str());
    EXPECT_TRUE(supports(problem).ok()) << "\"" << none << "\"";
  }
  for (const char* wrong : {"1G", "-1", "99999999999999999999", "1 000"}) {
    const Environment environment(wrong, variable.c_str());
    const Status status = supports(problem);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << wrong;
    EXPECT_EQ(status.message(), "environment variable " + variable + ": found \"" + wrong +
                                    "\", expected a number of bytes, or 0 for no limit");
    EXPECT_TRUE(supports(problem, {}, generous).ok()) << wrong;
  }
}

TEST(Explain, SaysTheWorkspace) {
  const Problem problem = problem_of(Operation::kChunkForward);
  const std::vector<Verdict> verdicts = explain(problem).value();
  for (const Verdict& verdict : verdicts) {
    const Plan plan = make_plan(problem, {}, choosing(std::string(verdict.name))).value();
    EXPECT_EQ(verdict.workspace_bytes, plan.workspace_bytes()) << verdict.name;
  }
  Options least;
  least.workspace_limit = 1;
  const std::vector<Verdict> refused = explain(problem, {}, least).value();
  for (const Verdict& verdict : refused) {
    EXPECT_FALSE(verdict.supported) << verdict.name;
    EXPECT_EQ(verdict.workspace_bytes, 0u);
    EXPECT_NE(verdict.reason.find("workspace_limit: found 1 bytes"), std::string::npos);
  }
}

TEST(MakePlan, CudaThatIsNotThereIsUnsupportedWithTheReason) {
  const std::string reason = cuda_unavailable_reason();
  const Status status = supports(problem_of(Operation::kChunkForward), {DeviceType::kCuda, 0});
  if (reason.empty()) {
    EXPECT_NE(status.code(), StatusCode::kInvalidArgument) << status.message();
  } else {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
  }
}

TEST(Explain, AgreesWithMakePlan) {
  for (const char* choice : {"", "reference", "cpu", "nothing"}) {
    const Environment environment(choice);
    for (int i = 0; i < kOperationCount; ++i) {
      for (const DType io : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
        Problem problem = problem_of(static_cast<Operation>(i));
        for (TensorLayout& layout : problem.tensors) {
          if (layout.present()) layout.dtype = io == DType::kF64 ? DType::kF64 : layout.dtype;
        }
        const Result<Plan> plan = make_plan(problem);
        const Result<std::vector<Verdict>> verdicts = explain(problem);
        EXPECT_EQ(plan.status().code() == StatusCode::kInvalidArgument, !verdicts.ok());
        if (!verdicts.ok()) {
          EXPECT_EQ(plan.status().message(), verdicts.status().message());
          continue;
        }
        std::vector<std::string_view> chosen;
        for (const Verdict& verdict : *verdicts) {
          EXPECT_EQ(verdict.supported, verdict.reason.empty()) << verdict.name;
          if (verdict.chosen) chosen.push_back(verdict.name);
        }
        ASSERT_EQ(chosen.size(), plan.ok() ? 1u : 0u) << plan.status().message();
        if (plan.ok()) {
          EXPECT_EQ(chosen.front(), plan->implementation());
        }
      }
    }
  }
}

TEST(Plan, IsCheapToCopyAndOutlivesItsSource) {
  std::optional<Plan> copy;
  {
    const Result<Plan> plan = make_plan(problem_of(Operation::kChunkForward));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    copy = *plan;
  }
  EXPECT_EQ(copy->problem().sizes.T, 5);
  EXPECT_EQ(copy->run({}).code(), StatusCode::kInvalidArgument) << "no addresses";
}

TEST(Plan, MovedFromDoesNotRun) {
  Plan plan = make_plan(problem_of(Operation::kChunkForward)).value();
  const Plan taken = std::move(plan);
  const Status status = plan.run({});  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "plan: moved from, expected one that make_plan returned");
  EXPECT_EQ(taken.problem().sizes.T, 5);
}

TEST(Devices, TheCpuIsAlwaysThere) {
  const std::vector<DeviceInfo> all = devices();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.front().device, Device{});
  EXPECT_FALSE(all.front().name.empty());
  EXPECT_FALSE(all.front().features.empty());
  EXPECT_GT(all.front().memory_bytes, std::size_t{1} << 20);
  EXPECT_EQ(all.size() > 1, cuda_unavailable_reason().empty());
}

// Between the directions the caller keeps inputs alone: states and scores are computed again.
TEST(Plans, MEM_03_TheBackwardNeedsNothingThatTheForwardMade) {
  std::set<TensorId> given{TensorId::kDo};
  for (const TensorSpec& spec : tensors_of(Operation::kChunkForward)) {
    if (spec.role == Role::kInput) given.insert(spec.id);
  }
  for (const TensorSpec& spec : tensors_of(Operation::kChunkBackward)) {
    if (spec.role != Role::kInput || !spec.required) continue;
    EXPECT_EQ(given.count(spec.id), 1U) << name_of(spec.id);
  }
}

}  // namespace
}  // namespace kda
