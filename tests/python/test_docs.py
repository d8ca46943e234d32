"""Each Python example in the documentation runs as it stands, in a process of its own."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples():
    for name in ("README.md", "docs/python.md", "docs/fla.md"):
        path = ROOT / name
        for i, code in enumerate(FENCE.findall(path.read_text()) if path.exists() else [], 1):
            yield pytest.param(code, id=f"{path.stem}-{i}")


@pytest.mark.parametrize("code", list(examples()))
def test_example(code, tmp_path):
    needed = [m for m in ("torch", "numpy") if f"import {m}" in code]
    needed += ["torch", "fla"] if "native_kda.fla." in code else []
    for module in needed:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                            text=True, timeout=120, cwd=tmp_path, env=os.environ, check=False)
    assert result.returncode == 0, result.stderr


def test_there_are_examples():
    if not (ROOT / "docs").exists():
        pytest.skip("the sources are not here")
    assert len(list(examples())) >= 6
