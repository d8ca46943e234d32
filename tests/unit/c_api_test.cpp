// The C interface seen from C++: enumerators agree, misuse is an answer and never a crash.
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "kda/c_api.h"
#include "kda/kda.h"

namespace {

#define KDA_SAME(c_name, cpp_name) \
  static_assert(static_cast<int32_t>(c_name) == static_cast<int32_t>(kda::cpp_name))

KDA_SAME(KDA_OK, StatusCode::kOk);
KDA_SAME(KDA_INVALID_ARGUMENT, StatusCode::kInvalidArgument);
KDA_SAME(KDA_UNSUPPORTED, StatusCode::kUnsupported);
KDA_SAME(KDA_DEVICE_ERROR, StatusCode::kDeviceError);
KDA_SAME(KDA_OUT_OF_MEMORY, StatusCode::kOutOfMemory);
KDA_SAME(KDA_INTERNAL, StatusCode::kInternal);
KDA_SAME(KDA_NONE, DType::kNone);
KDA_SAME(KDA_BF16, DType::kBF16);
KDA_SAME(KDA_F16, DType::kF16);
KDA_SAME(KDA_F32, DType::kF32);
KDA_SAME(KDA_F64, DType::kF64);
KDA_SAME(KDA_I32, DType::kI32);
KDA_SAME(KDA_I64, DType::kI64);
KDA_SAME(KDA_CPU, DeviceType::kCpu);
KDA_SAME(KDA_CUDA, DeviceType::kCuda);
KDA_SAME(KDA_GATE_NONE, Gate::kNone);
KDA_SAME(KDA_GATE_SOFTPLUS, Gate::kSoftplus);
KDA_SAME(KDA_GATE_LOWER_BOUND, Gate::kLowerBound);
KDA_SAME(KDA_CHUNK_FORWARD, Operation::kChunkForward);
KDA_SAME(KDA_CHUNK_BACKWARD, Operation::kChunkBackward);
KDA_SAME(KDA_RECURRENT, Operation::kRecurrent);
KDA_SAME(KDA_GATE_CUMSUM, Operation::kGateCumsum);
KDA_SAME(KDA_INTRA, Operation::kIntra);
KDA_SAME(KDA_WU, Operation::kWu);
KDA_SAME(KDA_STATE_SCAN, Operation::kStateScan);
KDA_SAME(KDA_OUTPUT, Operation::kOutput);
KDA_SAME(KDA_REVERSE_SCAN, Operation::kReverseScan);
KDA_SAME(KDA_WY_BACKWARD, Operation::kWyBackward);
KDA_SAME(KDA_INTRA_BACKWARD, Operation::kIntraBackward);
KDA_SAME(KDA_Q, TensorId::kQ);
KDA_SAME(KDA_K, TensorId::kK);
KDA_SAME(KDA_V, TensorId::kV);
KDA_SAME(KDA_G, TensorId::kG);
KDA_SAME(KDA_BETA, TensorId::kBeta);
KDA_SAME(KDA_A_LOG, TensorId::kALog);
KDA_SAME(KDA_DT_BIAS, TensorId::kDtBias);
KDA_SAME(KDA_INITIAL_STATE, TensorId::kInitialState);
KDA_SAME(KDA_CU_SEQLENS, TensorId::kCuSeqlens);
KDA_SAME(KDA_STATE_INDICES, TensorId::kStateIndices);
KDA_SAME(KDA_DO, TensorId::kDo);
KDA_SAME(KDA_DFINAL_STATE, TensorId::kDfinalState);
KDA_SAME(KDA_O, TensorId::kO);
KDA_SAME(KDA_FINAL_STATE, TensorId::kFinalState);
KDA_SAME(KDA_DQ, TensorId::kDq);
KDA_SAME(KDA_DK, TensorId::kDk);
KDA_SAME(KDA_DV, TensorId::kDv);
KDA_SAME(KDA_DG, TensorId::kDg);
KDA_SAME(KDA_DBETA, TensorId::kDbeta);
KDA_SAME(KDA_DA_LOG, TensorId::kDALog);
KDA_SAME(KDA_DDT_BIAS, TensorId::kDdtBias);
KDA_SAME(KDA_DINITIAL_STATE, TensorId::kDinitialState);
KDA_SAME(KDA_GAMMA, TensorId::kGamma);
KDA_SAME(KDA_AQK, TensorId::kAqk);
KDA_SAME(KDA_A, TensorId::kA);
KDA_SAME(KDA_W, TensorId::kW);
KDA_SAME(KDA_U, TensorId::kU);
KDA_SAME(KDA_KG, TensorId::kKg);
KDA_SAME(KDA_QG, TensorId::kQg);
KDA_SAME(KDA_H, TensorId::kH);
KDA_SAME(KDA_V_NEW, TensorId::kVNew);
KDA_SAME(KDA_DQ_RAW, TensorId::kDqRaw);
KDA_SAME(KDA_DH, TensorId::kDh);
KDA_SAME(KDA_DV_NEW, TensorId::kDvNew);
KDA_SAME(KDA_DP, TensorId::kDP);
KDA_SAME(KDA_DL, TensorId::kDL);
KDA_SAME(KDA_DQ_PARTIAL, TensorId::kDqPartial);
KDA_SAME(KDA_DK_PARTIAL, TensorId::kDkPartial);
KDA_SAME(KDA_DG_PARTIAL, TensorId::kDgPartial);
KDA_SAME(KDA_DBETA_PARTIAL, TensorId::kDbetaPartial);
KDA_SAME(KDA_NUM_ACCEPTED, TensorId::kNumAccepted);
static_assert(KDA_NUM_ACCEPTED + 1 == kda::kTensorCount);
static_assert(sizeof(kda_status) == 4 && sizeof(kda_tensor_layout) == 72);
static_assert(sizeof(kda_problem) == 8 + 8 + 64 + 16 + 24 + KDA_MAX_TENSORS * 72);

kda_problem forward() {
  kda_problem problem;
  EXPECT_EQ(kda_problem_make(&problem, KDA_CHUNK_FORWARD, 1, 70, 2, 4, 16, 24, KDA_F32), KDA_OK);
  return problem;
}

void expect_error(kda_status status, kda_status expected, const std::string& part) {
  EXPECT_EQ(status, expected) << kda_last_error();
  EXPECT_NE(std::string(kda_last_error()).find(part), std::string::npos)
      << "\"" << part << "\" is missing in: " << kda_last_error();
}

TEST(CApi, MakeAgreesWithCpp) {
  const kda_problem problem = forward();
  const auto made =
      kda::Problem::make(kda::Operation::kChunkForward,
                         {.B = 1, .T = 70, .H = 2, .HV = 4, .K = 16, .V = 24}, kda::DType::kF32);
  EXPECT_EQ(problem.struct_size, sizeof problem);
  EXPECT_EQ(problem.chunk_size, made.chunk_size);
  for (int i = 0; i < KDA_MAX_TENSORS; ++i) {
    const int32_t expected =
        i < kda::kTensorCount ? static_cast<int32_t>(made[static_cast<kda::TensorId>(i)].dtype) : 0;
    EXPECT_EQ(problem.tensors[i].dtype, expected) << i;
  }
}

TEST(CApi, InitFunctionsIgnoreNull) {
  kda_problem_init(nullptr);
  kda_options_init(nullptr);
  kda_args_init(nullptr);
  kda_plan_destroy(nullptr);
}

TEST(CApi, NullPointersAreAnswered) {
  kda_problem problem = forward();
  kda_plan* plan = nullptr;
  expect_error(kda_problem_make(nullptr, KDA_CHUNK_FORWARD, 1, 1, 1, 1, 1, 1, KDA_F32),
               KDA_INVALID_ARGUMENT,
               "kda_problem: null pointer, expected the address of a kda_problem");
  expect_error(kda_problem_layout(nullptr, KDA_Q, nullptr, nullptr), KDA_INVALID_ARGUMENT,
               "kda_problem: null pointer, expected the address of a kda_problem");
  expect_error(kda_plan_create(nullptr, KDA_CPU, 0, nullptr, &plan), KDA_INVALID_ARGUMENT,
               "kda_problem: null pointer, expected the address of a kda_problem");
  expect_error(kda_plan_create(&problem, KDA_CPU, 0, nullptr, nullptr), KDA_INVALID_ARGUMENT,
               "plan: null pointer, expected the address of a kda_plan*");
  expect_error(kda_supports(nullptr, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "kda_problem: null pointer, expected the address of a kda_problem");
  expect_error(kda_plan_run(nullptr, nullptr, nullptr), KDA_INVALID_ARGUMENT,
               "plan: null pointer, expected the address of a kda_plan");
  expect_error(kda_tensor_spec_at(KDA_OUTPUT, 0, nullptr), KDA_INVALID_ARGUMENT,
               "spec: null pointer, expected the address of a kda_tensor_spec");
  expect_error(kda_implementation_at(0, nullptr), KDA_INVALID_ARGUMENT,
               "implementation: null pointer, expected the address of a kda_implementation");
  EXPECT_EQ(kda_plan_workspace_bytes(nullptr), 0u);
  EXPECT_STREQ(kda_plan_implementation(nullptr), "");
  EXPECT_EQ(kda_problem_layout(&problem, KDA_Q, nullptr, nullptr), KDA_OK);
}

TEST(CApi, UninitialisedStructuresAreRefused) {
  kda_problem problem;
  std::memset(&problem, 0xFF, sizeof problem);
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "call kda_problem_init or kda_problem_make first");
  problem = forward();
  problem.struct_size += 8;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT, "struct_size");
  for (const char* part : {"kda_problem_init", "kda_problem_make", "header of the library"}) {
    EXPECT_NE(std::string(kda_last_error()).find(part), std::string::npos) << kda_last_error();
  }
  problem = forward();
  kda_options options;
  std::memset(&options, 0, sizeof options);
  expect_error(kda_supports(&problem, KDA_CPU, 0, &options), KDA_INVALID_ARGUMENT,
               "call kda_options_init first");
}

