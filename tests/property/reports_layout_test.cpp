// Fault reports on packing, grouping, strides, batches and head sizes. Each name carries its id.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "guard/device_run.h"
#include "property/reports.h"
#include "support/calls.h"

namespace kda::test {
namespace {

TEST_P(Reports, VARLEN_01_LastSequenceOfOneToken) {
  for (const std::vector<int64_t>& cu :
       std::vector<std::vector<int64_t>>{{0, 8191, 8192}, {0, 1, 8192}, {0, 4095, 4096, 8192}}) {
    CaseSpec spec = small_spec(8192);
    spec.sizes.K = spec.sizes.V = 16;
    spec.cu_seqlens = cu;
    expect_right(make(spec));
  }
}

TEST_P(Reports, VARLEN_03_EmptySequencesAnywhere) {
  std::vector<int64_t> many(501, 0);
  many.push_back(70);
  for (const std::vector<int64_t>& cu : std::vector<std::vector<int64_t>>{
           {0, 0, 64, 64, 64, 129, 129}, {0, 64, 64}, {0, 0, 1}, {0, 0}, {0}, many}) {
    CaseSpec spec = small_spec(cu.back());
    spec.sizes.K = 16;
    spec.sizes.V = 8;
    spec.cu_seqlens = cu;
    const Case c = make(spec);
    expect_right(c);
    attempt([&] {
      const TensorMap results = results_of(c);
      for (std::size_t n = 0; n + 1 < cu.size(); ++n) {
        if (cu[n] != cu[n + 1]) continue;
        const auto row = static_cast<int64_t>(n);
        EXPECT_EQ(other_bits(row_of(results.at(kFinalState), row),
                             row_of(c.inputs.at(kInitialState), row)),
                  "");
        EXPECT_EQ(other_bits(row_of(results.at(kDinitialState), row),
                             row_of(c.inputs.at(kDfinalState), row)),
                  "");
      }
    });
  }
}

TEST_P(Reports, VARLEN_07_ManyShortSequences) {
  std::vector<int64_t> mixed{0};
  for (int64_t i = 0; i < 127; ++i) mixed.push_back(mixed.back() + (16 << (i % 3)));
  std::vector<int64_t> tokens{0};
  for (int64_t i = 0; i < 1000; ++i) tokens.push_back(i + 1);
  for (const auto& cu : {mixed, tokens, {0, 80}, {0, 129}}) {
    CaseSpec spec = small_spec(cu.back());
    spec.sizes.K = spec.sizes.V = 16;
    spec.cu_seqlens = cu;
    expect_right(make(spec));
  }
}

TEST_P(Reports, VARLEN_09_ThousandsOfSequences) {
  std::vector<int64_t> cu{0};
  for (int64_t i = 0; i < 2050; ++i) cu.push_back(cu.back() + 16);
  CaseSpec spec = small_spec(cu.back());
  spec.sizes.H = spec.sizes.HV = is_hopper() ? 1 : 4;
  spec.sizes.K = spec.sizes.V = 4;
  spec.cu_seqlens = cu;
  const Case c = make(spec);
  attempt([&] {
    const TensorMap together = results_of(c);
    for (std::size_t n = 0; n < 2050; n += 103) {
      const TensorMap alone = results_of(sequence_of(c, n));
      for (const TensorId id : {kO, kDq, kDk, kDv, kDg, kDbeta}) {
        EXPECT_EQ(other_bits(tokens_of(together.at(id), 0, cu[n], cu[n + 1]), alone.at(id)), "");
      }
    }
  });
}

TEST_P(Reports, VARLEN_10_DecodeOfThousandsOfSequences) {
  for (const auto& [B, HV] : {std::pair<int64_t, int64_t>{4096, 8}, {70000, 1}}) {
    CaseSpec spec = small_spec(1);
    spec.sizes = {.B = B, .T = 1, .H = HV, .HV = HV, .K = 4, .V = 4};
    if (is_hopper()) spec.sizes = {.B = 1100, .T = 1, .H = 1, .HV = 1, .K = 128, .V = 128};
    spec.gradients = false;
    const Case c = make(spec);
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      const TensorMap results = results_of(recurrent_problem(c), c.inputs);
      EXPECT_EQ(beyond_limits(c, results, expected), "");
    });
  }
}

