"""CuPy arrays on a GPU, through DLPack. Skipped where there is none."""

import numpy as np
import pytest
import reference
from reference import ratio

import native_kda

cupy = pytest.importorskip("cupy", reason="cupy is not installed")
try:
    DEVICES = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    DEVICES = 0
if DEVICES == 0:
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(row["device"] == "cuda" for row in native_kda.support_matrix()):
    pytest.skip("native_kda was built without CUDA", allow_module_level=True)

GATE = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)


def inputs(dtype=np.float32, **sizes):
    """The same numbers for NumPy and for CuPy."""
    host = reference.numpy_inputs(gate="softplus", **sizes)
    wide = ("A_log", "dt_bias", "initial_state")
    host = {n: x if n in wide else x.astype(dtype) for n, x in host.items()}
    return host, {n: cupy.asarray(x) for n, x in host.items()}


def on_gpu(array):
    assert isinstance(array, cupy.ndarray)
    return cupy.asnumpy(array)


@pytest.mark.parametrize("dtype, limit", [(np.float32, 1e-4), (np.float16, 1e-3)])
def test_forward_matches_the_recurrence(dtype, limit):
    host, x = inputs(dtype)
    o, s = native_kda.chunk_kda(**x, **GATE, output_final_state=True)
    want_o, want_s = reference.recurrence(**host, gate="softplus", l2norm=True)
    assert o.dtype == dtype and s.dtype == np.float32
    assert ratio(want_o, on_gpu(o)) < limit and ratio(want_s, on_gpu(s)) < limit
    assert all(name.startswith(("cuda_", "sm90_")) for name in native_kda.hits())


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    try:
        host, x = inputs(ml_dtypes.bfloat16)
        x["q"].__dlpack__()
    except (BufferError, TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16: {error}")
    o, _ = native_kda.chunk_kda(**x, **GATE)
    want, _ = reference.recurrence(**host, gate="softplus", l2norm=True)
    assert o.dtype == ml_dtypes.bfloat16
    assert ratio(want, on_gpu(o).astype(np.float32)) < reference.BF16["o"]


def test_gradients_are_those_of_the_cpu():
    host, x = inputs()
    do = np.random.default_rng(3).standard_normal(host["v"].shape).astype(np.float32)
    want = native_kda.chunk_kda_backward(do, **host, **GATE)
    got = native_kda.chunk_kda_backward(cupy.asarray(do), **x, **GATE)
    assert set(got) == set(want) and "dA_log" in got
    for name, gradient in want.items():
        assert ratio(gradient, on_gpu(got[name])) < 3e-4, name


def test_packed_and_strided():
    host, x = inputs(B=1, T=80)
    host["initial_state"] = np.random.default_rng(1).standard_normal((3, 4, 16, 8), np.float32)
    x["initial_state"] = cupy.asarray(host["initial_state"])
    turned = {n: cupy.asfortranarray(t) for n, t in x.items()}
    cu = cupy.asarray([0, 30, 30, 75], dtype=np.int32)
    o, s = native_kda.chunk_kda(**x, **GATE, cu_seqlens=cu, output_final_state=True)
    assert cupy.array_equal(o, native_kda.chunk_kda(**turned, **GATE, cu_seqlens=cu)[0])
    assert cupy.array_equal(s[1], x["initial_state"][1]) and not o[:, 75:].any()
    want, _ = native_kda.chunk_kda(**host, **GATE, cu_seqlens=np.array([0, 30, 30, 75]))
    assert ratio(want, on_gpu(o)) < 1e-4


def test_work_goes_to_the_current_stream():
    _, x = inputs(T=500)
    want = native_kda.chunk_kda(**x, **GATE)[0]
    later = {n: cupy.full_like(t, np.nan) for n, t in x.items()}
    busy = cupy.ones((8192, 8192), np.float32)
    busy @ busy  # loads what it needs
    cupy.cuda.runtime.deviceSynchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        busy @ busy
        for n, t in x.items():
            cupy.copyto(later[n], t)
        o = native_kda.chunk_kda(**later, **GATE)[0]
    assert not side.done, "the side stream was not busy: nothing is proved"
    side.synchronize()
    assert cupy.array_equal(o, want)


def test_decode_with_a_pool():
    host, x = inputs(B=3, T=1)
    pool = np.random.default_rng(2).standard_normal((5, 4, 16, 8), np.float32)
    host["initial_state"], x["initial_state"] = pool.copy(), cupy.asarray(pool)
    slots = np.array([2, -1, 0], np.int32)
    want, _ = native_kda.fused_recurrent_kda(**host, **GATE, state_indices=slots)
    o, same = native_kda.fused_recurrent_kda(**x, **GATE, state_indices=cupy.asarray(slots))
    assert same is x["initial_state"] and not o[1].any()
    assert ratio(want, on_gpu(o)) < 1e-5 and ratio(host["initial_state"], on_gpu(same)) < 1e-5


def test_the_state_scan_alone():
    rng = np.random.default_rng(0)
    kg, w = (0.1 * rng.standard_normal((1, 128, 2, 16)).astype(np.float32) for _ in range(2))
    u = rng.standard_normal((1, 128, 2, 32)).astype(np.float32)
    gamma = np.cumsum(np.full((1, 2, 64, 2, 16), -0.01, np.float32), axis=2).reshape(1, 128, 2, 16)
    want = native_kda.stages.state_scan(kg, w, u, gamma)
    got = native_kda.stages.state_scan(*(cupy.asarray(t) for t in (kg, w, u, gamma)))
    for a, b in zip(want, got):
        assert ratio(a, on_gpu(b)) < 1e-4


def test_arrays_elsewhere_are_named():
    host, x = inputs()
    with pytest.raises(ValueError, match="beta: found ndarray of numpy, expected an array of cupy"):
        native_kda.chunk_kda(**{**x, "beta": host["beta"]}, **GATE)


@pytest.mark.skipif(DEVICES < 2, reason="one GPU only")
def test_second_device():
    _, x = inputs()
    want = native_kda.chunk_kda(**x, **GATE)[0]
    with cupy.cuda.Device(1):
        there = {n: cupy.asarray(t) for n, t in x.items()}
        cupy.cuda.runtime.deviceSynchronize()
    o, _ = native_kda.chunk_kda(**there, **GATE)
    assert o.device.id == 1
    with cupy.cuda.Device(1):
        assert cupy.array_equal(o, cupy.asarray(want))
