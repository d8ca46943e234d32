#!/usr/bin/env python3
"""Fills the last column of docs/reliability.md with tests, or checks that those named there exist.

usage: reliability.py (--check | --write)

A test belongs to a report if its name (NUM_01_...), the comment before it, or for Python its
docstring (NUM-01) holds the id. Rows whose last column begins with "not tested" say why and stay.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| ([A-Z0-9]+-\d\d) \| (.*) \| (.*?) ?\|$")
ID = re.compile(r"(?<![A-Za-z0-9])([A-Z][A-Z0-9]*)[-_](\d\d)(?![A-Za-z0-9])")
CPP_TEST = re.compile(
    r"((?:^//.*\n)*)^(?:TEST|TEST_F|TEST_P|TYPED_TEST)\((\w+),\s*(\w+)\)", re.MULTILINE
)
PYTHON_TEST = re.compile(
    r"((?:^#.*\n)*)(?:^@.*\n)*^def (test_\w+)\(.*?\).*:\n(?:    \"\"\"(.*?)\"\"\")?",
    re.MULTILINE,
)
CMAKE_TEST = re.compile(r"add_test\(NAME (\w+)")


def ids_in(text: str) -> list:
    return [f"{kind}-{number}" for kind, number in ID.findall(text)]


def tests_by_id(known: set) -> dict:
    """id -> names of tests. UTF-16 and the like are of no kind that has rows."""
    found = {}
    kinds = {name.split("-")[0] for name in known}

    def add(text: str, name: str) -> None:
        for report in ids_in(text):
            if report.split("-")[0] in kinds and name not in found.setdefault(report, []):
                found[report].append(name)

    for path in sorted((ROOT / "tests").rglob("*")):
        if path.suffix in (".cpp", ".cu"):
            for comment, suite, name in CPP_TEST.findall(path.read_text()):
                add(f"{comment} {name}", f"{suite}.{name}")
        elif path.suffix == ".py":
            for comment, name, docstring in PYTHON_TEST.findall(path.read_text()):
                add(f"{comment} {docstring}", f"{path.name}::{name}")
        elif path.name == "CMakeLists.txt":
            for name in CMAKE_TEST.findall(path.read_text()):
                add(name, name)
    return found


def main() -> None:
    if sys.argv[1:] not in (["--check"], ["--write"]):
        sys.exit(__doc__)
    lines = DOCUMENT.read_text().splitlines()
    known = {match[1] for match in map(ROW.match, lines) if match}
    tests = tests_by_id(known)
    faults = [
        f"{report}: {names[0]} names it, but it has no row"
        for report, names in sorted(tests.items())
        if report not in known
    ]
    new = []
    for line in lines:
        match = ROW.match(line)
        if match and not match[3].startswith("not tested"):
            report, fault, column = match.groups()
            names = tests.get(report, [])
            if not names:
                faults.append(f"{report}: no test names it, and the row gives no reason")
            for name in re.findall("`(.*?)`", column):
                if name not in names and sys.argv[1] == "--check":
                    faults.append(f"{report}: {name} is no test with this id")
            if not column and sys.argv[1] == "--check":
                faults.append(f"{report}: the last column is empty")
            line = f"| {report} | {fault} | {', '.join(f'`{name}`' for name in names)} |"
        new.append(line)
    if sys.argv[1] == "--write":
        DOCUMENT.write_text("\n".join(new) + "\n")
    if faults:
        sys.exit("docs/reliability.md: " + "\n".join(faults))


if __name__ == "__main__":
    main()