TEST(CApi, LimitsTheWorkspace) {
  const kda_problem problem = forward();
  kda_options options;
  kda_options_init(&options);
  EXPECT_EQ(options.workspace_limit, 0u);
  options.workspace_limit = 1;
  expect_error(kda_supports(&problem, KDA_CPU, 0, &options), KDA_UNSUPPORTED,
               "workspace_limit: found 1 bytes, expected ");
}

TEST(CApi, UnknownEnumeratorsAreRefused) {
  kda_problem problem = forward();
  expect_error(kda_supports(&problem, static_cast<kda_device_type>(7), 0, nullptr),
               KDA_INVALID_ARGUMENT, "device type: found value 7");
  expect_error(kda_supports(&problem, KDA_CPU, 1, nullptr), KDA_INVALID_ARGUMENT,
               "device index: found 1");
  expect_error(kda_supports(&problem, KDA_CUDA, -1, nullptr), KDA_INVALID_ARGUMENT,
               "device index: found -1");
  expect_error(kda_problem_layout(&problem, static_cast<kda_tensor_id>(41), nullptr, nullptr),
               KDA_INVALID_ARGUMENT, "tensor id: found 41, expected 0..40");
  expect_error(kda_problem_layout(&problem, static_cast<kda_tensor_id>(-1), nullptr, nullptr),
               KDA_INVALID_ARGUMENT, "tensor id: found -1");
  kda_problem other;
  expect_error(kda_problem_make(&other, static_cast<kda_operation>(11), 1, 1, 1, 1, 1, 1, KDA_F32),
               KDA_INVALID_ARGUMENT, "operation: found value 11, expected 0..10");
  for (const int32_t io : {int32_t{KDA_NONE}, int32_t{KDA_I32}, 7, -1}) {
    expect_error(
        kda_problem_make(&other, KDA_CHUNK_FORWARD, 1, 1, 1, 1, 1, 1, static_cast<kda_dtype>(io)),
        KDA_INVALID_ARGUMENT, ("io: found value " + std::to_string(io)).c_str());
  }
  kda_tensor_spec spec;
  expect_error(kda_tensor_spec_at(static_cast<kda_operation>(-1), 0, &spec), KDA_INVALID_ARGUMENT,
               "operation: found value -1");
  problem.operation = 77;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "operation: found value 77");
  problem = forward();
  problem.gate = -3;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "gate: found value -3");
  problem = forward();
  problem.tensors[KDA_Q].dtype = 12;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "q: found dtype value");
  problem = forward();
  problem.tensors[60].dtype = KDA_F32;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "tensors[60]: found dtype 3, expected KDA_NONE: tensors are 0..40");
  problem = forward();
  problem.tensors[KDA_Q].rank = 1 << 30;
  expect_error(kda_supports(&problem, KDA_CPU, 0, nullptr), KDA_INVALID_ARGUMENT,
               "q: found rank 1073741824");
  EXPECT_STREQ(kda_status_name(static_cast<kda_status>(99)), "unknown status");
  EXPECT_STREQ(kda_status_name(KDA_UNSUPPORTED), "unsupported");
  EXPECT_EQ(kda_device_count(static_cast<kda_device_type>(9)), 0);
  EXPECT_EQ(kda_device_count(KDA_CPU), 1);
}

