// native_kda._native: the C interface of the library for Python.
//
// Tensors come as addresses, shapes and strides: this module knows no framework. Arrays that speak
// DLPack or the buffer protocol are turned into those numbers by describe(); Reader reads the
// tensors of a package that has DLPack's C functions (torch from 2.10 on) in a fraction of that
// time.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "kda/c_api.h"

namespace nb = nanobind;

namespace {

PyObject* unsupported_error = nullptr;  // native_kda.UnsupportedError, kept alive by the module

PyObject* exception_of(kda_status status) {
  switch (status) {
    case KDA_INVALID_ARGUMENT:
      return PyExc_ValueError;
    case KDA_UNSUPPORTED:
      return unsupported_error;
    case KDA_OUT_OF_MEMORY:
      return PyExc_MemoryError;
    default:
      return PyExc_RuntimeError;
  }
}

void check(kda_status status) {
  if (status == KDA_OK) return;
  PyErr_SetString(exception_of(status), kda_last_error());
  throw nb::python_error();
}

/// (id, dtype, shape, stride); an empty shape stands for the one that the sizes give.
void set_tensor(kda_problem& problem, nb::handle item) {
  const auto row = nb::cast<nb::tuple>(item);
  const auto id = nb::cast<int>(row[0]);
  if (id < 0 || id >= KDA_MAX_TENSORS) throw nb::value_error("tensor id out of range");
  kda_tensor_layout& layout = problem.tensors[id];
  layout.dtype = nb::cast<int32_t>(row[1]);
  const auto shape = nb::cast<nb::tuple>(row[2]);
  const auto stride = nb::cast<nb::tuple>(row[3]);
  layout.rank = static_cast<int32_t>(shape.size());
  if (shape.size() > 4 || shape.size() != stride.size()) {
    throw nb::value_error("a tensor has at most 4 dimensions and a stride for each");
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    layout.shape[i] = nb::cast<int64_t>(shape[i]);
    layout.stride[i] = nb::cast<int64_t>(stride[i]);
  }
}

/// sizes: (B, T, H, HV, K, V, N, P). options: (gate, lower_bound, scale or None, qk_l2norm,
/// beta_sigmoid, allow_neg_eigval, state_v_first, chunk_size).
kda_problem problem_of(int operation, nb::tuple sizes, nb::tuple options, nb::tuple tensors) {
  if (sizes.size() != 8 || options.size() != 8) {
    throw nb::value_error("expected 8 sizes and 8 options");
  }
  kda_problem problem;
  kda_problem_init(&problem);
  problem.operation = operation;
  int64_t* const fields[] = {&problem.B, &problem.T, &problem.H, &problem.HV,
                             &problem.K, &problem.V, &problem.N, &problem.P};
  for (size_t i = 0; i < 8; ++i) *fields[i] = nb::cast<int64_t>(sizes[i]);
  problem.gate = nb::cast<int32_t>(options[0]);
  problem.lower_bound = nb::cast<double>(options[1]);
  problem.has_scale = options[2].is_none() ? 0 : 1;
  if (problem.has_scale != 0) problem.scale = nb::cast<double>(options[2]);
  problem.qk_l2norm = nb::cast<bool>(options[3]);
  problem.beta_sigmoid = nb::cast<bool>(options[4]);
  problem.allow_neg_eigval = nb::cast<bool>(options[5]);
  problem.state_v_first = nb::cast<bool>(options[6]);
  problem.chunk_size = nb::cast<int32_t>(options[7]);
  for (nb::handle item : tensors) set_tensor(problem, item);
  return problem;
}

/// A plan and the ids of its tensors, in the order in which run() gets their addresses.
class Plan {
 public:
  Plan(int operation, nb::tuple sizes, nb::tuple options, nb::tuple tensors, int device_type,
       int device_index, const std::string& implementation, int threads) {
    const kda_problem problem = problem_of(operation, sizes, options, tensors);
    for (nb::handle item : tensors) {
      ids_[count_++] = nb::cast<int>(nb::cast<nb::tuple>(item)[0]);
    }
    kda_options choice;
    kda_options_init(&choice);
    choice.implementation = implementation.c_str();
    choice.threads = threads;
    check(kda_plan_create(&problem, static_cast<kda_device_type>(device_type), device_index,
                          &choice, &plan_));
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { kda_plan_destroy(plan_); }

  const char* implementation() const { return kda_plan_implementation(plan_); }
  size_t workspace_bytes() const { return kda_plan_workspace_bytes(plan_); }

  void run(nb::tuple addresses, uintptr_t workspace, size_t workspace_bytes,
           uintptr_t stream) const {
    run_with(
        addresses, [](nb::handle item) { return nb::cast<uintptr_t>(item); }, workspace,
        workspace_bytes, stream);
  }

  /// `address` turns an item of `tensors` into its address.
  template <class Address>
  void run_with(nb::tuple tensors, const Address& address, uintptr_t workspace,
                size_t workspace_bytes, uintptr_t stream) const {
    if (tensors.size() != count_) throw nb::value_error("one address a tensor is needed");
    kda_args args;
    kda_args_init(&args);
    for (size_t i = 0; i < count_; ++i) {
      args.data[ids_[i]] = reinterpret_cast<void*>(address(tensors[i]));
    }
    args.workspace = reinterpret_cast<void*>(workspace);
    args.workspace_bytes = workspace_bytes;
    kda_status status;
    {
      const nb::gil_scoped_release release;
      status = kda_plan_run(plan_, &args, reinterpret_cast<void*>(stream));
    }
    check(status);
  }

 private:
  std::array<int, KDA_MAX_TENSORS> ids_{};
  size_t count_ = 0;
  kda_plan* plan_ = nullptr;
};

/// The table of C functions that DLPack 1.2 defines for a package of tensors, as far as it is used.
struct ExchangeTable {
  uint32_t major;
  uint32_t minor;
  ExchangeTable* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* tensor);
  void* current_stream;
};

/// Reads the tensors of one package through its table, a tenth of a microsecond each.
class Reader {
 public:
  Reader(nb::capsule table, nb::tuple types) : keep_(table), types_(types) {
    table_ = static_cast<const ExchangeTable*>(table.data("dlpack_exchange_api"));
    if (table_ == nullptr || table_->major != 1 || table_->tensor_from_object == nullptr) {
      throw nb::value_error("expected a table of version 1 of DLPack's C functions");
    }
  }

