"""torch on a GPU: exactness, streams, graphs, memory. Skipped where there is none."""

import pytest
import reference
from reference import ratio

import native_kda

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(row["device"] == "cuda" for row in native_kda.support_matrix()):
    pytest.skip("native_kda was built without CUDA", allow_module_level=True)

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
HOPPER = torch.cuda.get_device_capability() == (9, 0)


def inputs(seed=0, dtype=torch.bfloat16, grad=True, B=2, T=130, H=2, HV=2, K=64, V=64):
    drawn = reference.numpy_inputs(seed, B=B, T=T, H=H, HV=HV, K=K, V=V, gate="softplus")
    wide = ("A_log", "dt_bias", "initial_state")
    return {n: torch.from_numpy(x).to("cuda", torch.float32 if n in wide else dtype)
            .requires_grad_(grad) for n, x in drawn.items()}


def expected(x, weights, packed=None, **how):
    """The recurrence in float64 on the host, at the same inputs."""
    copies = {n: t.detach().cpu().double().requires_grad_() for n, t in x.items()}
    o, s = reference.torch_recurrence(**copies, l2norm=True, beta_sigmoid=True, **how)
    loss = (o * weights[0].cpu()).sum() + (s * weights[1].cpu()).sum()
    return o, s, dict(zip(copies, torch.autograd.grad(loss, list(copies.values()))))


def found(x, weights, **options):
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, **options)
    loss = (o.double() * weights[0]).sum() + (s.double() * weights[1]).sum()
    return o, s, dict(zip(x, torch.autograd.grad(loss, list(x.values()))))


def weights_of(x):
    torch.manual_seed(1)
    B, _, HV, V = x["v"].shape
    return (torch.randn(x["v"].shape, dtype=torch.double, device="cuda"),
            torch.randn(B, HV, x["q"].shape[-1], V, dtype=torch.double, device="cuda"))


def spread(x, dg, lower_bound):
    """dA_log is a sum of terms of either sign, a few values here, which may be small by chance,
    while errors are not: they add up as the terms do. This is the size that it has if the terms'
    signs are random, and only a floor of the denominator. It is no easier measure than the rule
    for few numbers (docs/semantics.md 7.3), RMS over further draws of the inputs: it was 0.70 to
    0.95 of that over 24 draws of each shape and gate below (fp32 on the CPU), since neighbours'
    signs are alike."""
    z = x["g"].detach().double().cpu() + x["dt_bias"].detach().double().cpu().reshape(dg.shape[2:])
    softplus = torch.nn.functional.softplus(z) / torch.sigmoid(z)
    terms = dg * (softplus if lower_bound is None else z)  # (3.6), (3.10)
    return terms.square().sum((0, 1, 3)).mean().sqrt().item()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shape", [{}, dict(HV=4, K=128, V=128), dict(H=1, HV=3, K=40, V=24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_gradients_match_the_recurrence(dtype, shape, lower_bound):
    """GRAD-04, NUM-05, NUM-09, DIM-01, GVA-01, GVA-02."""
    x = inputs(dtype=dtype, **shape)
    weights = weights_of(x)
    gate = "softplus" if lower_bound is None else "lower_bound"
    o, s, wanted = expected(x, weights, gate=gate, lower_bound=lower_bound)
    got_o, got_s, got = found(x, weights, lower_bound=lower_bound)
    # fp32 inputs are held to the 1e-4 that fla holds its own fp32 path to.
    limits = reference.BF16 if dtype == torch.bfloat16 else dict.fromkeys(reference.BF16, 1e-4)
    assert ratio(o.detach(), got_o.detach().double().cpu()) < limits["o"]
    assert ratio(s.detach(), got_s.detach().cpu()) < limits["final_state"]
    for name, gradient in got.items():
        assert gradient.dtype == x[name].dtype
        floor = spread(x, wanted["g"], lower_bound) if name == "A_log" else 0.0
        assert ratio(wanted[name], gradient.double().cpu(), floor) < limits["d" + name], name
    assert all(name.startswith(("cuda_", "sm90_")) for name in native_kda.hits())


