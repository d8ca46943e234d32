#include "cuda/device_case.h"

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kda/backend.h"
#include "support/calls.h"

namespace kda::test {
namespace {

constexpr int kNaN = 0xFF;

}  // namespace

KDA_FOR_EACH_CUDA_FAMILY(CudaReports);

std::string no_gpu() { return cuda_unavailable_reason(); }

std::string no_hopper() {
  if (std::string reason = no_gpu(); !reason.empty()) return reason;
#if !KDA_HAS_SM90
  return "this build holds no code for compute capability 9.0";
#endif
  int major = 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9 ? "" : "the GPU is no Hopper";
}

std::string too_little_memory(std::size_t bytes) {
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total));
  if (free >= bytes) return "";
  return fmt::format("needs {} bytes of free device memory, found {}", bytes, free);
}

Options choosing(std::string_view implementation) {
  Options options;
  options.implementation = implementation;
  return options;
}

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status(StatusCode::kDeviceError, cudaGetErrorString(error)));
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  require(cudaMalloc(&address_, std::max<std::size_t>(bytes, 1)));
  poison();
}

DeviceBuffer::DeviceBuffer(const HostTensor& tensor) : DeviceBuffer(tensor.bytes.size()) {
  load(tensor);
}

DeviceBuffer::~DeviceBuffer() { cudaFree(address_); }

void DeviceBuffer::poison() {
  // Without it, initcheck finds reads of what nobody wrote.
  static const bool wanted = std::getenv("KDA_TEST_NO_POISON") == nullptr;
  if (!wanted) return;
  require(cudaMemset(address_, kNaN, bytes_));
  // The fill is not waited for, and streams that do not wait for the default one could overtake it.
  require(cudaDeviceSynchronize());
}

void DeviceBuffer::load(const HostTensor& tensor) {
  require(cudaMemcpy(address_, tensor.bytes.data(), tensor.bytes.size(), cudaMemcpyHostToDevice));
  require(cudaDeviceSynchronize());  // as above
}

HostTensor DeviceBuffer::store(DType dtype, std::vector<int64_t> shape) const {
  HostTensor tensor(dtype, std::move(shape));
  require(cudaMemcpy(tensor.bytes.data(), address_, tensor.bytes.size(), cudaMemcpyDeviceToHost));
  return tensor;
}

DeviceCase::DeviceCase(const Problem& problem, const TensorMap& inputs, int device,
                       const Options& options)
    : plan_(make_plan(problem, {DeviceType::kCuda, device}, options).value()),
      workspace_(plan_.workspace_bytes()) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    const auto bytes = static_cast<std::size_t>(plan_.problem().bytes(spec.id));
    const auto [entry, _] = spec.role == Role::kInput
                                ? buffers_.emplace(spec.id, DeviceBuffer(inputs.at(spec.id)))
                                : buffers_.emplace(spec.id, DeviceBuffer(bytes));
    args_.out(spec.id, entry->second.address());
  }
  args_.workspace = workspace_.address();
  args_.workspace_bytes = plan_.workspace_bytes();
}

void DeviceCase::poison_outputs() {
  for (const TensorSpec& spec : tensors_of(plan_.problem().operation)) {
    if (spec.role == Role::kOutput && plan_.problem().has(spec.id)) buffers_.at(spec.id).poison();
  }
}

void DeviceCase::run(cudaStream_t stream) {
  if (Status status = plan_.run(args_, stream); !status.ok()) throw Error(status);
  count_call(plan_.implementation());
  require(cudaStreamSynchronize(stream));
}

TensorMap DeviceCase::outputs() const {
  TensorMap result;
  for (const TensorSpec& spec : tensors_of(plan_.problem().operation)) {
    if (spec.role == Role::kInput || !plan_.problem().has(spec.id)) continue;
    const TensorLayout& layout = plan_.problem()[spec.id];
    result[spec.id] = buffers_.at(spec.id).store(
        layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
  }
  return result;
}

void expect_same_bits(const TensorMap& a, const TensorMap& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, tensor] : a) EXPECT_EQ(tensor.bytes, b.at(id).bytes) << name_of(id);
}

HostTensor rows_of(const HostTensor& tensor, int64_t dim, int64_t begin, int64_t count) {
  std::vector<int64_t> shape = tensor.shape;
  const auto at = static_cast<std::size_t>(dim);
  std::size_t row = size_of(tensor.dtype);
  for (std::size_t i = at + 1; i < shape.size(); ++i) row *= static_cast<std::size_t>(shape[i]);
  shape[at] = count;
  HostTensor part(tensor.dtype, shape);
  std::copy_n(tensor.bytes.begin() + static_cast<std::ptrdiff_t>(row) * begin, part.bytes.size(),
              part.bytes.begin());
  return part;
}

std::vector<Problem> problems_of(const Case& c) {
  return {forward_problem(c), backward_problem(c), recurrent_problem(c)};
}

CaseSpec packed_spec(std::vector<int64_t> cu) {
  CaseSpec spec;
  spec.sizes = {1, 300, 2, 4, 64, 48, 0, 0};
  spec.io = DType::kBF16;
  spec.gate = Gate::kSoftplus;
  spec.qk_l2norm = true;
  spec.beta_sigmoid = true;
  spec.cu_seqlens = std::move(cu);
  return spec;
}

Graph::Graph(const Plan& plan, const Args& args, cudaStream_t stream) {
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status status = plan.run(args, stream);
  require(cudaStreamEndCapture(stream, &graph_));
  if (!status.ok()) throw Error(status);
  count_call(plan.implementation());
  require(cudaGraphInstantiate(&executable_, graph_, 0));
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  if (graph_ != nullptr) cudaGraphDestroy(graph_);
}

void Graph::launch(cudaStream_t stream) {
  require(cudaGraphLaunch(executable_, stream));
  require(cudaStreamSynchronize(stream));
}

}  // namespace kda::test
