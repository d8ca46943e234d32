"""What this installation is, what it finds on this machine, and whether it computes rightly.

usage: python -m native_kda.doctor [--json]

Exit status 1 if a self-test fails. What is broken, a package or a variable of the environment, is
said in the report, whatever it raises.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import native_kda
from native_kda import _log, _native, _problem

_VARIABLES = (
    "KDA_IMPL",
    "KDA_WORKSPACE_LIMIT",
    "KDA_LOG",
    "NATIVE_KDA_DISABLE",
    "NATIVE_KDA_LOG",
    "FLA_NATIVE_KDA",
)
_BROKEN: dict[str, str] = {}  # modules that are there and fail, and how
_MODULES = ("torch", "fla", "transformers", "numpy", "cupy", "jax")


def _said(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _versions() -> dict[str, str]:
    """Versions by module: names of distributions may depend on the CUDA version, as CuPy's do."""
    try:
        distributions = importlib.metadata.packages_distributions()
    except Exception as error:  # of one broken distribution among all
        return {"unknown": _said(error)}
    return {module: _version(module, distributions.get(module, [])) for module in _MODULES}


def _version(module: str, distributions: list[str]) -> str:
    if not distributions:
        return "not installed"
    try:
        version = importlib.metadata.version(distributions[0])
    except Exception as error:
        return f"unknown ({_said(error)})"
    broken = _BROKEN.get(module)
    return f"{version}, cannot be imported ({broken})" if broken else version


def _module(name: str) -> Any:
    """The module, None if it is not there or fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != name:
            _BROKEN[name] = _said(error)
        return None


def _why_no_cuda() -> str:
    """The library's own words on why no CUDA device can be used."""
    sizes = _problem.Sizes(1, 1, 1, 1, 128, 128)  # and bf16: what every row takes
    names = ("q", "k", "v", "g", "beta", "o")
    layouts = tuple((_problem.ID[name], _problem.BF16, (), ()) for name in names)
    try:
        _problem.plan_of(0, sizes, _problem.Options(), layouts, (_problem.CUDA, 0))
    except Exception as error:
        return str(error)
    return ""


def _halves(device: str) -> Any:
    """Of torch, or NumPy where it will do; None if there is neither."""
    torch, numpy = _module("torch"), _module("numpy")
    if torch is not None:
        return torch.full((1, 1, 1, 4), 0.5, device=device)
    if numpy is not None and device == "cpu":
        return numpy.full((1, 1, 1, 4), 0.5, numpy.float32)
    return None


def _self_test(device: str) -> str:
    try:
        if _log.disabled():
            return "skipped: NATIVE_KDA_DISABLE is set, no call runs here"
        return _one_token(device)
    except Exception as error:
        return f"FAILED: {_said(error)}"


def _one_token(device: str) -> str:
    """By hand: with a zero state o = scale (q . k) beta v."""
    x = _halves(device)
    if x is None:
        return "skipped: neither torch nor numpy" if device == "cpu" else "skipped: no torch"
    o, _ = native_kda.chunk_kda(x, x, x, -x, x[..., 0], backend=device)
    found = o.reshape(-1).tolist()
    expected = 4**-0.5 * (4 * 0.25) * 0.5 * 0.5
    right = all(abs(value - expected) < 1e-6 for value in found)
    return "passed" if right else f"FAILED: o = {found}, expected {expected}"


def report() -> dict[str, Any]:
    """Everything that the program prints."""
    _module("torch")  # shares its CUDA context
    devices = {kind: _native.device_count(i) for i, kind in enumerate(_problem.DEVICE_TYPES)}
    families: dict[str, list[str]] = {}
    for row in native_kda.support_matrix():
        families.setdefault(row["device"], [])
        if row["family"] not in families[row["device"]]:
            families[row["device"]].append(row["family"])
    tests = {kind: _self_test(kind) for kind in _problem.DEVICE_TYPES if devices[kind]}
    return {
        "native_kda": native_kda.__version__,
        "location": os.path.dirname(native_kda.__file__),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": _versions(),
        "built in": families,
        "devices": devices,
        "cuda": "usable" if devices["cuda"] else _why_no_cuda(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "self-test": tests,
    }


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(entry)}" for name, entry in value.items()) or "none"
    return f"({', '.join(value)})" if isinstance(value, list) else str(value)


def main(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    unknown = [word for word in arguments if word != "--json"]
    if unknown:
        print(__doc__, file=sys.stderr)
        return 2
    found = report()
    if "--json" in arguments:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name + ':':13} {_flat(value)}")
    return int(any("FAILED" in result for result in found["self-test"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