TEST_P(Reports, VARLEN_11_DocumentsDoNotLeak) {
  CaseSpec spec = small_spec(200);
  spec.cu_seqlens = {0, 100, 200};
  const Case c = make(spec);
  Case other = c;
  for (const TensorId id : {kQ, kK, kV, kG, kBeta, kDo}) {
    const int64_t half = c.inputs.at(id).count() / 2;
    set_input(other, id, [&](int64_t i) {
      const double x = c.inputs.at(id).get(i);
      return i < half ? 0.5 * x : x;
    });
  }
  attempt([&] {
    const TensorMap before = results_of(c);
    const TensorMap after = results_of(other);
    const TensorMap alone = results_of(sequence_of(c, 1));
    for (const TensorId id : {kO, kDq, kDk, kDv, kDg, kDbeta}) {
      const HostTensor second = tokens_of(before.at(id), 0, 100, 200);
      EXPECT_EQ(other_bits(second, tokens_of(after.at(id), 0, 100, 200)), "");
      EXPECT_EQ(other_bits(second, alone.at(id)), "");
    }
  });
}

// CUDA reads the list on the device only: tests/cuda/contract_test.cpp.
TEST(ReportsOnCpu, VARLEN_12_WrongListsAreRefusedAtRunTime) {
  CaseSpec spec = small_spec(200);
  spec.cu_seqlens = {0, 100, 200};
  Case c = cases::generate(spec);
  for (const std::vector<int64_t>& wrong : std::vector<std::vector<int64_t>>{
           {1, 100, 200}, {0, 150, 100}, {0, 100, 201}, {0, -1, 200}}) {
    set_input(c, kCuSeqlens,
              [&](int64_t i) { return static_cast<double>(wrong[static_cast<std::size_t>(i)]); });
    for (const std::string& family : families_of_cpu()) {
      for (Problem problem : {forward_problem(c), backward_problem(c), recurrent_problem(c)}) {
        const auto result = run_counted(problem, c.inputs, choosing(family));
        EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << family;
        EXPECT_EQ(result.status().message().rfind("cu_seqlens[", 0), 0u)
            << result.status().message();
      }
    }
  }
}

TEST_P(Reports, VARLEN_13_ShortSequencesAmongPoison) {
  // Sequences of 1, 1, 1, 2, 15, 16, 17 and 63 tokens; every second one holds NaN or 1e30.
  const std::vector<int64_t> lengths{1, 1, 1, 2, 15, 16, 17, 63};
  std::vector<int64_t> cu{0};
  for (const int64_t length : lengths) {
    cu.push_back(cu.back() + length);
    cu.push_back(cu.back() + 3);
  }
  CaseSpec spec = small_spec(cu.back() + 5);
  spec.cu_seqlens = cu;
  const Case clean = make(spec);
  for (const double poison : {std::nan(""), 1e30}) {
    Case c = clean;
    for (const TensorId id : {kQ, kK, kV, kG, kBeta, kDo}) {
      const int64_t row = c.inputs.at(id).count() / spec.sizes.T;
      set_input(c, id, [&](int64_t i) {
        const auto next = std::upper_bound(cu.begin(), cu.end(), i / row);
        const bool poisoned = next == cu.end() || (next - cu.begin()) % 2 == 0;
        const double x = id == kG ? -std::fabs(poison) : poison;
        return poisoned ? x : clean.inputs.at(id).get(i);
      });
    }
    attempt([&] {
      const TensorMap results = results_of(c);
      for (std::size_t n = 0; n < cu.size() - 1; n += 2) {
        const TensorMap alone = results_of(sequence_of(clean, n));
        for (const TensorId id : {kO, kDq, kDk, kDv, kDg, kDbeta}) {
          EXPECT_EQ(other_bits(tokens_of(results.at(id), 0, cu[n], cu[n + 1]), alone.at(id)), "")
              << name_of(id);
        }
      }
    });
  }
}

TEST_P(Reports, VARLEN_15_DecayStartsAnewInEachSequence) {
  CaseSpec spec = small_spec(128);
  spec.cu_seqlens = {0, 65, 128};
  spec.initial_state = spec.gradients = false;
  Case c = make(spec);
  for (const TensorId id : {kQ, kK}) {
    set_input(c, id, [](int64_t i) { return i % 64 == 3 ? 1.0 : 0.0; });
  }
  set_input(c, kG, [](int64_t) { return -1.0; });
  set_input(c, kV, [](int64_t) { return 1.0; });
  set_input(c, kBeta, [](int64_t) { return 1.0; });
  attempt([&] {
    const HostTensor o = results_of(c).at(kO);
    for (const int64_t first : {0, 65}) {
      for (int64_t v = 0; v < 64; ++v) EXPECT_EQ(o.get(first * 64 + v), 0.125);
    }
  });
}

