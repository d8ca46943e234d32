"""The public functions: chunk_kda and fused_recurrent_kda, for torch tensors and for arrays.

Names, order and defaults of the arguments are those of fla.ops.kda (flash-linear-attention), so
that either function can stand in for its namesake there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _calls, _checks, _kda, _log
from ._problem import ArgumentError, UnsupportedError

_BACKENDS = ("auto", "cuda", "cpu", "fla")


def check_backend(backend: Any, q: Any) -> None:
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ArgumentError(
            f"backend: found {_checks.shown(backend)}, expected one of {', '.join(_BACKENDS)}"
        )
    if backend in ("cuda", "cpu"):
        kind = _calls.device_type(q)
        if backend != kind:
            raise ArgumentError(f"backend: found {backend!r} with tensors on {kind}")


def why_fla(backend: str) -> str:
    """Why every call goes to flash-linear-attention, "" if it does not."""
    if backend == "fla":
        return "backend='fla'"
    if not _log.disabled(_calls.is_tracing()):
        return ""
    if backend != "auto":
        raise UnsupportedError(f"backend: found {backend!r} with NATIVE_KDA_DISABLE set")
    return "NATIVE_KDA_DISABLE is set"


def _to_fla(function: str, reason: str, call: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """The call as flash-linear-attention does it; `reason` says why, once in the log."""
    from . import fla

    if _calls.is_tracing():
        _calls.break_graph(
            f"{function} goes to flash-linear-attention, which breaks the graph: {reason}"
        )
    if not fla.takes(call["q"]):
        raise UnsupportedError(
            f"{function}: {reason}; flash-linear-attention takes tensors of torch alone, found q "
            f"of type {type(call['q']).__name__}"
        )
    try:
        original = fla.original(function)
    except ImportError as missing:
        raise UnsupportedError(
            f"{function}: {reason}; flash-linear-attention could do it, but cannot be imported "
            f"({missing})"
        ) from None
    _log.once(f"{function} goes to flash-linear-attention: {reason}")
    # An older version need not know what is left at its default.
    given = {n: x for n, x in call.items() if n not in defaults or x is not defaults[n]}
    return original(**given)


def _dispatch(
    function: str,
    native: Callable[[dict[str, Any]], Any],
    call: dict[str, Any],
    defaults: dict[str, Any],
    backend: str,
) -> Any:
    """Native, or flash-linear-attention where the caller or the environment says so."""
    check_backend(backend, call["q"])
    reason = why_fla(backend)
    if reason:
        return _to_fla(function, reason, call, defaults)
    try:
        return native(call)
    except UnsupportedError as error:
        if backend != "auto" or not _calls.is_torch(call["q"]):
            raise
        if _log.chosen(_calls.is_tracing()):
            raise _log.insist(error) from None
        reason = error.args[0]  # torch.compile cannot trace str()
    return _to_fla(function, reason, call, defaults)


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: int = 64,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Kimi Delta Attention over whole sequences; differentiable for torch tensors, once, by
    backward() and torch.autograd.grad. Where a program is traced (torch.compile, torch.export,
    make_fx, torch.jit.trace) it is the operator torch.ops.native_kda.chunk_kda.

    Args:
        q, k: [B, T, H, K]; one dtype with v.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural-log decay; with use_gate_in_kernel the raw gate input.
        beta: [B, T, HV]; with use_beta_sigmoid_in_kernel its logits.
        scale: of the scores; K**-0.5 if None.
        initial_state: [N, HV, K, V] in fp32 (beside fp64 tensors fp64 too), or [N, HV, V, K] with
            state_v_first.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q and k are normalised over K first.
        use_gate_in_kernel: the decay is -exp(A_log) softplus(g + dt_bias), or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)). A_log: [HV]; dt_bias: [HV*K] or [HV, K].
        use_beta_sigmoid_in_kernel: beta holds logits; with allow_neg_eigval it becomes 2 sigmoid.
        safe_gate: says that decays are at least lower_bound. Checked, otherwise of no effect:
            every gate is computed safely.
        disable_recompute: keeps the states entering each chunk for the backward, 2 K V bytes a
            chunk and head in 16 bits, which otherwise walks for them again. Of no effect inside
            torch.compile and wherever no gradient is asked for.
        use_graph, max_num_seqs: accepted, of no effect: every call can be captured in a CUDA graph.
        return_intermediate_states: also returns the state entering each chunk, [B, NT, HV, K, V].
            Only inside torch.inference_mode, or with arrays; not traced with cu_seqlens.
        cu_seqlens: [N+1], int64 or int32: B is 1 and holds N sequences one after another.
            cu_seqlens_cpu: the same on the host; only return_intermediate_states uses it.
        chunk_size: 64 or 32.
        backend: "cuda" or "cpu" insist on this library, "fla" on flash-linear-attention. "auto"
            goes to flash-linear-attention with what this library cannot do, and logs why, once;
            where KDA_IMPL names an implementation that is an error instead.

    Returns:
        (o, final_state), or (o, final_state, h). o: [B, T, HV, V] in the dtype of q. final_state:
        fp32, of fp64 tensors fp64, in the layout of initial_state, or None.
    """
    if isinstance(backend, str) and backend == "auto" and not kwargs:
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        options = (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            return_intermediate_states,
            state_v_first,
            cp_context,
            chunk_size,
            disable_recompute,
        )
        result = _calls.chunk_again(tensors, options)
        if result is not None:
            return result
    call = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        **kwargs,
    )
    return _dispatch("chunk_kda", _calls.chunk, call, _calls.CHUNK_DEFAULTS, backend)


