"""A byte-level language model with the KDA layer of flash-linear-attention, unmodified.

usage: python examples/train_char_lm.py [--kernels native_kda,fla] [--seeds 0,1] [--steps 300]
           [--text FILE...] [--json FILE] [--plot FILE]

Trains the same model once for each pair of kernels and seed, which fixes weights and batches, and
prints loss and tokens per second. The texts are by default the licences that Debian's base-files
ships. "Within noise" means: the curves of native_kda and fla with one seed differ less than two
curves of fla with different seeds.
"""

import argparse
import glob
import json
import math
import statistics
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


def plot(report, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 4))
    for run in report["runs"]:
        axes.plot(run["losses"], label=f"{run['kernels']}, seed {run['seed']}", linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross-entropy, nats per byte", yscale="log")
    axes.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", default="native_kda,fla")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", nargs="+", default=sorted(glob.glob(
        "/usr/share/common-licenses/*")))
    parser.add_argument("--json")
    parser.add_argument("--plot")
    given = parser.parse_args()
    data = b"".join(open(path, "rb").read() for path in given.text)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
    runs = []
    for kernels in given.kernels.split(","):
        for seed in map(int, given.seeds.split(",")):
            native_kda.reset_hits()
            losses, speed = train(text, kernels, seed, given.steps)
            runs.append({"kernels": kernels, "seed": seed, "tokens per second": round(speed),
                         "last loss": statistics.fmean(losses[-TAIL:]),
                         "implementations": native_kda.hits(), "losses": losses})
            print({name: x for name, x in runs[-1].items() if name != "losses"}, flush=True)
    report = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__,
              "native_kda": native_kda.__version__, "fla": __import__("fla").__version__,
              "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "bytes of text": len(data), "steps": given.steps, "runs": runs}
    curves = {(run["kernels"], run["seed"]): run["losses"] for run in runs}
    seeds = sorted({seed for _, seed in curves})
    if len(seeds) > 1 and ("fla", seeds[0]) in curves and ("native_kda", seeds[0]) in curves:
        report["kernels differ by"] = difference(curves["native_kda", seeds[0]],
                                                 curves["fla", seeds[0]])
        report["seeds differ by"] = difference(curves["fla", seeds[0]], curves["fla", seeds[1]])
        print({name: report[name] for name in ("kernels differ by", "seeds differ by")})
    if given.json:
        with open(given.json, "w") as file:
            json.dump(report, file)
            file.write("\n")
    if given.plot:
        plot(report, given.plot)


if __name__ == "__main__":
    main()
