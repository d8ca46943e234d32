// The float64 reference family: every operation, option and dtype, for clarity and as the measure
// of the others.
#include <omp.h>

#include <algorithm>
#include <array>
#include <memory>

#include <fmt/format.h>

#include "core/executor.h"
#include "core/sequences.h"
#include "cpu/padding.h"
#include "cpu/reference_operations.h"
#include "cpu/team.h"

namespace kda {
namespace {

constexpr int64_t kMostDoubles = reference::Carver::kMost / 2;

using Scratch = int64_t (*)(const Problem&);

int64_t nothing(const Problem&) { return 0; }

/// More threads than this find no work, but would need scratch.
int64_t most_tasks(const Problem& problem) {
  if (problem.operation == Operation::kChunkBackward) {
    return problem.sequences() * problem.sizes.H;
  }
  return std::max(problem.sequences(), problem.chunk_rows()) * problem.sizes.HV;
}

class ReferenceExecutor final : public Executor {
 public:
  ReferenceExecutor(const Problem& problem, const Device& device,
                    Status (*compute)(const reference::Run&), int threads, int64_t shared,
                    int64_t scratch)
      : Executor(problem, device),
        compute_(compute),
        threads_(threads),
        shared_(shared),
        scratch_(scratch) {}

  std::size_t workspace_bytes() const override {
    return static_cast<std::size_t>(shared_ + threads_ * scratch_) * sizeof(double);
  }

  Status run(const Args& args, void*) const override {
    Result<SequenceList> list = read_sequences(problem(), args);
    if (!list.ok()) return list.status();
    auto* workspace = static_cast<double*>(args.workspace);
    if (Status status = compute_({problem(), args, *list, cpu::team_size(threads_), workspace,
                                  workspace + shared_, scratch_});
        !status.ok()) {
      return status;
    }
    zero_padding(problem(), args, *list);
    return {};
  }

 private:
  Status (*compute_)(const reference::Run&);
  int threads_;
  int64_t shared_;
  int64_t scratch_;
};

template <auto run, Scratch scratch_of, Scratch shared_of>
Result<std::unique_ptr<Executor>> create(const Problem& problem, const Device& device,
                                         const Options& options) {
  const int64_t wanted = options.threads > 0 ? options.threads : omp_get_max_threads();
  const int64_t threads = std::clamp<int64_t>(most_tasks(problem), 1, wanted);
  const int64_t shared = shared_of(problem);
  const int64_t scratch = scratch_of(problem);
  if (shared > kMostDoubles || scratch > kMostDoubles / threads) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("does not take sizes that need a workspace of more than {} doubles",
                              kMostDoubles));
  }
  constexpr auto kBytes = static_cast<int64_t>(sizeof(double));
  const int kept = cpu::threads_within(options.workspace_limit, static_cast<int>(threads),
                                       shared * kBytes, scratch * kBytes);
  return std::unique_ptr<Executor>(
      std::make_unique<ReferenceExecutor>(problem, device, run, kept, shared, scratch));
}

template <auto run, Scratch scratch, Scratch shared = nothing>
constexpr Implementation row(std::string_view name, Operation operation,
                             std::string_view features) {
  return {name, "reference", operation, DeviceType::kCpu, features, create<run, scratch, shared>};
}

constexpr std::string_view kTokens = "float64 token recurrence; every option, dtype and layout";
constexpr std::string_view kStage = "float64, straight from the formulas; every dtype and layout";

constexpr std::array kRows = {
    row<reference::chunk_forward, reference::chunk_forward_scratch>(
        "reference_chunk_fwd", Operation::kChunkForward, kTokens),
    row<reference::chunk_backward, reference::chunk_backward_scratch,
        reference::chunk_backward_shared>("reference_chunk_bwd", Operation::kChunkBackward,
                                          kTokens),
    row<reference::recurrent, reference::chunk_forward_scratch>("reference_recurrent",
                                                                Operation::kRecurrent, kTokens),
    row<reference::gate_cumsum, reference::gate_cumsum_scratch>("reference_gate_cumsum",
                                                                Operation::kGateCumsum, kStage),
    row<reference::intra, reference::intra_scratch>("reference_intra", Operation::kIntra, kStage),
    row<reference::wu, reference::wu_scratch>("reference_wu", Operation::kWu, kStage),
    row<reference::state_scan, reference::state_scan_scratch>("reference_state_scan",
                                                              Operation::kStateScan, kStage),
    row<reference::output, reference::output_scratch>("reference_output", Operation::kOutput,
                                                      kStage),
    row<reference::reverse_scan, reference::reverse_scan_scratch>("reference_reverse_scan",
                                                                  Operation::kReverseScan, kStage),
    row<reference::wy_backward, reference::wy_backward_scratch>("reference_wy_bwd",
                                                                Operation::kWyBackward, kStage),
    row<reference::intra_backward, reference::intra_backward_scratch>(
        "reference_intra_bwd", Operation::kIntraBackward, kStage),
};

}  // namespace

std::span<const Implementation> reference_implementations() { return kRows; }

}  // namespace kda