TEST_P(Reports, VARLEN_16_EitherIntegerTypeAndStride) {
  CaseSpec spec = small_spec(130);
  spec.cu_seqlens = {0, 65, 65, 128};
  const Case wide = make(spec);
  spec.cu_dtype = DType::kI32;
  const Case narrow = make(spec);
  attempt([&] {
    Conditions padded = choosing(family());
    padded.arrangement = is_hopper() ? Arrangement::kAligned : Arrangement::kPadded;
    const TensorMap expected = results_of(wide);
    EXPECT_EQ(other_bits(results_of(narrow), expected), "");
    for (padded.seed = 1; padded.seed < 6; ++padded.seed) {
      EXPECT_EQ(other_bits(run_case(narrow, padded), expected), "");
      EXPECT_EQ(other_bits(run_case(wide, padded), expected), "");
    }
  });
}

TEST_P(Reports, GVA_01_GVA_02_GroupedHeads) {
  for (const int64_t G : {2, 4}) {
    CaseSpec spec = small_spec(150);
    spec.sizes.H = 2;
    spec.sizes.HV = 2 * G;
    spec.sizes.K = 32;
    spec.io = DType::kBF16;
    spec.gradients = true;
    expect_right(make(spec), "groups of " + std::to_string(G));
  }
}

/// The values of a tensor in the strides of `layout`, `offset` bytes behind a multiple of 16, and
/// NaN between them.
cases::AlignedBytes scattered(const HostTensor& values, const TensorLayout& layout,
                              std::size_t bytes, std::size_t offset) {
  const std::size_t size = size_of(layout.dtype);
  cases::AlignedBytes memory(bytes + offset, std::byte{0xFF});
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  std::copy_n(layout.shape.begin(), layout.rank, shape.begin());
  const std::array<int64_t, 4>& stride = layout.stride;
  std::size_t from = 0;
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t t = 0; t < shape[1]; ++t) {
      for (int64_t h = 0; h < shape[2]; ++h) {
        for (int64_t k = 0; k < shape[3]; ++k) {
          const int64_t to = b * stride[0] + t * stride[1] + h * stride[2] + k * stride[3];
          std::memcpy(memory.data() + offset + static_cast<std::size_t>(to) * size,
                      values.bytes.data() + from++ * size, size);
        }
      }
    }
  }
  return memory;
}

/// Tests that move one tensor at a time.
class ReportsOfStrides : public Reports {
 protected:
  /// The outputs with one input in the given strides, `offset` bytes behind a multiple of 16, and
  /// everything else contiguous. Throws kda::Error.
  TensorMap results_with(Problem problem, const TensorMap& given, TensorId id,
                         const std::array<int64_t, 4>& stride, std::size_t offset) const {
    TensorLayout layout = problem.canonical_layout(id);
    layout.stride = stride;
    problem.set(id, layout);
    const Plan plan = make_plan(problem, device(), options()).value();
    TensorMap inputs;
    TensorMap outputs;
    for (const TensorSpec& spec : tensors_of(problem.operation)) {
      if (!problem.has(spec.id)) continue;
      if (spec.role == Role::kInput) {
        inputs[spec.id] = given.at(spec.id);
        continue;
      }
      const TensorLayout& out = plan.problem()[spec.id];
      outputs[spec.id] = HostTensor(out.dtype, {out.shape.begin(), out.shape.begin() + out.rank});
    }
    cases::AlignedBytes memory = scattered(
        inputs.at(id), layout, static_cast<std::size_t>(plan.problem().bytes(id)), offset);
    Args args;
    std::vector<std::span<std::byte>> regions{memory};
    for (TensorMap* tensors : {&inputs, &outputs}) {
      for (auto& [other, tensor] : *tensors) {
        args.out(other, tensor.bytes.data());
        regions.emplace_back(tensor.bytes);
      }
    }
    args.out(id, memory.data() + offset);
    cases::AlignedBytes workspace(plan.workspace_bytes());
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
    const Status status = on_cpu() ? plan.run(args) : cases::run_on_device(plan, args, regions, {});
    if (!status.ok()) throw Error(status);
    count_call(plan.implementation());
    return outputs;
  }

