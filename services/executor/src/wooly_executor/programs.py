"""The programs that sessions have defined: decoded, verified, prepared, shared by digest.

Forms are kept by their bytes: a program with one new shape decodes and verifies one new form.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from wooly_wis.codec import body_of, decode_form, digest, split_program
from wooly_wis.errors import WisError
from wooly_wis.program import Form, ParamKind, Program
from wooly_wis.verifier import ProgramFacts, Verifier

from wooly_executor.errors import BindingError, ExecutorError, OperationError
from wooly_executor.runtime.protocol import Runtime

_FORMAT = {ParamKind.F64: "d", ParamKind.I64: "q", ParamKind.C128: "dd", ParamKind.BOOL: "q"}
FORMS_KEPT = 65536
PROGRAMS_KEPT = 8192


@dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that may be run.

    Attributes:
        digest: its name.
        facts: what a run must satisfy.
        prepared: the runtime's own form.
        dynamic: slots whose buffers a run creates without an `alloc`.
    """

    digest: bytes
    facts: ProgramFacts
    prepared: Any
    params: struct.Struct
    kinds: tuple[ParamKind, ...]
    plain_params: bool
    dynamic: frozenset[int]

    def unpack_params(self, words: bytes) -> list[Any]:
        """Python values of a run's param words.

        Raises:
            BindingError: wrong number of words.
        """
        if len(words) != self.params.size:
            raise BindingError(f"{len(words) // 8} param words, the program takes {self.params.size // 8}")
        flat = self.params.unpack(words)
        if self.plain_params:
            return list(flat)
        values: list[Any] = []
        rest = iter(flat)
        for kind in self.kinds:
            value = next(rest)
            if kind is ParamKind.BOOL:
                values.append(bool(value))
            elif kind is ParamKind.C128:
                values.append(complex(value, next(rest)))
            else:
                values.append(value)
        return values


class ProgramStore:
    """Programs of all sessions of one executor, by digest."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._verifier = Verifier()
        self._forms: OrderedDict[bytes, Form] = OrderedDict()
        self._ready: OrderedDict[bytes, ReadyProgram] = OrderedDict()

    def define(self, raw: bytes) -> ReadyProgram:
        """Decode, verify and prepare, or find what was prepared before.

        Raises:
            ExecutorError: the program is not well-formed, breaks a law, or cannot run here.
        """
        name = digest(raw)
        ready = self._ready.get(name)
        if ready is not None:
            self._ready.move_to_end(name)
            return ready
        try:
            form_bytes, words = split_program(raw)
            forms = tuple([self._form(f) for f in form_bytes])
            program = Program(forms, body_of(words, [len(f.operands) for f in forms]))
            facts = self._verifier.verify(program)
        except WisError as e:
            error = OperationError(str(e), getattr(e, "instruction", None))
            error.code = e.code
            raise error from e
        kinds = program.param_kinds
        ready = ReadyProgram(
            name,
            facts,
            self._runtime.prepare(program, facts),
            struct.Struct("<" + "".join(_FORMAT[k] for k in kinds)),
            kinds,
            not any(k in (ParamKind.BOOL, ParamKind.C128) for k in kinds),
            frozenset(
                slot
                for i in program.body
                if forms[i.form].opcode == "extern"
                for slot, o in zip(i.slots, forms[i.form].operands, strict=True)
                if o.view is None
            ),
        )
        self._ready[name] = ready
        if len(self._ready) > PROGRAMS_KEPT:
            self._ready.popitem(last=False)
        return ready

    def _form(self, raw: bytes) -> Form:
        form = self._forms.get(raw)
        if form is None:
            form = self._forms[raw] = decode_form(raw)
            if len(self._forms) > FORMS_KEPT:
                self._forms.popitem(last=False)
        return form


__all__ = ["ExecutorError", "ProgramStore", "ReadyProgram"]
