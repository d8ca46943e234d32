// Small runs of every kernel, for compute-sanitizer: values are the business of other tests.
#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "generate.h"

namespace kda::test {
namespace {

CaseSpec with_everything(Sizes sizes, DType io) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = io;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  return spec;
}

std::vector<CaseSpec> specs() {
  CaseSpec fixed = with_everything({2, 70, 1, 2, 64, 40, 0, 0}, DType::kBF16);
  CaseSpec packed = with_everything({1, 150, 2, 2, 36, 20, 0, 0}, DType::kF16);
  packed.cu_seqlens = {0, 0, 65, 66, 130};
  packed.gate = Gate::kLowerBound;
  packed.state_v_first = true;
  CaseSpec exact = with_everything({1, 40, 1, 1, 128, 32, 0, 0}, DType::kF64);
  exact.chunk_size = 32;
  exact.state_v_first = true;
  return {fixed, packed, exact};
}

void expect_finite(const TensorMap& outputs) {
  for (const auto& [id, tensor] : outputs) {
    for (int64_t i = 0; i < tensor.count(); ++i) {
      ASSERT_TRUE(std::isfinite(tensor.get(i))) << name_of(id) << "[" << i << "]";
    }
  }
}

TEST(CudaSmall, WholeOperations) {
  KDA_NEEDS_GPU();
  for (const CaseSpec& spec : specs()) {
    const Case c = cases::generate(spec);
    Problem forward = forward_problem(c);
    forward.set(kH, DType::kF32).set(kAqk, DType::kF32).set(kA, DType::kF32);
    for (const Problem& problem : {forward, backward_problem(c), recurrent_problem(c)}) {
      DeviceCase device(problem, c.inputs);
      device.run();
      expect_finite(device.outputs());
    }
  }
}

// Head sizes whose tiles are part filled or whose loops run more than once.
TEST_P(CudaReports, ARCH_01_EveryShapeOfTiles) {
  for (const int64_t K : {32, 64, 96, 128}) {
    for (const int64_t V : {64, 128, 256}) {
      CaseSpec spec = with_everything({1, 66, 1, 1, K, V, 0, 0}, DType::kBF16);
      const Case c = cases::generate(spec);
      for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
        attempt([&] {
          DeviceCase device = on_device(problem, c.inputs);
          device.run();
          expect_finite(device.outputs());
        });
      }
    }
  }
}

void run_recurrent(const Sizes& sizes, DType state, bool v_first) {
  CaseSpec spec = with_everything(sizes, DType::kBF16);
  spec.state_v_first = v_first;
  spec.gradients = false;
  Case c = cases::generate(spec);
  HostTensor& h0 = c.inputs.at(kInitialState);
  h0 = cases::converted(h0, state);
  Problem problem = recurrent_problem(c);
  problem.set(kInitialState, state).set(kFinalState, state);
  DeviceCase device(problem, c.inputs);
  device.run();
  expect_finite(device.outputs());
}

TEST(CudaSmall, RecurrentStates) {
  KDA_NEEDS_GPU();
  for (const DType state : {DType::kF32, DType::kBF16}) {
    for (const bool v_first : {false, true}) {
      run_recurrent({3, 9, 1, 2, 128, 64, 0, 0}, state, v_first);
    }
  }
}

// More states than the blocks have stages, so that every ring goes round.
TEST(CudaSmall, RecurrentStream) {
  KDA_NEEDS_GPU();
  for (const DType state : {DType::kF32, DType::kBF16}) {
    for (const bool v_first : {false, true}) {
      run_recurrent({state == DType::kF32 ? 14 : 27, 2, 32, 32, 128, 128, 0, 0}, state, v_first);
    }
  }
}

TEST(CudaSmall, StateScanWithRawDq) {
  KDA_NEEDS_GPU();
  Problem problem = Problem::make(Operation::kStateScan, {1, 70, 1, 2, 36, 20, 0, 0}, DType::kF32);
  problem.set(kDo, DType::kF32).set(kDqRaw, DType::kF32).set(kH, DType::kF32);
  TensorMap inputs;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role != Role::kInput || !problem.has(spec.id)) continue;
    const TensorLayout layout = problem.canonical_layout(spec.id);
    HostTensor tensor(layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, -0.01 * static_cast<double>(i % 7));
    inputs[spec.id] = std::move(tensor);
  }
  DeviceCase device(problem, inputs);
  device.run();
  expect_finite(device.outputs());
}

}  // namespace
}  // namespace kda::test
