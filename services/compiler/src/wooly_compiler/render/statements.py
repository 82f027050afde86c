"""Prints statements: dispatches each to its method, and prints conditions and sequential loops."""

from __future__ import annotations

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import (
    Apply,
    Atomic,
    Block,
    Const,
    For,
    If,
    Kernel,
    Lanes,
    Load,
    Param,
    Reduce,
    Statement,
    Store,
)
from wooly_wis.kernel.laws import Facts

from wooly_compiler.render.dialects import Dialect
from wooly_compiler.render.loops import Loops
from wooly_compiler.render.page import bare
from wooly_compiler.render.source import Form


class Statements(Loops):
    """A page that prints every statement of a kernel.

    Attributes:
        scalars: types of the kernel's scalar parameters, by name.
    """

    def __init__(self, kernel: Kernel, dialect: Dialect, form: Form, facts: Facts) -> None:
        super().__init__(kernel, dialect, form, facts)
        self.scalars = {s.name: s.dtype for s in kernel.scalars}

    def block(self, block: Block) -> None:
        for s in block:
            self.statement(s)

    def statement(self, s: Statement) -> None:
        match s:
            case Const() | Apply():
                self.compute(s)
            case Param():
                text = s.name if self.scalars[s.name] is not DType.BOOL else f"({s.name} != 0)"
                self.text[s.out] = text
            case Load():
                self.load(s)
            case Store():
                self.store(s)
            case Atomic():
                self.atomic(s)
            case For():
                self._for(s)
            case Lanes():
                self.lanes(s)
            case Reduce():
                self.reduce(s)
            case If():
                self._if(s)

    def _for(self, s: For) -> None:
        for arg, init in zip(s.args, s.inits, strict=True):
            self.declare(arg, self.types[init], bare(self.text[init]), const=False)
        k = f"v{s.index}"
        self.text[s.index] = k
        lower, upper = bare(self.text[s.lower]), self.text[s.upper]
        step = f"++{k}" if s.step == 1 else f"{k} += {self.index(s.step)}"
        self.open(f"for ({self.long} {k} = {lower}; {k} < {upper}; {step})")
        self.loops += 1
        self.block(s.body)
        self.loops -= 1
        if s.args:
            self.assign(s.args, s.yields)
        self.close()
        for result, arg in zip(s.results, s.args, strict=True):
            self.text[result] = self.text[arg]

    def _if(self, s: If) -> None:
        for result, value in zip(s.results, s.then_yields, strict=True):
            self.line(f"{self.ctype(self.facts.types[value])} v{result};")
            self.text[result] = f"v{result}"
        self.open(f"if ({bare(self.text[s.condition])})")
        self.block(s.then)
        if s.results:
            self.assign(s.results, s.then_yields)
        if s.otherwise or s.results:
            self.close("} else {")
            self.depth += 1
            self.block(s.otherwise)
            if s.results:
                self.assign(s.results, s.otherwise_yields)
        self.close()
