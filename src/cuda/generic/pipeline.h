// A sequence of launches that is written once and used twice: to measure the workspace and to run.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>

#include "core/slices.h"
#include "cuda/executor.h"
#include "cuda/generic/stages.h"

namespace kda::cuda {

/// Bytes that one slice needs for itself, and what all slices of the same heads share.
struct PipelineWorkspace {
  std::size_t own;
  std::size_t kept;

  std::size_t total() const { return own + kept; }
};

/// What the host code of an operation works with. While measuring, addresses are null and nothing
/// is launched: what takes part is decided by the problem, never by an address.
class Pipeline {
 public:
  /// Measures.
  explicit Pipeline(const Slice& slice);
  /// `args` are those of the whole problem. `kept` is memory that all slices of the same heads see.
  Pipeline(const Slice& slice, const Args& args, void* kept, cudaStream_t stream);

  const Problem& problem() const { return slice_.problem; }
  const Sequences& sequences() const { return sequences_; }
  Heads heads() const { return heads_of(problem()); }
  double scale() const { return problem().effective_scale(); }
  double beta_factor() const { return problem().allow_neg_eigval ? 2 : 1; }
  bool has(TensorId id) const { return problem().has(id); }
  Tensor operator[](TensorId id) const { return tensor_of(problem(), args_, id); }
  Tensor state(TensorId id) const { return state_of(problem(), args_, id); }
  GateParams gate() const { return gate_of(problem(), args_); }

  /// Scratch tensors [B,T,heads,width], [B,T,heads], [chunk rows,HV,K,V].
  Tensor tokens(int64_t heads, int64_t width);
  Tensor scalars(int64_t heads);
  Tensor checkpoints();
  Tensor scratch(std::initializer_list<int64_t> shape) { return scratch_.tensor(shape); }
  void* bytes(int64_t count, std::size_t size) { return scratch_.bytes(count, size); }

  /// The sequences cut into chunks of C tokens; launches what fills their table.
  Sequences sequences_in_chunks(int32_t C);

  /// Launches, unless measuring or after a failure.
  template <class Params>
  void operator()(Status (*launcher)(const Params&, bool, cudaStream_t), const Params& params) {
    if (!measuring_ && status_.ok()) status_ = launcher(params, fp64_, stream_);
  }

  /// What sums per-value-head gradients into those outputs that are asked for.
  struct GroupSum {
    TensorId target;
    Tensor source;  ///< [B,T,HV,K]
    Tensor x, r;    ///< with r: through the normalisation of x
  };
  GroupSums group_sums(const std::array<GroupSum, 2>& sums) const;

  /// Room for the gradients of the gate's parameters by row, [rows,HV,K+1] of the rows that these
  /// sequences have.
  Tensor gate_partials(int64_t rows);
  /// Sums them over the rows of the whole batch, once all of its slices have written theirs.
  void reduce_gate(int64_t rows);

  /// Copies scratch into an output of the operation when `finish` runs; unused rows become 0.
  void copy_out(TensorId id, const Tensor& source);
  /// Copies, and writes zeros to the rows of all other outputs that no sequence owns.
  void finish();

  const Status& status() const { return status_; }
  Result<PipelineWorkspace> workspace() const;

 private:
  /// Rows of the whole batch, if this part of it has `rows`.
  int64_t all_rows(int64_t rows) const;

  const Slice& slice_;
  Args args_;
  cudaStream_t stream_ = nullptr;
  bool fp64_;
  bool measuring_;
  Scratch scratch_;
  Scratch kept_;
  Tensor gate_partials_;
  Sequences sequences_;
  Status status_;
  std::array<Tensor, kTensorCount> copies_{};
};

using PipelineFunction = void (*)(Pipeline& pipeline);

/// What a pipeline function needs of workspace for a slice, and for the largest of a cut.
Result<PipelineWorkspace> measure_workspace(const Slice& slice, PipelineFunction function);
Result<std::size_t> measure_workspace(const Problem& problem, PipelineFunction function,
                                      const Cut& cut = {});

/// `cut` if it keeps to the limit or there is none (0), else the fewest slices that do, or the
/// finest cut.
Cut cut_within(std::size_t limit, const Problem& problem, PipelineFunction function,
               const Cut& cut = {});

/// An executor around a pipeline function, which runs once for each slice.
Result<std::unique_ptr<Executor>> make_pipeline(const Problem& problem, const Device& device,
                                                PipelineFunction function, const Cut& cut = {});

/// The generic leaf, one function an operation.
void chunk_fwd(Pipeline& run);
void chunk_bwd(Pipeline& run);
void stage_gate_cumsum(Pipeline& run);
void stage_intra(Pipeline& run);
void stage_wu(Pipeline& run);
void stage_state_scan(Pipeline& run);
void stage_output(Pipeline& run);
void stage_reverse_scan(Pipeline& run);
void stage_wy_bwd(Pipeline& run);
void stage_intra_bwd(Pipeline& run);

/// Activated inputs of a chunked operation; absent tensors mean "as given".
struct Activations {
  Tensor rq, rk;  ///< [B,T,H]
  Tensor beta;    ///< [B,T,HV]
  Tensor gamma;   ///< [B,T,HV,K]
};
Activations activate(Pipeline& run);

/// What scores and gated operands are computed from; the results are left absent.
IntraWuParams intra_wu_inputs(const Pipeline& run, const Activations& x);

/// Section 3 back from the gradients of the decay, of the activated beta and of the normalised q, k
/// of each value head.
void activations_backward(Pipeline& run, const Tensor& dg_decay, const Tensor& dbeta,
                          const GroupSums& groups);

}  // namespace kda::cuda
