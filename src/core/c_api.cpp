#include "kda/c_api.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "kda/kda.h"

struct kda_plan {
  kda::Plan plan;
};

namespace {

using kda::Status;
using kda::StatusCode;

static_assert(static_cast<int>(KDA_NUM_ACCEPTED) + 1 == kda::kTensorCount);
static_assert(kda::kTensorCount <= KDA_MAX_TENSORS);
static_assert(static_cast<int>(KDA_INTRA_BACKWARD) + 1 == kda::kOperationCount);

thread_local std::string last_error;

kda_status report(StatusCode code, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // no memory for the text; the code still tells
  }
  return static_cast<kda_status>(code);
}

/// Runs `body`, turning what it throws into a status: no exception crosses the C interface.
template <class Body>
kda_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    return report(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return report(StatusCode::kOutOfMemory, "out of host memory");
  } catch (const std::exception& error) {
    return report(StatusCode::kInternal, error.what());
  } catch (...) {
    return report(StatusCode::kInternal, "unknown exception");
  }
}

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

Status unknown_operation(kda_operation operation) {
  return invalid(fmt::format("operation: found value {}, expected 0..{}",
                             static_cast<int32_t>(operation), kda::kOperationCount - 1));
}

Status null_pointer(std::string_view name, std::string_view type) {
  return invalid(fmt::format("{}: null pointer, expected the address of a {}", name, type));
}

/// Null or uninitialised structures, and those of another header: every size is one version.
template <class Struct>
Status check_struct(const Struct* value, const char* name) {
  if (value == nullptr) return null_pointer(name, name);
  if (value->struct_size != sizeof(Struct)) {
    const bool makes = std::string_view(name) == "kda_problem";
    return invalid(
        fmt::format("{}: struct_size is {}, expected {}; call {}_init{} first, with the "
                    "header of the library that is linked ({})",
                    name, value->struct_size, sizeof(Struct), name,
                    makes ? " or kda_problem_make" : "", kda::version()));
  }
  return {};
}

kda::TensorLayout from_c(const kda_tensor_layout& given) {
  kda::TensorLayout layout;
  layout.dtype = static_cast<kda::DType>(given.dtype);
  layout.rank = given.rank;
  std::copy_n(given.shape, 4, layout.shape.begin());
  std::copy_n(given.stride, 4, layout.stride.begin());
  return layout;
}

kda_tensor_layout to_c(const kda::TensorLayout& layout) {
  kda_tensor_layout result{static_cast<int32_t>(layout.dtype), layout.rank, {}, {}};
  std::copy_n(layout.shape.begin(), 4, result.shape);
  std::copy_n(layout.stride.begin(), 4, result.stride);
  return result;
}

kda::Result<kda::Problem> from_c(const kda_problem* given) {
  if (Status status = check_struct(given, "kda_problem"); !status.ok()) return status;
  kda::Problem problem;
  problem.operation = static_cast<kda::Operation>(given->operation);
  problem.gate = static_cast<kda::Gate>(given->gate);
  problem.sizes = {given->B, given->T, given->H, given->HV, given->K, given->V, given->N, given->P};
  if (given->has_scale != 0) problem.scale = given->scale;
  problem.lower_bound = given->lower_bound;
  problem.qk_l2norm = given->qk_l2norm != 0;
  problem.beta_sigmoid = given->beta_sigmoid != 0;
  problem.allow_neg_eigval = given->allow_neg_eigval != 0;
  problem.state_v_first = given->state_v_first != 0;
  problem.chunk_size = given->chunk_size;
  for (int i = 0; i < KDA_MAX_TENSORS; ++i) {
    if (given->tensors[i].dtype == KDA_NONE) continue;
    if (i >= kda::kTensorCount) {
      return invalid(
          fmt::format("tensors[{}]: found dtype {}, expected KDA_NONE: tensors are 0..{}; "
                      "call kda_problem_init first",
                      i, given->tensors[i].dtype, kda::kTensorCount - 1));
    }
    problem.set(static_cast<kda::TensorId>(i), from_c(given->tensors[i]));
  }
  return problem;
}

kda::Result<kda::Plan> create(const kda_problem* problem, kda_device_type device_type,
                              int32_t device_index, const kda_options* given) {
  kda::Result<kda::Problem> converted = from_c(problem);
  if (!converted.ok()) return converted.status();
  kda::Options options;
  if (given != nullptr) {
    if (Status status = check_struct(given, "kda_options"); !status.ok()) return status;
    if (given->implementation != nullptr) options.implementation = given->implementation;
    options.threads = given->threads;
    options.workspace_limit = given->workspace_limit;
  }
  return kda::make_plan(*converted, {static_cast<kda::DeviceType>(device_type), device_index},
                        options);
}

}  // namespace

