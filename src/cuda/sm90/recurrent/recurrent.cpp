#include "cuda/sm90/recurrent/recurrent.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "cuda/executor.h"
#include "cuda/launch.h"
#include "cuda/sm90/recurrent/config.h"
#include "cuda/sm90/recurrent/instances/instances.h"
#include "cuda/sm90/requirements.h"

namespace kda::cuda::sm90 {
namespace {

constexpr int64_t kCopyAlignment = 16;  // of bulk copies, in bytes

template <class... Parts>
Status unsupported(fmt::format_string<Parts...> text, Parts&&... parts) {
  return {StatusCode::kUnsupported, fmt::format(text, std::forward<Parts>(parts)...)};
}

/// A state must be one piece of memory that a bulk copy can move.
Status check_state(const Problem& problem, TensorId id) {
  const TensorLayout& layout = problem[id];
  if (!layout.present()) return {};
  if (layout.dtype != DType::kF32 && layout.dtype != DType::kBF16) {
    return unsupported("{} states ({})", name_of(layout.dtype), name_of(id));
  }
  const auto bytes = static_cast<int64_t>(size_of(layout.dtype));
  if (layout.stride[2] != kDim || layout.stride[3] != 1 ||
      layout.stride[0] * bytes % kCopyAlignment != 0 ||
      layout.stride[1] * bytes % kCopyAlignment != 0) {
    return unsupported("strides [{}] ({}): each state must be contiguous at a multiple of {} bytes",
                       fmt::join(layout.stride, ","), name_of(id), kCopyAlignment);
  }
  return {};
}

Status check_features(const Problem& problem) {
  const Sizes& s = problem.sizes;
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (problem[spec.id].dtype == DType::kF64) {
      return unsupported("fp64 tensors ({})", name_of(spec.id));
    }
  }
  if (s.K != kDim || s.V != kDim) return unsupported("K = {}, V = {}: only {}", s.K, s.V, kDim);
  const TensorLayout& initial = problem[TensorId::kInitialState];
  const TensorLayout& final = problem[TensorId::kFinalState];
  if (!initial.present() && !final.present()) return unsupported("no states");
  if (initial.present() && final.present() && initial.dtype != final.dtype) {
    return unsupported("{} initial_state with {} final_state", name_of(initial.dtype),
                       name_of(final.dtype));
  }
  for (const TensorId id : {TensorId::kInitialState, TensorId::kFinalState}) {
    if (Status status = check_state(problem, id); !status.ok()) return status;
  }
  return {};
}

/// The states that are there: both are of one type.
const TensorLayout& state_of(const Problem& problem) {
  const TensorLayout& initial = problem[TensorId::kInitialState];
  return initial.present() ? initial : problem[TensorId::kFinalState];
}

/// For calls where nobody chose: the portable kernel spreads the columns of few states over more
/// blocks. H200, one token of 32 heads: 0.0095 ms for 0.0105 with one sequence, 0.0131 for 0.0134
/// with four, 0.0188 for 0.0155 with six; four tokens of one sequence 0.0135 for 0.0126.
Status check_amount(const Problem& problem, int64_t multiprocessors) {
  constexpr int64_t kManyTokens = 4;
  const int64_t sequences = problem.sequences();
  const int64_t states = sequences * problem.sizes.HV;
  const int64_t tokens =
      problem.packed() ? problem.sizes.T / std::max<int64_t>(sequences, 1) : problem.sizes.T;
  if (states >= multiprocessors || tokens >= kManyTokens) return {};
  return unsupported(
      "{} states of {} tokens: with fewer than {} states, one for each SM, and fewer than {} "
      "tokens it is taken by choice only, as cuda_recurrent is faster",
      states, tokens, multiprocessors, kManyTokens);
}

bool is_aligned(const Tensor& state) {
  return reinterpret_cast<std::uintptr_t>(state.data) % kCopyAlignment == 0;
}

class RecurrentExecutor final : public CudaExecutor {
 public:
  RecurrentExecutor(Problem problem, Device device, int64_t items, int64_t blocks, bool counts)
      : CudaExecutor(std::move(problem), device, counts ? sizeof(unsigned long long) : 0),
        blocks_(std::min(items, blocks)),
        counts_(counts) {}

 protected:
  Status enqueue(const Args& args, cudaStream_t stream) const override {
    Params p{recurrent_params(problem(), args)};
    const bool v_first = problem().state_v_first;
    if (!is_aligned(p.initial_state) || !is_aligned(p.final_state)) {
      return launch_recurrent(p, v_first, false, stream);
    }
    const bool fp32 = state_of(problem()).dtype == DType::kF32;
    const RecurrentKernel kernel = v_first
                                       ? (fp32 ? recurrent_v_first_fp32 : recurrent_v_first_bf16)()
                                       : (fp32 ? recurrent_k_first_fp32 : recurrent_k_first_bf16)();
    if (counts_) {
      p.taken = static_cast<unsigned long long*>(args.workspace);
      if (Status status = launch_recurrent_start(p.taken, stream); !status.ok()) return status;
    }
    return launch({"sm90_recurrent", blocks_, kThreads, kernel.shared_bytes, counts_},
                  kernel.kernel, p, stream);
  }

 private:
  int64_t blocks_;
  bool counts_;
};

}  // namespace

Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options& options) {
  const std::string obstacle = check_features(problem).message();
  if (Status status = check_hopper(device, obstacle); !status.ok()) return status;
  const int32_t multiprocessors = sm_count(device);
  if (options.implementation.empty()) {
    if (Status status = check_amount(problem, multiprocessors); !status.ok()) return status;
  }
  const int64_t items = (problem.sequences() + (problem.packed() ? 1 : 0)) * problem.sizes.HV;
  const int stages = state_of(problem).dtype == DType::kF32 ? kStages<float> : kStages<uint16_t>;
  return std::unique_ptr<Executor>(std::make_unique<RecurrentExecutor>(
      problem, device, items, multiprocessors, items > int64_t{stages} * multiprocessors));
}

}  // namespace kda::cuda::sm90
