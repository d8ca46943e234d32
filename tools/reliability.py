#!/usr/bin/env python3
"""Fills the tables of docs/reliability.md from tests and their results, or checks them.

usage: reliability.py (--check | --write)
       reliability.py --record OUT --machine TEXT --command TEXT REPORT...

A test belongs to a report if its name (NUM_01_...), the comment before it, or for Python its
docstring (NUM-01) holds the id. Rows whose last column begins with "not tested" say why and stay.

--record condenses what tests wrote, gtest's JSON (--gtest_output=json:FILE) or pytest's XML
(--junit-xml=FILE), into bench/results/*_reports.json: a head, then a line for each id and family of
implementations: how many calls its rows ran, what they refused, what failed. The tables show these.
"""

import collections
import datetime
import fnmatch
import json
import pathlib
import re
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
RESULTS = "bench/results/*_reports.json"
FAMILIES = ("reference", "cpu", "cuda", "sm90", "python")
ROW = re.compile(r"^\| ([A-Z0-9]+-\d\d) \| (.*?) \|(.*)\|$")
REASON = re.compile(r"^\| ([A-Z0-9*, -]+) \| ([a-z0-9, ]+) \| (.*) \|$")
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


# --- results ---------------------------------------------------------------------------------


def new_result() -> dict:
    return {"tests": 0, "failed": [], "calls": collections.Counter(),
            "refused": collections.Counter(), "notes": set()}