extern "C" {

const char* kda_version(void) { return kda::version(); }

const char* kda_last_error(void) { return last_error.c_str(); }

const char* kda_status_name(kda_status status) {
  return kda::name_of(static_cast<StatusCode>(status));
}

void kda_problem_init(kda_problem* problem) {
  if (problem == nullptr) return;
  *problem = {};
  problem->struct_size = sizeof *problem;
  problem->B = problem->H = problem->HV = 1;
  problem->chunk_size = 64;
}

kda_status kda_problem_make(kda_problem* problem, kda_operation operation, int64_t B, int64_t T,
                            int64_t H, int64_t HV, int64_t K, int64_t V, kda_dtype io) {
  return guarded([&]() -> Status {
    if (problem == nullptr) return null_pointer("kda_problem", "kda_problem");
    const auto wanted = static_cast<kda::Operation>(operation);
    if (kda::tensors_of(wanted).empty()) return unknown_operation(operation);
    if (io < KDA_BF16 || io > KDA_F64) {
      return invalid(
          fmt::format("io: found value {}, expected KDA_BF16, KDA_F16, KDA_F32 or KDA_F64",
                      static_cast<int32_t>(io)));
    }
    const auto made = kda::Problem::make(wanted, {.B = B, .T = T, .H = H, .HV = HV, .K = K, .V = V},
                                         static_cast<kda::DType>(io));
    kda_problem_init(problem);
    problem->operation = operation;
    problem->B = B;
    problem->T = T;
    problem->H = H;
    problem->HV = HV;
    problem->K = K;
    problem->V = V;
    for (int i = 0; i < kda::kTensorCount; ++i) {
      problem->tensors[i] = to_c(made[static_cast<kda::TensorId>(i)]);
    }
    return {};
  });
}

void kda_options_init(kda_options* options) {
  if (options == nullptr) return;
  *options = {};
  options->struct_size = sizeof *options;
}

void kda_args_init(kda_args* args) {
  if (args == nullptr) return;
  *args = {};
  args->struct_size = sizeof *args;
}

kda_status kda_problem_layout(const kda_problem* problem, kda_tensor_id id,
                              kda_tensor_layout* layout, size_t* bytes) {
  return guarded([&]() -> Status {
    kda::Result<kda::Problem> converted = from_c(problem);
    if (!converted.ok()) return converted.status();
    kda::Result<kda::Problem> validated = converted->validated();
    if (!validated.ok()) return validated.status();
    if (static_cast<int>(id) < 0 || static_cast<int>(id) >= kda::kTensorCount) {
      return invalid(fmt::format("tensor id: found {}, expected 0..{}", static_cast<int>(id),
                                 kda::kTensorCount - 1));
    }
    const auto tensor = static_cast<kda::TensorId>(id);
    const bool present = validated->has(tensor);
    if (layout != nullptr) {
      *layout = to_c(present ? (*validated)[tensor] : validated->canonical_layout(tensor));
    }
    if (bytes != nullptr) *bytes = static_cast<size_t>(validated->bytes(tensor));
    return {};
  });
}

kda_status kda_plan_create(const kda_problem* problem, kda_device_type device_type,
                           int32_t device_index, const kda_options* options, kda_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return null_pointer("plan", "kda_plan*");
    *plan = nullptr;
    kda::Result<kda::Plan> made = create(problem, device_type, device_index, options);
    if (!made.ok()) return made.status();
    *plan = new kda_plan{std::move(*made)};
    return {};
  });
}

void kda_plan_destroy(kda_plan* plan) { delete plan; }

size_t kda_plan_workspace_bytes(const kda_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

const char* kda_plan_implementation(const kda_plan* plan) {
  return plan == nullptr ? "" : plan->plan.implementation().data();
}

kda_status kda_plan_run(const kda_plan* plan, const kda_args* args, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return null_pointer("plan", "kda_plan");
    if (Status status = check_struct(args, "kda_args"); !status.ok()) return status;
    kda::Args converted;
    std::copy_n(args->data, kda::kTensorCount, converted.data.begin());
    converted.workspace = args->workspace;
    converted.workspace_bytes = args->workspace_bytes;
    return plan->plan.run(converted, stream);
  });
}

kda_status kda_supports(const kda_problem* problem, kda_device_type device_type,
                        int32_t device_index, const kda_options* options) {
  return guarded([&] { return create(problem, device_type, device_index, options).status(); });
}

kda_status kda_tensor_spec_at(kda_operation operation, int32_t index, kda_tensor_spec* spec) {
  return guarded([&]() -> Status {
    if (spec == nullptr) return null_pointer("spec", "kda_tensor_spec");
    const auto specs = kda::tensors_of(static_cast<kda::Operation>(operation));
    if (specs.empty()) return unknown_operation(operation);
    if (index < 0 || static_cast<size_t>(index) >= specs.size()) {
      return invalid(fmt::format("index: found {}, expected 0..{}", index,
                                 static_cast<int64_t>(specs.size()) - 1));
    }
    const kda::TensorSpec& row = specs[static_cast<size_t>(index)];
    *spec = {static_cast<int32_t>(row.id),
             row.role == kda::Role::kOutput ? 1 : 0,
             row.required ? 1 : 0,
             kda::name_of(row.id).data(),
             row.shape.data(),
             kda::describe(row.dtypes).data(),
             row.about.data()};
    return {};
  });
}

kda_status kda_implementation_at(int32_t index, kda_implementation* implementation) {
  return guarded([&]() -> Status {
    if (implementation == nullptr) {
      return null_pointer("implementation", "kda_implementation");
    }
    const auto rows = kda::implementations();
    if (index < 0 || static_cast<size_t>(index) >= rows.size()) {
      return invalid(fmt::format("index: found {}, expected 0..{}", index,
                                 static_cast<int64_t>(rows.size()) - 1));
    }
    const kda::ImplementationInfo& row = rows[static_cast<size_t>(index)];
    *implementation = {row.name.data(), row.family.data(), static_cast<int32_t>(row.operation),
                       static_cast<int32_t>(row.device), row.features.data()};
    return {};
  });
}

int32_t kda_device_count(kda_device_type device_type) {
  int32_t count = 0;
  guarded([&]() -> Status {
    for (const kda::DeviceInfo& info : kda::devices()) {
      count += static_cast<int32_t>(info.device.type) == static_cast<int32_t>(device_type);
    }
    return {};
  });
  return count;
}

}  // extern "C"
