// sm90_state_scan against the float64 reference on the same rounded inputs, in guarded memory and
// under graph capture, and what it leaves to the generic row.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "check.h"
#include "compare.h"
#include "cuda/device_case.h"
#include "cuda/hopper_case.h"
#include "emulation_head.h"
#include "execute.h"
#include "generate.h"

namespace kda::test {
namespace {

const Device kGpu{DeviceType::kCuda, 0};

/// One operation by the reference, on the tensors there are.
void add_outputs(TensorMap& tensors, Problem problem, const TensorMap& wanted_dtypes_of,
                 std::initializer_list<std::pair<TensorId, DType>> outputs) {
  problem.tensors = {};
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    const auto found = wanted_dtypes_of.find(spec.id);
    if (spec.role == Role::kInput && found != wanted_dtypes_of.end()) {
      problem.set(spec.id, found->second.dtype);
    }
  }
  for (const auto& [id, dtype] : outputs) problem.set(id, dtype);
  auto outcome = cases::execute_operation(problem, tensors, {}, choosing("reference"));
  for (auto& [id, tensor] : outcome.value().outputs) tensors[id] = std::move(tensor);
}

/// A case and the inputs of its scan, rounded as the stages before it store them.
struct Scan {
  Case c;
  TensorMap inputs;

  explicit Scan(CaseSpec spec) {
    spec.beta_sigmoid = spec.qk_l2norm = false;
    spec.gate = Gate::kNone;
    spec.dfinal_state = false;
    c = cases::generate(spec);
    TensorMap all = c.inputs;
    Problem stage = c.forward;
    const auto run = [&](Operation operation,
                         std::initializer_list<std::pair<TensorId, DType>> outputs) {
      stage.operation = operation;
      add_outputs(all, stage, all, outputs);
    };
    run(Operation::kGateCumsum, {{kGamma, DType::kF32}});
    run(Operation::kIntra, {{kA, DType::kF64}});
    run(Operation::kWu, {{kW, spec.io}, {kU, spec.io}, {kKg, spec.io}});
    for (const TensorId id : {kKg, kW, kU, kGamma, kInitialState, kCuSeqlens, kDo}) {
      if (all.count(id) != 0) inputs[id] = std::move(all[id]);
    }
  }

  Problem problem(std::initializer_list<TensorId> outputs, DType io) const {
    Problem result = c.forward;
    result.operation = Operation::kStateScan;
    result.tensors = {};
    for (const auto& [id, tensor] : inputs) result.set(id, tensor.dtype);
    for (const TensorId id : outputs) {
      const bool is_float = id == kFinalState || id == kDqRaw;
      result.set(id, io == DType::kF64 || !is_float ? io : DType::kF32);
    }
    return result;
  }

  TensorMap expected(std::initializer_list<TensorId> outputs) const {
    const Problem exact = problem(outputs, DType::kF64);
    return cases::execute_operation(exact, inputs, {}, choosing("reference")).value().outputs;
  }
};

/// h, v_new and final_state of sequences of one length in float64, with h and v_new rounded as the
/// kernel rounds them: 4.7 of docs/semantics.md.
TensorMap emulated(const Scan& scan, DType io) {
  const Sizes& s = scan.c.forward.sizes;
  const int64_t C = scan.c.forward.chunk_size;
  const int64_t chunks = (s.T + C - 1) / C;
  const auto values = [&](TensorId id) { return cases::to_doubles(scan.inputs.at(id)); };
  const std::vector<double> kg = values(kKg), w = values(kW), u = values(kU),
                            gamma = values(kGamma);
  const auto at = [](int64_t i) { return static_cast<std::size_t>(i); };
  TensorMap outputs;
  HostTensor& states = outputs[kFinalState] =
      cases::converted(scan.inputs.at(kInitialState), DType::kF64);
  HostTensor& h = outputs[kH] = HostTensor(DType::kF64, {s.B * chunks, s.HV, s.K, s.V});
  HostTensor& v_new = outputs[kVNew] = HostTensor(DType::kF64, {s.B, s.T, s.HV, s.V});
  for (int64_t task = 0; task < s.B * s.HV * s.V; ++task) {
    const int64_t v = task % s.V, head = task / s.V % s.HV, b = task / s.V / s.HV;
    const auto row = [&](int64_t t) { return (b * s.T + t) * s.HV + head; };
    const auto column = [&](int64_t state, int64_t k) {
      return ((state * s.HV + head) * s.K + k) * s.V + v;
    };
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t begin = chunk * C, end = std::min(begin + C, s.T);
      for (int64_t k = 0; k < s.K; ++k) {
        const double entering = states.get(column(b, k));
        h.set(column(b * chunks + chunk, k), cases::rounded(entering, io));
        states.set(column(b, k), std::exp2(gamma[at(row(end - 1) * s.K + k)]) * entering);
      }
      for (int64_t t = begin; t < end; ++t) {
        double x = u[at(row(t) * s.V + v)];
        for (int64_t k = 0; k < s.K; ++k) {
          x -= w[at(row(t) * s.K + k)] * h.get(column(b * chunks + chunk, k));
        }
        x = cases::rounded(x, io);
        v_new.set(row(t) * s.V + v, x);
        for (int64_t k = 0; k < s.K; ++k) {
          const int64_t i = column(b, k);
          states.set(i, states.get(i) + kg[at(row(t) * s.K + k)] * x);
        }
      }
    }
  }
  return outputs;
}

