"""flash-linear-attention on the CPU: its calls reach this library, and both refuse the same."""

import inspect
import os
import pathlib
import subprocess
import sys

import pytest
import reference
from reference import ratio

import native_kda

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fla", reason="flash-linear-attention is not installed")

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def inputs(T=40, grad=False, **sizes):
    drawn = reference.numpy_inputs(gate="softplus", T=T, **sizes)
    return {n: torch.from_numpy(x).requires_grad_(grad) for n, x in drawn.items()}


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_signatures_are_those_of_fla(fla, name):
    theirs = inspect.signature(native_kda.fla.original(name)).parameters
    ours = inspect.signature(getattr(native_kda, name)).parameters
    assert list(ours)[: len(theirs) - 1] == list(theirs)[:-1], "names and order, but for **kwargs"
    for parameter, own in zip(list(theirs.values())[:-1], ours.values()):
        assert own.default == parameter.default and own.kind == parameter.kind, parameter.name
    later = ("use_graph", "max_num_seqs")  # fla has them from 0.6 on
    added = [p for n, p in ours.items() if n not in theirs and n not in later]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in added)


@pytest.mark.parametrize("l2norm", [False, True])
def test_naive_references_of_fla(l2norm):
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

    x = inputs(64)
    x = {n: x[n] for n in ("q", "k", "v", "beta", "initial_state")}
    x["g"] = -torch.rand(2, 64, 4, 16, generator=torch.Generator().manual_seed(0))
    unit = {n: torch.nn.functional.normalize(x[n], dim=-1) for n in ("q", "k")}
    given = x if l2norm else {**x, **unit}  # keys that are not normalised need not be stable
    o, s = native_kda.chunk_kda(**given, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
    x.update(unit)
    for naive in (naive_recurrent_kda, naive_chunk_kda):
        want_o, want_s = naive(**x, output_final_state=True)
        assert ratio(want_o, o) < 1e-4 and ratio(want_s, s) < 1e-4


def test_calls_of_fla_run_here(fla):
    x = inputs(grad=True)
    before = native_kda.fla.hits()
    o, s = fla.chunk_kda(**x, **FLAGS, output_final_state=True)
    own = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert torch.equal(o, own[0]) and torch.equal(s, own[1])
    o.sum().backward()
    assert all(t.grad is not None for t in x.values())
    with torch.no_grad():
        o, _ = fla.fused_recurrent_kda(**x, **FLAGS)
    assert torch.equal(o, native_kda.fused_recurrent_kda(**x, **FLAGS)[0])
    after = native_kda.fla.hits()
    assert after["chunk_kda"] == before.get("chunk_kda", 0) + 1
    assert after["fused_recurrent_kda_fwd"] == before.get("fused_recurrent_kda_fwd", 0) + 1


def patterns():
    """What unmodified programs send (docs/fla.md): positional arguments, keywords."""
    raw = {n: t.to(torch.bfloat16) if n in ("q", "k", "v", "g", "beta") else t
           for n, t in inputs(33, B=1, H=2, HV=2, K=8, V=8).items()}
    qkv = tuple(raw.pop(n) for n in ("q", "k", "v"))
    g, beta, state = raw.pop("g"), raw.pop("beta"), raw.pop("initial_state")
    decay = -torch.nn.functional.softplus(g.float())
    cu = torch.tensor([0, 10, 33], dtype=torch.int32)
    return {
        "layer of fla": ((), dict(
            zip("qkv", qkv), g=g, beta=beta, **raw, **FLAGS, initial_state=None, scale=None,
            output_final_state=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
            state_v_first=True, cu_seqlens=None)),
        "KimiLinear": (qkv, dict(
            g=decay, beta=beta.sigmoid(), initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True)),
        "KimiLinear, packed": (qkv, dict(
            g=decay, beta=beta.sigmoid(), initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=cu.long())),
        "glm5_next": (qkv, dict(
            g=-5 * torch.sigmoid(g.float()), beta=beta.sigmoid(), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True)),
        "servers": ((), dict(
            zip("qkv", qkv), g=g, beta=beta, **raw, **FLAGS, initial_state=state.repeat(2, 1, 1, 1),
            output_final_state=True, safe_gate=True, lower_bound=-5.0, state_v_first=True,
            cu_seqlens=cu)),
    }


@pytest.mark.parametrize("program", list(patterns()))
def test_calls_of_unmodified_programs(fla, program):
    args, kwargs = patterns()[program]
    before = native_kda.fla.hits().get("chunk_kda", 0)
    o, s = fla.chunk_kda(*args, **kwargs)
    assert native_kda.fla.hits()["chunk_kda"] == before + 1
    assert native_kda.hits() == {"cpu_chunk_fwd": 1}
    assert o.dtype == torch.bfloat16 and o.isfinite().all()
    assert (s is None) != kwargs["output_final_state"]


def test_decode_pattern_of_vllm(fla):
    """fused_recurrent_kda_fwd with a pool of states, indices and packed tokens of one each."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    x = {n: t.flatten(0, 1)[None] if t.dim() > 2 and n != "initial_state" else t
         for n, t in inputs(1, B=3).items()}
    pool = torch.randn(7, 4, 16, 8)
    before = pool.clone()
    indices = torch.tensor([5, 0, 2])
    x["initial_state"] = pool
    o, same = fused_recurrent_kda_fwd(**x, **FLAGS, cu_seqlens=torch.arange(4, dtype=torch.int32),
                                      ssm_state_indices=indices, inplace_final_state=True)
    assert same is pool and native_kda.hits()["cpu_recurrent"] == 1
    assert torch.equal(pool[[1, 3, 4, 6]], before[[1, 3, 4, 6]])
    for i, slot in enumerate(indices.tolist()):
        one = {n: t[:, i : i + 1] if t.dim() > 2 else t for n, t in x.items()}
        one["initial_state"] = before[slot][None]
        alone, state = native_kda.fused_recurrent_kda(**one, **FLAGS, output_final_state=True)
        assert torch.equal(alone[0, 0], o[0, i]) and torch.equal(state[0], pool[slot])


def test_the_way_back_to_fla_does_not_come_here(fla):
    x = inputs(8)
    before = native_kda.fla.hits()
    for name in ("chunk_kda", "fused_recurrent_kda"):
        with pytest.raises(Exception):  # there is no Triton on the CPU
            native_kda.fla.original(name)(**x, **FLAGS)
    assert native_kda.fla.hits() == before
    assert fla.chunk_kda(**x, **FLAGS)[0] is not None


def test_the_state_scan_of_calls_that_stay_with_fla(fla):
    from fla.ops.common import chunk_delta_h

    kg, w = (0.1 * torch.randn(2, 130, 3, 16) for _ in range(2))
    u, gamma = torch.randn(2, 130, 3, 8), -torch.rand(2, 130, 3, 16)
    h0 = torch.randn(2, 3, 16, 8)
    scan = dict(k=kg, w=w, u=u, gk=gamma, initial_state=h0, output_final_state=True)
    verify = native_kda.fla._verify
    assert not verify(native_kda.fla.SCAN, (), scan)[0], "off unless asked for"
    native_kda.fla.enable(stages=True)
    h, v_new, s = chunk_delta_h.chunk_gated_delta_rule_fwd_h(**scan)
    want = native_kda.stages.state_scan(kg, w, u, gamma, h0)
    assert h.shape == (2, 3, 3, 16, 8) and torch.equal(h.flatten(0, 1), want[0])
    assert torch.equal(v_new, want[1]) and torch.equal(s, want[2])
    assert native_kda.fla.hits()[native_kda.fla.SCAN] > 0
    cu = torch.tensor([0, 65, 130])
    one = {n: t[:1] if torch.is_tensor(t) and n != "initial_state" else t for n, t in scan.items()}
    indices = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    h, _, s = chunk_delta_h.chunk_gated_delta_rule_fwd_h(
        **one, cu_seqlens=cu, chunk_indices=indices, save_new_value=False)
    assert h.shape == (1, 4, 3, 16, 8) and s.shape == (2, 3, 16, 8)
    for change in (dict(g=gamma[..., 0]), dict(gk=None), dict(state_v_first=True),
                   dict(u=torch.randn(2, 130, 6, 8)), dict(cu_seqlens=cu)):
        assert not verify(native_kda.fla.SCAN, (), {**scan, **change})[0], change.keys()


def refusal(function, arguments):
    try:
        function(**arguments)
    except Exception as error:  # the class is what is compared
        return type(error)
    return None


def test_malformed_calls_raise_what_fla_raises(fla):
    """Every check that fla makes before its first kernel."""
    x = inputs(8)
    one = {n: t[:1] if t.dim() > 2 else t for n, t in x.items()}
    cases = [
        dict(chunk_size=16),
        dict(cu_seqlens=torch.tensor([0, 8])),
        dict(A_log=None),
        dict(safe_gate=True),
        dict(safe_gate=True, lower_bound=-6.0),
        dict(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True),
        dict(k=x["k"][:, :4]),
        dict(g=x["g"][..., 0]),
        dict(g=x["g"][:, :, :2]),
        dict(beta=x["beta"][..., None]),
        dict(v=x["v"][:, :, :3]),
        dict(initial_state=x["initial_state"].bfloat16()),
        dict(q=torch.zeros(2, 8, 2, 300), k=torch.zeros(2, 8, 2, 300)),
        dict(state_v_first=True, transpose_state_layout=True),
        dict(q=x["q"][0]),
        {**one, "cu_seqlens": torch.tensor([0, 4, 8])},
    ]
    original = native_kda.fla.original("chunk_kda")
    for change in cases:
        call = {**x, **FLAGS, **change}
        theirs = refusal(original, call)
        ours = refusal(native_kda.chunk_kda, call)
        assert theirs is not None and issubclass(ours, theirs), (change.keys(), theirs, ours)


def test_what_is_not_implemented_goes_to_fla(fla, caplog, monkeypatch):
    calls = []
    monkeypatch.setattr(native_kda.fla, "original",
                        lambda name: lambda **call: calls.append((name, call)) or "fla")
    x = inputs(8)
    with caplog.at_level("WARNING", logger="native_kda"):
        for _ in range(2):
            assert native_kda.chunk_kda(**x, **FLAGS, novelty=7) == "fla"
    assert [name for name, _ in calls] == ["chunk_kda"] * 2 and calls[0][1]["novelty"] == 7
    assert "scale" not in calls[0][1], "defaults are left to fla"
    assert [r.getMessage() for r in caplog.records] == [
        "chunk_kda goes to flash-linear-attention: argument novelty=7 is not known"]
    with pytest.raises(native_kda.UnsupportedError):
        native_kda.chunk_kda(**x, **FLAGS, novelty=7, backend="cpu")
    assert native_kda.chunk_kda(**x, **FLAGS, backend="fla") == "fla"
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    assert native_kda.chunk_kda(**x, **FLAGS) == "fla"
    assert native_kda.fused_recurrent_kda(**x, **FLAGS) == "fla"


@pytest.mark.parametrize("choice", ["cpu_chunk_bwd", "sm90", " sm90_chunk_fwd,"])
def test_an_explicit_choice_does_not_go_to_fla(fla, monkeypatch, choice):
    """KDA_IMPL names what cannot do the call: neither our function nor fla's falls back."""
    rows = native_kda.support_matrix()
    built = {row[key] for row in rows for key in ("implementation", "family")}
    if choice.strip(" ,") not in built:
        pytest.skip(f"{choice} is not built in")
    gone = []
    monkeypatch.setattr(native_kda.fla, "original", lambda name: lambda **_: gone.append(name))
    x = inputs(8)
    one = {n: t[:, :1] if n != "initial_state" and t.dim() > 2 else t for n, t in x.items()}
    monkeypatch.setenv("KDA_IMPL", choice)
    for function, call in [(native_kda.chunk_kda, x), (native_kda.fused_recurrent_kda, one),
                           (fla.chunk_kda, x), (fla.fused_recurrent_kda, one),
                           (native_kda.chunk_kda, dict(x, novelty=7))]:
        with pytest.raises(native_kda.UnsupportedError, match="KDA_IMPL=.* unset KDA_IMPL"):
            function(**call, **FLAGS)
    assert native_kda.chunk_kda(**x, **FLAGS, backend="fla") is None and gone == ["chunk_kda"]
    for nothing in ("", " , "):
        monkeypatch.setenv("KDA_IMPL", nothing)
        assert native_kda.chunk_kda(**x, **FLAGS, novelty=7) is None and len(gone) > 1


def test_a_word_that_names_no_implementation_does_not_go_to_fla(fla, monkeypatch):
    monkeypatch.setenv("KDA_IMPL", "fastest")
    for function in (native_kda.chunk_kda, fla.chunk_kda):
        with pytest.raises(ValueError, match="KDA_IMPL: found .fastest"):
            function(**inputs(8), **FLAGS)


def test_what_fla_must_do_itself(fla, monkeypatch):
    """The verifier refuses and names the reason, so that fla's dispatch goes on."""
    x = inputs(8)
    verify = native_kda.fla._verify
    assert verify("chunk_kda", (), {**x, **FLAGS}) == (True, None)
    assert verify("chunk_kda", tuple(x[n] for n in ("q", "k", "v", "g", "beta")), {})[0]
    for change, reason in [(dict(cp_context=object()), "context parallel"),
                           (dict(novelty=3), "novelty=3"),
                           (dict(chunk_size=16), "chunk_size")]:
        accepted, text = verify("chunk_kda", (), {**x, **FLAGS, **change})
        assert not accepted and reason in text
    with monkeypatch.context() as limit:
        y = inputs(300, grad=True, K=32, V=48)
        limit.setenv("KDA_WORKSPACE_LIMIT", "300000")
        accepted, text = verify("chunk_kda", (), {**y, **FLAGS})
        assert not accepted and "chunk_bwd: workspace_limit" in text
        assert verify("chunk_kda", (), {**{n: t.detach() for n, t in y.items()}, **FLAGS})[0]
    pool = dict(x, ssm_state_indices=torch.zeros(2, 3, dtype=torch.int32))
    accepted, text = verify("fused_recurrent_kda_fwd", (), pool)
    assert not accepted and "ssm_state_indices" in text
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    assert verify("chunk_kda", (), {**x, **FLAGS}) == (False, "NATIVE_KDA_DISABLE is set")
    native_kda.fla.disable()
    assert not verify("chunk_kda", (), {**x, **FLAGS})[0]


def child(script, **variables):
    result = subprocess.run([sys.executable, "-W", "ignore", *script], capture_output=True,
                            text=True, timeout=300, check=False, env={**os.environ, **variables})
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


SCRIPT = """
import torch
from fla.ops.kda import chunk_kda
x = [torch.randn(1, 9, 2, 4) for _ in range(3)]
o, _ = chunk_kda(*x, -torch.rand(1, 9, 2, 4), torch.rand(1, 9, 2))
import native_kda
print(native_kda.fla.hits()["chunk_kda"], native_kda.fla.enable()["chunk_kda"])
"""


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_run_serves_an_unmodified_script(tmp_path, disabled):
    """Also where fla's dispatch is dead: then the functions are replaced."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    *_, last = child(["-m", "native_kda.run", str(script)], FLA_DISABLE_BACKEND_DISPATCH=disabled)
    hits, how = last.split()
    assert hits == "1" and how in ("dispatch", "replaced")
    assert how == "replaced" or disabled == "0"


@pytest.mark.parametrize("name, value, how", [
    ("KDA_IMPL", "cpu_chunk_bwd", "dispatch"), ("NATIVE_KDA_DISABLE", "1", "switched off"),
    ("FLA_NATIVE_KDA", "0", "switched off")])
def test_the_proof_does_not_depend_on_the_environment(name, value, how):
    code = "import native_kda; print(native_kda.fla.enable()['chunk_kda'], native_kda.fla.hits())"
    *_, last = child(["-c", code], **{name: value})
    assert last.startswith(how) or (how == "dispatch" and last.startswith("replaced"))
    assert last.endswith("{}"), "the proof is not counted"


def test_kimi_linear_of_transformers():
    pytest.importorskip("transformers.models.kimi_linear",
                        reason="transformers with KimiLinear is not installed")
    script = EXAMPLES / "hf_kimi_linear.py"
    if not script.exists():
        pytest.skip("the sources are not here")
    lines = child([str(script), "--device", "cpu"])
    assert any('"calls of chunk_kda in the step": 3' in line for line in lines)
