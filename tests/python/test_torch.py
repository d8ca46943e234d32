"""torch on the CPU: gradients, autocast, checkpointing, strides, what is refused."""

import gc

import numpy as np
import pytest
import reference
from reference import ratio

import native_kda

torch = pytest.importorskip("torch", reason="torch is not installed")

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def inputs(seed=0, dtype=torch.float32, grad=True, **sizes):
    """Raw inputs with all parameters, as the layers of fla pass them."""
    drawn = reference.numpy_inputs(seed, gate="softplus", **sizes)
    drawn["beta"] = drawn["beta"] * 3 - 1
    wide = ("A_log", "dt_bias", "initial_state")
    tensors = {n: torch.from_numpy(x).to(torch.float32 if n in wide else dtype)
               for n, x in drawn.items()}
    return {n: x.requires_grad_(grad) for n, x in tensors.items()}


def gradients(outputs, x, weights):
    loss = sum((o.double() * w).sum() for o, w in zip(outputs, weights) if o is not None)
    return dict(zip(x, torch.autograd.grad(loss, list(x.values()), allow_unused=True)))


def expected(x, weights, **how):
    copies = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    o, s = reference.torch_recurrence(**copies, **how)
    if weights[1].shape[-2:] != s.shape[-2:] or how.get("v_first"):
        s = s.transpose(-1, -2)
    return (o, s), gradients((o, s), copies, weights)


def weights_of(x, seed=1):
    rng = torch.Generator().manual_seed(seed)
    B, T, HV, V = x["v"].shape
    K = x["q"].shape[-1]
    return (torch.randn(B, T, HV, V, generator=rng, dtype=torch.double),
            torch.randn(B, HV, K, V, generator=rng, dtype=torch.double))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype, limits", [(torch.float32, reference.FP32),
                                           (torch.bfloat16, reference.BF16)])
def test_all_gradients_match_the_recurrence(dtype, limits, lower_bound):
    """GRAD-04, NUM-05, NUM-09, GVA-01, GVA-02: by the arguments of fla."""
    x = inputs(dtype=dtype)
    weights = weights_of(x)
    gate = "softplus" if lower_bound is None else "lower_bound"
    (o, s), wanted = expected(x, weights, gate=gate, lower_bound=lower_bound, l2norm=True,
                              beta_sigmoid=True)
    found_o, found_s = native_kda.chunk_kda(**x, **FLAGS, lower_bound=lower_bound,
                                            output_final_state=True)
    assert found_o.dtype == dtype and found_s.dtype == torch.float32
    assert ratio(o.detach(), found_o.detach().double()) < limits["o"]
    assert ratio(s.detach(), found_s.detach()) < limits["final_state"]
    for name, gradient in gradients((found_o, found_s), x, weights).items():
        assert gradient.dtype == x[name].dtype and gradient.shape == x[name].shape
        assert ratio(wanted[name], gradient.double()) < limits["d" + name], name
    assert native_kda.hits() == {"cpu_chunk_fwd": 1, "cpu_chunk_bwd": 1}


def test_negative_eigenvalues_double_the_sigmoid():
    """BETA-01."""
    x = inputs(T=20)
    weights = weights_of(x)
    (o, _), wanted = expected(x, weights, gate="softplus", l2norm=True, beta_sigmoid=True,
                              double=True)
    found = native_kda.chunk_kda(**x, **FLAGS, allow_neg_eigval=True, output_final_state=True)
    assert ratio(o.detach(), found[0].detach()) < 1e-5
    assert ratio(wanted["beta"], gradients(found, x, weights)["beta"]) < 1e-5


def test_float64_agrees_to_the_last_digits():
    x = {n: t.detach().double().requires_grad_() for n, t in inputs(T=30).items()}
    weights = weights_of(x)
    (o, s), wanted = expected(x, weights, gate="softplus", l2norm=True, beta_sigmoid=True)
    found = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert found[1].dtype == torch.float64
    assert ratio(o.detach(), found[0].detach()) < 1e-12
    for name, gradient in gradients(found, x, weights).items():
        assert ratio(wanted[name], gradient) < 1e-12, name


