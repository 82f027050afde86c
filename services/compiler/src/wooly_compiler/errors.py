"""The errors of the compiler. A program that cannot be compiled still runs: the library executes each instruction."""

from __future__ import annotations

from wooly_wis.errors import WisError


class CompilerError(WisError):
    """Root of the compiler's errors."""

    code = "compiler.error"


class UnsupportedError(CompilerError):
    """The compiler cannot generate a kernel for an instruction. The library runs the instruction."""

    code = "compiler.unsupported"


class UnitError(CompilerError):
    """A pass broke a law of units. This is a bug in the compiler."""

    code = "compiler.unit"


class BuildError(CompilerError):
    """A vendor's compiler rejected a source, crashed, or ran out of time."""

    code = "compiler.build"
