"""The wheel and what importing it needs."""

import ast
import email
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import native_kda

PACKAGE = pathlib.Path(native_kda.__file__).parent
MODULES = ("__init__", "_arrays", "_autograd", "_calls", "_checks", "_derivatives", "_kda",
           "_lengths", "_library", "_log", "_operations", "_problem", "_torch", "doctor", "fla",
           "ops", "run", "stages", "support")


def python(*arguments, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120,
                          env=environment, check=False)


def test_content_of_the_wheel():
    """INSTALL-01."""
    path = os.environ.get("NATIVE_KDA_WHEEL")
    if not path:
        pytest.skip("NATIVE_KDA_WHEEL names no wheel; tools/test.sh python sets it")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = email.message_from_bytes(wheel.read(
            next(n for n in names if n.endswith(".dist-info/METADATA"))))
    licences = {n.rpartition("/")[2] for n in names if n.startswith("native_kda/licenses/")}
    code = [n for n in names if n.startswith("native_kda/") and "/licenses/" not in n]
    libraries = [n for n in code if ".so" in n]
    assert sorted(n for n in code if n not in libraries) == sorted(
        [f"native_kda/{m}.py" for m in MODULES] + ["native_kda/_native.pyi", "native_kda/py.typed"])
    (module,) = (n for n in libraries if "/_native." in n)
    # Beside the module only what distributions ship as shared libraries.
    assert all(re.match(r"native_kda/lib(fmt|hwy|gomp|omp)\.so\.\d+$", n)
               for n in libraries if n != module)
    rest = [n for n in names if n.startswith("native_kda-")]
    assert len(rest) + len(code) + len(licences) == len(names)
    assert all(re.match(r"native_kda-[^/]*\.dist-info/", n) for n in rest), rest
    # The metadata name each licence that lies beside them.
    named = {n.rpartition("/licenses/")[2] for n in rest if "/licenses/" in n}
    assert named == set(metadata.get_all("License-File")) == {"LICENSE"}
    # Whatever is inside brings its licence: what lies beside the module and what is linked in.
    bundled = {re.match(r".*/(lib\w+)\.so", n)[1] for n in libraries if n != module}
    assert licences >= {"nanobind.txt", "robin_map.txt", "libfmt.txt", "libhwy.txt"}
    assert licences >= {f"{name}.txt" for name in bundled}
    assert "GPL-3.txt" in licences or "libgomp" not in bundled
    expected = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    assert expected.replace("cp", "cpython-") in module and expected in pathlib.Path(path).name


def test_the_tests_use_the_installed_package():
    source = pathlib.Path(__file__).resolve().parents[2]
    if os.environ.get("NATIVE_KDA_WHEEL"):
        assert source / "python" not in PACKAGE.resolve().parents