  /// Equal for tensors of equal dtypes, devices, shapes and strides; None is a tensor too. None if
  /// one is of another type than those that the reader was made for, cannot be read, or is to be
  /// read as its negative.
  nb::object key(nb::tuple tensors) const {
    std::string text;
    text.reserve(96 * tensors.size());
    for (nb::handle item : tensors) {
      if (item.is_none()) {
        text.push_back(0);
        continue;
      }
      nb::dlpack::dltensor tensor;
      if (!is_plain(item)) return nb::none();
      if (table_->tensor_from_object(item.ptr(), &tensor) != 0) {
        PyErr_Clear();
        return nb::none();
      }
      if (may_be_negated(tensor) && nb::cast<bool>(item.attr("is_neg")())) return nb::none();
      text.push_back(static_cast<char>(1 + tensor.ndim));
      append(text, &tensor.dtype, sizeof tensor.dtype);
      append(text, &tensor.device, sizeof tensor.device);
      const size_t bytes = static_cast<size_t>(tensor.ndim) * sizeof(int64_t);
      append(text, tensor.shape, bytes);
      append(text, tensor.strides, bytes);
    }
    return nb::bytes(text.data(), text.size());
  }

  void run(const Plan& plan, nb::tuple tensors, uintptr_t workspace, size_t workspace_bytes,
           uintptr_t stream) const {
    const auto address = [this](nb::handle item) {
      const nb::dlpack::dltensor tensor = read(item);
      return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
    };
    plan.run_with(tensors, address, workspace, workspace_bytes, stream);
  }

 private:
  /// Subclasses may mean anything by their memory.
  bool is_plain(nb::handle item) const {
    for (nb::handle type : types_) {
      if (item.type().is(type)) return true;
    }
    return false;
  }

  /// Only the imaginary part of a complex tensor is, and all its strides are even.
  static bool may_be_negated(const nb::dlpack::dltensor& tensor) {
    return std::all_of(tensor.strides, tensor.strides + tensor.ndim,
                       [](int64_t stride) { return stride % 2 == 0; });
  }

  nb::dlpack::dltensor read(nb::handle item) const {
    nb::dlpack::dltensor tensor;
    if (table_->tensor_from_object(item.ptr(), &tensor) != 0) throw nb::python_error();
    return tensor;
  }

  static void append(std::string& text, const void* data, size_t bytes) {
    text.append(static_cast<const char*>(data), bytes);
  }

