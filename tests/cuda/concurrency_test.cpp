// Calls while other work keeps the GPU busy.
#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "support/calls.h"

namespace kda::test {
namespace {

/// A forward that fills the GPU for a while, on a stream of its own.
class Load {
 public:
  Load() : case_(cases::generate(spec())), device_(forward_problem(case_), case_.inputs) {}

  void enqueue() {
    if (Status status = device_.plan().run(device_.args(), stream_); !status.ok()) {
      throw Error(status);
    }
  }
  ~Load() { cudaStreamSynchronize(stream_); }

 private:
  static CaseSpec spec() {
    CaseSpec spec;
    spec.sizes = {1, 512, 16, 16, 64, 64, 0, 0};
    spec.gradients = false;
    return spec;
  }

  Case case_;
  DeviceCase device_;
  Stream stream_;
};

/// `repeats` runs beside the load give the bits of an idle GPU, and every element is written.
void expect_idle_bits(DeviceCase device, int repeats) {
  device.run();
  const TensorMap idle = device.outputs();
  Load load;
  const Stream stream;
  for (int i = 0; i < repeats; ++i) {
    load.enqueue();
    device.poison_outputs();
    require(cudaDeviceSynchronize());
    load.enqueue();
    device.run(stream);
    const TensorMap busy = device.outputs();
    for (const auto& [id, tensor] : idle) {
      ASSERT_EQ(tensor.bytes, busy.at(id).bytes) << name_of(id) << " in run " << i;
    }
  }
}

TEST_P(CudaReports, GRAD_03_BackwardBesideOtherWorkIsComplete) {
  CaseSpec spec;
  spec.sizes = {1, 1024, 4, 4, 128, 128, 0, 0};
  spec.io = DType::kBF16;
  const Case c = cases::generate(spec);
  expect_idle_bits(on_device(backward_problem(c), c.inputs), 50);
}

TEST_P(CudaReports, RACE_01_StatesOfManyShortSequencesNeverChange) {
  std::vector<int64_t> cu{0};
  for (int64_t i = 0; i < 64; ++i) cu.push_back(cu.back() + (i % 5 == 2 ? 0 : 1 + i % 37));
  CaseSpec spec;
  spec.sizes = {1, cu.back(), 1, 1, 32, 32, 0, 0};
  spec.io = DType::kBF16;
  spec.cu_seqlens = cu;
  spec.gradients = false;
  if (is_hopper()) spec.sizes.K = spec.sizes.V = 128;
  const Case c = cases::generate(spec);
  for (const Problem& problem : {forward_problem(c), recurrent_problem(c)}) {
    attempt([&] { expect_idle_bits(on_device(problem, c.inputs), 1000); });
  }
}

// A length that hung elsewhere, with zero-filled inputs: one row of zeros, repeated by strides of 0
// where the family takes them.
TEST_P(CudaReports, RACE_04_LongZeroInputEnds) {
  constexpr int64_t kHeads = 128;
  constexpr int64_t kDim = 128;
  for (const int64_t T : {16160, 16224, 16448}) {
    Problem problem = Problem::make(Operation::kChunkForward,
                                    {1, T, kHeads, kHeads, kDim, kDim, 0, 0}, DType::kBF16);
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (is_hopper() || spec.role != Role::kInput || !problem.has(spec.id)) continue;
      TensorLayout layout = problem.canonical_layout(spec.id);
      layout.stride = {0, 0, 0, layout.rank == 4 ? 1 : 0};
      problem.set(spec.id, layout);
    }
    const Plan plan = make_plan(problem, device(), options()).value();
    int64_t most = kDim * int64_t{sizeof(float)};
    for (const TensorId id : {TensorId::kQ, TensorId::kG}) {
      if (is_hopper()) most = std::max(most, plan.problem().bytes(id));
    }
    const auto o_bytes = static_cast<std::size_t>(plan.problem().bytes(TensorId::kO));
    const auto zero_bytes = static_cast<std::size_t>(most);
    KDA_NEEDS_MEMORY(plan.workspace_bytes() + o_bytes + zero_bytes + (std::size_t{1} << 30));
    const DeviceBuffer zeros(zero_bytes);
    require(cudaMemset(zeros.address(), 0, zero_bytes));
    const DeviceBuffer o(o_bytes);
    const DeviceBuffer workspace(plan.workspace_bytes());
    Args args;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (spec.role == Role::kInput && problem.has(spec.id)) args.in(spec.id, zeros.address());
    }
    args.out(TensorId::kO, o.address());
    args.workspace = workspace.address();
    args.workspace_bytes = plan.workspace_bytes();
    ASSERT_EQ(plan.run(args).message(), "");
    count_call(plan.implementation());
    require(cudaDeviceSynchronize());
    const HostTensor result = o.store(DType::kBF16, {1, T, kHeads, kDim});
    ASSERT_TRUE(std::all_of(result.bytes.begin(), result.bytes.end(), [](std::byte b) {
      return b == std::byte{0};
    })) << T;
  }
}

}  // namespace
}  // namespace kda::test