/// Repeated keys and a state that predicts v leave differences of rounding errors in v_new
/// (semantics 6.4): they are held to what rounding alone makes of the same inputs, if that is more.
std::string beyond_limits(const Scan& scan, DType io, const TensorMap& results,
                          const TensorMap& expected, const TensorMap& emulated = {}) {
  const auto limit = [&](TensorId id, const HostTensor& reference) {
    const TensorId row = id == kH ? kFinalState : id == kDqRaw ? kDq : id;
    const double least = cases::limit_of(cases::precision_of(io), row);
    const auto found = emulated.find(id);
    if (found == emulated.end()) return least;
    const double error = cases::compare(scan.c, row, found->second, reference).ratio;
    return std::max(least, cases::kRoundingFactor * error);
  };
  return beyond(limit, scan.c, results, expected);
}

Conditions on_hopper() { return on_row("sm90_state_scan"); }

void expect_right(const CaseSpec& spec, std::initializer_list<TensorId> outputs) {
  SCOPED_TRACE(cases::describe(spec));
  const Scan scan(spec);
  const auto outcome = run_guarded(scan.problem(outputs, spec.io), scan.inputs, on_hopper());
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(outcome->implementation, "sm90_state_scan");
  const bool cancels = spec.family == Family::kSame || spec.family == Family::kPredicted;
  EXPECT_EQ(beyond_limits(scan, spec.io, outcome->outputs, scan.expected(outputs),
                          cancels ? emulated(scan, spec.io) : TensorMap{}),
            "");
}

constexpr std::initializer_list<TensorId> kPlain = {kH, kVNew, kFinalState};
constexpr std::initializer_list<TensorId> kWithDq = {kH, kVNew, kFinalState, kDqRaw};

/// Enough heads that a block takes 128 columns of V.
constexpr int64_t kManyHeads = 67;

// Without rounding the model is the reference; with it, a result of its own kind is within its
// limits, and one with an error of the size of v_new is not. Needs no GPU.
TEST(Sm90StateScanModel, IsTheReferenceButForRounding) {
  for (const Family family : {Family::kSame, Family::kPredicted}) {
    for (const DType io : {DType::kBF16, DType::kF16}) {
      const Scan scan(spec_of({2, 130, 1, 2, 64, 64, 0, 0}, io, family));
      const TensorMap expected = scan.expected(kPlain);
      for (const auto& [id, tensor] : emulated(scan, DType::kF64)) {
        const TensorId as = id == kH ? kFinalState : id;
        EXPECT_LE(cases::compare(scan.c, as, tensor, expected.at(id)).ratio, 1e-9) << name_of(id);
      }
      TensorMap rounded = emulated(scan, io);
      EXPECT_EQ(beyond_limits(scan, io, rounded, expected, rounded), "");
      HostTensor& v_new = rounded.at(kVNew);
      for (int64_t i = 0; i < v_new.count(); ++i) v_new.set(i, 2 * v_new.get(i));
      EXPECT_NE(beyond_limits(scan, io, rounded, expected, emulated(scan, io)), "");
    }
  }
}

TEST(Sm90StateScan, AllFamilies) {
  KDA_NEEDS_HOPPER();
  for (const Family family : cases::kFamilies) {
    for (const DType io : {DType::kBF16, DType::kF16}) {
      expect_right(spec_of({1, 200, 2, 2, 128, 128, 0, 0}, io, family), kPlain);
      expect_right(spec_of({2, 130, 1, 1, 64, 64, 0, 0}, io, family), kPlain);
    }
  }
}

