// The rows of the CPU backend in the list of implementations, and the executor behind all of them.
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/executor.h"
#include "cpu/cpu_kernels.h"
#include "cpu/cpu_run.h"
#include "cpu/padding.h"
#include "cpu/team.h"

namespace kda {
namespace cpu {
namespace {

int64_t heads_of(TaskKind kind, const Sizes& sizes) {
  const bool grouped = kind == TaskKind::kSequenceHead || kind == TaskKind::kChunkHead;
  return grouped ? sizes.H : sizes.HV;
}

bool by_chunk(TaskKind kind) {
  return kind == TaskKind::kChunkValueHead || kind == TaskKind::kChunkHead;
}

/// More tasks than a run can have.
int64_t most_tasks(const Kernel& kernel, const Problem& problem) {
  const int64_t parts = by_chunk(kernel.kind) ? problem.chunk_rows() : problem.sequences();
  return parts * heads_of(kernel.kind, problem.sizes);
}

// Beyond any machine, and far from where 64-bit byte counts end.
constexpr int64_t kMostBytes = int64_t{1} << 52;

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(const Problem& problem, const Device& device, const Kernel& kernel, int threads)
      : Executor(problem, device),
        kernel_(kernel),
        threads_(threads),
        scratch_(kernel.scratch(problem)),
        shared_bytes_(kernel.shared == nullptr ? 0 : (kernel.shared(problem) + 63) / 64 * 64) {}

  /// Fewer threads, if that keeps to the limit; where it fits().
  void keep_to(std::size_t limit) {
    threads_ = threads_within(limit, threads_, shared_bytes_, scratch_bytes());
  }

  std::size_t workspace_bytes() const override {
    return static_cast<std::size_t>(shared_bytes_ + threads_ * scratch_bytes());
  }

  /// workspace_bytes() would not overflow and could exist.
  bool fits() const {
    return shared_bytes_ <= kMostBytes / 2 && scratch_ <= kMostBytes / 2 / threads_ / 4;
  }

  Status run(const Args& args, void*) const override {
    Result<SequenceList> list = read_sequences(problem(), args);
    if (!list.ok()) return list.status();
    Run run(problem(), args, std::move(*list));
    if (Status status = check_indices(run); !status.ok()) return status;
    if (Status status = check_counts(run); !status.ok()) return status;
    zero_padding(problem(), args, run.list);
    if (!has_work(problem(), run.list.tokens_used)) return {};
    if (by_chunk(kernel_.kind)) list_chunks(run);
    auto* shared = static_cast<std::byte*>(args.workspace);
    std::byte* scratch = shared + shared_bytes_;
    const auto parts = static_cast<int64_t>(by_chunk(kernel_.kind) ? run.chunks.size()
                                                                   : run.list.sequences.size());
    const int64_t tasks = parts * heads_of(kernel_.kind, problem().sizes);
#pragma omp parallel for num_threads(threads_for(tasks)) schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      auto* own = reinterpret_cast<float*>(scratch + omp_get_thread_num() * scratch_bytes());
      kernel_.run(run, {task, own, shared});
    }
    if (kernel_.finish != nullptr) {
      for (int64_t hv = 0; hv < problem().sizes.HV; ++hv) {
        kernel_.finish(run, hv, shared, reinterpret_cast<float*>(scratch));
      }
    }
    return {};
  }

 private:
  int threads_for(int64_t tasks) const {
    return team_size(static_cast<int>(std::clamp<int64_t>(tasks, 1, threads_)));
  }

  int64_t scratch_bytes() const { return scratch_ * static_cast<int64_t>(sizeof(float)); }

  static void list_chunks(Run& run) {
    run.chunks.reserve(static_cast<std::size_t>(run.list.chunk_rows_used));
    for (const Sequence& sequence : run.list.sequences) {
      for (int64_t c = 0; c < run.chunk_count(sequence.index); ++c) {
        run.chunks.push_back(run.chunk(sequence.index, c));
      }
    }
  }

