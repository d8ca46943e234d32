"""Forward, backward and decode on the tensors of one framework, allocated by a Frame."""

from __future__ import annotations

from typing import Any

from . import _checks, _problem
from ._problem import CHUNK_BWD, CHUNK_FWD, RECURRENT, Options, Sizes

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")


def named_inputs(inputs: tuple, cu_seqlens: Any, options: Options) -> list[tuple[str, Any]]:
    """The inputs that take part: without a gate its parameters do not."""
    rows = list(zip(INPUTS, inputs))
    if options.gate == _problem.GATE_NONE:
        rows = rows[:5] + rows[7:]
    rows.append(("cu_seqlens", cu_seqlens))
    return [row for row in rows if row[1] is not None]


def sizes_of(inputs: tuple, cu_seqlens: Any) -> Sizes:
    """Without checks, for arguments that passed them."""
    q, _, v = inputs[:3]
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    return Sizes(B, T, H, HV, K, V, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def forward(
    frame: Any,
    inputs: tuple,
    cu_seqlens: Any,
    options: Options,
    output_final_state: bool,
    output_h: bool = False,
) -> tuple[Any, Any, Any]:
    """o, final_state, h; the latter two are None unless asked for."""
    sizes = sizes_of(inputs, cu_seqlens)
    tensors = named_inputs(inputs, cu_seqlens, options)
    q, v = inputs[0], inputs[2]
    packed = cu_seqlens is not None
    o = frame.empty(tuple(v.shape), q.dtype, q)
    tensors.append(("o", o))
    final_state = h = None
    if output_final_state:
        shape = _checks.state_shape(sizes, options, packed)
        final_state = frame.empty(shape, frame.state_dtype(q), q)
        tensors.append(("final_state", final_state))
    if output_h:
        rows = _checks.chunk_rows(sizes, options, packed)
        h = frame.empty((rows, sizes.HV, sizes.K, sizes.V), q.dtype, q)
        tensors.append(("h", h))
    _problem.run(frame, CHUNK_FWD, sizes, options, tensors)
    return o, final_state, h


def backward(
    frame: Any,
    do: Any,
    dfinal_state: Any,
    inputs: tuple,
    cu_seqlens: Any,
    options: Options,
    needs: tuple[bool, ...],
) -> list[Any]:
    """The gradients of the inputs, in their order; None where not asked for."""
    sizes = sizes_of(inputs, cu_seqlens)
    tensors = named_inputs(inputs, cu_seqlens, options)
    taking_part = {name for name, _ in tensors}
    tensors.append(("do", do))
    if dfinal_state is not None:
        tensors.append(("dfinal_state", dfinal_state))
    gradients: list[Any] = []
    for name, gradient_name, tensor, need in zip(INPUTS, GRADIENTS, inputs, needs):
        gradient = None
        if need and name in taking_part:
            gradient = frame.empty(tuple(tensor.shape), tensor.dtype, tensor)
            tensors.append((gradient_name, gradient))
        gradients.append(gradient)
    if any(gradient is not None for gradient in gradients):
        _problem.run(frame, CHUNK_BWD, sizes, options, tensors)
    return gradients


def recurrent(
    frame: Any,
    inputs: tuple,
    cu_seqlens: Any,
    options: Options,
    output_final_state: bool,
    state_indices: Any = None,
    num_accepted: Any = None,
    in_place: bool = False,
) -> tuple[Any, Any]:
    """o and final_state, or None. In place, or with indices, the states given are updated."""
    sizes = sizes_of(inputs, cu_seqlens)
    tensors = named_inputs(inputs, cu_seqlens, options)
    q, v, states = inputs[0], inputs[2], inputs[7]
    if state_indices is not None:
        sizes = sizes._replace(P=states.shape[0])
        tensors.append(("state_indices", state_indices))
    if num_accepted is not None:
        if "num_accepted" not in _problem.ID:
            raise _problem.UnsupportedError("num_accepted: this version has no partial commit")
        tensors.append(("num_accepted", num_accepted))
    o = frame.empty(tuple(v.shape), q.dtype, q)
    tensors.append(("o", o))
    final_state = None
    if in_place or state_indices is not None:
        final_state = states
    elif output_final_state:
        shape = _checks.state_shape(sizes, options, cu_seqlens is not None)
        final_state = frame.empty(shape, frame.state_dtype(q), q)
    if final_state is not None:
        tensors.append(("final_state", final_state))
    _problem.run(frame, RECURRENT, sizes, options, tensors)
    return o, final_state
