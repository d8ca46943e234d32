"""What stands where a tensor or a number is expected and is none: the argument is named, whatever
is there, by the calls and by is_supported alike."""

import re

import numpy as np
import pytest
import reference

import native_kda
from native_kda import ArgumentError, stages

FLAGS = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
ALL = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
NO_TENSORS = {"None": None, "list": [0, 70], "tuple": (0, 70), "int": 0, "str": "x",
              "memoryview": memoryview(np.zeros((1, 70, 4, 16), np.float32))}


def arrays():
    x = reference.numpy_inputs(B=1, gate="softplus")
    return {**x, "cu_seqlens": np.array([0, 70])}


def tensors(torch):
    return {n: torch.from_numpy(x) for n, x in arrays().items()}


def refused(x, name, text=""):
    """Each function refuses this call, naming the argument first."""
    for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
        with pytest.raises(ArgumentError, match=f"^{name}: {text}"):
            function(**x, **FLAGS)
    supported, reason, implementation = native_kda.is_supported(**x, **FLAGS)
    assert not supported and reason.startswith(f"{name}: ") and implementation == ""


@pytest.mark.parametrize("what", NO_TENSORS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_tensor_at_all(kind, name, what, request):
    if what == "None" and name in ALL[5:]:
        pytest.skip("may be absent")
    x = arrays() if kind == "numpy" else tensors(request.getfixturevalue("torch"))
    found = "absent" if what == "None" else f"found {what}"
    refused({**x, name: NO_TENSORS[what]}, name, found)


def test_a_dtype_that_nothing_has_names_those_of_the_argument():
    x = arrays()
    starts = np.array([0, x["q"].shape[1]], np.uint32)
    text = "found dtype .*, expected an array of "
    refused({**x, "cu_seqlens": starts}, "cu_seqlens", text + "int32 or int64 with")
    wrong = x["q"].astype(np.int16)
    refused({**x, "q": wrong}, "q", text + "bf16, fp16, fp32 or fp64 with")


@pytest.mark.parametrize("name", ALL)
def test_arrays_among_tensors(torch, name):
    """No package beside another: the one of q counts."""
    x, y = tensors(torch), arrays()
    if name == "q":
        refused({**x, "q": y["q"]}, "k", "found Tensor of torch, expected an array of numpy, as q")
        return
    refused({**x, name: y[name]}, name, "found ndarray, expected a tensor of torch, as q")
    refused({**y, name: x[name]}, name, "found Tensor of torch, expected an array of numpy, as q")
    with pytest.raises(ArgumentError, match=f"^{name}: found Tensor of torch"):
        native_kda.chunk_kda_backward(y["v"], **{**y, name: x[name]}, **FLAGS)


def test_packages_are_mixed_nowhere(torch):
    x, y = tensors(torch), arrays()
    for name in ("do", "dfinal_state"):
        do = {"do": y["v"], name: torch.zeros(1)}
        with pytest.raises(ArgumentError, match=f"^{name}: found Tensor of torch"):
            native_kda.chunk_kda_backward(**do, **y, **FLAGS)
    with pytest.raises(ArgumentError, match="^gamma: found Tensor of torch"):
        stages.intra(y["q"], y["k"], y["beta"], x["g"])
    y.pop("cu_seqlens")
    for name in ("state_indices", "num_accepted"):
        with pytest.raises(ArgumentError, match=f"^{name}: found Tensor of torch"):
            native_kda.fused_recurrent_kda(**y, **FLAGS, **{name: torch.zeros(1).int()})


class Derived(np.ndarray):
    """Of NumPy as well, wherever it is defined."""


def test_classes_derived_from_those_of_a_package():
    x = arrays()
    o, _ = native_kda.chunk_kda(**{**x, "k": x["k"].view(Derived)}, **FLAGS)
    assert np.array_equal(o, native_kda.chunk_kda(**x, **FLAGS)[0])


@pytest.mark.parametrize("name", ALL[1:])
def test_tensors_elsewhere(torch, name):
    """On meta, say: nothing is read where q is, and nothing but garbage could be returned."""
    x = tensors(torch)
    for _ in range(2):
        native_kda.chunk_kda(**x, **FLAGS)
        refused({**x, name: x[name].to("meta")}, name, "found on meta, expected cpu, where q is")
    with pytest.raises(ArgumentError, match="^k: found on cpu, expected meta"):
        native_kda.chunk_kda(**{**x, "q": x["q"].to("meta")}, **FLAGS)


def test_tensors_elsewhere_in_a_pool_and_in_stages(torch):
    x = {n: t for n, t in tensors(torch).items() if n != "cu_seqlens"}
    indices = torch.zeros(1, dtype=torch.int32, device="meta")
    for name in ("state_indices", "num_accepted"):
        with pytest.raises(ArgumentError, match=f"^{name}: found on meta"):
            native_kda.fused_recurrent_kda(**x, **FLAGS, **{name: indices})
    with pytest.raises(ArgumentError, match="^do: found on meta"):
        native_kda.chunk_kda_backward(x["v"].to("meta"), **x, **FLAGS)
    with pytest.raises(ArgumentError, match="^cu_seqlens: found on meta"):
        stages.gate_cumsum(x["g"], cu_seqlens=torch.tensor([0, 70], device="meta"))
    meta = {n: t.to("meta") for n, t in x.items()}
    supported, reason, _ = native_kda.is_supported(**meta, **FLAGS)
    assert not supported and reason == "q: found on meta, expected one of cpu, cuda"
    for told in (native_kda.chunk_kda(**meta, **FLAGS)[0], stages.gate_cumsum(meta["g"])):
        assert told.is_meta, "shapes are told all the same"


def test_tensors_without_strides(torch):
    x = tensors(torch)
    refused({**x, "k": x["k"].to_sparse()}, "k", "found layout torch.sparse_coo")


@pytest.mark.parametrize("name", ["q", "v", "beta", "initial_state"])
def test_zeros_that_torch_keeps_without_memory(torch, name):
    x = tensors(torch)
    zeros = torch._efficientzerotensor(x[name].shape)
    text = rf"found a tensor without memory \(address 0\), .*; {name}.clone\(\) makes one"
    for _ in range(2):
        refused({**x, name: zeros}, name, text)
    assert re.search(text, native_kda.is_supported(**{**x, name: zeros}, **FLAGS)[1])
    native_kda.chunk_kda(**{**x, name: zeros.clone()}, **FLAGS)
    with pytest.raises(ArgumentError, match="^g: found a tensor without memory"):
        stages.gate_cumsum(torch._efficientzerotensor(x["g"].shape))


@pytest.mark.parametrize("shape", [(), (3,), (3, 5, 7), (1, 1, 3)])
def test_dt_bias_of_a_wrong_shape(torch, shape):
    refused({**tensors(torch), "dt_bias": torch.zeros(shape)}, "dt_bias", "found shape")
    refused({**arrays(), "dt_bias": np.zeros(shape, np.float32)}, "dt_bias", "found shape")


def test_states_of_a_wrong_rank():
    x = arrays()
    for wrong in (np.zeros((), np.float32), np.zeros((1, 16, 8), np.float32)):
        refused({**x, "initial_state": wrong}, "initial_state", "found shape")


@pytest.mark.parametrize("entry", [0, 70])
def test_lengths_of_one_entry(entry):
    text = r"found shape \[1\], expected two entries at least: .* \[0, T\] for one sequence"
    x = {n: t for n, t in arrays().items() if n != "initial_state"}
    x["cu_seqlens"] = np.array([entry])
    refused(x, "cu_seqlens", text)
    with pytest.raises(ArgumentError, match=f"^cu_seqlens: {text}"):
        stages.gate_cumsum(x["g"], cu_seqlens=x["cu_seqlens"])


@pytest.mark.parametrize("shape", [(), (1, 3)])
def test_the_shape_of_A_log_as_it_was_passed(shape):
    text = f"found shape {re.escape(str(list(shape)))}, expected \\[HV\\] with HV = 4"
    refused({**arrays(), "A_log": np.zeros(shape, np.float32)}, "A_log", text)


def test_states_are_counted_by_the_letter_of_the_documents():
    x = {n: t for n, t in arrays().items() if n != "cu_seqlens"}
    x["initial_state"] = np.zeros((1, 4, 16, 9), np.float32)
    refused(x, "initial_state", r"found shape .* = \[N,HV,K,V\]")
    with pytest.raises(ArgumentError, match=r"^initial_state: found shape .* = \[P,HV,K,V\]"):
        native_kda.fused_recurrent_kda(**x, **FLAGS, state_indices=np.zeros(1, np.int32))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_states_updated_in_place_by_the_name_they_came_by(kind, request):
    """To the library they are final_state as well."""
    x = {n: t for n, t in arrays().items() if n != "cu_seqlens"}
    whole = np.zeros((1, 4, 16, 8), np.float32)
    overlapping = np.lib.stride_tricks.as_strided(whole, whole.shape, (2048, 0, 32, 4))
    aliasing = x["v"].reshape(-1)[:512].reshape(1, 4, 16, 8)
    if kind == "torch":
        torch = request.getfixturevalue("torch")
        overlapping = torch.zeros(1, 1, 16, 8).expand(1, 4, 16, 8)
        x = {n: torch.from_numpy(t) for n, t in x.items()}
        aliasing = x["v"].flatten()[:512].view(1, 4, 16, 8)
    for states, text in ((overlapping, "strides"), (aliasing, "its memory overlaps v")):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"^initial_state: {text}") as caught:
                native_kda.fused_recurrent_kda(**{**x, "initial_state": states}, **FLAGS,
                                               in_place=True)
            assert "final_state" not in str(caught.value)


