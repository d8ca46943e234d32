"""The eager torch route: what the operators do, without the cost of torch's dispatcher.

A call's checks and plan depend on nothing but dtypes, devices, shapes, strides and options. They
are made for the first call of a kind and remembered; later ones cost a look-up.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _kda, _library, _native, _operations, _problem, _torch
from ._derivatives import (
    check_in_place,
    chunk_kda_backward,
    refuse_gradients,
    wants_gradients,
)
from ._problem import Options, Prepared

is_compiling = torch.compiler.is_compiling
_trace = torch._C._get_tracing_state  # of torch.jit.trace

CHUNK_TENSORS = itemgetter(*_kda.INPUTS, "cu_seqlens")
CHUNK_OPTIONS = itemgetter(
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "return_intermediate_states",
    "state_v_first",
    "cp_context",
    "chunk_size",
    "disable_recompute",
)
DECODE_TENSORS = itemgetter(*_kda.INPUTS, "cu_seqlens", "state_indices", "num_accepted")
DECODE_OPTIONS = itemgetter(
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "lower_bound",
    "state_v_first",
    "in_place",
)
_SCALARS = (type(None), bool, int, float)
_MOST = 1024


class _Memory(dict):  # type: ignore[type-arg]
    """Bounded, so that ever changing lengths do not grow it. Holds no tensor."""

    def find(self, key: tuple[Any, ...] | None) -> Any:
        try:
            return self.get(key)
        except TypeError:  # an option that cannot be hashed
            return None

    def remember(self, key: tuple[Any, ...], value: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        self[key] = value


_calls = _Memory()
_gradients = _Memory()


def is_watched() -> bool:
    """Tracing, dispatch modes and function transforms see operators only; within forward-mode
    differentiation no call may skip its checks."""
    if is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if _trace() is not None or forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def needs_operators(tensors: tuple[Any, ...]) -> bool:
    """As is_watched; so do tensor subclasses, tensors elsewhere, what is left of a function
    transform, and tensors that are to be read as their negative."""
    q = tensors[0]
    if is_watched() or not (q.is_cuda or q.is_cpu):
        return True
    if _torch.reader is not None:
        return _torch.reader.key(tensors) is None
    given = _present(tensors)
    if any(type(t) not in _torch.PLAIN or t.is_neg() for t in given):
        return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in given)


def _key(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the call is known by, if it can be remembered."""
    if _torch.reader is None or is_watched():
        return None
    layouts = _torch.reader.key(tensors)
    if layouts is None:
        return None
    disabled = _native.environment("NATIVE_KDA_DISABLE")
    return layouts, options, _problem.environment(), disabled


def _keep(memory: _Memory, key: tuple[Any, ...] | None, prepared: Any) -> None:
    if key is not None and all(type(option) in _SCALARS for option in key[1]):
        memory.remember(key, prepared)


