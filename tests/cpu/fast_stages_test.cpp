// Every stage of the fast family against the same stage of the reference, on the same inputs: those
// that the reference stages before it make.
#include <array>
#include <string>

#include <gtest/gtest.h>

#include "fast_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr std::array kStages = {Operation::kGateCumsum, Operation::kIntra,
                                Operation::kWu,         Operation::kStateScan,
                                Operation::kOutput,     Operation::kReverseScan,
                                Operation::kWyBackward, Operation::kIntraBackward};

const FastCase kCases[] = {
    {"two_chunks", {1, 128, 1, 1, 64, 64}},
    {"tails", {2, 75, 2, 4, 48, 40}},
    {"odd", {1, 70, 1, 1, 5, 3}},
    {"softplus", {1, 100, 1, 2, 32, 32}, DType::kF32, Gate::kSoftplus},
    {"chunk_32", {1, 100, 1, 1, 32, 32}, DType::kF32, Gate::kNone, false, true, false, 32},
    {"v_first", {1, 70, 1, 1, 32, 48}, DType::kF32, Gate::kNone, false, true, true},
    {"packed",
     {1, 160, 1, 2, 16, 24},
     DType::kF32,
     Gate::kNone,
     false,
     true,
     false,
     64,
     {65, 0, 1, 80}},
};

class FastStages : public testing::TestWithParam<FastCase> {};

TEST_P(FastStages, AreNearTheReference) {
  const FastCase& c = GetParam();
  const Problem whole = problem_of(c, Operation::kChunkBackward);
  Tensors tensors = inputs_of(c, whole, 31);
  for (const Operation operation : kStages) {
    SCOPED_TRACE(name_of(operation));
    Problem stage = Problem::make(operation, whole.sizes, DType::kF32);
    stage.chunk_size = c.chunk_size;
    stage.state_v_first = c.v_first;
    if (operation == Operation::kGateCumsum) stage.gate = c.gate;
    for (const TensorSpec& spec : tensors_of(operation)) {
      if (spec.role != Role::kInput || !tensors.contains(spec.id)) continue;
      stage.set(spec.id, spec.id == kCuSeqlens ? DType::kI64 : DType::kF32);
    }
    const Tensors reference = run_reference(stage, tensors);
    expect_close(reference, run_fast(stage, tensors));
    for (const auto& [id, values] : reference) tensors[id] = values;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FastStages, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace kda
