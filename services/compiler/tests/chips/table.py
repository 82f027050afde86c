"""Builds all texts for all chips, and writes what their code needs: a page, and the texts that spill (`make kernel-table`)."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import TypeAlias

from wooly_compiler.build.toolchains import missing

from services.compiler.tests.chips.texts import GROUPS, Text, texts
from services.compiler.tests.chips.usage import Usage, unchecked, usages

TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx90a", "hip:gfx942", "hip:gfx1100")
#: Target whose numbers are listed text by text.
LISTED = "cuda:sm_90"
PAGE = Path(__file__).parents[4] / "docs" / "performance" / "registers.md"
#: Texts that spill: `target / group / name: amount`, one a line. The list may only become shorter.
SPILLS = Path(__file__).parent / "spills.txt"
DTYPES = ("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool")

Measured: TypeAlias = list[tuple[Text, Usage]]


def measured(target: str) -> Measured:
    """Build all texts for a target. Of TTIR's codes for aligned and other addresses, the worse numbers count."""
    return [(text, worst(usages(text, target))) for text in texts(target.partition(":")[0])]


def worst(found: list[Usage]) -> Usage:
    """The largest numbers of several codes."""
    return Usage(*[max(getattr(u, name) for u in found) for name in Usage.__slots__])


def made_by() -> str:
    """The compilers whose code the page describes."""
    return f"NVRTC {importlib.metadata.version('nvidia-cuda-nvrtc')}, Triton {importlib.metadata.version('triton')}"


def summary(target: str, found: Measured) -> str:
    """The lines of the first table for one target."""
    lines = []
    for group in GROUPS:
        of = [u for t, u in found if t.group == group]
        numbers = [len(of), *[max(getattr(u, n) for u in of) for n in ("registers", "stack", "shared")]]
        spilling = sum(u.spilled > 0 for u in of)
        lines.append(f"| `{target}` | {group} | {' | '.join(map(str, [*numbers, spilling]))} |")
    return "\n".join(lines)


def spills(target: str, found: Measured) -> list[str]:
    """The lines of `SPILLS` for one target."""
    return [f"{target} / {t.group} / {t.name}: {u.spilled}" for t, u in found if u.spilled]


def lists(found: Measured, unguarded: dict[str, int]) -> str:
    """The tables of single texts. `unguarded`: registers of the texts in TTIR without checks."""
    of = {g: [(t, u) for t, u in found if t.group == g] for g in GROUPS}
    out = ["## Programs", "", *_table(of["programs"]), "", "## Rows of the op table", ""]
    out += ["A cell has the registers of a kernel that computes the row alone. If the kernel has shared memory,", ""]
    out[-1:] = ["its bytes follow. A kernel with the text of another dtype's kernel is not listed again.", ""]
    out += [f"| row | {' | '.join(DTYPES)} |", "|---|" + "---:|" * len(DTYPES)]
    cells: dict[str, dict[str, str]] = {}
    for t, u in of["rows"]:
        opcode, _, rest = t.name.partition(" ")
        dtype, _, dims = rest.partition(", ")
        name = f"`{opcode}`" + (f", {dims}" if dims else "")
        cells.setdefault(name, {})[dtype] = f"{u.registers}" + (f", {u.shared} B" if u.shared else "")
    out += [f"| {name} | {' | '.join(row.get(d, '') for d in DTYPES)} |" for name, row in sorted(cells.items())]
    on_stack = [f"`{t.name}` ({u.stack})" for t, u in of["rows"] if u.stack]
    out += ["", "Bytes of local memory in functions of NVIDIA's library (no spills): " + ", ".join(on_stack) + "."]
    out += ["", "## Kernels of scripts in CUDA C", "", *_table(of["cuda-c"]), "", "## Kernels of scripts in Triton", ""]
    return "\n".join(out + _table(of["triton"], unguarded))


def _table(found: Measured, unguarded: dict[str, int] | None = None) -> list[str]:
    more, line = (" unchecked |", "---:|") if unguarded is not None else ("", "")
    out = [f"| kernel | registers |{more} spilled, bytes | stack, bytes | shared, bytes |"]
    out.append(f"|---|---:|{line}---:|---:|---:|")
    for t, u in found:
        between = f" {unguarded[t.name]} |" if unguarded is not None else ""
        out.append(f"| {t.name.replace('_', ' ')} | {u.registers} |{between} {u.spilled} | {u.stack} | {u.shared} |")
    return out


def unguarded(found: Measured) -> dict[str, int]:
    """The registers of the texts in TTIR without checks, on `LISTED`."""
    return {t.name: usages(unchecked(t), LISTED)[0].registers for t, _ in found if t.group == "triton"}


HEAD = """# Registers of kernels on GPUs

Command: `make kernel-table`, which writes this page. It needs no GPU.
Compilers: {compilers}; clang 19 for AMD.

The compilers build every generated kernel, every kernel in CUDA C that is translated and every
kernel in Triton with its guards, as the compiler service does. No generated kernel spills on any
chip. Kernels of scripts that spill are in `services/compiler/tests/chips/spills.txt`, which may
only become shorter. The kernel `everything` is a test: it calls each function that CUDA C has here.
`make test` builds a sample. `make test-all` builds everything, compares the numbers with this page,
and builds the kernels of six whole models, which must not spill.

| target | kernels | number | most registers | most stack, bytes | most shared, bytes | that spill |
|---|---|---:|---:|---:|---:|---:|
{summaries}

- `programs` are parts of models and kernels of all kinds, `rows` are the rows of the op table,
  alone.
- Registers are those of one thread. On AMD they are vector registers.
- The stack is local memory of a thread: spills, and arrays in functions of the vendor's library.
- On AMD, a spilled register may go to another kind of register instead of memory. AMD's library of
  functions is not on every machine, so the build for AMD has empty functions in its place.
- A kernel in Triton is compiled twice, for aligned addresses and for all addresses. The larger
  number counts. The column "unchecked" has the registers of the same kernel without guards.
- The two kernels in Triton that spill on sm_90 do so because of the guards. They do not spill with
  twice as many warps: attention needs 165 registers with 8 warps, the product 110 with 16.

The numbers below are those of `{listed}`.

{lists}
"""


def main() -> None:
    """Write the page and the list of texts that spill."""
    for toolchain in ("cuda", "hip"):
        why = missing(toolchain)
        if why:
            sys.exit(f"the table needs both compilers: {why}")
    summaries, spilling, listed = [], [], ""
    for target in TARGETS:
        print(target, file=sys.stderr)
        found = measured(target)
        summaries.append(summary(target, found))
        spilling += spills(target, found)
        if target == LISTED:
            listed = lists(found, unguarded(found))
    page = HEAD.format(compilers=made_by(), summaries="\n".join(summaries), listed=LISTED, lists=listed)
    PAGE.write_text(page)
    SPILLS.write_text("".join(f"{line}\n" for line in spilling))


if __name__ == "__main__":
    main()