def _present(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([tensor for tensor in tensors if tensor is not None])


def _forward(
    prepared: Prepared, tensors: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    results = _problem.execute(_torch, prepared, tensors)
    return results[0], results[1] if len(results) > 1 else None


class ChunkKda(torch.autograd.Function):
    """chunk_kda with gradients. Only the inputs are kept, and h if the forward was prepared to
    leave it; the backward recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens, prepared):
        inputs = (q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens)
        o, *rest = _problem.execute(_torch, prepared, _present(inputs))
        h = rest.pop() if prepared.outputs[-1][0] == "h" else None
        ctx.save_for_backward(*inputs, h)
        ctx.options = prepared.options
        ctx.set_materialize_grads(False)
        return o, rest[0] if rest else None

    @staticmethod
    def backward(ctx, do, dfinal_state):
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else _torch.dense(do)
        if dfinal_state is not None:
            dfinal_state = _torch.dense(dfinal_state)
        needs = ctx.needs_input_grad[:8]
        how = (saved[:9], ctx.options, needs)
        # With create_graph: the operator's own gradient, an error, hangs on all that it is given.
        if torch.is_grad_enabled():
            return *chunk_kda_backward(do, dfinal_state, *how), None, None
        inputs, cu_seqlens, h = saved[:8], saved[8], saved[9]
        tensors = (*saved[:9], do, dfinal_state, h)
        key = _key(tensors, (*ctx.options, *needs))
        backward = _gradients.find(key)
        if backward is None:
            if needs_operators(tensors):
                return *chunk_kda_backward(do, dfinal_state, *how), None, None
            backward = _kda.prepare_backward(
                _torch, do, dfinal_state, inputs, cu_seqlens, ctx.options, needs, h
            )
            _keep(_gradients, key, backward)
        # What takes part in the backward is what was saved.
        results = _problem.execute(_torch, backward.prepared, _present(tensors))
        return *backward.in_order((*results, None)), None, None


# torch.autograd.Function.apply without its preparations for function transforms, which are not
# there (is_watched): 4 us.
_apply = super(torch.autograd.Function, ChunkKda).apply


def _run_chunk(
    prepared: Prepared, tensors: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if prepared.copies:
        tensors = _torch.laid_out(tensors, prepared.copies)
    if wants_gradients(tensors):
        return _apply(*tensors, prepared)
    return _forward(prepared, _present(tensors))


def _chunk_key(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """With disable_recompute, the last option, only a call that wants gradients keeps h, and with
    a limit of the workspace only such a call needs a backward. What is equal to a chunk size or a
    flag, as 64.0 is, must still be checked."""
    if type(options[-1]) is not bool or type(options[-2]) is not int:
        return None
    if options[-1] or _native.environment("KDA_WORKSPACE_LIMIT"):
        options = (*options, wants_gradients(tensors))
    return _key(tensors, options)


def needs_a_backward(tensors: tuple[Any, ...]) -> bool:
    """Whether a call is to be refused if it has a forward alone. Without a limit of the workspace
    none has, and nobody need ask."""
    return bool(_native.environment("KDA_WORKSPACE_LIMIT")) and wants_gradients(tensors)


def _check_backward(prepared: Prepared, tensors: tuple[Any, ...]) -> None:
    """UnsupportedError if there is a forward and no backward, as a limit of the workspace may have
    it: in backward() it would be too late to compute elsewhere."""
    *inputs, cu_seqlens = tensors
    name, shape, dtype = prepared.outputs[-1]
    h = _torch.empty(shape, dtype, inputs[0]) if name == "h" else None
    do = _torch.empty(tuple(inputs[2].shape), inputs[0].dtype, inputs[0])
    needs = tuple(x is not None and x.requires_grad for x in inputs)
    _kda.prepare_backward(_torch, do, None, inputs, cu_seqlens, prepared.options, needs, h)


def chunk_was_seen(call: dict[str, Any]) -> bool:
    return _calls.find(_chunk_key(CHUNK_TENSORS(call), CHUNK_OPTIONS(call))) is not None


def chunk_again(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The result if a call like this was made before, its arguments as the getters above give
    them."""
    prepared = _calls.find(_chunk_key(tensors, options))
    return None if prepared is None else _run_chunk(prepared, tensors)


def chunk_seen(call: dict[str, Any]) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """As chunk_again, and the key to remember the call by."""
    tensors = CHUNK_TENSORS(call)
    key = _chunk_key(tensors, CHUNK_OPTIONS(call))
    prepared = _calls.find(key)
    return None if prepared is None else _run_chunk(prepared, tensors), key


def chunk_kda(
    call: dict[str, Any],
    key: tuple[Any, ...] | None,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call that passed the checks; `inputs` and `options` are what they made of it."""
    tensors = (*inputs, cu_seqlens)
    if needs_operators(tensors):
        return _library.chunk_kda(inputs, cu_seqlens, options, with_state)
    keeps_h = bool(call["disable_recompute"]) and wants_gradients(tensors)
    copies = _torch.scattered(tensors)
    ready = _torch.laid_out(tensors, copies)
    prepared = _kda.prepare_forward(_torch, ready[:8], cu_seqlens, options, with_state, keeps_h)
    if needs_a_backward(tensors):
        _check_backward(prepared, ready)
    # Only where nothing was cast, reshaped or dropped.
    if all(a is b for a, b in zip(tensors, CHUNK_TENSORS(call))):
        _keep(_calls, key, prepared._replace(copies=copies))
    return _run_chunk(prepared, ready)


def _run_decode(prepared: Prepared, tensors: tuple[Any, ...], in_place: bool) -> tuple[Any, Any]:
    refuse_gradients(tensors)
    states = tensors[7]
    given = _present(tensors)
    if not in_place:
        return _forward(prepared, given)
    check_in_place(states)
    o, _ = _forward(prepared, (*given, states))
    torch.autograd.graph.increment_version(states)
    return o, states


def recurrent_again(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """As chunk_again. What is remembered says besides whether states are updated in place."""
    seen = _calls.find(_key(tensors, options))
    return None if seen is None else _run_decode(seen[0], tensors, seen[1])


def recurrent_seen(call: dict[str, Any]) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """As chunk_seen."""
    tensors = DECODE_TENSORS(call)
    key = _key(tensors, DECODE_OPTIONS(call))
    seen = _calls.find(key)
    return None if seen is None else _run_decode(seen[0], tensors, seen[1]), key


def recurrent_kda(
    call: dict[str, Any],
    key: tuple[Any, ...] | None,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
    state_indices: Any,
    num_accepted: Any,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As chunk_kda."""
    tensors = (*inputs, cu_seqlens, state_indices, num_accepted)
    if needs_operators(tensors):
        if not in_place:
            return _library.recurrent_kda(inputs, cu_seqlens, options, with_state)
        o = _library.recurrent_kda_pool(inputs, cu_seqlens, state_indices, num_accepted, options)
        return o, inputs[7]
    more = (state_indices, num_accepted, in_place)
    prepared = _kda.prepare_recurrent(_torch, inputs, cu_seqlens, options, with_state, *more)
    if all(a is b for a, b in zip(tensors, DECODE_TENSORS(call))):
        _keep(_calls, key, (prepared, in_place))
    return _run_decode(prepared, tensors, in_place)


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether nothing would see an operator: no tracer, no transform, no autograd."""
    return not (needs_operators(tensors) or wants_gradients(tensors))


def chunk_backward(
    do: torch.Tensor,
    dfinal_state: Any,
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    options: Options,
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:
    """The gradients of the inputs, in their order; None where not needed."""
    if _is_plain((*inputs, cu_seqlens, do, dfinal_state)):
        return _kda.backward(_torch, do, dfinal_state, inputs, cu_seqlens, options, needs)
    return chunk_kda_backward(do, dfinal_state, (*inputs, cu_seqlens), options, needs)


def operation(
    name: str, outputs: tuple[str, ...], options: Options, given: dict[str, Any]
) -> tuple[Any, ...]:
    """A stage, or chunk_kda with its intermediate states."""
    if _is_plain(tuple(given.values())):
        return _operations.run(_torch, name, outputs, options, given)
    return _library.run(name, outputs, options, given)