def test_gradients_from_states_that_the_forward_kept():
    """Of the rows here the Hopper backward reads them."""
    x = inputs(T=600, K=128, V=128)
    weights = weights_of(x)
    _, _, wanted = expected(x, weights, gate="softplus")
    kept = found(x, weights, disable_recompute=True)[2]
    for name, gradient in kept.items():
        assert ratio(wanted[name], gradient.double().cpu()) < reference.BF16["d" + name], name


@pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")
@pytest.mark.parametrize("V", [128, 256])
def test_what_runs_by_default_on_hopper(V):
    x = inputs(K=128, V=V)
    for loss in (lambda o, s: o.sum(), lambda o, s: s.sum(), lambda o, s: (o * o).sum()):
        loss(*native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)).backward()
    assert native_kda.hits() == {"sm90_chunk_fwd": 3, "sm90_chunk_bwd": 3}


@pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")
def test_channels_of_a_convolution_on_hopper():
    """Their layout, channels apart, is that of Kimi Linear in transformers."""
    results = []
    for apart in ((), ("q", "k", "v", "g")):
        x = inputs(K=128, V=128)
        y = {n: t.transpose(1, 3).contiguous().transpose(1, 3) if n in apart else t
             for n, t in x.items()}
        o, _ = native_kda.chunk_kda(**y, **FLAGS)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), list(x.values()))))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert native_kda.hits() == {"sm90_chunk_fwd": 2, "sm90_chunk_bwd": 2}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_equals_separate(dtype):
    """VARLEN-03, VARLEN-11, VARLEN-16."""
    lengths = [5, 0, 64, 61]
    x = inputs(B=1, T=sum(lengths) + 3)
    x["initial_state"] = torch.randn(4, 2, 64, 64, device="cuda").requires_grad_()
    cu = torch.tensor([0, 5, 5, 69, 130], dtype=dtype, device="cuda")
    o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, cu_seqlens=cu)
    assert torch.equal(s[1], x["initial_state"][1]) and not o[:, 130:].any()
    for i, (begin, length) in enumerate(zip([0, 5, 5, 69], lengths)):
        if length:
            part = {n: t[:, begin : begin + length] if t.dim() > 2 and n != "initial_state" else t
                    for n, t in x.items()}
            part["initial_state"] = x["initial_state"][i : i + 1]
            alone, state = native_kda.chunk_kda(**part, **FLAGS, output_final_state=True)
            assert torch.equal(o[:, begin : begin + length], alone)
            assert torch.equal(s[i], state[0])


def test_graph_capture_of_forward_and_backward():
    """GRAPH-04: captured once, replayed with other values and other lengths."""
    x = inputs(B=1, T=200)
    x["initial_state"] = torch.randn(3, 2, 64, 64, device="cuda").requires_grad_()
    cu = torch.tensor([0, 50, 100, 200], device="cuda")
    names = list(x)

    def step():
        o, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True, cu_seqlens=cu)
        return (o, s, *torch.autograd.grad(o.float().square().sum() + s.square().sum(),
                                           [x[n] for n in names]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 50, 100, 200], [0, 1, 1, 130], [0, 200, 200, 200]):
        with torch.no_grad():
            for n in ("q", "k", "v", "g", "beta"):
                x[n].copy_(torch.randn_like(x[n]))
            cu.copy_(torch.tensor(lengths))
        graph.replay()
        for a, b in zip(captured, step()):
            assert torch.equal(a, b)


