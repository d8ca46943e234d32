"""Runs an unmodified script with flash-linear-attention's KDA calls sent to native_kda.

usage: python -m native_kda.run SCRIPT [ARGUMENT...]
       python -m native_kda.run -m MODULE [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import sys


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if not arguments or arguments == ["-m"]:
        print(__doc__, file=sys.stderr)
        return 2
    import native_kda

    try:
        native_kda.fla.enable()
    except (ImportError, ValueError) as error:  # no fla, or a variable of the environment
        missing = isinstance(error, ImportError)
        reason = "flash-linear-attention cannot be imported: " if missing else ""
        print(f"native_kda.run: {reason}{error}", file=sys.stderr)
        return 1
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        # As the interpreter does: imports beside the script work.
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