TEST(CApi, LayoutAndBytes) {
  kda_problem problem = forward();
  problem.tensors[KDA_FINAL_STATE].dtype = KDA_F32;
  problem.state_v_first = 1;
  kda_tensor_layout layout;
  size_t bytes = 0;
  ASSERT_EQ(kda_problem_layout(&problem, KDA_FINAL_STATE, &layout, &bytes), KDA_OK);
  EXPECT_EQ(layout.rank, 4);
  EXPECT_EQ(layout.shape[2], 24);
  EXPECT_EQ(layout.shape[3], 16);
  EXPECT_EQ(layout.stride[2], 16);
  EXPECT_EQ(bytes, 4u * 16 * 24 * 4);
  ASSERT_EQ(kda_problem_layout(&problem, KDA_H, &layout, &bytes), KDA_OK);
  EXPECT_EQ(layout.dtype, KDA_NONE) << "absent: the shape that it would have";
  EXPECT_EQ(layout.shape[0], 2);
  EXPECT_EQ(bytes, 0u);
}

TEST(CApi, SignatureAgreesWithCpp) {
  for (int32_t op = 0; op < kda::kOperationCount; ++op) {
    const auto specs = kda::tensors_of(static_cast<kda::Operation>(op));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      kda_tensor_spec spec;
      ASSERT_EQ(kda_tensor_spec_at(static_cast<kda_operation>(op), static_cast<int32_t>(i), &spec),
                KDA_OK);
      EXPECT_EQ(spec.id, static_cast<int32_t>(specs[i].id));
      EXPECT_EQ(spec.is_output != 0, specs[i].role == kda::Role::kOutput);
      EXPECT_EQ(spec.required != 0, specs[i].required);
      EXPECT_EQ(spec.name, kda::name_of(specs[i].id));
      EXPECT_EQ(spec.shape, specs[i].shape);
      EXPECT_EQ(spec.dtypes, kda::describe(specs[i].dtypes));
      EXPECT_EQ(spec.about, specs[i].about);
    }
    kda_tensor_spec spec;
    expect_error(kda_tensor_spec_at(static_cast<kda_operation>(op),
                                    static_cast<int32_t>(specs.size()), &spec),
                 KDA_INVALID_ARGUMENT, "index: found " + std::to_string(specs.size()));
    expect_error(kda_tensor_spec_at(static_cast<kda_operation>(op), -1, &spec),
                 KDA_INVALID_ARGUMENT, "index: found -1");
  }
}

