// The backward on Hopper: prep -> re-scan (h, v_new) -> reverse scan (dh, R) -> grad, parallel over
// chunks, then the generic launches that end the sums over chunks and groups of value heads. Where
// the caller kept h, the re-scan is parallel over segments of sequences and leaves v_new alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include <fmt/format.h>

#include "core/slices.h"
#include "cuda/sm90/chunk_bwd/chunk_bwd_op.h"
#include "cuda/sm90/chunk_bwd/grad.h"
#include "cuda/sm90/chunk_bwd/instances/scan_instances.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/fallback.h"
#include "cuda/sm90/requirements.h"

namespace kda::cuda::sm90 {
namespace {

using enum TensorId;

constexpr std::initializer_list<TensorId> kInUnits = {kQ, kK, kV, kG, kDo, kDq, kDk, kDv, kDg};

constexpr int kMostExponent = 32;  ///< do times 2^e has to stay within the range of bf16

/// Of a segment that the re-scan walks from a kept checkpoint. A block of its own for 16 chunks: it
/// fills its stages and reads its start once. Counted from the first token of the sequence, so that
/// bits depend on nothing else.
constexpr int32_t kKeptSegment = 512;

DType io_of(const Problem& problem) { return problem[kQ].dtype; }

/// scale = mantissa * factor, factor a power of two, or 0. Multiplying do by the factor costs the
/// reverse scan instructions: in bf16, which has the range, it is 1 for common scales; else
/// 1 <= |mantissa| < 2.
struct Scale {
  float mantissa;
  float factor;
  int exponent;
};

Scale split(double scale, DType io) {
  constexpr int kCommon = 8;
  if (scale == 0) return {1, 0, 0};
  int exponent = 0;
  const double half = std::frexp(scale, &exponent);
  if (io == DType::kBF16 && std::abs(exponent) <= kCommon) {
    return {static_cast<float>(scale), 1, exponent - 1};
  }
  return {static_cast<float>(2 * half), std::ldexp(1.0f, exponent - 1), exponent - 1};
}

/// Contiguous scratch of q's dtype.
Tensor scratch_io(Pipeline& run, const int64_t (&shape)[4]) {
  Tensor t;
  t.data = run.bytes(shape[0] * shape[1] * shape[2] * shape[3], 2);
  t.stride[3] = 1;
  for (int i = 2; i >= 0; --i) t.stride[i] = t.stride[i + 1] * shape[i + 1];
  t.dtype = static_cast<int32_t>(io_of(run.problem()));
  return t;
}

/// grad writes dq and dk of the inputs itself.
bool writes_keys(const Problem& problem) {
  const DType dtype = problem[kDq].dtype;
  return problem.sizes.HV == problem.sizes.H && problem.has(kDq) && problem.has(kDk) &&
         dtype == problem[kDk].dtype && (dtype == io_of(problem) || dtype == DType::kF32);
}

/// v_new has room in dq, of which grad writes a chunk once it has read the same one of v_new.
bool fits_dq(Pipeline& run) {
  const Problem& problem = run.problem();
  const Sizes& s = problem.sizes;
  return writes_keys(problem) && problem[kDq].dtype == io_of(problem) && s.K == s.V &&
         *tile_obstacle(run[kDq], s) == '\0';
}

/// The caller's h serves as the backward's: rows of 64 tokens in q's type. Any other h is not read.
bool keeps_h(const Problem& problem) {
  return problem[kH].dtype == io_of(problem) && problem.chunk_size == kGradTokens;
}

BackwardScans scans_of(const Problem& problem) {
  const bool fp16 = io_of(problem) == DType::kF16;
  if (problem.sizes.K == 64) return fp16 ? backward_scans_fp16_k64() : backward_scans_bf16_k64();
  return fp16 ? backward_scans_fp16_k128() : backward_scans_bf16_k128();
}

/// What both walks have in common.
ScanParams scan_params(const PrepParams& prep, const GradParams& grad) {
  ScanParams scan;
  scan.records = prep.records;
  scan.sequences = prep.sequences;
  scan.h_rows = grad.sequences.offsets;
  scan.h_row_count = grad.sequences.chunk_rows;
  scan.heads = prep.heads;
  scan.chunk_size = kGradTokens;
  scan.side_by_side = 2;
  return scan;
}

/// v_new and h, the latter only if the caller did not keep it.
ScanParams rescan_params(Pipeline& run, const PrepParams& prep, GradParams& grad) {
  const Sizes& s = run.problem().sizes;
  ScanParams scan = scan_params(prep, grad);
  scan.v = run[kV];
  scan.o = grad.v_new = fits_dq(run) ? run[kDq] : scratch_io(run, {s.B, s.T, s.HV, s.V});
  scan.initial_state = run.state(kInitialState);
  if (keeps_h(run.problem())) {
    scan.starts = grad.h = run[kH];
    scan.segment = kKeptSegment;
    scan.segment_rows =
        segment_rows(run.problem().packed(), prep.sequences.count, s.T, kKeptSegment);
  } else {
    scan.h = grad.h = scratch_io(run, {scan.h_row_count, s.HV, s.K, s.V});
  }
  return scan;
}

/// R and dh.
ScanParams reverse_params(Pipeline& run, const PrepParams& prep, GradParams& grad) {
  const Sizes& s = run.problem().sizes;
  const Scale scale = split(run.scale(), io_of(run.problem()));
  ScanParams scan = scan_params(prep, grad);
  const int64_t rows = scan.h_row_count;
  scan.v = run[kDo];
  // dv = m beta R: grad replaces each element by the one that it reads.
  scan.o = grad.R = run.has(kDv) ? run[kDv] : scratch_io(run, {s.B, s.T, s.HV, s.V});
  scan.h = grad.dh = scratch_io(run, {rows, s.HV, s.K, s.V});
  scan.initial_state = run.state(kDfinalState);
  scan.final_state = run.state(kDinitialState);
  scan.scale = scale.factor;
  scan.mantissa = scale.mantissa;
  if (io_of(run.problem()) == DType::kF16) {
    scan.units = static_cast<float*>(run.scratch({2 * rows, s.HV, s.V / kGroupColumns}).data);
    grad.units = scan.units;
  }
  grad.mantissa = scale.mantissa;
  return scan;
}

/// Both walks, into `grad`, which knows its sequences. The second one runs on the multiprocessors
/// that the first leaves: last of all the many short blocks of a kept h.
void walk(Pipeline& run, const PrepParams& prep, GradParams& grad) {
  const bool kept = keeps_h(run.problem());
  const BackwardScans kernels = scans_of(run.problem());
  const ScanLaunch rescan{"sm90_chunk_bwd_rescan", rescan_params(run, prep, grad), kernels.rescan,
                          kept, true};
  const ScanLaunch reverse{"sm90_chunk_bwd_reverse_scan", reverse_params(run, prep, grad),
                           kernels.reverse, !kept, true};
  run(launch_scan, kept ? reverse : rescan);
  run(launch_scan, kept ? rescan : reverse);
}

/// dq and dk of the inputs from those of the value heads.
void sum_groups(Pipeline& run, const GradParams& grad) {
  Tensor rq;
  Tensor rk;
  if (grad.qk_l2norm) {
    ActivateParams norms;
    rq = norms.rq = run.scalars(run.problem().sizes.H);
    rk = norms.rk = run.scalars(run.problem().sizes.H);
    norms.q = run[kQ];
    norms.k = run[kK];
    norms.heads = run.heads();
    norms.sequences = run.sequences();
    run(launch_activate, norms);
  }
  ActivateBackwardParams sums;
  sums.groups = run.group_sums({{{kDq, grad.dq, run[kQ], rq}, {kDk, grad.dk, run[kK], rk}}});
  if (sums.groups.count == 0) return;
  sums.heads = run.heads();
  sums.sequences = run.sequences();
  run(launch_activate_bwd, sums);
}

void chunk_bwd(Pipeline& run) {
  const Problem& problem = run.problem();
  const Sizes& s = problem.sizes;
  const PrepParams prep = prepare_records(run);
  GradParams grad;
  grad.sequences = run.sequences_in_chunks(kGradTokens);
  walk(run, prep, grad);
  grad.records = prep.records;
  grad.record_sequences = prep.sequences;
  const int64_t rows = grad.sequences.chunk_rows;
  const int64_t blocks = std::min<int64_t>(rows * s.HV, kMostGradBlocks);
  grad.carry =
      static_cast<float4*>(run.bytes(blocks, static_cast<std::size_t>(grad_carry_bytes(s.K))));
  grad.q = prep.q;
  grad.k = prep.k;
  grad.v = run[kV];
  grad.beta = prep.beta;
  grad.grad_o = run[kDo];
  grad.gate = prep.gate;
  const bool direct = writes_keys(problem);
  grad.dq = direct ? run[kDq] : run.tokens(s.HV, s.K);
  grad.dk = direct ? run[kDk] : run.tokens(s.HV, s.K);
  grad.dv = run[kDv];
  grad.dg = run[kDg];
  const bool parameters = problem.has(kDALog) || problem.has(kDdtBias);
  if (parameters) grad.partial = static_cast<float*>(run.gate_partials(2 * rows).data);
  grad.dbeta = run[kDbeta];
  grad.heads = prep.heads;
  grad.scale = static_cast<float>(run.scale());
  grad.beta_factor = prep.beta_factor;
  grad.qk_l2norm = prep.qk_l2norm;
  grad.undo_l2norm = prep.qk_l2norm && direct;
  grad.beta_sigmoid = prep.beta_sigmoid;
  run(launch_grad, grad);
  if (parameters) run.reduce_gate(2 * rows);
  if (!direct) sum_groups(run, grad);
  run.finish();
}

/// "" or the feature that this leaf lacks.
std::string obstacle_of(const Problem& problem) {
  if (std::string obstacle = size_obstacle(problem); !obstacle.empty()) return obstacle;
  if (std::string obstacle =
          dtype_obstacle(problem, {kDo, kDv}, {kInitialState, kDfinalState, kDinitialState});
      !obstacle.empty()) {
    return obstacle;
  }
  const double scale = problem.effective_scale();
  if (!std::isfinite(scale) || std::abs(split(scale, io_of(problem)).exponent) > kMostExponent) {
    return fmt::format("scale = {} (0 or 2^-{} to 2^{} in size)", scale, kMostExponent,
                       kMostExponent);
  }
  return uneven_rows(problem, kInUnits);
}

/// Slices of heads, so that the workspace stays beside what the step leaves: S1 of the performance
/// suite has 1.0 GB of outputs and may take 2.5 GB over its inputs. Where the blocks of both scans
/// find a multiprocessor each, slices leave some of them idle for the length of a sequence, and the
/// workspace may be larger: S5 has 5.4 GB of outputs and may take 14. A kept h counts as workspace.
Result<Cut> choose_cut(const Problem& problem, const Device& device) {
  constexpr int64_t kAlwaysFine = 256'000'000;
  const Result<std::size_t> workspace = measure_workspace(problem, chunk_bwd);
  if (!workspace.ok()) return workspace.status();
  int64_t outputs = problem.bytes(kV);  // o of the forward
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (spec.role == Role::kOutput) outputs += problem.bytes(spec.id);
  }
  const int32_t sms = sm_count(device);
  const Sizes& s = problem.sizes;
  const int64_t narrow_blocks = 2 * problem.sequences() * s.HV * (s.V / kGroupColumns);
  int64_t limit = narrow_blocks <= sms ? outputs + outputs * 3 / 5 : outputs + outputs / 3;
  if (keeps_h(problem)) limit -= problem.bytes(kH);
  const int64_t columns = s.V % (kMostGroups * kGroupColumns) == 0 ? 2 : 1;
  const int64_t slices =
      count_slices({s.H, static_cast<int64_t>(*workspace), std::max(kAlwaysFine, limit),
                    narrow_blocks / s.H / columns, std::max(sms, 1)});
  return Cut{slices, 1};
}

}  // namespace

Result<std::unique_ptr<Executor>> make_chunk_bwd(const Problem& problem, const Device& device,
                                                 const Options& options) {
  if (Status status = check_hopper(device, obstacle_of(problem)); !status.ok()) return status;
  const Result<Cut> cut = choose_cut(problem, device);
  if (!cut.ok()) return cut.status();
  HopperRow row{"sm90_chunk_bwd", chunk_bwd, cuda::chunk_bwd, kInUnits};
  if (keeps_h(problem)) row.in_units.push_back(kH);
  return make_row(row, problem, device, options, *cut);
}

}  // namespace kda::cuda::sm90
