// Sizes beyond 32 bits and beyond the limits of a grid.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "compare.h"
#include "cuda/device_case.h"
#include "generate.h"
#include "support/calls.h"

namespace kda::test {
namespace {

constexpr std::size_t kGigabyte = 1'000'000'000;

std::vector<int64_t> equal_lengths(int64_t count, int64_t length) {
  std::vector<int64_t> cu;
  for (int64_t i = 0; i <= count; ++i) cu.push_back(i * length);
  return cu;
}

bool by_token(TensorId id) {
  return id != kFinalState && id != kDinitialState && id != kInitialState && id != kDfinalState;
}

/// Sequence i of equal lengths, alone, gives the same bits.
void expect_alone(const Case& c, const Problem& problem, const Options& options,
                  const TensorMap& all, int64_t i, int64_t length) {
  TensorMap inputs;
  for (const auto& [id, tensor] : c.inputs) {
    if (!problem.has(id) || id == kCuSeqlens) continue;
    inputs[id] = by_token(id) ? rows_of(tensor, 1, i * length, length) : rows_of(tensor, 0, i, 1);
  }
  Problem alone = problem;
  alone.sizes.T = length;
  alone.set(kCuSeqlens, DType::kNone);
  DeviceCase device(alone, inputs, 0, options);
  device.run();
  for (const auto& [id, tensor] : device.outputs()) {
    const HostTensor part =
        by_token(id) ? rows_of(all.at(id), 1, i * length, length) : rows_of(all.at(id), 0, i, 1);
    EXPECT_EQ(part.bytes, tensor.bytes) << name_of(id) << " of sequence " << i;
  }
}

TEST_P(CudaReports, VARLEN_09_ManySequencesTimesHeads) {
  constexpr int64_t kCount = 2050;
  constexpr int64_t kLength = 16;
  CaseSpec spec;
  spec.sizes = {1, kCount * kLength, is_hopper() ? 1 : 32, 32, 16, 16, 0, 0};
  spec.io = DType::kBF16;
  spec.cu_seqlens = equal_lengths(kCount, kLength);
  const Case c = cases::generate(fitted(spec));
  for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
    DeviceCase device = on_device(problem, c.inputs);
    device.run();
    const TensorMap all = device.outputs();
    for (const int64_t i : {int64_t{0}, int64_t{777}, kCount - 1}) {
      expect_alone(c, problem, options(), all, i, kLength);
    }
  }
}

TEST_P(CudaReports, VARLEN_10_DecodeOfSeventyThousandSequences) {
  constexpr int64_t kCount = 70000;
  CaseSpec spec;
  spec.sizes = {1, kCount, 1, 1, 16, 16, 0, 0};
  if (is_hopper()) spec.sizes.K = spec.sizes.V = 128;
  spec.gradients = false;
  spec.initial_state = !is_hopper();  // states of 128 x 128 take 4.6 GB
  spec.cu_seqlens = equal_lengths(kCount, 1);
  const Case c = cases::generate(spec);
  Problem problem = recurrent_problem(c);
  if (is_hopper()) problem.set(kFinalState, DType::kBF16);
  DeviceCase device = on_device(problem, c.inputs);
  device.run();
  const TensorMap all = device.outputs();
  for (const int64_t i : {int64_t{0}, int64_t{65536}, kCount - 1}) {
    expect_alone(c, problem, options(), all, i, 1);
  }
}

// slot x HV x K x V passes 2^31 from slot 2048 on.
TEST_P(CudaReports, INDEX_04_PoolBeyondTwoToThe31Elements) {
  KDA_NEEDS_MEMORY(10 * kGigabyte);
  constexpr int64_t kSlots = 2100;
  constexpr int64_t kHeads = 64;
  constexpr std::size_t kSlotBytes = kHeads * 128 * 128 * sizeof(float);
  CaseSpec spec;
  spec.sizes = {3, 2, kHeads, kHeads, 128, 128, 0, 0};
  spec.gradients = false;
  Case c = cases::generate(spec);
  DeviceCase small = on_device(recurrent_problem(c), c.inputs);
  small.run();
  const TensorMap expected = small.outputs();

  HostTensor indices(DType::kI32, {3});
  const std::array<int32_t, 3> slots{2048, 2099, 2047};
  std::copy(slots.begin(), slots.end(), reinterpret_cast<int32_t*>(indices.bytes.data()));
  Problem problem = recurrent_problem(c);
  problem.sizes.P = kSlots;
  problem.set(kStateIndices, DType::kI32);
  const Plan plan = make_plan(problem, device(), options()).value();
  const DeviceBuffer pool(kSlots * kSlotBytes);
  const DeviceBuffer device_indices(indices);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    require(cudaMemcpy(pool.at(static_cast<std::size_t>(slots[i]) * kSlotBytes),
                       c.inputs.at(kInitialState).bytes.data() + i * kSlotBytes, kSlotBytes,
                       cudaMemcpyHostToDevice));
  }
  Args args = small.args();
  args.in(kStateIndices, device_indices.address());
  args.in(kInitialState, pool.address()).out(kFinalState, pool.address());
  ASSERT_TRUE(plan.run(args).ok());
  count_call(plan.implementation());
  require(cudaDeviceSynchronize());
  EXPECT_EQ(small.outputs().at(kO).bytes, expected.at(kO).bytes);
  std::vector<std::byte> slot(kSlotBytes);
  for (int64_t i = 0; i < kSlots; ++i) {
    require(cudaMemcpy(slot.data(), pool.at(static_cast<std::size_t>(i) * kSlotBytes), kSlotBytes,
                       cudaMemcpyDeviceToHost));
    const auto used = std::find(slots.begin(), slots.end(), i);
    if (used == slots.end()) {
      ASSERT_TRUE(
          std::all_of(slot.begin(), slot.end(), [](auto b) { return b == std::byte{0xFF}; }))
          << "slot " << i << " changed";
      continue;
    }
    const auto* want = expected.at(kFinalState).bytes.data() + (used - slots.begin()) * kSlotBytes;
    ASSERT_TRUE(std::equal(slot.begin(), slot.end(), want)) << "slot " << i;
  }
}