def test_version_is_that_of_the_header():
    header = pathlib.Path(__file__).resolve().parents[2] / "include" / "kda" / "version.h"
    if not header.exists():
        pytest.skip("the sources are not here")
    numbers = re.findall(r"#define KDA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text())
    assert native_kda.__version__ == ".".join(numbers)
    if os.environ.get("NATIVE_KDA_WHEEL"):
        assert importlib.metadata.version("native-kda") == native_kda.__version__


def test_import_needs_neither_torch_nor_numpy():
    block = ("import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import native_kda; "
             "print(len(native_kda.support_matrix()) > 0)")
    result = python("-c", block)
    assert result.stdout == "True\n", result.stderr


def test_import_alone_loads_no_framework():
    result = python("-c", "import native_kda, sys; "
                    "print([m for m in ('torch', 'numpy', 'fla', 'jax') if m in sys.modules])")
    assert result.stdout == "[]\n", result.stderr


def test_no_symbol_leaks_out_of_the_module():
    """Another library in the process must not meet our C++ symbols."""
    (module,) = PACKAGE.glob("_native*.so")
    try:
        listing = subprocess.run(["nm", "-D", "--defined-only", str(module)], text=True, check=True,
                                 capture_output=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("nm is not installed")
    symbols = {line.split()[-1] for line in listing.splitlines()}
    foreign = {s for s in symbols if re.search(r"cuda|3kda|^kda_", s)}
    assert "PyInit__native" in symbols and not foreign, sorted(foreign)[:10]


def test_the_module_needs_only_what_every_system_has():
    """And what lies beside it. The CUDA runtime in particular is inside."""
    (module,) = PACKAGE.glob("_native*.so")
    try:
        listing = subprocess.run(["readelf", "-d", str(module)], text=True, check=True,
                                 capture_output=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("readelf is not installed")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
    beside = {path.name for path in PACKAGE.glob("lib*.so*")}
    system = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux.*)\.so\.\d+$")
    assert needed and not [n for n in needed if n not in beside and not system.match(n)]
    assert "[$ORIGIN]" in listing or not beside


def test_doctor():
    result = python("-m", "native_kda.doctor", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["native_kda"] == native_kda.__version__
    assert report["self-test"]["cpu"] == "passed" and report["devices"]["cpu"] == 1
    assert report["cuda"] == "usable" or report["cuda"]
    text = python("-m", "native_kda.doctor")
    assert "self-test:    cpu passed" in text.stdout
    assert python("-m", "native_kda.doctor", "--nonsense").returncode == 2


def test_log_variables(tmp_path):
    script = ("import numpy as np, native_kda; x = np.ones((1, 2, 1, 4), np.float32); "
              "[native_kda.chunk_kda(x, x, x, -x, x[..., 0]) for _ in range(2)]")
    quiet = python("-c", script)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    lines = python("-c", script, NATIVE_KDA_LOG="dispatch,exec").stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["chunk_fwd", "cpu_chunk_fwd", "cpu_chunk_fwd"]
    assert all(line.startswith("[native_kda] ") for line in lines)
    # A slip in the variable of a log stops nothing.
    wrong = python("-c", script, NATIVE_KDA_LOG="loud")
    assert wrong.returncode == 0 and wrong.stderr.count("\n") == 1
    assert "NATIVE_KDA_LOG: found ['loud'], expected dispatch, exec or both" in wrong.stderr
    partly = python("-c", script, NATIVE_KDA_LOG="exec,loud").stderr.splitlines()
    assert [line.split()[1] for line in partly] == ["environment", "cpu_chunk_fwd", "cpu_chunk_fwd"]


def test_disabled_without_fla_says_so():
    pytest.importorskip("torch", reason="torch is not installed")
    script = ("import sys; sys.modules['fla'] = None; import torch, native_kda\n"
              "x = torch.ones(1, 2, 1, 4)\n"
              "try: native_kda.chunk_kda(x, x, x, -x, x[..., 0])\n"
              "except native_kda.UnsupportedError as error: print(error)")
    result = python("-c", script, NATIVE_KDA_DISABLE="1")
    assert "NATIVE_KDA_DISABLE is set" in result.stdout and "cannot be imported" in result.stdout


def test_disabled_reaches_what_fla_does_not_have(monkeypatch):
    """Each function, and arrays, which it does not take: nothing runs here."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    x = np.ones((1, 2, 1, 4), np.float32)
    call = (x, x, x, -x, x[..., 0])
    stages, A = native_kda.stages, np.ones((1, 2, 1, 64), np.float32)
    states = np.ones((1, 1, 4, 4), np.float32)
    calls = {
        "chunk_kda": lambda: native_kda.chunk_kda(*call),
        "fused_recurrent_kda": lambda: native_kda.fused_recurrent_kda(*call),
        "chunk_kda_backward": lambda: native_kda.chunk_kda_backward(x, *call),
        "stages.gate_cumsum": lambda: stages.gate_cumsum(-x),
        "stages.intra": lambda: stages.intra(x, x, x[..., 0], -x),
        "stages.wu": lambda: stages.wu(x, x, x[..., 0], -x, A),
        "stages.state_scan": lambda: stages.state_scan(x, x, x, -x),
        "stages.output": lambda: stages.output(x, -x, A, states, x),
        "stages.reverse_scan": lambda: stages.reverse_scan(x, x, x, -x, A, x),
        "stages.wy_bwd": lambda: stages.wy_bwd(
            x, x, x, x[..., 0], -x, A, x, states, states, x, x),
        "stages.intra_bwd": lambda: stages.intra_bwd(x, x, x[..., 0], -x, A, A),
    }
    for call_of in calls.values():
        call_of()
    assert {f"stages.{row['operation']}" for row in native_kda.support_matrix()} <= set(calls) | {
        "stages.chunk_fwd", "stages.chunk_bwd", "stages.recurrent"}
    native_kda.reset_hits()
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    for name, call_of in calls.items():
        text = "takes tensors of torch alone" if "." not in name else "has no such function"
        if name == "chunk_kda_backward":
            text = "has no such function"
        with pytest.raises(native_kda.UnsupportedError,
                           match=f"^{name}: NATIVE_KDA_DISABLE is set.* {text}"):
            call_of()
    assert native_kda.hits() == {}
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "off")
    for call_of in calls.values():
        with pytest.raises(ValueError, match="NATIVE_KDA_DISABLE: found 'off'"):
            call_of()


WRONG = {"KDA_IMPL": ("nonsense", "cpu_recurrent"), "KDA_WORKSPACE_LIMIT": ("1", "x"),
         "NATIVE_KDA_DISABLE": ("2",)}


@pytest.mark.parametrize("name, value", [(n, v) for n, values in WRONG.items() for v in values])
def test_the_doctor_reports_a_wrong_environment(name, value):
    """It is a line of the report, not the end of it."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    result = python("-m", "native_kda.doctor", "--json", **{name: value})
    assert result.returncode == 1 and result.stderr == "", result.stderr
    report = json.loads(result.stdout)
    assert report["environment"][name] == value
    word = "workspace_limit" if value == "1" else name
    assert report["self-test"]["cpu"].startswith("FAILED: ")
    assert word in report["self-test"]["cpu"]


def test_the_doctor_where_every_call_goes_to_fla():
    result = python("-m", "native_kda.doctor", NATIVE_KDA_DISABLE="1")
    assert result.returncode == 0, result.stderr
    assert "self-test:    cpu skipped: NATIVE_KDA_DISABLE is set" in result.stdout


def test_the_doctor_reports_a_broken_package(tmp_path):
    """torch without one of its libraries, say."""
    (tmp_path / "torch.py").write_text("raise OSError('no libcudart')")
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (tmp_path / "torch-1.0.dist-info" / "RECORD").write_text("torch.py,,\n")
    result = python("-m", "native_kda.doctor", "--json", PYTHONPATH=os.pathsep.join(
        [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.stderr == "", result.stderr
    report = json.loads(result.stdout)
    assert "cannot be imported (OSError: no libcudart)" in report["packages"]["torch"]
    assert report["self-test"]["cpu"] in ("passed", "skipped: neither torch nor numpy")


@pytest.mark.parametrize("value, sent", [("", False), ("0", False), (" 0", False), ("1", True),
                                         (" 1 ", True), ("off", None), ("abc", None)])
def test_the_words_of_the_kill_switch(monkeypatch, value, sent):
    """What is neither yes nor no is an error, as in KDA_WORKSPACE_LIMIT."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    x = np.ones((1, 2, 1, 4), np.float32)
    monkeypatch.setenv("NATIVE_KDA_DISABLE", value)
    monkeypatch.setattr(native_kda.ops, "_to_fla", lambda function, reason, *how: reason)
    if sent is None:
        with pytest.raises(ValueError, match=f"NATIVE_KDA_DISABLE: found '{value}', expected 0 or"):
            native_kda.chunk_kda(x, x, x, -x, x[..., 0])
        supported, reason, _ = native_kda.is_supported(x, x, x, -x, x[..., 0])
        assert not supported and "NATIVE_KDA_DISABLE" in reason
    else:
        found = native_kda.chunk_kda(x, x, x, -x, x[..., 0])
        assert (found == "NATIVE_KDA_DISABLE is set") if sent else len(found) == 2


@pytest.mark.parametrize("program", ["doctor", "run"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_asked_for_and_comes(program, option):
    result = python("-m", f"native_kda.{program}", option)
    assert result.returncode == 0 and result.stderr == ""
    assert f"usage: python -m native_kda.{program}" in result.stdout


@pytest.mark.parametrize("there", ["torch", "numpy", "neither"])
def test_the_self_test_takes_what_is_there(there):
    if there != "neither":
        pytest.importorskip(there, reason=f"{there} is not installed")
    block = "".join(f"sys.modules[{m!r}] = None; " for m in ("torch", "numpy") if m != there)
    result = python("-c", f"import sys; {block}from native_kda import doctor; "
                    "print(doctor._self_test('cpu'))")
    wanted = "skipped: neither torch nor numpy" if there == "neither" else "passed"
    assert result.stdout == f"{wanted}\n", result.stderr


def test_run_needs_a_script():
    result = python("-m", "native_kda.run")
    assert result.returncode == 2 and "usage: python -m native_kda.run" in result.stderr


@pytest.mark.parametrize("what", [["nofile.py"], ["-m", "nomodule"], ["-m", "email.nomodule"],
                                  ["-m", "nomodule.inside"], ["-m", "json.tool.inside"]])
def test_run_of_what_is_not_there(what, tmp_path):
    """Modules are looked for with flash-linear-attention at hand: a stand-in is enough."""
    code = ("import sys, native_kda.run; native_kda.fla.enable = dict; "
            "sys.exit(native_kda.run.main(sys.argv[1:]))")
    result = python("-c", code, *what)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert re.match(f"native_kda.run: found no (file|module) '{what[-1]}', expected", result.stderr)
    broken = tmp_path / "broken.py"
    broken.write_text("import nomodule")
    assert "ModuleNotFoundError: No module named 'nomodule'" in python(
        "-c", code, str(broken)).stderr


def test_what_needs_torch_says_so_where_there_is_none():
    code = ("import sys; sys.modules['torch'] = None; import native_kda\n"
            "for call in (lambda: native_kda.warmup(1, 4, 1, 8), native_kda.fla.enable):\n"
            "    try: call()\n"
            "    except ImportError as error: print(error)")
    warmup, enable = python("-c", code).stdout.splitlines()
    assert warmup.startswith("warmup: torch cannot be imported (")
    assert enable.startswith("fla.enable: torch cannot be imported (")


def test_run_says_what_is_missing():
    """In a line: neither is an error of the script."""
    block = "import sys; sys.modules['fla'] = None; sys.modules.setdefault('torch', None); "
    start = "from native_kda import run; sys.exit(run.main(['-m', 'this']))"
    result = python("-c", block + start)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.match(r"native_kda.run: flash-linear-attention cannot be imported: .*\n$",
                    result.stderr)


def test_everything_public_is_annotated():
    """py.typed promises it: each public function has types for its arguments and its result."""
    for name in ("ops", "stages", "support", "fla", "_problem"):
        for node in ast.parse((PACKAGE / f"{name}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                bare = [a.arg for a in arguments if a.annotation is None]
                assert node.returns is not None and not bare, node.name


def test_the_stub_names_what_the_module_has():
    from native_kda import _native

    def public(names):
        return {name for name in names if not name.startswith("_")}

    found = {"": public(dir(_native))}
    declared = {"": set()}
    for node in ast.parse((PACKAGE / "_native.pyi").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            declared[""].update(public([node.name]))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            declared[node.name] = public(
                n.name for n in node.body if isinstance(n, ast.FunctionDef))
            found[node.name] = public(vars(getattr(_native, node.name)))
    assert declared == found
