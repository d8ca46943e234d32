#!/usr/bin/env python3
"""clang-tidy over the units of src/ and tools/ in a build folder, those that changed only.

A unit that was clean is not looked at again while its command, the text of every file it includes,
.clang-tidy and the version of clang-tidy are the same. What was clean is kept, as ccache does, for
all checkouts of a user: one empty file a unit in ~/.cache/native-kda/tidy (or XDG_CACHE_HOME).
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIDY = "clang-tidy-14"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "native-kda/tidy"
NOT_FOR_DEPENDENCIES = {"-c": 0, "-MD": 0, "-o": 1, "-MT": 1, "-MF": 1}


def compile_command(entry):
    """The arguments without the launcher and without what names the results."""
    arguments = shlex.split(entry["command"])
    if pathlib.Path(arguments[0]).name == "ccache":
        arguments.pop(0)
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument not in NOT_FOR_DEPENDENCIES:
            kept.append(argument)
        elif NOT_FOR_DEPENDENCIES[argument] == 1:
            next(rest)
    return kept


@functools.lru_cache(maxsize=None)
def digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def included_files(command, folder):
    """Every file that the unit reads, from the compiler: make's syntax."""
    rule = subprocess.run([*command, "-M"], cwd=folder, capture_output=True, text=True, check=True)
    words = shlex.split(rule.stdout.replace("\\\n", " ").split(":", 1)[1])
    return [str((pathlib.Path(folder) / word).resolve()) for word in words]


def key_of(entry, version):
    command = compile_command(entry)
    parts = [version, digest(ROOT / ".clang-tidy"), *command]
    for path in included_files(command, entry["directory"]):
        parts += [path, digest(path)]
    return hashlib.sha256("\0".join(parts).replace(str(ROOT), "").encode()).hexdigest()


def is_clean(entry, build, version):
    """True, or False and the findings are printed; None: it was clean before."""
    try:
        stamp = CACHE / key_of(entry, version)
    except subprocess.CalledProcessError as error:  # it does not even preprocess
        print(error.stderr, flush=True)
        return False
    if stamp.exists():
        return None
    found = subprocess.run([TIDY, "-quiet", "-p", build, entry["file"]], capture_output=True,
                           text=True, check=False)
    if found.returncode != 0:
        print(found.stdout + found.stderr, flush=True)
        return False
    stamp.touch()
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build", help="folder with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    entries = json.loads((pathlib.Path(options.build) / "compile_commands.json").read_text())
    ours = [entry for entry in entries
            if pathlib.Path(entry["file"]).relative_to(ROOT).parts[0] in ("src", "tools")]
    version = subprocess.run([TIDY, "--version"], capture_output=True, text=True,
                             check=True).stdout
    # The largest first, or the last one runs alone for long.
    ours.sort(key=lambda entry: pathlib.Path(entry["file"]).stat().st_size, reverse=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(lambda entry: is_clean(entry, options.build, version), ours))
    before = verdicts.count(None)
    print(f"tidy: {len(ours)} units, {before} clean before, {verdicts.count(False)} with findings")
    return 1 if False in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
