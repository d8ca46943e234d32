// Runs a case through the public library on a device.
#pragma once

#include <memory>
#include <string>

#include "case.h"
#include "kda/plan.h"

namespace kda::cases {

/// What Plan::run costs the thread that calls it.
struct HostCost {
  double seconds = 0;
  int64_t launches = 0;  ///< kernels
};

/// Puts host tensors where a device can use them. The one place that knows of device memory.
class Placement {
 public:
  virtual ~Placement() = default;
  /// The address of a copy of `tensor`, or of the tensor itself.
  virtual Result<void*> input(const HostTensor& tensor) = 0;
  /// The address that a run writes; `fetch` brings the values into `tensor`.
  virtual Result<void*> output(HostTensor& tensor) = 0;
  /// Scratch memory, aligned for the device; null for 0 bytes.
  virtual Result<void*> workspace(std::size_t bytes) = 0;
  /// Makes one run and waits for it: the seconds that it took on the device.
  virtual Result<double> measure(const Plan& plan, const Args& args) = 0;
  /// Makes one run on an idle device: what the call costs the host, which does not wait in it.
  virtual Result<HostCost> host_cost(const Plan& plan, const Args& args) = 0;
  /// Brings every output home.
  virtual Status fetch() = 0;
  /// Evicts everything from the last-level cache.
  virtual Status flush_cache() = 0;
  /// Bytes read plus bytes written a second by a large copy.
  virtual Result<double> copy_bandwidth() = 0;
};

/// kUnsupported says why the device cannot be used. `threads`: of the CPU, 0 for all.
Result<std::unique_ptr<Placement>> make_placement(const Device& device, int threads = 0);

/// Binds the tensors of `problem`: inputs from the map, outputs made in their canonical shapes and
/// filled with NaN.
Status bind(const Problem& problem, const TensorMap& inputs, TensorMap& outputs,
            Placement& placement, Args& args);

struct Execution {
  Device device;
  Options options;
  OutputTypes types;
  bool gradients = true;  ///< also runs the backward if the case has `do`
};

struct Outcome {
  TensorMap outputs;
  std::string forward_implementation;
  std::string backward_implementation;  ///< empty without a backward
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::size_t workspace_bytes = 0;  ///< the larger of both
};

/// Outputs are filled with NaN before the run, so that what is not written shows.
Result<Outcome> execute(const Case& c, const Execution& execution);

/// One operation on given inputs: the tensors of `problem` by their canonical shapes. For stages.
struct OperationOutcome {
  TensorMap outputs;
  std::string implementation;
  double seconds = 0;
  std::size_t workspace_bytes = 0;
};
Result<OperationOutcome> execute_operation(const Problem& problem, const TensorMap& inputs,
                                           const Device& device = {}, const Options& options = {});

/// The outputs of the float64 token recurrence on the inputs as stored.
Result<TensorMap> reference_outputs(const Case& c);

}  // namespace kda::cases
