// Who takes a call on Hopper: the rows made for it by default, beside generic ones as chosen, and
// where addresses or strides do not suit their kernels the generic ones, tensor by tensor; what
// that costs in workspace.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/device_case.h"
#include "cuda/hopper_case.h"
#include "cuda/sm90/fallback.h"
#include "generate.h"
#include "random.h"

namespace kda::test {
namespace {

using cuda::sm90::HopperRow;

/// A row with a problem of all its tensors, and those that its kernels reach in units of 16 bytes.
struct Tested {
  const char* name;
  const char* generic;
  Problem problem;
  TensorMap inputs;
  std::vector<TensorId> in_units;

  bool in_unit(TensorId id) const {
    return std::find(in_units.begin(), in_units.end(), id) != in_units.end();
  }
};

/// Values for which nothing overflows; all that counts here are bits.
HostTensor values_of(TensorId id, const TensorLayout& layout) {
  HostTensor tensor(layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
  const cases::Random random(1, static_cast<uint64_t>(id));
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const double x = random.uniform(static_cast<uint64_t>(i));
    tensor.set(i, id == kGamma ? -x : 0.3 * (x - 0.5));
  }
  return tensor;
}

Tested state_scan(const Sizes& sizes) {
  Problem problem = Problem::make(Operation::kStateScan, sizes, DType::kBF16);
  problem.set(kInitialState, DType::kF32).set(kFinalState, DType::kF32).set(kDqRaw, DType::kF32);
  for (const TensorId id : {kDo, kH, kVNew}) problem.set(id, DType::kBF16);
  problem = problem.validated().value();
  TensorMap inputs;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kInput && problem.has(spec.id)) {
      inputs[spec.id] = values_of(spec.id, problem[spec.id]);
    }
  }
  return {"sm90_state_scan",
          "cuda_state_scan",
          problem,
          inputs,
          {kKg, kW, kU, kGamma, kDo, kH, kVNew, kDqRaw}};
}

/// Everything inside, and every output.
CaseSpec step_spec(const Sizes& sizes, std::vector<int64_t> cu) {
  CaseSpec spec;
  spec.sizes = sizes;
  spec.io = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = spec.beta_sigmoid = true;
  spec.cu_seqlens = std::move(cu);
  return spec;
}

Tested chunk_fwd(const Case& c) {
  Problem problem = forward_problem(c);
  problem.set(kH, DType::kBF16);
  return {"sm90_chunk_fwd",
          "cuda_chunk_fwd",
          problem.validated().value(),
          c.inputs,
          {kQ, kK, kV, kG, kO, kH}};
}

Tested chunk_bwd(const Case& c) {
  return {"sm90_chunk_bwd",
          "cuda_chunk_bwd",
          backward_problem(c).validated().value(),
          c.inputs,
          {kQ, kK, kV, kG, kDo, kDq, kDk, kDv, kDg}};
}

Tested chunk_bwd_from_checkpoints(const Case& c) {
  Tested tested = chunk_bwd(c);
  tested.problem = tested.problem.set(kH, DType::kBF16).validated().value();
  tested.inputs[kH] = values_of(kH, tested.problem[kH]);
  tested.in_units.push_back(kH);
  return tested;
}

std::vector<Tested> rows_of(const Case& c, const Sizes& scan) {
  return {chunk_fwd(c), chunk_bwd(c), chunk_bwd_from_checkpoints(c), state_scan(scan)};
}

std::vector<Tested> small_rows() {
  const auto spec = step_spec({1, 150, 1, 2, 64, 64, 0, 0}, {0, 5, 5, 70, 140});
  return rows_of(cases::generate(spec), {2, 130, 2, 4, 64, 128, 0, 0});
}

/// For which the generic kernels run in slices of heads.
std::vector<Tested> large_rows() {
  const auto spec = step_spec({1, 2048, 8, 8, 128, 128, 0, 0}, {});
  return rows_of(cases::generate(spec), {1, 4096, 12, 12, 128, 128, 0, 0});
}

/// A tensor of a case that begins an element behind a multiple of 256 bytes.
class Shifted {
 public:
  Shifted(const DeviceCase& device, TensorId id)
      : id_(id),
        bytes_(static_cast<std::size_t>(device.plan().problem().bytes(id))),
        element_(size_of(device.plan().problem()[id].dtype)),
        memory_(bytes_ + element_),
        args_(device.args()) {
    require(cudaMemcpy(memory_.at(element_), args_[id], bytes_, cudaMemcpyDeviceToDevice));
    args_.out(id, memory_.at(element_));
  }

