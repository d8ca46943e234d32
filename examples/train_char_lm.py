"""A byte-level language model with the KDA layer of flash-linear-attention, unmodified.

usage: python examples/train_char_lm.py [--kernels native_kda,fla] [--seeds 0,1] [--steps 300]
           [--text FILE...] [--json FILE]

Trains the same model once for each pair of kernels and seed, which fixes weights and batches, and
prints loss and tokens per second. The text is by default this repository's own: documentation,
headers, licence. "Within noise" means: the curves of native_kda and fla with one seed differ less
than two curves of fla with different seeds. How much two runs of fla with one seed differ (sums of
torch that have no fixed order) is measured too. bench/python/plot_losses.py draws the report.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import sys
import time

import torch
from torch import nn

import native_kda

native_kda.fla.enable()

from fla.layers.kda import KimiDeltaAttention  # noqa: E402

WIDTH, LAYERS, HEADS, HEAD_DIM, LENGTH, BATCH = 256, 4, 4, 64, 1024, 8
TAIL = 50  # steps over which the last loss is averaged


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = KimiDeltaAttention(hidden_size=WIDTH, head_dim=HEAD_DIM, num_heads=HEADS,
                                            layer_idx=index)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                                 nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(i) for i in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(text, kernels, seed, steps):
    """Losses of all steps and tokens per second after the first ones."""
    native_kda.fla.enable() if kernels == "native_kda" else native_kda.fla.disable()
    torch.manual_seed(seed)
    model = Model().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rng = torch.Generator().manual_seed(seed)
    losses, start, begin = [], 0.0, min(20, steps // 2)
    for step in range(steps):
        if step == begin:
            torch.cuda.synchronize()
            start = time.perf_counter()
        rows = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=rng).cuda()
        tokens = text[rows[:, None] + torch.arange(LENGTH + 1, device="cuda")].long()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return [x.item() for x in losses], (steps - begin) * BATCH * LENGTH / seconds


def difference(a, b):
    """Root mean square of the difference of two curves after the first steps."""
    pairs = list(zip(a, b))[len(a) // 10 :]
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in pairs))


def own_text():
    root = pathlib.Path(__file__).resolve().parents[1]
    patterns = ("README.md", "LICENSE", "docs/**/*.md", "include/kda/*.h")
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def run(text, kernels, seed, steps):
    native_kda.reset_hits()
    losses, speed = train(text, kernels, seed, steps)
    found = {"kernels": kernels, "seed": seed, "tokens per second": round(speed),
             "last loss": round(statistics.fmean(losses[-TAIL:]), 4),
             "implementations": native_kda.hits()}
    print(found, flush=True)
    return {**found, "losses": [round(loss, 5) for loss in losses]}


def pinned():
    """Names of fla's kernels that have one configuration each (bench/python/pin_fla.py)."""
    folder = os.environ.get("FLA_CONFIG_DIR")
    if not folder or os.environ.get("FLA_CACHE_MODE", "disabled") == "disabled":
        return []
    return sorted(path.stem for path in pathlib.Path(folder).glob("*.json"))


def write(report, path):
    """After each run, so that one cut short leaves those that it had."""
    if path:
        with open(path, "w") as file:
            json.dump(report, file)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", default="native_kda,fla")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", nargs="+", type=pathlib.Path, default=own_text())
    parser.add_argument("--json")
    given = parser.parse_args()
    data = b"\n".join(path.read_bytes() for path in given.text)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
    kernels, seeds = given.kernels.split(","), list(map(int, given.seeds.split(",")))
    pairs = [(kernel, seed) for kernel in kernels for seed in seeds]
    report = {"command": "python " + shlex.join(sys.argv),
              "machine": torch.cuda.get_device_name(0), "torch": torch.__version__,
              "native_kda": native_kda.__version__, "fla": __import__("fla").__version__,
              "fla's pinned kernels": pinned(),
              "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "bytes of text": len(data), "steps": given.steps, "runs": []}
    curves = {}
    for pair in pairs:
        report["runs"].append(run(text, *pair, given.steps))
        curves[pair] = report["runs"][-1]["losses"]
        write(report, given.json)
    if {"native_kda", "fla"} <= set(kernels):
        fla = curves["fla", seeds[0]]
        report["kernels differ by"] = difference(curves["native_kda", seeds[0]], fla)
        if len(seeds) > 1:
            report["seeds differ by"] = difference(curves["fla", seeds[1]], fla)
            write(report, given.json)
            again = run(text, "fla", seeds[0], given.steps)["losses"]
            report["runs differ by"] = difference(again, fla)
        print({name: x for name, x in report.items() if name.endswith("differ by")})
        write(report, given.json)


if __name__ == "__main__":
    main()
