// Chunk forward on Hopper in two kernels: `prep` is parallel over chunks and turns raw inputs into
// records, `scan` walks the chunks of a sequence and value head with the state in registers.
#pragma once

#include <cstddef>
#include <string>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "kda/problem.h"
#include "kda/status.h"

namespace kda::cuda {
class Pipeline;
}

namespace kda::cuda::sm90 {

struct PrepParams {
  Tensor q, k, beta;
  GateParams gate;
  Sequences sequences;  ///< with C = 32
  Heads heads;
  std::byte* records = nullptr;  ///< [chunk_rows, HV] of Record<K>::kBytes
  uint32_t* ready = nullptr;     ///< a scan runs beside: set once its record is written
  uint32_t* counters = nullptr;  ///< with ready
  PrepRoom room;                 ///< with ready
  int32_t blocks = 0;            ///< of the grid without `ready`; 0: one an item
  float beta_factor = 1;
  bool qk_l2norm = false;
  bool beta_sigmoid = false;
  bool contain = false;  ///< tokens must not see what is not finite behind them (solve.cuh)
};

/// Flags and counters before prep.
struct ClearParams {
  uint32_t* words = nullptr;
  int64_t count = 0;
};

/// What a walk over the chunks of a sequence reads and writes.
enum class Walk {
  kForward,  ///< v -> o, h, final_state
  kSummary,  ///< of a segment: v -> the state that it leaves, and the matrix by which it changes
             ///< one
  kRescan,   ///< v -> v_new, h, or v_new alone from a kept h
  kReverse   ///< from the last chunk: do -> R / m, dh / m, dinitial_state
};

struct ScanParams {
  CUtensorMap v_map, h_map;  ///< of v and h; launch_scan fills them and `shape`
  ScanShape shape;
  const std::byte* records = nullptr;
  const uint32_t* ready = nullptr;    ///< of each record, where prep may still be running
  Tensor v, o, h;                     ///< in the order of Walk's comments; h is optional
  Tensor initial_state, final_state;  ///< strides in the order (sequence, head, k, v); optional
  Sequences sequences;                ///< with C = 32
  Tensor starts;       ///< [segment_rows, HV, V, K] fp32, where sequences are cut into segments;
                       ///< kRescan: the kept h
  Tensor transitions;  ///< kSummary: [segment_rows, HV, K, K] fp32
  int64_t segment_rows = 0;
  int32_t segment = 0;              ///< tokens, a multiple of 64; 0: sequences are not cut
  const int64_t* h_rows = nullptr;  ///< packed: first row of h of each sequence
  int64_t h_row_count = 0;          ///< rows of h, written or kept
  Heads heads;
  int32_t chunk_size = 64;   ///< the caller's: a row of h each
  int32_t side_by_side = 1;  ///< scans that run at the same time
  float scale = 1;           ///< of o; kReverse: of do, a power of two
  float mantissa = 1;        ///< kReverse: m, the rest of the scale
  float* units = nullptr;    ///< kReverse in fp16: [2 h_row_count, HV, V / 64], rev_unit.cuh
};

/// After kSummary: the start of a segment is transition times the start of the one before, plus
/// what that one's own tokens left.
struct ComposeParams {
  Tensor starts;
  Tensor transitions;
  Sequences sequences;
  Heads heads;
  int32_t segment = 0;
  int32_t groups = 1;  ///< launch_compose fills it
};

Status launch_prep(const PrepParams& params, bool fp64, cudaStream_t stream);
Status launch_compose(const ComposeParams& compose, bool fp64, cudaStream_t stream);

/// Prep on the inputs of a forward or backward, into records of the workspace.
PrepParams prep_params(Pipeline& run);
/// The same, launched.
PrepParams prepare_records(Pipeline& run);

/// The whole forward, its sequences cut into segments of so many tokens (a multiple of 64); 0: not
/// cut.
void forward_in_segments(Pipeline& run, int32_t segment);

/// "" or why `scan` cannot read or write tiles of a tensor [B,T,HV,V].
const char* tile_obstacle(const Tensor& t, const Sizes& sizes);

/// "" or which size these kernels do not take.
std::string size_obstacle(const Problem& problem);

struct ScanLaunch {
  const char* name;
  ScanParams params;
  void (*kernel)(ScanParams);
  bool beside_last = false;  ///< needs nothing of the launch before but what it waits for itself
  bool has_storing_warps = false;
};
Status launch_scan(const ScanLaunch& scan, bool fp64, cudaStream_t stream);

}  // namespace kda::cuda::sm90
