#include "cuda/generic/pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kda::cuda {
namespace {

class PipelineExecutor final : public CudaExecutor {
 public:
  PipelineExecutor(const Problem& problem, const Device& device, const PipelineWorkspace& workspace,
                   PipelineFunction function, std::vector<Slice> slices)
      : CudaExecutor(problem, device, workspace.total()),
        own_bytes_(workspace.own),
        function_(function),
        slices_(std::move(slices)) {}

 protected:
  Status enqueue(const Args& args, cudaStream_t stream) const override {
    void* const kept =
        args.workspace == nullptr ? nullptr : static_cast<std::byte*>(args.workspace) + own_bytes_;
    for (const Slice& slice : slices_) {
      Pipeline pipeline(slice, args, kept, stream);
      if (pipeline.status().ok()) function_(pipeline);
      if (!pipeline.status().ok()) return pipeline.status();
    }
    return {};
  }

 private:
  std::size_t own_bytes_;
  PipelineFunction function_;
  std::vector<Slice> slices_;
};

}  // namespace

Pipeline::Pipeline(const Slice& slice)
    : slice_(slice),
      fp64_(computes_in_fp64(slice.problem)),
      measuring_(true),
      scratch_(nullptr, fp64_),
      kept_(nullptr, fp64_),
      sequences_(sequences_of(slice.problem, args_, scratch_)) {}

Pipeline::Pipeline(const Slice& slice, const Args& args, void* kept, cudaStream_t stream)
    : slice_(slice),
      args_(slice.narrow(args)),
      stream_(stream),
      fp64_(computes_in_fp64(slice.problem)),
      measuring_(false),
      scratch_(args.workspace, fp64_),
      kept_(kept, fp64_),
      sequences_(sequences_of(slice.problem, args_, scratch_)),
      status_(launch_chunk_table(sequences_, stream)) {}

Tensor Pipeline::tokens(int64_t heads, int64_t width) {
  return scratch_.tensor({problem().sizes.B, problem().sizes.T, heads, width});
}

Tensor Pipeline::scalars(int64_t heads) {
  return scratch_.tensor({problem().sizes.B, problem().sizes.T, heads});
}

Tensor Pipeline::checkpoints() {
  const Sizes& sizes = problem().sizes;
  return scratch_.tensor({problem().chunk_rows(), sizes.HV, sizes.K, sizes.V});
}

Sequences Pipeline::sequences_in_chunks(int32_t C) {
  if (C == problem().chunk_size) return sequences_;
  Problem other = problem();
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
  params.B = problem().sizes.B;
  params.T = problem().sizes.T;
  return params;
}

void Pipeline::copy_out(TensorId id, const Tensor& source) {
  if (has(id)) copies_[static_cast<std::size_t>(id)] = source;
}

void Pipeline::finish() {
  CopyRowsParams params;
  params.sequences = sequences_;
  for (const TensorSpec& spec : tensors_of(problem().operation)) {
    const bool by_token = spec.shape.starts_with("[B,T,");
    if (spec.role != Role::kOutput || !has(spec.id) ||
        !(by_token || spec.shape.starts_with("[NC,"))) {
      continue;
    }
    const Tensor& source = copies_[static_cast<std::size_t>(spec.id)];
    if (source.data == nullptr && !problem().packed()) continue;
    CopyRowsParams::Job& job = params.jobs[params.count++];
    job = {source, (*this)[spec.id], {}, by_token ? 1 : 0};
    const TensorLayout& layout = problem()[spec.id];
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

int64_t Pipeline::all_rows(int64_t rows) const {
  const int64_t own = problem().sizes.B;
  return own == slice_.all_sequences ? rows : rows / own * slice_.all_sequences;
}

Tensor Pipeline::gate_partials(int64_t rows) {
  const Sizes& sizes = problem().sizes;
  gate_partials_ = kept_.tensor({all_rows(rows), sizes.HV, sizes.K + 1});
  Tensor own = gate_partials_;
  if (own.data != nullptr && slice_.first_sequence > 0) {
    const int64_t before = rows / sizes.B * slice_.first_sequence * own.stride[0];
    const std::size_t element = size_of(static_cast<DType>(own.dtype));
    own.data = static_cast<std::byte*>(own.data) + static_cast<std::size_t>(before) * element;
  }
  return own;
}

void Pipeline::reduce_gate(int64_t rows) {
  if (!slice_.ends_batch()) return;
  (*this)(launch_gate_reduce,
          GateReduceParams{gate_partials_, (*this)[TensorId::kDALog], (*this)[TensorId::kDdtBias],
                           all_rows(rows), heads()});
}

Result<PipelineWorkspace> Pipeline::workspace() const {
  const Result<std::size_t> own = scratch_.total();
  const Result<std::size_t> kept = kept_.total();
  if (!own.ok()) return own.status();
  if (!kept.ok()) return kept.status();
  return PipelineWorkspace{*own, *kept};
}

Result<PipelineWorkspace> measure_workspace(const Slice& slice, PipelineFunction function) {
  Pipeline measure(slice);
  function(measure);
  return measure.workspace();
}

Result<std::size_t> measure_workspace(const Problem& problem, PipelineFunction function,
                                      const Cut& cut) {
  const Result<PipelineWorkspace> largest =
      measure_workspace(slice_of(problem, cut, cut.slices() - 1), function);
  if (!largest.ok()) return largest.status();
  return largest->total();
}

Cut cut_within(std::size_t limit, const Problem& problem, PipelineFunction function,
               const Cut& cut) {
  if (limit == 0) return cut;
  const Result<std::size_t> bytes = measure_workspace(problem, function, cut);
  if (bytes.ok() && *bytes <= limit) return cut;
  return cut_to_limit(problem, limit, [&](const Slice& slice) -> Result<std::size_t> {
    const Result<PipelineWorkspace> workspace = measure_workspace(slice, function);
    if (!workspace.ok()) return workspace.status();
    return workspace->total();
  });
}

Result<std::unique_ptr<Executor>> make_pipeline(const Problem& problem, const Device& device,
                                                PipelineFunction function, const Cut& cut) {
  if (Status status = check_device(device); !status.ok()) return status;
  std::vector<Slice> slices = slices_of(problem, cut);
  PipelineWorkspace most{0, 0};
  for (const Slice& slice : slices) {
    const Result<PipelineWorkspace> workspace = measure_workspace(slice, function);
    if (!workspace.ok()) return workspace.status();
    most = {std::max(most.own, workspace->own), std::max(most.kept, workspace->kept)};
  }
  return std::unique_ptr<Executor>(
      std::make_unique<PipelineExecutor>(problem, device, most, function, std::move(slices)));
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
