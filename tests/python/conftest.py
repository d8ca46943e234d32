"""Fixtures of the Python tests. They test the installed package, never the sources beside them."""

import contextlib
import os

import pytest

# Or JAX takes three quarters of a GPU that other processes use too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

with contextlib.suppress(ImportError):
    import torch  # first, so that its operators are there whichever test comes first

import native_kda


@pytest.fixture(autouse=True)
def _counters(monkeypatch):
    monkeypatch.delenv("KDA_IMPL", raising=False)
    monkeypatch.delenv("KDA_WORKSPACE_LIMIT", raising=False)
    monkeypatch.delenv("NATIVE_KDA_DISABLE", raising=False)
    native_kda.reset_hits()


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def fla():
    """flash-linear-attention with this library enabled, disabled again afterwards."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    native_kda.fla.enable()
    yield pytest.importorskip("fla.ops.kda", reason="this fla has no KDA")
    native_kda.fla.disable()