def test_no_synchronisation():
    """GRAPH-07."""
    x = inputs()
    cu = torch.tensor([0, 130], device="cuda")
    one = {n: t[:1] if t.dim() > 2 else t for n, t in x.items()}
    native_kda.chunk_kda(**one, **FLAGS, cu_seqlens=cu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, s = native_kda.chunk_kda(**one, **FLAGS, cu_seqlens=cu, output_final_state=True)
        o.float().sum().backward()
        native_kda.fused_recurrent_kda(**{n: t.detach() for n, t in one.items()}, **FLAGS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_streams():
    x = inputs(T=1000)
    want = native_kda.chunk_kda(**x, **FLAGS)[0]
    for _ in range(3):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            y = {n: (t * 1.0).detach() for n, t in x.items()}
            o = native_kda.chunk_kda(**y, **FLAGS)[0]
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(o, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
@pytest.mark.parametrize("V", [64, 256])
def test_second_device(V):
    """DEV-01: tensors on a device that is not the current one."""
    x = inputs(K=V // 2 if V == 256 else V, V=V)
    weights = weights_of(x)
    there = {n: t.detach().to("cuda:1").requires_grad_() for n, t in x.items()}
    o, s, gradients = found(x, weights)
    other_o, other_s, others = found(there, [w.to("cuda:1") for w in weights])
    assert torch.cuda.current_device() == 0
    pairs = {"o": (o, other_o), "final_state": (s, other_s)}
    pairs |= {f"d{n}": (gradients[n], others[n]) for n in x}
    for name, (a, b) in pairs.items():
        assert b.device.index == 1, name
        assert ratio(a.detach().double().cpu(), b.detach().double().cpu()) < 1e-4, name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_graph_and_decode_on_the_second_device():
    x = {n: t.detach().to("cuda:1").requires_grad_() for n, t in inputs().items()}

    def step():
        o, _ = native_kda.chunk_kda(**x, **FLAGS)
        return o, *torch.autograd.grad(o.float().square().sum(), list(x.values()))

    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            want = step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(want, captured))

    y = {n: t.detach() for n, t in x.items()}
    states = y.pop("initial_state")
    whole, state = native_kda.fused_recurrent_kda(**y, **FLAGS, initial_state=states,
                                                  output_final_state=True)
    same = states.clone()
    for t in range(y["q"].shape[1]):
        one = {n: z[:, t : t + 1] if z.dim() > 2 else z for n, z in y.items()}
        o, _ = native_kda.fused_recurrent_kda(**one, **FLAGS, initial_state=same, in_place=True)
        assert ratio(whole[:, t : t + 1].float().cpu(), o.float().cpu()) < 5e-3
    assert ratio(state.cpu(), same.cpu()) < 1e-3 and torch.cuda.current_device() == 0


def test_tensors_elsewhere_are_named():
    """DEV-01."""
    x = inputs()
    with pytest.raises(ValueError, match="beta: found on cpu, expected cuda:0"):
        native_kda.chunk_kda(**{**x, "beta": x["beta"].cpu()}, **FLAGS)
    with pytest.raises(ValueError, match="cu_seqlens: found on cpu"):
        one = {n: t[:1] if t.dim() > 2 else t for n, t in x.items()}
        native_kda.chunk_kda(**one, **FLAGS, cu_seqlens=torch.tensor([0, 130]))
    for name in x:  # and after a call of the same kind
        native_kda.chunk_kda(**x, **FLAGS)
        with pytest.raises(ValueError, match="found on (meta|cuda:0), expected (meta|cuda:0)"):
            native_kda.chunk_kda(**{**x, name: x[name].to("meta")}, **FLAGS)


def test_lengths_on_the_host_are_taken_at_their_word():
    """They are not compared with cu_seqlens, which would wait for the GPU, but must be possible."""
    x = {n: t[:1] if t.dim() > 2 else t for n, t in inputs(grad=False).items()
         if n != "initial_state"}
    host = torch.tensor([0, 65, 65, 130])
    x["cu_seqlens"] = host.cuda()
    with torch.inference_mode():
        for lengths in (None, host):
            *_, h = native_kda.chunk_kda(**x, **FLAGS, return_intermediate_states=True,
                                         cu_seqlens_cpu=lengths)
            assert h.shape == (1, 4, 2, 64, 64)
        with pytest.raises(ValueError, match="cu_seqlens_cpu: found"):
            native_kda.chunk_kda(**x, **FLAGS, return_intermediate_states=True,
                                 cu_seqlens_cpu=torch.tensor([0, 65, 65, 131]))


def test_derivatives_that_there_are_not():
    x = inputs()
    for _ in range(2):
        y = native_kda.chunk_kda(**x, **FLAGS)[0].float().sum()
        (dk,) = torch.autograd.grad(y, x["k"], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(y + dk.float().square().sum(), x["v"])
    v = x["v"].detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with pytest.raises(ValueError, match="^v: found a tangent"):
            native_kda.chunk_kda(**{**x, "v": dual}, **FLAGS)


def test_runs_are_bitwise_equal():
    x = inputs()
    weights = weights_of(x)
    first, second = found(x, weights), found(x, weights)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(first[2][n], second[2][n]) for n in x)


def test_decode_with_a_pool():
    """The argument pattern of vLLM and SGLang: a V-first pool, updated in place, by index."""
    x = inputs(B=4, T=1, K=128, V=128, grad=False)
    x.pop("initial_state")
    pool = torch.randn(9, 2, 128, 128, device="cuda")
    before = pool.clone()
    indices = torch.tensor([7, -1, 0, 3], dtype=torch.int32, device="cuda")
    gate = dict(lower_bound=-5.0, state_v_first=True)
    o, same = native_kda.fused_recurrent_kda(**x, **FLAGS, **gate, initial_state=pool,
                                             state_indices=indices)
    assert same is pool and not o[1].any()
    for i, slot in ((0, 7), (2, 0), (3, 3)):
        one = {n: t[i : i + 1] if t.dim() > 2 or n == "beta" else t for n, t in x.items()}
        alone, state = native_kda.fused_recurrent_kda(
            **one, **FLAGS, **gate, initial_state=before[slot : slot + 1], output_final_state=True)
        assert torch.equal(o[i], alone[0]) and torch.equal(pool[slot], state[0])
    for slot in (1, 2, 4, 5, 6, 8):
        assert torch.equal(pool[slot], before[slot])


def unaligned(tensor):
    """A copy whose address is no multiple of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    copy = memory[1:].view(tensor.shape).copy_(tensor)
    assert copy.data_ptr() % 16 != 0
    return copy


def test_addresses_that_are_not_aligned():
    """Calls are remembered by layout, not by address: each route must take any address at the
    run, also where it had an aligned one before."""
    x = inputs(K=128, V=128)
    weights = weights_of(x)
    y = {n: unaligned(t.detach()).requires_grad_() for n, t in x.items()}
    want, got = found(x, weights), found(y, weights)
    o, other = (run[0].detach().float().cpu() for run in (want, got))
    assert ratio(o, other) < reference.BF16["o"]
    assert ratio(want[1].detach().cpu(), got[1].detach().cpu()) < reference.BF16["final_state"]
    for n in x:
        a, b = want[2][n].float().cpu(), got[2][n].float().cpu()
        assert ratio(a, b) < reference.BF16["d" + n], n


def test_unaligned_states_of_decode():
    """On Hopper these run on the portable kernel."""
    x = inputs(T=1, K=128, V=128, grad=False)
    state = x.pop("initial_state")
    results = []
    for states in (state.clone(), unaligned(state)):
        o, same = native_kda.fused_recurrent_kda(**x, **FLAGS, initial_state=states, in_place=True)
        assert same is states
        results.append((o.float().cpu(), same.cpu()))
    (o, s), (other_o, other_s) = results
    assert ratio(o, other_o) < 5e-3 and ratio(s, other_s) < 1e-5


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    x = inputs()
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, backend=backend)
    a, b = (f(**x, **FLAGS)[0] for f in (native_kda.chunk_kda, compiled))
    assert torch.equal(a, b)
    ga, gb = (torch.autograd.grad(o.float().square().sum(), list(x.values())) for o in (a, b)
              if o is not None)
    assert all(torch.equal(s, t) for s, t in zip(ga, gb))


def test_compiled_with_dynamic_lengths():
    """GRAPH-01: one graph serves every length."""
    testing = pytest.importorskip("torch._dynamo.testing", reason="this torch has no dynamo")
    counter = testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(native_kda.chunk_kda, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 130, 200):
        x = inputs(T=T, K=128, V=128)
        pairs = []
        for function in (native_kda.chunk_kda, compiled):
            o, s = function(**x, **FLAGS, output_final_state=True)
            loss = o.float().square().sum() + s.square().sum()
            pairs.append((o, s, *torch.autograd.grad(loss, list(x.values()))))
        assert all(torch.equal(a, b) for a, b in zip(*pairs))
    assert counter.frame_count == 1


def test_opcheck():
    x = inputs(T=70, K=128, V=128)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    call = (*(x[n] for n in names), None, 1, 0.0, None, True, True, False, False, 64, True)
    native_kda.chunk_kda(**x, **FLAGS)  # registers the operators where torch was imported later
    torch.library.opcheck(torch.ops.native_kda.chunk_kda, call, test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_under_autocast(reentrant):
    x = inputs(K=128, V=128)
    checkpoint = torch.utils.checkpoint.checkpoint
    x["q"] = x["q"].detach().float().requires_grad_()  # autocast aligns it

    def layer(*tensors):
        return native_kda.chunk_kda(**dict(zip(x, tensors)), **FLAGS)[0]

    pairs = []
    for checkpointed in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            o = (checkpoint(layer, *x.values(), use_reentrant=reentrant) if checkpointed
                 else layer(*x.values()))
        for t in x.values():
            t.grad = None
        o.float().square().sum().backward()
        pairs.append((o, *(t.grad for t in x.values())))
    assert all(torch.equal(a, b) for a, b in zip(*pairs))
    assert native_kda.hits()["sm90_chunk_fwd" if HOPPER else "cuda_chunk_fwd"] == 3


def test_stages_give_the_whole():
    x = inputs(grad=False, dtype=torch.float32)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
    v, beta = x["v"], x["beta"].sigmoid()
    stages = native_kda.stages
    gamma = stages.gate_cumsum(x["g"], x["A_log"], x["dt_bias"], use_gate_in_kernel=True)
    Aqk, A = stages.intra(q, k, beta, gamma)
    w, u, kg = stages.wu(k, v, beta, gamma, A)
    h, v_new, state = stages.state_scan(kg, w, u, gamma, x["initial_state"])
    o = stages.output(q, gamma, Aqk, h, v_new)
    whole, s = native_kda.chunk_kda(**x, **FLAGS, output_final_state=True)
    assert ratio(whole.cpu(), o.cpu()) < 1e-5 and ratio(s.cpu(), state.cpu()) < 1e-5


def test_what_has_no_derivative_is_traced_and_says_so():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = inputs(grad=False)
    do = torch.randn_like(x["v"])

    def call(q, g):
        gradients = native_kda.chunk_kda_backward(do, **{**x, "q": q, "g": g}, **FLAGS)
        return native_kda.stages.gate_cumsum(-g.square()), *gradients.values()

    given = x["q"], x["g"]
    wanted = call(*given)
    found = make_fx(call)(*(0.5 * t for t in given))(*given)
    wants = call(*(t.clone().requires_grad_() for t in given))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, found, wants))
    for result in wants[:2]:
        with pytest.raises(RuntimeError, match="trying to differentiate"):
            result.sum().backward()


def test_state_scan_of_any_alignment():
    kg, w, u = (0.1 * torch.randn(2, 256, 4, 128, device="cuda", dtype=torch.bfloat16)
                for _ in range(3))
    gamma = torch.rand(2, 4, 64, 4, 128, device="cuda").mul(-0.05).cumsum(2).reshape(2, 256, 4, 128)
    h0 = torch.randn(2, 4, 128, 128, device="cuda")
    want = native_kda.stages.state_scan(kg, w, u, gamma, h0)
    got = native_kda.stages.state_scan(*(unaligned(t) for t in (kg, w, u, gamma, h0)))
    for a, b in zip(want, got):
        assert ratio(a.float().cpu(), b.float().cpu()) < 5e-3


def test_memory_is_given_back():
    """MEM-01."""
    x = inputs(T=1024)
    found(x, weights_of(x))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        found(x, weights_of(x))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_launches_on_a_full_grid_of_short_sequences():
    """VARLEN-09: thousands of sequences in one call."""
    N, length = 2050, 16
    x = inputs(B=1, T=N * length, H=4, HV=4, grad=False)
    x["initial_state"] = None
    cu = torch.arange(0, (N + 1) * length, length, device="cuda")
    o, s = native_kda.chunk_kda(**x, **FLAGS, cu_seqlens=cu, output_final_state=True)
    i = 1234
    part = {n: t[:, i * length : (i + 1) * length] if t is not None and t.dim() > 2 else t
            for n, t in x.items()}
    alone, state = native_kda.chunk_kda(**part, **FLAGS, output_final_state=True)
    assert torch.equal(o[:, i * length : (i + 1) * length], alone)
    assert torch.equal(s[i], state[0])
