#include "support/steps.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace kda::test {
namespace {

using enum TensorId;

int64_t turn(int64_t step, std::initializer_list<int64_t> values) {
  return *(values.begin() + step % static_cast<int64_t>(values.size()));
}

}  // namespace

int fill_of(TensorId id) { return id == kG ? kNegativeFill : kPositiveFill; }

Problem problem_of_step(int64_t step, StepSizes sizes) {
  const bool models = sizes == StepSizes::kModels;
  const auto operation = static_cast<Operation>(step % 3);
  Sizes s;
  s.T = operation == Operation::kRecurrent ? turn(step / 3, {1, 2, 5}) : 1 + 37 * step % 90;
  s.H = turn(step, {1, 2});
  s.HV = s.H * turn(step / 2, {1, 2, 1});
  s.K = turn(step, {64, models ? 128 : 16, 128, 33, 64});
  s.V = turn(step, {64, 128, 24, 64, models ? 128 : 40, 64, 1});
  const bool packed = step % 4 == 1;
  s.B = packed ? 1 : turn(step, {1, 3, 2});
  s.N = packed ? static_cast<int64_t>(kMostStarts) - 1 : 0;
  const DType io = step / 5 % (models ? 4 : 2) == 1 ? DType::kF32 : DType::kBF16;
  Problem problem = Problem::make(operation, s, io);
  problem.gate = step % 7 < 3 ? Gate::kSoftplus : Gate::kNone;
  problem.qk_l2norm = problem.beta_sigmoid = step % 5 != 0;
  problem.state_v_first = step % 6 == 5;
  if (problem.gate != Gate::kNone) problem.set(kALog, DType::kF32);
  if (packed) problem.set(kCuSeqlens, DType::kI64);
  problem.set(kInitialState, DType::kF32);
  if (operation == Operation::kChunkBackward) {
    for (const TensorId id : {kDq, kDk, kDv}) problem.set(id, io);
    for (const TensorId id : {kDg, kDbeta, kDinitialState}) problem.set(id, DType::kF32);
    if (problem.gate != Gate::kNone) problem.set(kDALog, DType::kF32);
  } else {
    problem.set(kFinalState, DType::kF32);
  }
  return problem;
}

std::array<int64_t, kMostStarts> starts_of_step(int64_t step) {
  const int64_t T = problem_of_step(step).sizes.T;
  std::array<int64_t, kMostStarts> starts{};
  for (std::size_t i = 1; i < starts.size(); ++i) {
    starts[i] = std::min(T, starts[i - 1] + (step + static_cast<int64_t>(i)) % 20);
  }
  return starts;
}

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace kda::test
