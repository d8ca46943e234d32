"""What is built in, what a call would use, and running it once ahead of time."""

from __future__ import annotations

from typing import Any

from . import _arrays, _calls, _checks, _kda, _native, _problem, ops
from ._problem import ArgumentError, UnsupportedError

_FLOATS = ("bfloat16", "float16", "float32", "float64")  # as torch calls them


def support_matrix() -> list[dict[str, str]]:
    """One row an implementation in this build, fastest first for each operation and device."""
    return [
        {
            "operation": _problem.OPERATIONS[operation],
            "device": _problem.DEVICE_TYPES[device],
            "implementation": name,
            "family": family,
            "takes": features,
        }
        for name, family, operation, device, features in _native.implementations()
    ]


def is_supported(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, backward: bool = False, **arguments: Any
) -> tuple[bool, str, str]:
    """Whether chunk_kda would run natively with these arguments, and why not.

    Nothing is computed. With `backward` the question is about the gradients too.

    Returns:
        (supported, reason, implementation); reason is "" if supported, implementation "" if not.
    """
    call = {**_calls.CHUNK_DEFAULTS, "q": q, "k": k, "v": v, "g": g, "beta": beta, **arguments}
    backend = call.pop("backend", "auto")
    try:
        ops.check_backend(backend, q)
        backward = _checks.flag("backward", backward)
        reason = ops.why_fla(backend)
        if reason:
            return False, reason, ""
        plans = [plan(call)] + ([plan(call, backward=True)] if backward else [])
    except (UnsupportedError, ValueError) as error:
        return False, str(error), ""
    return True, "", ", ".join(plan.implementation for plan in plans)


def plan(call: dict[str, Any], backward: bool = False) -> Any:
    """The plan of a call of chunk_kda; ValueError or UnsupportedError if there is none."""
    call, inputs, options = _calls.chunk_problem(call)
    names, tensors = (*_kda.INPUTS, "cu_seqlens"), (*inputs, call["cu_seqlens"])
    if not _calls.is_torch(inputs[0]):
        return _plan(_arrays, tuple(map(_arrays.wrap, names, tensors)), call, options, backward)
    frame = _calls.torch_frame()
    tensors = frame.laid_out(tensors, frame.scattered(tensors))
    if _calls.needs_operators(tensors):
        # torch's dispatcher takes a sign out of memory before it calls an operator.
        tensors = tuple(frame.empty_like(t) if t is not None and t.is_neg() else t for t in tensors)
        return _plan(frame, tensors, call, options, backward)
    found = _plan(frame, tensors, call, options, backward)
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            frame.check_address(name, tensor)
    return found


def _plan(
    frame: Any,
    tensors: tuple[Any, ...],
    call: dict[str, Any],
    options: _problem.Options,
    backward: bool,
) -> Any:
    inputs, cu_seqlens = tensors[:-1], tensors[-1]
    if not backward:
        how = (options, call["output_final_state"], call["return_intermediate_states"])
        return _kda.prepare_forward(frame, inputs, cu_seqlens, *how).plan
    # The gradient of o, for its dtype and shape.
    do = frame.empty(tuple(inputs[2].shape), inputs[0].dtype, inputs[0])
    needs = (True,) * len(_kda.GRADIENTS)
    found: Any = _kda.prepare_backward(frame, do, None, inputs, cu_seqlens, options, needs)
    return found.prepared.plan


def warmup(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int | None = None,
    HV: int | None = None,
    *,
    dtype: Any = "bfloat16",
    device: str = "cuda",
    backward: bool = True,
    **arguments: Any,
) -> None:
    """Runs chunk_kda once on zeros of this shape (torch), so that the first real call need not
    load kernels. Nothing is compiled, here or ever. `dtype` is one of torch or its name,
    `arguments` are those of chunk_kda."""
    try:
        import torch
    except ImportError as missing:
        raise ImportError(
            f"warmup: torch cannot be imported ({missing}); the call is one on its tensors"
        ) from missing

    name = _checks.shown(dtype).strip("'").removeprefix("torch.")
    if name not in _FLOATS:
        found = _checks.shown(dtype)
        raise ArgumentError(f"dtype: found {found}, expected one of {', '.join(_FLOATS)}")
    try:
        torch.empty(0, device=device)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"device: found {_checks.shown(device)}, expected one that torch can use ({reason})"
        ) from error
    V, HV = K if V is None else V, H if HV is None else HV
    extents = dict(B=B, T=T, H=H, K=K, V=V, HV=HV)
    B, T, H, K, V, HV = (_checks.extent(letter, x) for letter, x in extents.items())
    backward = _checks.flag("backward", backward)
    io = dict(dtype=getattr(torch, name), device=device, requires_grad=backward)
    # Whatever mode the caller is in: a backward takes tensors that have gradients.
    with torch.inference_mode(False), torch.set_grad_enabled(backward):
        q, k = (torch.zeros(B, T, H, K, **io) for _ in range(2))
        v, g = torch.zeros(B, T, HV, V, **io), torch.zeros(B, T, HV, K, **io)
        beta = torch.zeros(B, T, HV, **io)
        if arguments.get("use_gate_in_kernel") and "A_log" not in arguments:
            arguments["A_log"] = torch.zeros(HV, device=device, requires_grad=backward)
            arguments["dt_bias"] = torch.zeros(HV * K, device=device, requires_grad=backward)
        o, _ = ops.chunk_kda(q, k, v, g, beta, **arguments)[:2]
        if backward:
            o.sum().backward()
        if o.is_cuda:
            torch.cuda.synchronize(o.device)
