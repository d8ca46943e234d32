// One sequence filled with NaN, infinities and huge numbers, whose traces the others must not show.
#pragma once

#include <string>

#include "stress/judge.h"

namespace kda::stress {

/// The inputs with sequence `draw.dyed` overwritten: its tokens and, outside pools, its states.
cases::TensorMap dyed_inputs(const Trial& trial);

/// The inputs with one NaN in g, or in gamma, at a token in the middle of sequence `draw.dyed`;
/// empty where there is none, the tensor repeats itself, or what an earlier forward saved is given.
cases::TensorMap nan_inputs(const Trial& trial);

/// "" or the output that has a number where the float64 reference has a NaN.
std::string hidden_nan(const cases::TensorMap& expected, const cases::TensorMap& outputs);

/// "" or what of another sequence, or of the padding, has other bits than without the dye.
std::string trace_of_dye(const Trial& trial, const cases::TensorMap& plain,
                         const cases::TensorMap& dyed);

}  // namespace kda::stress
