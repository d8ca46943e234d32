// The rates and latencies that the Hopper kernels are designed by, measured: wgmma, reads through
// TMA from L2 and memory, copies between the blocks of a cluster. One JSON line each.
#include <cuda/ptx>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/ring.cuh"
#include "hopper_latencies.h"
#include "timing.h"

namespace kda::bench {
namespace {

namespace ptx = ::cuda::ptx;
using namespace kda::cuda;

constexpr int kSharedBytes = 128 * 1024;
constexpr int kSms = 132;

__device__ unsigned char* aligned_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

enum class Product { kRsSummed64, kRsOuter128, kSsSummed64 };

/// Products of 16 on one accumulator a round. Tiles: all are waited for at once, which 64 make
/// cheap. Registers: one round overlaps the next; dependent: each round waits for the last and
/// packs its sums into the next A, as the scan does.
template <Product kProduct>
inline constexpr int kProducts = kProduct == Product::kSsSummed64 ? 64 : 8;

template <Product kProduct, bool kDependent>
__global__ void __launch_bounds__(256, 1) wgmma_rounds(unsigned* cycles, float* sink, int rounds) {
  unsigned char* const memory = aligned_shared();
  for (int i = static_cast<int>(threadIdx.x); i < 65536 / 4; i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint32_t*>(memory)[i] = 0x3c003c00u + (i * 2654435761u >> 20);
  }
  publish_to_async_proxy();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const PanelTile<64> b{base + group * 16384u};
  const PanelTile<64> a_tile{base + 32768u + group * 16384u};
  constexpr int kSums = kProduct == Product::kRsOuter128 ? 64 : 32;
  float sums[kSums] = {};
  uint32_t a[32];
  for (int i = 0; i < 32; ++i) a[i] = 0x3c003c00u + threadIdx.x;
  __syncthreads();
  const unsigned begin = clock();
  for (int round = 0; round < rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProducts<kProduct>; ++i) {
      const int step = i % 8;
      if constexpr (kProduct == Product::kRsSummed64) {
        wgmma_rs<__nv_bfloat16, Major::kSummed>(sums, a + 4 * step, b.columns(step), true);
      } else if constexpr (kProduct == Product::kRsOuter128) {
        wgmma_rs<__nv_bfloat16, Major::kOuter>(sums, a + 4 * step, b.rows(step % 4), true);
      } else {
        wgmma_ss<__nv_bfloat16, Major::kSummed, Major::kSummed>(sums, a_tile.columns(step),
                                                                b.columns(step), true);
      }
    }
    wgmma_commit();
    if constexpr (kProduct == Product::kSsSummed64) {
      wgmma_wait<0>();
    } else if constexpr (!kDependent) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        a[i] = pack<__nv_bfloat16>(sums[2 * i % kSums], sums[(2 * i + 1) % kSums]);
      }
    }
  }
  wgmma_wait<0>();
  const unsigned end = clock();
  float sum = 0;
  for (int i = 0; i < kSums; ++i) sum += sums[i];
  if (sum == 1.2345f) sink[threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}