def test_a_tangent_of_states_updated_in_place(torch):
    x = {n: t for n, t in tensors(torch).items() if n != "cu_seqlens"}
    with torch.autograd.forward_ad.dual_level():
        x["initial_state"] = torch.autograd.forward_ad.make_dual(x["initial_state"],
                                                                 x["initial_state"])
        with pytest.raises(ArgumentError, match="^initial_state: found a tangent"):
            native_kda.fused_recurrent_kda(**x, **FLAGS, in_place=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_states_more_precise_than_what_computes_them(kind, in_place, request):
    x = arrays() if kind == "numpy" else tensors(request.getfixturevalue("torch"))
    state = x["initial_state"]
    x["initial_state"] = state.astype(np.float64) if kind == "numpy" else state.double()
    refused(x, "initial_state", "found dtype .*float64")
    with pytest.raises(ArgumentError, match="^initial_state: found dtype .*float64 beside q of"):
        native_kda.fused_recurrent_kda(**x, **FLAGS, in_place=in_place)


def test_numbers():
    x = arrays()
    for name, wrong in [("scale", "x"), ("scale", "0.5"), ("scale", [1]), ("lower_bound", "x"),
                        ("lower_bound", np.ones(2))]:
        for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
            with pytest.raises(ArgumentError, match=f"^{name}: found .*, expected a number"):
                function(**x, **FLAGS, **{name: wrong})
        assert not native_kda.is_supported(**x, **FLAGS, **{name: wrong})[0]
    for wrong in ("64", 64.0, True, None, 16):
        with pytest.raises(ArgumentError, match="^chunk_size: found"):
            native_kda.chunk_kda(**x, **FLAGS, chunk_size=wrong)
        with pytest.raises(ArgumentError, match="^chunk_size: found"):
            stages.gate_cumsum(x["g"], chunk_size=wrong)
    with pytest.raises(ArgumentError, match="^scale: found 'x'"):
        stages.intra(x["q"], x["k"], x["beta"][..., :2], x["g"][..., :2, :], scale="x")
    o, _ = native_kda.chunk_kda(**x, **FLAGS, chunk_size=np.int64(32), scale=np.float32(0.5))
    assert np.array_equal(o, native_kda.chunk_kda(**x, **FLAGS, chunk_size=32, scale=0.5)[0])


def test_backward_and_stages():
    x = arrays()
    for do, found in ((None, "absent"), ([1], "found list")):
        with pytest.raises(ArgumentError, match=f"^do: {found}"):
            native_kda.chunk_kda_backward(do, **x, **FLAGS)
    with pytest.raises(ArgumentError, match="^dfinal_state: found int"):
        native_kda.chunk_kda_backward(x["v"], **x, **FLAGS, dfinal_state=0)
    with pytest.raises(ArgumentError, match="^g: absent"):
        stages.gate_cumsum(None)
    with pytest.raises(ArgumentError, match="^w: found list"):
        stages.state_scan(x["k"], [1], x["v"], x["g"])
    with pytest.raises(ArgumentError, match="^cu_seqlens: found tuple"):
        stages.gate_cumsum(x["g"], cu_seqlens=(0, 70))


ODD = {
    "big-endian": (lambda x: x.astype(">f4"), "found ndarray of dtype >f4"),
    "longdouble": (lambda x: x.astype(np.longdouble), "found ndarray of dtype float128|longdouble"),
    "object": (lambda x: x.astype(object), "found ndarray of dtype object"),
    "struct": (lambda x: x.astype([("a", "f4")]), "found ndarray of dtype"),
    "unaligned": (lambda x: x.astype([("a", "f4"), ("b", "i1")])["a"], "found ndarray of dtype"),
    "bool": (lambda x: x.astype(bool), "found dtype bool"),
    "reversed": (lambda x: x[:, ::-1], "found strides"),
    "masked": (lambda x: np.ma.array(x, mask=x > 0), "found a masked array"),
}


@pytest.mark.parametrize("name", ["q", "v", "beta", "initial_state"])
@pytest.mark.parametrize("odd", ODD)
def test_arrays_of_numpy_that_are_not_taken(odd, name):
    make, text = ODD[odd]
    x = arrays()
    if (odd, name) == ("reversed", "initial_state"):
        x[name] = np.repeat(x[name], 2, axis=1)[:, ::2]
    if name == "initial_state" and odd in ("big-endian", "longdouble", "object", "struct", "bool"):
        text = "found dtype"  # that of states is looked at first
    refused_somewhere = {**x, name: make(x[name])}
    with pytest.raises(ArgumentError, match=f"^{name}: ({text})"):
        native_kda.chunk_kda(**refused_somewhere, **FLAGS)
    assert native_kda.is_supported(**refused_somewhere, **FLAGS)[1].startswith(f"{name}: ")


class Tracer:
    """As arrays under a transformation: shape and dtype, but no memory."""

    __module__ = "numpy"

    def __init__(self, array):
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **how):
        raise RuntimeError("no memory yet\nand more")