/// Problems of 96 heads and K = V = 128 whose inputs are windows that slide over little memory.
class SlidingWindows {
 public:
  static constexpr int64_t kHeads = 96;
  static constexpr int64_t kDim = 128;

  SlidingWindows() : source_(cases::generate(spec())) {
    for (const TensorId id : {kQ, kK, kV, kG, kBeta, kDo}) {
      memory_.emplace(id, DeviceBuffer(*source_.input(id)));
    }
  }

  /// Every input without states, no output.
  Problem problem(Operation operation, int64_t T) const {
    Problem problem = operation == Operation::kChunkForward ? forward_problem(source_)
                                                            : backward_problem(source_);
    problem.sizes.T = T;
    problem.sizes.H = problem.sizes.HV = kHeads;
    for (const TensorSpec& spec : tensors_of(operation)) {
      if (!problem.has(spec.id)) continue;
      const DType dtype = problem[spec.id].dtype;
      if (spec.role != Role::kInput) {
        problem.set(spec.id, DType::kNone);
      } else if (spec.id == kBeta) {
        problem.set(kBeta, TensorLayout::strided(dtype, {1, T, kHeads}, {1, 0, 1}));
      } else {
        problem.set(spec.id,
                    TensorLayout::strided(dtype, {1, T, kHeads, kDim}, {1, kStep, kDim, 1}));
      }
    }
    return problem;
  }

  /// The inputs from token `begin` on.
  Args args(int64_t begin) const {
    Args args;
    for (const auto& [id, buffer] : memory_) {
      const int64_t step = id == kBeta ? 0 : kStep * static_cast<int64_t>(size_of(dtype(id)));
      args.in(id, buffer.at(static_cast<std::size_t>(begin * step)));
    }
    return args;
  }

 private:
  static constexpr int64_t kStep = 8;

  static CaseSpec spec() {
    CaseSpec spec;
    spec.sizes = {1, 4096, 4, 4, kDim, kDim, 0, 0};
    spec.io = DType::kBF16;
    spec.qk_l2norm = true;
    spec.initial_state = spec.dfinal_state = false;
    return spec;
  }
  DType dtype(TensorId id) const { return source_.input(id)->dtype; }

  Case source_;
  std::map<TensorId, DeviceBuffer> memory_;
};

using Buffers = std::map<TensorId, DeviceBuffer>;

/// Runs with outputs and a workspace of its own.
Buffers outputs_of(const Problem& problem, const Options& options, Args args) {
  const Plan plan = make_plan(problem, {DeviceType::kCuda, 0}, options).value();
  Buffers outputs;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kInput || !problem.has(spec.id)) continue;
    const auto bytes = static_cast<std::size_t>(plan.problem().bytes(spec.id));
    args.out(spec.id, outputs.emplace(spec.id, DeviceBuffer(bytes)).first->second.address());
  }
  const DeviceBuffer workspace(plan.workspace_bytes());
  args.workspace = workspace.address();
  args.workspace_bytes = plan.workspace_bytes();
  if (Status status = plan.run(args); !status.ok()) throw Error(status);
  count_call(plan.implementation());
  require(cudaDeviceSynchronize());
  return outputs;
}

std::vector<std::byte> bytes_at(const DeviceBuffer& buffer, std::size_t offset, std::size_t count) {
  std::vector<std::byte> bytes(count);
  require(cudaMemcpy(bytes.data(), buffer.at(offset), count, cudaMemcpyDeviceToHost));
  return bytes;
}

/// The state behind the first `tokens`.
Buffers state_behind(const SlidingWindows& windows, const Options& options, int64_t tokens) {
  Problem problem = windows.problem(Operation::kChunkForward, tokens);
  problem.set(kO, DType::kBF16).set(kFinalState, DType::kF32);
  return outputs_of(problem, options, windows.args(0));
}

