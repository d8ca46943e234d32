"""Joining flash-linear-attention (fla) where neither it nor torch is installed: NumPy arrays, and
stand-ins for fla's dispatch, of which there are two forms. With the real ones: test_fla.py."""

import functools
import importlib.util
import logging
import sys
import types
from collections import Counter

import numpy as np
import pytest
import reference

import native_kda

if importlib.util.find_spec("torch"):
    pytest.skip("torch is installed: test_fla.py tests the real thing", allow_module_level=True)

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def chunk_kda(q, k, v, g, beta, scale=None, lower_bound=None, novelty=None, **kwargs):
    return "fla", {"scale": scale, "novelty": novelty, **kwargs}


def fused_recurrent_kda_fwd(q, k, v, g, beta, inplace_final_state=False, **kwargs):
    return "fla", kwargs


class Registry:
    def __init__(self):
        self.backends = []

    def register(self, backend):
        self.backends.append(backend)

    def dispatch(self, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for backend in self.backends:
                if getattr(backend, function.__name__ + "_verifier")(*args, **kwargs)[0]:
                    return getattr(backend, function.__name__)(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper


@pytest.fixture
def stand_in(monkeypatch, request):
    """fla.ops.kda.chunk of a fla of the form that the test names: 0.6, earlier, or dead."""
    registry = Registry()
    dispatch = (lambda function: function) if request.param == "dead" else registry.dispatch
    chunk = types.SimpleNamespace(chunk_kda=dispatch(chunk_kda))
    recurrent = types.SimpleNamespace(fused_recurrent_kda_fwd=dispatch(fused_recurrent_kda_fwd))
    base = types.SimpleNamespace(BaseBackend=object)
    modules = {"torch": types.SimpleNamespace(zeros=lambda *shape: np.zeros(shape, np.float32)),
               "fla.ops.kda.chunk": chunk, "fla.ops.kda.fused_recurrent": recurrent}
    if request.param == "0.6":
        base.register = lambda where: lambda backend: (
            registry.register(backend()) if where == "kda" else None)
        modules["fla.backends"] = base
    else:
        modules |= {"fla.backends": None, "fla.ops.backends": base,
                    "fla.ops.kda.backends": types.SimpleNamespace(kda_registry=registry),
                    "fla.ops.common.backends": types.SimpleNamespace(common_registry=Registry())}
    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.common"):
        modules[name] = types.ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(native_kda._calls, "load_torch", lambda: None)
    monkeypatch.setattr(native_kda.fla, "takes", lambda q: True)
    for name, value in (("_enabled", False), ("_signatures", {}), ("_replaced", {}),
                        ("_hits", Counter())):
        monkeypatch.setattr(native_kda.fla, name, value)
    return chunk


def inputs():
    return reference.numpy_inputs(gate="softplus", T=20)


@pytest.mark.parametrize("stand_in", ["0.6", "earlier", "dead"], indirect=True)
def test_calls_arrive_and_what_is_not_known_goes_on(stand_in, request):
    how = "replaced" if "dead" in request.node.name else "dispatch"
    assert native_kda.fla.enable() == {"chunk_kda": how, "fused_recurrent_kda_fwd": how}
    assert native_kda.fla.hits() == {}, "the proof is not counted"
    x = inputs()
    o, _ = stand_in.chunk_kda(**x, **FLAGS)
    assert np.array_equal(o, native_kda.chunk_kda(**x, **FLAGS)[0])
    assert native_kda.fla.hits() == {"chunk_kda": 1}
    assert stand_in.chunk_kda(**x, **FLAGS, novelty=3)[0] == "fla"
    assert stand_in.chunk_kda(**x, **FLAGS, novelty=None)[0] is not None
    assert stand_in.chunk_kda(**x, **FLAGS, cp_context=object())[0] == "fla"
    assert native_kda.fla.hits() == {"chunk_kda": 2}
    assert native_kda.chunk_kda(**x, **FLAGS, backend="fla")[0] == "fla", "and does not come back"
    native_kda.fla.disable()
    assert stand_in.chunk_kda(**x, **FLAGS)[0] == "fla"


@pytest.mark.parametrize("stand_in", ["0.6"], indirect=True)
def test_an_explicit_choice_stays(stand_in, monkeypatch):
    native_kda.fla.enable()
    monkeypatch.setenv("KDA_IMPL", "cpu_chunk_bwd")
    with pytest.raises(native_kda.UnsupportedError, match="KDA_IMPL"):
        stand_in.chunk_kda(**inputs(), **FLAGS)


@pytest.mark.parametrize("stand_in", ["0.6"], indirect=True)
def test_the_way_to_fla(stand_in, monkeypatch, caplog):
    """Only what is not at its default goes along; the reason is logged once."""
    x = inputs()
    monkeypatch.setattr(native_kda._log, "_said", set())
    with caplog.at_level(logging.WARNING, logger="native_kda"):
        for _ in range(2):
            where, given = native_kda.chunk_kda(**x, scale=0.5, safe_gate=False, backend="fla")
    assert where == "fla" and given["scale"] == 0.5
    assert set(given) == {"scale", "novelty", "initial_state", "A_log", "dt_bias"}
    assert [record.getMessage() for record in caplog.records] == [
        "chunk_kda goes to flash-linear-attention: backend='fla'"]
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    assert native_kda.chunk_kda(**x)[0] == "fla"
    monkeypatch.delenv("NATIVE_KDA_DISABLE")
    with pytest.raises(native_kda.UnsupportedError, match="context parallelism"):
        native_kda.chunk_kda(**x, cp_context=object())