def chunk_kda_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    dfinal_state: Any = None,
    wanted: tuple[str, ...] = _kda.GRADIENTS,
    **options: Any,
) -> dict[str, Any]:
    """The gradients of chunk_kda, for arrays that have no automatic differentiation. They are not
    differentiable: of torch tensors that require grad they require grad, and backward() raises.

    Args:
        do: gradient of o. dfinal_state: gradient of final_state; None counts as zero.
        wanted: names of the gradients to compute, of dq, dk, dv, dg, dbeta, dA_log, ddt_bias and
            dinitial_state. Those whose input is absent are left out.
        options: as chunk_kda, the same as in the forward; flash-linear-attention is not turned to.

    Returns:
        The gradients by name, each with dtype and shape of its input.
    """
    backend = options.pop("backend", "auto")
    check_backend(backend, q)
    if backend == "fla":
        raise UnsupportedError(
            "chunk_kda_backward: backend='fla', and flash-linear-attention has no such function"
        )
    _calls.check_enabled("chunk_kda_backward")
    if not isinstance(wanted, (tuple, list, set, frozenset)) or any(
        not isinstance(name, str) or name not in _kda.GRADIENTS for name in wanted
    ):
        raise ArgumentError(
            f"wanted: found {_checks.shown(wanted)}, expected names out of "
            f"{', '.join(_kda.GRADIENTS)}"
        )
    call = {**_calls.CHUNK_DEFAULTS, "q": q, "k": k, "v": v, "g": g, "beta": beta, **options}
    return _calls.chunk_backward(do, dfinal_state, call, tuple(wanted))


def fused_recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    state_indices: Any = None,
    num_accepted: Any = None,
    in_place: bool = False,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Kimi Delta Attention token by token, for decoding. No gradients: that an input requires grad
    is logged once, and differentiating by torch.func is an error.

    The arguments are those of chunk_kda, and besides:
        state_indices: [N], int32. initial_state is then a pool of states [P, HV, K, V], which is
            updated in place: sequence i reads and writes slot state_indices[i], -1 skips it.
        in_place: initial_state is updated in place, and returned as final_state.
        num_accepted: [N], int32: only so many tokens of each sequence change its state, which is
            updated in place; for speculative decoding.

    Returns:
        (o, final_state). final_state is the tensor initial_state where that is updated in place.
    """
    if isinstance(backend, str) and backend == "auto" and not kwargs:
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        options = (
            scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            lower_bound,
            state_v_first,
            in_place,
        )
        result = _calls.recurrent_again((*tensors, state_indices, num_accepted), options)
        if result is not None:
            return result
    call = dict(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        state_indices=state_indices,
        num_accepted=num_accepted,
        in_place=in_place,
        **kwargs,
    )
    defaults = _calls.RECURRENT_DEFAULTS
    return _dispatch("fused_recurrent_kda", _calls.recurrent, call, defaults, backend)
