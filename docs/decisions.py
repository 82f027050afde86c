"""Writes docs/adr/index.md: number, title and status of every decision record (`make docs`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "adr"
HEAD = """# Decisions

An architecture decision record (ADR) states one decision: its context, the decision itself in one
sentence, and its consequences. The title of a record is its decision. A decision does not change
after it was made. A later record may supersede it; then both name each other under "Status".

A new record takes the next number and the name `NNNN-title-in-lower-case.md`, and has at most 40
lines. `make docs` writes this page, and `tests/test_docs.py` checks the records. The
[glossary](../../ARCHITECTURE.md#glossary) explains the private words of Wooly.

| number | decision | status |
|---|---|---|
"""


def status_of(record: str) -> str:
    """What stands behind "Status:" of a record, as one line."""
    found = re.search(r"^Status: (.+?)\n\n", record, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("the record has no line that begins with `Status: `")
    return " ".join(found[1].split())


def page() -> str:
    """The whole page: a row for each record, without the explanations in brackets of its status."""
    rows = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        record = path.read_text()
        title = record.partition("\n")[0].partition(". ")[2]
        status = re.sub(r" \([^)]*\)", "", status_of(record)).rstrip(".")
        rows.append(f"| [{path.name[:4]}]({path.name}) | {title} | {status} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
