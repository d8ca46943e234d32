#include "cuda/sm90/chunk_fwd/chunk_fwd.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "cuda/launch.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd_op.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/chunk_fwd/instances/instances.h"
#include "cuda/sm90/fallback.h"
#include "cuda/sm90/requirements.h"
#include "cuda/tensor_map.h"

namespace kda::cuda::sm90 {
namespace {

using enum TensorId;

constexpr std::initializer_list<TensorId> kInUnits = {kQ, kK, kV, kG, kO, kH};

constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();

ChunkForwardKernels kernels_of(const PrepParams& p) {
  const bool fp16 = p.q.dtype == static_cast<int32_t>(DType::kF16);
  if (p.heads.K == 64) return fp16 ? chunk_fwd_fp16_k64() : chunk_fwd_bf16_k64();
  return fp16 ? chunk_fwd_fp16_k128() : chunk_fwd_bf16_k128();
}

/// Blocks of prep that an SM holds.
int32_t prep_blocks_an_sm(const PrepParams& p) {
  constexpr std::size_t kSharedBytes = 228 * 1024;
  constexpr std::size_t kReserved = 1024;  // a block's
  const std::size_t bytes = kernels_of(p).prep_shared_bytes + kReserved;
  return std::min(kPrepBlocksPerSm, static_cast<int32_t>(kSharedBytes / bytes));
}

/// Blocks of prep that walk over its items, all at once on the GPU; 0: one an item. S1: 0.384 ms
/// instead of 0.401; with given gates one an item is faster, 0.348 to 0.369. bf16 alone: of it an
/// SM holds five blocks, of fp16 two; with three those of bf16 are slower, 0.445 to 0.401.
int32_t walking_blocks(const Problem& problem, const PrepParams& prep) {
  if (problem[kQ].dtype != DType::kBF16 || problem.gate == Gate::kNone) return 0;
  return sm_count() * prep_blocks_an_sm(prep);
}

}  // namespace

Status launch_prep(const PrepParams& params, bool, cudaStream_t stream) {
  PrepParams p = params;
  const ChunkForwardKernels kernels = kernels_of(p);
  const int64_t items = p.sequences.chunk_rows * p.heads.HV;
  int64_t blocks = p.blocks > 0 ? std::min<int64_t>(p.blocks, items) : items;
  const bool beside = p.ready != nullptr;
  if (beside) {
    p.counters = p.ready + items;
    blocks = p.room.blocks;
    // A kernel and not a memset: prep starts beside it.
    const ClearParams clear{p.ready, items + kPrepCounters};
    const int64_t clear_blocks = (clear.count + kClearThreads - 1) / kClearThreads;
    Status status = launch({"sm90_chunk_fwd_clear", clear_blocks, kClearThreads}, clear_kernel(),
                           clear, stream);
    if (!status.ok()) return status;
  }
  return launch({"sm90_chunk_fwd_prep", blocks, kPrepThreads, kernels.prep_shared_bytes, beside},
                beside ? kernels.prep_beside : kernels.prep, p, stream);
}

namespace {

/// Tiles of 32 tokens and 64 columns.
TensorMapShape token_map(const Tensor& t, const Sizes& s) {
  return {{s.V, s.HV, s.T, s.B},
          {t.stride[3], t.stride[2], t.stride[1], t.stride[0]},
          {kGroupColumns, 1, kChunk, 1}};
}

/// Tiles of K x 64 columns of checkpoints.
TensorMapShape checkpoint_map(const Tensor& t, const Sizes& s, int64_t rows) {
  return {{s.V, s.K, s.HV, rows},
          {t.stride[3], t.stride[2], t.stride[1], t.stride[0]},
          {kGroupColumns, static_cast<int32_t>(s.K), 1, 1}};
}

}  // namespace

Status launch_scan(const ScanLaunch& scan, bool, cudaStream_t stream) {
  ScanParams p = scan.params;
  Sizes s;
  s.B = p.sequences.cu.data ? 1 : p.sequences.count;
  s.T = p.sequences.T;
  s.HV = p.heads.HV;
  s.K = p.heads.K;
  s.V = p.heads.V;
  Status status = make_tensor_map(p.v_map, scan.name, p.v, token_map(p.v, s));
  if (status.ok() && p.h.data != nullptr) {
    status = make_tensor_map(p.h_map, scan.name, p.h, checkpoint_map(p.h, s, p.h_row_count));
  }
  if (!status.ok()) return status;
  const bool has_h = p.h.data != nullptr;
  const int64_t heads = (p.segment > 0 ? p.segment_rows : p.sequences.count) * s.HV;
  const int64_t columns = s.V + (p.transitions.data != nullptr ? s.K : 0);
  const int32_t sms = sm_count();
  p.shape = scan_shape(heads * p.side_by_side, columns, p.ready != nullptr ? sms / 2 : sms);
  const int bytes =
      s.K == 64 ? scan_shared_bytes<64>(p.shape, has_h) : scan_shared_bytes<128>(p.shape, has_h);
  const int64_t blocks = heads * (columns / (p.shape.groups * kGroupColumns));
  void* arguments[] = {&p};
  return launch_raw({scan.name, blocks, scan_threads(p.shape.groups, scan.has_storing_warps),
                     static_cast<std::size_t>(bytes), scan.beside_last},
                    reinterpret_cast<const void*>(scan.kernel), arguments, stream);
}

Status launch_compose(const ComposeParams& compose, bool, cudaStream_t stream) {
  ComposeParams p = compose;
  const int64_t heads = p.sequences.count * p.heads.HV;
  p.groups = compose_groups(heads, p.heads.V);
  const ComposeKernel kernel = p.heads.K == 64 ? compose_k64() : compose_k128();
  return launch({"sm90_chunk_fwd_compose", heads * (p.heads.V / (p.groups * kComposeColumns)),
                 kernel.threads, kernel.shared_bytes(p.groups), true},
                kernel.kernel, p, stream);
}

PrepParams prep_params(Pipeline& run) {
  const Problem& problem = run.problem();
  PrepParams prep;
  prep.q = run[kQ];
  prep.k = run[kK];
  prep.beta = run[kBeta];
  prep.gate = run.gate();
  prep.sequences = run.sequences_in_chunks(kChunk);
  prep.heads = run.heads();
  const int64_t record = prep.heads.K == 64 ? Record<64>::kBytes : Record<128>::kBytes;
  prep.records = static_cast<std::byte*>(
      run.bytes(prep.sequences.chunk_rows * prep.heads.HV, static_cast<std::size_t>(record)));
  prep.beta_factor = problem.allow_neg_eigval ? 2 : 1;
  prep.qk_l2norm = problem.qk_l2norm;
  prep.beta_sigmoid = problem.beta_sigmoid;
  return prep;
}

PrepParams prepare_records(Pipeline& run) {
  PrepParams prep = prep_params(run);
  prep.blocks = walking_blocks(run.problem(), prep);
  run(launch_prep, prep);
  return prep;
}

const char* tile_obstacle(const Tensor& t, const Sizes& sizes) {
  return tensor_map_obstacle(token_map(t, sizes));
}

std::string size_obstacle(const Problem& problem) {
  const Sizes& s = problem.sizes;
  if (s.K != 64 && s.K != 128) return fmt::format("K = {} (64 or 128)", s.K);
  if (s.V % kGroupColumns != 0) return fmt::format("V = {} (a multiple of 64)", s.V);
  if (s.T == 0 || problem.sequences() == 0) return "no tokens";
  for (const TensorId id : {kV, kDo, kDv, kO, kH}) {
    if (!problem.has(id)) continue;
    const Tensor t = tensor_of(problem, {}, id);
    const char* const obstacle =
        id == kH ? tensor_map_obstacle(checkpoint_map(t, s, problem.chunk_rows()))
                 : tile_obstacle(t, s);
    if (*obstacle != '\0') return fmt::format("{} ({})", obstacle, name_of(id));
  }
  const int64_t rows = s.B * (s.T / kChunk + 1) + problem.sequences();
  return rows > kMostBlocks / s.HV ? "more chunks than one grid holds" : "";
}

namespace {

/// The start of every segment but the first ones, for `scan`; compose.cuh.
void find_starts(Pipeline& run, ScanParams& scan, int32_t segment,
                 void (*summary_kernel)(ScanParams)) {
  const Heads& heads = scan.heads;
  scan.segment = segment;
  scan.segment_rows =
      segment_rows(run.problem().packed(), scan.sequences.count, scan.sequences.T, segment);
  // Both with k fastest.
  scan.starts = run.scratch({scan.segment_rows, heads.HV, heads.V, heads.K});
  std::swap(scan.starts.stride[2], scan.starts.stride[3]);
  ScanParams summary = scan;
  summary.h = {};
  summary.transitions = run.scratch({scan.segment_rows, heads.HV, heads.K, heads.K});
  std::swap(summary.transitions.stride[2], summary.transitions.stride[3]);
  run(launch_scan, ScanLaunch{"sm90_chunk_fwd_summary", summary, summary_kernel, true});
  run(launch_compose,
      ComposeParams{scan.starts, summary.transitions, scan.sequences, heads, segment});
}

}  // namespace

void forward_in_segments(Pipeline& run, int32_t segment) {
  const Problem& problem = run.problem();
  PrepParams prep = prep_params(run);
  prep.contain = true;
  auto* const ready = static_cast<uint32_t*>(
      run.bytes(prep.sequences.chunk_rows * prep.heads.HV + kPrepCounters, sizeof(uint32_t)));
  const int32_t sms = sm_count();
  const int64_t heads = prep.sequences.count * prep.heads.HV;
  const bool bf16 = problem[kQ].dtype == DType::kBF16;  // of fp16 an SM holds two blocks of prep
  // Where prep takes all chunks at once, the first records are hardly earlier than the last.
  const int32_t at_once = sms * prep_blocks_an_sm(prep);
  const bool one_round = prep.sequences.chunk_rows * prep.heads.HV <= at_once;
  const bool beside = segment == 0 && bf16 && !one_round && runs_beside(heads, prep.heads.V, sms);
  if (beside) {
    const int groups = scan_shape(heads, prep.heads.V, sms / 2).groups;
    prep.ready = ready;
    prep.room = prep_room(scan_blocks(heads, prep.heads.V, groups), sms, prep_blocks_an_sm(prep));
  } else {
    prep.blocks = walking_blocks(problem, prep);
  }
  run(launch_prep, prep);

  ScanParams scan;
  scan.ready = prep.ready;
  scan.records = prep.records;
  scan.v = run[kV];
  scan.o = run[kO];
  scan.h = run[kH];
  scan.initial_state = run.state(kInitialState);
  scan.final_state = run.state(kFinalState);
  scan.sequences = prep.sequences;
  scan.h_rows = run.sequences().offsets;
  scan.h_row_count = run.sequences().chunk_rows;
  scan.heads = prep.heads;
  scan.chunk_size = problem.chunk_size;
  scan.scale = static_cast<float>(run.scale());
  const ChunkForwardKernels kernels = kernels_of(prep);
  if (segment > 0) find_starts(run, scan, segment, kernels.summary);
  run(launch_scan, ScanLaunch{"sm90_chunk_fwd_scan", scan, kernels.scan, true, true});
  run.finish();
}

namespace {

void prep_and_scan(Pipeline& run) {
  const Sizes& s = run.problem().sizes;
  const int32_t segment = segment_tokens(s.HV, s.V);
  forward_in_segments(run, segments_help(s.T, segment) ? segment : 0);
}

/// "" or the feature that this leaf lacks.
std::string obstacle_of(const Problem& problem) {
  if (std::string obstacle = size_obstacle(problem); !obstacle.empty()) return obstacle;
  if (problem.has(kAqk) || problem.has(kA)) {
    return fmt::format("saved scores ({})", problem.has(kAqk) ? "Aqk" : "A");
  }
  if (std::string obstacle = dtype_obstacle(problem, {kO, kH}, {kInitialState, kFinalState});
      !obstacle.empty()) {
    return obstacle;
  }
  return uneven_rows(problem, kInUnits);
}

}  // namespace

Result<std::unique_ptr<Executor>> make_chunk_fwd(const Problem& problem, const Device& device,
                                                 const Options& options) {
  if (Status status = check_hopper(device, obstacle_of(problem)); !status.ok()) return status;
  const HopperRow row{"sm90_chunk_fwd", prep_and_scan, cuda::chunk_fwd, kInUnits};
  return make_row(row, problem, device, options);
}

}  // namespace kda::cuda::sm90