// T HV K and NC HV K V pass 2^31. The last chunk again, from the state that entered it.
TEST_P(CudaReports, INDEX_01_SequenceBeyondTwoToThe31Elements) {
  KDA_NEEDS_MEMORY(95 * kGigabyte);
  constexpr int64_t kTokens = 180224;
  const DType h = is_hopper() ? DType::kBF16 : DType::kF32;
  const SlidingWindows windows;
  const Buffers before = state_behind(windows, options(), kTokens - 64);
  Problem problem = windows.problem(Operation::kChunkForward, kTokens);
  problem.set(kO, DType::kBF16).set(kH, h);
  const Buffers whole = outputs_of(problem, options(), windows.args(0));
  const std::vector<int64_t> shape{1, SlidingWindows::kHeads, SlidingWindows::kDim,
                                   SlidingWindows::kDim};
  const HostTensor entered = cases::converted(before.at(kFinalState).store(DType::kF32, shape), h);
  const std::size_t row = entered.bytes.size();
  EXPECT_TRUE(std::equal(entered.bytes.begin(), entered.bytes.end(),
                         bytes_at(whole.at(kH), (kTokens / 64 - 1) * row, row).begin()));

  Problem last = windows.problem(Operation::kChunkForward, 64);
  last.set(kO, DType::kBF16).set(kInitialState, DType::kF32);
  Args args = windows.args(kTokens - 64);
  args.in(kInitialState, before.at(kFinalState).address());
  const Buffers tail = outputs_of(last, options(), args);
  constexpr std::size_t kRow = std::size_t{2} * SlidingWindows::kHeads * SlidingWindows::kDim;
  EXPECT_EQ(bytes_at(whole.at(kO), (kTokens - 64) * kRow, 64 * kRow),
            bytes_at(tail.at(kO), 0, 64 * kRow));
}

/// The same bits or, where the backward makes its states anew and rounds other products than the
/// forward does, the limits of 7.3. Numbers that no output has are 0xFF in both.
void expect_alike(const std::vector<std::byte>& a, const std::vector<std::byte>& b, DType dtype,
                  bool within_limits, TensorId id) {
  if (!within_limits) {
    EXPECT_TRUE(a == b) << name_of(id);
    return;
  }
  HostTensor x(dtype, {static_cast<int64_t>(a.size() / size_of(dtype))});
  HostTensor y = x;
  std::copy(a.begin(), a.end(), x.bytes.begin());
  std::copy(b.begin(), b.end(), y.bytes.begin());
  double error = 0;
  double size = 0;
  for (int64_t i = 0; i < x.count(); ++i) {
    if (std::isnan(x.get(i)) && std::isnan(y.get(i))) continue;
    error += (x.get(i) - y.get(i)) * (x.get(i) - y.get(i));
    size += y.get(i) * y.get(i);
  }
  EXPECT_GT(size, 0) << name_of(id);
  EXPECT_LE(std::sqrt(error / size), cases::limit_of(cases::Precision::kBF16, id)) << name_of(id);
}

// h, dh and the offsets of the gradients pass 2^31. The last chunk again, alone.
TEST_P(CudaReports, INDEX_01_BackwardBeyondTwoToThe31Elements) {
  KDA_NEEDS_MEMORY(95 * kGigabyte);
  constexpr int64_t kTokens = 90112;
  constexpr int64_t kHeads = SlidingWindows::kHeads;
  constexpr int64_t kDim = SlidingWindows::kDim;
  constexpr int64_t kRow = 2 * kHeads * kDim;  // every second row is left out
  const SlidingWindows windows;
  const Buffers before = state_behind(windows, options(), kTokens - 64);

  const auto with_gradients = [](Problem problem) {
    for (const TensorId id : {kDq, kDk, kDv, kDg}) {
      problem.set(id, TensorLayout::strided(DType::kBF16, {1, problem.sizes.T, kHeads, kDim},
                                            {problem.sizes.T * kRow, kRow, kDim, 1}));
    }
    return problem.set(kDbeta, DType::kF32);
  };
  const Buffers whole =
      outputs_of(with_gradients(windows.problem(Operation::kChunkBackward, kTokens)), options(),
                 windows.args(0));

  Problem last = with_gradients(windows.problem(Operation::kChunkBackward, 64));
  last.set(kInitialState, DType::kF32);
  Args args = windows.args(kTokens - 64);
  args.in(kInitialState, before.at(kFinalState).address());
  const Buffers tail = outputs_of(last, options(), args);
  constexpr std::size_t kBytes = std::size_t{2} * (63 * kRow + kHeads * kDim);
  for (const TensorId id : {kDq, kDk, kDv, kDg}) {
    expect_alike(bytes_at(whole.at(id), (kTokens - 64) * std::size_t{2} * kRow, kBytes),
                 bytes_at(tail.at(id), 0, kBytes), DType::kBF16, is_hopper(), id);
  }
  constexpr std::size_t kScalars = std::size_t{4} * kHeads;
  expect_alike(bytes_at(whole.at(kDbeta), (kTokens - 64) * kScalars, 64 * kScalars),
               bytes_at(tail.at(kDbeta), 0, 64 * kScalars), DType::kF32, is_hopper(), kDbeta);
}

}  // namespace
}  // namespace kda::test
