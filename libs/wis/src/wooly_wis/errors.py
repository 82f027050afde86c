"""Errors that readers and checkers of WIS raise. All have the root `WisError`, so a caller can catch all faults of an input."""

from __future__ import annotations


class WisError(Exception):
    """Root of all errors about WIS: programs, kernels, plans, artifacts, modules."""

    code = "wis.error"
    retryable = False


class EncodeError(WisError, RuntimeError):
    """A value cannot be encoded in WIS (for example an integer beyond 64 bits). Scripts get a RuntimeError."""

    code = "wis.encode"


class DecodeError(WisError):
    """Bytes are not the canonical encoding that the reader expects.

    Attributes:
        offset: position, in bytes, at which decoding stopped; None if unknown.
    """

    code = "wis.decode"

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})")
        self.offset = offset


class VerifyError(WisError):
    """A decoded program breaks a law of the instruction set.

    Attributes:
        instruction: index in the body of the instruction that breaks the law; None if the law is about the whole program.
        law: short name of the broken law.
    """

    code = "wis.verify"

    def __init__(self, message: str, *, instruction: int | None = None, law: str = "") -> None:
        where = "program" if instruction is None else f"instruction {instruction}"
        super().__init__(f"{where}: {message}" + (f" [law: {law}]" if law else ""))
        self.instruction = instruction
        self.law = law


class RuleError(WisError):
    """The operands, attributes, dtypes or sizes of a form do not match the opcode's row of the op table.

    Attributes:
        law: name of the broken law: ``operands``, ``args``, ``dtype``, ``shape`` or ``launch``.
    """

    code = "wis.rule"

    def __init__(self, law: str, message: str) -> None:
        super().__init__(message)
        self.law = law


class PlanError(WisError):
    """A plan computes something else than its program, or accesses memory outside of its slots.

    Attributes:
        law: name of the broken law.
    """

    code = "wis.plan"

    def __init__(self, message: str, *, law: str) -> None:
        super().__init__(f"{message} [law: {law}]")
        self.law = law


class ArtifactError(WisError):
    """Bytes are not an artifact, or they are another artifact than the requested one."""

    code = "wis.artifact"
