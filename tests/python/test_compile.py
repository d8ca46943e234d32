"""torch.compile and torch.library, on the CPU with the eager backends of the compiler."""

import pytest
import reference

import native_kda

torch = pytest.importorskip("torch", reason="torch is not installed")

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
FUNCTIONS = ("test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic")


def inputs(T=20, B=2, grad=True, **sizes):
    drawn = reference.numpy_inputs(gate="softplus", B=B, T=T, **sizes)
    return {n: torch.from_numpy(x).requires_grad_(grad) for n, x in drawn.items()}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(compiled, x, **options):
    """o and all gradients, eager and compiled."""
    results = []
    for function in (native_kda.chunk_kda, compiled):
        o, s = function(**x, **FLAGS, **options)
        loss = o.square().sum() + (s.square().sum() if s is not None else 0)
        results.append((o, *torch.autograd.grad(loss, list(x.values()))))
    return results


@pytest.mark.parametrize("options", [{}, dict(output_final_state=True), dict(lower_bound=-5.0),
                                     dict(state_v_first=True, scale=0.3)])
def test_whole_graph_forward_and_backward(options):
    x = inputs(**(dict(K=8, V=8) if options.get("state_v_first") else {}))
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend="aot_eager")
    eager, traced = both(compiled, x, **options)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced))


def test_no_graph_break_in_a_module():
    """GRAPH-03."""
    x = inputs(grad=False)
    report = torch._dynamo.explain(lambda **y: native_kda.chunk_kda(**y, **FLAGS)[0] * 2)(**x)
    assert report.graph_break_count == 0


def test_lengths_are_dynamic():
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, dynamic=True,
                             backend="aot_eager")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    counted = torch.compile(native_kda.chunk_kda, fullgraph=True, dynamic=True, backend=counter)
    for T in (20, 33, 64, 130):
        eager, traced = both(compiled, inputs(T))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced))
        counted(**inputs(T), **FLAGS)
    assert counter.frame_count == 1, "one graph serves every length"


def test_second_signature():
    """GRAPH-01: other sizes, bounds and states after the first."""
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend="aot_eager")
    for H, T, bound, state in ((2, 16, -5.0, True), (4, 18, -1.0, True), (4, 18, None, False)):
        x = inputs(T, H=H)
        if not state:
            x.pop("initial_state")
        eager, traced = both(compiled, x, lower_bound=bound)
        assert all(torch.equal(a, b) for a, b in zip(eager, traced))


def test_options_that_are_symbols():
    """Numbers that change become symbols of the trace: nothing that checks them breaks it."""
    x = torch.randn(1, 70, 2, 16)
    g, beta = -torch.rand(1, 70, 2, 16), torch.rand(1, 70, 2)

    def call(x, scale, chunk_size, with_state):
        return native_kda.chunk_kda(x, x, x, g, beta, scale=scale, chunk_size=chunk_size,
                                    output_final_state=with_state)[0]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for options in ((0.3, 64, True), (0.4, 64, None), (0.5, 32, 1), (2, 32, 0), (None, 64, False)):
        assert torch.equal(compiled(x, *options), call(x, *options)), options


def test_packed_and_decode():
    x = inputs(30, B=1)
    x["initial_state"] = torch.randn(3, 4, 16, 8).requires_grad_()
    cu = torch.tensor([0, 7, 7, 30])
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend="aot_eager")
    eager, traced = both(compiled, x, cu_seqlens=cu, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced))

    y = {n: t.detach() for n, t in inputs(1).items()}
    decode = torch.compile(native_kda.fused_recurrent_kda, fullgraph=True, backend="aot_eager")
    a = native_kda.fused_recurrent_kda(**y, **FLAGS, output_final_state=True)
    b = decode(**y, **FLAGS, output_final_state=True)
    assert all(torch.equal(s, t) for s, t in zip(a, b))
    pool = torch.randn(5, 4, 16, 8)
    indices = torch.tensor([3, 1], dtype=torch.int32)
    y["initial_state"] = pool.clone()
    a = native_kda.fused_recurrent_kda(**y, **FLAGS, state_indices=indices)
    y["initial_state"] = pool.clone()
    b = decode(**y, **FLAGS, state_indices=indices)
    assert all(torch.equal(s, t) for s, t in zip(a, b))


def call_of(x, cu=None, final=True):
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    return (*(x.get(n) for n in names), cu, 1, 0.0, None, True, True, False, False, 64, final)


