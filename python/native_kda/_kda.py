"""Forward, backward and decode: which tensors take part, and which outputs there are."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from . import _checks, _problem
from ._problem import CHUNK_BWD, CHUNK_FWD, RECURRENT, Options, Prepared, Sizes

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")

Rows = list[tuple[str, Any]]


class Backward(NamedTuple):
    prepared: Prepared
    # Of the results and None: the gradients as in GRADIENTS.
    in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]]


def taking_part(inputs: tuple[Any, ...], cu_seqlens: Any, options: Options) -> Rows:
    """The inputs by name; without a gate its parameters do not take part."""
    rows = [*zip(INPUTS, inputs), ("cu_seqlens", cu_seqlens)]
    if options.gate == _problem.GATE_NONE:
        del rows[5:7]
    return [row for row in rows if row[1] is not None]


def tensors_of(rows: Rows) -> tuple[Any, ...]:
    return tuple(tensor for _, tensor in rows)


def sizes_of(inputs: tuple[Any, ...], cu_seqlens: Any) -> Sizes:
    """Without checks, for arguments that passed them."""
    q, _, v = inputs[:3]
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    return Sizes(B, T, H, HV, K, V, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def prepare_forward(
    frame: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
    with_h: bool = False,
) -> Prepared:
    """Outputs: o, and if wanted final_state and h."""
    sizes, packed = sizes_of(inputs, cu_seqlens), cu_seqlens is not None
    q, v = inputs[0], inputs[2]
    outputs = [("o", tuple(v.shape), q.dtype)]
    if with_state:
        shape = _checks.state_shape(sizes, options, packed)
        outputs.append(("final_state", shape, frame.state_dtype(q)))
    if with_h:
        chunks = _checks.chunk_rows(sizes, options, packed)
        outputs.append(("h", (chunks, sizes.HV, sizes.K, sizes.V), q.dtype))
    rows = taking_part(inputs, cu_seqlens, options)
    return _problem.prepare(frame, CHUNK_FWD, sizes, options, rows, outputs)


def forward(
    frame: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
    with_h: bool = False,
) -> tuple[Any, Any, Any]:
    """o, final_state, h; the latter two are None unless asked for."""
    prepared = prepare_forward(frame, inputs, cu_seqlens, options, with_state, with_h)
    tensors = tensors_of(taking_part(inputs, cu_seqlens, options))
    o, *rest = _problem.execute(frame, prepared, tensors)
    final_state = rest.pop(0) if with_state else None
    return o, final_state, rest[0] if with_h else None


def prepare_backward(
    frame: Any,
    do: Any,
    dfinal_state: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    needs: tuple[bool, ...],
    h: Any = None,
) -> Backward | None:
    """Outputs: the gradients needed, of inputs that take part; None if there is none. h: what the
    forward left of states, if it was kept."""
    rows = taking_part(inputs, cu_seqlens, options)
    names = {name for name, _ in rows}
    outputs = [
        (gradient, tuple(tensor.shape), tensor.dtype)
        for name, gradient, tensor, need in zip(INPUTS, GRADIENTS, inputs, needs)
        if need and name in names
    ]
    if not outputs:
        return None
    more = (("do", do), ("dfinal_state", dfinal_state), ("h", h))
    rows += [row for row in more if row[1] is not None]
    sizes = sizes_of(inputs, cu_seqlens)
    prepared = _problem.prepare(frame, CHUNK_BWD, sizes, options, rows, outputs)
    computed = [name for name, _, _ in outputs]
    places = [computed.index(name) if name in computed else -1 for name in GRADIENTS]
    return Backward(prepared, itemgetter(*places))


def backward(
    frame: Any,
    do: Any,
    dfinal_state: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:
    """The gradients of the inputs, in their order; None where not asked for."""
    how = (inputs, cu_seqlens, options, needs)
    found = prepare_backward(frame, do, dfinal_state, *how)
    if found is None:
        return (None,) * len(GRADIENTS)
    tensors = (*tensors_of(taking_part(inputs, cu_seqlens, options)), do)
    if dfinal_state is not None:
        tensors += (dfinal_state,)
    return found.in_order((*_problem.execute(frame, found.prepared, tensors), None))


def decode_rows(
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    state_indices: Any,
    num_accepted: Any,
    in_place: bool,
) -> Rows:
    """The tensors of a decode step; states that are updated in place are there twice."""
    rows = taking_part(inputs, cu_seqlens, options)
    more = (("state_indices", state_indices), ("num_accepted", num_accepted))
    rows += [row for row in more if row[1] is not None]
    return rows + ([("final_state", inputs[7])] if in_place else [])


def prepare_recurrent(
    frame: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
    state_indices: Any,
    num_accepted: Any,
    in_place: bool,
) -> Prepared:
    """Outputs: o, and final_state if wanted and not updated in place."""
    sizes = sizes_of(inputs, cu_seqlens)
    q, v = inputs[0], inputs[2]
    if state_indices is not None:
        sizes = sizes._replace(P=inputs[7].shape[0])
    outputs = [("o", tuple(v.shape), q.dtype)]
    if with_state and not in_place:
        shape = _checks.state_shape(sizes, options, cu_seqlens is not None)
        outputs.append(("final_state", shape, frame.state_dtype(q)))
    rows = decode_rows(inputs, cu_seqlens, options, state_indices, num_accepted, in_place)
    return _problem.prepare(frame, RECURRENT, sizes, options, rows, outputs)


def recurrent(
    frame: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
    state_indices: Any = None,
    num_accepted: Any = None,
    in_place: bool = False,
) -> tuple[Any, Any]:
    """o and final_state, or None. In place, the states given are updated and returned."""
    more = (state_indices, num_accepted, in_place)
    prepared = prepare_recurrent(frame, inputs, cu_seqlens, options, with_state, *more)
    tensors = tensors_of(decode_rows(inputs, cu_seqlens, options, *more))
    o, *rest = _problem.execute(frame, prepared, tensors)
    return o, inputs[7] if in_place else (rest[0] if rest else None)
