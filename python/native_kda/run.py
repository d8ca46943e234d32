"""Runs an unmodified script with flash-linear-attention's KDA calls sent to native_kda.

usage: python -m native_kda.run SCRIPT [ARGUMENT...]
       python -m native_kda.run -m MODULE [ARGUMENT...]
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # Of a package on the way; what else a package cannot import is its own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if not arguments or arguments == ["-m"]:
        print(__doc__, file=sys.stderr)
        return 2
    script = None if arguments[0] == "-m" else arguments[0]
    if script is not None and not os.path.exists(script):
        print(f"native_kda.run: found no file {script!r}, expected a script", file=sys.stderr)
        return 2
    import native_kda

    try:
        native_kda.fla.enable()
    except (ImportError, ValueError) as error:  # no fla, or a variable of the environment
        missing = isinstance(error, ImportError)
        reason = "flash-linear-attention cannot be imported: " if missing else ""
        print(f"native_kda.run: {reason}{error}", file=sys.stderr)
        return 1
    if script is None:
        if not _is_module(arguments[1]):
            found = f"found no module {arguments[1]!r}, expected one that can be imported"
            print(f"native_kda.run: {found}", file=sys.stderr)
            return 2
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        # As the interpreter does: imports beside the script work.
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