def test_gradcheck():
    x = {n: t.detach().double().requires_grad_() for n, t in
         inputs(B=1, T=5, H=1, HV=2, K=3, V=2).items()}

    def call(*tensors):
        return native_kda.chunk_kda(**dict(zip(x, tensors)), **FLAGS, output_final_state=True)

    assert torch.autograd.gradcheck(call, tuple(x.values()), nondet_tol=0.0)


@pytest.mark.parametrize("wanted", NAMES)
def test_only_the_gradient_that_is_asked_for(wanted):
    """GRAD-06."""
    x = inputs(T=20)
    every = gradients(native_kda.chunk_kda(**x, **FLAGS, output_final_state=True), x, weights_of(x))
    for name, tensor in x.items():
        tensor.requires_grad_(name == wanted)
    outputs = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    loss = sum((o.double() * w).sum() for o, w in zip(outputs, weights_of(x)))
    loss.backward()
    for name, tensor in x.items():
        assert (tensor.grad is not None) == (name == wanted), name
    assert torch.equal(x[wanted].grad, every[wanted])


def test_states_are_kept_where_the_backward_may_use_them(monkeypatch):
    """disable_recompute: h leaves the forward and enters the backward, and only where there is
    one."""
    prepared = []
    prepare = native_kda._problem.prepare

    def spy(frame, operation, sizes, options, rows, outputs):
        prepared.append((operation, "h" in dict(rows), "h" in [row[0] for row in outputs]))
        return prepare(frame, operation, sizes, options, rows, outputs)

    monkeypatch.setattr(native_kda._problem, "prepare", spy)
    x = inputs(T=150, seed=11)
    weights = weights_of(x)
    how = dict(**FLAGS, output_final_state=True)
    wanted = gradients(native_kda.chunk_kda(**x, **how), x, weights)
    assert prepared == [(0, False, False), (1, False, False)]
    for _ in range(2):  # the second call is remembered, where tensors are read by DLPack's table
        outputs = native_kda.chunk_kda(**x, **how, disable_recompute=True)
        assert len(outputs) == 2
        for name, gradient in gradients(outputs, x, weights).items():
            assert ratio(wanted[name], gradient) < 1e-6, name
    times = 2 if native_kda._torch.reader is None else 1
    assert prepared[2:] == [(0, False, True), (1, True, False)] * times
    with torch.no_grad():
        o, state = native_kda.chunk_kda(**x, **how, disable_recompute=True)
    assert state.shape == outputs[1].shape
    o, state = native_kda.chunk_kda(**x, **FLAGS, disable_recompute=True)
    assert state is None and o.requires_grad


def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    asked = []
    prepare = native_kda._problem.prepare
    monkeypatch.setattr(native_kda._problem, "prepare", lambda *how: asked.append(
        [name for name, _, _ in how[-1]]) or prepare(*how))
    x = inputs(T=21)
    for name, tensor in x.items():
        tensor.requires_grad_(name in ("k", "dt_bias"))
    native_kda.chunk_kda(**x, **FLAGS)[0].sum().backward()
    assert asked == [["o"], ["dk", "ddt_bias"]]


def test_calls_that_differ_are_told_apart(monkeypatch):
    """A call seen before skips its checks: only one with equal layouts and options may."""
    x = inputs(T=40, grad=False)
    first = native_kda.chunk_kda(**x, **FLAGS)[0]
    turned = {n: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t
              for n, t in x.items()}
    turned["initial_state"] = x["initial_state"]
    for _ in range(2):
        assert torch.equal(first, native_kda.chunk_kda(**x, **FLAGS)[0])
        assert torch.equal(first, native_kda.chunk_kda(**turned, **FLAGS)[0])
        assert torch.allclose(first * 2, native_kda.chunk_kda(**x, **FLAGS, scale=0.5)[0])
        assert native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)[1] is not None
        assert not torch.equal(first, native_kda.chunk_kda(**x, **FLAGS, lower_bound=-1.0)[0])
        assert not torch.equal(first, native_kda.chunk_kda(
            **{**x, "initial_state": None}, **FLAGS)[0])
        with pytest.raises(ValueError, match="k: "):
            native_kda.chunk_kda(**{**x, "k": x["k"][:, :39]}, **FLAGS)
        with pytest.raises(ValueError, match="safe range"):
            native_kda.chunk_kda(**x, **FLAGS, lower_bound=-6.0, safe_gate=True)
        with pytest.raises(AssertionError, match="inference_mode"):
            native_kda.chunk_kda(**x, **FLAGS, return_intermediate_states=True)
        assert torch.equal(first, native_kda.chunk_kda(
            **{**x, "A_log": x["A_log"][:, None, None]}, **FLAGS)[0])
    grown = {n: t.clone().requires_grad_() for n, t in x.items()}
    assert native_kda.chunk_kda(**grown, **FLAGS)[0].requires_grad
    # Without a gate its parameters have no say.
    plain = dict(x, g=-x["g"].abs())
    bare = native_kda.chunk_kda(**{**plain, "A_log": None, "dt_bias": None})[0]
    for _ in range(2):
        assert torch.equal(native_kda.chunk_kda(**plain)[0], bare)
    native_kda.reset_hits()
    for choice in ("reference", "cpu"):
        monkeypatch.setenv("KDA_IMPL", choice)
        native_kda.chunk_kda(**x, **FLAGS)
    assert native_kda.hits() == {"reference_chunk_fwd": 1, "cpu_chunk_fwd": 1}


