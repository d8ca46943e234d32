"""Arguments of the public functions: what flash-linear-attention refuses is refused here too.

Only shapes and dtypes are looked at, so that the same checks serve torch, NumPy and tracing.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

from ._problem import (
    GATE_LOWER_BOUND,
    GATE_NONE,
    GATE_SOFTPLUS,
    ArgumentError,
    Options,
    Sizes,
    UnsupportedError,
)

SAFE_LOWER_BOUND = -5.0
MOST = 2**46  # entries of a dimension, as the library has it
_FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
    "transpose_state_layout",
    "in_place",
)
_NUMBERS = ("scale", "lower_bound")


def shown(value: Any) -> str:
    """What was found, for a message: one short line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of thousands of digits has none
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


# What an argument is asked for may fail as its type likes: with more than one element, without
# memory, too large. All of it means that the argument is none of what is expected. Numbers of
# Python come first and are asked nothing: inside torch.compile they may be symbols.


def flag(name: str, value: Any) -> bool:
    """Whatever counts as one: None, a number, a tensor of one element; no word, as "False"."""
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    try:
        if hasattr(value, "__bool__"):
            return bool(value)
    except Exception:
        pass
    raise ArgumentError(f"{name}: found {shown(value)}, expected True or False")


def number(name: str, value: Any) -> float:
    """Whatever counts as one: of Python, NumPy, or a tensor of one element."""
    if not isinstance(value, (int, float)) and getattr(value, "requires_grad", False):
        raise ArgumentError(
            f"{name}: found a tensor that requires grad, expected a number: no gradient of it is "
            f"computed; float({name}) makes one"
        )
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except Exception:
        pass
    raise ArgumentError(f"{name}: found {shown(value)}, expected a number")


def extent(name: str, value: Any) -> int:
    """Of a tensor; no bool."""
    try:
        found = operator.index(value)
        if 0 < found <= MOST and not isinstance(value, bool):
            return found
    except Exception:
        pass
    raise ArgumentError(f"{name}: found {shown(value)}, expected a whole number from 1 to {MOST}")


def rows_of_a_chunk(chunk_size: Any) -> int:
    found = chunk_size
    if not isinstance(found, int):  # of NumPy, say
        try:
            found = operator.index(found)
        except Exception:
            found = 0
    if found in (32, 64):
        return found
    raise ArgumentError(
        f"chunk_size: found {shown(chunk_size)}, `chunk_size` must be either 32 or 64"
    )


def natively(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its options as values of Python; tensors stay as they are."""
    values = dict(call)
    for name in _FLAGS:
        if name in values:
            values[name] = flag(name, values[name])
    for name in _NUMBERS:
        if values.get(name) is not None:
            values[name] = number(name, values[name])
    if "chunk_size" in values:
        values["chunk_size"] = rows_of_a_chunk(values["chunk_size"])
    return values


def check_rank(name: str, tensor: Any, rank: int) -> None:
    if len(tensor.shape) != rank:
        raise ArgumentError(
            f"{name}: found shape {list(tensor.shape)}, expected {rank} dimensions"
        )


def take_state_layout(state_v_first: bool, kwargs: dict[str, bool]) -> bool:
    """The older name of state_v_first."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ArgumentError(
            "transpose_state_layout: found together with state_v_first, its new name; pass one"
        )
    warnings.warn(
        "`transpose_state_layout` is deprecated, use `state_v_first`",
        DeprecationWarning,
        stacklevel=4,
    )
    return kwargs.pop("transpose_state_layout")


def refuse_unknown(kwargs: dict[str, Any]) -> None:
    """An argument that nothing here knows may change the result: it is named, not dropped."""
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"argument {name}={shown(value)} is not known")


def gate_of(use_gate_in_kernel: Any, lower_bound: Any, A_log: Any) -> tuple[int, float]:
    if not flag("use_gate_in_kernel", use_gate_in_kernel):
        return GATE_NONE, 0.0
    if lower_bound is not None:
        return GATE_LOWER_BOUND, number("lower_bound", lower_bound)
    if A_log is None:
        raise ArgumentError(
            "A_log: absent, expected [HV]: `A_log` must be given with use_gate_in_kernel=True "
            "unless lower_bound is set"
        )
    return GATE_SOFTPLUS, 0.0


