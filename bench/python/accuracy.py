"""How far native_kda and flash-linear-attention are from float64 on the same bf16 inputs.

usage: python bench/python/accuracy.py [CASE.safetensors ...] [--seeds 0,1,2] [--tokens T]
           [--no-fla] [--device cuda] [--json FILE]

Cases are files (docs/case-format.md; without any, the two layers of a language model in tests/data)
and random inputs of the families below. The reference is the float64 token recurrence of this
library (rows `reference`) on the inputs as they were rounded. A row gives for each output the ratio
(7.1) of docs/semantics.md, of both; of several seeds the largest.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import struct

os.environ.setdefault("FLA_FLASH_KDA", "0")  # fla's own kernels are the contender

import torch

import native_kda
from report import header, write

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data"
REAL = ("lm_layer1_softplus.safetensors", "lm_layer3_safe.safetensors")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
HEADS, SIZE = 2, 128  # K = V
# Of given decay (natural logarithm), but for the first two, whose gate is computed inside.
FAMILIES = ("softplus", "lower_bound", "unit", "nodecay", "slow", "bound", "mix", "deep", "small",
            "zero", "corr", "same", "predicted")


def read_case(path):
    """Tensors and options of a case file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    options = header.pop("__metadata__", {})
    tensors = {}
    for name, row in header.items():
        begin, end = (8 + length + x for x in row["data_offsets"])
        raw = torch.frombuffer(bytearray(data[begin:end]), dtype=DTYPES[row["dtype"]])
        tensors[name] = raw.reshape(row["shape"])
    gate = options.get("gate", "none")
    call = dict(
        use_qk_l2norm_in_kernel=options.get("qk_l2norm") == "true",
        use_gate_in_kernel=gate != "none",
        use_beta_sigmoid_in_kernel=options.get("beta_sigmoid") == "true")
    if options.get("scale"):
        call["scale"] = float(options["scale"])
    if gate == "lower_bound":
        call.update(safe_gate=True, lower_bound=float(options["lower_bound"]))
    return {n: x for n, x in tensors.items() if n in INPUTS or n == "do"}, call


def decay(family, shape, random):
    """The natural-log decay that a family has at each element."""
    if family == "bound":
        return torch.full(shape, -5.0)
    if family in ("slow", "predicted"):
        return torch.full(shape, -1e-4)
    if family == "nodecay":
        return torch.zeros(shape)
    if family == "corr":
        return -0.0121 - 0.022 * torch.rand(shape, generator=random)
    g = -torch.rand(shape, generator=random)
    if family == "mix":
        g = torch.where(torch.arange(shape[-1]) % 2 == 0, -5.0, 0.0).expand(shape).clone()
    if family == "deep":
        depths = torch.tensor([-28.0, -500.0])[torch.randint(0, 2, shape, generator=random)]
        g = torch.where(torch.rand(shape, generator=random) < 0.1, depths, g)
    return g


def draw(family, seed, tokens):
    """Tensors and options of a random case of one of the families."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    rows = (1, tokens, HEADS, SIZE)
    q, k, v, state = normal(*rows), normal(*rows), normal(*rows), normal(1, HEADS, SIZE, SIZE)
    if family in ("corr", "same"):
        k = normal(1, 1, HEADS, SIZE) + (0.05 * k if family == "corr" else torch.zeros(rows))
    if family == "small":
        q, k = 1e-4 * q, 1e-4 * k
    if family == "zero":
        q[:, 3::7], k[:, 3::5] = 0, 0
    call = dict(use_qk_l2norm_in_kernel=True)
    if family in ("softplus", "lower_bound"):
        call.update(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        x = dict(g=normal(*rows).bfloat16(), beta=normal(*rows[:3]).bfloat16(),
                 A_log=(1 + 15 * torch.rand(HEADS, generator=random)).log(),
                 dt_bias=0.5 * normal(HEADS * SIZE))
        if family == "lower_bound":
            call.update(safe_gate=True, lower_bound=-5.0)
    else:
        x = dict(g=decay(family, rows, random),
                 beta=torch.rand(rows[:3], generator=random).bfloat16())
    if family == "predicted":
        unit = torch.nn.functional.normalize(k.bfloat16().float(), dim=-1)
        age = torch.arange(1, tokens + 1)[:, None, None]
        v = (-1e-4 * age).exp() * torch.einsum("bthk,bhkv->bthv", unit, state) + 0.05 * v
    x.update(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16(), initial_state=state)
    return {**x, "do": normal(*rows).bfloat16()}, call


def outputs(function, tensors, call, device, dtype=None):
    """o, the final state and all gradients by name, on the host."""
    x = {n: t.to(device, dtype or t.dtype, copy=True) for n, t in tensors.items()}
    do = x.pop("do")
    for t in x.values():
        t.requires_grad_()
    o, state = function(**x, **call, output_final_state=True)
    gradients = torch.autograd.grad(o, list(x.values()), do)
    names = ["o", "final_state", *("d" + n for n in x)]
    return {n: t.detach().cpu().double() for n, t in zip(names, (o, state, *gradients))}


@contextlib.contextmanager
def reference_rows():
    """This library's float64 reference answers the calls inside."""
    before = os.environ.pop("KDA_IMPL", None)
    os.environ["KDA_IMPL"] = "reference"
    try:
        yield
    finally:
        del os.environ["KDA_IMPL"]
        if before is not None:
            os.environ["KDA_IMPL"] = before


def ratio(wanted, found):
    """(7.1); None where something is not finite."""
    if not found.isfinite().all():
        return None
    error = (wanted - found).square().mean().sqrt()
    return (error / (wanted.square().mean().sqrt() + 1e-8)).item()


def compare(tensors, call, contenders, device):
    """Ratios by output and contender."""
    with reference_rows():
        wanted = outputs(native_kda.chunk_kda, tensors, call, "cpu", torch.float64)
    found = {n: outputs(f, tensors, call, device) for n, f in contenders.items()}
    return {name: {n: ratio(wanted[name], x[name]) for n, x in found.items()} for name in wanted}


def worst(rows):
    """Of rows for several seeds the largest ratio of each output."""
    merged = rows[0]
    for row in rows[1:]:
        for name, ratios in row.items():
            for contender, x in ratios.items():
                y = merged[name][contender]
                merged[name][contender] = None if x is None or y is None else max(x, y)
    return merged


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", type=pathlib.Path, default=[DATA / n for n in REAL])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    given = parser.parse_args()
    contenders = {"native_kda": native_kda.chunk_kda}
    fla = not given.no_fla and importlib.util.find_spec("fla") is not None
    if fla:
        from fla.ops.kda import chunk_kda

        contenders["fla"] = chunk_kda
    seeds = list(map(int, given.seeds.split(",")))
    report = {
        **header(torch.cuda.get_device_name(0) if given.device == "cuda" else "cpu", fla),
        "tokens of random cases": given.tokens,
        "seeds": seeds,
        "rows": [],
    }
    sources = [(path.stem, [read_case(path)]) for path in given.cases]
    sources += [(family, [draw(family, seed, given.tokens) for seed in seeds])
                for family in FAMILIES]
    for name, cases in sources:
        ratios = worst([compare(*case, contenders, given.device) for case in cases])
        report["rows"].append({"case": name, "ratios": ratios})
        report["implementations"] = {
            n: count for n, count in native_kda.hits().items() if not n.startswith("reference")}
        write(report, given.json)
        print(name, {n: tuple(r and round(r, 5) for r in x.values()) for n, x in ratios.items()},
              flush=True)


if __name__ == "__main__":
    main()
