#include "placement_cuda.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace kda::cases {
namespace {

// Several times the largest L2 (60 MB on H200, 126 MB on B200).
constexpr std::size_t kColdBytes = std::size_t{512} << 20;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;
constexpr int kCopies = 10;
constexpr int kNaN = 0xFF;

Status checked(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError,
          fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

/// Device memory that frees itself.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept : address_(std::exchange(other.address_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(address_, other.address_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(address_); }

  Status allocate(std::size_t bytes) {
    return checked(fmt::format("allocation of {} bytes", bytes).c_str(),
                   cudaMalloc(&address_, std::max<std::size_t>(bytes, 1)));
  }
  void* address() const { return address_; }

 private:
  void* address_ = nullptr;
};

class CudaPlacement final : public Placement {
 public:
  static Result<std::unique_ptr<Placement>> make(int index) {
    auto placement = std::make_unique<CudaPlacement>();
    if (Status s = checked("device", cudaSetDevice(index)); !s.ok()) return s;
    if (Status s = checked("stream", cudaStreamCreate(&placement->stream_)); !s.ok()) return s;
    for (cudaEvent_t* event : {&placement->start_, &placement->stop_}) {
      if (Status s = checked("event", cudaEventCreate(event)); !s.ok()) return s;
    }
    return std::unique_ptr<Placement>(std::move(placement));
  }

  ~CudaPlacement() override {
    if (start_ != nullptr) cudaEventDestroy(start_);
    if (stop_ != nullptr) cudaEventDestroy(stop_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  Result<void*> input(const HostTensor& tensor) override { return upload(tensor); }

  Result<void*> output(HostTensor& tensor) override {
    Result<void*> address = upload(tensor);
    if (address.ok()) outputs_.emplace_back(&tensor, *address);
    return address;
  }

  Result<void*> workspace(std::size_t bytes) override {
    if (bytes == 0) return static_cast<void*>(nullptr);
    DeviceMemory memory;
    if (Status s = memory.allocate(bytes); !s.ok()) return s;
    if (Status s = checked("workspace", cudaMemset(memory.address(), kNaN, bytes)); !s.ok()) {
      return s;
    }
    workspace_ = std::move(memory);
    return workspace_.address();
  }

  Result<double> measure(const Plan& plan, const Args& args) override {
    if (Status s = checked("event", cudaEventRecord(start_, stream_)); !s.ok()) return s;
    if (Status s = plan.run(args, stream_); !s.ok()) return s;
    if (Status s = checked("event", cudaEventRecord(stop_, stream_)); !s.ok()) return s;
    return elapsed();
  }

  Result<HostCost> host_cost(const Plan& plan, const Args& args) override {
    HostCost cost;
    Result<int64_t> launches = count_launches(plan, args);
    if (!launches.ok()) return launches.status();
    cost.launches = *launches;
    if (Status s = checked("run", cudaStreamSynchronize(stream_)); !s.ok()) return s;
    const auto start = std::chrono::steady_clock::now();
    if (Status s = plan.run(args, stream_); !s.ok()) return s;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (Status s = checked("run", cudaStreamSynchronize(stream_)); !s.ok()) return s;
    cost.seconds = elapsed.count();
    return cost;
  }

  Status fetch() override {
    for (const auto& [tensor, address] : outputs_) {
      Status s = checked(
          "copy to the host",
          cudaMemcpy(tensor->bytes.data(), address, tensor->bytes.size(), cudaMemcpyDeviceToHost));
      if (!s.ok()) return s;
    }
    return {};
  }

  Status flush_cache() override {
    if (cold_.address() == nullptr) {
      if (Status s = cold_.allocate(kColdBytes); !s.ok()) return s;
    }
    return checked("cache flush",
                   cudaMemsetAsync(cold_.address(), ++pattern_, kColdBytes, stream_));
  }

  Result<double> copy_bandwidth() override {
    DeviceMemory from;
    DeviceMemory to;
    for (DeviceMemory* memory : {&from, &to}) {
      if (Status s = memory->allocate(kCopyBytes); !s.ok()) return s;
    }
    std::vector<double> seconds;
    for (int i = 0; i < kCopies; ++i) {
      cudaEventRecord(start_, stream_);
      cudaMemcpyAsync(to.address(), from.address(), kCopyBytes, cudaMemcpyDeviceToDevice, stream_);
      cudaEventRecord(stop_, stream_);
      Result<double> time = elapsed();
      if (!time.ok()) return time.status();
      seconds.push_back(*time);
    }
    std::sort(seconds.begin(), seconds.end());
    return 2.0 * static_cast<double>(kCopyBytes) / seconds[kCopies / 2];
  }

 private:
  /// Nodes of the graph that one run is.
  Result<int64_t> count_launches(const Plan& plan, const Args& args) {
    Status s = checked("capture", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    if (!s.ok()) return s;
    const Status ran = plan.run(args, stream_);
    cudaGraph_t graph = nullptr;
    if (s = checked("capture", cudaStreamEndCapture(stream_, &graph)); !s.ok()) return s;
    std::size_t nodes = 0;
    s = checked("graph", cudaGraphGetNodes(graph, nullptr, &nodes));
    cudaGraphDestroy(graph);
    if (!ran.ok()) return ran;
    if (!s.ok()) return s;
    return static_cast<int64_t>(nodes);
  }

  Result<void*> upload(const HostTensor& tensor) {
    DeviceMemory memory;
    if (Status s = memory.allocate(tensor.bytes.size()); !s.ok()) return s;
    Status s =
        checked("copy to the device", cudaMemcpy(memory.address(), tensor.bytes.data(),
                                                 tensor.bytes.size(), cudaMemcpyHostToDevice));
    if (!s.ok()) return s;
    memory_.push_back(std::move(memory));
    return memory_.back().address();
  }

  Result<double> elapsed() {
    if (Status s = checked("run", cudaEventSynchronize(stop_)); !s.ok()) return s;
    float milliseconds = 0;
    if (Status s = checked("event", cudaEventElapsedTime(&milliseconds, start_, stop_)); !s.ok()) {
      return s;
    }
    return static_cast<double>(milliseconds) * 1e-3;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
  std::vector<DeviceMemory> memory_;
  std::vector<std::pair<HostTensor*, void*>> outputs_;
  DeviceMemory workspace_;
  DeviceMemory cold_;
  int pattern_ = 0;
};

}  // namespace

Result<std::unique_ptr<Placement>> make_cuda_placement(int index) {
  return CudaPlacement::make(index);
}

}  // namespace kda::cases