template <Product kProduct, bool kDependent>
void print_wgmma(const char* name, int columns) {
  constexpr int kRounds = 500;
  const Buffer cycles(kSms * sizeof(unsigned));
  const Buffer sink(1024);
  const auto kernel = wgmma_rounds<kProduct, kDependent>;
  require(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  for (const int groups : {1, 2}) {
    for (int run = 0; run < 2; ++run) {
      kernel<<<kSms, 128 * groups, kSharedBytes>>>(static_cast<unsigned*>(cycles.data()),
                                                   static_cast<float*>(sink.data()), kRounds);
      require(cudaDeviceSynchronize());
    }
    std::vector<unsigned> host(kSms);
    require(
        cudaMemcpy(host.data(), cycles.data(), kSms * sizeof(unsigned), cudaMemcpyDeviceToHost));
    std::sort(host.begin(), host.end());
    const double each = static_cast<double>(host[kSms / 2]) / kRounds / kProducts<kProduct>;
    const double share = 64.0 * columns * 16 * groups / each / 2048;
    std::printf(
        "{\"rate\": \"wgmma\", \"product\": \"%s\", \"dependent\": %s, \"warpgroups\": %d, "
        "\"cycles\": %.1f, \"share_of_peak\": %.2f}\n",
        name, kDependent ? "true" : "false", groups, each, share);
  }
}

/// Every block reads the same `bytes` of memory round and round in copies of 16 KiB, or pushes
/// 16 KiB of its shared memory to the other block of its cluster.
struct CopyParams {
  const unsigned char* from;
  unsigned bytes;
  int copies;
  bool to_peer;
};

constexpr int kCopyStages = 6;
constexpr unsigned kCopyBytes = 16384;

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32, 1) copies(CopyParams p) {
  unsigned char* const memory = aligned_shared();
  __shared__ uint64_t full[kCopyStages];
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : full) ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x == 0) {
    const unsigned bytes = kCopyBytes;  // the functions of cuda::ptx take references
    const auto start = [&](int i) {
      const int stage = i % kCopyStages;
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                     &full[stage], bytes);
      void* const to = memory + stage * kCopyBytes;
      if (p.to_peer) {
        const unsigned peer = ptx::get_sreg_cluster_ctarank() ^ 1;
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_shared,
                           __cluster_map_shared_rank(to, peer), to, bytes,
                           static_cast<uint64_t*>(__cluster_map_shared_rank(&full[stage], peer)));
      } else {
        const unsigned at = (blockIdx.x * static_cast<unsigned>(p.copies) + i) * bytes % p.bytes;
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, p.from + at, bytes,
                           &full[stage]);
      }
    };
    for (int i = 0; i < kCopyStages && i < p.copies; ++i) start(i);
    for (int i = 0; i < p.copies; ++i) {
      wait_for(&full[i % kCopyStages], i / kCopyStages & 1);
      if (i + kCopyStages < p.copies) start(i + kCopyStages);
    }
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

void print_copies(const char* name, unsigned bytes, bool to_peer) {
  constexpr int kCopies = 2000;
  const Buffer memory(bytes);
  require(cudaFuncSetAttribute(reinterpret_cast<const void*>(copies),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto launch = [&] {
    copies<<<kSms, 32, kSharedBytes>>>(
        {static_cast<const unsigned char*>(memory.data()), bytes, kCopies, to_peer});
    require(cudaGetLastError());
  };
  const Times times = time_in_turns({launch}, 5)[0];
  const double moved = static_cast<double>(kSms) * kCopies * kCopyBytes;
  std::printf("{\"rate\": \"%s\", \"bytes\": %u, \"gb_per_s\": %.0f, \"per_sm_gb_per_s\": %.1f}\n",
              name, bytes, moved / times.median_ms * 1e-6, moved / times.median_ms * 1e-6 / kSms);
}

}  // namespace
}  // namespace kda::bench

int main(int argc, char** argv) {
  using namespace kda::bench;
  std::printf("{%s}\n", run_header(argc, argv).c_str());
  print_wgmma<Product::kRsSummed64, false>("rs m64n64k16", 64);
  print_wgmma<Product::kRsOuter128, false>("rs m64n128k16 outer", 128);
  print_wgmma<Product::kSsSummed64, false>("ss m64n64k16", 64);
  print_wgmma<Product::kRsSummed64, true>("rs m64n64k16", 64);
  print_wgmma<Product::kRsOuter128, true>("rs m64n128k16 outer", 128);
  print_copies("L2 to shared memory", 8u << 20, false);
  print_copies("L2 to shared memory", 24u << 20, false);
  print_copies("memory to shared memory", 2048u << 20, false);
  print_copies("shared memory to the peer of a cluster", kCopyBytes, true);
  print_latencies();
  return 0;
}