  /// state_indices: -1 or a slot of the pool; where states are written, no slot twice.
  static Status check_indices(const Run& run) {
    const View& indices = run[TensorId::kStateIndices];
    if (!indices) return {};
    const int64_t P = run.problem.sizes.P;
    std::vector<bool> used(static_cast<std::size_t>(P), false);
    for (int64_t i = 0; i < indices.shape[0]; ++i) {
      int32_t slot;
      std::memcpy(&slot, indices.at(i), sizeof slot);
      if (slot < -1 || slot >= P) {
        return {StatusCode::kInvalidArgument,
                fmt::format("state_indices[{}]: found {}, expected -1..{}", i, slot, P - 1)};
      }
      if (slot == -1 || !run.problem.has(TensorId::kFinalState)) continue;
      if (used[static_cast<std::size_t>(slot)]) {
        return {StatusCode::kInvalidArgument,
                fmt::format("state_indices[{}]: found {}, expected a slot that no earlier sequence "
                            "has",
                            i, slot)};
      }
      used[static_cast<std::size_t>(slot)] = true;
    }
    return {};
  }

  /// num_accepted: at most the tokens of the sequence; of a skipped sequence it says nothing.
  static Status check_counts(const Run& run) {
    const View& accepted = run[TensorId::kNumAccepted];
    const View& indices = run[TensorId::kStateIndices];
    if (!accepted) return {};
    for (const Sequence& sequence : run.list.sequences) {
      int32_t slot = 0;
      int32_t count;
      if (indices) std::memcpy(&slot, indices.at(sequence.index), sizeof slot);
      std::memcpy(&count, accepted.at(sequence.index), sizeof count);
      if (slot < 0 || (count >= 0 && count <= sequence.length())) continue;
      return {StatusCode::kInvalidArgument,
              fmt::format("num_accepted[{}]: found {}, expected 0..{}, the tokens of the sequence",
                          sequence.index, count, sequence.length())};
    }
    return {};
  }

  Kernel kernel_;
  int threads_;
  int64_t scratch_;
  int64_t shared_bytes_;
};

Status check_features(const Problem& problem) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (problem[spec.id].dtype == DType::kF64) {
      return {StatusCode::kUnsupported,
              fmt::format("does not take fp64 tensors ({})", name_of(spec.id))};
    }
  }
  return {};
}

template <Kernel (*kKernel)()>
Result<std::unique_ptr<Executor>> create(const Problem& problem, const Device& device,
                                         const Options& options) {
  if (Status status = check_features(problem); !status.ok()) return status;
  const Kernel kernel = kKernel();
  const int wanted = options.threads > 0 ? options.threads : omp_get_max_threads();
  const int64_t tasks = std::max<int64_t>(most_tasks(kernel, problem), 1);
  const auto threads = static_cast<int>(std::min<int64_t>(wanted, tasks));
  auto executor = std::make_unique<CpuExecutor>(problem, device, kernel, threads);
  if (!executor->fits()) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("does not take sizes that need a workspace of more than {} bytes", kMostBytes));
  }
  executor->keep_to(options.workspace_limit);
  return std::unique_ptr<Executor>(std::move(executor));
}

constexpr std::string_view kFeatures =
    "bf16, fp16 and fp32 tensors in any mix, fp32 arithmetic, SIMD and threads";

template <Kernel (*kKernel)()>
constexpr Implementation row(std::string_view name, Operation operation) {
  return {name, "cpu", operation, DeviceType::kCpu, kFeatures, create<kKernel>};
}

constexpr std::array kRows = {
    row<chunk_forward_kernel>("cpu_chunk_fwd", Operation::kChunkForward),
    row<chunk_backward_kernel>("cpu_chunk_bwd", Operation::kChunkBackward),
    row<recurrent_kernel>("cpu_recurrent", Operation::kRecurrent),
    row<gate_cumsum_kernel>("cpu_gate_cumsum", Operation::kGateCumsum),
    row<intra_kernel>("cpu_intra", Operation::kIntra),
    row<wu_kernel>("cpu_wu", Operation::kWu),
    row<state_scan_kernel>("cpu_state_scan", Operation::kStateScan),
    row<output_kernel>("cpu_output", Operation::kOutput),
    row<reverse_scan_kernel>("cpu_reverse_scan", Operation::kReverseScan),
    row<wy_backward_kernel>("cpu_wy_bwd", Operation::kWyBackward),
    row<intra_backward_kernel>("cpu_intra_bwd", Operation::kIntraBackward),
};

}  // namespace
}  // namespace cpu

std::span<const Implementation> cpu_implementations() { return cpu::kRows; }

}  // namespace kda
