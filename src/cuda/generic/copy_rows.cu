// Conversion copies and the zeros of rows that no sequence owns. One warp a row of the last
// dimension.
#include "cuda/generic/stages.h"
#include "cuda/launch.h"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kWarps = kCopyThreads / 32;
// Enough blocks to fill any GPU several times; they loop.
constexpr int64_t kCopyBlocks = 2048;

template <class Real>
__device__ void copy_job(const CopyRowsParams::Job& job, int64_t used) {
  const int64_t rows = job.shape[0] * job.shape[1] * job.shape[2];
  const int64_t per_used = job.row_dim == 0 ? job.shape[1] * job.shape[2] : job.shape[2];
  const bool has_source = job.source.data != nullptr;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t first = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (!has_source) first += used * per_used;
  for (int64_t row = first; row < rows; row += step) {
    const int64_t i2 = row % job.shape[2];
    const int64_t i1 = row / job.shape[2] % job.shape[1];
    const int64_t i0 = row / job.shape[2] / job.shape[1];
    const bool is_used = has_source && (job.row_dim == 0 ? i0 : i1) < used;
    const int64_t* to = job.target.stride;
    const int64_t* from = job.source.stride;
    const int64_t target = i0 * to[0] + i1 * to[1] + i2 * to[2];
    const int64_t source = i0 * from[0] + i1 * from[1] + i2 * from[2];
    for (int64_t i3 = threadIdx.x % 32; i3 < job.shape[3]; i3 += 32) {
      store<Real>(job.target, target + i3 * to[3],
                  is_used ? load<Real>(job.source, source + i3 * from[3]) : Real(0));
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kCopyThreads) copy_rows(const CopyRowsParams p) {
  for (int i = 0; i < p.count; ++i) {
    const CopyRowsParams::Job& job = p.jobs[i];
    copy_job<Real>(job, job.row_dim == 0 ? used_chunks(p.sequences) : used_tokens(p.sequences));
  }
}

}  // namespace

Status launch_copy_rows(const CopyRowsParams& params, bool fp64, cudaStream_t stream) {
  if (params.count == 0) return {};
  return launch({"copy_rows", kCopyBlocks, kCopyThreads},
                fp64 ? copy_rows<double> : copy_rows<float>, params, stream);
}

}  // namespace kda::cuda
