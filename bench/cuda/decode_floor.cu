// What the memory allows a decode step: the bytes of the states of a batch, 32 heads of 64 KiB,
// moved without arithmetic, timed as `kda bench` times (events around the launch, L2 overwritten).
//
//   kda_decode_floor [REPEATS]     one JSON object a line
//
//   empty              a kernel that does nothing: what the events alone cost
//   copy               device-to-device copy of as many bytes into other memory
//   read_modify_write  each thread scales four 16-byte vectors in place
//   bulk_equal         one block an SM, bulk loads and stores through three stages of shared
//                      memory, equal shares of the states
//   bulk_counter       the same, states taken from a counter that was zeroed before the events
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <cuda_runtime.h>
#include <cuda/ptx>

namespace {

namespace ptx = ::cuda::ptx;

constexpr std::size_t kStateBytes = 64 * 1024;
constexpr std::size_t kColdBytes = std::size_t{512} << 20;
constexpr int kHeads = 32;
constexpr int kStages = 3;
constexpr int kThreads = 256;
constexpr int kVectors = 4;

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__global__ void empty() {}

__global__ void __launch_bounds__(kThreads) read_modify_write(float4* states) {
  float4* at = states + std::size_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  float4 x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) x[i] = at[i * kThreads];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    at[i * kThreads] =
        make_float4(x[i].x * 0.999F, x[i].y * 0.999F, x[i].z * 0.999F, x[i].w * 0.999F);
  }
}

/// One thread. Without a counter block b takes states b, b + gridDim.x, ...
__global__ void __launch_bounds__(32, 1) bulk(char* states, int count, int* counter) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t loaded[kStages];
  if (threadIdx.x != 0) return;
  for (uint64_t& barrier : loaded) ptx::mbarrier_init(&barrier, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  int next = static_cast<int>(blockIdx.x);
  int in[kStages];  // which state a stage holds
  const auto refill = [&](int stage) {
    in[stage] = next;
    if (counter != nullptr) in[stage] = atomicAdd(counter, 1);
    next += static_cast<int>(gridDim.x);
    if (in[stage] >= count) return;
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &loaded[stage], kStateBytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, stages + stage * kStateBytes,
                       states + in[stage] * kStateBytes, kStateBytes, &loaded[stage]);
  };
  for (int stage = 0; stage < kStages; ++stage) refill(stage);
  uint32_t parity = 0;
  for (int stage = 0; in[stage] < count;) {
    while (!ptx::mbarrier_try_wait_parity(&loaded[stage], parity)) {
    }
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, states + in[stage] * kStateBytes,
                       stages + stage * kStateBytes, kStateBytes);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
    refill(stage);
    if (++stage < kStages) continue;
    stage = 0;
    parity ^= 1;
  }
#endif
}

struct Bench {
  cudaEvent_t start, stop;
  char *states, *other, *cold;
  int* counter;
  int repeats;

  void time(const char* name, int batch, std::size_t bytes, const std::function<void()>& launch) {
    std::vector<float> times;
    for (int i = 0; i <= repeats; ++i) {  // the first warms up
      require(cudaMemsetAsync(cold, i, kColdBytes));
      require(cudaMemsetAsync(counter, 0, sizeof(int)));
      require(cudaEventRecord(start));
      launch();
      require(cudaGetLastError());
      require(cudaEventRecord(stop));
      require(cudaEventSynchronize(stop));
      float ms = 0;
      require(cudaEventElapsedTime(&ms, start, stop));
      if (i > 0) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    const auto at = [&](std::size_t percent) { return times[(times.size() - 1) * percent / 100]; };
    std::printf(
        "{\"kernel\": \"%s\", \"batch\": %d, \"bytes\": %zu, \"median_ms\": %.5f, \"p20_ms\": "
        "%.5f, \"p80_ms\": %.5f, \"gb_per_s\": %.1f}\n",
        name, batch, 2 * bytes, at(50), at(20), at(80),
        2 * static_cast<double>(bytes) / at(50) * 1e-6);
  }
};

}  // namespace

int main(int argc, char** argv) {
  constexpr int kMostBatch = 1024;
  constexpr std::size_t kMost = std::size_t{kMostBatch} * kHeads * kStateBytes;
  Bench bench{};
  bench.repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  require(cudaEventCreate(&bench.start));
  require(cudaEventCreate(&bench.stop));
  require(cudaMalloc(&bench.states, kMost));
  require(cudaMalloc(&bench.other, kMost));
  require(cudaMalloc(&bench.cold, kColdBytes));
  require(cudaMalloc(&bench.counter, sizeof(int)));
  require(cudaMemset(bench.states, 0x3c, kMost));  // 0.0115: the scaled values stay numbers
  require(cudaFuncSetAttribute(bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kStages * kStateBytes));
  cudaDeviceProp device;
  require(cudaGetDeviceProperties(&device, 0));
  std::printf("{\"machine\": \"%s\", \"repeats\": %d}\n", device.name, bench.repeats);
  const auto sms = static_cast<unsigned>(device.multiProcessorCount);
  bench.time("empty", 0, 0, [] { empty<<<1, 32>>>(); });
  for (const int batch : {8, 32, 128, 256, kMostBatch}) {
    const int count = batch * kHeads;
    const std::size_t bytes = static_cast<std::size_t>(count) * kStateBytes;
    bench.time("copy", batch, bytes, [&] {
      require(cudaMemcpyAsync(bench.other, bench.states, bytes, cudaMemcpyDeviceToDevice));
    });
    const auto blocks = static_cast<unsigned>(bytes / (kThreads * kVectors * sizeof(float4)));
    bench.time("read_modify_write", batch, bytes, [&] {
      read_modify_write<<<blocks, kThreads>>>(reinterpret_cast<float4*>(bench.states));
    });
    bench.time("bulk_equal", batch, bytes,
               [&] { bulk<<<sms, 32, kStages * kStateBytes>>>(bench.states, count, nullptr); });
    bench.time("bulk_counter", batch, bytes, [&] {
      bulk<<<sms, 32, kStages * kStateBytes>>>(bench.states, count, bench.counter);
    });
  }
  return 0;
}
