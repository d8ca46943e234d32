#!/usr/bin/env python3
"""Keeps the generated tables of the documentation current.

usage: doc_tables.py (--check | --write) [--signatures PROGRAM] [--kda PROGRAM]

Between "<!-- NAME: begin -->" and "<!-- NAME: end -->" stands what a built program prints:
  docs/tensors.md  signatures      the tensors of each operation (tests/docs/signatures.cpp)
  docs/support.md  cpu, cuda       the implementations on a device (kda support --json)
and what bench/results/ holds:
  docs/kernels/recurrent.md  decode, floor   times of decode steps, and what the memory allows
  README.md, docs/kernels/chunk_fwd.md, chunk_bwd.md, state_scan.md  times (doc_tables_kernels.py)
  docs/python.md, docs/fla.md                reports of the Python package (doc_tables_python.py)
A build without CUDA leaves the section for cuda as it is.
"""

import argparse
import difflib
import json
import pathlib
import re
import subprocess
import sys

import doc_tables_kernels
import doc_tables_python

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


def results_of(name: str) -> tuple:
    """The head and the rows of a file of bench/results."""
    text = (ROOT / "bench" / "results" / name).read_text()
    head, *rows = [json.loads(line) for line in text.splitlines()]
    return head, rows


def decode_section() -> str:
    """A row a batch and number of tokens, a column a type and layout of the states."""
    head, rows = results_of("cuda_h200_decode.json")
    states = ["fp32 [K,V]", "fp32 [V,K]", "bf16 [K,V]", "bf16 [V,K]"]
    cells, floors, shapes = {}, {}, []
    for row in rows:
        shape = tuple(row["shape"][:2])
        if shape not in shapes:
            shapes.append(shape)
        portable = "" if row["impl"].startswith("sm90") else " *"
        cells[shape, row["state"]] = (
            f"{row['median_ms']:.4f} ({row['copy_share']:.0%}){portable}"
        )
        floors[shape, row["state"]] = f"{row['floor_ms']:.4f}"
    text = f"{head['machine']}; {head['date'][:10]}; copy {head['copy_gb_per_s']:.0f} GB/s\n\n"
    columns = ["batch", "tokens", "floor fp32", "floor bf16", *states]
    text += "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n"
    for shape in sorted(shapes, key=lambda shape: (shape[1], shape[0])):
        line = [str(shape[0]), str(shape[1]), floors[shape, states[0]], floors[shape, states[2]]]
        line += [cells[shape, state] for state in states]
        text += "| " + " | ".join(line) + " |\n"
    return text


def floor_section() -> str:
    _, rows = results_of("cuda_h200_decode_floor.json")
    kernels = ["copy", "read_modify_write", "bulk_equal", "bulk_counter"]
    times = {(row["kernel"], row["batch"]): row["median_ms"] for row in rows}
    text = "| batch | " + " | ".join(kernels) + " |\n|---|" + "---|" * len(kernels) + "\n"
    for batch in sorted({batch for kernel, batch in times if kernel == "copy"}):
        cells = [f"{times[kernel, batch]:.4f}" for kernel in kernels]
        text += f"| {batch} | " + " | ".join(cells) + " |\n"
    return text + f"\nAn empty kernel: {times['empty', 0]:.4f} ms.\n"


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

    documents = {
        "docs/kernels/recurrent.md": {"decode": decode_section(), "floor": floor_section()},
        **doc_tables_kernels.sections(),
        **doc_tables_python.sections(),
    }
    if arguments.signatures:
        documents["docs/tensors.md"] = {"signatures": output_of(arguments.signatures)}
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
                    old.splitlines(True), new.splitlines(True), document, "what build and results say"
                )
            )
    if stale:
        sys.exit("stale tables: run the same command with --write in place of --check")


if __name__ == "__main__":
    main()