  const Args& args() const { return args_; }
  void store(HostTensor& tensor) const {
    require(cudaMemcpy(tensor.bytes.data(), args_[id_], bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  TensorId id_;
  std::size_t bytes_;
  std::size_t element_;
  DeviceBuffer memory_;
  Args args_;
};

TensorMap run_shifted(DeviceCase& device, TensorId id) {
  const Shifted shifted(device, id);
  device.poison_outputs();
  if (const Status status = device.plan().run(shifted.args()); !status.ok()) throw Error(status);
  require(cudaDeviceSynchronize());
  TensorMap outputs = device.outputs();
  if (outputs.count(id) != 0) shifted.store(outputs[id]);
  return outputs;
}

// A step of two rows: what the forward saves is taken by either backward. Only the Hopper one reads
// it.
TEST(Sm90Choice, ForwardAndBackwardAreChosenApart) {
  KDA_NEEDS_HOPPER();
  const Case c = cases::generate(step_spec({2, 100, 2, 2, 128, 64, 0, 0}, {}));
  const Tested forward = chunk_fwd(c);
  const Tested backward = chunk_bwd(c);
  for (const char* saved_by : {forward.name, forward.generic}) {
    for (const char* taken_by : {backward.name, backward.generic}) {
      const Options options = choosing(fmt::format("{},{}", saved_by, taken_by));
      DeviceCase first(forward.problem, forward.inputs, 0, options);
      DeviceCase alone(backward.problem, backward.inputs, 0, options);
      EXPECT_EQ(first.plan().implementation(), saved_by);
      EXPECT_EQ(alone.plan().implementation(), taken_by);
      first.run();
      alone.run();
      Problem problem = backward.problem;
      problem.set(kH, DType::kBF16);
      TensorMap inputs = backward.inputs;
      inputs[kH] = first.outputs().at(kH);
      DeviceCase with_states(problem, inputs, 0, options);
      EXPECT_EQ(with_states.plan().implementation(), taken_by);
      with_states.run();
      if (taken_by == backward.generic) expect_same_bits(with_states.outputs(), alone.outputs());
      const Limit limit = limits_beside_rounding(c, DType::kBF16);
      EXPECT_EQ(beyond(limit, c, with_states.outputs(), alone.outputs()), "") << saved_by;
    }
  }
}

// The bits say whose kernels ran: those of the two rows differ.
TEST(Sm90Fallback, ByDefaultTheGenericKernelsTakeUnalignedTensors) {
  KDA_NEEDS_HOPPER();
  for (const Tested& row : small_rows()) {
    DeviceCase by_default(row.problem, row.inputs);
    DeviceCase hopper(row.problem, row.inputs, 0, choosing(row.name));
    DeviceCase generic(row.problem, row.inputs, 0, choosing(row.generic));
    ASSERT_EQ(by_default.plan().implementation(), row.name);
    for (DeviceCase* device : {&by_default, &hopper, &generic}) device->run();
    expect_same_bits(by_default.outputs(), hopper.outputs());
    for (const TensorSpec& spec : tensors_of(row.problem.operation)) {
      if (!row.problem.has(spec.id)) continue;
      SCOPED_TRACE(fmt::format("{}: {}", row.name, name_of(spec.id)));
      DeviceCase& expected = row.in_unit(spec.id) ? generic : hopper;
      const TensorMap outputs = run_shifted(by_default, spec.id);
      expect_same_bits(outputs, expected.outputs());
      if (row.in_unit(spec.id)) {
        EXPECT_NE(outputs.begin()->second.bytes, hopper.outputs().begin()->second.bytes);
      }
    }
  }
}

TEST(Sm90Fallback, SlicesOfHeadsHaveTheBitsOfAllAtOnce) {
  KDA_NEEDS_HOPPER();
  for (const Tested& row : large_rows()) {
    DeviceCase by_default(row.problem, row.inputs);
    DeviceCase generic(row.problem, row.inputs, 0, choosing(row.generic));
    EXPECT_EQ(by_default.plan().implementation(), row.name);
    EXPECT_LT(by_default.plan().workspace_bytes(), generic.plan().workspace_bytes());
    generic.run();
    expect_same_bits(run_shifted(by_default, row.in_units.front()), generic.outputs());
  }
}

TEST(Sm90Fallback, AnExplicitChoiceRefusesUnalignedTensors) {
  KDA_NEEDS_HOPPER();
  for (const Tested& row : small_rows()) {
    DeviceCase device(row.problem, row.inputs, 0, choosing(row.name));
    for (const TensorId id : row.in_units) {
      const Status status = device.plan().run(Shifted(device, id).args());
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message().rfind(fmt::format("{}: found address ", name_of(id)), 0), 0U)
          << status.message();
      EXPECT_NE(status.message().find(fmt::format("a multiple of 16 for {};", row.name)),
                std::string::npos)
          << status.message();
    }
    device.run();
  }
}

/// Elements apart, or rows apart that are no multiple of 16 bytes.
Problem with_odd_strides(Problem problem, TensorId id, bool elements) {
  TensorLayout& layout = problem.tensors[static_cast<std::size_t>(id)];
  for (int64_t& stride : layout.stride) stride *= elements ? 2 : 1;
  if (!elements) {
    int64_t rows = 1;
    for (std::size_t i = 2; i < 4; --i) {
      layout.stride[i] = rows * (layout.shape[3] + 1);
      rows *= layout.shape[i];
    }
  }
  return problem.validated().value();
}

// Known when the plan is made, here without a GPU too.
TEST(Sm90Fallback, OddStridesAreLeftToTheGenericRowOrRefusedByName) {
  const bool hopper = no_hopper().empty();
  for (const Tested& row : small_rows()) {
    for (const TensorId id : row.in_units) {
      for (const bool elements : {false, true}) {
        const Problem problem = with_odd_strides(row.problem, id, elements);
        const Status status = supports(problem, {DeviceType::kCuda, 0}, choosing(row.name));
        EXPECT_EQ(status.code(), StatusCode::kUnsupported);
        EXPECT_NE(status.message().find(fmt::format("({})", name_of(id))), std::string::npos)
            << row.name << ", " << name_of(id) << ": " << status.message();
        if (!hopper) continue;
        const Result<Plan> plan = make_plan(problem, {DeviceType::kCuda, 0});
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        EXPECT_EQ(plan->implementation(), row.generic) << name_of(id);
      }
    }
  }
}

/// Remembers that it ran.
class Recorder final : public Executor {
 public:
  Recorder(const Problem& problem, int& runs)
      : Executor(problem, {DeviceType::kCuda, 0}), runs_(runs) {}
  std::size_t workspace_bytes() const override { return 0; }
  Status run(const Args& /*args*/, void* /*stream*/) const override {
    ++runs_;
    return {};
  }

 private:
  int& runs_;
};

TEST(Sm90Fallback, EveryTensorInUnitsDecides) {
  const Tested tested = state_scan({2, 130, 2, 4, 64, 128, 0, 0});
  HopperRow row{tested.name, nullptr, nullptr, tested.in_units};
  Problem problem = tested.problem;
  problem.set(kVNew, DType::kNone);
  alignas(16) std::array<std::byte, 32> memory{};
  Args aligned;
  for (void*& address : aligned.data) address = memory.data();
  aligned.out(kVNew, &memory[2]).out(kInitialState, &memory[4]);  // not there, not in units
  int hopper = 0;
  int generic = 0;
  const auto by_default = by_alignment(row, 5, std::make_unique<Recorder>(problem, hopper),
                                       std::make_unique<Recorder>(problem, generic));
  const auto by_name = by_alignment(row, 5, std::make_unique<Recorder>(problem, hopper), nullptr);
  EXPECT_EQ(by_default->workspace_bytes(), 5U);
  EXPECT_TRUE(by_default->run(aligned, nullptr).ok());
  EXPECT_TRUE(by_name->run(aligned, nullptr).ok());
  EXPECT_EQ(hopper, 2);
  EXPECT_EQ(generic, 0);
  for (const TensorId id : tested.in_units) {
    if (id == kVNew) continue;
    Args args = aligned;
    args.out(id, &memory[8]);
    generic = 0;
    EXPECT_TRUE(by_default->run(args, nullptr).ok());
    EXPECT_EQ(generic, 1) << name_of(id);
    const Status refused = by_name->run(args, nullptr);
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(refused.message().rfind(fmt::format("{}: ", name_of(id)), 0), 0U)
        << refused.message();
  }
  EXPECT_EQ(hopper, 2);
}

// KDA_LOG is read once, so a process of its own sets it.
TEST(Sm90FallbackDeathTest, TheLogOfRunsNamesWhatRan) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Tested tested = state_scan({2, 130, 2, 4, 64, 128, 0, 0});
  const HopperRow row{tested.name, nullptr, nullptr, tested.in_units};
  alignas(16) std::array<std::byte, 32> memory{};
  Args args;
  for (void*& address : args.data) address = memory.data();
  int runs = 0;
  const auto by_default = by_alignment(row, 5, std::make_unique<Recorder>(tested.problem, runs),
                                       std::make_unique<Recorder>(tested.problem, runs));
  const auto run_and_exit = [&](std::ptrdiff_t offset) {
    setenv("KDA_LOG", "exec", 1);
    const bool ok = by_default->run(args.out(kU, &memory[offset]), nullptr).ok();
    std::exit(ok ? 0 : 1);
  };
  EXPECT_EXIT(run_and_exit(8), testing::ExitedWithCode(0),
              "exec sm90_state_scan: generic kernels, for u is at no multiple of 16");
  EXPECT_EXIT(run_and_exit(16), testing::ExitedWithCode(0), "^$");
}

constexpr std::size_t kAlwaysFine = std::size_t{32} << 20;

/// S1 to S5 of the training benchmarks.
constexpr Sizes kShapes[] = {{1, 8192, 96, 96, 128, 128, 0, 0},
                             {16, 8192, 16, 16, 128, 256, 0, 0},
                             {1, 4096, 16, 16, 128, 128, 0, 0},
                             {2, 4096, 64, 64, 128, 128, 0, 0},
                             {1, 131072, 32, 32, 128, 128, 0, 0}};

Problem whole(Operation operation, const Sizes& sizes) {
  Problem problem = Problem::make(operation, sizes, DType::kBF16);
  problem.qk_l2norm = problem.beta_sigmoid = true;
  for (const TensorSpec& spec : tensors_of(operation)) {
    const bool gradient = operation == Operation::kChunkBackward && spec.role == Role::kOutput;
    if (gradient && spec.id != kDALog && spec.id != kDdtBias) problem.set(spec.id, DType::kBF16);
  }
  return problem.validated().value();
}

// A fallback that is hardly ever needed must not make every call larger.
TEST(Sm90Fallback, SlicesKeepToTheWorkspaceOfAlignedTensors) {
  struct {
    Operation operation;
    cuda::PipelineFunction generic;
  } const operations[] = {{Operation::kChunkForward, cuda::chunk_fwd},
                          {Operation::kChunkBackward, cuda::chunk_bwd}};
  for (const auto& [operation, generic] : operations) {
    for (const Sizes& sizes : kShapes) {
      const Problem problem = whole(operation, sizes);
      const std::size_t all = cuda::measure_workspace(problem, generic).value();
      for (const std::size_t part : {4, 8}) {
        const auto fallback = cuda::sm90::plan_fallback(problem, generic, all / part);
        ASSERT_TRUE(fallback.ok()) << fallback.status().message();
        EXPECT_EQ(fallback->cut.slices(), part);
        EXPECT_EQ(fallback->workspace_bytes, std::max(all / part, kAlwaysFine));
      }
      const auto one = cuda::sm90::plan_fallback(problem, generic, all);
      EXPECT_EQ(one->cut.slices(), 1);
      EXPECT_EQ(one->workspace_bytes, all);
    }
  }
}

// The same of the plans: by default as much as by name.
TEST(Sm90Fallback, DefaultPlansOfTheBenchmarksNeedNoMoreWorkspace) {
  KDA_NEEDS_HOPPER();
  const Device gpu{DeviceType::kCuda, 0};
  for (const Operation operation : {Operation::kChunkForward, Operation::kChunkBackward}) {
    for (const Sizes& sizes : kShapes) {
      const Problem problem = whole(operation, sizes);
      const Plan by_default = make_plan(problem, gpu).value();
      const Plan by_name = make_plan(problem, gpu, choosing("sm90")).value();
      EXPECT_EQ(by_default.implementation(), by_name.implementation());
      EXPECT_EQ(by_default.workspace_bytes(), by_name.workspace_bytes());
    }
  }
}

TEST(Sm90Fallback, SmallCallsRunInOneSliceAndShortOnesNeedNoMoreThanLong) {
  Sizes sizes{1, 0, 4, 8, 128, 128, 0, 0};
  std::size_t before = 0;
  int64_t slices = 1;
  for (sizes.T = 64; sizes.T < 20000; sizes.T += sizes.T / 3) {
    const Problem problem = whole(Operation::kChunkForward, sizes);
    const auto fallback = cuda::sm90::plan_fallback(
        problem, cuda::chunk_fwd, static_cast<std::size_t>(900 * sizes.T * sizes.HV));
    EXPECT_GE(fallback->workspace_bytes, before) << sizes.T;
    EXPECT_GE(fallback->cut.slices(), slices) << sizes.T;
    before = fallback->workspace_bytes;
    slices = fallback->cut.slices();
    EXPECT_EQ(slices == 1, before < kAlwaysFine) << sizes.T;
  }
  EXPECT_EQ(slices, 4);  // a key head each
}

// dq_raw, which has states in fp32 on the way; H says nothing where no tensor has key heads.
TEST(Sm90Fallback, StateScansAreCutByValueHeads) {
  Problem problem =
      Problem::make(Operation::kStateScan, {1, 8192, 1, 96, 128, 128, 0, 0}, DType::kBF16);
  problem.set(kDo, DType::kBF16).set(kDqRaw, DType::kF32).set(kH, DType::kBF16);
  problem = problem.validated().value();
  const auto fallback = cuda::sm90::plan_fallback(problem, cuda::stage_state_scan, 0);
  EXPECT_EQ(fallback->cut.slices(), 32);
  EXPECT_EQ(fallback->workspace_bytes, kAlwaysFine);
}

}  // namespace
}  // namespace kda::test
