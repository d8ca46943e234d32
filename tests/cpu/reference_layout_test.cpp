// What must not change the numbers: layouts, strides, dtypes, packing, threads; and padding.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/element.h"
#include "reference_support.h"

namespace kda {
namespace {

using enum TensorId;

constexpr std::array kOperations = {
    Operation::kChunkForward, Operation::kChunkBackward, Operation::kRecurrent,
    Operation::kGateCumsum,   Operation::kIntra,         Operation::kWu,
    Operation::kStateScan,    Operation::kOutput,        Operation::kReverseScan,
    Operation::kWyBackward,   Operation::kIntraBackward};

/// Every input but the indices, every output.
Problem full(Operation operation, const Sizes& sizes) {
  Problem problem = Problem::make(operation, sizes, DType::kF64);
  for (const TensorSpec& spec : tensors_of(operation)) {
    const bool gate = spec.id == kALog || spec.id == kDtBias;
    if (spec.role != Role::kInput || spec.dtypes == DTypeRule::kIndex) continue;
    if (spec.dtypes == DTypeRule::kInt32) continue;
    if (gate) problem.gate = Gate::kSoftplus;
    problem.set(spec.id, DType::kF64);
  }
  return want_all(problem);
}

/// gamma must fall along a chunk, as a sum of decays does.
Tensors inputs_of(const Problem& problem) {
  Tensors inputs = random_inputs(problem, 31);
  if (!inputs.contains(kGamma)) return inputs;
  const auto row = static_cast<std::size_t>(problem.sizes.HV * problem.sizes.K);
  for (std::size_t i = 0; i < inputs[kGamma].size(); ++i) {
    const std::size_t token = i / row;
    inputs[kGamma][i] = -0.1 * static_cast<double>(token);
  }
  return inputs;
}

class Layout : public testing::TestWithParam<Operation> {};

TEST_P(Layout, ThreadsDoNotMatter) {
  const Problem problem = full(GetParam(), {.B = 3, .T = 70, .H = 2, .HV = 4, .K = 4, .V = 3});
  const Tensors inputs = inputs_of(problem);
  EXPECT_EQ(run(problem, inputs, {.threads = 1}), run(problem, inputs, {.threads = 5}));
}

// Heads before tokens, with gaps: the harness also shows writes that miss their element.
TEST_P(Layout, StridesDoNotMatter) {
  const Sizes sizes{.B = 2, .T = 70, .H = 2, .HV = 4, .K = 4, .V = 3};
  const Problem dense = full(GetParam(), sizes);
  const Tensors inputs = inputs_of(dense);
  Problem strided = dense;
  for (const TensorSpec& spec : tensors_of(GetParam())) {
    if (!strided.has(spec.id)) continue;
    TensorLayout layout = strided.canonical_layout(spec.id);
    if (layout.rank < 3) continue;
    const int64_t width = layout.rank == 4 ? layout.shape[3] : 1;
    layout.stride = {layout.shape[1] * layout.shape[2] * width * 3 + 5, width * 3,
                     layout.shape[1] * width * 3, layout.rank == 4 ? 3 : 0};
    strided.set(spec.id, layout);
  }
  EXPECT_EQ(run(strided, inputs), run(dense, inputs));
}

TEST_P(Layout, StateLayoutOnlyTransposes) {
  const Problem k_first = full(GetParam(), {.B = 2, .T = 70, .H = 1, .HV = 2, .K = 4, .V = 3});
  Problem v_first = k_first;
  v_first.state_v_first = true;
  const auto is_state = [](TensorId id) {
    return id == kInitialState || id == kFinalState || id == kDfinalState || id == kDinitialState;
  };
  const auto transposed = [](const Values& values, std::size_t rows, std::size_t columns) {
    Values result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t matrix = i / (rows * columns) * rows * columns;
      const std::size_t in = i - matrix;
      result[matrix + in % columns * rows + in / columns] = values[i];
    }
    return result;
  };
  const Tensors inputs = inputs_of(k_first);
  Tensors v_first_inputs = inputs;
  for (auto& [id, values] : v_first_inputs) {
    if (is_state(id)) values = transposed(values, 4, 3);
  }
  Tensors outputs = run(v_first, v_first_inputs);
  for (auto& [id, values] : outputs) {
    if (is_state(id)) values = transposed(values, 3, 4);
  }
  EXPECT_EQ(outputs, run(k_first, inputs));
}

// 16-bit and fp32 inputs are read exactly, and outputs are the fp64 results rounded once.
TEST_P(Layout, DtypesRoundOnlyInputsAndOutputs) {
  const Problem wide = full(GetParam(), {.B = 1, .T = 40, .H = 1, .HV = 2, .K = 4, .V = 3});
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    Problem narrow = wide;
    Tensors inputs = inputs_of(wide);
    for (const TensorSpec& spec : tensors_of(GetParam())) {
      if (!wide.has(spec.id)) continue;
      const bool accurate = spec.dtypes == DTypeRule::kAccurate;
      const DType given = accurate ? DType::kF32 : dtype;
      narrow.set(spec.id, given);
      if (spec.role != Role::kInput) continue;
      for (double& value : inputs[spec.id]) {
        std::byte element[8];
        store_element(element, given, value);
        value = load_element(element, given);
      }
    }
    Tensors expected = run(wide, inputs);
    for (auto& [id, values] : expected) {
      for (double& value : values) {
        std::byte element[8];
        store_element(element, narrow[id].dtype, value);
        value = load_element(element, narrow[id].dtype);
      }
    }
    EXPECT_EQ(run(narrow, inputs), expected) << name_of(dtype);
  }
}

