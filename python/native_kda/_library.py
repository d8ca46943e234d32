"""torch.library operators: what torch.compile, fake tensors and dispatch modes see.

An absent optional output is an empty tensor, since operators return tensors only.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _checks, _kda, _torch
from ._problem import Options

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
_OPTIONS = (
    "int gate, float lower_bound, float? scale, bool qk_l2norm, bool beta_sigmoid, "
    "bool allow_neg_eigval, bool state_v_first, int chunk_size"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_DEVICES = ("cpu", "cuda")


def _none_if_empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None or tensor.dim() == 1 and tensor.shape[0] == 0 else tensor


def _or_empty(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((0,)) if tensor is None else tensor


torch.library.define(
    "native_kda::chunk_kda",
    f"({_INPUTS}, {_OPTIONS}, bool output_final_state) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "native_kda::chunk_kda_backward",
    f"(Tensor do, Tensor? dfinal_state, {_INPUTS}, {_OPTIONS}, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "native_kda::recurrent_kda",
    f"({_INPUTS}, {_OPTIONS}, bool output_final_state) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "native_kda::recurrent_kda_pool",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) pool, Tensor? cu_seqlens, Tensor? state_indices, Tensor? num_accepted, "
    f"{_OPTIONS}) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("native_kda::chunk_kda", _DEVICES)
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options, output_final_state = Options(*rest[:8]), rest[8]
    o, final_state, _ = _kda.forward(_torch, inputs, cu_seqlens, options, output_final_state)
    return o, _or_empty(final_state, q)


def _fake_outputs(q, v, cu_seqlens, options, output_final_state):
    o = q.new_empty(v.shape)
    if not output_final_state:
        return o, q.new_empty((0,))
    sizes = _kda.sizes_of((q, None, v), cu_seqlens)
    shape = _checks.state_shape(sizes, options, cu_seqlens is not None)
    return o, q.new_empty(shape, dtype=_torch.state_dtype(q))


@torch.library.register_fake("native_kda::chunk_kda")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    return _fake_outputs(q, v, cu_seqlens, Options(*rest[:8]), rest[8])


@torch.library.impl("native_kda::chunk_kda_backward", _DEVICES)
def _(do, dfinal_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options, needs = Options(*rest[:8]), tuple(rest[8])
    gradients = _kda.backward(_torch, do, dfinal_state, inputs, cu_seqlens, options, needs)
    return tuple(_or_empty(gradient, q) for gradient in gradients)


@torch.library.register_fake("native_kda::chunk_kda_backward")
def _(do, dfinal_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options, needs = Options(*rest[:8]), rest[8]
    names = {name for name, _ in _kda.taking_part(inputs, cu_seqlens, options)}
    return tuple(
        tensor.new_empty(tensor.shape) if need and name in names else q.new_empty((0,))
        for name, tensor, need in zip(_kda.INPUTS, inputs, needs)
    )


@torch.library.impl("native_kda::recurrent_kda", _DEVICES)
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options, output_final_state = Options(*rest[:8]), rest[8]
    o, final_state = _kda.recurrent(_torch, inputs, cu_seqlens, options, output_final_state)
    return o, _or_empty(final_state, q)


@torch.library.register_fake("native_kda::recurrent_kda")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    return _fake_outputs(q, v, cu_seqlens, Options(*rest[:8]), rest[8])


@torch.library.impl("native_kda::recurrent_kda_pool", _DEVICES)
def _(q, k, v, g, beta, A_log, dt_bias, pool, cu_seqlens, state_indices, num_accepted, *rest):
    inputs = (q, k, v, g, beta, A_log, dt_bias, pool)
    o, _ = _kda.recurrent(
        _torch,
        inputs,
        cu_seqlens,
        Options(*rest[:8]),
        True,
        state_indices,
        num_accepted,
        in_place=True,
    )
    return o


@torch.library.register_fake("native_kda::recurrent_kda_pool")
def _(q, k, v, g, beta, A_log, dt_bias, pool, cu_seqlens, state_indices, num_accepted, *rest):
    return q.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:17]
    ctx.output_final_state = inputs[17]
    ctx.set_materialize_grads(False)


def chunk_kda_backward(
    do: torch.Tensor, dfinal_state: Any, inputs: tuple, options: tuple, needs: tuple[bool, ...]
) -> tuple:
    """The backward as an operator. `inputs` end with cu_seqlens; None where not needed."""
    gradients = torch.ops.native_kda.chunk_kda_backward(
        do, dfinal_state, *inputs, *options, list(needs)
    )
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs))


def _backward(ctx: Any, do: torch.Tensor | None, dfinal_state: torch.Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    do = torch.zeros_like(saved[2]) if do is None else _torch.dense(do)
    if dfinal_state is not None:
        dfinal_state = _torch.dense(dfinal_state) if ctx.output_final_state else None
    needs = ctx.needs_input_grad[:8]
    gradients = chunk_kda_backward(do, dfinal_state, saved, ctx.options, needs)
    return (*gradients, *(None,) * 10)


torch.library.register_autograd(
    "native_kda::chunk_kda", _backward, setup_context=_setup_context
)


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "chunk_kda: trying to differentiate twice a function that is once differentiable"
    )


torch.library.register_autograd("native_kda::chunk_kda_backward", _no_second_derivative)


def chunk_kda(
    inputs: tuple, cu_seqlens: Any, options: Options, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward as an operator, with gradients."""
    inputs = _torch.laid_out(inputs, _torch.scattered(inputs))
    o, final_state = torch.ops.native_kda.chunk_kda(
        *inputs, cu_seqlens, *options, output_final_state
    )
    return o, final_state if output_final_state else None


def recurrent_kda(
    inputs: tuple, cu_seqlens: Any, options: Options, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, final_state = torch.ops.native_kda.recurrent_kda(
        *inputs, cu_seqlens, *options, output_final_state
    )
    return o, final_state if output_final_state else None


def recurrent_kda_pool(
    inputs: tuple, cu_seqlens: Any, state_indices: Any, num_accepted: Any, options: Options
) -> torch.Tensor:
    return torch.ops.native_kda.recurrent_kda_pool(
        *inputs, cu_seqlens, state_indices, num_accepted, *options
    )
