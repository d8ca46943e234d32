// What every CUDA implementation shares: the checks at plan creation and at each run, and the
// caller's workspace cut into tensors.
#pragma once

#include <cstddef>
#include <initializer_list>

#include <cuda_runtime_api.h>

#include "core/executor.h"
#include "cuda/params.h"

namespace kda::cuda {

/// OK if kernels of this build can run on the device; starts its CUDA context.
Status check_device(const Device& device);

/// Runs on its device with addresses that were checked; never waits for the GPU.
class CudaExecutor : public Executor {
 public:
  CudaExecutor(Problem problem, Device device, std::size_t workspace_bytes)
      : Executor(std::move(problem), device), workspace_bytes_(workspace_bytes) {}

  std::size_t workspace_bytes() const final { return workspace_bytes_; }
  Status run(const Args& args, void* stream) const final;

 protected:
  virtual Status enqueue(const Args& args, cudaStream_t stream) const = 0;

 private:
  std::size_t workspace_bytes_;
};

/// Cuts a workspace into tensors. With a null base it measures.
class Scratch {
 public:
  Scratch(void* base, bool fp64) : base_(static_cast<std::byte*>(base)), fp64_(fp64) {}

  /// Contiguous, of the type that the kernels compute in; rank 4.
  Tensor tensor(std::initializer_list<int64_t> shape);
  void* bytes(int64_t count, std::size_t size);

  /// kUnsupported if the total does not fit into an address.
  Result<std::size_t> total() const;

 private:
  std::byte* base_;
  bool fp64_;
  double total_ = 0;  // exact up to 2^53 bytes, and beyond any memory it only has to be large
};

/// Tensors of a problem as kernels see them.
Tensor tensor_of(const Problem& problem, const Args& args, TensorId id);
/// A state with its last two strides in the order k, v.
Tensor state_of(const Problem& problem, const Args& args, TensorId id);

Heads heads_of(const Problem& problem);
GateParams gate_of(const Problem& problem, const Args& args);
/// fp64 as soon as any tensor is fp64.
bool computes_in_fp64(const Problem& problem);

/// The table of chunks in the workspace if the problem is packed.
Sequences sequences_of(const Problem& problem, const Args& args, Scratch& scratch);

}  // namespace kda::cuda
