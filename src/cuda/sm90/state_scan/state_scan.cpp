#include "cuda/sm90/state_scan/state_scan.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include <fmt/format.h>

#include "cuda/launch.h"
#include "cuda/sm90/fallback.h"
#include "cuda/sm90/requirements.h"
#include "cuda/sm90/state_scan/instances/instances.h"
#include "cuda/sm90/state_scan/state_scan_op.h"
#include "cuda/tensor_map.h"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::sm90 {
namespace {

using enum TensorId;

constexpr int64_t kMostBlocks = int64_t{1} << 30;  // even, for clusters

TensorMapShape token_map(const Tensor& t, int64_t width, int64_t heads, int64_t T, int64_t B) {
  return {{width, heads, T, B},
          {t.stride[3], t.stride[2], t.stride[1], t.stride[0]},
          {kPanelColumns, 1, kScanChunk, 1}};
}

TensorMapShape checkpoint_map(const Tensor& t, int64_t V, int64_t K, int64_t HV, int64_t rows) {
  return {{V, K, HV, rows},
          {t.stride[3], t.stride[2], t.stride[1], t.stride[0]},
          {kPanelColumns, static_cast<int32_t>(K), 1, 1}};
}

Tensor layout_of(const Problem& problem, TensorId id) { return tensor_of(problem, {}, id); }

/// Rows of fp32 channels are read and written in vectors.
bool has_whole_rows(const TensorLayout& layout) {
  return layout.stride[3] == 1 && layout.stride[0] % 4 == 0 && layout.stride[1] % 4 == 0 &&
         layout.stride[2] % 4 == 0;
}

/// Given or wanted, and looked at: do is read for dq_raw only.
bool takes_part(const Problem& problem, TensorId id) {
  return problem.has(id) && (id != kDo || problem.has(kDqRaw));
}

std::string layout_obstacle(const Problem& problem) {
  const Sizes& s = problem.sizes;
  for (const TensorId id : {kKg, kW, kU, kVNew, kH, kDo}) {
    if (!takes_part(problem, id)) continue;
    const Tensor t = layout_of(problem, id);
    const int64_t width = id == kKg || id == kW ? s.K : s.V;
    const char* const obstacle =
        tensor_map_obstacle(id == kH ? checkpoint_map(t, s.V, s.K, s.HV, problem.chunk_rows())
                                     : token_map(t, width, s.HV, s.T, s.B));
    if (*obstacle != '\0') return fmt::format("{} ({})", obstacle, name_of(id));
  }
  for (const TensorId id : {kGamma, kDqRaw}) {
    if (problem.has(id) && !has_whole_rows(problem[id])) {
      return fmt::format("rows apart from 16 bytes ({})", name_of(id));
    }
  }
  return "";
}

ScanTiling choose_tiling(const StateScanParams& p, bool raw_dq) {
  if (raw_dq) {
    if (p.heads.V % 128 != 0) return ScanTiling::kNarrowRawDq;
    return p.heads.V % 256 != 0 ? ScanTiling::kWideRawDq : ScanTiling::kWideRawDqPair;
  }
  if (p.heads.V % 128 != 0) return ScanTiling::kNarrow;
  const int64_t wide = p.sequences.count * p.heads.HV * (p.heads.V / 128);
  return 2 * wide <= sm_count() ? ScanTiling::kNarrow : ScanTiling::kWide;
}

void scan_on_hopper(Pipeline& run) {
  ScanRequest request{{run[kKg], run[kW], run[kU], run[kGamma], run.state(kInitialState), run[kH],
                       run[kVNew], run.state(kFinalState), run.heads(), run.sequences()},
                      takes_part(run.problem(), kDo) ? run[kDo] : Tensor{},
                      run[kDqRaw]};
  const Sizes& sizes = run.problem().sizes;
  const int64_t parts = run.has(kDqRaw) ? raw_dq_parts(sizes.V) : 1;
  if (parts > 1) {
    request.dq_raw = run.scratch({parts * sizes.B, sizes.T, sizes.HV, sizes.K});
    request.dq_part = sizes.B * request.dq_raw.stride[0];
  }
  run(launch_state_scan, request);
  if (parts > 1) {
    run(launch_raw_dq_sum, RawDqSumParams{request.dq_raw, request.dq_part, parts, run[kDqRaw],
                                          run.heads(), run.sequences()});
  }
  run.finish();
}

HopperRow row_of(const Problem& problem) {
  HopperRow row{"sm90_state_scan",
                scan_on_hopper,
                cuda::stage_state_scan,
                {kKg, kW, kU, kGamma, kH, kVNew, kDqRaw}};
  if (takes_part(problem, kDo)) row.in_units.push_back(kDo);
  return row;
}

}  // namespace

