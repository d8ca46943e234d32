#include "cuda/sm90/chunk_bwd/grad.h"

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/sm90/chunk_bwd/instances/grad_instances.h"
#include "cuda/sm90/requirements.h"
#include "cuda/tensor_map.h"
#include "kda/types.h"

namespace kda::cuda::sm90 {

namespace {

/// Tiles of K x 64 columns; a slice of heads of h that the caller kept has gaps between its rows.
TensorMapShape state_map(const Tensor& t, const Heads& heads, int64_t rows) {
  return {{heads.V, heads.K, heads.HV, rows},
          {t.stride[3], t.stride[2], t.stride[1], t.stride[0]},
          {kGradColumns, static_cast<int32_t>(heads.K), 1, 1}};
}

GradKernel kernel_of(const GradParams& p) {
  const bool fp16 = p.q.dtype == static_cast<int32_t>(DType::kF16);
  const int32_t gate = p.gate.kind;
  if (p.heads.K == 64) return fp16 ? grad_fp16_k64(gate) : grad_bf16_k64(gate);
  return fp16 ? grad_fp16_k128(gate) : grad_bf16_k128(gate);
}

}  // namespace

Status launch_grad(const GradParams& params, bool, cudaStream_t stream) {
  const Heads& heads = params.heads;
  const GradKernel grad = kernel_of(params);
  const int64_t items = params.sequences.chunk_rows * heads.HV;
  if (items == 0) return {};
  const GradParams& p = params;
  GradLaunchParams launched{
      p, {p.q, p.k, p.gate.g, p.v, p.grad_o, p.R, p.v_new, p.dq, p.dk, p.dv, p.dg}, {}, {}, {}};
  const int64_t rows = params.sequences.chunk_rows;
  Status status = make_tensor_map(launched.h_map, "h", params.h, state_map(params.h, heads, rows));
  if (status.ok()) {
    status = make_tensor_map(launched.dh_map, "dh", params.dh, state_map(params.dh, heads, rows));
  }
  if (!status.ok()) return status;
  const int64_t blocks = std::min<int64_t>(
      params.most_blocks > 0 ? params.most_blocks : sm_count() * grad.blocks_per_sm,
      kMostGradBlocks);
  const int64_t grid = std::min(items, blocks);
  launched.step = {static_cast<uint32_t>(grid / heads.HV), static_cast<uint32_t>(grid % heads.HV)};
  void* arguments[] = {&launched};
  return launch_raw({"sm90_chunk_bwd_grad", grid, 2 * heads.K, grad.shared_bytes},
                    reinterpret_cast<const void*>(grad.kernel), arguments, stream);
}

}  // namespace kda::cuda::sm90