  nb::capsule keep_;
  nb::tuple types_;
  const ExchangeTable* table_ = nullptr;
};

int dtype_of(nb::dlpack::dtype dtype) {
  struct Row {
    nb::dlpack::dtype_code code;
    int bits;
    kda_dtype dtype;
  };
  constexpr Row rows[] = {
      {nb::dlpack::dtype_code::Bfloat, 16, KDA_BF16}, {nb::dlpack::dtype_code::Float, 16, KDA_F16},
      {nb::dlpack::dtype_code::Float, 32, KDA_F32},   {nb::dlpack::dtype_code::Float, 64, KDA_F64},
      {nb::dlpack::dtype_code::Int, 32, KDA_I32},     {nb::dlpack::dtype_code::Int, 64, KDA_I64},
  };
  for (const Row& row : rows) {
    if (dtype.code == static_cast<uint8_t>(row.code) && dtype.bits == row.bits &&
        dtype.lanes == 1) {
      return row.dtype;
    }
  }
  return KDA_NONE;
}

/// (address, dtype or 0 if it has no counterpart, shape, stride in elements, device type of DLPack,
/// device index). The address is valid as long as the array is.
nb::tuple describe(nb::ndarray<nb::ro> array) {
  nb::list shape;
  nb::list stride;
  for (size_t i = 0; i < array.ndim(); ++i) {
    shape.append(array.shape(i));
    stride.append(array.stride(i));
  }
  return nb::make_tuple(reinterpret_cast<uintptr_t>(array.data()), dtype_of(array.dtype()),
                        nb::tuple(shape), nb::tuple(stride), array.device_type(),
                        array.device_id());
}

nb::list tensor_specs(int operation) {
  nb::list rows;
  kda_tensor_spec spec;
  for (int i = 0;; ++i) {
    const kda_status status = kda_tensor_spec_at(static_cast<kda_operation>(operation), i, &spec);
    if (status != KDA_OK && i > 0) return rows;
    check(status);
    rows.append(nb::make_tuple(spec.id, spec.name, spec.is_output != 0, spec.required != 0,
                               spec.shape, spec.dtypes, spec.about));
  }
}

nb::list implementations() {
  nb::list rows;
  kda_implementation row;
  for (int i = 0; kda_implementation_at(i, &row) == KDA_OK; ++i) {
    rows.append(nb::make_tuple(row.name, row.family, row.operation, row.device_type, row.features));
  }
  return rows;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The C interface of native-kda.";
  nb::set_leak_warnings(false);  // plans are kept until the process ends
  unsupported_error = PyErr_NewExceptionWithDoc(
      "native_kda.UnsupportedError",
      "No implementation can do this here; the text names what is missing.",
      PyExc_NotImplementedError, nullptr);
  m.attr("UnsupportedError") = nb::handle(unsupported_error);

  nb::class_<Plan>(m, "Plan")
      .def(nb::init<int, nb::tuple, nb::tuple, nb::tuple, int, int, const std::string&, int>(),
           nb::arg("operation"), nb::arg("sizes"), nb::arg("options"), nb::arg("tensors"),
           nb::arg("device_type"), nb::arg("device_index"), nb::arg("implementation") = "",
           nb::arg("threads") = 0)
      .def_prop_ro("implementation", &Plan::implementation)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def("run", &Plan::run, nb::arg("addresses"), nb::arg("workspace"),
           nb::arg("workspace_bytes"), nb::arg("stream"));
  nb::class_<Reader>(m, "Reader")
      .def(nb::init<nb::capsule, nb::tuple>(), nb::arg("table"), nb::arg("types"))
      .def("key", &Reader::key, nb::arg("tensors"))
      .def("run", &Reader::run, nb::arg("plan"), nb::arg("tensors"), nb::arg("workspace"),
           nb::arg("workspace_bytes"), nb::arg("stream"));
  m.def("describe", &describe, nb::arg("array"));
  m.def("tensor_specs", &tensor_specs, nb::arg("operation"));
  m.def("implementations", &implementations);
  m.def(
      "device_count",
      [](int device_type) { return kda_device_count(static_cast<kda_device_type>(device_type)); },
      nb::arg("device_type"));
  // Read at every call: os.environ takes a microsecond or more, this a tenth.
  m.def(
      "environment",
      [](const char* name) {
        const char* value = std::getenv(name);
        return std::string(value == nullptr ? "" : value);
      },
      nb::arg("name"));
  m.def("version", &kda_version);
}