TEST(Sm90StateScan, AllTilings) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {DType::kBF16, DType::kF16}) {
    for (const int64_t K : {64, 128}) {
      for (const int64_t V : {64, 128, 192, 256}) {
        expect_right(spec_of({1, 150, 2, 4, K, V, 0, 0}, io), kPlain);
      }
      expect_right(spec_of({1, 130, kManyHeads, kManyHeads, K, 128, 0, 0}, io), kPlain);
      expect_right(spec_of({1, 70, kManyHeads, kManyHeads, K, 256, 0, 0}, io), kPlain);
    }
  }
}

TEST(Sm90StateScan, RawDq) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {DType::kBF16, DType::kF16}) {
    for (const int64_t K : {64, 128}) {
      for (const int64_t V : {64, 128, 256}) {
        expect_right(spec_of({2, 330, 2, 2, K, V, 0, 0}, io), kWithDq);
        CaseSpec packed = spec_of({1, 300, 2, 2, K, V, 0, 0}, io);
        packed.cu_seqlens = {0, 5, 5, 69, 133, 290};
        packed.poison_tail = true;
        expect_right(packed, kWithDq);
        expect_right(packed, {kDqRaw});
      }
    }
  }
}

// More columns than a block or cluster holds: 3, 5 and 7 parts of 64, 3 of 128, 2 of 256.
TEST(Sm90StateScan, RawDqInParts) {
  KDA_NEEDS_HOPPER();
  for (const DType io : {DType::kBF16, DType::kF16}) {
    for (const int64_t K : {64, 128}) {
      for (const int64_t V : {192, 320, 384, 448, 512}) {
        expect_right(spec_of({2, 130, 1, 2, K, V, 0, 0}, io), kWithDq);
        CaseSpec packed = spec_of({1, 150, 1, 1, K, V, 0, 0}, io);
        packed.cu_seqlens = {0, 5, 5, 69, 133, 140};
        packed.poison_tail = true;
        expect_right(packed, kWithDq);
        expect_right(packed, {kDqRaw});
      }
    }
  }
}

TEST(Sm90StateScan, LengthsAndPackedSequences) {
  KDA_NEEDS_HOPPER();
  for (const int64_t T : {1, 63, 64, 65, 128, 500}) {
    expect_right(spec_of({2, T, 1, 1, 128, 128, 0, 0}, DType::kBF16), kPlain);
    if (T > 100) continue;
    expect_right(spec_of({1, T, kManyHeads, kManyHeads, 64, 128, 0, 0}, DType::kBF16), kPlain);
  }
  for (const int64_t heads : {int64_t{1}, kManyHeads}) {
    CaseSpec spec = spec_of({1, 210, heads, heads, 128, 128, 0, 0}, DType::kBF16);
    spec.cu_seqlens = {0, 0, 1, 64, 64, 129, 197, 197};
    spec.poison_tail = true;
    expect_right(spec, kPlain);
    spec.cu_dtype = DType::kI32;
    spec.state_v_first = true;
    expect_right(spec, kPlain);
  }
}

TEST(Sm90StateScan, OptionalTensorsAndStates) {
  KDA_NEEDS_HOPPER();
  CaseSpec spec = spec_of({2, 200, 2, 2, 128, 128, 0, 0}, DType::kBF16);
  for (const bool v_first : {false, true}) {
    for (const bool initial : {false, true}) {
      spec.state_v_first = v_first;
      spec.initial_state = initial;
      expect_right(spec, kPlain);
      expect_right(spec, {kVNew});
      expect_right(spec, {kH});
      expect_right(spec, {kFinalState});
    }
  }
  const Scan scan(spec);
  Conditions conditions = on_hopper();
  conditions.state_in_place = true;
  const auto outcome = run_guarded(scan.problem(kPlain, spec.io), scan.inputs, conditions);
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(beyond_limits(scan, spec.io, outcome->outputs, scan.expected(kPlain)), "");
}

