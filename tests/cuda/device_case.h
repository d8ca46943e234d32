// Tensors in device memory for tests that run plans themselves.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "kda/plan.h"
#include "support/per_family.h"

namespace kda::test {

/// "" or why nothing can run on a GPU here.
std::string no_gpu();

#define KDA_NEEDS_GPU() \
  if (const std::string reason = kda::test::no_gpu(); !reason.empty()) GTEST_SKIP() << reason

/// The same for a Hopper GPU and a build with code for it.
std::string no_hopper();

#define KDA_NEEDS_HOPPER() \
  if (const std::string reason = kda::test::no_hopper(); !reason.empty()) GTEST_SKIP() << reason

/// "" or, where less device memory is free, what is needed and what there is. Errors throw.
std::string too_little_memory(std::size_t bytes);

#define KDA_NEEDS_MEMORY(bytes)                                                        \
  if (const std::string reason = kda::test::too_little_memory(bytes); !reason.empty()) \
  GTEST_SKIP() << reason

Options choosing(std::string_view implementation);

/// Throws kda::Error with the CUDA error.
void require(cudaError_t error);

/// Device memory of NaN bytes that frees itself.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes = 0);
  explicit DeviceBuffer(const HostTensor& tensor);
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  void* address() const { return address_; }
  std::byte* at(std::size_t offset) const { return static_cast<std::byte*>(address_) + offset; }
  void poison();
  void load(const HostTensor& tensor);
  HostTensor store(DType dtype, std::vector<int64_t> shape) const;

 private:
  void* address_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A problem with all its tensors and its workspace on a device, which has to be the current one.
class DeviceCase {
 public:
  DeviceCase(const Problem& problem, const TensorMap& inputs, int device = 0,
             const Options& options = {});

  const Plan& plan() const { return plan_; }
  const Args& args() const { return args_; }
  DeviceBuffer& operator[](TensorId id) { return buffers_.at(id); }
  void poison_outputs();
  /// Runs and waits. Throws kda::Error.
  void run(cudaStream_t stream = nullptr);
  TensorMap outputs() const;

 private:
  Plan plan_;
  std::map<TensorId, DeviceBuffer> buffers_;
  DeviceBuffer workspace_;
  Args args_;
};

/// Tests named after the ids of public fault reports, on each family of CUDA rows.
class CudaReports : public PerFamily {
 protected:
  DeviceCase on_device(const Problem& problem, const TensorMap& inputs) const {
    return {problem, inputs, 0, options()};
  }
};

/// A stream that does not wait for the default one.
class Stream {
 public:
  Stream() { require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)

 private:
  cudaStream_t stream_ = nullptr;
};

/// A captured run.
class Graph {
 public:
  Graph(const Plan& plan, const Args& args, cudaStream_t stream);
  ~Graph();
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream);

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// Every output bit for bit.
void expect_same_bits(const TensorMap& a, const TensorMap& b);

/// Entries [begin, begin + count) of a dimension behind those of extent 1.
HostTensor rows_of(const HostTensor& tensor, int64_t dim, int64_t begin, int64_t count);
/// Entry `index` of the first one.
inline HostTensor row_of(const HostTensor& tensor, int64_t index) {
  return rows_of(tensor, 0, index, 1);
}

/// Forward and backward over chunks, and the recurrent operation.
std::vector<Problem> problems_of(const Case& c);

/// Packed, with everything inside: the longest chain of kernels.
CaseSpec packed_spec(std::vector<int64_t> cu);

}  // namespace kda::test