TEST(CApi, ImplementationsAgreeWithCpp) {
  const auto rows = kda::implementations();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    kda_implementation row;
    ASSERT_EQ(kda_implementation_at(static_cast<int32_t>(i), &row), KDA_OK);
    EXPECT_EQ(row.name, rows[i].name);
    EXPECT_EQ(row.family, rows[i].family);
    EXPECT_EQ(row.operation, static_cast<int32_t>(rows[i].operation));
    EXPECT_EQ(row.device_type, static_cast<int32_t>(rows[i].device));
    EXPECT_EQ(row.features, rows[i].features);
  }
  kda_implementation row;
  expect_error(kda_implementation_at(static_cast<int32_t>(rows.size()), &row), KDA_INVALID_ARGUMENT,
               "index: found");
  expect_error(kda_implementation_at(-1, &row), KDA_INVALID_ARGUMENT, "index: found -1");
}

TEST(CApi, LastErrorIsPerThreadAndClearedBySuccess) {
  kda_problem problem = forward();
  EXPECT_STREQ(kda_last_error(), "");
  EXPECT_NE(kda_problem_layout(nullptr, KDA_Q, nullptr, nullptr), KDA_OK);
  EXPECT_STRNE(kda_last_error(), "");
  std::string elsewhere = "?";
  std::thread([&] { elsewhere = kda_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_EQ(kda_problem_layout(&problem, KDA_Q, nullptr, nullptr), KDA_OK);
  EXPECT_STREQ(kda_last_error(), "");
}

TEST(CApi, FailedCreationLeavesNoPlan) {
  kda_problem problem = forward();
  problem.K = 0;
  auto* plan = reinterpret_cast<kda_plan*>(&problem);
  expect_error(kda_plan_create(&problem, KDA_CPU, 0, nullptr, &plan), KDA_INVALID_ARGUMENT,
               "size K: found 0");
  EXPECT_EQ(plan, nullptr);
}

TEST(CApi, Version) { EXPECT_STREQ(kda_version(), kda::version()); }

}  // namespace
