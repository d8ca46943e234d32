"""Whatever stands at whatever place: a result, or an error of this package that begins with the
name of an argument. chunk_kda and is_supported agree on which of the two."""

import inspect
import random
import re
import sys

import numpy as np
import pytest
import reference

import native_kda
from native_kda import stages

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transpose_state_layout
ERRORS = (ValueError, native_kda.UnsupportedError, MemoryError)
STAGES = (
    "gate_cumsum", "intra", "wu", "state_scan", "output", "reverse_scan", "wy_bwd", "intra_bwd")
FUNCTIONS = (
    native_kda.chunk_kda, native_kda.chunk_kda_backward, native_kda.fused_recurrent_kda,
    native_kda.is_supported, native_kda.warmup, *(getattr(stages, name) for name in STAGES))
# States that are updated in place are results too.
NAMES = {"transpose_state_layout", "novelty", "final_state"}
NAMES.update(name for function in FUNCTIONS for name in inspect.signature(function).parameters)
OPTIONS = (
    "scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first", "backend",
    "transpose_state_layout", "novelty")
OF_CHUNK = (
    "safe_gate", "disable_recompute", "return_intermediate_states", "cp_context", "use_graph",
    "max_num_seqs", "chunk_size", "cu_seqlens_cpu")
FLAGS = dict(use_gate_in_kernel=True)
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


class Hostile:
    """Fails at whatever it is asked for."""

    def fail(self, *arguments):
        raise ZeroDivisionError("asked")

    __bool__ = __float__ = __index__ = __int__ = __len__ = __iter__ = __repr__ = __str__ = fail


class Described(Hostile):
    """As an array for those who only look at it."""

    dtype, shape, ndim = np.dtype("float32"), (1, 5, 1, 4), 4


def plain_values():
    return [
        None, True, False, 0, 1, -1, 5, 64, 3.5, 64.0, float("nan"), float("inf"), 1e40, 10**400,
        -(10**400), 10**5000, 1j, "x", "0.5", "cpu", "auto", b"x", [], [1], (), (1, 2), {}, {1: 2},
        object(), int, len, Hostile(), Described(), range(3), memoryview(b"abcd"), np.float32(1),
        np.int64(64), np.float64("nan"), np.bool_(True), np.datetime64("2020-01-01"), np.array(1),
        np.array([1, 1]), np.array([]), np.array("x"), np.array([None]), np.zeros((1,) * 5),
        np.zeros((1,) * 6, np.int32), np.zeros((0, 0, 0, 0), np.float32), np.ones((1, 5, 1, 4)),
        np.ones((1, 5, 1, 4), complex), np.ones(2, bool), np.ma.ones(3), np.ones(3, ">f4"),
        np.frombuffer(bytearray(81), np.float32, 20, 1).reshape(1, 5, 1, 4),
    ]


def values_of_torch(torch):
    x = torch.ones(1, 5, 1, 4)
    return [
        torch.tensor(1), torch.tensor(64.0), torch.tensor([64, 64]), torch.tensor([]),
        torch.tensor(True), torch.tensor(64, device="meta"), torch.zeros((1,) * 5),
        torch.zeros((1,) * 6, dtype=torch.int32), torch.zeros(0, 0, 0, 0), x, x.double(), x.half(),
        x.bool(), x.to(torch.complex64), x.to("meta"), x.to_sparse(), x.expand(2, 5, 3, 4),
        torch.nested.nested_tensor([x[0]]), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        torch._efficientzerotensor(x.shape), torch.nn.Parameter(x), torch.zeros(2), torch.int64,
        torch.complex(x, x).conj().imag, x.clone().requires_grad_(), torch.device("cpu"),
        torch.frombuffer(bytearray(81), dtype=torch.float32, count=20, offset=1).view(1, 5, 1, 4),
        torch.tensor([0.0, 5.0]), torch.tensor([0, 5], device="meta"), torch.tensor([0, 5]),
    ]


def inputs(packed):
    x = reference.numpy_inputs(B=1, T=5, H=1, HV=1, K=4, V=3, gate="softplus")
    return {**x, "cu_seqlens": np.array([0, 5])} if packed else x


