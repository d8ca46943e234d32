// What a long training run asks of a library: thousands of calls of changing shapes on the memory
// of the first ones, and many threads at once.
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "guard/buffer.h"
#include "property/running.h"
#include "support/calls.h"
#include "support/steps.h"
#include "support/together.h"

namespace kda::test {
namespace {

#if defined(KDA_GUARD_ASAN)
constexpr bool kKeepsFreedMemory = true;  // AddressSanitizer, which finds what is lost by itself
#else
constexpr bool kKeepsFreedMemory = false;
#endif

/// Memory for the tensors of any step, filled once.
class Steps {
 public:
  Steps() {
    for (int id = 0; id < kTensorCount; ++id) {
      memory_.emplace_back(kStepBytes, std::byte(fill_of(static_cast<TensorId>(id))));
    }
  }

  /// Makes a plan for the step and runs it; "" or what went wrong.
  std::string run(int64_t step) {
    const Problem problem = problem_of_step(step);
    Options options;
    options.threads = 2;
    options.implementation = "cpu";
    const Result<Plan> plan = make_plan(problem, {}, options);
    if (!plan.ok()) return plan.status().message();
    Args args;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (!problem.has(spec.id)) continue;
      EXPECT_LE(static_cast<std::size_t>(plan->problem().bytes(spec.id)), kStepBytes);
      args.out(spec.id, memory_of(spec.id).data());
    }
    const auto starts = starts_of_step(step);
    std::memcpy(memory_of(TensorId::kCuSeqlens).data(), starts.data(), sizeof starts);
    if (plan->workspace_bytes() > workspace_.size()) workspace_.resize(plan->workspace_bytes());
    args.workspace = workspace_.data();
    args.workspace_bytes = workspace_.size();
    count_call(plan->implementation());
    return plan->run(args).message();
  }

  /// A number that depends on every bit of the outputs of a step.
  uint64_t fingerprint(int64_t step) {
    const Problem problem = problem_of_step(step).validated().value();
    uint64_t sum = 0;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (spec.role == Role::kInput || !problem.has(spec.id)) continue;
      const cases::AlignedBytes& bytes = memory_of(spec.id);
      for (std::size_t i = 0; i < static_cast<std::size_t>(problem.bytes(spec.id)); ++i) {
        sum = sum * 0x100000001B3 + static_cast<uint64_t>(bytes[i]);
      }
    }
    return sum;
  }

 private:
  cases::AlignedBytes& memory_of(TensorId id) { return memory_[static_cast<std::size_t>(id)]; }

  std::vector<cases::AlignedBytes> memory_;
  cases::AlignedBytes workspace_;
};

/// Resident memory of this process.
int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// MEM-01, on the CPU too.
TEST(Endurance, TenThousandCallsLeaveNoMemoryBehind) {
  constexpr int64_t kWarmUp = 1500;                             // more than the steps repeat after
  constexpr int64_t kCalls = kKeepsFreedMemory ? 2000 : 10000;  // it is slower
  // A megabyte is 110 bytes a call. Plans of the ten thousand would be more than ten.
  constexpr int64_t kMostGrowth = 1 << 20;
  Steps steps;
  for (int64_t step = 0; step < kWarmUp; ++step) ASSERT_EQ(steps.run(step), "") << step;
  const int64_t before = resident_bytes();
  for (int64_t step = kWarmUp; step < kCalls; ++step) ASSERT_EQ(steps.run(step), "") << step;
  if (kKeepsFreedMemory) return;
  EXPECT_LE(resident_bytes() - before, kMostGrowth);
}

TEST(Endurance, SixtyFourThreadsAtOnceGetTheirOwnBits) {
  constexpr int64_t kTurns = 12;
  expect_own_outputs<Steps>(
      kTurns, [](Steps& steps, int64_t step) { return steps.run(step); },
      [](Steps& steps, int64_t step) { return steps.fingerprint(step); });
}

}  // namespace
}  // namespace kda::test
