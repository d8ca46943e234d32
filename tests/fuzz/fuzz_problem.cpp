// Any problem through the C interface: asking about it and planning it agree, and nothing that is
// asked for can break the library.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kda/c_api.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Takes values off the input; zeroes when it is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  template <class T>
  T take() {
    T value{};
    const std::size_t bytes = std::min(sizeof value, size_);
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    size_ -= bytes;
    return value;
  }
  bool empty() const { return size_ == 0; }

 private:
  const uint8_t* data_;
  std::size_t size_;
};

/// Small or any: most bytes give sizes that some check accepts.
int64_t take_size(Bytes& bytes) {
  const auto small = bytes.take<uint8_t>();
  return small < 0xF0 ? small % 17 : bytes.take<int64_t>();
}

void edit_tensor(Bytes& bytes, kda_tensor_layout& layout) {
  layout.dtype = bytes.take<int8_t>() % 9;
  const auto rank = bytes.take<int8_t>();
  layout.rank = rank > 60 ? rank : rank % 5;
  for (int i = 0; i < layout.rank && i < 4; ++i) {
    layout.shape[i] = take_size(bytes);
    layout.stride[i] = take_size(bytes);
  }
}

void edit(Bytes& bytes, kda_problem& problem) {
  int64_t* sizes[] = {&problem.B, &problem.T, &problem.H, &problem.HV,
                      &problem.K, &problem.V, &problem.N, &problem.P};
  int32_t* flags[] = {&problem.gate,         &problem.has_scale,        &problem.qk_l2norm,
                      &problem.beta_sigmoid, &problem.allow_neg_eigval, &problem.state_v_first,
                      &problem.chunk_size,   &problem.operation};
  const auto what = bytes.take<uint8_t>();
  if (what < 64) {
    *sizes[what % 8] = take_size(bytes);
  } else if (what < 128) {
    const auto value = bytes.take<int8_t>();
    *flags[what % 8] = value > 120 ? bytes.take<int32_t>() : value;
  } else if (what < 136) {
    problem.scale = bytes.take<double>();
  } else if (what < 144) {
    problem.lower_bound = bytes.take<double>();
  } else {
    edit_tensor(bytes, problem.tensors[what % KDA_MAX_TENSORS]);
  }
}

void check_message(kda_status status) {
  require((status == KDA_OK) == (std::strlen(kda_last_error()) == 0));
  require(std::strchr(kda_last_error(), '\n') == nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  kda_problem problem;
  const auto operation = static_cast<kda_operation>(bytes.take<uint8_t>() % 11);
  const auto io = static_cast<kda_dtype>(1 + bytes.take<uint8_t>() % 4);
  if (kda_problem_make(&problem, operation, 1, 70, 2, 4, 8, 16, io) != KDA_OK) return 0;
  while (!bytes.empty()) edit(bytes, problem);

  for (int id = 0; id < KDA_MAX_TENSORS; ++id) {
    kda_tensor_layout layout;
    std::size_t tensor_bytes = 0;
    check_message(
        kda_problem_layout(&problem, static_cast<kda_tensor_id>(id), &layout, &tensor_bytes));
  }
  const kda_status supported = kda_supports(&problem, KDA_CPU, 0, nullptr);
  check_message(supported);
  kda_plan* plan = nullptr;
  const kda_status planned = kda_plan_create(&problem, KDA_CPU, 0, nullptr, &plan);
  check_message(planned);
  require(planned == supported);
  require((plan != nullptr) == (planned == KDA_OK));
  require(planned == KDA_OK || planned == KDA_INVALID_ARGUMENT || planned == KDA_UNSUPPORTED);
  if (plan != nullptr) {
    require(std::strlen(kda_plan_implementation(plan)) > 0);
    kda_args args;
    kda_args_init(&args);
    // No addresses: refused, unless the problem has nothing to compute.
    const kda_status ran = kda_plan_run(plan, &args, nullptr);
    check_message(ran);
    require(ran == KDA_OK || ran == KDA_INVALID_ARGUMENT);
  }
  kda_plan_destroy(plan);
  return 0;
}
