#include "cuda/sm90/recurrent/recurrent.h"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

#include "cuda/executor.h"
#include "cuda/launch.h"
#include "cuda/sm90/recurrent/config.h"
#include "cuda/sm90/recurrent/instances/instances.h"

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

bool is_aligned(const Tensor& state) {
  return reinterpret_cast<std::uintptr_t>(state.data) % kCopyAlignment == 0;
}

class RecurrentExecutor final : public CudaExecutor {
 public:
  RecurrentExecutor(Problem problem, Device device, int multiprocessors)
      : CudaExecutor(std::move(problem), device, 0), multiprocessors_(multiprocessors) {}

 protected:
  Status enqueue(const Args& args, cudaStream_t stream) const override {
    const RecurrentParams p = recurrent_params(problem(), args);
    const bool v_first = problem().state_v_first;
    if (!is_aligned(p.initial_state) || !is_aligned(p.final_state)) {
      return launch_recurrent(p, v_first, false, stream);
    }
    const Tensor& state = p.initial_state.data != nullptr ? p.initial_state : p.final_state;
    const bool fp32 = static_cast<DType>(state.dtype) == DType::kF32;
    const RecurrentKernel kernel = v_first
                                       ? (fp32 ? recurrent_v_first_fp32 : recurrent_v_first_bf16)()
                                       : (fp32 ? recurrent_k_first_fp32 : recurrent_k_first_bf16)();
    const int64_t items =
        (p.sequences.count + (p.sequences.cu.data != nullptr ? 1 : 0)) * p.heads.HV;
    return launch({"sm90_recurrent", std::min<int64_t>(items, multiprocessors_), kThreads,
                   kernel.shared_bytes},
                  kernel.kernel, p, stream);
  }

 private:
  int multiprocessors_;
};

}  // namespace

Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options&) {
  if (Status status = check_device(device); !status.ok()) return status;
  int major = 0;
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index);
  if (major != 9) return unsupported("compute capability {}.x: only 9.0", major);
  if (Status status = check_features(problem); !status.ok()) return status;
  return std::unique_ptr<Executor>(
      std::make_unique<RecurrentExecutor>(problem, device, multiprocessors));
}

}  // namespace kda::cuda::sm90
