"""Derivatives that there are not: an error wherever one is asked for, never a wrong number."""

import contextlib
import logging

import pytest
import reference

import native_kda

torch = pytest.importorskip("torch", reason="torch is not installed")
forward_ad = pytest.importorskip("torch.autograd.forward_ad", reason="no forward mode")

TWICE = "once_differentiable|differentiate twice"


def inputs(grad=True, T=6, dtype=torch.float64):
    drawn = reference.numpy_inputs(B=1, T=T, H=1, HV=2, K=4, V=3)
    return {n: torch.from_numpy(x).to(dtype).requires_grad_(grad) for n, x in drawn.items()
            if n != "initial_state"}


def test_second_derivatives_of_a_sum():
    """The gradient of o needs none then; the gradients must all the same."""
    for _ in range(2):
        x = inputs()
        y = native_kda.chunk_kda(**x)[0].sum()
        (dk,) = torch.autograd.grad(y, x["k"], create_graph=True)
        (plain,) = torch.autograd.grad(y, x["k"], retain_graph=True)
        assert torch.equal(dk, plain), "once it may be asked for"
        penalty = y + dk.square().sum()
        for wanted in ([x["v"]], [x["q"]], list(x.values())):
            with pytest.raises(RuntimeError, match=TWICE):
                torch.autograd.grad(penalty, wanted, retain_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match=TWICE):
            penalty.backward()


def test_second_derivatives_of_one_argument_for_all():
    q = torch.randn(1, 6, 1, 4, dtype=torch.float64, requires_grad=True)
    f = native_kda.chunk_kda(q, q, q, -q * q, q[..., 0].sigmoid(), use_qk_l2norm_in_kernel=True)
    (first,) = torch.autograd.grad(f[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("name", ["q", "v", "g", "beta"])
def test_forward_mode(name):
    """Also where nothing requires grad, and where the call was made before."""
    for grad in (False, True):
        x = inputs(grad)
        for function in (native_kda.chunk_kda, native_kda.fused_recurrent_kda):
            with torch.no_grad():
                function(**x)
            with forward_ad.dual_level():
                dual = {**x, name: forward_ad.make_dual(x[name].detach(), torch.ones_like(x[name]))}
                with pytest.raises(native_kda.ArgumentError, match=f"^{name}: found a tangent"):
                    function(**dual)
                function(**x)

        def of_one(tensor):
            return native_kda.chunk_kda(**{**x, name: tensor})[0]

        with pytest.raises(native_kda.ArgumentError, match=f"^{name}: found a tangent"):
            torch.func.jvp(of_one, (x[name].detach(),), (x[name].detach(),))


@pytest.mark.filterwarnings("ignore")
def test_forward_mode_of_programs():
    """The operators themselves refuse, whatever calls them."""
    x = tuple(t.detach() for t in inputs(dtype=torch.float32).values())
    options = (0, 0.0, None, False, False, False, False, 64)
    none = (None,) * 4
    raw = torch.ops.native_kda

    def pool(*tensors):
        states = torch.zeros(1, 2, 4, 3)
        return raw.recurrent_kda_pool(*tensors, None, None, states, None, None, None, *options)

    for call in (
        lambda *y: native_kda.chunk_kda(*y)[0],
        lambda *y: native_kda.fused_recurrent_kda(*y)[0],
        lambda *y: native_kda.chunk_kda_backward(x[2], *y)["dv"],
        lambda *y: native_kda.stages.gate_cumsum(y[3] * y[0]),
        lambda *y: raw.chunk_kda(*y, *none, *options, False)[0],
        lambda *y: raw.chunk_kda_backward(x[2], None, *y, *none, *options, [1] * 8)[0],
        lambda *y: raw.recurrent_kda(*y, *none, *options, False)[0],
        pool,
    ):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager")
        programs = [call, compiled, torch.jit.trace(call, x, check_trace=False)]
        compiled(*x)
        for program in programs:
            with forward_ad.dual_level(), pytest.raises(Exception, match="found a tangent"):
                program(forward_ad.make_dual(x[0], x[0]), *x[1:])
        for function in (call, torch.vmap(call)):
            y = x if function is call else tuple(t[None] for t in x)
            if call is not pool:  # which has no batching rule
                with pytest.raises(native_kda.ArgumentError, match="found a tangent"):
                    torch.func.jvp(lambda q: function(q, *y[1:]), y[:1], y[:1])


def test_function_transforms_that_differentiate():
    x = tuple(t.detach() for t in inputs().values())
    for name, call in {
        "chunk_kda": lambda q: native_kda.chunk_kda(q, *x[1:])[0],
        "fused_recurrent_kda": lambda q: native_kda.fused_recurrent_kda(q, *x[1:])[0],
        "chunk_kda_backward": lambda q: native_kda.chunk_kda_backward(x[2], q, *x[1:])["dv"],
        "stages.gate_cumsum": native_kda.stages.gate_cumsum,
    }.items():
        asked = f"torch.func .* differentiates by, for which {name} has no rule"
        for ask in (
            lambda q: torch.func.grad(lambda a: call(a).sum())(q),
            lambda q: torch.func.grad(lambda a: torch.vmap(call)(a[None]).sum())(q),
            lambda q: torch.vmap(torch.func.grad(lambda a: call(a).sum()))(q[None]),
            torch.func.jacrev(call),
        ):
            with pytest.raises(native_kda.ArgumentError, match=asked):
                ask(x[0])
        left = torch.func.grad(lambda a: (a * call(x[0]).sum()).sum())(x[0])
        assert torch.equal(left, call(x[0]).sum().expand_as(left)), "of something else"


def test_gradients_through_vmap():
    x = inputs()
    pair = torch.stack([x["q"].detach(), 2 * x["q"].detach()]).requires_grad_()
    rest = tuple(x.values())[1:]

    def call(q):
        return native_kda.chunk_kda(q, *rest, use_qk_l2norm_in_kernel=True)[0].square().sum()

    found = torch.autograd.grad(torch.vmap(call)(pair).sum(), [pair, x["k"]])
    wanted = torch.autograd.grad(call(pair[0]) + call(pair[1]), [pair, x["k"]])
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted))