TEST(Sm90StateScan, PackedSequencesHaveTheBitsOfSeparateOnes) {
  KDA_NEEDS_HOPPER();
  for (const int64_t V : {128, 256, 320}) {
    CaseSpec spec = spec_of({1, 300, 2, 2, 128, V, 0, 0}, DType::kBF16);
    spec.cu_seqlens = {0, 5, 69, 133, 290};
    const Scan packed(spec);
    const auto together = run_guarded(packed.problem(kWithDq, spec.io), packed.inputs, on_hopper());
    ASSERT_TRUE(together.ok()) << together.status().message();
    for (std::size_t n = 0; n + 1 < spec.cu_seqlens.size(); ++n) {
      const int64_t begin = spec.cu_seqlens[n];
      const int64_t end = spec.cu_seqlens[n + 1];
      const auto row = static_cast<int64_t>(n);
      Problem alone = packed.problem(kWithDq, spec.io);
      alone.sizes.T = end - begin;
      alone.sizes.N = 0;
      alone.set(kCuSeqlens, DType::kNone);
      TensorMap inputs;
      for (const TensorId id : {kKg, kW, kU, kGamma, kDo}) {
        inputs[id] = rows_of(packed.inputs.at(id), 1, begin, end - begin);
      }
      inputs[kInitialState] = row_of(packed.inputs.at(kInitialState), row);
      const auto separate = run_guarded(alone, inputs, on_hopper());
      ASSERT_TRUE(separate.ok()) << separate.status().message();
      for (const TensorId id : {kVNew, kDqRaw}) {
        EXPECT_EQ(rows_of(together->outputs.at(id), 1, begin, end - begin).bytes,
                  separate->outputs.at(id).bytes)
            << name_of(id) << " of sequence " << n;
      }
      EXPECT_EQ(row_of(together->outputs.at(kFinalState), row).bytes,
                separate->outputs.at(kFinalState).bytes);
    }
  }
}

TEST(Sm90StateScan, UnalignedTensorsAreTakenByTheGenericRow) {
  KDA_NEEDS_HOPPER();
  const CaseSpec spec = spec_of({2, 130, 1, 2, 64, 128, 0, 0}, DType::kBF16);
  const Scan scan(spec);
  const TensorMap expected = scan.expected(kWithDq);
  for (const Arrangement arrangement : {Arrangement::kPadded, Arrangement::kTransposed}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      Conditions conditions;
      conditions.device = kGpu;
      conditions.arrangement = arrangement;
      conditions.seed = seed;
      const auto outcome = run_guarded(scan.problem(kWithDq, spec.io), scan.inputs, conditions);
      ASSERT_TRUE(outcome.ok()) << outcome.status().message();
      EXPECT_EQ(beyond_limits(scan, spec.io, outcome->outputs, expected), "");
    }
  }
}

TEST(Sm90StateScan, ReasonsNameTheFeature) {
  KDA_NEEDS_HOPPER();
  const auto reason = [](Sizes sizes, DType io, auto change) {
    Problem problem = Problem::make(Operation::kStateScan, sizes, io);
    problem.set(kH, io).set(kVNew, io);
    change(problem);
    return supports(problem, kGpu, choosing("sm90_state_scan")).message();
  };
  const auto as_is = [](Problem&) {};
  const Sizes sizes{1, 100, 1, 1, 128, 128, 0, 0};
  EXPECT_EQ(reason(sizes, DType::kBF16, as_is), "");
  EXPECT_NE(reason(sizes, DType::kF32, as_is).find("fp32 tensors (kg)"), std::string::npos);
  EXPECT_NE(reason({1, 100, 1, 1, 96, 128, 0, 0}, DType::kBF16, as_is).find("K = 96"),
            std::string::npos);
  EXPECT_NE(reason({1, 100, 1, 1, 128, 100, 0, 0}, DType::kBF16, as_is).find("V = 100"),
            std::string::npos);
  EXPECT_NE(reason(sizes, DType::kBF16, [](Problem& p) { p.chunk_size = 32; }).find("chunk_size"),
            std::string::npos);
  EXPECT_NE(reason(sizes, DType::kBF16, [](Problem& p) { p.set(kVNew, DType::kF32); })
                .find("fp32 tensors beside bf16 ones (v_new)"),
            std::string::npos);
  EXPECT_EQ(reason(sizes, DType::kBF16, [](Problem& p) { p.set(kDo, DType::kF32); }), "");
  EXPECT_EQ(reason({1, 100, 1, 1, 128, 192, 0, 0}, DType::kBF16,
                   [](Problem& p) { p.set(kDo, DType::kBF16).set(kDqRaw, DType::kF32); }),
            "");
  EXPECT_NE(reason({1, 100, 1, 1, 128, 192, 0, 0}, DType::kBF16,
                   [](Problem& p) { p.set(kDo, DType::kF16).set(kDqRaw, DType::kF32); })
                .find("fp16 tensors beside bf16 ones (do)"),
            std::string::npos);
}

}  // namespace
}  // namespace kda::test