@pytest.mark.parametrize("final", [True, False])
def test_opcheck_forward(final):
    arguments = call_of(inputs(10), final=final)
    torch.library.opcheck(torch.ops.native_kda.chunk_kda, arguments, test_utils=FUNCTIONS)


def test_opcheck_others():
    x = inputs(10, grad=False)
    *rest, _ = call_of(x)
    do, dh = torch.randn(2, 10, 4, 8), torch.randn(2, 4, 16, 8)
    torch.library.opcheck(torch.ops.native_kda.chunk_kda_backward,
                          (do, dh, *rest, [True] * 4 + [False] + [True] * 3),
                          test_utils=FUNCTIONS)
    torch.library.opcheck(torch.ops.native_kda.recurrent_kda, call_of(x), test_utils=FUNCTIONS)
    pool = torch.randn(5, 4, 16, 8)
    indices = torch.tensor([3, 1], dtype=torch.int32)
    y = inputs(1, grad=False)
    tensors = [y[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    torch.library.opcheck(torch.ops.native_kda.recurrent_kda_pool,
                          (*tensors, pool, None, indices, None, *rest[9:]), test_utils=FUNCTIONS)


def test_second_derivative_of_the_operator_is_an_error():
    x = inputs(4)
    o, _ = torch.ops.native_kda.chunk_kda(*call_of(x))
    (gradient,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        gradient.sum().backward()


def test_inside_a_compiled_layer_with_autocast():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 4 * 2 * 16)

        def forward(self, x):
            q, k, v, g = self.proj(x).unflatten(-1, (4, 2, 16)).unbind(-3)
            return native_kda.chunk_kda(q, k, v, -g.square(), g[..., 0].sigmoid())[0]

    layer = Layer()
    x = torch.randn(2, 30, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            a, b = layer(x), compiled(x)
        assert a.dtype == (dtype or torch.float32) and torch.equal(a, b)
        b.float().sum().backward()


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_mixed_dtypes(name):
    """Under autocast they are aligned as in an eager call; otherwise the error names the tensor."""
    x = inputs(20, grad=False)
    x["q"] = x["q"].bfloat16()
    function = getattr(native_kda, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = function(**x, **FLAGS)[0], compiled(**x, **FLAGS)[0]
    assert a.dtype == torch.bfloat16 and torch.equal(a, b)
    with pytest.raises(ValueError, match="k: found dtype fp32, expected bf16 as q"):
        compiled(**x, **FLAGS)


def test_the_switch_reaches_operators(monkeypatch):
    """What was compiled before and torch.ops do not run either; gradients of what ran do."""
    x = inputs(10)
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend="aot_eager")
    stage = torch.compile(native_kda.stages.gate_cumsum, fullgraph=True, backend="aot_eager")
    o, _ = compiled(**x, **FLAGS)
    stage(x["g"].detach())
    monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")
    tensors = [t.detach().clone() for t in call_of(x)[:8]]
    rest, indices = call_of(x)[9:], torch.tensor([1, 0], dtype=torch.int32)
    ops = torch.ops.native_kda
    calls = {
        "chunk_kda": lambda: compiled(**x, **FLAGS),
        "gate_cumsum": lambda: stage(x["g"].detach()),
        "recurrent_kda": lambda: ops.recurrent_kda(*tensors, None, *rest),
        "recurrent_kda_pool": lambda: ops.recurrent_kda_pool(
            *(t[:, :1] for t in tensors[:5]), *tensors[5:], None, indices, None, *rest[:-1]),
    }
    for name, call in calls.items():
        with pytest.raises(native_kda.UnsupportedError, match=f"{name}: NATIVE_KDA_DISABLE is set"):
            call()
    o.sum().backward()
    assert x["q"].grad is not None
    monkeypatch.delenv("NATIVE_KDA_DISABLE")
    for call in calls.values():
        call()


@pytest.mark.parametrize(("how", "reason"), [
    (dict(backend="fla"), "backend='fla'"), (dict(cp_context=3), "cp_context: context parallelism"),
    ({}, "NATIVE_KDA_DISABLE is set")])
def test_a_call_that_goes_to_fla_breaks_the_graph(how, reason, monkeypatch):
    x = inputs(10, grad=False)
    monkeypatch.setattr(native_kda.fla, "original",
                        lambda function: lambda q, **call: (q * 2, function))
    if not how:
        monkeypatch.setenv("NATIVE_KDA_DISABLE", "1")

    def call(x):
        return native_kda.chunk_kda(**x, **FLAGS, **how)[0] + 1

    text = f"chunk_kda goes to flash-linear-attention, which breaks the graph: {reason}"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager")(x), x["q"] * 2 + 1)
