#!/usr/bin/env python3
"""Checks that every relative link in the Markdown files leads to a file and a heading."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path: pathlib.Path) -> set:
    """The anchors that a Markdown page's headings get."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)
    return set(slugs)


def documents() -> list:
    return [p for p in ROOT.rglob("*.md") if not p.relative_to(ROOT).parts[0].startswith("build")]


def main() -> None:
    wrong = []
    for document in documents():
        for target in LINK.findall(CODE.sub("", document.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (document.parent / file).resolve() if file else document
            if not path.exists():
                wrong.append(f"{document.relative_to(ROOT)}: {target}: no such file")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                wrong.append(f"{document.relative_to(ROOT)}: {target}: no such heading")
    print("\n".join(wrong) or "links: all lead somewhere")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
