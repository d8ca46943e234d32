"""torch.library operators: what torch.compile, fake tensors and dispatch modes see.

An absent optional output is an empty tensor, since operators return tensors only.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _checks, _derivatives, _kda, _log, _operations, _problem, _torch
from ._problem import Options, UnsupportedError

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


def _check_enabled(operator: str) -> None:
    """The public functions heed NATIVE_KDA_DISABLE before they come here; what was compiled or
    traced earlier, and torch.ops itself, do not. The backward of chunk_kda is let through: it
    belongs to a forward that ran here."""
    if _log.disabled():
        raise UnsupportedError(
            f"torch.ops.native_kda.{operator}: NATIVE_KDA_DISABLE is set; a program that was "
            "compiled or traced before has this operator inside: compile or trace it again, after "
            "torch.compiler.reset()"
        )


torch.library.define(
    "native_kda::chunk_kda",
    f"({_INPUTS}, {_OPTIONS}, bool output_final_state) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "native_kda::chunk_kda_backward",
    f"(Tensor do, Tensor? dfinal_state, {_INPUTS}, {_OPTIONS}, int[] needs) -> "
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
    _check_enabled("chunk_kda")
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
    _check_enabled("recurrent_kda")
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options, output_final_state = Options(*rest[:8]), rest[8]
    o, final_state = _kda.recurrent(_torch, inputs, cu_seqlens, options, output_final_state)
    return o, _or_empty(final_state, q)


@torch.library.register_fake("native_kda::recurrent_kda")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest):
    return _fake_outputs(q, v, cu_seqlens, Options(*rest[:8]), rest[8])


@torch.library.impl("native_kda::recurrent_kda_pool", _DEVICES)
def _(q, k, v, g, beta, A_log, dt_bias, pool, cu_seqlens, state_indices, num_accepted, *rest):
    _check_enabled("recurrent_kda_pool")
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


def _define(operation: str) -> None:
    """An operator of any operation, by its signature; `wanted` tells which outputs are. Those of
    one output return it alone, as torch.library has it."""
    inputs, outputs = _operations.inputs_of(operation), _operations.outputs_of(operation)
    tensors = ", ".join(f"Tensor{'' if x.required else '?'} {x.name}" for x in inputs)
    returns = ", ".join(["Tensor"] * len(outputs))
    torch.library.define(
        f"native_kda::{operation}",
        f"({tensors}, {_OPTIONS}, int[] wanted) -> ({returns})",
        tags=_TAGS,
    )

    def take(args: tuple[Any, ...]) -> tuple[tuple[str, ...], Options, dict[str, Any]]:
        given = {spec.name: x for spec, x in zip(inputs, args) if x is not None}
        *options, wanted = args[len(inputs) :]
        names = tuple(spec.name for spec, want in zip(outputs, wanted) if want)
        return names, Options(*options), given

    def give(names: tuple[str, ...], results: Any, like: torch.Tensor) -> Any:
        named = dict(zip(names, results))
        every = tuple(_or_empty(named.get(spec.name), like) for spec in outputs)
        return every if len(every) > 1 else every[0]

    @torch.library.impl(f"native_kda::{operation}", _DEVICES)
    def _(*args):
        _check_enabled(operation)
        names, options, given = take(args)
        results = _operations.run(_torch, operation, names, options, given)
        return give(names, results, next(iter(given.values())))

    @torch.library.register_fake(f"native_kda::{operation}")
    def _(*args):
        names, options, given = take(args)
        like = next(iter(given.values()))
        _, rows = _operations.rows_of(_torch, operation, names, options, given)
        return give(names, [like.new_empty(shape, dtype=t) for _, shape, t in rows], like)


_derivatives.register()
_define("chunk_fwd")
_derivatives.register_undifferentiable("chunk_fwd", "chunk_kda with return_intermediate_states")
for _stage in _problem.OPERATIONS[3:]:
    _define(_stage)
    _derivatives.register_undifferentiable(_stage, f"stages.{_stage}")


def run(
    operation: str, outputs: tuple[str, ...], options: Options, given: dict[str, Any]
) -> tuple[Any, ...]:
    """Any operation as an operator; the outputs in the order of their names."""
    names = [spec.name for spec in _operations.outputs_of(operation)]
    inputs = [given.get(spec.name) for spec in _operations.inputs_of(operation)]
    wanted = [int(name in outputs) for name in names]
    results = getattr(torch.ops.native_kda, operation)(*inputs, *options, wanted)
    named = dict(zip(names, results if len(names) > 1 else (results,)))
    return tuple(named[name] for name in outputs)


def chunk_kda(
    inputs: tuple[Any, ...], cu_seqlens: Any, options: Options, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward as an operator, with gradients."""
    inputs = _torch.laid_out(inputs, _torch.scattered(inputs))
    o, final_state = torch.ops.native_kda.chunk_kda(
        *inputs, cu_seqlens, *options, output_final_state
    )
    return o, final_state if output_final_state else None


def recurrent_kda(
    inputs: tuple[Any, ...], cu_seqlens: Any, options: Options, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, final_state = torch.ops.native_kda.recurrent_kda(
        *inputs, cu_seqlens, *options, output_final_state
    )
    return o, final_state if output_final_state else None


def recurrent_kda_pool(
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    state_indices: Any,
    num_accepted: Any,
    options: Options,
) -> torch.Tensor:
    return torch.ops.native_kda.recurrent_kda_pool(
        *inputs, cu_seqlens, state_indices, num_accepted, *options
    )
