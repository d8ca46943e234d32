"""What the reports of the measuring programs here have in common."""

import json
import os
import shlex
import sys
import time

import torch

import native_kda


def header(machine, fla):
    """Where, when and with what; fla: whether it takes part."""
    return {
        "command": "python " + shlex.join(sys.argv),
        "machine": machine,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "native_kda": native_kda.__version__,
        "fla": __import__("fla").__version__ if fla else None,
        "fla's configurations": os.environ.get("FLA_CACHE_MODE", "autotuned"),
        "KDA_IMPL": os.environ.get("KDA_IMPL", ""),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(report, path):
    """After each row, so that a run cut short leaves those that it had."""
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
