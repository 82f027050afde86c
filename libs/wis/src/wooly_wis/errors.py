"""The errors that reading and checking WIS can raise. One root, so that a caller can fence off untrusted input."""

from __future__ import annotations


class WisError(Exception):
    """Root of everything that can be wrong with a piece of WIS."""

    code = "wis.error"
    retryable = False


class EncodeError(WisError):
    """A value has no representation in WIS (for example an integer beyond 64 bits)."""

    code = "wis.encode"


class DecodeError(WisError):
    """Bytes are not canonical WIS.

    Attributes:
        offset: byte position at which decoding stopped, or None.
    """

    code = "wis.decode"

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})")
        self.offset = offset


class VerifyError(WisError):
    """A decoded program breaks a law of the instruction set.

    Attributes:
        instruction: index of the offending instruction in the body, or None for a law of the whole program.
        law: short name of the law that is broken.
    """

    code = "wis.verify"

    def __init__(self, message: str, *, instruction: int | None = None, law: str = "") -> None:
        where = "program" if instruction is None else f"instruction {instruction}"
        super().__init__(f"{where}: {message}" + (f" [law: {law}]" if law else ""))
        self.instruction = instruction
        self.law = law


class RuleError(WisError):
    """Operands, attributes, dtypes or sizes do not fit an opcode's row.

    Attributes:
        law: name of the law that is broken: ``operands``, ``args``, ``dtype`` or ``shape``.
    """

    code = "wis.rule"

    def __init__(self, law: str, message: str) -> None:
        super().__init__(message)
        self.law = law


class PlanError(WisError):
    """A plan does not do what its program says, or reaches where it may not.

    Attributes:
        law: name of the law that it breaks.
    """

    code = "wis.plan"

    def __init__(self, message: str, *, law: str) -> None:
        super().__init__(f"{message} [law: {law}]")
        self.law = law


class ArtifactError(WisError):
    """Bytes are no artifact, or not the one that was asked for."""

    code = "wis.artifact"