def kind_of_torch(torch, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = values_of_torch(torch)
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    there = [x.to(device) for x in tensors if not (x.is_meta or x.is_quantized or x.is_nested)]
    return lambda x: torch.from_numpy(x).to(device), values + (there if device != "cpu" else [])


def kind_of_arrays(name):
    package = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "numpy":
        return np.asarray, []
    if name == "cupy":
        if not package.is_available():
            pytest.skip("no CUDA device")
        put = package.asarray
    else:
        host = package.devices("cpu")[0]

        def put(x):
            return package.device_put(x, host)

    like = (np.float32(1), np.ones(2, bool), np.ones((1, 5, 1, 4), np.int32),
            np.zeros((1,) * 5, np.float32), np.zeros((0,) * 4, np.float32), np.ones(3, np.float16))
    return put, [put(x) for x in like]


@pytest.fixture(params=["numpy", "jax", "cupy", "torch", "meta", "cuda"])
def kind(request, monkeypatch):
    """What puts an array of NumPy there, and what may stand in its place. Calls that would leave
    for flash-linear-attention say so."""
    def leaves(function, reason, *how):
        raise native_kda.UnsupportedError(f"{function}: {reason}")

    monkeypatch.setattr(native_kda.ops, "_to_fla", leaves)
    if request.param in ("numpy", "jax", "cupy"):
        put, values = kind_of_arrays(request.param)
        yield put, plain_values() + values
        return
    torch = request.getfixturevalue("torch")
    put, values = kind_of_torch(torch, "cpu" if request.param == "torch" else request.param)
    yield put, plain_values() + values
    if request.param == "cuda":
        torch.cuda.synchronize()


def outcome(function, call):
    """None, or the error; it is one of this package, and names an argument."""
    try:
        function(**call)
    except ERRORS as error:
        text = str(error)
        named = re.match(r"(?:(?:chunk|fused_recurrent)_kda: )?(?:argument )?(\w+)[:=\[]", text)
        assert named and named[1] in NAMES, text
        return text
    return None


def is_trusted(name, value):
    """On a GPU what is an index in kind is taken at its word."""
    if name not in ("cu_seqlens", "state_indices", "num_accepted"):
        return False
    on_gpu = getattr(value, "is_cuda", False) or type(value).__module__.startswith("cupy")
    return on_gpu and str(value.dtype).removeprefix("torch.") in ("int32", "int64")


def make(put, packed):
    return {name: put(x) for name, x in inputs(packed).items()}


def calls(kind, names):
    """Each value at each place, and some two at once."""
    put, values = kind
    plain, packed = make(put, False), make(put, True)
    for name in names:
        for value in values:
            if not is_trusted(name, value):
                yield {**(packed if name.startswith("cu_seqlens") else plain), **FLAGS, name: value}
    rng = random.Random(5)
    for _ in range(300):
        odd = {rng.choice(names): rng.choice(values) for _ in range(2)}
        if not any(is_trusted(*item) for item in odd.items()):
            yield {**(packed if rng.random() < 0.5 else plain), **FLAGS, **odd}


def argument_of(text):
    return re.match(r"(?:chunk_kda: )?(\w+ ?\w*)", text)[1]


def agree(call):
    found = outcome(native_kda.chunk_kda, call)
    if found and re.match(r"cu_seqlens(_cpu)?(\[|: found \[)", found):
        return  # their values, which is_supported does not read
    supported, reason, implementation = native_kda.is_supported(**call)
    if getattr(call["q"], "is_meta", False):
        assert not supported and implementation == ""  # where results are only described
        return
    assert supported == (found is None) == bool(implementation), (found, reason)
    assert found is None or argument_of(reason) == argument_of(found)


def test_chunk_kda_and_is_supported(kind):
    for call in calls(kind, (*TENSORS, *OPTIONS, *OF_CHUNK)):
        if "backend" in call and isinstance(call["backend"], str) and call["backend"] == "fla":
            continue
        agree(call)


def test_intermediate_states(kind):
    """With lengths on the host, of which is_supported reads the kind alone."""
    names = (*TENSORS, "cu_seqlens_cpu")
    with_states = dict(return_intermediate_states=True)
    torch = sys.modules.get("torch")  # inference mode is torch's; arrays need none
    for call in calls(kind, names):
        if torch:
            with torch.inference_mode():
                agree({**call, **with_states})
        else:
            agree({**call, **with_states})


def test_decoding(kind):
    for in_place in (False, True):
        names = (*TENSORS, *OPTIONS, "state_indices", "num_accepted", "in_place")
        for call in calls(kind, names):
            outcome(native_kda.fused_recurrent_kda, {"in_place": in_place, **call})


def test_backward(kind):
    names = (*TENSORS, *OPTIONS, *OF_CHUNK, "do", "dfinal_state", "wanted")
    do = kind[0](inputs(False)["v"])
    for call in calls(kind, names):
        outcome(native_kda.chunk_kda_backward, {"do": do, **call})


def test_is_supported_with_gradients(kind):
    x = make(kind[0], False)
    for value in kind[1]:
        outcome(native_kda.is_supported, {**x, **FLAGS, "backward": value})
    for call in calls(kind, ("q", "v", "initial_state", "chunk_size")):
        outcome(native_kda.is_supported, {**call, "backward": True})


def calls_of_stages():
    """A call of each that is well formed."""
    x = inputs(False)
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    A, h = np.ones((1, 5, 1, 64), np.float32), np.ones((1, 1, 4, 3), np.float32)
    parts = dict(dq_partial=q, dk_partial=q, dg_partial=q, dbeta_partial=beta)
    return {
        "gate_cumsum": dict(g=g, A_log=x["A_log"], dt_bias=x["dt_bias"], use_gate_in_kernel=True),
        "intra": dict(q=q, k=k, beta=beta, gamma=g),
        "wu": dict(k=k, v=v, beta=beta, gamma=g, A=A, q=q),
        "state_scan": dict(kg=k, w=k, u=v, gamma=g, initial_state=h, do=v),
        "output": dict(q=q, gamma=g, Aqk=A, h=h, v_new=v),
        "reverse_scan": dict(qg=q, kg=k, w=k, gamma=g, Aqk=A, do=v, dfinal_state=h),
        "wy_bwd": dict(q=q, k=k, v=v, beta=beta, gamma=g, A=A, v_new=v, h=h, dh=h, dv_new=v, do=v),
        "intra_bwd": dict(q=q, k=k, beta=beta, gamma=g, dP=A, dL=A, **parts),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_stages(kind, stage):
    put, values = kind
    function, call = getattr(stages, stage), calls_of_stages()[stage]
    call = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in call.items()}
    assert outcome(function, call) is None
    names = tuple(inspect.signature(function).parameters)
    for name in names:
        for value in values:
            if not is_trusted(name, value):
                outcome(function, {**call, name: value})


def test_scale_has_no_gradient(torch):
    """Whoever learns it must not believe otherwise."""
    x = {name: torch.from_numpy(array) for name, array in inputs(False).items()}
    for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
        with pytest.raises(native_kda.ArgumentError, match="^scale: found a tensor that requires"):
            function(**x, **FLAGS, scale=torch.nn.Parameter(torch.tensor(0.5)))
        o, _ = function(**x, **FLAGS, scale=torch.tensor(0.5))
        assert torch.equal(o, function(**x, **FLAGS, scale=0.5)[0])


def test_flags_by_what_counts_as_one(torch):
    x = {name: torch.from_numpy(array) for name, array in inputs(False).items()}
    for yes in (1, 1.0, np.True_, torch.tensor(True), np.array([1])):
        assert native_kda.chunk_kda(**x, **FLAGS, output_final_state=yes)[1] is not None
    for no in (0, None, np.False_, torch.tensor(0)):
        assert native_kda.chunk_kda(**x, **FLAGS, output_final_state=no)[1] is None


def test_equal_is_not_the_same(torch):
    """What a remembered call had is refused in another type, as the first time."""
    x = {name: torch.from_numpy(array) for name, array in inputs(False).items()}
    for size in (64, 64.0, torch.tensor(64.0), 64, 64.0):
        if isinstance(size, int):
            native_kda.chunk_kda(**x, **FLAGS, chunk_size=size)
            continue
        with pytest.raises(native_kda.ArgumentError, match="^chunk_size: found"):
            native_kda.chunk_kda(**x, **FLAGS, chunk_size=size)


def test_what_is_updated_in_place_has_its_own_sign(torch):
    x = {name: torch.from_numpy(array) for name, array in inputs(False).items()}
    h = x["initial_state"]
    x["initial_state"] = torch.complex(h, h).conj().imag
    with pytest.raises(native_kda.ArgumentError, match="^initial_state: found the imaginary part"):
        native_kda.fused_recurrent_kda(**x, **FLAGS, in_place=True)
    native_kda.fused_recurrent_kda(**x, **FLAGS)


def test_a_named_backend_of_the_backward(torch):
    for x in (inputs(False), {n: torch.from_numpy(t) for n, t in inputs(False).items()}):
        call = {**x, **FLAGS, "do": x["v"]}
        assert native_kda.chunk_kda_backward(**call, backend="cpu")["dq"].shape == (1, 5, 1, 4)
        with pytest.raises(native_kda.ArgumentError, match="^backend: found 'cuda' with"):
            native_kda.chunk_kda_backward(**call, backend="cuda")
        with pytest.raises(native_kda.UnsupportedError, match="backend='fla'.* no such function"):
            native_kda.chunk_kda_backward(**call, backend="fla")


def test_warmup(torch):
    call = dict(B=1, T=2, H=1, K=4, device="cpu", dtype="float32", backward=False)
    values = plain_values() + values_of_torch(torch)
    for name in (*call, "V", "HV"):
        for value in values:
            if value is not True or name not in ("B", "T", "H", "K", "V", "HV"):
                outcome(native_kda.warmup, {**call, name: value})