def test_calls_made_before_skip_the_checks(monkeypatch):
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("torch before 2.10: calls are not remembered")
    x = inputs(T=20, grad=False)
    y = {n: t[:, :1] if t.dim() > 2 and n not in ("initial_state", "A_log", "dt_bias") else t
         for n, t in x.items()}
    indices = torch.tensor([1, 0], dtype=torch.int32)

    def calls():
        return (*native_kda.chunk_kda(**x, **FLAGS, output_final_state=True),
                native_kda.chunk_kda(**x, **FLAGS, lower_bound=-1.0, safe_gate=True)[0],
                native_kda.fused_recurrent_kda(**y, **FLAGS)[0],
                *native_kda.fused_recurrent_kda(**{**y, "initial_state": pool.clone()}, **FLAGS,
                                                state_indices=indices))

    pool = x["initial_state"]
    first = calls()
    for name in ("chunk", "recurrent"):
        monkeypatch.setattr(native_kda._calls, name, None)
    assert all(torch.equal(a, b) for a, b in zip(first, calls()))
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    monkeypatch.setattr(native_kda.ops, "_to_fla", lambda function, reason, *how: (reason,) * 2)
    assert calls()[0] == "NATIVE_KDA_DISABLE is set"


def test_options_that_cannot_be_hashed():
    x = inputs(T=20, grad=False)
    want = native_kda.chunk_kda(**x, **FLAGS, scale=0.5)[0]
    for _ in range(2):
        assert torch.equal(want, native_kda.chunk_kda(**x, **FLAGS, scale=np.array(0.5))[0])


def test_results_are_contiguous_whatever_the_inputs():
    """Results are allocated like inputs, whose strides they must not take over."""
    x = inputs(T=20)
    x["v"], x["q"] = (x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("v", "q"))
    x["k"] = x["k"][:, :1].expand(x["k"].shape)
    plain = {n: t.contiguous() for n, t in x.items()}
    weights = torch.randn(x["v"].shape, dtype=x["v"].dtype)
    found = []
    for given in (x, x, plain):  # the second call is a remembered one
        given = {n: t.detach().requires_grad_() for n, t in given.items()}
        o, _ = native_kda.chunk_kda(**given, **FLAGS)
        found.append((o, *torch.autograd.grad(o, list(given.values()), weights)))
    for strided, again, wanted in zip(*found):
        assert strided.is_contiguous() and again.is_contiguous()
        assert torch.equal(strided, wanted) and torch.equal(again, wanted)


def test_what_is_remembered_is_bounded(monkeypatch):
    from native_kda import _autograd

    monkeypatch.setattr(_autograd, "_MOST", 4)
    for T in range(1, 12):
        x = inputs(T=T)
        native_kda.chunk_kda(**x, **FLAGS)[0].sum().backward()
    assert len(_autograd._calls) <= 4 and len(_autograd._gradients) <= 4


def test_without_the_c_functions_of_dlpack(monkeypatch):
    """torch before 2.10."""
    x = inputs(T=20)
    outputs = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    wanted = gradients(outputs, x, weights_of(x))
    monkeypatch.setattr(native_kda._torch, "reader", None)
    again = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert torch.equal(outputs[0], again[0])
    found = gradients(again, x, weights_of(x))
    assert all(torch.equal(wanted[n], found[n]) for n in x)


