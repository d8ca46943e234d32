"""What differentiation meets at the operators: the gradients of chunk_kda, and for all else an
error where a derivative is asked for, never a wrong number.

Whatever calls an operator (this package, a traced or compiled program, torch.ops itself) comes
through the kernels here, which are called once for each level of differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from . import _log, _torch
from ._problem import ArgumentError

_INSTEAD = "use backward() or torch.autograd.grad of chunk_kda"
_TANGENT = "a tangent of forward-mode differentiation (make_dual, torch.func.jvp)"
_TRANSFORM = "a tensor that torch.func (grad, vjp, jacrev) differentiates by"
_ONCE = "trying to differentiate twice a function that is once differentiable"
_NEVER = (
    "trying to differentiate a function that has no derivative, as chunk_kda has; where none is "
    "wanted call it under torch.no_grad() or detach its inputs"
)
_library = torch.library.Library("native_kda", "IMPL")


def wants_gradients(tensors: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # half the time of any()
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def refuse_gradients(tensors: tuple[Any, ...]) -> None:
    """A decode step has none: where one was wanted that must not go unnoticed."""
    if wants_gradients(tensors) and not torch.compiler.is_compiling():
        _log.once(
            "fused_recurrent_kda has no gradients: its results do not require grad though an input "
            "does. Call it under torch.no_grad(), or chunk_kda for gradients"
        )


def check_in_place(states: torch.Tensor) -> None:
    """As torch has it for its own operators."""
    if states.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "initial_state: found a tensor that requires grad, expected one that can be updated in "
            "place; call under torch.no_grad() or detach it"
        )
    if states.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            "initial_state: found a tensor made in torch.inference_mode(), expected one that can "
            "be updated in place outside; call in that mode or clone it"
        )


def _below(overload: Any, keyset: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _refuse(name: str, found: str, function: str) -> NoReturn:
    raise ArgumentError(f"{name}: found {found}, for which {function} has no rule; {_INSTEAD}")


def _register(operator: str, function: str, differentiated: Callable[..., Any]) -> None:
    """`differentiated` is called where a tensor requires grad. `function` is the users' name."""
    overload = getattr(torch.ops.native_kda, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    names = ["initial_state" if name == "pool" else name for name in names]  # of `function`

    def kernel(keyset: Any, *args: Any) -> Any:
        given = [(n, x) for n, x in zip(names, args) if isinstance(x, torch.Tensor)]
        if forward_ad._current_level >= 0:
            for name, tensor in given:
                if forward_ad.unpack_dual(tensor).tangent is not None:
                    _refuse(name, _TANGENT, function)
        if not wants_gradients(tuple(tensor for _, tensor in given)):
            return _below(overload, keyset, *args)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            name = next(name for name, tensor in given if tensor.requires_grad)
            _refuse(name, _TRANSFORM, function)
        return differentiated(overload, keyset, *args)

    _library.impl(operator, kernel, "Autograd", with_keyset=True)


class _ChunkKda(torch.autograd.Function):
    """Keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, overload: Any, keyset: Any, *args: Any) -> Any:
        ctx.save_for_backward(*args[:9])
        ctx.options, ctx.output_final_state = args[9:17], args[17]
        ctx.set_materialize_grads(False)
        return _below(overload, keyset, *args)

    @staticmethod
    def backward(ctx: Any, do: Any, dfinal_state: Any) -> Any:
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else _torch.dense(do)
        if dfinal_state is not None:
            dfinal_state = _torch.dense(dfinal_state) if ctx.output_final_state else None
        needs = ctx.needs_input_grad[2:10]
        gradients = chunk_kda_backward(do, dfinal_state, saved, ctx.options, needs)
        return None, None, *gradients, *(None,) * 10


def chunk_kda_backward(
    do: torch.Tensor,
    dfinal_state: Any,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:
    """The backward as an operator. `inputs` end with cu_seqlens; None where not needed."""
    gradients = torch.ops.native_kda.chunk_kda_backward(
        do, dfinal_state, *inputs, *options, [int(need) for need in needs]
    )
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs))


class _Undifferentiable(torch.autograd.Function):
    """Computes as ever; what is wrong is to go back from the result."""

    @staticmethod
    def forward(ctx: Any, why: str, overload: Any, keyset: Any, *args: Any) -> Any:
        ctx.why = why
        return _below(overload, keyset, *args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.why)


def _decode(overload: Any, keyset: Any, *args: Any) -> Any:
    refuse_gradients(args[:8])
    return _below(overload, keyset, *args)


def _pool(keyset: Any, *args: Any) -> Any:
    """A backward that needs the states as they were is an error from now on."""
    check_in_place(args[7])
    torch.autograd.graph.increment_version(args[7])
    overload = torch.ops.native_kda.recurrent_kda_pool.default
    return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


def register_undifferentiable(operator: str, function: str, why: str = _NEVER) -> None:
    """For an operator of _library that is not differentiated, or not again."""
    _register(operator, function, partial(_Undifferentiable.apply, f"{function}: {why}"))


def register() -> None:
    """For the operators of _library that are defined one by one."""
    _register("chunk_kda", "chunk_kda", _ChunkKda.apply)
    register_undifferentiable("chunk_kda_backward", "chunk_kda_backward", _ONCE)
    _register("recurrent_kda", "fused_recurrent_kda", _decode)
    _register("recurrent_kda_pool", "fused_recurrent_kda", _decode)
    _library.impl("recurrent_kda_pool", _pool, "ADInplaceOrView", with_keyset=True)
