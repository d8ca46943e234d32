"""The eager torch route: the operators without the cost of torch's dispatcher.

A call's checks and plan depend on nothing but dtypes, devices, shapes, strides and options. They
are made for the first call of a kind and remembered; later ones cost a look-up.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import _kda, _library, _native, _problem, _torch
from ._problem import Options, Prepared

is_compiling = torch.compiler.is_compiling

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CHUNK_TENSORS = itemgetter(*_kda.INPUTS, "cu_seqlens")
_CHUNK_OPTIONS = itemgetter(
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
)
_DECODE_TENSORS = itemgetter(*_kda.INPUTS, "cu_seqlens", "state_indices", "num_accepted")
_DECODE_OPTIONS = itemgetter(
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

    def remember(self, key: tuple, value: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        self[key] = value


_calls = _Memory()
_gradients = _Memory()


def needs_operators(tensors: tuple) -> bool:
    """Tracing, dispatch modes, function transforms and tensor subclasses see operators only."""
    if is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return True
    q = tensors[0]
    if not (q.is_cuda or q.is_cpu):
        return True
    return any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)


def _key(tensors: tuple, options: tuple) -> tuple | None:
    """What the call is known by, if it can be remembered."""
    if _torch.reader is None or needs_operators(tensors):
        return None
    return _torch.reader.key(tensors), options, _problem.environment()


def _keep(memory: _Memory, key: tuple | None, prepared: Any) -> None:
    if key is not None and all(type(option) in _SCALARS for option in key[1]):
        memory.remember(key, prepared)


def _forward(prepared: Prepared, tensors: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    results = _problem.execute(_torch, prepared, tensors)
    return results[0], results[1] if len(results) > 1 else None


class ChunkKda(torch.autograd.Function):
    """chunk_kda with gradients. Only the inputs are kept, and h if the forward was prepared to
    leave it; the backward recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens, prepared):
        inputs = (q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens)
        given = tuple(x for x in inputs if x is not None)
        o, *rest = _problem.execute(_torch, prepared, given)
        h = rest.pop() if prepared.outputs[-1][0] == "h" else None
        ctx.save_for_backward(*inputs, h)
        ctx.options = prepared.options
        ctx.set_materialize_grads(False)
        return o, rest[0] if rest else None

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal_state):
        saved = ctx.saved_tensors
        if do is None:
            do = saved[0].new_zeros(()).expand(saved[2].shape)
        inputs, cu_seqlens, h = saved[:8], saved[8], saved[9]
        options, needs = ctx.options, ctx.needs_input_grad[:8]
        key = _key((do, dfinal_state, *saved), (*options, *needs))
        prepared = _gradients.get(key)
        if prepared is None:
            prepared = _kda.prepare_backward(
                _torch, do, dfinal_state, inputs, cu_seqlens, options, needs, h
            )
            _keep(_gradients, key, prepared)
        gradients = _kda.run_backward(_torch, prepared, do, dfinal_state, inputs, cu_seqlens, h)
        return (*gradients, None, None)


def _wants_gradients(tensors: tuple) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _run_chunk(prepared: Prepared, tensors: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    if _wants_gradients(tensors):
        return ChunkKda.apply(*tensors, prepared)
    return _forward(prepared, tuple(x for x in tensors if x is not None))


def chunk_seen(call: dict[str, Any]) -> tuple[tuple | None, tuple | None]:
    """The result if a call like this was made before, and the key to remember it by; or None."""
    tensors = _CHUNK_TENSORS(call)
    keeps_h = call["disable_recompute"] and _wants_gradients(tensors)
    key = _key(tensors, (*_CHUNK_OPTIONS(call), bool(keeps_h)))
    prepared = _calls.get(key)
    return None if prepared is None else _run_chunk(prepared, tensors), key


def chunk_kda(
    call: dict[str, Any],
    key: tuple | None,
    inputs: tuple,
    cu_seqlens: Any,
    options: Options,
    with_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call that passed the checks; `inputs` and `options` are what they made of it."""
    tensors = (*inputs, cu_seqlens)
    if needs_operators(tensors):
        return _library.chunk_kda(inputs, cu_seqlens, options, with_state)
    keeps_h = bool(call["disable_recompute"]) and _wants_gradients(tensors)
    prepared = _kda.prepare_forward(_torch, inputs, cu_seqlens, options, with_state, keeps_h)
    # Only where nothing was cast, reshaped or dropped.
    if all(a is b for a, b in zip(tensors, _CHUNK_TENSORS(call))):
        _keep(_calls, key, prepared)
    return _run_chunk(prepared, tensors)


def _run_decode(prepared: Prepared, tensors: tuple, in_place: bool) -> tuple[Any, Any]:
    states = tensors[7]
    given = tuple(x for x in tensors if x is not None)
    if not in_place:
        return _forward(prepared, given)
    o, _ = _forward(prepared, (*given, states))
    torch.autograd.graph.increment_version(states)
    return o, states


def recurrent_seen(call: dict[str, Any]) -> tuple[tuple | None, tuple | None]:
    """As chunk_seen. What is remembered says besides whether states are updated in place."""
    tensors = _DECODE_TENSORS(call)
    key = _key(tensors, _DECODE_OPTIONS(call))
    seen = _calls.get(key)
    return None if seen is None else _run_decode(seen[0], tensors, seen[1]), key


def recurrent_kda(
    call: dict[str, Any],
    key: tuple | None,
    inputs: tuple,
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
    if all(a is b for a, b in zip(tensors, _DECODE_TENSORS(call))):
        _keep(_calls, key, (prepared, in_place))
    return _run_decode(prepared, tensors, in_place)