  /// Either direction has the bits that it has from contiguous tensors, from an address that is a
  /// multiple of one element alone and from one of 16 bytes.
  void expect_same_from(const Case& c, TensorId id, const std::array<int64_t, 4>& stride) const {
    for (const Problem& problem : {forward_problem(c), backward_problem(c)}) {
      if (!problem.has(id)) continue;  // do, of the forward
      attempt([&] {
        const TensorMap plain = results_of(problem, c.inputs);
        for (const std::size_t offset : {size_of(c.inputs.at(id).dtype), std::size_t{16}}) {
          attempt([&] {
            EXPECT_EQ(other_bits(results_with(problem, c.inputs, id, stride, offset), plain), "")
                << name_of(id) << " at an offset of " << offset;
          });
        }
      });
    }
  }
};

KDA_FOR_EACH_FAMILY(ReportsOfStrides);

TEST_P(ReportsOfStrides, LAYOUT_01_PaddedRows) {
  CaseSpec spec = small_spec(70);
  spec.sizes = {.B = 2, .T = 70, .H = 2, .HV = 2, .K = 64, .V = 32};
  const Case c = make(spec);
  const int64_t V = c.forward.sizes.V;
  for (const TensorId id : {kQ, kK}) expect_same_from(c, id, {70 * 512, 512, 64, 1});
  for (const TensorId id : {kV, kDo}) expect_same_from(c, id, {75 * 4 * V, 4 * V, V, 1});
  // States as slices of a larger pool.
  for (const TensorId id : {kInitialState, kDfinalState}) {
    expect_same_from(c, id, {5 * 2 * 64 * V, 64 * V, V, 1});
  }
}

TEST_P(ReportsOfStrides, LAYOUT_03_TransposedGateValuesAndBeta) {
  CaseSpec spec = small_spec(70);
  spec.sizes = {.B = 2, .T = 70, .H = 2, .HV = 2, .K = 64, .V = 32};
  const Case c = make(spec);
  const int64_t V = c.forward.sizes.V;
  expect_same_from(c, kG, {2 * 70 * 64, 64, 70 * 64, 1});
  for (const TensorId id : {kV, kDo}) expect_same_from(c, id, {2 * 70 * V, V, 70 * V, 1});
  expect_same_from(c, kBeta, {2 * 70, 1, 70, 0});
}

TEST_P(ReportsOfStrides, LAYOUT_06_ViewsOfOneProjection) {
  CaseSpec spec = small_spec(70);
  spec.sizes = {.B = 1, .T = 70, .H = 8, .HV = 8, .K = 16, .V = 16};
  spec.io = spec.gate_dtype = DType::kBF16;
  const Case c = make(spec);
  const int64_t K = c.forward.sizes.K;
  const int64_t row = 8 * 3 * K + 8;
  expect_same_from(c, kBeta, {70 * 40, 40, 1, 0});
  for (const TensorId id : {kQ, kK, kV, kDo}) expect_same_from(c, id, {70 * row, row, K, 1});
}

// A length that hung elsewhere, with zero-filled inputs.
TEST_P(Reports, RACE_04_LongZeroInputEnds) {
  CaseSpec spec = small_spec(16224);
  spec.sizes.K = spec.sizes.V = 8;
  spec.initial_state = spec.dfinal_state = false;
  Case c = make(spec);
  for (const TensorId id : {kQ, kK, kV, kG, kBeta, kDo}) {
    set_input(c, id, [](int64_t) { return 0.0; });
  }
  attempt([&] {
    for (const auto& [id, tensor] : results_of(c)) {
      for (int64_t i = 0; i < tensor.count(); ++i) ASSERT_EQ(tensor.get(i), 0) << name_of(id);
    }
  });
}

