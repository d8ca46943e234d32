#include "cuda/generic/pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/head_slices.h"

namespace kda::cuda {
namespace {

class PipelineExecutor final : public CudaExecutor {
 public:
  PipelineExecutor(const Problem& problem, const Device& device, std::size_t workspace_bytes,
                   PipelineFunction function, std::vector<HeadSlice> slices)
      : CudaExecutor(problem, device, workspace_bytes),
        function_(function),
        slices_(std::move(slices)) {}

 protected:
  Status enqueue(const Args& args, cudaStream_t stream) const override {
    for (const HeadSlice& slice : slices_) {
      Pipeline pipeline(slice.problem, slice.narrow(args), stream);
      if (pipeline.status().ok()) function_(pipeline);
      if (!pipeline.status().ok()) return pipeline.status();
    }
    return {};
  }

 private:
  PipelineFunction function_;
  std::vector<HeadSlice> slices_;
};

}  // namespace

Pipeline::Pipeline(const Problem& problem)
    : problem_(problem),
      fp64_(computes_in_fp64(problem)),
      measuring_(true),
      scratch_(nullptr, fp64_),
      sequences_(sequences_of(problem, args_, scratch_)) {}

Pipeline::Pipeline(const Problem& problem, const Args& args, cudaStream_t stream)
    : problem_(problem),
      args_(args),
      stream_(stream),
      fp64_(computes_in_fp64(problem)),
      measuring_(false),
      scratch_(args.workspace, fp64_),
      sequences_(sequences_of(problem, args, scratch_)),
      status_(launch_chunk_table(sequences_, stream)) {}

Tensor Pipeline::tokens(int64_t heads, int64_t width) {
  return scratch_.tensor({problem_.sizes.B, problem_.sizes.T, heads, width});
}

Tensor Pipeline::scalars(int64_t heads) {
  return scratch_.tensor({problem_.sizes.B, problem_.sizes.T, heads});
}

Tensor Pipeline::checkpoints() {
  const Sizes& sizes = problem_.sizes;
  return scratch_.tensor({problem_.chunk_rows(), sizes.HV, sizes.K, sizes.V});
}

Sequences Pipeline::sequences_in_chunks(int32_t C) {
  if (C == problem_.chunk_size) return sequences_;
  Problem other = problem_;
  other.chunk_size = C;
  const Sequences sequences = sequences_of(other, args_, scratch_);
  if (!measuring_ && status_.ok()) status_ = launch_chunk_table(sequences, stream_);
  return sequences;
}

GroupSums Pipeline::group_sums(const std::array<GroupSum, 2>& sums) const {
  GroupSums params;
  for (const GroupSum& sum : sums) {
    if (has(sum.target)) {
      params.jobs[params.count++] = {sum.source, sum.x, sum.r, (*this)[sum.target]};
    }
  }
  params.B = problem_.sizes.B;
  params.T = problem_.sizes.T;
  return params;
}

void Pipeline::copy_out(TensorId id, const Tensor& source) {
  if (has(id)) copies_[static_cast<std::size_t>(id)] = source;
}

void Pipeline::finish() {
  CopyRowsParams params;
  params.sequences = sequences_;
  for (const TensorSpec& spec : tensors_of(problem_.operation)) {
    const bool by_token = spec.shape.starts_with("[B,T,");
    if (spec.role != Role::kOutput || !has(spec.id) ||
        !(by_token || spec.shape.starts_with("[NC,"))) {
      continue;
    }
    const Tensor& source = copies_[static_cast<std::size_t>(spec.id)];
    if (source.data == nullptr && !problem_.packed()) continue;
    CopyRowsParams::Job& job = params.jobs[params.count++];
    job = {source, (*this)[spec.id], {}, by_token ? 1 : 0};
    const TensorLayout& layout = problem_[spec.id];
    for (std::size_t i = 0; i < 4; ++i) job.shape[i] = layout.shape[i];
    if (layout.rank == 3) {  // the last dimension is spread over lanes
      job.shape[3] = job.shape[2];
      job.shape[2] = 1;
      job.target.stride[3] = job.target.stride[2];
      job.source.stride[3] = job.source.stride[2];
    }
  }
  (*this)(launch_copy_rows, params);
}

Result<std::size_t> measure_workspace(const Problem& problem, PipelineFunction function) {
  Pipeline measure(problem);
  function(measure);
  return measure.workspace_bytes();
}

Result<std::unique_ptr<Executor>> make_pipeline(const Problem& problem, const Device& device,
                                                PipelineFunction function, int64_t slices) {
  if (Status status = check_device(device); !status.ok()) return status;
  std::vector<HeadSlice> parts = slice_heads(problem, slices);
  std::size_t most = 0;
  for (const HeadSlice& part : parts) {
    const Result<std::size_t> bytes = measure_workspace(part.problem, function);
    if (!bytes.ok()) return bytes.status();
    most = std::max(most, *bytes);
  }
  return std::unique_ptr<Executor>(
      std::make_unique<PipelineExecutor>(problem, device, most, function, std::move(parts)));
}

Activations activate(Pipeline& run) {
  const Problem& problem = run.problem();
  const Sizes& sizes = problem.sizes;
  Activations result;
  ActivateParams params;
  if (problem.qk_l2norm) {
    result.rq = params.rq = run.scalars(sizes.H);
    result.rk = params.rk = run.scalars(sizes.H);
  }
  result.beta = run[TensorId::kBeta];
  if (problem.beta_sigmoid) {
    params.logit = run[TensorId::kBeta];
    result.beta = params.beta = run.scalars(sizes.HV);
  }
  result.gamma = run.tokens(sizes.HV, sizes.K);
  params.gate = run.gate();
  params.gamma = result.gamma;
  params.q = run[TensorId::kQ];
  params.k = run[TensorId::kK];
  params.beta_factor = run.beta_factor();
  params.heads = run.heads();
  params.sequences = run.sequences();
  run(launch_activate, params);
  return result;
}

IntraWuParams intra_wu_inputs(const Pipeline& run, const Activations& x) {
  IntraWuParams params;
  params.q = run[TensorId::kQ];
  params.k = run[TensorId::kK];
  params.v = run[TensorId::kV];
  params.rq = x.rq;
  params.rk = x.rk;
  params.beta = x.beta;
  params.gamma = x.gamma;
  params.scale = run.scale();
  params.heads = run.heads();
  params.sequences = run.sequences();
  return params;
}

}  // namespace kda::cuda
