#!/usr/bin/env python3
"""Checks that every relative link in the Markdown files leads to a file and a heading, and that a
section that a page or a source file names by its number is one of docs/semantics.md, the one page
with numbers."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SECTION = re.compile(r"\b[Ss]ections? (\d+(?:\.\d+)*)(?: and (\d+(?:\.\d+)*))?")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path: pathlib.Path) -> set:
    """The anchors that a Markdown page's headings get."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)
    return set(slugs)


def numbers(path: pathlib.Path) -> set:
    """The numbers of a page's sections: "7" of "## 7. Tolerances", "7.1"."""
    return set(re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", path.read_text(), re.MULTILINE))


def files(*suffixes: str) -> list:
    """Those of the repository, without what was built in it."""
    names = ((p, p.relative_to(ROOT).parts[0]) for p in ROOT.rglob("*") if p.suffix in suffixes)
    return sorted(p for p, top in names if not top.startswith(("build", ".")))


def wrong_links() -> list:
    wrong = []
    for document in files(".md"):
        for target in LINK.findall(CODE.sub("", document.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (document.parent / file).resolve() if file else document
            if not path.exists():
                wrong.append(f"{document.relative_to(ROOT)}: {target}: no such file")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                wrong.append(f"{document.relative_to(ROOT)}: {target}: no such heading")
    return wrong


def wrong_sections() -> list:
    known = numbers(ROOT / "docs" / "semantics.md")
    wrong = []
    for path in files(".md", ".h", ".cpp", ".cc", ".cu", ".cuh", ".py"):
        for found in SECTION.finditer(path.read_text()):
            wrong += [
                f"{path.relative_to(ROOT)}: {found[0]}: no section {number} in docs/semantics.md"
                for number in filter(None, found.groups())
                if number not in known
            ]
    return wrong


def main() -> None:
    wrong = wrong_links() + wrong_sections()
    print("\n".join(wrong) or "links and sections: all lead somewhere")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