std::string state_scan_obstacle(const Problem& problem) {
  const Sizes& s = problem.sizes;
  if (s.K != 64 && s.K != 128) return fmt::format("K = {} (64 or 128)", s.K);
  if (s.V % kWarpgroupColumns != 0) return fmt::format("V = {} (a multiple of 64)", s.V);
  if (problem.chunk_size != kScanChunk) return fmt::format("chunk_size {}", problem.chunk_size);
  if (s.T == 0 || problem.sequences() == 0) return "no tokens";
  const DType io = problem[kKg].dtype;
  if (io != DType::kBF16 && io != DType::kF16) return fmt::format("{} tensors (kg)", name_of(io));
  for (const TensorId id : {kW, kU, kH, kVNew, kDo}) {
    const DType dtype = problem[id].dtype;
    if (takes_part(problem, id) && dtype != io) {
      return fmt::format("{} tensors beside {} ones ({})", name_of(dtype), name_of(io),
                         name_of(id));
    }
  }
  for (const TensorId id : {kGamma, kInitialState, kFinalState, kDqRaw}) {
    const DType dtype = problem[id].dtype;
    if (problem.has(id) && dtype != DType::kF32) {
      return fmt::format("{} tensors ({})", name_of(dtype), name_of(id));
    }
  }
  return layout_obstacle(problem);
}

int64_t raw_dq_parts(int64_t V) { return V / (V % 128 != 0 ? 64 : V % 256 != 0 ? 128 : 256); }

Status launch_state_scan(const ScanRequest& request, const ScanKernel& kernel,
                         cudaStream_t stream) {
  const StateScanParams& params = request.scan;
  const Heads& heads = params.heads;
  const Sequences& sequences = params.sequences;
  const int64_t B = sequences.cu.data ? 1 : sequences.count;
  ScanParams p{};
  Status status;
  const auto encode = [&](CUtensorMap& map, const char* name, const Tensor& t,
                          const TensorMapShape& shape) {
    if (t.data == nullptr || !status.ok()) return;
    status = make_tensor_map(map, name, t, shape);
  };
  const auto tokens = [&](const Tensor& t, int64_t width) {
    return token_map(t, width, heads.HV, sequences.T, B);
  };
  encode(p.kg, "kg", params.kg, tokens(params.kg, heads.K));
  encode(p.w, "w", params.w, tokens(params.w, heads.K));
  encode(p.u, "u", params.u, tokens(params.u, heads.V));
  encode(p.v_new, "v_new", params.v_new, tokens(params.v_new, heads.V));
  encode(p.grad_o, "do", request.grad_o, tokens(request.grad_o, heads.V));
  encode(p.h, "h", params.h,
         checkpoint_map(params.h, heads.V, heads.K, heads.HV, sequences.chunk_rows));
  if (!status.ok()) return status;
  p.gamma = params.gamma;
  p.initial_state = params.initial_state;
  p.final_state = params.final_state;
  p.v_new_rows = params.v_new;
  p.heads = heads;
  p.sequences = sequences;
  p.dq_raw = request.dq_raw;
  p.dq_part = request.dq_part;
  p.has_h = params.h.data != nullptr;
  const int64_t blocks =
      std::min(sequences.count * heads.HV * (heads.V / kernel.v_tile), kMostBlocks);
  void* arguments[] = {&p};
  return launch_raw({"sm90_state_scan", blocks, kernel.threads, kernel.shared_bytes},
                    reinterpret_cast<const void*>(kernel.kernel), arguments, stream);
}

Status launch_state_scan(const ScanRequest& request, bool, cudaStream_t stream) {
  const StateScanParams& p = request.scan;
  const bool fp16 = p.kg.dtype == static_cast<int32_t>(DType::kF16);
  const auto instance = p.heads.K == 64 ? (fp16 ? state_scan_fp16_k64 : state_scan_bf16_k64)
                                        : (fp16 ? state_scan_fp16_k128 : state_scan_bf16_k128);
  return launch_state_scan(request, instance(choose_tiling(p, request.dq_raw.data != nullptr)),
                           stream);
}

Result<std::unique_ptr<Executor>> make_state_scan(const Problem& problem, const Device& device,
                                                  const Options& options) {
  if (Status status = check_hopper(device, state_scan_obstacle(problem)); !status.ok()) {
    return status;
  }
  return make_row(row_of(problem), problem, device, options);
}

}  // namespace kda::cuda::sm90
