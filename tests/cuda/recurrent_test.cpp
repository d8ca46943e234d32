// The decode step: the Hopper row against the float64 recurrence and against cuda_recurrent, bit
// for bit; pools, counts of accepted tokens, graphs.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "compare.h"
#include "cuda/device_case.h"
#include "execute.h"
#include "generate.h"
#include "kda/backend.h"
#include "support/guarded_run.h"

namespace kda::test {
namespace {

using cases::Case;
using cases::CaseSpec;
using cases::HostTensor;
using cases::TensorMap;
using enum TensorId;

constexpr const char* kHopper = "sm90_recurrent";
constexpr const char* kPortable = "cuda_recurrent";

CaseSpec decode_spec(int64_t B, int64_t T, int64_t H, int64_t HV) {
  CaseSpec spec;
  spec.sizes = {B, T, H, HV, 128, 128, 0, 0};
  spec.io = DType::kBF16;
  spec.gate_dtype = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  spec.gradients = false;
  return spec;
}

/// The recurrent operation of a case with states of another type.
struct Decode {
  Decode(const CaseSpec& spec, DType state) : c(cases::generate(spec)) {
    problem = forward_problem(c);
    problem.operation = Operation::kRecurrent;
    problem.set(kInitialState, state).set(kFinalState, state);
    HostTensor& initial = c.inputs.at(kInitialState);
    initial = cases::converted(initial, state);
  }

  void give(TensorId id, const std::vector<double>& values) {
    c.inputs[id] = cases::from_doubles(DType::kI32, {static_cast<int64_t>(values.size())}, values);
    problem.set(id, DType::kI32);
  }

  TensorMap run(const char* implementation, bool in_place = true) const {
    Conditions conditions;
    conditions.device = {DeviceType::kCuda, 0};
    conditions.options.implementation = implementation;
    conditions.state_in_place = in_place;
    conditions.repeat = true;
    return run_guarded(problem, c.inputs, conditions).value().outputs;
  }

  Case c;
  Problem problem;
};

#define KDA_NEEDS_HOPPER(decode)                                                              \
  KDA_NEEDS_GPU();                                                                            \
  if (const Status status = supports((decode).problem, {DeviceType::kCuda, 0}, {kHopper, 0}); \
      !status.ok())                                                                           \
  GTEST_SKIP() << status.message()

void expect_same_bits(const TensorMap& a, const TensorMap& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, tensor] : a) {
    EXPECT_TRUE(tensor.bytes == b.at(id).bytes) << what << ": " << name_of(id);
  }
}

/// Within 7.3 of the float64 recurrence, state limits by the type of the states.
void expect_right(const Decode& decode, const TensorMap& results, const std::string& what) {
  Problem exact = decode.problem;
  exact.set(kO, DType::kF64).set(kFinalState, DType::kF64);
  const TensorMap expected =
      cases::execute_operation(exact, decode.c.inputs, {}, {"reference", 0}).value().outputs;
  for (const auto& [id, tensor] : results) {
    const cases::Difference difference = cases::compare(decode.c, id, tensor, expected.at(id));
    EXPECT_LE(difference.ratio, cases::limit_of(cases::precision_of(tensor.dtype), id))
        << what << ": " << name_of(id);
    EXPECT_TRUE(difference.finite) << what << ": " << name_of(id);
  }
}

struct Variant {
  DType state;
  bool v_first;
};

std::vector<Variant> variants() {
  return {{DType::kF32, false}, {DType::kF32, true}, {DType::kBF16, false}, {DType::kBF16, true}};
}

std::string describe(const Variant& v, int64_t T) {
  return std::string(name_of(v.state)) + (v.v_first ? " [V,K]" : " [K,V]") + " T " +
         std::to_string(T);
}

TEST(CudaRecurrent, HopperIsRightAndHasTheBitsOfThePortableKernel) {
  for (const Variant& variant : variants()) {
    for (const int64_t T : {1, 2, 3, 8, 19}) {
      CaseSpec spec = decode_spec(3, T, 2, 4);
      spec.state_v_first = variant.v_first;
      if (T == 3) spec.gate = Gate::kLowerBound;
      if (T == 2) spec.io = spec.gate_dtype = DType::kF32;
      Decode decode(spec, variant.state);
      KDA_NEEDS_HOPPER(decode);
      const TensorMap hopper = decode.run(kHopper, T != 8);
      expect_right(decode, hopper, describe(variant, T));
      expect_same_bits(hopper, decode.run(kPortable, T != 8), describe(variant, T));
    }
  }
}

// More states than a block has stages, several times over.
TEST(CudaRecurrent, HopperKeepsItsRingsApart) {
  for (const Variant& variant : variants()) {
    for (const int64_t T : {1, 3}) {
      CaseSpec spec = decode_spec(61, T, 32, 32);
      spec.state_v_first = variant.v_first;
      Decode decode(spec, variant.state);
      KDA_NEEDS_HOPPER(decode);
      expect_same_bits(decode.run(kHopper), decode.run(kPortable), describe(variant, T));
    }
  }
}

TEST(CudaRecurrent, HopperTakesPackedAndAbsentStates) {
  CaseSpec spec = decode_spec(1, 40, 1, 8);
  spec.cu_seqlens = {0, 3, 3, 4, 20, 33};
  spec.poison_tail = true;
  Decode decode(spec, DType::kF32);
  KDA_NEEDS_HOPPER(decode);
  for (const bool in_place : {false, true}) {
    expect_same_bits(decode.run(kHopper, in_place), decode.run(kPortable, in_place), "packed");
  }
  Decode verify = decode;
  verify.problem.set(kFinalState, DType::kNone);
  expect_same_bits(verify.run(kHopper, false), verify.run(kPortable, false), "no final state");
  Decode start = decode;
  start.problem.set(kInitialState, DType::kNone);
  start.c.inputs.erase(kInitialState);
  expect_same_bits(start.run(kHopper, false), start.run(kPortable, false), "no initial state");
}

}  // namespace
}  // namespace kda::test
