"""Time, memory and host overhead of the Python calls, beside flash-linear-attention's.

usage: python bench/python/call_speed.py [--shapes S1,S3] [--gates softplus,lower_bound] [--no-fla]
           [--no-host] [--repeat N] [--json bench/results/cuda_h200_python.json]
       python bench/python/call_speed.py --cpu [--json FILE]

Both contenders run in one process, alternating; the L2 cache is flushed before each run; of N runs
by CUDA events the median and the 20th and 80th percentile are reported, after the results of both
were compared; also with torch's backward in the calling thread, and of native_kda those of a CUDA
graph of forward and backward. bf16; l2norm, gate and sigmoid of beta inside; final state asked for.
With --cpu only the host time of calls on tensors of a few elements is measured, most of which is
Python; --no-host leaves that out. fla's kernels are tuned before they are timed: a first run takes
minutes, and TRITON_CACHE_AUTOTUNING=1 keeps what it found for the next.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time

os.environ.setdefault("FLA_FLASH_KDA", "0")  # fla's own kernels are the contender

import torch

import native_kda
from report import header, write

SHAPES = {  # B, T, H, HV, K, V
    "S1": (1, 8192, 96, 96, 128, 128),
    "S2": (16, 8192, 16, 16, 128, 256),
    "S3": (1, 4096, 16, 16, 128, 128),
    "S4": (2, 4096, 64, 64, 128, 128),
}
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def inputs(B, T, H, HV, K, V, grad=False, device="cuda"):
    def draw(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)

    return dict(
        q=draw(B, T, H, K), k=draw(B, T, H, K), v=draw(B, T, HV, V), g=draw(B, T, HV, K),
        beta=draw(B, T, HV),
        A_log=torch.rand(HV, device=device).add(1).log().requires_grad_(grad),
        dt_bias=torch.randn(HV * K, device=device).mul(0.1).requires_grad_(grad))


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_microseconds(function, calls=300):
    """Host time of a call while the device keeps up: median of ten batches."""
    for _ in range(20):
        function()
    batches = []
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls // 10):
            function()
        batches.append((time.perf_counter() - start) / (calls // 10) * 1e6)
        synchronize()
    return statistics.median(batches)


def times(contenders, repeat):
    """Milliseconds of each contender, runs alternating."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    measured = {name: [] for name in contenders}
    for i in range(repeat + 2):
        for name, function in contenders.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                measured[name].append(start.elapsed_time(end))
    return measured


def percentiles(values):
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "median": statistics.median(values), "p80": cuts[7]}


def captured(function):
    """The function as a CUDA graph, which leaves out what it costs the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = function()
    return lambda: (graph.replay(), keep)


def peak_bytes(function):
    """What a call allocates at most, beyond what was there; results that it returns count."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ratio(a, b):
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / (a.square().mean().sqrt() + 1e-8)).item()


def functions(fla):
    found = {"native_kda": native_kda.chunk_kda}
    if fla:
        from fla.ops.kda import chunk_kda

        found["fla"] = chunk_kda
    return found


class Nothing(torch.autograd.Function):
    """What torch's automatic differentiation costs by itself."""

    @staticmethod
    def forward(ctx, q, k, v, *others):
        ctx.save_for_backward(q, k, v, *others)
        return v.view_as(v)

    @staticmethod
    def backward(ctx, do):
        return ctx.saved_tensors


def decode_microseconds(device):
    sizes = (8, 1, 32, 32, 128, 128) if device == "cuda" else (1, 1, 1, 1, 4, 4)
    y = inputs(*sizes, device=device)
    pool = torch.randn(64, *y["v"].shape[2:3], sizes[4], sizes[5], device=device)
    indices = torch.arange(sizes[0], dtype=torch.int32, device=device)
    return host_microseconds(lambda: native_kda.fused_recurrent_kda(
        **y, **FLAGS, initial_state=pool, state_indices=indices))