def test_the_words_of_an_array_without_memory():
    x = arrays()
    for name in ("q", "beta"):
        with pytest.raises(ArgumentError, match=(
                f"^{name}: found Tracer of dtype float32, which does not give its memory "
                r"\(RuntimeError: no memory yet\)")) as caught:
            native_kda.chunk_kda(**{**x, name: Tracer(x[name])}, **FLAGS)
        assert isinstance(caught.value.__cause__, RuntimeError)


class OnAnotherDevice(np.ndarray):
    """Memory that DLPack says is of no CPU and no CUDA device."""

    def __dlpack__(self, **how):
        import ctypes

        capsule = np.asarray(self).__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        pointer = get(capsule, b"dltensor")
        ctypes.c_int32.from_address(pointer + 8).value = 10  # kDLROCM
        return capsule


def test_arrays_on_a_device_that_nothing_here_serves():
    x = arrays()
    with pytest.raises(native_kda.UnsupportedError, match="^k: found on device type 10 of DLPack"):
        native_kda.chunk_kda(**{**x, "k": x["k"].view(OnAnotherDevice)}, **FLAGS)


WRONG_ON_HOST = [([0, 70], "found shape"), ([0, 10, 20, 71], "found .* at most"),
                 ([1, 10, 20, 70], "found .* 0 first"), ([0, 20, 10, 70], "found .* not decrease"),
                 ([0, 10, 30, 70], "found .* expected the values of cu_seqlens"),
                 ("list", "found list")]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("host, text", WRONG_ON_HOST)
