"""The errors of the compiler. A program that cannot be compiled still runs, instruction by instruction, through the library."""

from __future__ import annotations

from wooly_wis.errors import WisError


class CompilerError(WisError):
    """Root of what can go wrong here."""

    code = "compiler.error"


class UnsupportedError(CompilerError):
    """No kernel is generated for an instruction; the library runs it."""

    code = "compiler.unsupported"


class UnitError(CompilerError):
    """A pass broke a law of units."""

    code = "compiler.unit"


class BuildError(CompilerError):
    """A vendor's compiler refused a source, crashed, or took too long."""

    code = "compiler.build"