/// Rows [begin, end) of the first or, with B = 1, the second index.
Values cut(const Values& values, int64_t rows, int64_t begin, int64_t end) {
  const auto width = static_cast<std::ptrdiff_t>(values.size()) / rows;
  return {values.begin() + begin * width, values.begin() + end * width};
}

// Packed sequences give the bits of separate runs; the rows after them are zero.
TEST_P(Layout, PackedIsSeparateAndPaddingIsZero) {
  const std::vector<int64_t> lengths{5, 0, 64, 70};
  const int64_t T = 145;
  Problem packed = full(GetParam(), {.B = 1, .T = T, .H = 1, .HV = 2, .K = 4, .V = 3});
  pack(packed, lengths);
  Tensors inputs = inputs_of(packed);
  inputs[kCuSeqlens] = starts_of(lengths);
  const Tensors outputs = run(packed, inputs);
  packed.set(kCuSeqlens, DType::kI32);
  EXPECT_EQ(run(packed, inputs), outputs) << "int32 cu_seqlens";
  int64_t begin = 0;
  int64_t row = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    Problem one = full(GetParam(), packed.sizes);
    one.sizes.T = lengths[n];
    const int64_t rows = one.chunk_rows();
    // Rows of the sequence in a tensor, by the first letters of its shape.
    const auto part = [&](TensorId id, const Values& values) {
      for (const TensorSpec& spec : tensors_of(GetParam())) {
        if (spec.id != id) continue;
        if (spec.shape.starts_with("[B,T,")) return cut(values, T, begin, begin + lengths[n]);
        if (spec.shape.starts_with("[NC,"))
          return cut(values, packed.chunk_rows(), row, row + rows);
        if (spec.shape.starts_with("[S,")) {
          return cut(values, 4, static_cast<int64_t>(n), static_cast<int64_t>(n) + 1);
        }
      }
      return values;
    };
    Tensors one_inputs;
    for (const auto& [id, values] : inputs) one_inputs[id] = part(id, values);
    for (const auto& [id, values] : run(one, one_inputs)) {
      if (id == kDALog || id == kDdtBias) continue;  // sums over the sequences
      EXPECT_EQ(part(id, outputs.at(id)), values) << name_of(id) << " of sequence " << n;
    }
    begin += lengths[n];
    row += rows;
  }
  for (const TensorSpec& spec : tensors_of(GetParam())) {
    if (spec.role != Role::kOutput) continue;
    const Values& values = outputs.at(spec.id);
    Values padding;
    if (spec.shape.starts_with("[B,T,")) padding = cut(values, T, begin, T);
    if (spec.shape.starts_with("[NC,")) {
      padding = cut(values, packed.chunk_rows(), row, packed.chunk_rows());
    }
    EXPECT_EQ(padding, Values(padding.size())) << name_of(spec.id);
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, Layout, testing::ValuesIn(kOperations),
                         [](const auto& operation) {
                           return std::string(name_of(operation.param));
                         });

TEST(ReferenceLayout, NanAfterTheLastSequenceStaysThere) {
  Problem packed =
      full(Operation::kChunkBackward, {.B = 1, .T = 90, .H = 1, .HV = 2, .K = 4, .V = 3});
  pack(packed, {30, 40});
  Tensors inputs = inputs_of(packed);
  inputs[kCuSeqlens] = {0, 30, 70};
  const Tensors expected = run(packed, inputs);
  for (TensorId id : {kQ, kK, kV, kG, kBeta, kDo}) {
    Values& values = inputs[id];
    std::fill(values.begin() + static_cast<std::ptrdiff_t>(values.size() * 70 / 90), values.end(),
              std::nan(""));
  }
  EXPECT_EQ(run(packed, inputs), expected);
}

// dA_log and ddt_bias of a packed problem are the sums over its sequences.
TEST(ReferenceLayout, ParameterGradientsAddUp_GRAD_09) {
  Problem whole =
      full(Operation::kChunkBackward, {.B = 2, .T = 60, .H = 1, .HV = 2, .K = 4, .V = 3});
  const Tensors inputs = inputs_of(whole);
  const Tensors outputs = run(whole, inputs);
  Values sums(outputs.at(kDdtBias).size() + 2);
  for (int64_t b = 0; b < 2; ++b) {
    Problem one = whole;
    one.sizes.B = 1;
    Tensors part = inputs;
    for (auto& [id, values] : part) {
      if (id != kALog && id != kDtBias) values = cut(values, 2, b, b + 1);
    }
    const Tensors gradients = run(one, part);
    for (std::size_t i = 0; i < 8; ++i) sums[i] += gradients.at(kDdtBias)[i];
    for (std::size_t i = 0; i < 2; ++i) sums[8 + i] += gradients.at(kDALog)[i];
  }
  Values expected = outputs.at(kDdtBias);
  expected.insert(expected.end(), outputs.at(kDALog).begin(), outputs.at(kDALog).end());
  EXPECT_LE(relative_error(expected, sums), 1e-14);
}

}  // namespace
}  // namespace kda