def check_safe_gate(safe_gate: bool, use_gate_in_kernel: bool, lower_bound: float | None) -> None:
    if not (safe_gate and use_gate_in_kernel):
        return
    if lower_bound is None:
        raise ArgumentError(
            "lower_bound: absent, `lower_bound` must be given with safe_gate=True and "
            "use_gate_in_kernel=True"
        )
    if not SAFE_LOWER_BOUND <= lower_bound < 0:
        raise ArgumentError(
            f"lower_bound: found {lower_bound}, expected a value in the safe range [-5, 0)"
        )


def options_of(call: dict[str, Any], state_v_first: bool) -> Options:
    """Of a call that natively() returned."""
    if call["allow_neg_eigval"] and not call["use_beta_sigmoid_in_kernel"]:
        raise ArgumentError(
            "allow_neg_eigval: found True, requires use_beta_sigmoid_in_kernel=True"
        )
    gate, bound = gate_of(call["use_gate_in_kernel"], call["lower_bound"], call["A_log"])
    return Options(
        gate,
        bound,
        call["scale"],
        call["use_qk_l2norm_in_kernel"],
        call["use_beta_sigmoid_in_kernel"],
        call["allow_neg_eigval"],
        state_v_first,
        call.get("chunk_size", 64),
    )


def sizes_of(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu: Any) -> Sizes:
    """The sizes that the shapes give; the first shape that does not fit is named."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g)):
        check_rank(name, tensor, 4)
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    if q.shape != k.shape:
        raise ArgumentError(
            f"k: found shape {list(k.shape)}, expected that of q, {list(q.shape)}"
        )
    if K > 256:
        raise ArgumentError(f"q: found head dim {K}, expected at most 256")
    if H == 0 or HV % H != 0:
        raise ArgumentError(
            f"v: found {HV} heads, expected a multiple of the {H} heads of q (grouped value heads)"
        )
    if v.shape[:2] != (B, T):
        raise ArgumentError(
            f"v: found shape {list(v.shape)}, expected [B, T, HV, V] with B, T = {B}, {T} as in q"
        )
    if g.shape != (B, T, HV, K):
        raise ArgumentError(
            f"g: found shape {list(g.shape)}, expected [B, T, HV, K] = {[B, T, HV, K]}"
        )
    if beta.shape != (B, T, HV):
        raise ArgumentError(
            f"beta: found shape {list(beta.shape)}, expected [B, T, HV] = {[B, T, HV]}"
        )
    if cu is None:
        return Sizes(B, T, H, HV, K, V)
    if B != 1:
        raise ArgumentError(
            f"q: found batch size {B} with cu_seqlens, expected 1: pack all sequences in one row"
        )
    if len(cu.shape) != 1:
        raise ArgumentError(f"cu_seqlens: found shape {list(cu.shape)}, expected [N+1]")
    N = cu.shape[0] - 1
    if N < 0:
        raise ArgumentError("cu_seqlens: found no entry, expected [N+1]")
    if initial_state is not None:
        if initial_state.shape[0] != N:
            raise ArgumentError(
                f"initial_state: found {initial_state.shape[0]} states, expected {N}, one a "
                "sequence of cu_seqlens"
            )
    return Sizes(B, T, H, HV, K, V, N)


def state_shape(sizes: Sizes, options: Options, packed: bool) -> tuple[int, int, int, int]:
    rows = sizes.N if packed else sizes.B
    if options.state_v_first:
        return (rows, sizes.HV, sizes.V, sizes.K)
    return (rows, sizes.HV, sizes.K, sizes.V)


def chunk_rows(sizes: Sizes, options: Options, packed: bool) -> int:
    """Rows of h and dh."""
    C = options.chunk_size
    if packed:
        return sizes.T // C + sizes.N
    return sizes.B * ((sizes.T + C - 1) // C)
