"""One pinned configuration for the autotuned Triton kernels of flash-linear-attention's KDA.

usage: python bench/python/pin_fla.py FOLDER [KERNEL...]
       FLA_CACHE_MODE=default FLA_CONFIG_DIR=FOLDER python ...

Writes what fla's own configuration cache reads, so that its kernels run without autotuning, which
takes minutes on first use. The configuration of a kernel that is taken has four warps, or next to
that, the fewest stages, and the largest blocks of at most 64. Its results are fla's; its speed is
not. With names of kernels only those are pinned and the others autotuned.
"""

import gc
import importlib
import json
import pathlib
import sys

from fla.ops.utils.cache import CachedAutotuner

MODULES = (
    "fla.layers.kda",
    "fla.ops.kda",
    "fla.modules.convolution",
    "fla.modules.fused_norm_gate",
)


def preferred(config):
    blocks = [x for x in config.kwargs.values() if isinstance(x, int)]
    return (abs(config.num_warps - 4), config.num_stages, any(x > 64 for x in blocks), -sum(blocks))


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        importlib.import_module(module)
    kernels = [x for x in gc.get_objects() if isinstance(x, CachedAutotuner)]
    only = set(sys.argv[2:]) or {kernel.kernel_name for kernel in kernels}
    kernels = [kernel for kernel in kernels if kernel.kernel_name in only]
    for kernel in kernels:
        config = min(kernel.configs, key=preferred)
        pinned = {"kwargs": config.kwargs, "num_warps": config.num_warps,
                  "num_stages": config.num_stages, "num_ctas": config.num_ctas}
        text = json.dumps({"kernel_name": kernel.kernel_name, "default_config": pinned})
        (folder / f"{kernel.kernel_name}.json").write_text(text + "\n")
    print(f"{len(kernels)} kernels pinned in {folder}")


if __name__ == "__main__":
    main()
