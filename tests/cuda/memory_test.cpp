// Device memory that is nearly full, and memory after many calls.
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "execute.h"

namespace kda::test {
namespace {

std::size_t free_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total));
  return free;
}

/// Takes device memory until only about `rest` bytes are free.
std::vector<DeviceBuffer> fill_device(std::size_t rest) {
  std::vector<DeviceBuffer> taken;
  for (std::size_t step = std::size_t{64} << 30; step >= (std::size_t{16} << 20);) {
    const std::size_t free = free_memory();
    if (free < rest + step) {
      step /= 2;
      continue;
    }
    try {
      taken.emplace_back(step);
    } catch (const Error&) {
      step /= 2;
    }
  }
  return taken;
}

// Nothing is allocated for tuning or caches: with what the caller's tensors need, a call works.
TEST_P(CudaReports, PERF_05_ANearlyFullDeviceIsEnough) {
  const Case c = cases::generate(fitted(packed_spec({0, 65, 65, 193, 300})));
  DeviceCase before = on_device(backward_problem(c), c.inputs);
  before.run();
  const std::vector<DeviceBuffer> taken = fill_device(std::size_t{200} << 20);
  DeviceCase device = on_device(backward_problem(c), c.inputs);
  device.run();
  expect_same_bits(before.outputs(), device.outputs());
}

// A device without room for the tensors is a status, and the next, smaller call works.
TEST(CudaMemory, AFullDeviceIsAStatusAndTheNextCallWorks) {
  KDA_NEEDS_GPU();
  const Case c = cases::generate(packed_spec({0, 65, 65, 193, 300}));
  const Device gpu{DeviceType::kCuda, 0};
  const std::vector<DeviceBuffer> taken = fill_device(std::size_t{200} << 20);
  Problem big = Problem::make(Operation::kGateCumsum, {1, 1 << 18, 4, 4, 64, 1, 0, 0}, DType::kF32);
  const TensorMap inputs{{TensorId::kG, HostTensor(DType::kF32, {1, 1 << 18, 4, 64})}};
  const auto result = cases::execute_operation(big, inputs, gpu);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kOutOfMemory) << result.status().message();
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  const auto next = cases::execute_operation(forward_problem(c), c.inputs, gpu);
  EXPECT_TRUE(next.ok()) << next.status().message();
}

// Calls with changing shapes leave no memory behind.
TEST_P(CudaReports, MEM_01_ManyShapesLeaveNothingBehind) {
  const auto run_all = [&] {
    for (int64_t i = 0; i < 20; ++i) {
      CaseSpec spec;
      spec.sizes = {1 + i % 3, 40 + 13 * i, 1, 2, 64, 32, 0, 0};
      spec.io = DType::kBF16;
      const Case c = cases::generate(fitted(spec));
      for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
        on_device(problem, c.inputs).run();
      }
    }
  };
  run_all();
  const std::size_t before = free_memory();
  for (int i = 0; i < 4; ++i) run_all();
  EXPECT_EQ(free_memory(), before);
}

}  // namespace
}  // namespace kda::test
