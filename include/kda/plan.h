// Problem -> Plan -> run.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "kda/problem.h"
#include "kda/status.h"
#include "kda/types.h"

namespace kda {

/// Choices that do not change what is computed.
struct Options {
  /// Implementation to use: a name ("cpu_chunk_fwd"), a family ("cpu", "reference"), or several
  /// separated by commas. Empty: environment variable KDA_IMPL, else the first that supports the
  /// problem. No row outside the choice is taken (which kernels run: docs/api.md, Plan); a word
  /// that is neither is refused.
  std::string implementation;
  /// Threads of the CPU backend; 0 = OpenMP's default. Results do not depend on it. Where the
  /// system refuses a thread (ulimit -u, memory), OpenMP ends the process: 1 needs no further one.
  /// A child of a fork runs on one thread if its parent ran on several.
  int32_t threads = 0;
  /// Bytes that the workspace may have at most; 0: environment variable KDA_WORKSPACE_LIMIT, else
  /// no limit. Where it would be larger, CUDA rows work in slices of sequences and heads, CPU rows
  /// with fewer threads; no bit changes. A row that cannot keep to it is not taken and says the
  /// least it needs.
  std::size_t workspace_limit = 0;
};

/// Addresses for one run. Tensors that the problem does not name are ignored.
struct Args {
  std::array<void*, kTensorCount> data{};
  void* workspace = nullptr;  ///< At least Plan::workspace_bytes(), 64-byte aligned (256 on CUDA).
  std::size_t workspace_bytes = 0;

  Args& in(TensorId id, const void* address) {
    data[static_cast<std::size_t>(id)] = const_cast<void*>(address);
    return *this;
  }
  Args& out(TensorId id, void* address) {
    data[static_cast<std::size_t>(id)] = address;
    return *this;
  }
  void* operator[](TensorId id) const { return data[static_cast<std::size_t>(id)]; }
};

class Executor;

/// A chosen implementation, ready to run any number of times from any thread. Cheap to copy. Once
/// moved from, a plan may be assigned to or destroyed, and run refuses; the rest is undefined.
class Plan {
 public:
  /// The validated problem.
  const Problem& problem() const;
  const Device& device() const;
  /// The row that was chosen, for example "cpu_chunk_fwd".
  std::string_view implementation() const;
  /// Scratch memory that one run needs; runs at the same time need one workspace each.
  std::size_t workspace_bytes() const;

  /// Computes. On the CPU it returns when done. On CUDA it enqueues on `stream` (a cudaStream_t)
  /// and returns: no allocation, no synchronisation, capturable in a graph.
  ///
  /// Inputs are never written, except that final_state may be the same tensor as initial_state, and
  /// with state_indices must be.
  /// Otherwise outputs must not overlap inputs, other outputs or the workspace.
  Status run(const Args& args, void* stream = nullptr) const;

 private:
  friend Result<Plan> make_plan(const Problem&, const Device&, const Options&);
  explicit Plan(std::shared_ptr<const Executor> executor) : executor_(std::move(executor)) {}

  std::shared_ptr<const Executor> executor_;
};

/// Chooses the fastest implementation that supports the problem. kInvalidArgument: the problem is
/// wrong; kUnsupported: the message names, for each candidate, the missing feature.
Result<Plan> make_plan(const Problem& problem, const Device& device = {},
                       const Options& options = {});

/// OK exactly when make_plan would succeed.
Status supports(const Problem& problem, const Device& device = {}, const Options& options = {});

}  // namespace kda
