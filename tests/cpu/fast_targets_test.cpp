// Every instruction set in this build, on a machine that has it: the same limits hold on each.
#include <gtest/gtest.h>

#include "fast_support.h"
#include "fast_target.h"

namespace kda {
namespace {

TEST(FastTargets, EachMeetsTheLimits) {
  const FastCase cases[] = {
      {"fp32", {1, 150, 1, 2, 60, 100}, DType::kF32, Gate::kSoftplus, true},
      {"bf16", {1, 70, 1, 1, 64, 64}, DType::kBF16, Gate::kNone},
      {"fp16", {1, 70, 1, 1, 32, 48}, DType::kF16, Gate::kLowerBound, true, true, true},
  };
  for_each_target([&] {
    for (const FastCase& c : cases) {
      SCOPED_TRACE(c.name);
      for (const Operation operation :
           {Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent}) {
        const Problem problem = problem_of(c, operation);
        const Tensors inputs = inputs_of(c, problem, 41);
        expect_close(run_reference(problem, inputs), run_fast(problem, inputs));
      }
    }
  });
}

}  // namespace
}  // namespace kda
