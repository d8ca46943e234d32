// The rows of the CUDA backend in the list of implementations.
#include <array>

#include "cuda/device.h"
#include "cuda/generic/pipeline.h"
#include "cuda/recurrent/recurrent_op.h"
#if KDA_HAS_SM90
#include "cuda/sm90/chunk_bwd/chunk_bwd_op.h"
#include "cuda/sm90/chunk_fwd/chunk_fwd_op.h"
#include "cuda/sm90/recurrent/recurrent.h"
#include "cuda/sm90/state_scan/state_scan_op.h"
#endif

namespace kda {
namespace {

using cuda::PipelineFunction;

template <PipelineFunction function>
Result<std::unique_ptr<Executor>> create(const Problem& problem, const Device& device,
                                         const Options& options) {
  const Cut cut = cuda::cut_within(options.workspace_limit, problem, function);
  return cuda::make_pipeline(problem, device, function, cut);
}

constexpr std::string_view kFamily = "cuda";
constexpr std::string_view kHopper = "sm90";
constexpr std::string_view kGeneric =
    "all options, head sizes, dtypes and strides; computes in fp32, with any fp64 tensor in fp64";

template <PipelineFunction function>
constexpr Implementation generic(std::string_view name, Operation operation) {
  return {name, kFamily, operation, DeviceType::kCuda, kGeneric, create<function>};
}

#if KDA_HAS_SM90
constexpr auto kMakeChunkBackward = cuda::sm90::make_chunk_bwd;
constexpr auto kMakeChunkForward = cuda::sm90::make_chunk_fwd;
constexpr auto kMakeRecurrent = cuda::sm90::make_recurrent;
constexpr auto kMakeStateScan = cuda::sm90::make_state_scan;
#else
Result<std::unique_ptr<Executor>> refuse(const Problem&, const Device&, const Options&) {
  return Status(StatusCode::kUnsupported,
                "this build holds no code for compute capability 9.0; rebuild with 90a in "
                "CMAKE_CUDA_ARCHITECTURES");
}
constexpr auto kMakeChunkBackward = refuse;
constexpr auto kMakeChunkForward = refuse;
constexpr auto kMakeRecurrent = refuse;
constexpr auto kMakeStateScan = refuse;
#endif

constexpr std::array kRows = {
    Implementation{"sm90_state_scan", kHopper, Operation::kStateScan, DeviceType::kCuda,
                   "Hopper (sm_90): bf16 or fp16 with K of 64 or 128, V a multiple of 64, "
                   "chunk_size 64, fp32 gamma and states, rows of 16 bytes",
                   kMakeStateScan},
    Implementation{"sm90_recurrent", kHopper, Operation::kRecurrent, DeviceType::kCuda,
                   "Hopper (sm_90): K = V = 128, contiguous states of fp32 or bf16; by default as "
                   "many as the GPU has SMs, or with 4 tokens each; the bits of cuda_recurrent",
                   kMakeRecurrent},
    Implementation{"sm90_chunk_fwd", kHopper, Operation::kChunkForward, DeviceType::kCuda,
                   "Hopper (sm_90): bf16 or fp16 with K of 64 or 128, V a multiple of 64, every "
                   "gate, rows of 16 bytes; no saved scores",
                   kMakeChunkForward},
    generic<cuda::chunk_fwd>("cuda_chunk_fwd", Operation::kChunkForward),
    Implementation{"sm90_chunk_bwd", kHopper, Operation::kChunkBackward, DeviceType::kCuda,
                   "Hopper (sm_90): bf16 or fp16 with K of 64 or 128, V a multiple of 64, every "
                   "gate, rows of 16 bytes",
                   kMakeChunkBackward},
    generic<cuda::chunk_bwd>("cuda_chunk_bwd", Operation::kChunkBackward),
    Implementation{"cuda_recurrent", kFamily, Operation::kRecurrent, DeviceType::kCuda,
                   "everything; at the speed of memory for K of 64 or 128 with fp32 or bf16 states "
                   "in 16-byte rows",
                   cuda::make_recurrent},
    generic<cuda::stage_gate_cumsum>("cuda_gate_cumsum", Operation::kGateCumsum),
    generic<cuda::stage_intra>("cuda_intra", Operation::kIntra),
    generic<cuda::stage_wu>("cuda_wu", Operation::kWu),
    generic<cuda::stage_state_scan>("cuda_state_scan", Operation::kStateScan),
    generic<cuda::stage_output>("cuda_output", Operation::kOutput),
    generic<cuda::stage_reverse_scan>("cuda_reverse_scan", Operation::kReverseScan),
    generic<cuda::stage_wy_bwd>("cuda_wy_bwd", Operation::kWyBackward),
    generic<cuda::stage_intra_bwd>("cuda_intra_bwd", Operation::kIntraBackward),
};

}  // namespace

std::span<const Implementation> cuda_implementations() { return kRows; }

}  // namespace kda
