// A drawn problem with its inputs and with what should come out.
#pragma once

#include "case.h"
#include "stress/draw.h"

namespace kda::stress {

struct Trial {
  Draw draw;
  cases::Case inputs;
  cases::TensorMap earlier;   ///< other values of the inputs, for the first launch of a graph
  cases::TensorMap expected;  ///< by the float64 reference, as fp64 tensors
  cases::TensorMap emulated;  ///< what 16-bit rounding alone makes of the same inputs and outputs
};

/// `on_device`: also makes `earlier` and `emulated`, which the CPU's implementations do not need.
Result<Trial> prepare(const Draw& draw, bool on_device);

/// What the float64 reference makes of a problem's inputs, as fp64 tensors.
Result<cases::TensorMap> expected_of(const Draw& draw, const cases::Case& inputs);

/// The same of other inputs.
Result<cases::TensorMap> expected_of(const Draw& draw, const cases::TensorMap& inputs);

/// Of a backward: the largest |q dq| or |k dk| of an element, q and k normalised if they are to be.
/// dg is a difference of sums of these (2.14).
Result<double> largest_term_of_dg(const Trial& trial);

/// Of a backward with l2norm: r dy, from which (3.3) makes dq or dk by r (dy - y <y, dy>).
Result<cases::HostTensor> gradient_before_norm(const Trial& trial, TensorId gradient);

/// The one with fewer digits.
DType coarser(DType a, DType b);

/// The dtype of the problem's first tensor, which tuned kernels compute with.
DType io_of(const Problem& problem);

/// The coarsest of the tensors that a forward saved for this backward; fp64 where there are none.
DType saved_dtype(const Problem& problem);

/// Forward or backward over chunks, as opposed to stages and the recurrence.
bool is_whole(Operation operation);

}  // namespace kda::stress
