"""Unmodified models on this library: joins flash-linear-attention (fla).

    import native_kda
    native_kda.fla.enable()

enable() registers a backend with fla's dispatch of chunk_kda and fused_recurrent_kda, proves by a
call that the dispatch is live, and puts its own functions in place of fla's where it is not.
Calls that this library does not take stay with fla, which logs the reason; with stages=True their
state scan can still run here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import _calls, _checks, _log, stages, support
from ._problem import UnsupportedError

PRIORITY = 1  # FlashKDA has 3; lower is asked first
_TENSORS = ("q", "k", "v", "g", "beta")

_hits: Counter[str] = Counter()
_state = threading.local()
_enabled = False
_signatures: dict[str, inspect.Signature] = {}
_replaced: dict[str, Callable[..., Any]] = {}  # fla's own functions, where ours took their place


def hits() -> dict[str, int]:
    """How many calls of fla's functions ran here, by name of the function."""
    return dict(_hits)


def _module(function: str) -> Any:
    modules = {"chunk_kda": "kda.chunk", SCAN: "common.chunk_delta_h"}
    name = modules.get(function, "kda.fused_recurrent")
    return importlib.import_module(f"fla.ops.{name}")


def takes(q: Any) -> bool:
    """Whether flash-linear-attention takes such a tensor."""
    return _calls.is_torch(q)


def original(function: str) -> Callable[..., Any]:
    """fla's function, which does not come back here. ImportError if there is no fla."""
    own = _replaced.get(function) or getattr(_module(function), function)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_state, "bypass", False)
        _state.bypass = True
        try:
            return own(*args, **kwargs)
        finally:
            _state.bypass = before

    return call


