// Runs a case through the public library on a device.
#pragma once

#include <memory>
#include <string>

#include "case.h"
#include "kda/plan.h"

namespace kda::cases {

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
  /// Waits until all runs are done.
  virtual Status synchronize() = 0;
  /// Brings every output home.
  virtual Status fetch() = 0;
};

/// kUnsupported says why the device cannot be used.
Result<std::unique_ptr<Placement>> make_placement(const Device& device);

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