def from_gtest(path: pathlib.Path):
    """Test, family of its instance or "", failed or not, and its properties."""
    for suite in json.loads(path.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("result") != "COMPLETED":
                continue
            name, _, instance = test["name"].partition("/")
            full = f"{test['classname'].split('/')[-1]}.{name}"
            yield full, instance, bool(test.get("failures")), test


def from_pytest(path: pathlib.Path):
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = f"{case.get('classname').split('.')[-1]}.py::{case.get('name').split('[')[0]}"
        failed = case.find("failure") is not None or case.find("error") is not None
        yield name, "python", failed, {}


def families_of(instance: str, properties: dict) -> dict:
    """Calls by family; those of a test in Python and of an instance without calls are none."""
    calls = {}
    for key, count in properties.items():
        if key.startswith("calls."):
            row = key[len("calls."):]
            calls.setdefault(row.split("_")[0], {})[row] = int(count)
    if instance in FAMILIES:
        calls.setdefault(instance, {})
    return calls


def record(arguments: list) -> None:
    out, machine, command = arguments[0], arguments[2], arguments[4]
    known = set(rows_of(DOCUMENT.read_text().splitlines()))
    ids = collections.defaultdict(list)
    for report, names in tests_by_id(known).items():
        for name in names:
            ids[name].append(report)
    results = collections.defaultdict(new_result)
    for text in arguments[5:]:
        path = pathlib.Path(text)
        reader = from_pytest if path.suffix == ".xml" else from_gtest
        for name, instance, failed, properties in reader(path):
            for report in ids.get(name, []):
                for family, calls in families_of(instance, properties).items():
                    result = results[report, family]
                    result["tests"] += 1
                    result["calls"].update(calls)
                    if failed:
                        result["failed"].append(name)
                    for kind in ("refused", "note"):
                        start = f"{kind}.{family}: "
                        found = {k[len(start):]: int(n) for k, n in properties.items()
                                 if k.startswith(start)}
                        result["refused" if kind == "refused" else "notes"].update(found)
    head = {"machine": machine, "date": datetime.date.today().isoformat(), "command": command}
    with open(out, "w", encoding="utf-8") as file:
        print(json.dumps(head), file=file)
        for (report, family), result in sorted(results.items()):
            line = {"id": report, "on": family, "tests": result["tests"]}
            for key in ("failed", "calls", "refused", "notes"):
                value = result[key]
                if value:
                    line[key] = sorted(value) if isinstance(value, (set, list)) else dict(value)
            print(json.dumps(line), file=file)


def read_results() -> dict:
    """(id, family) -> the lines of all files."""
    found = collections.defaultdict(list)
    for path in sorted(ROOT.glob(RESULTS)):
        for line in path.read_text().splitlines()[1:]:
            result = json.loads(line)
            found[result["id"], result["on"]].append(result)
    return found


# --- tables ----------------------------------------------------------------------------------


class Notes:
    """Letters for the reasons that cells refer to."""

    def __init__(self):
        self.texts = []

    def letter(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        index = self.texts.index(text)
        letters = "abcdefghijklmnopqrstuvwxyz"
        return (letters[index // 26 - 1] if index >= 26 else "") + letters[index % 26]

    def lines(self) -> list:
        return [f"- {self.letter(text)}: {text}" for text in self.texts]


def cell(results: list, notes: Notes) -> tuple:
    """What the table shows, and the kind that is counted."""
    calls = sum(sum(result.get("calls", {}).values()) for result in results)
    refused, limits = {}, set()
    for result in results:
        for reason in result.get("refused", {}):
            # "sm90_chunk_fwd: fp32 tensors (q)": which row it is matters less than why.
            refused[re.sub(r"\bsm90_\w+: ", "", reason)] = True
        limits.update(result.get("notes", []))
    letters = ", ".join(notes.letter(text) for text in [*sorted(refused), *sorted(limits)])
    letters = f" ({letters})" if letters else ""
    if any(result.get("failed") for result in results):
        return "**fails**" + letters, "fails"
    if results and results[0]["on"] == "python":
        tests = sum(result["tests"] for result in results)
        return f"{tests} tests" if tests > 1 else "1 test", "right"
    if calls:
        return f"{calls}{letters}", "with limits" if limits else "right"
    return (f"refused{letters}", "refused") if refused else ("–", "nothing tried")


def totals(kinds: dict, reports: int) -> list:
    names = ("right", "with limits", "refused", "fails", "nothing tried")
    lines = [f"| of {reports} ids | {' | '.join(FAMILIES)} |", "|---|" + "---|" * len(FAMILIES)]
    for name in names:
        counts = [sum(1 for kind in kinds[family] if kind == name) for family in FAMILIES]
        lines.append(f"| {name} | {' | '.join(str(count) for count in counts)} |")
    return lines


def part(lines: list, name: str) -> tuple:
    """Where the part begins and ends."""
    return lines.index(f"<!-- {name}: begin -->") + 1, lines.index(f"<!-- {name}: end -->")


def rows_of(lines: list) -> dict:
    """id -> its row in the document."""
    begin, end = part(lines, "reports")
    return {match[1]: match for match in map(ROW.match, lines[begin:end]) if match}


def reasons(lines: list) -> list:
    """Patterns of ids and families that nothing is tried for, and whether one was met."""
    begin, end = part(lines, "reasons")
    found = []
    for match in filter(None, map(REASON.match, lines[begin:end])):
        for pattern in match[1].split(", "):
            for family in match[2].split(", "):
                found.append([pattern, family, False])
    return found


def with_part(lines: list, name: str, new: list) -> list:
    begin, end = part(lines, name)
    return [*lines[:begin], "", *new, "", *lines[end:]]


def new_document(lines: list, faults: list) -> list:
    rows = rows_of(lines)
    tests = tests_by_id(set(rows))
    faults.extend(f"{report}: {names[0]} names it, but it has no row"
                  for report, names in sorted(tests.items()) if report not in rows)
    results, notes = read_results(), Notes()
    kinds = {family: [] for family in FAMILIES}
    excuses = reasons(lines)
    table = [f"| id | fault seen elsewhere | {' | '.join(FAMILIES)} | tests here |",
             "|---|---|" + "---|" * len(FAMILIES) + "---|"]
    for report, match in rows.items():
        last = match[3].split(" | ")[-1].strip()
        names = tests.get(report, [])
        if last.startswith("not tested"):
            names = []
        elif not names:
            faults.append(f"{report}: no test names it, and the row gives no reason")
        cells = []
        for family in FAMILIES:
            text, kind = cell(results.get((report, family), []), notes)
            cells.append(text)
            kinds[family].append(kind)
            fitting = [e for e in excuses if fnmatch.fnmatch(report, e[0]) and e[1] == family]
            if kind == "nothing tried" and names and not fitting:
                faults.append(f"{report}: nothing is tried on {family}, and no reason is given")
            for excuse in fitting:
                excuse[2] |= kind == "nothing tried"
        shown = ", ".join(f"`{name}`" for name in names) or last
        table.append(f"| {report} | {match[2]} | {' | '.join(cells)} | {shown} |")
    faults.extend(f"the reason for {e[0]} on {e[1]} fits nothing" for e in excuses if not e[2])
    lines = with_part(lines, "reports", table)
    lines = with_part(lines, "totals", totals(kinds, len(rows)))
    return with_part(lines, "notes", notes.lines())


def main() -> None:
    if sys.argv[1:2] == ["--record"] and sys.argv[3:4] == ["--machine"]:
        record(sys.argv[2:])
        return
    if sys.argv[1:] not in (["--check"], ["--write"]):
        sys.exit(__doc__)
    lines = DOCUMENT.read_text().splitlines()
    faults = []
    new = new_document(lines, faults)
    if sys.argv[1] == "--write":
        DOCUMENT.write_text("\n".join(new) + "\n")
    else:
        faults.extend(
            f"is: {old}\n  expected: {line}" for old, line in zip(lines, new) if old != line
        )
        if len(lines) != len(new) or faults:
            faults.append("tools/reliability.py --write fills the tables")
    if faults:
        sys.exit("docs/reliability.md: " + "\n".join(faults))


if __name__ == "__main__":
    main()
