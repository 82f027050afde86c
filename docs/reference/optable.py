"""Writes docs/reference/optable.md, the reference page of the op table, from `wooly_wis.optable` (`make docs`)."""

from __future__ import annotations

from wooly_wis.dtypes import DType
from wooly_wis.flags import SAYS
from wooly_wis.laws import BASE, FORM_LAWS
from wooly_wis.oprules import Arg
from wooly_wis.optable import LOWERING, TABLE, Family, Row
from wooly_wis.scalar_expr import PRIMITIVES


def _signature(row: Row) -> str:
    def text(arg: Arg) -> str:
        return f"{arg.name}: {arg.kind.value}" + ("" if arg.required else f" = {arg.default}")

    return ", ".join(text(a) for a in row.args)


def page() -> str:
    """The page, Markdown."""
    out = [
        "# The op table",
        "",
        "This page is generated from `wooly_wis.optable` by `make docs`; a test compares them. A tensor is a",
        "view of a buffer. A result is an operand, too, and is written to the place of that operand. If an",
        "operator works in place, its first argument is the result, and the computed value is converted to",
        "the dtype of that argument. In formulas, operators have the precedence that they have in C.",
        "",
        "## Memory and library",
        "",
        "| opcode | meaning |",
        "|---|---|",
        *[f"| `{name}` | {base.says} |" for name, base in BASE.items()],
    ]
    for family in Family:
        rows = [row for row in TABLE.values() if row.family is family]
        if not rows:
            continue
        out += ["", f"## {family.value.capitalize()}", "", f"Lowered to {LOWERING[family]}.", ""]
        out += ["| opcode | arguments | meaning | dtype | sizes |", "|---|---|---|---|---|"]
        for row in rows:
            dtypes = "; ".join(dict.fromkeys(result.dtype.says for result in row.results))
            sizes = "; ".join(dict.fromkeys(result.shape.says for result in row.results))
            cells = [_signature(row), row.says, dtypes, sizes]
            out.append(f"| `{row.opcode}` | " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    out += ["", "## Primitives of the formulas", "", "| primitive | arguments | meaning |", "|---|---|---|"]
    out += [f"| `{name}` | {n} | {says} |".replace("||", "\\|\\|") for name, (n, says) in PRIMITIVES.items()]
    out += ["", "## Dtypes", "", "| dtype | bytes | kind |", "|---|---|---|"]
    out += [f"| `{d.label}` | {d.itemsize} | {d.kind} |" for d in DType]
    out += ["", "## Flags", "", "Products, convolutions and recurrent layers may have the attribute `flags`.", ""]
    out += ["| flag | meaning |", "|---|---|", *[f"| `{flag}` | {says} |" for flag, says in SAYS.items()]]
    out += ["", "## Laws of a form", "", "| law | meaning |", "|---|---|"]
    out += [f"| `{law.name}` | {law.says} |" for law in FORM_LAWS]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(page(), end="")
