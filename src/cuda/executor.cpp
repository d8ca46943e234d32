#include "cuda/executor.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "core/shape.h"
#include "core/view.h"
#include "cuda/device.h"
#include "cuda/device_check.h"
#include "cuda/generic/stages.h"
#include "cuda/launch.h"

namespace kda::cuda {
namespace {

constexpr std::size_t kAlignment = 256;

/// Takes back an error of a call of ours, never one that the caller has yet to read.
void forget(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}

/// No output has an element: without a token there are none but states and the parameters'
/// gradients.
bool writes_nothing(const Problem& problem) {
  const auto specs = tensors_of(problem.operation);
  return std::none_of(specs.begin(), specs.end(), [&](const TensorSpec& spec) {
    return spec.role == Role::kOutput && problem.has(spec.id) &&
           count_elements(problem[spec.id]) > 0;
  });
}

Status check_address(std::string_view name, const void* address, const Device& device) {
  AddressFacts facts;
  facts.error = cudaPointerGetAttributes(&facts.attributes, address);
  if (facts.error == cudaSuccess && facts.attributes.type == cudaMemoryTypeUnregistered) {
    int pageable = 0;
    cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device.index);
    facts.pageable = pageable != 0;
  }
  return check_address_facts(name, address, facts, device);
}

}  // namespace

Status check_device(const Device& device) {
  if (std::string reason = cuda_device_problem(); !reason.empty()) {
    return {StatusCode::kUnsupported, reason};
  }
  DeviceFacts facts{device};
  if (const cudaError_t error = cudaGetDeviceCount(&facts.devices); error != cudaSuccess) {
    return device_error("number of devices", error);
  }
  if (device.index >= 0 && device.index < facts.devices) {
    for (const auto& [part, attribute] :
         {std::pair{&facts.major, cudaDevAttrComputeCapabilityMajor},
          std::pair{&facts.minor, cudaDevAttrComputeCapabilityMinor}}) {
      const cudaError_t error = cudaDeviceGetAttribute(part, attribute, device.index);
      forget(error);
      if (error != cudaSuccess) facts.asked = error;
    }
  }
  if (Status status = check_device_facts(facts); !status.ok()) return status;
  const DeviceGuard guard(device.index);
  if (!guard.status().ok()) return guard.status();
  cudaFuncAttributes attributes;
  facts.code = cudaFuncGetAttributes(&attributes, chunk_table_kernel());
  forget(facts.code);
  return check_device_facts(facts);
}

Status CudaExecutor::run(const Args& args, void* stream) const {
  const DeviceGuard guard(device().index);
  if (!guard.status().ok()) return guard.status();
  for (const TensorSpec& spec : tensors_of(problem().operation)) {
    if (!problem().has(spec.id) || args[spec.id] == nullptr) continue;
    Status status = check_address(name_of(spec.id), args[spec.id], device());
    if (!status.ok()) return status;
  }
  if (workspace_bytes_ > 0) {
    if (Status status = check_address("workspace", args.workspace, device()); !status.ok()) {
      return status;
    }
  }
  if (writes_nothing(problem())) return {};
  return enqueue(args, static_cast<cudaStream_t>(stream));
}

void* Scratch::bytes(int64_t count, std::size_t size) {
  const double wanted = static_cast<double>(count) * static_cast<double>(size);
  const double rounded =
      std::ceil(wanted / static_cast<double>(kAlignment)) * static_cast<double>(kAlignment);
  std::byte* const address = base_ == nullptr ? nullptr : base_ + static_cast<std::size_t>(total_);
  total_ += rounded;
  return address;
}

Tensor Scratch::tensor(std::initializer_list<int64_t> shape) {
  Tensor tensor;
  tensor.dtype = static_cast<int32_t>(fp64_ ? DType::kF64 : DType::kF32);
  int64_t count = 1;
  std::size_t dim = shape.size();
  for (auto extent = std::rbegin(shape); extent != std::rend(shape); ++extent) {
    tensor.stride[--dim] = count;
    count *= *extent;
  }
  tensor.data = bytes(count, fp64_ ? sizeof(double) : sizeof(float));
  return tensor;
}

Result<std::size_t> Scratch::total() const {
  constexpr double kMost = 1LL << 53;
  if (total_ <= kMost) return static_cast<std::size_t>(total_);
  return Status(StatusCode::kUnsupported,
                fmt::format("sizes whose workspace is {:.3g} bytes", total_));
}

Tensor tensor_of(const Problem& problem, const Args& args, TensorId id) {
  const View view = view_of(problem, args, id);
  Tensor tensor;
  tensor.data = view.data;
  tensor.dtype = static_cast<int32_t>(view.dtype);
  for (std::size_t i = 0; i < view.stride.size(); ++i) tensor.stride[i] = view.stride[i];
  return tensor;
}

Tensor state_of(const Problem& problem, const Args& args, TensorId id) {
  Tensor tensor = tensor_of(problem, args, id);
  if (problem.state_v_first) std::swap(tensor.stride[2], tensor.stride[3]);
  return tensor;
}

Heads heads_of(const Problem& problem) {
  const Sizes& sizes = problem.sizes;
  return {sizes.H, sizes.HV, sizes.HV / sizes.H, sizes.V, static_cast<int32_t>(sizes.K)};
}

GateParams gate_of(const Problem& problem, const Args& args) {
  return {tensor_of(problem, args, TensorId::kG),
          tensor_of(problem, args, TensorId::kALog),
          tensor_of(problem, args, TensorId::kDtBias),
          static_cast<int32_t>(problem.gate),
          problem.lower_bound,
          problem.gate == Gate::kLowerBound ? std::log(-problem.lower_bound) : 0};
}

bool computes_in_fp64(const Problem& problem) {
  for (const TensorLayout& layout : problem.tensors) {
    if (layout.dtype == DType::kF64) return true;
  }
  return false;
}

Sequences sequences_of(const Problem& problem, const Args& args, Scratch& scratch) {
  Sequences sequences;
  sequences.count = problem.sequences();
  sequences.T = problem.sizes.T;
  sequences.C = problem.chunk_size;
  sequences.chunk_rows = problem.chunk_rows();
  sequences.chunks_per_row = problem.packed() ? 0 : sequences.chunk_rows / problem.sizes.B;
  if (!problem.packed()) return sequences;
  sequences.cu = tensor_of(problem, args, TensorId::kCuSeqlens);
  sequences.offsets = static_cast<int64_t*>(scratch.bytes(sequences.count + 1, sizeof(int64_t)));
  sequences.entries =
      static_cast<ChunkEntry*>(scratch.bytes(sequences.chunk_rows, sizeof(ChunkEntry)));
  return sequences;
}

}  // namespace kda::cuda
