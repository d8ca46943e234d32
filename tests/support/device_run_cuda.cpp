#include <algorithm>
#include <memory>

#include <cuda_runtime_api.h>

#include "support/device_run.h"

namespace kda::test {
namespace {

constexpr std::size_t kGuard = 256;
constexpr int kFill = 0xFF;

struct Free {
  void operator()(void* address) const { cudaFree(address); }
};
using Memory = std::unique_ptr<void, Free>;

/// Throws kda::Error: a test cannot go on.
void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status(StatusCode::kDeviceError, cudaGetErrorString(error)));
}

Memory allocate(std::size_t bytes) {
  void* address = nullptr;
  require(cudaMalloc(&address, std::max<std::size_t>(bytes, 1)));
  return Memory(address);
}

std::byte* at(const Memory& memory, std::size_t offset) {
  return static_cast<std::byte*>(memory.get()) + offset;
}

struct Mirror {
  std::span<std::byte> host;
  Memory device;
};

void* mirrored(const std::vector<Mirror>& mirrors, void* address) {
  auto* const byte = static_cast<std::byte*>(address);
  for (const Mirror& mirror : mirrors) {
    if (byte >= mirror.host.data() && byte < mirror.host.data() + mirror.host.size()) {
      return at(mirror.device, static_cast<std::size_t>(byte - mirror.host.data()));
    }
  }
  return nullptr;
}

Status run_captured(const Plan& plan, const Args& args, cudaStream_t stream) {
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  Status status = plan.run(args, stream);
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph));
  if (status.ok()) {
    cudaGraphExec_t executable = nullptr;
    require(cudaGraphInstantiate(&executable, graph, 0));
    require(cudaGraphLaunch(executable, stream));
    require(cudaStreamSynchronize(stream));
    require(cudaGraphExecDestroy(executable));
  }
  require(cudaGraphDestroy(graph));
  return status;
}

bool is_filled(const Memory& memory, std::size_t offset) {
  std::array<unsigned char, kGuard> bytes;
  require(cudaMemcpy(bytes.data(), at(memory, offset), kGuard, cudaMemcpyDeviceToHost));
  return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == kFill; });
}

}  // namespace

Status run_on_device(const Plan& plan, const Args& args,
                     const std::vector<std::span<std::byte>>& regions, bool captured) {
  require(cudaSetDevice(plan.device().index));
  std::vector<Mirror> mirrors;
  for (const std::span<std::byte> region : regions) {
    mirrors.push_back({region, allocate(region.size())});
    require(cudaMemcpy(mirrors.back().device.get(), region.data(), region.size(),
                       cudaMemcpyHostToDevice));
  }
  Args there;
  for (std::size_t i = 0; i < args.data.size(); ++i) {
    there.data[i] = mirrored(mirrors, args.data[i]);
  }
  const std::size_t bytes = plan.workspace_bytes();
  const Memory workspace = allocate(bytes + 2 * kGuard);
  require(cudaMemset(workspace.get(), kFill, bytes + 2 * kGuard));
  there.workspace = bytes == 0 ? nullptr : at(workspace, kGuard);
  there.workspace_bytes = bytes;
  cudaStream_t stream = nullptr;
  require(cudaStreamCreate(&stream));
  const Status status = captured ? run_captured(plan, there, stream) : plan.run(there, stream);
  require(cudaStreamSynchronize(stream));
  require(cudaStreamDestroy(stream));
  if (!status.ok()) return status;
  for (const Mirror& mirror : mirrors) {
    require(cudaMemcpy(mirror.host.data(), mirror.device.get(), mirror.host.size(),
                       cudaMemcpyDeviceToHost));
  }
  if (!is_filled(workspace, 0) || !is_filled(workspace, kGuard + bytes)) {
    return {StatusCode::kInternal, "workspace: bytes beside it were written"};
  }
  return {};
}

}  // namespace kda::test
