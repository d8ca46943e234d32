#!/usr/bin/env python3
"""Keeps the generated tables of the documentation current.

usage: doc_tables.py (--check | --write) [--signatures PROGRAM] [--kda PROGRAM]

Between "<!-- NAME: begin -->" and "<!-- NAME: end -->" stands what a built program prints:
  docs/api.md      signatures      the tensors of each operation (tests/docs/signatures.cpp)
  docs/support.md  cpu, cuda       the implementations on a device (kda support --json)
A build without CUDA leaves the section for cuda as it is.
"""

import argparse
import difflib
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def support_sections(kda: str) -> dict:
    """One table a device, rows in the order of preference."""
    rows = [json.loads(line) for line in output_of(kda, "support", "--json").splitlines()]
    sections = {}
    for row in rows:
        if "features" not in row:
            continue
        table = sections.setdefault(
            row["device"], "| operation | implementation | takes |\n|---|---|---|\n"
        )
        line = f"| {row['operation']} | `{row['impl']}` | {row['features']} |\n"
        sections[row["device"]] = table + line
    return sections


def replace(text: str, name: str, section: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"found no '{begin.strip()}' ... '{end}' to fill")
    return pattern.sub(lambda _: f"{begin}\n{section.strip()}\n\n{end}", text)


def main() -> None:
    parser = argparse.ArgumentParser()
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    parser.add_argument("--signatures", metavar="PROGRAM")
    parser.add_argument("--kda", metavar="PROGRAM")
    arguments = parser.parse_args()

    documents = {}
    if arguments.signatures:
        documents["docs/api.md"] = {"signatures": output_of(arguments.signatures)}
    if arguments.kda:
        documents["docs/support.md"] = support_sections(arguments.kda)
    stale = False
    for document, sections in documents.items():
        path = ROOT / document
        old = new = path.read_text()
        for name, section in sections.items():
            new = replace(new, name, section)
        if new == old:
            continue
        if arguments.write:
            path.write_text(new)
            print(f"{document}: written")
        else:
            stale = True
            sys.stdout.writelines(
                difflib.unified_diff(
                    old.splitlines(True), new.splitlines(True), document, "what the build prints"
                )
            )
    if stale:
        sys.exit("stale tables: run the same command with --write in place of --check")


if __name__ == "__main__":
    main()