def test_only_the_state_is_used():
    x = inputs(T=20)
    weights = weights_of(x)
    zero = (torch.zeros_like(weights[0]), weights[1])
    _, wanted = expected(x, zero, gate="softplus", l2norm=True, beta_sigmoid=True)
    _, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    for name, gradient in gradients((None, s), x, weights).items():
        if name != "q":
            assert ratio(wanted[name], gradient) < reference.FP32["d" + name], name


def test_optional_inputs_in_every_combination():
    """GRAD-07: as many gradients as inputs, whatever is absent."""
    for mask in range(8):
        x = inputs(T=10)
        gate = dict(FLAGS)
        if mask & 1:
            x.pop("initial_state")
        if mask & 2:
            x.pop("dt_bias")
        if mask & 4:
            x.pop("A_log")
            gate["lower_bound"] = -5.0
        o, s = native_kda.chunk_kda(**x, **gate)
        assert s is None
        o.sum().backward()
        for name, tensor in x.items():
            assert tensor.grad.shape == tensor.shape, name


def test_packed_sequences_equal_separate_ones():
    """VARLEN-03, VARLEN-11, VARLEN-16."""
    lengths = [5, 0, 64, 17]
    x = inputs(B=1, T=sum(lengths) + 3)
    states = torch.randn(4, 4, 16, 8).requires_grad_()
    x["initial_state"] = states
    cu = torch.tensor([0, 5, 5, 69, 86], dtype=torch.int32)
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, cu_seqlens=cu)
    long = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, cu_seqlens=cu.long())
    assert torch.equal(o, long[0]) and torch.equal(s, long[1])
    assert torch.equal(s[1], states[1]), "an empty sequence keeps its state"
    assert not o[:, 86:].any(), "rows after the last sequence are zero"
    for i, length in enumerate(lengths):
        if not length:
            continue
        begin = int(cu[i])
        part = {n: t[:, begin : begin + length] for n, t in x.items()
                if n in ("q", "k", "v", "g", "beta")}
        part.update(A_log=x["A_log"], dt_bias=x["dt_bias"], initial_state=states[i : i + 1])
        alone, state = native_kda.chunk_kda(**part, **FLAGS, output_final_state=True)
        assert torch.equal(o[:, begin : begin + length], alone)
        assert torch.equal(s[i], state[0])


def test_states_with_v_first():
    """STATE-01."""
    x = inputs(T=20, grad=False)
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    o2, s2 = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, state_v_first=True)
    assert torch.equal(o, o2) and torch.equal(s, s2.transpose(-1, -2))
    with pytest.warns(DeprecationWarning):
        o3, _ = native_kda.chunk_kda(**x, **FLAGS, transpose_state_layout=True)
    assert torch.equal(o, o3)


def test_strided_inputs_are_used_as_they_are():
    """LAYOUT-03, LAYOUT-06: views of one projection, transposed views, odd addresses."""
    B, T, H, K = 2, 33, 2, 16
    fused = torch.randn(B, T, 3 * H * K + H + 1)
    q, k, v = (fused[..., i * H * K : (i + 1) * H * K].unflatten(-1, (H, K)) for i in range(3))
    beta = fused[..., 3 * H * K : 3 * H * K + H].sigmoid()
    g = -torch.rand(B, H, T, K).transpose(1, 2)
    assert not any(t.is_contiguous() for t in (q, k, v, g))
    o, _ = native_kda.chunk_kda(q, k, v, g, beta)
    same, _ = native_kda.chunk_kda(*(t.contiguous() for t in (q, k, v, g, beta)))
    assert torch.equal(o, same)