def test_stages_and_the_backward_have_no_derivative():
    """They compute; to differentiate what they give is an error."""
    x = inputs()
    q, k, v, g, beta = x.values()
    gamma = native_kda.stages.gate_cumsum(g.detach())
    for name, call in {
        "chunk_kda_backward": lambda: native_kda.chunk_kda_backward(v.detach(), **x)["dq"],
        "stages.gate_cumsum": lambda: native_kda.stages.gate_cumsum(g),
        "stages.intra": lambda: native_kda.stages.intra(q, k, beta, gamma)[1],
    }.items():
        result = call()
        with torch.no_grad():
            plain = call()
        assert torch.equal(result, plain) and not plain.requires_grad
        with pytest.raises(RuntimeError, match=f"^{name}: trying to differentiate"):
            result.sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
def test_traces_hold_the_call(grad):
    """Not its result as a constant."""
    names = tuple(inputs())

    def call(*tensors):
        return native_kda.chunk_kda(**dict(zip(names, tensors)), output_final_state=True)

    def step(*tensors):
        return native_kda.fused_recurrent_kda(**dict(zip(names, tensors)), output_final_state=True)

    for function in (call, step):
        first = inputs(grad, dtype=torch.float32)
        function(*first.values())
        traced = torch.jit.trace(function, tuple(first.values()), check_trace=False)
        x = {n: (0.5 * t).detach().requires_grad_(grad) for n, t in
             inputs(T=9, dtype=torch.float32).items()}
        found, wanted = traced(*x.values()), function(*x.values())
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    if grad:
        pairs = [torch.autograd.grad(f(*x.values())[0].square().sum(), list(x.values()))
                 for f in (call, torch.jit.trace(call, tuple(first.values()), check_trace=False))]
        assert all(torch.equal(a, b) for a, b in zip(*pairs))


