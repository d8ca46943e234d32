"""The stages of chunk_kda on their own, for torch tensors and for arrays.

Forward: gate_cumsum, intra, wu, state_scan, output. Backward, after the forward's first four:
reverse_scan, wy_bwd, intra_bwd. They take normalised q and k and activated beta. Tensors are named
as in docs/semantics.md; gamma is the log2 decay summed within the chunk, h and dh have one row a
chunk.

They have no derivatives: of torch tensors that require grad they give results that do, whose
backward() raises. Each is an operator, torch.ops.native_kda.*, to whatever traces a program.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _calls, _checks, _operations, _problem
from ._problem import Options


def _options(**options: Any) -> Options:
    return Options(**_checks.natively(options))


def _run(
    operation: str, outputs: tuple[str, ...], options: Options, **tensors: Any
) -> tuple[Any, ...]:
    """Runs a stage; the outputs in the order of their names."""
    _calls.check_enabled(f"stages.{operation}")
    specs = _operations.inputs_of(operation)
    _calls.check_tensors(tensors, tuple(spec.name for spec in specs if spec.required))
    given = {x.name: tensors[x.name] for x in specs if tensors.get(x.name) is not None}
    if _calls.is_torch(next(iter(given.values()))):
        return _calls.torch_operation(operation, outputs, options, given)
    arrays = {name: _arrays.Array(name, array) for name, array in given.items()}
    leader = next(iter(arrays.values()))
    results = _operations.run(_arrays, operation, outputs, options, arrays)
    return tuple(_arrays.hand_over(result, leader) for result in results)


def gate_cumsum(
    g: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    cu_seqlens: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    chunk_size: int = 64,
) -> Any:
    """gamma [B,T,HV,K] in fp32: the decay, activated as chunk_kda does, summed within chunks."""
    gate, bound = _checks.gate_of(use_gate_in_kernel, lower_bound, A_log)
    options = _options(gate=gate, lower_bound=bound, chunk_size=chunk_size)
    if gate == _problem.GATE_NONE:
        A_log = dt_bias = None
    tensors = dict(g=g, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens)
    return _run("gate_cumsum", ("gamma",), options, **tensors)[0]


def intra(
    q: Any,
    k: Any,
    beta: Any,
    gamma: Any,
    cu_seqlens: Any = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """Aqk and A, [B,T,HV,C]: the scaled causal scores and the inverse of I + L."""
    options = _options(scale=scale, chunk_size=chunk_size)
    tensors = dict(q=q, k=k, beta=beta, gamma=gamma, cu_seqlens=cu_seqlens)
    return _run("intra", ("Aqk", "A"), options, **tensors)


def wu(
    k: Any,
    v: Any,
    beta: Any,
    gamma: Any,
    A: Any,
    q: Any = None,
    cu_seqlens: Any = None,
    *,
    chunk_size: int = 64,
) -> tuple[Any, ...]:
    """w, u and kg, and with q also qg."""
    outputs = ("w", "u", "kg") if q is None else ("w", "u", "kg", "qg")
    tensors = dict(k=k, q=q, v=v, beta=beta, gamma=gamma, A=A, cu_seqlens=cu_seqlens)
    return _run("wu", outputs, _options(chunk_size=chunk_size), **tensors)


def state_scan(
    kg: Any,
    w: Any,
    u: Any,
    gamma: Any,
    initial_state: Any = None,
    do: Any = None,
    cu_seqlens: Any = None,
    *,
    output_final_state: bool = True,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[Any, ...]:
    """h, v_new and final_state (None unless asked for); with do also dq_raw = do h^T in fp32."""
    output_final_state = _checks.flag("output_final_state", output_final_state)
    outputs = ["h", "v_new"]
    outputs += ["final_state"] if output_final_state else []
    outputs += ["dq_raw"] if do is not None else []
    options = _options(state_v_first=state_v_first, chunk_size=chunk_size)
    tensors = dict(
        kg=kg, w=w, u=u, gamma=gamma, initial_state=initial_state, do=do, cu_seqlens=cu_seqlens
    )
    h, v_new, *rest = _run("state_scan", tuple(outputs), options, **tensors)
    return (h, v_new, *rest) if output_final_state else (h, v_new, None, *rest)


def output(
    q: Any,
    gamma: Any,
    Aqk: Any,
    h: Any,
    v_new: Any,
    cu_seqlens: Any = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> Any:
    """o [B,T,HV,V]."""
    tensors = dict(q=q, gamma=gamma, Aqk=Aqk, h=h, v_new=v_new, cu_seqlens=cu_seqlens)
    options = _options(scale=scale, chunk_size=chunk_size)
    return _run("output", ("o",), options, **tensors)[0]


def reverse_scan(
    qg: Any,
    kg: Any,
    w: Any,
    gamma: Any,
    Aqk: Any,
    do: Any,
    dfinal_state: Any = None,
    cu_seqlens: Any = None,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[Any, Any, Any]:
    """dh, dv_new and dinitial_state."""
    options = _options(scale=scale, state_v_first=state_v_first, chunk_size=chunk_size)
    tensors = dict(qg=qg, kg=kg, w=w, gamma=gamma, Aqk=Aqk, do=do)
    tensors.update(dfinal_state=dfinal_state, cu_seqlens=cu_seqlens)
    return _run("reverse_scan", ("dh", "dv_new", "dinitial_state"), options, **tensors)


def wy_bwd(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    gamma: Any,
    A: Any,
    v_new: Any,
    h: Any,
    dh: Any,
    dv_new: Any,
    do: Any,
    cu_seqlens: Any = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> dict[str, Any]:
    """dv, the partial gradients of q, k, g and beta, and those of the score matrices, by name."""
    outputs = ("dv", "dq_partial", "dk_partial", "dg_partial", "dbeta_partial", "dP", "dL")
    options = _options(scale=scale, chunk_size=chunk_size)
    tensors = dict(q=q, k=k, v=v, beta=beta, gamma=gamma, A=A, v_new=v_new, h=h, dh=dh)
    tensors.update(dv_new=dv_new, do=do, cu_seqlens=cu_seqlens)
    return dict(zip(outputs, _run("wy_bwd", outputs, options, **tensors)))


def intra_bwd(
    q: Any,
    k: Any,
    beta: Any,
    gamma: Any,
    dP: Any,
    dL: Any,
    dq_partial: Any = None,
    dk_partial: Any = None,
    dg_partial: Any = None,
    dbeta_partial: Any = None,
    cu_seqlens: Any = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dg (of the natural-log decay) and dbeta."""
    tensors = dict(q=q, k=k, beta=beta, gamma=gamma, dP=dP, dL=dL, cu_seqlens=cu_seqlens)
    tensors.update(dq_partial=dq_partial, dk_partial=dk_partial)
    tensors.update(dg_partial=dg_partial, dbeta_partial=dbeta_partial)
    options = _options(scale=scale, chunk_size=chunk_size)
    return _run("intra_bwd", ("dq", "dk", "dg", "dbeta"), options, **tensors)
