#include "cuda/recurrent/recurrent.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cuda/executor.h"
#include "cuda/launch.h"
#include "cuda/recurrent/config.h"
#include "cuda/recurrent/instances/instances.h"
#include "cuda/recurrent/recurrent_op.h"

namespace kda::cuda {
namespace {

/// Rows of a state can be moved 16 bytes at a time. `contiguous`: the dimension that is.
bool is_vectorised(const Tensor& state, int contiguous, int64_t vector) {
  if (state.data == nullptr) return true;
  if (reinterpret_cast<std::uintptr_t>(state.data) % kStateVectorBytes != 0) return false;
  for (int i = 0; i < 4; ++i) {
    if (i == contiguous ? state.stride[i] != 1 : state.stride[i] % vector != 0) return false;
  }
  return true;
}

/// The dtype of the states that are present: fp32 if there are none, none if they differ.
DType state_dtype(const RecurrentParams& p) {
  const Tensor& one = p.initial_state.data ? p.initial_state : p.final_state;
  const Tensor& other = p.final_state.data ? p.final_state : p.initial_state;
  if (one.data == nullptr) return DType::kF32;
  return one.dtype == other.dtype ? static_cast<DType>(one.dtype) : DType::kNone;
}

class RecurrentExecutor final : public CudaExecutor {
 public:
  using CudaExecutor::CudaExecutor;

 protected:
  Status enqueue(const Args& args, cudaStream_t stream) const override {
    return launch_recurrent(recurrent_params(problem(), args), problem().state_v_first,
                            computes_in_fp64(problem()), stream);
  }
};

}  // namespace

RecurrentParams recurrent_params(const Problem& problem, const Args& args) {
  RecurrentParams p;
  p.q = tensor_of(problem, args, TensorId::kQ);
  p.k = tensor_of(problem, args, TensorId::kK);
  p.v = tensor_of(problem, args, TensorId::kV);
  p.beta = tensor_of(problem, args, TensorId::kBeta);
  p.gate = gate_of(problem, args);
  p.initial_state = state_of(problem, args, TensorId::kInitialState);
  p.final_state = state_of(problem, args, TensorId::kFinalState);
  p.indices = tensor_of(problem, args, TensorId::kStateIndices);
  p.num_accepted = tensor_of(problem, args, TensorId::kNumAccepted);
  p.o = tensor_of(problem, args, TensorId::kO);
  p.sequences.cu = tensor_of(problem, args, TensorId::kCuSeqlens);
  p.sequences.count = problem.sequences();
  p.sequences.T = problem.sizes.T;
  p.heads = heads_of(problem);
  p.states = problem.has(TensorId::kStateIndices) ? problem.sizes.P : problem.sequences();
  p.scale = problem.effective_scale();
  p.beta_factor = problem.allow_neg_eigval ? 2 : 1;
  p.qk_l2norm = problem.qk_l2norm;
  p.beta_sigmoid = problem.beta_sigmoid;
  p.copies_states = p.final_state.data != nullptr && p.final_state.data != p.initial_state.data;
  return p;
}

Status launch_recurrent(const RecurrentParams& p, bool state_v_first, bool fp64,
                        cudaStream_t stream) {
  if (recurrent_step_takes(p, state_v_first, fp64)) {
    return launch_recurrent_step(p, state_v_first, stream);
  }
  return launch_recurrent_any(p, fp64, stream);
}

bool recurrent_step_takes(const RecurrentParams& p, bool state_v_first, bool fp64) {
  const DType dtype = state_dtype(p);
  if (fp64 || (p.heads.K != 64 && p.heads.K != 128)) return false;
  if (dtype != DType::kF32 && dtype != DType::kBF16) return false;
  const int64_t vector = kStateVectorBytes / static_cast<int64_t>(size_of(dtype));
  const int contiguous = state_v_first ? 2 : 3;
  return (state_v_first || p.heads.V % vector == 0) &&
         is_vectorised(p.initial_state, contiguous, vector) &&
         is_vectorised(p.final_state, contiguous, vector);
}

Status launch_recurrent_step(const RecurrentParams& params, bool state_v_first,
                             cudaStream_t stream) {
  RecurrentParams p = params;
  const bool fp32 = state_dtype(p) == DType::kF32;
  const int32_t least = kVectorLanes * kStateVectorBytes / (fp32 ? 4 : 2);
  const int64_t sequences = p.sequences.count + (p.sequences.cu.data != nullptr ? 1 : 0);
  const auto blocks = [&] {
    return sequences * p.heads.HV * ((p.heads.V + p.columns - 1) / p.columns);
  };
  // How columns are spread over blocks does not change a bit of the result.
  p.columns = kMaxRecurrentColumns;
  while (p.columns > least && blocks() < kEnoughRecurrentBlocks) p.columns /= 2;
  const RecurrentKernel kernel =
      state_v_first ? (fp32 ? recurrent_v_first_fp32 : recurrent_v_first_bf16)(p.heads.K)
                    : (fp32 ? recurrent_k_first_fp32 : recurrent_k_first_bf16)(p.heads.K);
  p.token_block = static_cast<int32_t>(std::clamp<int64_t>(p.sequences.T, 1, kTokenBlock));
  const std::size_t shared_bytes =
      kernel.shared_bytes + static_cast<std::size_t>(p.token_block - 1) * kernel.token_bytes;
  return launch({"recurrent_step", blocks(), kRecurrentThreads, shared_bytes}, kernel.kernel, p,
                stream);
}

Result<std::unique_ptr<Executor>> make_recurrent(const Problem& problem, const Device& device,
                                                 const Options&) {
  if (Status status = check_device(device); !status.ok()) return status;
  return std::unique_ptr<Executor>(std::make_unique<RecurrentExecutor>(problem, device, 0));
}

}  // namespace kda::cuda
