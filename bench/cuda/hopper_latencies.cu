// Latencies, in cycles of an SM: one thread waits for each load or copy before it starts the next.
#include "hopper_latencies.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda/ptx>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/tile/ring.cuh"
#include "timing.h"

namespace kda::bench {
namespace {

namespace ptx = ::cuda::ptx;
using namespace kda::cuda;

constexpr unsigned kSteps = 1024;
constexpr unsigned kLineBytes = 8192;    // of memory a step: 64 rows of 128 bytes, a box of the map
constexpr unsigned kStride = 389;        // odd, so that steps visit every line
constexpr int kSharedBytes = 40 * 1024;  // a copy of 16 KiB from the second half to the first
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;

__device__ unsigned char* latency_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ unsigned line_of(unsigned step) { return step * kStride % kSteps; }

/// The first word of each line of memory says where the next one is.
__global__ void make_chain(uint32_t* memory) {
  const unsigned step = threadIdx.x;
  memory[line_of(step) * (kLineBytes / 4)] = line_of(step + 1) * (kLineBytes / 4);
}

__global__ void chase_memory(const uint32_t* memory, unsigned* cycles) {
  uint32_t at = 0;
  const unsigned begin = clock();
  for (unsigned i = 0; i < kSteps; ++i) at = __ldcg(memory + at);
  cycles[0] = clock() - begin + (at == 1 ? 1 : 0);  // at keeps the loop
}

/// Loads from the shared memory of this block or of the other one of the cluster.
__global__ void __cluster_dims__(2, 1, 1) chase_shared(bool peer, unsigned* cycles) {
  auto* const own = reinterpret_cast<uint32_t*>(latency_shared());
  for (unsigned i = threadIdx.x; i < kSteps; i += blockDim.x) own[line_of(i)] = line_of(i + 1);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  const unsigned rank = ptx::get_sreg_cluster_ctarank();
  if (rank == 0 && threadIdx.x == 0) {
    const auto local = static_cast<uint32_t>(__cvta_generic_to_shared(own));
    uint32_t base = local;
    if (peer) asm("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(base) : "r"(local));
    uint32_t at = 0;
    const unsigned begin = clock();
    for (unsigned i = 0; i < kSteps; ++i) {
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(at) : "r"(base + 4 * at));
    }
    cycles[0] = clock() - begin + (at == 1 ? 1 : 0);
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

/// Copies of `bytes` through TMA, with the tensor map (a box) or without.
__global__ void copy_from_memory(const __grid_constant__ CUtensorMap map, bool tensor,
                                 const unsigned char* memory, unsigned bytes, unsigned* cycles) {
  __shared__ uint64_t full;
  unsigned char* const to = latency_shared();
  ptx::mbarrier_init(&full, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  const unsigned begin = clock();
  for (unsigned i = 0; i < kSteps; ++i) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full,
                                   bytes);
    if (tensor) {
      const int32_t at[4] = {0, 0, static_cast<int32_t>(line_of(i) * (kLineBytes / 128)), 0};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, at, &full);
    } else {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to,
                         memory + line_of(i) * kLineBytes, bytes, &full);
    }
    wait_for(&full, i & 1);
  }
  cycles[0] = clock() - begin;
}

/// The blocks of a cluster answer each other, by copies of `bytes` or, with 0, by arrivals alone.
__global__ void __cluster_dims__(2, 1, 1) answer_peer(unsigned bytes, unsigned* cycles) {
  __shared__ uint64_t full;
  unsigned char* const memory = latency_shared();
  const unsigned rank = ptx::get_sreg_cluster_ctarank();
  ptx::mbarrier_init(&full, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  if (bytes > 0) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full,
                                   bytes);
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  auto* const there = static_cast<uint64_t*>(__cluster_map_shared_rank(&full, rank ^ 1));
  void* const to = __cluster_map_shared_rank(memory, rank ^ 1);
  const auto send = [&] {
    if (bytes > 0) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_shared, to, memory + kSharedBytes / 2,
                         bytes, there);
    } else {
      ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, there);
    }
  };
  const unsigned begin = clock();
  for (unsigned i = 0; i < kSteps; ++i) {
    if (rank == 0) send();
    wait_for(&full, i & 1);
    if (bytes > 0 && i + 1 < kSteps) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full,
                                     bytes);
    }
    if (rank == 1) send();
  }
  if (rank == 0) cycles[0] = clock() - begin;
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