def test_channels_that_do_not_lie_together_are_copied(monkeypatch):
    """On CUDA, as the Hopper kernels refuse them; here where it can be seen without one."""
    monkeypatch.setattr(native_kda._torch, "COPIES_ON", {"cpu"})
    prepared = []
    prepare = native_kda._problem.prepare
    monkeypatch.setattr(native_kda._problem, "prepare", lambda frame, operation, sizes, options,
                        tensors, *how: prepared.append(dict(tensors)) or prepare(
                            frame, operation, sizes, options, tensors, *how))
    x = inputs(T=23)
    weights = torch.randn(x["v"].shape).transpose(1, 3).contiguous().transpose(1, 3)
    results = []
    for names in ((), ("q", "v", "g"), ("q", "v", "g")):
        y = {n: t.detach().requires_grad_() for n, t in x.items()}
        given = {n: t.transpose(1, 3).contiguous().transpose(1, 3) if n in names else t
                 for n, t in y.items()}
        o, _ = native_kda.chunk_kda(**given, **FLAGS)
        results.append((o, *torch.autograd.grad(o, list(y.values()), weights)))
    assert len(prepared) in (3, 6), "a call made before is not prepared again"
    assert all(call[n].stride(-1) == 1 for call in prepared for n in call if n in "qkvgdo")
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given, **FLAGS)[0], results[0][0])
    assert all(call[n].stride(-1) == 1 for call in prepared for n in call if n in "qkvg")


def test_expanded_gradients():
    """Those of sums. What cannot take them must not run for that (strides of 0 on Hopper)."""
    x = inputs(T=12)
    o, _ = native_kda.chunk_kda(**x, **FLAGS)
    o.sum().backward()
    first = {n: t.grad.clone() for n, t in x.items()}
    for t in x.values():
        t.grad = None
    o, _ = native_kda.chunk_kda(**x, **FLAGS)
    o.backward(torch.ones_like(o))
    assert all(torch.equal(first[n], t.grad) for n, t in x.items())


def test_tensors_that_are_not_what_their_memory_holds():
    """The imaginary part of a conjugate is negated when it is read; what a function transform
    leaves behind has no memory of its own."""
    x = inputs(T=20, grad=False)

    def negated(t):
        view = torch.complex(torch.zeros_like(t), -t).conj().imag
        assert view.is_neg() and torch.equal(view, t)
        return view

    left = []
    torch.func.grad(lambda k: left.append(k * 1.0) or k.sum())(x["k"])
    do = weights_of(x)[0].float()
    results = []
    for changes in ({}, {"v": negated(x["v"])}, {"k": left[0]}):
        for wanted in (None, "q"):
            y = {n: t.clone().requires_grad_() if n == wanted else t
                 for n, t in {**x, **changes}.items()}
            o, _ = native_kda.chunk_kda(**y, **FLAGS)
            given = negated(do) if changes else do
            results.append((o, *(torch.autograd.grad(o, y["q"], given) if wanted else ())))
    for i in (2, 3, 4, 5):
        assert all(torch.equal(a, b) for a, b in zip(results[i % 2], results[i]))
    g = -x["g"].abs()
    assert torch.equal(*map(native_kda.stages.gate_cumsum, (negated(g), g)))


