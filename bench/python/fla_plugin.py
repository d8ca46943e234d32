"""pytest plugin: fla's own KDA tests with native_kda enabled, the calls that reached it counted.

usage: PYTHONPATH=bench/python NATIVE_KDA_REPORT=out.json pytest -p fla_plugin tests/ops/test_kda.py

in a checkout of flash-linear-attention; with pytest-xdist too. A test that calls chunk_kda or
fused_recurrent_kda and had no hit fails, so that the suite cannot pass on fla's own kernels.
"""

import json
import os
import shlex
import sys
import time
from collections import Counter

import pytest

import native_kda

# These call neither function, refuse a malformed call, or belong to other packages and hardware.
NOT_MEANT = ("test_naive_chunk", "test_chunk_invalid_chunk_size", "test_gate", "test_flash_kda",
             "test_triton_ascend")

_results = {}
_how = {}


def pytest_configure(config):
    _how.update(native_kda.fla.enable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = Counter(native_kda.fla.hits()), Counter(native_kda.hits())
    start = time.perf_counter()
    row = {"meant": not item.originalname.startswith(NOT_MEANT)}
    try:
        result = yield
    finally:
        row["hits"] = (Counter(native_kda.fla.hits()) - before[0]).total()
        row["implementations"] = dict(Counter(native_kda.hits()) - before[1])
        row["seconds"] = round(time.perf_counter() - start, 2)
        item.user_properties.append(("native_kda", row))  # reaches pytest-xdist's main process
    if row["meant"] and row["hits"] == 0:
        raise AssertionError("no call reached native_kda")
    return result


def pytest_runtest_logreport(report):
    row = dict(report.user_properties).get("native_kda")
    if report.when != "call" or row is None:
        return
    row["outcome"] = report.outcome
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        row["error"] = str(crash.message if crash else report.longrepr)[:300]
    _results[report.nodeid.split("::", 1)[1]] = row


def _implementations():
    return dict(sum((Counter(row["implementations"]) for row in _results.values()), Counter()))


def _summary(config):
    import torch

    import fla

    meant = [row for row in _results.values() if row["meant"]]
    return {
        "command": "pytest " + shlex.join(config.invocation_params.args),
        "machine": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "native_kda": native_kda.__version__,
        "fla": fla.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "reached by": _how,
        "outcomes": Counter(row["outcome"] for row in _results.values()),
        "meant": len(meant),
        "meant and passed with hits": sum(
            row["hits"] > 0 and row["outcome"] == "passed" for row in meant),
        "hits": sum(row["hits"] for row in meant),
        "implementations": _implementations(),
        "tests": dict(sorted(_results.items())),
    }


def pytest_sessionfinish(session):
    path = os.environ.get("NATIVE_KDA_REPORT")
    if path and not hasattr(session.config, "workerinput"):
        with open(path, "w") as file:
            json.dump(_summary(session.config), file, indent=1)
            file.write("\n")


def pytest_terminal_summary(terminalreporter):
    meant = [row for row in _results.values() if row["meant"]]
    hit = sum(row["hits"] > 0 for row in meant)
    terminalreporter.write_line(
        f"native_kda: {hit} of {len(meant)} tests meant for it had hits; {_implementations()}")