/// One JSON line: the median of the launches, `steps` waits each.
template <class Launch>
void print_latency(const char* name, unsigned bytes, unsigned steps, const Launch& launch) {
  constexpr int kLaunches = 5;
  const Buffer cycles(sizeof(unsigned));
  std::vector<unsigned> found;
  for (int i = -1; i < kLaunches; ++i) {
    launch(static_cast<unsigned*>(cycles.data()));
    require(cudaGetLastError());
    unsigned host = 0;
    require(cudaMemcpy(&host, cycles.data(), sizeof host, cudaMemcpyDeviceToHost));
    if (i >= 0) found.push_back(host);  // the first brings the lines into L2
  }
  std::sort(found.begin(), found.end());
  std::printf("{\"latency\": \"%s\", \"bytes\": %u, \"cycles\": %.0f}\n", name, bytes,
              static_cast<double>(found[kLaunches / 2]) / steps);
}

/// The tokens of one head with 64 channels in 16 bits, and boxes of 64 of them.
CUtensorMap map_of(void* memory) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found));
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  constexpr cuuint64_t kExtent[] = {64, 1, kSteps * (kLineBytes / 128), 1};
  constexpr cuuint64_t kStrideBytes[] = {128, 128, 128};
  constexpr cuuint32_t kBox[] = {64, 1, 64, 1};
  constexpr cuuint32_t kStep[] = {1, 1, 1, 1};
  CUtensorMap map{};
  if (encode != nullptr && encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, memory, kExtent,
                                  kStrideBytes, kBox, kStep, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS) {
    return map;
  }
  std::fprintf(stderr, "cuTensorMapEncodeTiled: absent or refused\n");
  std::exit(1);
}

}  // namespace

void print_latencies() {
  const Buffer memory(std::size_t{kSteps} * kLineBytes);
  const Buffer cold(kFlushBytes);
  auto* const words = static_cast<uint32_t*>(memory.data());
  const auto* const bytes_of = static_cast<const unsigned char*>(memory.data());
  make_chain<<<1, kSteps>>>(words);
  const CUtensorMap map = map_of(memory.data());
  const auto flush = [&] { require(cudaMemsetAsync(cold.data(), 0, kFlushBytes)); };
  for (const bool from_memory : {false, true}) {
    const auto name = [&](const char* l2, const char* dram) { return from_memory ? dram : l2; };
    print_latency(name("load, L2", "load, memory"), 4, kSteps, [&](unsigned* cycles) {
      if (from_memory) flush();
      chase_memory<<<1, 1>>>(words, cycles);
    });
    for (const unsigned bytes : {128u, 2048u, 8192u}) {
      print_latency(name("bulk copy, L2", "bulk copy, memory"), bytes, kSteps,
                    [&](unsigned* cycles) {
                      if (from_memory) flush();
                      copy_from_memory<<<1, 1, kSharedBytes>>>(map, false, bytes_of, bytes, cycles);
                    });
    }
    print_latency(
        name("tensor copy, L2", "tensor copy, memory"), kLineBytes, kSteps, [&](unsigned* cycles) {
          if (from_memory) flush();
          copy_from_memory<<<1, 1, kSharedBytes>>>(map, true, bytes_of, kLineBytes, cycles);
        });
  }
  for (const bool peer : {false, true}) {
    print_latency(peer ? "load, shared memory of the peer" : "load, own shared memory", 4, kSteps,
                  [&](unsigned* cycles) { chase_shared<<<2, 32, kSharedBytes>>>(peer, cycles); });
  }
  for (const unsigned bytes : {0u, 128u, 2048u, 16384u}) {
    print_latency(bytes > 0 ? "copy to the peer and its wait" : "arrival at the peer and its wait",
                  bytes, 2 * kSteps,
                  [&](unsigned* cycles) { answer_peer<<<2, 1, kSharedBytes>>>(bytes, cycles); });
  }
}

}  // namespace kda::bench