def test_second_derivative_is_an_error():
    x = inputs(T=4)
    o, _ = native_kda.chunk_kda(**x, **FLAGS)
    (gradient,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|differentiate twice"):
        gradient.sum().backward()


def test_autocast_aligns_the_dtypes():
    x = inputs(T=12, grad=False)
    x["v"] = x["v"].bfloat16()
    with pytest.raises(ValueError, match="v: found dtype bf16"):
        native_kda.chunk_kda(**x, **FLAGS)
    x["q"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, again = (native_kda.chunk_kda(**x, **FLAGS)[0] for _ in range(2))
    assert o.dtype == torch.bfloat16 and torch.equal(o, again)
    o.float().sum().backward()
    assert x["q"].grad.dtype == torch.float32
    # Nothing is cast where it need not be.
    x["v"] = x["v"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert native_kda.chunk_kda(**x, **FLAGS)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_autocast_casts_what_torch_casts(dtype):
    x = inputs(T=12, grad=False)
    x["q"] = x["q"].to(dtype)
    with (torch.autocast("cpu", dtype=torch.bfloat16),
          pytest.raises(ValueError, match=r"^[qk]: found dtype")):
        native_kda.chunk_kda(**x, **FLAGS)


def test_gradients_are_like_what_was_given():
    """chunk_kda_backward, where autocast or the shape of A_log makes something else of the call."""
    x = inputs(T=12, grad=False)
    x["q"], x["A_log"] = x["q"].bfloat16(), x["A_log"].reshape(1, 1, -1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = native_kda.chunk_kda(**x, **FLAGS)
        found = native_kda.chunk_kda_backward(torch.ones_like(o), **x, **FLAGS)
    for name, t in x.items():
        gradient = found[f"d{name}"]
        assert (gradient.dtype, gradient.shape) == (t.dtype, t.shape), name
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = native_kda.chunk_kda(**leaves, **FLAGS)
    o.sum().backward()
    assert all(torch.equal(found[f"d{n}"], t.grad) for n, t in leaves.items())


def test_a_limit_that_the_backward_alone_misses(monkeypatch):
    """The call says so, when there is still another way, and each time; not where no gradient is
    wanted."""
    x = inputs(T=300, K=32, V=48)
    plain = {n: t.detach() for n, t in x.items()}
    monkeypatch.setenv("KDA_WORKSPACE_LIMIT", "300000")
    for _ in range(2):
        assert native_kda.chunk_kda(**plain, **FLAGS)[0].isfinite().all()
        for kept in (False, True):
            with pytest.raises(native_kda.UnsupportedError, match="chunk_bwd: workspace_limit"):
                native_kda.chunk_kda(**x, **FLAGS, disable_recompute=kept, backend="cpu")
    monkeypatch.setattr(native_kda.ops, "_to_fla", lambda function, reason, *how: (reason,))
    assert "chunk_bwd: workspace_limit" in native_kda.chunk_kda(**x, **FLAGS)[0]
    monkeypatch.setenv("KDA_WORKSPACE_LIMIT", "100000000")
    for kept in (False, True):
        native_kda.chunk_kda(**x, **FLAGS, disable_recompute=kept)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gate_parameters_of_another_dtype(dtype):
    """DIM-08: taken as they are, their gradients come in the same dtype."""
    x = inputs(T=30)
    for name in ("A_log", "dt_bias"):
        x[name] = x[name].detach().to(dtype).requires_grad_()
    weights = weights_of(x)
    (o, _), wanted = expected(x, weights, gate="softplus", l2norm=True, beta_sigmoid=True)
    found = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert ratio(o.detach(), found[0].detach()) < 1e-5
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for name, gradient in gradients(found, x, weights).items():
        assert gradient.dtype == x[name].dtype
        assert ratio(wanted[name], gradient.double()) < limit, name


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    x = inputs(T=40)
    o, _ = native_kda.chunk_kda(**x, **FLAGS)
    wanted = torch.autograd.grad(o.square().sum(), list(x.values()))

    def layer(*tensors):
        return native_kda.chunk_kda(**dict(zip(x, tensors)), **FLAGS)[0]

    for reentrant in (False, True):
        o = checkpoint(layer, *x.values(), use_reentrant=reentrant)
        found = torch.autograd.grad(o.square().sum(), list(x.values())) if not reentrant else None
        if reentrant:
            o.square().sum().backward()
            found = [t.grad for t in x.values()]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found))


def test_inputs_are_not_changed_and_not_shared():
    """STATE-05."""
    x = inputs(T=40, grad=False)
    before = {n: t.clone() for n, t in x.items()}
    first = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    second = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(t, before[n]) for n, t in x.items())
    assert first[0].data_ptr() != x["v"].data_ptr()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_final_state_is_none_exactly_when_not_asked_for(packed, with_state):
    """STATE-03."""
    x = inputs(B=1, T=8, grad=False)
    cu = torch.tensor([0, 8]) if packed else None
    _, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=with_state, cu_seqlens=cu)
    assert (s is None) != with_state


def test_intermediate_states():
    """PAGED-06."""
    x = inputs(T=130, grad=False)
    with pytest.raises(AssertionError, match="inference_mode"):
        native_kda.chunk_kda(**x, **FLAGS, return_intermediate_states=True)
    with torch.inference_mode():
        o, s, h = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True,
                                       return_intermediate_states=True)
        assert h.shape == (2, 3, 4, 16, 8) and h.dtype == o.dtype
        prefix = {n: t[:, :128] if t.dim() > 2 and n != "initial_state" else t
                  for n, t in x.items()}
        _, s128 = native_kda.chunk_kda(**prefix, **FLAGS, output_final_state=True)
        assert torch.allclose(h[:, 2], s128, atol=1e-5)
        packed = {n: t[:1] if t.dim() > 2 else t for n, t in x.items()}
        packed.pop("initial_state")
        cu = torch.tensor([0, 65, 65, 130])
        v_first = {n: t for n, t in packed.items()}
        _, _, h = native_kda.chunk_kda(**v_first, **FLAGS, cu_seqlens=cu, state_v_first=True,
                                       return_intermediate_states=True)
        assert h.shape == (1, 4, 4, 8, 16)


