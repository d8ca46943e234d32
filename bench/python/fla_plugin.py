"""pytest plugin: fla's own KDA tests with native_kda enabled, the calls that reached it counted.

usage: PYTHONPATH=bench/python NATIVE_KDA_REPORT=out.json pytest -p fla_plugin tests/ops/test_kda.py

in a checkout of flash-linear-attention. A test that calls chunk_kda or fused_recurrent_kda and had
no hit fails, so that the suite cannot pass on fla's own kernels.
"""

import json
import os
import time

import pytest

import native_kda

# These call neither function, refuse a malformed call, or belong to other packages and hardware.
NOT_MEANT = ("test_naive_chunk", "test_chunk_invalid_chunk_size", "test_gate", "test_flash_kda",
             "test_triton_ascend")

_results = {}
_how = {}


def _name(item):
    return item.nodeid.split("::", 1)[1]


def pytest_configure(config):
    _how.update(native_kda.fla.enable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = sum(native_kda.fla.hits().values())
    start = time.perf_counter()
    meant = not item.originalname.startswith(NOT_MEANT)
    row = _results.setdefault(_name(item), {"hits": 0, "meant": meant})
    try:
        result = yield
    finally:
        row["hits"] = sum(native_kda.fla.hits().values()) - before
        row["seconds"] = round(time.perf_counter() - start, 2)
    if meant and row["hits"] == 0:
        raise AssertionError("no call reached native_kda")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and _name(item) in _results:
        _results[_name(item)]["outcome"] = report.outcome
        if report.failed:
            _results[_name(item)]["error"] = str(call.excinfo.value)[:300]
    return report


def pytest_sessionfinish(session):
    path = os.environ.get("NATIVE_KDA_REPORT")
    if not path:
        return
    import torch

    meant = [row for row in _results.values() if row["meant"]]
    summary = {
        "machine": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "native_kda": native_kda.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "reached by": _how,
        "meant": len(meant),
        "meant and passed with hits": sum(
            row["hits"] > 0 and row.get("outcome") == "passed" for row in meant),
        "implementations": native_kda.hits(),
        "tests": _results,
    }
    with open(path, "w") as file:
        json.dump(summary, file, indent=1)
        file.write("\n")


def pytest_terminal_summary(terminalreporter):
    meant = [row for row in _results.values() if row["meant"]]
    hit = sum(row["hits"] > 0 for row in meant)
    terminalreporter.write_line(
        f"native_kda: {hit} of {len(meant)} tests meant for it had hits; {native_kda.hits()}")
