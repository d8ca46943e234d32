#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <cuda_runtime_api.h>

#include "guard/device_run.h"

namespace kda::cases {
namespace {

constexpr std::size_t kGuard = 256;
constexpr int kFill = 0xFF;

struct Free {
  void operator()(void* address) const { cudaFree(address); }
};
using Memory = std::unique_ptr<void, Free>;

/// Throws kda::Error: a run cannot go on.
void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status(
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError,
      cudaGetErrorString(error)));
}

Memory allocate(std::size_t bytes) {
  void* address = nullptr;
  require(cudaMalloc(&address, std::max<std::size_t>(bytes, 1)));
  return Memory(address);
}

std::byte* at(const Memory& memory, std::size_t offset) {
  return static_cast<std::byte*>(memory.get()) + offset;
}

class Stream {
 public:
  enum class Kind { kDefault, kBlocking, kNonBlocking };

  explicit Stream(Kind kind) {
    if (kind == Kind::kDefault) return;
    require(cudaStreamCreateWithFlags(
        &stream_, kind == Kind::kBlocking ? cudaStreamDefault : cudaStreamNonBlocking));
  }
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

Stream::Kind kind_of(const DeviceLaunch& launch, std::size_t copy) {
  if (launch.captured || copy > 0) return Stream::Kind::kNonBlocking;
  constexpr std::array kKinds = {Stream::Kind::kDefault, Stream::Kind::kBlocking,
                                 Stream::Kind::kNonBlocking};
  return kKinds[launch.stream % kKinds.size()];
}

/// A recorded run.
class Graph {
 public:
  Graph(const Plan& plan, const Args& args, cudaStream_t stream) {
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const Status status = plan.run(args, stream);
    require(cudaStreamEndCapture(stream, &graph_));
    if (!status.ok()) throw Error(status);
    require(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) const { require(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// The regions, the workspace and a stream on the device.
class Mirror {
 public:
  Mirror(const Plan& plan, const Args& args, const std::vector<std::span<std::byte>>& regions,
         Stream::Kind kind)
      : regions_(regions), bytes_(plan.workspace_bytes()), stream_(kind) {
    for (const std::span<std::byte> region : regions) device_.push_back(allocate(region.size()));
    for (std::size_t i = 0; i < args.data.size(); ++i) {
      args_.data[i] = mirrored(args.data[i]);
    }
    workspace_ = allocate(bytes_ + 2 * kGuard);
    args_.workspace = bytes_ == 0 ? nullptr : at(workspace_, kGuard);
    args_.workspace_bytes = bytes_;
    require(cudaMemset(workspace_.get(), kFill, bytes_ + 2 * kGuard));
  }

  const Args& args() const { return args_; }
  cudaStream_t stream() const { return stream_.get(); }

  void load(const std::vector<AlignedBytes>& contents) {
    for (std::size_t i = 0; i < regions_.size(); ++i) upload(i, contents[i].data());
    settle();
  }
  void load() {
    for (std::size_t i = 0; i < regions_.size(); ++i) upload(i, regions_[i].data());
    settle();
  }
  /// Brings the regions home.
  void store() const {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      require(cudaMemcpy(regions_[i].data(), device_[i].get(), regions_[i].size(),
                         cudaMemcpyDeviceToHost));
    }
  }
  bool holds_the_regions() const {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      AlignedBytes bytes(regions_[i].size());
      require(cudaMemcpy(bytes.data(), device_[i].get(), bytes.size(), cudaMemcpyDeviceToHost));
      if (!std::equal(bytes.begin(), bytes.end(), regions_[i].begin())) return false;
    }
    return true;
  }
  bool keeps_guards() const { return is_filled(0) && is_filled(kGuard + bytes_); }

 private:
  void upload(std::size_t region, const std::byte* from) {
    require(
        cudaMemcpy(device_[region].get(), from, regions_[region].size(), cudaMemcpyHostToDevice));
  }
  /// Copies and fills may still be under way, and streams that do not wait for the default one
  /// would overtake them.
  static void settle() { require(cudaDeviceSynchronize()); }

  void* mirrored(void* address) const {
    auto* const byte = static_cast<std::byte*>(address);
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      const std::span<std::byte> region = regions_[i];
      if (byte >= region.data() && byte < region.data() + region.size()) {
        return at(device_[i], static_cast<std::size_t>(byte - region.data()));
      }
    }
    return nullptr;
  }

  bool is_filled(std::size_t offset) const {
    std::array<unsigned char, kGuard> bytes;
    require(cudaMemcpy(bytes.data(), at(workspace_, offset), kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == kFill; });
  }

  const std::vector<std::span<std::byte>>& regions_;
  std::size_t bytes_;
  Stream stream_;
  std::vector<Memory> device_;
  Memory workspace_;
  Args args_;
};

void run_captured(const Plan& plan, Mirror& mirror, const DeviceLaunch& launch) {
  const Graph graph(plan, mirror.args(), mirror.stream());
  if (!launch.earlier.empty()) {
    mirror.load(launch.earlier);
    graph.launch(mirror.stream());
    require(cudaStreamSynchronize(mirror.stream()));
  }
  mirror.load();
  graph.launch(mirror.stream());
  require(cudaStreamSynchronize(mirror.stream()));
}

Status run_mirrors(const Plan& plan, std::vector<Mirror>& mirrors, const DeviceLaunch& launch) {
  if (launch.captured) {
    for (Mirror& mirror : mirrors) run_captured(plan, mirror, launch);
  } else {
    for (Mirror& mirror : mirrors) mirror.load();
    for (const Mirror& mirror : mirrors) {
      if (Status status = plan.run(mirror.args(), mirror.stream()); !status.ok()) return status;
    }
    for (const Mirror& mirror : mirrors) require(cudaStreamSynchronize(mirror.stream()));
  }
  mirrors.front().store();
  for (const Mirror& mirror : mirrors) {
    if (!mirror.keeps_guards()) {
      return {StatusCode::kInternal, "workspace: bytes beside it were written"};
    }
    if (!mirror.holds_the_regions()) {
      return {StatusCode::kInternal, "runs at the same time on several streams: other bits"};
    }
  }
  return {};
}

}  // namespace

Status run_on_device(const Plan& plan, const Args& args,
                     const std::vector<std::span<std::byte>>& regions, const DeviceLaunch& launch) {
  try {
    require(cudaSetDevice(plan.device().index));
    std::vector<Mirror> mirrors;
    for (std::size_t i = 0; i < static_cast<std::size_t>(launch.copies); ++i) {
      mirrors.emplace_back(plan, args, regions, kind_of(launch, i));
    }
    return run_mirrors(plan, mirrors, launch);
  } catch (const Error& error) {
    return error.status();
  }
}

}  // namespace kda::cases