def test_decode_continues_the_prefill():
    """DECODE-01, DECODE-02."""
    x = inputs(T=40, grad=False)
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    token = ("q", "k", "v", "g", "beta")
    head = {n: t[:, :30] if n in token else t for n, t in x.items()}
    _, state = native_kda.chunk_kda(**head, **FLAGS, output_final_state=True)
    for t in range(30, 40):
        step = {n: x[n][:, t : t + 1] for n in token}
        out, state = native_kda.fused_recurrent_kda(
            **step, A_log=x["A_log"], dt_bias=x["dt_bias"], initial_state=state,
            output_final_state=True, **FLAGS)
        assert ratio(o[:, t : t + 1], out) < 1e-5
    assert ratio(s, state) < 1e-5


def test_pool_of_states():
    """PAGED-01: -1 skips a sequence, and slots that are not named keep their contents."""
    B, H, K, V = 3, 2, 16, 8
    x = {n: t for n, t in inputs(B=B, T=1, H=H, HV=H, K=K, V=V, grad=False).items()
         if n != "initial_state"}
    pool = torch.randn(6, H, K, V)
    before = pool.clone()
    indices = torch.tensor([4, -1, 1], dtype=torch.int32)
    version = pool._version
    o, returned = native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=pool,
                                                 state_indices=indices)
    assert returned is pool and pool._version > version
    assert not o[1].any()
    for i, slot in ((0, 4), (2, 1)):
        one = {n: t[i : i + 1] if t.dim() > 1 else t for n, t in x.items()}
        alone, state = native_kda.fused_recurrent_kda(
            **one, **FLAGS, initial_state=before[slot : slot + 1], output_final_state=True)
        assert torch.equal(o[i], alone[0]) and torch.equal(pool[slot], state[0])
    for slot in (0, 2, 3, 5):
        assert torch.equal(pool[slot], before[slot])


def test_inference_mode():
    """As servers call it: tensors that have no version to count."""
    with torch.inference_mode():
        x = inputs(B=2, T=1, grad=False)
        states = x.pop("initial_state")
        pool = states.repeat(2, 1, 1, 1)
        want, after = native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=states,
                                                     output_final_state=True)
        indices = torch.tensor([3, 0], dtype=torch.int32)
        for _ in range(2):
            pool[[3, 0]] = states
            o, _ = native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=pool,
                                                  state_indices=indices)
            assert torch.equal(o, want) and torch.equal(pool[[3, 0]], after)


def test_accepted_tokens_alone_change_the_state():
    """PAGED-04: a draft of four tokens of which 0, 2 and 4 are accepted."""
    x = inputs(B=3, T=4, grad=False)
    states, token = x.pop("initial_state"), ("q", "k", "v", "g", "beta")
    accepted = torch.tensor([0, 2, 4], dtype=torch.int32)
    after = states.clone()
    for _ in range(2):  # the second call is one that was seen before
        after.copy_(states)
        o, same = native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=after,
                                                 num_accepted=accepted)
        assert same is after
        for i, count in enumerate(accepted.tolist()):
            first = {n: t[i : i + 1, :count] if n in token else t for n, t in x.items()}
            want, state = native_kda.fused_recurrent_kda(
                **first, **FLAGS, initial_state=states[i : i + 1], output_final_state=True)
            assert torch.equal(state[0], after[i]) and torch.equal(want[0], o[i, :count])
            assert not o[i, count:].any()
    with pytest.raises(ValueError, match="num_accepted"):
        native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=after,
                                       num_accepted=torch.tensor([5, 0, 0], dtype=torch.int32))


