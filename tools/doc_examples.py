#!/usr/bin/env python3
"""Writes each complete program in the given Markdown files to a folder and prints the paths.

usage: doc_examples.py FOLDER DOCUMENT...

A complete program is a block fenced as cpp or c that has a main function. A file is rewritten only
if it changed, so that a build tool sees no new work.
"""

import pathlib
import re
import sys

FENCE = re.compile(r"^```(cpp|c)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for document in map(pathlib.Path, sys.argv[2:]):
        programs = [m for m in FENCE.findall(document.read_text()) if "int main(" in m[1]]
        if not programs:
            sys.exit(f"{document}: found no complete program, expected at least one")
        for number, (language, text) in enumerate(programs, 1):
            path = folder / f"{document.stem.lower()}_{number}.{language}"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            print(path)


if __name__ == "__main__":
    main()