TEST_P(Reports, RACE_05_BatchCompositionChangesNoBit) {
  CaseSpec spec = small_spec(70);
  spec.sizes.B = 8;
  spec.sizes.K = 32;
  const Case batch = make(spec);
  attempt([&] {
    const TensorMap together = results_of(batch);
    for (const int64_t b : {0, 5, 7}) {
      const TensorMap alone = results_of(part_of(batch, b, 0, 70, b));
      for (const auto& [id, tensor] : alone) {
        EXPECT_EQ(other_bits(tensor, row_of(together.at(id), b)), "") << name_of(id);
      }
    }
    // The same tokens and states, packed behind one another.
    Case packed = batch;
    for (auto& [id, tensor] : packed.inputs) {
      if (!has_tokens(id)) continue;
      tensor.shape[0] = 1;
      tensor.shape[1] = 8 * 70;
    }
    packed.forward.sizes.B = 1;
    packed.forward.sizes.N = 8;
    packed.forward.sizes.T = 8 * 70;
    give_input(packed, kCuSeqlens,
               cases::from_doubles(DType::kI64, {9},
                                   std::vector<double>{0, 70, 140, 210, 280, 350, 420, 490, 560}));
    for (const auto& [id, tensor] : results_of(packed)) {
      EXPECT_TRUE(tensor.bytes == together.at(id).bytes) << name_of(id) << " of packed tokens";
    }
  });
}

TEST_P(Reports, DIM_01_DIM_02_DIM_05_HeadSizes) {
  const std::pair<int64_t, int64_t> kSizes[] = {{64, 64},  {64, 128}, {128, 64},  {16, 16},
                                                {32, 32},  {48, 48},  {128, 256}, {128, 512},
                                                {192, 32}, {256, 32}, {1, 1},     {3, 5}};
  for (const auto& [K, V] : kSizes) {
    CaseSpec spec = small_spec(100);
    spec.sizes.K = K;
    spec.sizes.V = V;
    if (is_hopper()) spec.io = DType::kBF16;
    const Case c = cases::generate(spec);
    expect_right(c, "K " + std::to_string(K) + " V " + std::to_string(V));
    const TensorMap expected = cases::reference_outputs(c).value();
    attempt([&] {
      TensorMap results = results_of(recurrent_problem(c), c.inputs);
      const TensorMap wanted{{kO, expected.at(kO)}, {kFinalState, expected.at(kFinalState)}};
      EXPECT_EQ(beyond_limits(c, results, wanted), "") << "recurrent";
    });
  }
}

TEST_P(Reports, DIM_04_ChunksOf32) {
  for (const int32_t C : {32, 64}) {
    CaseSpec spec = small_spec(100);
    spec.chunk_size = C;
    expect_right(make(spec), "C " + std::to_string(C));
  }
}

TEST_P(Reports, DIM_08_ReducedGateParameters) {
  for (const Gate gate : {Gate::kSoftplus, Gate::kLowerBound}) {
    CaseSpec spec = small_spec(100);
    spec.gate = gate;
    spec.parameter_dtype = DType::kBF16;
    const Case c = make(spec);
    expect_right(c);
    const Problem problem = backward_problem(c);
    EXPECT_EQ(problem[kDALog].dtype, DType::kBF16);
    EXPECT_EQ(problem[kDdtBias].dtype, DType::kBF16);
  }
}

TEST_P(Reports, DIM_09_HalfPrecisionOfUsualInput) {
  CaseSpec spec = small_spec(2048);
  spec.sizes.K = spec.sizes.V = 32;
  spec.io = DType::kF16;
  Case c = make(spec);
  set_input(c, kG, [](int64_t i) { return uniform(i, -5, 0); });
  expect_right(c);
}

// Values that fp16 cannot hold pass through fp32 states, and tiny gradients are not lost.
TEST_P(Reports, DIM_09_HalfPrecisionKeepsTheRangeOfStates) {
  CaseSpec spec = small_spec(130);
  spec.io = DType::kF16;
  Case c = make(spec);
  if (is_hopper()) note_limit(family(), "states beyond 65504 between fp16 q, k and v");
  const double large = is_hopper() ? 32768 : 65536;
  set_input(c, kInitialState, [&](int64_t i) { return i == 65 ? large : 0.0; });
  set_input(c, kDo, [](int64_t) { return 0.0; });
  set_input(c, kDfinalState, [](int64_t) { return 0x1p-25; });
  const OutputTypes types = is_hopper() ? OutputTypes{} : OutputTypes{DType::kF32};
  expect_right(c, types, cases::reference_outputs(c).value(), "");
  attempt([&] {
    double largest = 0;
    const HostTensor gradient = results_of(backward_problem(c, types), c.inputs).at(kDinitialState);
    for (int64_t i = 0; i < gradient.count(); ++i) {
      largest = std::max(largest, std::fabs(gradient.get(i)));
    }
    EXPECT_GT(largest, 0);
  });
}

}  // namespace
}  // namespace kda::test