def test_errors_are_those_of_fla():
    """VARLEN-12, STATE-07: the classes that fla raises, with the argument named."""
    x = inputs(T=8, grad=False)
    cases = [
        (dict(chunk_size=16), ValueError, "`chunk_size` must be either 32 or 64"),
        (dict(cu_seqlens=torch.tensor([0, 8])), ValueError, "batch size"),
        (dict(A_log=None), ValueError, "`A_log` must be"),
        (dict(safe_gate=True), ValueError, "`lower_bound` must be"),
        (dict(safe_gate=True, lower_bound=-6.0), ValueError, "safe range"),
        (dict(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True), ValueError, "requires"),
        (dict(k=x["k"][:, :4]), AssertionError, "k: "),
        (dict(g=x["g"][..., 0]), AssertionError, "g: "),
        (dict(beta=x["beta"][..., None]), AssertionError, "beta: "),
        (dict(v=x["v"][:, :, :3]), AssertionError, "multiple"),
        (dict(initial_state=x["initial_state"].bfloat16()), AssertionError, "float32"),
        (dict(q=torch.zeros(2, 8, 2, 300), k=torch.zeros(2, 8, 2, 300)), AssertionError, "256"),
        (dict(state_v_first=True, transpose_state_layout=True), ValueError, "state_v_first"),
    ]
    for change, error, text in cases:
        with pytest.raises(error, match=text):
            native_kda.chunk_kda(**{**x, **FLAGS, **change})
    one = {n: t[:1] if t.dim() > 2 else t for n, t in x.items()}
    with pytest.raises(ValueError, match="states"):
        native_kda.chunk_kda(**{**one, **FLAGS, "cu_seqlens": torch.tensor([0, 4, 8])})
    with pytest.raises(ValueError, match="cu_seqlens"):
        native_kda.chunk_kda(**{**one, **FLAGS, "cu_seqlens": torch.tensor([0, 9])})
    with pytest.raises(native_kda.UnsupportedError, match="surprise=3"):
        native_kda.chunk_kda(**x, **FLAGS, surprise=3, backend="cpu")
    with pytest.raises(ValueError, match="backend"):
        native_kda.chunk_kda(**x, **FLAGS, backend="cuda")


def test_meta_tensors_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = {n: t.to("meta") for n, t in inputs(T=8).items()}
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert o.is_meta and s.shape == (2, 4, 16, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, s = native_kda.chunk_kda(**inputs(T=8), **FLAGS, output_final_state=True)
        assert o.shape == (2, 8, 4, 8)


def test_nothing_is_kept():
    """MEM-01. Plans hold no tensor: after many shapes all memory is given back."""
    x = inputs(T=64)
    for T in range(1, 65):
        part = {n: t[:, :T] if t.dim() > 2 and n != "initial_state" else t for n, t in x.items()}
        native_kda.chunk_kda(**part, **FLAGS)[0].sum().backward()
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] == (8,)]
    assert len(alive) < 20


def test_threads_at_the_same_time():
    from concurrent.futures import ThreadPoolExecutor

    x = inputs(T=50, grad=False)
    expected_o = native_kda.chunk_kda(**x, **FLAGS)[0]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: native_kda.chunk_kda(**x, **FLAGS)[0], range(32)))
    assert all(torch.equal(expected_o, o) for o in results)


def test_is_supported_is_what_the_call_does():
    x = inputs(T=8)
    assert native_kda.is_supported(**x, **FLAGS, backward=True) == (
        True, "", "cpu_chunk_fwd, cpu_chunk_bwd")
    ok, reason, _ = native_kda.is_supported(**x, **FLAGS, cp_context=object())
    assert not ok and "context parallel" in reason
    ok, reason, _ = native_kda.is_supported(**{**x, "g": x["g"][..., 0]}, **FLAGS)
    assert not ok and reason.startswith("g: ")


def test_warmup_runs_forward_and_backward():
    native_kda.warmup(1, 8, 2, 16, device="cpu", **FLAGS)
    assert native_kda.hits() == {"cpu_chunk_fwd": 1, "cpu_chunk_bwd": 1}


def test_numpy_and_torch_agree_to_the_bit():
    x = inputs(T=20, grad=False)
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    arrays = {n: t.numpy() for n, t in x.items()}
    o2, s2 = native_kda.chunk_kda(**arrays, **FLAGS, output_final_state=True)
    assert np.array_equal(o.numpy(), o2) and np.array_equal(s.numpy(), s2)
