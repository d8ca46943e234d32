"""The eager torch route: the operators without the cost of torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import _kda, _library, _torch
from ._problem import Options

_PLAIN = (torch.Tensor, torch.nn.Parameter)

is_compiling = torch.compiler.is_compiling


def needs_operators(inputs: tuple) -> bool:
    """Tracing, dispatch modes, function transforms and tensor subclasses see operators only."""
    if is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return True
    q = inputs[0]
    if not (q.is_cuda or q.is_cpu):
        return True
    return any(tensor is not None and type(tensor) not in _PLAIN for tensor in inputs)


class ChunkKda(torch.autograd.Function):
    """chunk_kda with gradients. Only the inputs are kept; the backward recomputes the rest."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens, options, with_state):
        inputs = (q, k, v, g, beta, A_log, dt_bias, h0)
        o, final_state, _ = _kda.forward(_torch, inputs, cu_seqlens, options, with_state)
        ctx.save_for_backward(*inputs, cu_seqlens)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal_state):
        saved = ctx.saved_tensors
        v = saved[2]
        if do is None:
            do = saved[0].new_zeros(()).expand(v.shape)
        gradients = _kda.backward(
            _torch,
            do,
            dfinal_state,
            saved[:8],
            saved[8],
            ctx.options,
            ctx.needs_input_grad[:8],
        )
        return (*gradients, None, None, None)


def _wants_gradient(inputs: tuple) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )


def chunk_kda(
    inputs: tuple, cu_seqlens: Any, options: Options, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if needs_operators(inputs):
        return _library.chunk_kda(inputs, cu_seqlens, options, output_final_state)
    if _wants_gradient(inputs):
        return ChunkKda.apply(*inputs, cu_seqlens, options, output_final_state)
    o, final_state, _ = _kda.forward(_torch, inputs, cu_seqlens, options, output_final_state)
    return o, final_state


def recurrent_kda(
    inputs: tuple,
    cu_seqlens: Any,
    options: Options,
    output_final_state: bool,
    state_indices: Any = None,
    num_accepted: Any = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if needs_operators(inputs):
        if not in_place:
            return _library.recurrent_kda(inputs, cu_seqlens, options, output_final_state)
        o = _library.recurrent_kda_pool(inputs, cu_seqlens, state_indices, num_accepted, options)
        return o, inputs[7]
    result = _kda.recurrent(
        _torch,
        inputs,
        cu_seqlens,
        options,
        output_final_state,
        state_indices,
        num_accepted,
        in_place,
    )
    if in_place:
        torch.autograd.graph.increment_version(inputs[7])
    return result
