"""Draws the loss curves of a report of examples/train_char_lm.py.

usage: python bench/python/plot_losses.py bench/results/cuda_h200_char_lm.json
           docs/images/char_lm.svg
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

WINDOW = 10  # steps over which a point averages
STYLES = {"native_kda": "-", "fla": ":"}


def smooth(losses):
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]


def main(source, target):
    with open(source) as file:
        report = json.load(file)
    plt.rcParams["svg.hashsalt"] = "losses"  # the same report gives the same file
    _, axes = plt.subplots(figsize=(7, 4))
    for run in report["runs"]:
        axes.plot(smooth(run["losses"]), STYLES[run["kernels"]], linewidth=1.5,
                  color=f"C{run['seed']}" if run["kernels"] == "native_kda" else "black",
                  label=f"{run['kernels']}, seed {run['seed']}")
    axes.set(xlabel="step", ylabel=f"cross-entropy, nats a byte, mean of {WINDOW} steps")
    axes.legend()
    plt.tight_layout()
    plt.savefig(target, metadata={"Date": None} if target.endswith("svg") else None, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
