"""Draws median times over tokens and over heads beside their floors and peers.

usage: python bench/python/plot_times.py forward|step TARGET.svg RESULTS.json...

RESULTS are outputs of `kda bench --json` and files of peers in the same form
(bench/results/cuda_h200_peers.json): of the bf16 shapes with B = 1, K = V = 128, not packed, the
left panel takes those with HEADS heads, the right one those with TOKENS tokens.
"""

import json
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HEADS = 32
TOKENS = 8192
OPERATIONS = {"forward": ("chunk_fwd",), "step": ("chunk_fwd", "chunk_bwd")}
MARKERS = {"native_kda": "o-", "floor": "--", "FlashKDA": "s", "fla": "^"}


def rows(paths):
    for path in paths:
        head = {}
        with open(path) as file:
            for line in file:
                row = json.loads(line)
                if "median_ms" in row:
                    yield {**head, **row}
                else:  # for the rows below
                    head = {key: row[key] for key in ("gate", "dtype") if key in row}


def times(paths, operations):
    """{(series, gate): {(tokens, heads): ms}}, the sum of all operations where all are there."""
    parts = defaultdict(dict)
    for row in rows(paths):
        B, T, H, HV, K, V = row["shape"]
        if B != 1 or H != HV or (K, V) != (128, 128) or row.get("sequences"):
            continue
        if row.get("dtype", "bf16") != "bf16":
            continue
        ms = row["median_ms"]
        if row["operation"] == "step" and len(operations) == 2:  # what peers report
            parts[row["impl"], row["gate"], (T, H)] = dict.fromkeys(operations, ms / 2)
        elif row["operation"] in operations:
            ours = row["impl"].startswith("sm90_")
            if not ours and not row.get("peer"):
                continue
            name = "native_kda" if ours else row["impl"]
            parts[name, row["gate"], (T, H)][row["operation"]] = ms
            if ours:
                parts["floor", "", (T, H)][row["operation"]] = row["floor_ms"]
    series = defaultdict(dict)
    for (name, gate, size), found in parts.items():
        if len(found) == len(operations):
            series[name, gate][size] = sum(found.values())
    return series


def draw(axes, series, kept, position):
    for (name, gate), points in sorted(series.items()):
        line = sorted(
            (size[position], ms) for size, ms in points.items() if size[1 - position] == kept)
        if line:
            colour = {"softplus": "C0", "lower_bound": "C1"}.get(gate, "grey")
            axes.plot(*zip(*line), MARKERS[name], color=colour, label=f"{name} {gate}".strip())
    axes.set(xscale="log", yscale="log", ylabel="ms")
    axes.set_xscale("log", base=2)
    sizes = sorted({size[position] for points in series.values() for size in points
                    if size[1 - position] == kept})
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def main(kind, target, *paths):
    series = times(paths, OPERATIONS[kind])
    plt.rcParams["svg.hashsalt"] = kind  # the same results give the same file
    figure, (over_tokens, over_heads) = plt.subplots(1, 2, figsize=(11, 4))
    draw(over_tokens, series, HEADS, 0)
    over_tokens.set(xlabel="tokens", title=f"{HEADS} heads")
    draw(over_heads, series, TOKENS, 1)
    over_heads.set(xlabel="heads", title=f"{TOKENS} tokens")
    figure.suptitle(f"{kind}, bf16, K = V = 128, one sequence")
    plt.tight_layout()
    plt.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in OPERATIONS:
        sys.exit(__doc__)
    main(*sys.argv[1:])
