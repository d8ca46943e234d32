// Placement for the CPU: tensors stay where they are. That for CUDA is in placement_cuda.cpp.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "execute.h"
#include "kda/backend.h"
#if KDA_HAS_CUDA
#include "placement_cuda.h"
#endif

namespace kda::cases {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Enough to displace the last-level cache, within reason for a machine that shares a huge one.
std::size_t cold_bytes() {
  constexpr std::size_t kLeast = std::size_t{64} << 20;
  constexpr std::size_t kMost = std::size_t{1} << 30;
  long cache = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  const auto known = static_cast<std::size_t>(std::max(cache, 0L));
  return std::clamp(known + known / 4, kLeast, kMost);
}

class HostPlacement final : public Placement {
 public:
  explicit HostPlacement(int threads)
      : threads_(threads > 0 ? static_cast<unsigned>(threads)
                             : std::max(1U, std::thread::hardware_concurrency())) {}

  Result<void*> input(const HostTensor& tensor) override {
    return const_cast<void*>(static_cast<const void*>(tensor.bytes.data()));
  }
  Result<void*> output(HostTensor& tensor) override {
    return static_cast<void*>(tensor.bytes.data());
  }
  Result<void*> workspace(std::size_t bytes) override {
    workspace_.resize(bytes);
    return static_cast<void*>(bytes == 0 ? nullptr : workspace_.data());
  }
  Result<double> measure(const Plan& plan, const Args& args) override {
    const auto start = Clock::now();
    if (Status status = plan.run(args); !status.ok()) return status;
    return seconds_since(start);
  }
  Result<HostCost> host_cost(const Plan&, const Args&) override {
    return Status(StatusCode::kUnsupported, "host cost: on the CPU the call is the computation");
  }
  Status fetch() override { return {}; }
  Status flush_cache() override {
    cold_.resize(cold_bytes());
    ++pattern_;
    for_each_part(
        [this](std::byte* part, std::size_t bytes) { std::memset(part, pattern_, bytes); });
    return {};
  }
  Result<double> copy_bandwidth() override {
    constexpr int kRepeats = 5;
    cold_.resize(cold_bytes());
    double best = 0;
    for (int i = 0; i < kRepeats; ++i) {
      const auto start = Clock::now();
      for_each_part([](std::byte* part, std::size_t bytes) {
        std::memcpy(part, part + bytes / 2, bytes / 2);
      });
      best = std::max(best, static_cast<double>(cold_.size()) / seconds_since(start));
    }
    return best;
  }

 private:
  template <class Work>
  void for_each_part(const Work& work) {
    const std::size_t bytes = cold_.size() / threads_ / 128 * 128;
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < threads_; ++i) {
      workers.emplace_back(work, cold_.data() + i * bytes, bytes);
    }
    for (std::thread& worker : workers) worker.join();
  }

  unsigned threads_;
  int pattern_ = 0;
  AlignedBytes workspace_;
  AlignedBytes cold_;
};

}  // namespace

Result<std::unique_ptr<Placement>> make_placement(const Device& device, int threads) {
  if (device.type == DeviceType::kCpu) {
    return std::unique_ptr<Placement>(std::make_unique<HostPlacement>(threads));
  }
  if (std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return Status(StatusCode::kUnsupported, reason);
  }
#if KDA_HAS_CUDA
  return make_cuda_placement(device.index);
#else
  return Status(StatusCode::kUnsupported, "device memory: this program was built without it");
#endif
}

}  // namespace kda::cases