def test_lengths_on_the_host(kind, host, text, request):
    """As many states as there are chunks: a copy that differs is refused where it can be seen."""
    x = {n: t for n, t in arrays().items() if n != "initial_state"}
    x["cu_seqlens"] = np.array([0, 10, 20, 70])
    wrong = [0, 10, 20, 70] if host == "list" else np.array(host)
    how = dict(FLAGS, return_intermediate_states=True)
    if kind == "torch":
        torch = request.getfixturevalue("torch")
        x = {n: torch.from_numpy(t) for n, t in x.items()}
        wrong = wrong if host == "list" else torch.from_numpy(wrong)
        with torch.inference_mode():
            with pytest.raises(ArgumentError, match=f"^cu_seqlens_cpu: {text}"):
                native_kda.chunk_kda(**x, **how, cu_seqlens_cpu=wrong)
            h = native_kda.chunk_kda(**x, **how, cu_seqlens_cpu=x["cu_seqlens"].int())[2]
    else:
        with pytest.raises(ArgumentError, match=f"^cu_seqlens_cpu: {text}"):
            native_kda.chunk_kda(**x, **how, cu_seqlens_cpu=wrong)
        h = native_kda.chunk_kda(**x, **how, cu_seqlens_cpu=x["cu_seqlens"].astype(np.int32))[2]
    assert h.shape == (1, 3, 4, 16, 8)


def test_is_supported_knows_what_the_call_knows(torch, monkeypatch):
    x = tensors(torch)
    assert native_kda.is_supported(**x, **FLAGS, backend="cpu")[0]
    for backend in ("cuda", "fast", "fla"):
        supported, reason, _ = native_kda.is_supported(**x, **FLAGS, backend=backend)
        assert not supported and reason.startswith("backend")
    how = dict(FLAGS, return_intermediate_states=True)
    supported, reason, _ = native_kda.is_supported(**x, **how)
    assert not supported and "inference_mode" in reason
    with torch.inference_mode():
        assert native_kda.is_supported(**x, **how)[0]
    assert native_kda.is_supported(**arrays(), **how)[0]
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    assert native_kda.is_supported(**x, **FLAGS) == (False, "NATIVE_KDA_DISABLE is set", "")


def test_warmup_takes_dtypes_and_their_names(torch):
    for dtype in (torch.float32, "float32", "torch.float16", torch.bfloat16):
        native_kda.warmup(1, 4, 1, 8, device="cpu", dtype=dtype)
    for wrong in ("bf16", torch.int32, None, 3):
        with pytest.raises(ArgumentError, match="^dtype: found .*, expected one of bfloat16"):
            native_kda.warmup(1, 4, 1, 8, device="cpu", dtype=wrong)


def test_warmup_in_any_mode(torch):
    native_kda.reset_hits()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            native_kda.warmup(1, 4, 1, 8, device="cpu")
    assert native_kda.hits()["cpu_chunk_bwd"] == 2