def test_decoding_says_that_it_has_no_gradients(monkeypatch, caplog):
    monkeypatch.setattr(native_kda._log, "_said", set())
    x = inputs(T=1, dtype=torch.float32)
    bare = {n: t.detach() for n, t in x.items()}
    with caplog.at_level(logging.WARNING, logger="native_kda"):
        native_kda.fused_recurrent_kda(**bare)
        with torch.no_grad():
            native_kda.fused_recurrent_kda(**x)
        assert not caplog.records
        for _ in range(2):
            assert not native_kda.fused_recurrent_kda(**x)[0].requires_grad
    assert [r.getMessage()[:40] for r in caplog.records] == [
        "fused_recurrent_kda has no gradients: it"]


def test_states_that_require_grad_are_not_updated_in_place():
    x = inputs(False, T=1, dtype=torch.float32)
    states = torch.randn(1, 2, 4, 3, requires_grad=True)
    before = states.detach().clone()
    indices = torch.zeros(1, dtype=torch.int32)
    for how in (dict(in_place=True), dict(state_indices=indices), dict(num_accepted=indices)):
        for given in (states, states * 1):
            for _ in range(2):
                with torch.no_grad():  # remembered
                    native_kda.fused_recurrent_kda(**x, initial_state=given.detach().clone(), **how)
                with pytest.raises(ValueError, match="^initial_state: .*requires grad"):
                    native_kda.fused_recurrent_kda(**x, initial_state=given, **how)
            torch._dynamo.reset()
            with pytest.raises(Exception, match="initial_state: .*requires grad"):
                torch.compile(native_kda.fused_recurrent_kda, backend="aot_eager")(
                    **x, initial_state=given, **how)
            assert torch.equal(given, before)
    with torch.no_grad():
        native_kda.fused_recurrent_kda(**x, initial_state=states, in_place=True)
    assert not torch.equal(states, before)


def test_a_backward_through_states_that_were_updated_is_an_error():
    """Whoever updates them: a direct call, the operator, a compiled program."""
    x = tuple(t.detach() for t in inputs(T=1, dtype=torch.float32).values())
    options = (0, 0.0, None, False, False, False, False, 64)

    def call(states):
        return native_kda.fused_recurrent_kda(*x, initial_state=states, in_place=True)[0]

    def operator(states):
        more = (None, None, states, None, None, None, *options)
        return torch.ops.native_kda.recurrent_kda_pool(*x, *more)

    torch._dynamo.reset()
    for update in (call, operator, torch.compile(call, backend="aot_eager")):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            states = torch.zeros(1, 2, 4, 3)
            product = (torch.ones(1, requires_grad=True) * states).sum()
            with mode():
                update(states)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def test_states_of_inference_mode_are_updated_there_alone():
    x = {n: t.detach() for n, t in inputs(T=1, dtype=torch.float32).items()}
    with torch.inference_mode():
        states = torch.zeros(1, 2, 4, 3)
    indices = torch.zeros(1, dtype=torch.int32)
    for how in (dict(in_place=True), dict(state_indices=indices), dict(num_accepted=indices)):
        for mode in (torch.no_grad, torch.enable_grad):
            native_kda.fused_recurrent_kda(**x, initial_state=states.clone(), **how)  # remembered
            for watched in (contextlib.nullcontext, forward_ad.dual_level):
                with mode(), watched(), pytest.raises(ValueError, match="^initial_state: .*mode"):
                    native_kda.fused_recurrent_kda(**x, initial_state=states, **how)
    assert not states.any()
    with torch.inference_mode():
        native_kda.fused_recurrent_kda(**x, initial_state=states, in_place=True)
    assert states.any()
