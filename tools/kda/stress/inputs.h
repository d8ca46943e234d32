// The inputs of a drawn problem.
#pragma once

#include "case.h"
#include "stress/draw.h"

namespace kda::stress {

/// The order in which each stage finds its inputs.
inline constexpr std::array kStages = {Operation::kGateCumsum, Operation::kIntra,
                                       Operation::kWu,         Operation::kStateScan,
                                       Operation::kOutput,     Operation::kReverseScan,
                                       Operation::kWyBackward, Operation::kIntraBackward};

/// Every input in its dtype, as a case whose sizes and cu_seqlens say where sequences lie. What
/// other operations make (saved tensors, the inputs of stages) comes from the float64 reference.
/// `variant` 0 are the values of the problem; others are different ones of the same shapes.
Result<cases::Case> inputs_of(const Draw& draw, uint64_t variant = 0);

}  // namespace kda::stress
