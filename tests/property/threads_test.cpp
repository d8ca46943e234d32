// Many threads at once: one plan shared, plans made meanwhile, OpenMP inside each.
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "kda/backend.h"
#include "property/running.h"
#include "support/together.h"

namespace kda::test {
namespace {

constexpr int kThreads = 8;
constexpr int kTurns = 4;

Case small_case() {
  CaseSpec spec;
  spec.sizes = {.B = 2, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24};
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  return cases::generate(spec);
}

/// One run of a shared plan with outputs and workspace of its own.
Status run_shared(const Plan& plan, const TensorMap& inputs, TensorMap& outputs) {
  Args args;
  const Problem& problem = plan.problem();
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    if (spec.role == Role::kInput) {
      args.in(spec.id, inputs.at(spec.id).bytes.data());
      continue;
    }
    const TensorLayout& layout = problem[spec.id];
    outputs[spec.id] =
        HostTensor(layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
    args.out(spec.id, outputs[spec.id].bytes.data());
  }
  cases::AlignedBytes workspace(plan.workspace_bytes());
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  return plan.run(args);
}

TEST(Threads, RunOnePlanAtOnce) {
  const Case c = small_case();
  for (const std::string& family : families_of_cpu()) {
    for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
      const TensorMap expected = run_operation(problem, c.inputs, choosing(family));
      for (const int inner : {1, 3}) {
        Options options = choosing(family).options;
        options.threads = inner;
        const Plan plan = make_plan(problem, {}, options).value();
        std::vector<std::string> reports(kThreads);
        together(kThreads, [&](int i) {
          std::string& report = reports[static_cast<std::size_t>(i)];
          for (int turn = 0; turn < kTurns && report.empty(); ++turn) {
            TensorMap outputs;
            const Status status = run_shared(plan, c.inputs, outputs);
            report = status.ok() ? other_bits(expected, outputs) : status.message();
          }
        });
        for (const std::string& report : reports) EXPECT_EQ(report, "") << family;
      }
    }
  }
}

TEST(Threads, MakePlansOfAllKindsAtOnce) {
  const Case c = small_case();
  const TensorMap expected = run_case(c, "cpu");
  std::vector<std::string> reports(kThreads);
  together(kThreads, [&](int i) {
    std::string& report = reports[static_cast<std::size_t>(i)];
    for (int turn = 0; turn < kTurns && report.empty(); ++turn) {
      switch (i % 4) {
        case 0:
          report = other_bits(expected, run_case(c, choosing("cpu")));
          break;
        case 1:
          run_case(c, choosing("reference"));
          break;
        case 2: {
          const auto verdicts = explain(backward_problem(c));
          report = verdicts.ok() && devices().size() > 0 ? "" : "explain failed";
          break;
        }
        default: {
          Problem wrong = forward_problem(c);
          wrong.sizes.K = 0;
          report = supports(wrong).ok() ? "a wrong problem was taken" : "";
          break;
        }
      }
    }
  });
  for (const std::string& report : reports) EXPECT_EQ(report, "");
}

// The runtime's threads are not in a child of a fork, where it would wait for them for ever.
TEST(Threads, AChildOfAForkRuns) {
  const Case c = small_case();
  for (const std::string& family : families_of_cpu()) {
    Conditions conditions = choosing(family);
    conditions.options.threads = 3;
    const TensorMap expected = run_case(c, conditions);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(30);
      _exit(other_bits(expected, run_case(c, conditions)).empty() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << family << ": signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << family;
  }
}

TEST(Threads, ResultsDoNotDependOnTheirNumber) {
  const Case c = small_case();
  for (const std::string& family : families_of_cpu()) {
    const TensorMap expected = run_case(c, family);
    for (const int threads : {1, 2, 3, 5, 8, 16}) {
      Conditions conditions = choosing(family);
      conditions.options.threads = threads;
      EXPECT_EQ(other_bits(expected, run_case(c, conditions)), "") << threads;
    }
  }
}

}  // namespace
}  // namespace kda::test
