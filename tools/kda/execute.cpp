#include "execute.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace kda::cases {

/// More than any machine has; sizes without tokens may still ask for states beyond it.
constexpr int64_t kMostBytes = int64_t{1} << 46;

Status bind(const Problem& problem, const TensorMap& inputs, TensorMap& outputs,
            Placement& placement, Args& args) {
  for (const TensorSpec& spec : tensors_of(problem.operation)) {
    if (!problem.has(spec.id)) continue;
    Result<void*> address = static_cast<void*>(nullptr);
    if (spec.role == Role::kInput) {
      const auto found = inputs.find(spec.id);
      if (found == inputs.end()) {
        return {StatusCode::kInvalidArgument,
                fmt::format("{}: no data, expected the input of {}", name_of(spec.id),
                            name_of(problem.operation))};
      }
      address = placement.input(found->second);
    } else {
      const TensorLayout layout = problem.canonical_layout(spec.id);
      if (problem.bytes(spec.id) > kMostBytes) {
        return {StatusCode::kOutOfMemory, fmt::format("{}: needs {} bytes, expected at most 2^46",
                                                      name_of(spec.id), problem.bytes(spec.id))};
      }
      HostTensor& tensor = outputs[spec.id];
      tensor = HostTensor::uninitialised(
          layout.dtype, {layout.shape.begin(), layout.shape.begin() + layout.rank});
      tensor.poison();
      address = placement.output(tensor);
    }
    if (!address.ok()) return address.status();
    args.out(spec.id, *address);
  }
  return {};
}

namespace {

/// May throw std::bad_alloc or std::length_error.
Result<OperationOutcome> run_operation(const Problem& problem, const TensorMap& inputs,
                                       const Device& device, const Options& options) {
  Result<Plan> plan = make_plan(problem, device, options);
  if (!plan.ok()) return plan.status();
  Result<std::unique_ptr<Placement>> placement = make_placement(device, options.threads);
  if (!placement.ok()) return placement.status();
  OperationOutcome outcome;
  Args args;
  if (Status status = bind(problem, inputs, outcome.outputs, **placement, args); !status.ok()) {
    return status;
  }
  outcome.implementation = plan->implementation();
  outcome.workspace_bytes = plan->workspace_bytes();
  Result<void*> workspace = (*placement)->workspace(outcome.workspace_bytes);
  if (!workspace.ok()) return workspace.status();
  args.workspace = *workspace;
  args.workspace_bytes = outcome.workspace_bytes;
  Result<double> seconds = (*placement)->measure(*plan, args);
  if (!seconds.ok()) return seconds.status();
  outcome.seconds = *seconds;
  if (Status status = (*placement)->fetch(); !status.ok()) return status;
  return outcome;
}

}  // namespace

Result<OperationOutcome> execute_operation(const Problem& problem, const TensorMap& inputs,
                                           const Device& device, const Options& options) {
  try {
    return run_operation(problem, inputs, device, options);
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  return Status(StatusCode::kOutOfMemory, fmt::format("{}: no memory for its outputs and workspace",
                                                      name_of(problem.operation)));
}

Result<Outcome> execute(const Case& c, const Execution& execution) {
  Result<OperationOutcome> forward = execute_operation(
      forward_problem(c, execution.types), c.inputs, execution.device, execution.options);
  if (!forward.ok()) return forward.status();
  Outcome outcome;
  outcome.outputs = std::move(forward->outputs);
  outcome.forward_implementation = std::move(forward->implementation);
  outcome.forward_seconds = forward->seconds;
  outcome.workspace_bytes = forward->workspace_bytes;
  if (!execution.gradients || !c.has_gradients()) return outcome;
  Result<OperationOutcome> backward = execute_operation(
      backward_problem(c, execution.types), c.inputs, execution.device, execution.options);
  if (!backward.ok()) return backward.status();
  outcome.outputs.merge(backward->outputs);
  outcome.backward_implementation = std::move(backward->implementation);
  outcome.backward_seconds = backward->seconds;
  outcome.workspace_bytes = std::max(outcome.workspace_bytes, backward->workspace_bytes);
  return outcome;
}

Result<TensorMap> reference_outputs(const Case& c) {
  Execution execution;
  execution.options.implementation = "reference";
  execution.types.all = DType::kF64;
  Result<Outcome> outcome = execute(c, execution);
  if (!outcome.ok()) return outcome.status();
  return std::move(outcome->outputs);
}

}  // namespace kda::cases
