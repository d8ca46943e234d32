#include "placement_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace kda::cases {
namespace {

constexpr std::size_t kColdBytes = std::size_t{256} << 20;  // five times the 50 MB of a Hopper L2
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears what can be cleared
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError;
  return {code, fmt::format("CUDA: {} failed: {}", what, cudaGetErrorString(error))};
}

/// Device memory that frees itself.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : address_(std::exchange(other.address_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(address_, other.address_);
    return *this;
  }
  ~Buffer() { cudaFree(address_); }

  static Result<Buffer> allocate(std::size_t bytes) {
    Buffer buffer;
    Status status = status_of(cudaMalloc(&buffer.address_, bytes), "allocation");
    if (!status.ok()) return status;
    return buffer;
  }
  void* address() const { return address_; }

 private:
  void* address_ = nullptr;
};

/// Time on the device between two points of the default stream.
class Stopwatch {
 public:
  Stopwatch() {
    cudaEventCreate(&start_);
    cudaEventCreate(&stop_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }

  void start() { cudaEventRecord(start_, nullptr); }
  /// Waits for everything since start.
  Result<double> stop() {
    cudaEventRecord(stop_, nullptr);
    float milliseconds = 0;
    Status status = status_of(cudaEventSynchronize(stop_), "a run");
    if (status.ok()) {
      status = status_of(cudaEventElapsedTime(&milliseconds, start_, stop_), "timing");
    }
    if (!status.ok()) return status;
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

class CudaPlacement final : public Placement {
 public:
  Result<void*> input(const HostTensor& tensor) override { return upload(tensor); }

  Result<void*> output(HostTensor& tensor) override {
    Result<void*> address = upload(tensor);
    if (address.ok()) outputs_.emplace_back(&tensor, *address);
    return address;
  }

  Result<void*> workspace(std::size_t bytes) override {
    if (bytes == 0) return static_cast<void*>(nullptr);
    return keep(bytes);
  }

  Result<double> measure(const Plan& plan, const Args& args) override {
    Stopwatch watch;
    watch.start();
    if (Status status = plan.run(args); !status.ok()) return status;
    return watch.stop();
  }

  Status fetch() override {
    for (const auto& [tensor, address] : outputs_) {
      const cudaError_t error =
          cudaMemcpy(tensor->bytes.data(), address, tensor->bytes.size(), cudaMemcpyDeviceToHost);
      if (Status status = status_of(error, "copying an output"); !status.ok()) return status;
    }
    return {};
  }

  Status flush_cache() override {
    if (cold_.address() == nullptr) {
      Result<Buffer> buffer = Buffer::allocate(kColdBytes);
      if (!buffer.ok()) return buffer.status();
      cold_ = std::move(*buffer);
    }
    return status_of(cudaMemset(cold_.address(), ++pattern_, kColdBytes), "flushing the cache");
  }

  Result<double> copy_bandwidth() override {
    constexpr int kRepeats = 10;
    Result<Buffer> from = Buffer::allocate(kCopyBytes);
    Result<Buffer> to = Buffer::allocate(kCopyBytes);
    for (const Status& status : {from.status(), to.status()}) {
      if (!status.ok()) return status;
    }
    double best = 0;
    for (int i = 0; i < kRepeats; ++i) {
      Stopwatch watch;
      watch.start();
      cudaMemcpyAsync(to->address(), from->address(), kCopyBytes, cudaMemcpyDeviceToDevice,
                      nullptr);
      Result<double> seconds = watch.stop();
      if (!seconds.ok()) return seconds;
      best = std::max(best, 2.0 * static_cast<double>(kCopyBytes) / *seconds);
    }
    return best;
  }

 private:
  Result<void*> keep(std::size_t bytes) {
    Result<Buffer> buffer = Buffer::allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    buffers_.push_back(std::move(*buffer));
    return buffers_.back().address();
  }

  Result<void*> upload(const HostTensor& tensor) {
    if (tensor.bytes.empty()) return static_cast<void*>(nullptr);
    Result<void*> address = keep(tensor.bytes.size());
    if (!address.ok()) return address;
    const cudaError_t error =
        cudaMemcpy(*address, tensor.bytes.data(), tensor.bytes.size(), cudaMemcpyHostToDevice);
    if (Status status = status_of(error, "copying an input"); !status.ok()) return status;
    return address;
  }

  std::vector<Buffer> buffers_;
  std::vector<std::pair<HostTensor*, void*>> outputs_;
  Buffer cold_;
  int pattern_ = 0;
};

}  // namespace

Result<std::unique_ptr<Placement>> make_cuda_placement(int index) {
  // One device a process: the program runs everything on the device that it was told.
  if (Status status = status_of(cudaSetDevice(index), "choosing the device"); !status.ok()) {
    return status;
  }
  return std::unique_ptr<Placement>(std::make_unique<CudaPlacement>());
}

}  // namespace kda::cases
