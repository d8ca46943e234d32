"""NumPy and other arrays on the CPU: no torch is needed for anything here."""

import sys
import types

import numpy as np
import pytest
import reference
from reference import ratio

import native_kda

GATES = [(None, None), ("softplus", None), ("lower_bound", -5.0)]


def options_of(gate, lower_bound):
    return dict(use_gate_in_kernel=gate is not None, lower_bound=lower_bound)


@pytest.mark.parametrize("gate, lower_bound", GATES)
@pytest.mark.parametrize("dtype, limit", [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_forward_matches_the_recurrence(dtype, limit, gate, lower_bound):
    x = reference.numpy_inputs(dtype=dtype, gate=gate)
    o, s = native_kda.chunk_kda(**x, **options_of(gate, lower_bound), output_final_state=True,
                                use_qk_l2norm_in_kernel=True)
    want_o, want_s = reference.recurrence(**x, gate=gate, lower_bound=lower_bound, l2norm=True)
    assert o.dtype == dtype and s.dtype == dtype
    assert ratio(want_o, o) < limit and ratio(want_s, s) < limit


@pytest.mark.parametrize("gate, lower_bound", GATES)
def test_gradients_match_differences(gate, lower_bound):
    """Central differences of the float64 recurrence along one random direction an input."""
    x = reference.numpy_inputs(B=1, T=9, H=1, HV=2, K=4, V=3, dtype=np.float64, gate=gate)
    rng = np.random.default_rng(5)
    do, dh = rng.standard_normal((1, 9, 2, 3)), rng.standard_normal((1, 2, 4, 3))
    found = native_kda.chunk_kda_backward(do, **x, dfinal_state=dh, use_qk_l2norm_in_kernel=True,
                                          **options_of(gate, lower_bound))
    assert set(found) == {"d" + name for name in x}

    def loss(**inputs):
        o, s = reference.recurrence(**inputs, gate=gate, lower_bound=lower_bound, l2norm=True)
        return (o * do).sum() + (s * dh).sum()

    for name, value in x.items():
        direction = rng.standard_normal(value.shape)
        up, down = (loss(**{**x, name: value + step * direction}) for step in (1e-6, -1e-6))
        assert found["d" + name].shape == value.shape
        slope = (found["d" + name] * direction).sum()
        assert np.isclose(slope, (up - down) / 2e-6, rtol=1e-6), name


def test_only_the_gradients_wanted():
    x = reference.numpy_inputs(T=5)
    do = np.ones((2, 5, 4, 8), np.float32)
    assert set(native_kda.chunk_kda_backward(do, **x, wanted=("dv", "dA_log"))) == {"dv"}
    with pytest.raises(ValueError, match="wanted"):
        native_kda.chunk_kda_backward(do, **x, wanted=("dx",))


def test_packed_sequences_equal_separate_ones():
    x = reference.numpy_inputs(B=1, T=80)
    x["initial_state"] = np.random.default_rng(1).standard_normal((3, 4, 16, 8), np.float32)
    cu = np.array([0, 30, 30, 75])
    o, s = native_kda.chunk_kda(**x, cu_seqlens=cu, output_final_state=True)
    assert np.array_equal(s[1], x["initial_state"][1]) and not o[:, 75:].any()
    part = {n: t[:, 30:75] for n, t in x.items() if n != "initial_state"}
    alone, state = native_kda.chunk_kda(**part, initial_state=x["initial_state"][2:],
                                        output_final_state=True)
    assert np.array_equal(o[:, 30:75], alone) and np.array_equal(s[2:], state)
    short = native_kda.chunk_kda(**x, cu_seqlens=cu.astype(np.int32))[0]
    assert np.array_equal(o, short)


def test_strides_and_half_precision():
    x = reference.numpy_inputs(dtype=np.float32)
    turned = {n: np.asfortranarray(t) for n, t in x.items()}
    assert np.array_equal(native_kda.chunk_kda(**x)[0], native_kda.chunk_kda(**turned)[0])
    half = {n: t.astype(np.float16) if n != "initial_state" else t for n, t in x.items()}
    o, _ = native_kda.chunk_kda(**half, use_qk_l2norm_in_kernel=True)
    want, _ = reference.recurrence(**half, l2norm=True)
    assert o.dtype == np.float16 and ratio(want, o) < 1e-3
    with pytest.raises(ValueError, match="strides"):
        native_kda.chunk_kda(**{**x, "q": x["q"][:, ::-1]})


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = {n: t.astype(ml_dtypes.bfloat16) if n != "initial_state" else t
         for n, t in reference.numpy_inputs().items()}
    o, _ = native_kda.chunk_kda(**x, use_qk_l2norm_in_kernel=True)
    want, _ = reference.recurrence(**x, l2norm=True)
    assert o.dtype == ml_dtypes.bfloat16 and ratio(want, o) < 5e-3


def test_jax_arrays():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = reference.numpy_inputs()
    host = jax.devices("cpu")[0]
    o, s = native_kda.chunk_kda(**{n: jax.device_put(t, host) for n, t in x.items()},
                                output_final_state=True)
    assert isinstance(o, jax.Array) and isinstance(s, jax.Array)
    assert np.array_equal(o, native_kda.chunk_kda(**x)[0])


class Strict:
    """No more than DLPack and what the array API standard asks of an array and its package."""

    __module__ = "strict"

    def __init__(self, array):
        self._array = array
        self.dtype, self.shape = f"strict.{array.dtype}", array.shape

    def __array_namespace__(self, **_):
        return types.SimpleNamespace(
            from_dlpack=lambda x: Strict(np.from_dlpack(x).copy()),  # NumPy 1.23: read-only
            reshape=lambda x, shape: Strict(x._array.reshape(shape)),
        )

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Bare(Strict):
    """Of a package that has no from_dlpack."""

    __module__ = "bare"
    __array_namespace__ = property()


@pytest.mark.parametrize("package", ["strict", "array_api_strict", "bare"])
def test_arrays_of_any_package(package):
    """Results are of the same package, or of NumPy where it takes none by DLPack."""
    if package == "array_api_strict":
        module = pytest.importorskip(package, reason=f"{package} is not installed")
        make, kind = module.asarray, type(module.asarray(0))
    else:
        make, kind = (Strict, Strict) if package == "strict" else (Bare, np.ndarray)
    x = reference.numpy_inputs(B=1, T=70, gate="softplus")
    how = dict(use_gate_in_kernel=True, output_final_state=True)
    if package == "bare":
        odd = {**{n: make(t) for n, t in x.items()}, "A_log": make(x["A_log"][None])}
        with pytest.raises(ValueError, match=r"^A_log: found shape \[1, 4\], expected \[4\]"):
            native_kda.chunk_kda(**odd, **how)
    else:
        x["A_log"] = x["A_log"].reshape(1, 1, 4, 1)
        x["dt_bias"] = x["dt_bias"].reshape(1, 1, 4, 16)
    y = {name: make(array) for name, array in x.items()}
    cu = np.array([0, 30, 70])

    def same(found, want):
        assert isinstance(found, kind)
        assert np.array_equal(found if kind is np.ndarray else np.from_dlpack(found), want)

    for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
        for found, want in zip(function(**y, **how), function(**x, **how)):
            same(found, want)
    del x["initial_state"], y["initial_state"]
    states = dict(how, return_intermediate_states=True, state_v_first=True)
    same(native_kda.chunk_kda(**y, **states, cu_seqlens=make(cu))[2],
         native_kda.chunk_kda(**x, **states, cu_seqlens=cu)[2])
    gradients = native_kda.chunk_kda_backward(x["v"], **x, **how)
    for name, found in native_kda.chunk_kda_backward(y["v"], **y, **how).items():
        same(found, gradients[name])
    same(native_kda.stages.gate_cumsum(y["g"]), native_kda.stages.gate_cumsum(x["g"]))
    assert native_kda.is_supported(**y, use_gate_in_kernel=True) == (True, "", "cpu_chunk_fwd")


def test_bfloat16_of_a_package_without_ml_dtypes(monkeypatch):
    """NumPy has it by that package alone: no outputs can be allocated."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = {n: t.astype(ml_dtypes.bfloat16) for n, t in reference.numpy_inputs(T=4).items()
         if n != "initial_state"}
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(native_kda.UnsupportedError, match="bfloat16: .* without package ml_dtypes"):
        native_kda.chunk_kda(**x)


def test_decode_and_pool():
    x = reference.numpy_inputs(B=3, T=1)
    x.pop("initial_state")
    pool = np.random.default_rng(2).standard_normal((5, 4, 16, 8), np.float32)
    before = pool.copy()
    o, same = native_kda.fused_recurrent_kda(**x, initial_state=pool,
                                             state_indices=np.array([2, -1, 0], np.int32))
    assert same is pool and not o[1].any()
    for i, slot in ((0, 2), (2, 0)):
        want_o, want_s = reference.recurrence(**{n: t[i : i + 1] for n, t in x.items()},
                                              initial_state=before[slot : slot + 1])
        assert ratio(want_o, o[i : i + 1]) < 1e-5 and ratio(want_s[0], pool[slot]) < 1e-5
    assert np.array_equal(pool[[1, 3, 4]], before[[1, 3, 4]])
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native_kda.fused_recurrent_kda(**x, initial_state=pool,
                                       state_indices=np.array([2, -1, 0], np.int32))
    with pytest.raises(ValueError, match="initial_state"):
        native_kda.fused_recurrent_kda(**x, in_place=True)


def test_states_entering_each_chunk():
    x = reference.numpy_inputs(B=1, T=150)
    o, s, h = native_kda.chunk_kda(**x, return_intermediate_states=True, output_final_state=True)
    assert h.shape == (1, 3, 4, 16, 8)
    head = {n: t[:, :64] if n != "initial_state" else t for n, t in x.items()}
    assert ratio(native_kda.chunk_kda(**head, output_final_state=True)[1], h[:, 1]) < 1e-6
    cu = np.array([0, 65, 65, 150])
    x["initial_state"] = np.zeros((3, 4, 16, 8), np.float32)
    *_, h = native_kda.chunk_kda(**x, return_intermediate_states=True, cu_seqlens=cu)
    assert h.shape == (1, 4, 4, 16, 8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk_size", [64, 32])
def test_stages_give_the_whole(packed, chunk_size):
    x = reference.numpy_inputs(B=1, T=100, gate="softplus")
    cu = np.array([0, 40, 100]) if packed else None
    if packed:
        x["initial_state"] = np.concatenate([x["initial_state"]] * 2)
    q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (x["q"], x["k"]))
    rng = np.random.default_rng(3)
    do = rng.standard_normal((1, 100, 4, 8), np.float32)
    dh = rng.standard_normal(x["initial_state"].shape, np.float32)
    how, stages = dict(cu_seqlens=cu, chunk_size=chunk_size), native_kda.stages

    gamma = stages.gate_cumsum(x["g"], x["A_log"], x["dt_bias"], use_gate_in_kernel=True, **how)
    Aqk, A = stages.intra(q, k, x["beta"], gamma, **how)
    w, u, kg, qg = stages.wu(k, x["v"], x["beta"], gamma, A, q, **how)
    h, v_new, s, dq_raw = stages.state_scan(kg, w, u, gamma, x["initial_state"], do, **how)
    o = stages.output(q, gamma, Aqk, h, v_new, **how)
    assert dq_raw.shape == (1, 100, 4, 16) and dq_raw.dtype == np.float32

    whole = dict(x, q=q, k=k, use_gate_in_kernel=True, **how)
    want_o, want_s = native_kda.chunk_kda(**whole, output_final_state=True)
    assert ratio(want_o, o) < 1e-5 and ratio(want_s, s) < 1e-5

    dhs, dv_new, dh0 = stages.reverse_scan(qg, kg, w, gamma, Aqk, do, dh, **how)
    parts = stages.wy_bwd(q, k, x["v"], x["beta"], gamma, A, v_new, h, dhs, dv_new, do, **how)
    dv = parts.pop("dv")
    dq, dk, dg, dbeta = stages.intra_bwd(q, k, x["beta"], gamma, **parts, **how)
    want = native_kda.chunk_kda_backward(do, **whole, dfinal_state=dh)
    for name, found in dict(dq=dq, dk=dk, dv=dv, dbeta=dbeta, dinitial_state=dh0).items():
        assert ratio(want[name], found) < 1e-5, name
    plain = dict(whole, g=_decay(x), use_gate_in_kernel=False)
    assert ratio(native_kda.chunk_kda_backward(do, **plain, dfinal_state=dh)["dg"], dg) < 1e-5


def _decay(x):
    z = x["g"] + x["dt_bias"].reshape(4, 16)
    return (-np.exp(x["A_log"])[:, None] * np.logaddexp(0, z)).astype(np.float32)


def test_wrong_shapes_are_named():
    x = reference.numpy_inputs(T=6)
    for name, wrong in [("k", x["k"][:, :3]), ("g", x["g"][..., 0]), ("beta", x["beta"][..., None]),
                        ("v", x["v"][:, :, :3]), ("initial_state", x["initial_state"][..., :3])]:
        with pytest.raises((ValueError, AssertionError), match=f"^{name}: "):
            native_kda.chunk_kda(**{**x, name: wrong})
    with pytest.raises(ValueError, match="beta: found dtype"):
        native_kda.chunk_kda(**{**x, "beta": x["beta"].astype(np.int8)})
    with pytest.raises(ValueError, match="gamma: found shape"):
        native_kda.stages.intra(x["q"], x["k"], x["beta"], x["g"][0])
    with pytest.raises(ValueError, match="DLPack"):
        native_kda.chunk_kda([1], [1], [1], [1], [1])


def test_the_choice_of_an_implementation(monkeypatch):
    x = reference.numpy_inputs(T=6)
    native_kda.chunk_kda(**x)
    monkeypatch.setenv("KDA_IMPL", "reference")
    native_kda.chunk_kda(**x)
    assert native_kda.hits() == {"cpu_chunk_fwd": 1, "reference_chunk_fwd": 1}
    assert native_kda.is_supported(**x) == (True, "", "reference_chunk_fwd")
    monkeypatch.setenv("KDA_IMPL", "nothing")
    with pytest.raises(ValueError, match="KDA_IMPL"):
        native_kda.chunk_kda(**x)


def test_the_environment_limits_the_workspace(monkeypatch):
    x = reference.numpy_inputs(T=6)
    native_kda.chunk_kda(**x)
    monkeypatch.setenv("KDA_WORKSPACE_LIMIT", "1")
    supported, reason, _ = native_kda.is_supported(**x)
    assert not supported
    assert "workspace_limit: found 1 bytes, expected " in reason
    with pytest.raises(native_kda.UnsupportedError, match="workspace_limit"):
        native_kda.chunk_kda(**x)
    monkeypatch.setenv("KDA_WORKSPACE_LIMIT", "1e9")
    with pytest.raises(ValueError, match="KDA_WORKSPACE_LIMIT: found .1e9."):
        native_kda.chunk_kda(**x)
    for limit in ("1000000000", " 1000000000 ", " "):  # spaces do not count, in any variable
        monkeypatch.setenv("KDA_WORKSPACE_LIMIT", limit)
        native_kda.chunk_kda(**x)


def test_a_named_backend_never_falls_back():
    x = reference.numpy_inputs(T=6)
    native_kda.chunk_kda(**x, backend="cpu")
    with pytest.raises(ValueError, match="backend: found 'cuda' with tensors on cpu"):
        native_kda.chunk_kda(**x, backend="cuda")
    with pytest.raises(ValueError, match="backend: found 'fast'"):
        native_kda.chunk_kda(**x, backend="fast")
    with pytest.raises(native_kda.UnsupportedError, match="novelty=1"):
        native_kda.chunk_kda(**x, novelty=1)
    native_kda.chunk_kda(**x, novelty=None)


def test_support_matrix_lists_every_operation():
    rows = native_kda.support_matrix()
    assert {row["operation"] for row in rows if row["device"] == "cpu"} == {
        "chunk_fwd", "chunk_bwd", "recurrent", "gate_cumsum", "intra", "wu", "state_scan", "output",
        "reverse_scan", "wy_bwd", "intra_bwd"}
    assert all(set(row) == {"operation", "device", "implementation", "family", "takes"}
               for row in rows)


def test_empty_calls():
    x = {n: t[:, :0] if n != "initial_state" else t
         for n, t in reference.numpy_inputs(T=4).items()}
    o, s = native_kda.chunk_kda(**x, output_final_state=True)
    assert o.shape == (2, 0, 4, 8) and np.array_equal(s, x["initial_state"])


def test_a_batch_of_none_is_refused():
    x = {n: t[:0] for n, t in reference.numpy_inputs(T=4).items()}
    for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
        with pytest.raises(ValueError, match=r"^q: found shape \[0, .* with B of 1 at least$"):
            function(**x)