def overhead(fla, device):
    """Calls with as little work as there is: what they cost the host, contender by contender."""
    sizes = (1, 64, 4, 4, 128, 128) if device == "cuda" else (1, 1, 1, 1, 4, 4)
    x = inputs(*sizes, device=device)
    xg = inputs(*sizes, grad=True, device=device)
    do = torch.ones_like(xg["v"])
    nothing = {"torch.autograd.Function": lambda **x: (Nothing.apply(*list(x.values())[:7]), None)}
    calls = functions(fla)
    for name in ("native_kda", "torch.autograd.Function", "fla"):
        function = {**nothing, **calls}.get(name)
        if function is None:
            continue

        def step():
            o, _ = function(**xg, **FLAGS, output_final_state=True)
            torch.autograd.grad(o, list(xg.values()), do)

        with torch.no_grad():
            row = {"forward_us": host_microseconds(
                lambda: function(**x, **FLAGS, output_final_state=True))}
        row["forward_with_autograd_us"] = host_microseconds(
            lambda: function(**xg, **FLAGS, output_final_state=True))
        row["step_us"] = host_microseconds(step)
        with torch.autograd.set_multithreading_enabled(False):
            row["step_in_one_thread_us"] = host_microseconds(step)
        if name == "native_kda":
            row["decode_us"] = decode_microseconds(device)
        yield name, row


def compare(shape, gate, fla, repeat):
    options = dict(FLAGS, output_final_state=True)
    if gate == "lower_bound":
        options.update(safe_gate=True, lower_bound=-5.0)
    x, xg = inputs(*SHAPES[shape]), None
    calls = functions(fla)
    row = {"shape": shape, "sizes": SHAPES[shape], "gate": gate}
    with torch.no_grad():
        results = {n: f(**x, **options)[0] for n, f in calls.items()}
        if fla:
            row["ratio of o"] = ratio(results["fla"], results["native_kda"])
        del results
        forward = times({n: lambda f=f: f(**x, **options) for n, f in calls.items()}, repeat)
    xg = {n: t.detach().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])

    def step(function):
        o, _ = function(**xg, **options)
        return torch.autograd.grad(o, list(xg.values()), do)

    if fla:
        gradients = {n: step(f) for n, f in calls.items()}
        row["ratios of gradients"] = {
            name: ratio(a, b) for name, a, b in zip(xg, gradients["fla"], gradients["native_kda"])}
        del gradients
    both = times({n: lambda f=f: step(f) for n, f in calls.items()}, max(repeat // 2, 3))
    for name, function in calls.items():
        row[name] = {
            "forward_ms": percentiles(forward[name]),
            "forward_and_backward_ms": percentiles(both[name]),
            "peak_bytes": peak_bytes(lambda: step(function)),
        }
        with torch.no_grad():
            row[name]["forward_peak_bytes"] = peak_bytes(lambda: function(**x, **options))
    with torch.autograd.set_multithreading_enabled(False):
        alone = times({n: lambda f=f: step(f) for n, f in calls.items()}, max(repeat // 2, 3))
    for name, values in alone.items():
        row[name]["in_one_thread_forward_and_backward_ms"] = percentiles(values)
    graph = captured(lambda: step(native_kda.chunk_kda))
    replays = times({"native_kda": graph}, max(repeat // 2, 3))["native_kda"]
    row["native_kda"]["graph_forward_and_backward_ms"] = percentiles(replays)
    return row


def processor():
    with open("/proc/cpuinfo") as file:
        return next((row.split(": ")[1].strip() for row in file if "model name" in row), "cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--gates", default="softplus,lower_bound")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--no-host", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json")
    given = parser.parse_args()
    fla = not given.no_fla and not given.cpu and importlib.util.find_spec("fla") is not None
    device = "cpu" if given.cpu else "cuda"
    if given.cpu:
        given.shapes = ""
        torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {
        **header(processor() if given.cpu else torch.cuda.get_device_name(0), fla),
        "host": {},
        "rows": [],
    }
    shapes = list(filter(None, given.shapes.split(",")))
    for gate in given.gates.split(","):
        for shape in shapes:
            report["rows"].append(compare(shape, gate, fla, given.repeat))
            print(json.dumps(report["rows"][-1]), flush=True)
            torch.cuda.empty_cache()
            report["implementations"] = native_kda.hits()
            write(report, given.json)
    if not given.no_host:
        for name, row in overhead(fla, device):
            report["host"][name] = row
            print(json.dumps({name: row}), flush=True)
            write(report, given.json)
    report["implementations"] = native_kda.hits()
    write(report, given.json)


if __name__ == "__main__":
    main()
