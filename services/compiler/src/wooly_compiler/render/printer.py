"""Prints a kernel as C, in one of two forms:

- `simt`, for GPUs: points without lanes are threads; a point with lanes is a work-group and its lanes are the threads.
- `loops`, for CPUs: a work-item processes a block of points; lanes are an inner loop, which is vectorized.

A reduction has the same order in both forms, because each lane has its own accumulator.

A page has layers, and each layer uses only those below: `page` (lines), `operations` (computations), `accesses` (memory),
`loops` (lanes and folds), `statements` (a kernel's whole body), and this module (points).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Block, For, If, Kernel, Lanes, Reduce
from wooly_wis.kernel.laws import verify
from wooly_wis.program import Role

from wooly_compiler.render.dialects import Dialect
from wooly_compiler.render.source import Form, Source
from wooly_compiler.render.statements import Statements

#: Approximate number of elements that a work-item of the `loops` form processes.
CHUNK: Final = 8192


def render(kernel: Kernel, dialect: Dialect, form: Form) -> Source:
    """Return the source of a kernel. Its parameters are the arrays, then the scalars.

    Raises:
        KernelError: the kernel breaks a law.
        RenderError: the dialect lacks an operation.
    """
    return render_together([kernel], dialect, form)[0]


def render_together(kernels: Sequence[Kernel], dialect: Dialect, form: Form) -> list[Source]:
    """Return the sources of several kernels with different names. All share one text: shared functions, then all kernels.

    Raises:
        KernelError: a kernel breaks a law.
        RenderError: the dialect lacks an operation.
    """
    pages = [_Printer(kernel, dialect, form, verify(kernel)) for kernel in kernels]
    printed = [page.kernel_text() for page in pages]
    functions: dict[str, str] = {}
    for page in pages:
        functions.update(page.functions)
    text = dialect.prologue + "".join([f"\n{t}" for t in (*functions.values(), *[t for t, _ in printed])])
    return [
        Source(p.kernel.name, dialect.name, text, groups, p.threads)
        for p, (_, groups) in zip(pages, printed, strict=True)
    ]


class _Printer(Statements):
    """The page of a kernel: prints its head, and how its points become work-items."""

    def kernel_text(self) -> tuple[str, int]:
        """Return the kernel without the functions before it, and the number of work-groups of a launch."""
        kernel = self.kernel
        groups = self._loops() if self.form is Form.LOOPS else self._simt()
        args = [
            self.d.pointer.format(const="const " if a.role is Role.IN else "", type=self.d.types[a.dtype], name=a.name)
            for a in kernel.arrays
        ]
        args += [f"const {self.d.types[s.dtype]} {s.name}" for s in kernel.scalars]
        head = self.d.kernel.format(name=kernel.name, args=", ".join(args), threads=self.threads)
        body = "\n".join([f"  {s};" for s in self.shared] + self.lines)
        return f"{head} {{\n{body}\n}}\n", groups

    def _coordinates(self, flat: str, upto: int) -> None:
        """Print the coordinates of a point, computed from its number among the first `upto` dimensions."""
        below = 1
        texts: list[str] = []
        for k in reversed(range(upto)):
            extent = self.kernel.space[k]
            text = flat if below == 1 else f"{flat} / {self.index(below)}"
            if k and extent > 1:
                text = f"{text} % {self.index(extent)}" if below == 1 else f"({text}) % {self.index(extent)}"
            texts.append(text if extent > 1 else self.index(0))
            below *= extent
        for point, text in zip(self.kernel.points[:upto], reversed(texts), strict=True):
            if self.counts[point]:
                self.declare(point, DType.I64, text)

    def _simt(self) -> int:
        total = math.prod(self.kernel.space)
        group, thread = f"({self.long}){self.d.group}", f"({self.long}){self.d.thread}"
        if self.grouped:
            self.line(f"const {self.long} t = {thread};")
            if self.kernel.space:
                self.line(f"const {self.long} p = {group};")
                self._coordinates("p", len(self.kernel.space))
            self._scratch()
            self.block(self.kernel.body)
            return total
        self.line(f"const {self.long} p = {group} * {self.index(self.threads)} + {thread};")
        if total % self.threads:
            self.line(f"if (p >= {self.index(total)}) return;")
        self._coordinates("p", len(self.kernel.space))
        self._scratch()
        self.block(self.kernel.body)
        return -(-total // self.threads)

    def _scratch(self) -> None:
        for s in self.kernel.scratch:
            c = self.d.types[s.dtype]
            if self.form is Form.SIMT and self.grouped:
                self.shared.append(self.d.shared.format(type=c, name=s.name, n=s.numel))
            else:
                self.line(f"{c} {s.name}[{s.numel}];")

    def _loops(self) -> int:
        space = self.kernel.space
        if self.grouped or not space:
            return self._loops_over_groups()
        inner, outer = space[-1], math.prod(space[:-1])
        item = f"({self.long}){self.d.group}"
        if inner >= CHUNK:
            parts = -(-inner // CHUNK)
            self.line(f"const {self.long} g = {item};")
            row = "g" if parts == 1 else f"g / {self.index(parts)}"
            if outer > 1:
                self.line(f"const {self.long} p = {row};")
                self._coordinates("p", len(space) - 1)
            else:
                self._zero(len(space) - 1)
            first = "0" if parts == 1 else f"g % {self.index(parts)} * {self.index(CHUNK)}"
            self.line(f"const {self.long} first = {first};")
            last = self.index(inner)
            if parts > 1:
                end = f"first + {self.index(CHUNK)}"
                last = end if inner % CHUNK == 0 else f"({end} < {last} ? {end} : {last})"
            self.line(f"const {self.long} last = {last};")
            self._inner("first", "last")
            return outer * parts
        rows = max(1, CHUNK // inner)
        self._rows(rows, outer)
        self._coordinates("p", len(space) - 1)
        self._inner("0", self.index(inner))
        self.close()
        return -(-outer // rows)

    def _zero(self, upto: int) -> None:
        for point in self.kernel.points[:upto]:
            if self.counts[point]:
                self.declare(point, DType.I64, self.index(0))

    def _rows(self, rows: int, outer: int) -> None:
        self.line(f"const {self.long} g = ({self.long}){self.d.group} * {self.index(rows)};")
        end = f"g + {self.index(rows)}"
        last = end if outer % rows == 0 else f"({end} < {self.index(outer)} ? {end} : {self.index(outer)})"
        self.line(f"const {self.long} end = {last};")
        self.open(f"for ({self.long} p = g; p < end; ++p)")

    def _inner(self, first: str, last: str) -> None:
        point = self.kernel.points[-1]
        self.open(f"for ({self.long} v{point} = {first}; v{point} < {last}; ++v{point})")
        self.text[point] = f"v{point}"
        self._scratch()
        self.block(self.kernel.body)
        self.close()

    def _work(self, block: Block) -> int:
        """Return the maximum number of elements that a point processes."""
        total = 0
        for s in block:
            match s:
                case Lanes() | Reduce():
                    total += s.extent
                case For():
                    low, high = self.facts.intervals[s.lower], self.facts.intervals[s.upper]
                    assert low is not None and high is not None
                    total += max(self._work(s.body), 1) * max(-(-(high[1] - low[0]) // s.step), 1)
                case If():
                    total += max(self._work(s.then), self._work(s.otherwise))
                case _:
                    pass
        return total

    def _loops_over_groups(self) -> int:
        total = math.prod(self.kernel.space)
        work = self._work(self.kernel.body)
        rows = min(total, max(1, CHUNK // max(work, 1)))
        self._scratch()
        self._rows(rows, total)
        self._coordinates("p", len(self.kernel.space))
        self.block(self.kernel.body)
        self.close()
        return -(-total // rows)
