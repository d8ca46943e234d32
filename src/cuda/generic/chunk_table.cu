// Packed problems: where the chunks of each sequence lie. Two launches, no host read.
#include "cuda/generic/stages.h"
#include "cuda/launch.h"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

constexpr int kScanThreads = 1024;
constexpr int kFillThreads = 256;

/// offsets[i] = sum of the chunk counts of the sequences before i. One block walks all sequences,
/// 1024 at a time.
__global__ void __launch_bounds__(kScanThreads) scan_offsets(const Sequences s) {
  __shared__ int64_t warp_sums[kScanThreads / 32];
  const int tid = static_cast<int>(threadIdx.x);
  int64_t carry = 0;
  for (int64_t base = 0; base < s.count; base += kScanThreads) {
    const int64_t i = base + tid;
    int64_t own = 0;
    if (i < s.count) {
      const TokenRange range = tokens_of(s, i);
      own = chunks_in(range.end - range.begin, s.C);
    }
    int64_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (tid % 32 >= step) sum += other;
    }
    if (tid % 32 == 31) warp_sums[tid / 32] = sum;
    __syncthreads();
    int64_t before = 0;
    int64_t total = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w == tid / 32) before = total;
      total += warp_sums[w];
    }
    if (i < s.count) s.offsets[i] = carry + before + sum - own;
    carry += total;
    __syncthreads();
  }
  if (tid == 0) s.offsets[s.count] = carry;
}

/// Finds the sequence of each chunk row by bisection.
__global__ void __launch_bounds__(kFillThreads) fill_entries(const Sequences s) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFillThreads;
  for (int64_t row = blockIdx.x * int64_t{kFillThreads} + threadIdx.x; row < s.chunk_rows;
       row += step) {
    ChunkEntry entry{-1, 0, 0};
    if (row < s.offsets[s.count]) {
      int64_t low = 0;  // offsets[low] <= row < offsets[high]
      int64_t high = s.count;
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (s.offsets[middle] <= row ? low : high) = middle;
      }
      const TokenRange range = tokens_of(s, low);
      const int64_t begin = range.begin + (row - s.offsets[low]) * s.C;
      const int64_t rest = range.end - begin;
      entry = {low, begin, rest < s.C ? rest : s.C};
    }
    s.entries[row] = entry;
  }
}

}  // namespace

const void* chunk_table_kernel() { return reinterpret_cast<const void*>(fill_entries); }

Status launch_chunk_table(const Sequences& sequences, cudaStream_t stream) {
  if (!sequences.cu.data) return {};
  Status status = launch({"chunk_table_scan", 1, kScanThreads}, scan_offsets, sequences, stream);
  if (!status.ok()) return status;
  return launch(
      {"chunk_table_fill", (sequences.chunk_rows + kFillThreads - 1) / kFillThreads, kFillThreads},
      fill_entries, sequences, stream);
}

}  // namespace kda::cuda
