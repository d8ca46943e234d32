"""What looks at a program from outside (tracers, compilers, fake tensors, function transforms) sees
every call as an operator: it neither runs into memory that is not there nor keeps a result."""

import pytest
import reference

import native_kda
from native_kda import stages

torch = pytest.importorskip("torch", reason="torch is not installed")
proxies = pytest.importorskip("torch.fx.experimental.proxy_tensor", reason="torch has no make_fx")
make_fx = proxies.make_fx

SIZES = dict(B=1, T=70, H=2, HV=4, K=8, V=6)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(T=SIZES["T"]):
    drawn = reference.numpy_inputs(**{**SIZES, "T": T})
    return tuple(torch.from_numpy(x) for x in drawn.values())


def whole(q, k, v, g, beta, h0):
    return native_kda.chunk_kda(q, k, v, g, beta, initial_state=h0, output_final_state=True)


def decode(q, k, v, g, beta, h0):
    return native_kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=h0,
                                          output_final_state=True)


def gradients(q, k, v, g, beta, h0):
    wanted = ("dq", "dg", "dA_log", "dinitial_state")
    found = native_kda.chunk_kda_backward(v.square(), q, k, v, g, beta, initial_state=h0,
                                          wanted=wanted)
    assert tuple(found) == ("dq", "dg", "dinitial_state"), "there is no A_log"
    return tuple(found.values())


def states(q, k, v, g, beta, h0):
    with torch.inference_mode():
        return native_kda.chunk_kda(q, k, v, g, beta, initial_state=h0, output_final_state=True,
                                    return_intermediate_states=True)


def every_stage(q, k, v, g, beta, h0):
    gamma = stages.gate_cumsum(g)
    Aqk, A = stages.intra(q, k, beta, gamma)
    w, u, kg, qg = stages.wu(k, v, beta, gamma, A, q)
    h, v_new, state = stages.state_scan(kg, w, u, gamma, h0)
    o = stages.output(q, gamma, Aqk, h, v_new)
    dh, dv_new, dh0 = stages.reverse_scan(qg, kg, w, gamma, Aqk, o, state)
    parts = stages.wy_bwd(q, k, v, beta, gamma, A, v_new, h, dh, dv_new, o)
    dv = parts.pop("dv")
    return (o, state, dh0, dv, *stages.intra_bwd(q, k, beta, gamma, **parts))


CALLS = (whole, decode, gradients, states, every_stage)


def halved(tensors):
    return tuple(0.5 * t for t in tensors)


def jit(call, x):
    return torch.jit.trace(call, x, check_trace=False)


def fx(call, x):
    return make_fx(call)(*x)


def fx_of_symbols(call, x):
    return make_fx(call, tracing_mode="symbolic")(*x)


def functionalized(call, x):
    return torch.func.functionalize(call)


def compiled(call, x):
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def compiled_for_any_length(call, x):
    graph = torch.compile(call, backend="aot_eager", dynamic=True)
    graph(*inputs(41))
    return graph


def exported(call, x):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)

    return torch.export.export(Module(), x, strict=False).module()


def mapped(call, x):
    def over_two(*tensors):
        pairs = torch.vmap(call)(*(torch.stack((0.1 * t, t)) for t in tensors))
        return tuple(pair[1] for pair in pairs)

    return over_two


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trace", [jit, fx, fx_of_symbols, functionalized, compiled,
                                   compiled_for_any_length, exported, mapped])
def test_traces_hold_the_call(trace, call):
    """Not its result: what is traced at one input is run at another."""
    x = inputs()
    traced = trace(call, x)
    wanted, found = call(*halved(x)), traced(*halved(x))
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found))


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_have_shapes_alone(call):
    from torch._subclasses.fake_tensor import FakeTensorMode

    wanted = call(*inputs())
    with FakeTensorMode() as mode:
        found = call(*map(mode.from_tensor, inputs()))
    for a, b in zip(wanted, found):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.filterwarnings("ignore")
def test_how_many_states_there_are_is_not_traced():
    x = inputs()[:5]
    cu = torch.tensor([0, 7, 70])

    def call(*tensors):
        with torch.inference_mode():
            return native_kda.chunk_kda(*tensors, cu_seqlens=cu, return_intermediate_states=True)[2]

    assert call(*x).shape[1] == 2
    for trace in (jit, fx):
        with pytest.raises(native_kda.ArgumentError, match="^cu_seqlens: .*traced"):
            trace(call, x)


def test_opcheck():
    """With outputs and inputs that are absent."""
    q, k, v, g, beta, h0 = inputs()
    gamma = stages.gate_cumsum(g)
    _, A = stages.intra(q, k, beta, gamma)
    w, u, kg = stages.wu(k, v, beta, gamma, A)
    options = (0, 0.0, None, False, False, False, False, 64)
    for operator, arguments, wanted in (
        ("chunk_fwd", (q, k, v, g, beta, None, None, h0, None), (1, 0, 1, 0, 0)),
        ("gate_cumsum", (g, None, None, torch.tensor([0, 9, 70])), (1,)),
        ("wu", (None, k, v, beta, gamma, A, None), (1, 1, 1, 0)),
        ("state_scan", (kg, w, u, gamma, h0, None, v), (1, 1, 0, 1)),
    ):
        torch.library.opcheck(getattr(torch.ops.native_kda, operator),
                              (*arguments, *options, wanted))