def _bind(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, whatever the version of fla calls them by position."""
    names = tuple(_signatures[function].parameters)
    return {**dict(zip(names, args)), **kwargs}


def _default(function: str, name: str) -> Any:
    parameter = _signatures[function].parameters.get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _complete(function: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The call with its defaults; an unknown argument that is not at fla's default is refused."""
    call = dict(defaults)
    for name, value in given.items():
        if name in defaults or name in _TENSORS or name == "transpose_state_layout":
            call[name] = value
        elif value is not _default(function, name) and value != _default(function, name):
            raise UnsupportedError(f"argument {name}={_checks.shown(value)} is not known")
    return call


def _chunk_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = _bind("chunk_kda", args, kwargs)
    return _complete("chunk_kda", given, _calls.CHUNK_DEFAULTS)


def _recurrent_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call of fla's fused_recurrent_kda_fwd, which decodes with and without a pool of states."""
    function = "fused_recurrent_kda_fwd"
    given = _bind(function, args, kwargs)
    in_place = given.pop("inplace_final_state", _default(function, "inplace_final_state"))
    indices = given.pop("ssm_state_indices", None)
    if given.get("out") is None:
        given.pop("out", None)
    call = _complete(function, given, _calls.RECURRENT_DEFAULTS)
    if indices is not None:
        cu = call["cu_seqlens"]
        sequences = call["q"].shape[0] if cu is None else len(cu) - 1
        tokens = call["q"].shape[0] * call["q"].shape[1]
        if len(indices.shape) != 1 or tokens != sequences or not in_place:
            raise UnsupportedError(
                "ssm_state_indices: only [N] with one token a sequence and inplace_final_state"
            )
        call["state_indices"] = indices.int()
    call["in_place"] = bool(in_place)
    return call


def _scan_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call of fla's chunk_gated_delta_rule_fwd_h, which scans for several operators."""
    call = _bind(SCAN, args, kwargs)
    if call.get("gk") is None or call.get("g") is not None:
        raise UnsupportedError("only a decay per key channel (gk)")
    if call["k"].shape[2] != call["u"].shape[2]:
        raise UnsupportedError("fewer heads of k than of u")
    if call.get("state_v_first"):
        raise UnsupportedError("state_v_first: checkpoints are K-first here")
    packed = call.get("cu_seqlens") is not None
    if packed and call.get("chunk_indices") is None:
        raise UnsupportedError("cu_seqlens without chunk_indices, which tell the number of chunks")
    return call


def _scan(call: dict[str, Any]) -> tuple[Any, Any, Any]:
    h, v_new, final_state = stages.state_scan(
        call["k"],
        call["w"],
        call["u"],
        call["gk"],
        call.get("initial_state"),
        cu_seqlens=call.get("cu_seqlens"),
        output_final_state=call.get("output_final_state", False),
        chunk_size=call.get("chunk_size", 64),
    )
    B = call["k"].shape[0]
    if call.get("cu_seqlens") is not None:
        h = h[: len(call["chunk_indices"])]
    h = h.reshape(B, h.shape[0] // B, *h.shape[1:])
    return h, v_new if call.get("save_new_value", True) else None, final_state


SCAN = "chunk_gated_delta_rule_fwd_h"
_CALLS = {
    "chunk_kda": _chunk_call,
    "fused_recurrent_kda_fwd": _recurrent_call,
    SCAN: _scan_call,
}
_NATIVE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "chunk_kda": _calls.chunk,
    "fused_recurrent_kda_fwd": _calls.recurrent,
    SCAN: _scan,
}


def _verify(
    function: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, str | None]:
    if getattr(_state, "probe", None) is not None:
        return True, None
    bypass = getattr(_state, "bypass", False) and function != SCAN
    if not _enabled or function not in _signatures or bypass:
        return False, "native_kda is not enabled"
    try:
        if _log.disabled():
            return False, "NATIVE_KDA_DISABLE is set"
        call = _CALLS[function](args, kwargs)
        if function == "chunk_kda" and not _calls.was_seen(call):
            support.plan(call)
            if _calls.needs_a_backward(call):
                support.plan(call, backward=True)
    except (UnsupportedError, ValueError, TypeError) as error:
        # fla takes an error here for a no. It is raised when the call runs.
        return (True, None) if _insists(function, error) else (False, str(error))
    return True, None


def _insists(function: str, error: Exception) -> bool:
    """Whether the call must fail here: KDA_IMPL is set and what it names cannot do it. The scan
    serves other operators too, of which KDA_IMPL says nothing."""
    if function == SCAN or not _log.chosen():
        return False
    return isinstance(error, UnsupportedError) or "KDA_IMPL" in str(error)


def _run(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(_state, "probe", None) is not None:
        _state.probe = True
        return None, None
    try:
        result = _NATIVE[function](_CALLS[function](args, kwargs))
    except UnsupportedError as error:
        if _insists(function, error):
            raise _log.insist(error) from None
        raise
    _hits[function] += 1
    return result


def _backend_class(base: type) -> type:
    class NativeKdaBackend(base):  # type: ignore[misc]
        backend_type = "native_kda"
        package_name = "native_kda"
        env_var = "FLA_NATIVE_KDA"
        default_enable = True
        priority = PRIORITY

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verify("chunk_kda", args, kwargs)

        def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
            return _run("chunk_kda", args, kwargs)

        def fused_recurrent_kda_fwd_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            return _verify("fused_recurrent_kda_fwd", args, kwargs)

        def fused_recurrent_kda_fwd(self, *args: Any, **kwargs: Any) -> Any:
            return _run("fused_recurrent_kda_fwd", args, kwargs)

        def chunk_gated_delta_rule_fwd_h_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            return _verify(SCAN, args, kwargs)

        def chunk_gated_delta_rule_fwd_h(self, *args: Any, **kwargs: Any) -> Any:
            return _run(SCAN, args, kwargs)

    return NativeKdaBackend


def _register() -> str:
    """Registers with the dispatch of this version of fla and says which one that is."""
    try:
        backends = importlib.import_module("fla.backends")  # 0.6 and later
    except ImportError:
        backends = importlib.import_module("fla.ops.backends")
        backend = _backend_class(backends.BaseBackend)
        importlib.import_module("fla.ops.kda.backends").kda_registry.register(backend())
        importlib.import_module("fla.ops.common.backends").common_registry.register(backend())
        return "fla.ops.backends"
    backend = _backend_class(backends.BaseBackend)
    try:
        backends.register(_module("chunk_kda").chunk_kda)(backend)
    except KeyError:
        pass  # chunk_kda is not dispatched: the probe finds out
    backends.register("kda")(backend)
    backends.register("common")(backend)
    return "fla.backends"


def _is_live(function: str) -> bool:
    """Whether a call of fla's function comes here, by a call that is only noted."""
    import torch

    x = torch.zeros(1, 1, 1, 1)
    call = dict(k=x, w=x, u=x) if function == SCAN else dict(q=x, k=x, v=x, g=x, beta=x[..., 0])
    _state.probe = False
    try:
        getattr(_module(function), function)(**call)
    except Exception:  # whatever fla itself meets on the CPU, which it does not know
        pass
    arrived = _state.probe
    _state.probe = None
    return arrived


def _replace(function: str) -> None:
    """Puts our function in place of fla's, in every module that has it by name."""
    own = getattr(_module(function), function)
    _replaced[function] = own

    @functools.wraps(own)
    def with_native(*args: Any, **kwargs: Any) -> Any:
        if _verify(function, args, kwargs)[0]:
            return _run(function, args, kwargs)
        return own(*args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(function) is own:
            setattr(module, function, with_native)


def enable(stages: bool = False) -> dict[str, str]:
    """Sends what this library takes of fla's KDA calls here.

    Args:
        stages: also the state scan of calls that stay with fla (context parallelism, say), where
            states are K-first.

    Returns:
        For each function of fla, how it is reached: "dispatch" through fla's registry, "replaced"
        where that is dead, or "switched off" by FLA_NATIVE_KDA=0 or NATIVE_KDA_DISABLE=1, of which
        the latter is read again at each call. ImportError if there is no fla.
    """
    global _enabled
    try:
        _calls.load_torch()
    except ImportError as missing:
        raise ImportError(f"fla.enable: torch cannot be imported ({missing})") from missing
    scan = (SCAN,) if _checks.flag("stages", stages) else ()
    functions = ("chunk_kda", "fused_recurrent_kda_fwd", *scan)
    for function in functions:
        _signatures[function] = inspect.signature(
            _replaced.get(function) or getattr(_module(function), function)
        )
    if not _enabled:
        _register()
        _enabled = True
    if os.environ.get("FLA_NATIVE_KDA") == "0":
        return dict.fromkeys(functions, "switched off")
    how = {}
    for function in functions:
        if function not in _replaced and not _is_live(function):
            _log.logger.warning(
                "fla's dispatch of %s is not live (FLA_DISABLE_BACKEND_DISPATCH, or a torch that "
                "drops the wrapper): the function is replaced",
                function,
            )
            _replace(function)
            if not _is_live(function):
                raise RuntimeError(f"{function}: neither dispatch nor replacement came here")
        how[function] = "replaced" if function in _replaced else "dispatch"
    return dict.fromkeys(functions, "switched off") if _log.disabled() else how


def disable() -> None:
    """Sends all calls back to fla."""
    global _enabled
    _enabled = False
    _signatures.clear()
