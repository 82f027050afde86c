"""The programs that sessions have defined: decoded, verified, prepared, shared by digest.

Forms are kept by their bytes: a program with one new shape decodes and verifies one new form.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wooly_wis.codec import body_of, decode_form, digest, split_program
from wooly_wis.errors import VerifyError, WisError
from wooly_wis.foreign import OPCODE, UNCHECKED, Source, launch_of
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, Program, Role
from wooly_wis.verifier import ProgramFacts, Verifier

from wooly_executor.errors import (
    BindingError,
    ExecutorError,
    OpaqueKernelError,
    OperationError,
    UnknownSourceError,
)
from wooly_executor.estimates import Cut, Estimate, instruction_ns
from wooly_executor.memory.pool import room_of
from wooly_executor.runtime.foreign import ForeignKernel
from wooly_executor.runtime.protocol import Runtime

_FORMAT = {ParamKind.F64: "d", ParamKind.I64: "q", ParamKind.C128: "dd", ParamKind.BOOL: "q"}
#: What the store keeps at most, in numbers and in bytes of definitions.
FORMS_KEPT = 65536
FORM_BYTES_KEPT = 32 << 20
PROGRAMS_KEPT = 8192
PROGRAM_BYTES_KEPT = 256 << 20
_NO_SOURCES: Mapping[bytes, Source] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that may be run.

    Attributes:
        digest: its name.
        facts: what a run must satisfy.
        prepared: the runtime's own form.
        estimate: what it is expected to take.
        dynamic: slots whose buffers a run creates without an `alloc`.
        written: slots that the program writes.
        peak_bytes: most that the program's own slots hold at one time.
        nbytes: length of its definition.
        kept: (slot, bytes) of the buffers that it leaves behind.
        workspace: bytes that it needs beside them.
        room: all that it takes at most, with what blocks are rounded up to.
        computing: instructions that compute.
        sources: digests of the texts that its own kernels are in.
        kernels: its own kernels, not in our IR: until they are compiled, no run can begin.
        unchecked: a launch says that its kernel is to be run as it is.
    """

    digest: bytes
    facts: ProgramFacts
    prepared: Any
    estimate: Estimate
    params: struct.Struct
    kinds: tuple[ParamKind, ...]
    plain_params: bool
    dynamic: frozenset[int]
    written: frozenset[int]
    peak_bytes: int
    nbytes: int
    kept: tuple[tuple[int, int], ...]
    workspace: int
    room: int
    computing: int
    sources: frozenset[bytes]
    kernels: tuple[ForeignKernel, ...]
    unchecked: bool

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

    def observe(self, cut: Cut, first: int, times: list[int]) -> None:
        """Kernels from `first` on of a run took this long: see `Estimate.observe`."""
        if self.estimate.observe(cut, first, times):
            self.prepared.edges = self.estimate.cut.edges


@dataclass(frozen=True, slots=True)
class Author:
    """Who defines programs.

    Attributes:
        tenant: whose turn it is to have kernels compiled.
        opaque: whether they may be in texts that nobody here can check.
    """

    tenant: str = ""
    opaque: bool = False


class ProgramStore:
    """Programs of all sessions of one executor, by digest."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rates = runtime.rates()
        self._verifier = Verifier()
        self._forms: dict[bytes, Form] = {}
        self._form_ns: dict[bytes, int] = {}
        self._form_bytes = 0
        self._ready: OrderedDict[bytes, ReadyProgram] = OrderedDict()
        self._ready_bytes = 0

    def define(
        self, raw: bytes, sources: Mapping[bytes, Source] = _NO_SOURCES, author: Author | None = None
    ) -> ReadyProgram:
        """Decode, verify and prepare, or find what was prepared before.

        Args:
            raw: the definition.
            sources: texts of kernels that whoever defines it has, by digest.
            author: who defines it.

        Raises:
            ExecutorError: the program is not well-formed, breaks a law, or cannot run here.
        """
        name = digest(raw)
        ready, author = self._ready.get(name), author or Author()
        if ready is not None:
            self._ready.move_to_end(name)
            _check_sources(ready.sources, sources)
            self._check_author(ready.sources, sources, author, unchecked=ready.unchecked)
            for kernel in ready.kernels:
                kernel.retry()
            return ready
        try:
            form_bytes, words = split_program(raw)
            forms = tuple([self._form(f) for f in form_bytes])
            program = Program(forms, body_of(words, [len(f.operands) for f in forms]))
            facts = self._verifier.verify(program)
            dynamic = _dynamic_slots(program)
        except WisError as e:
            error = OperationError(str(e), getattr(e, "instruction", None))
            error.code = e.code
            raise error from e
        kinds = program.param_kinds
        foreign = [(f, launch_of(f)) for f in forms if f.opcode == OPCODE]
        named = frozenset([launch.source for _, launch in foreign])
        _check_sources(named, sources)
        unchecked = any(dict(launch.options).get(UNCHECKED) for _, launch in foreign)
        self._check_author(named, sources, author, unchecked=unchecked)
        kernels = [
            self._runtime.foreign.kernel(sources[launch.source], launch, form, author.tenant)
            for form, launch in foreign
        ]
        prepared = self._runtime.prepare(program, facts)
        form_ns = [self._expected(raw, form) for raw, form in zip(form_bytes, forms, strict=True)]
        estimate = Estimate(program, form_ns, prepared.pieces)
        prepared.edges = estimate.cut.edges
        peak = _peak_bytes(program, facts)
        kept = tuple(
            (slot, nbytes)
            for slot, (nbytes, gone) in enumerate(zip(facts.slot_alloc, facts.slot_freed, strict=True))
            if nbytes is not None and not gone
        )
        workspace = max(0, peak - facts.kept_bytes)
        ready = ReadyProgram(
            name,
            facts,
            prepared,
            estimate,
            struct.Struct("<" + "".join(_FORMAT[k] for k in kinds)),
            kinds,
            not any(k in (ParamKind.BOOL, ParamKind.C128) for k in kinds),
            dynamic,
            _written_slots(program),
            peak,
            len(raw),
            kept,
            workspace,
            room_of([*[nbytes for _, nbytes in kept], workspace]),
            sum(forms[i.form].opcode not in ("alloc", "free") for i in program.body),
            named,
            tuple(dict.fromkeys(kernels)),
            unchecked,
        )
        self._ready[name] = ready
        self._ready_bytes += ready.nbytes
        while len(self._ready) > PROGRAMS_KEPT or self._ready_bytes > PROGRAM_BYTES_KEPT:
            _, gone = self._ready.popitem(last=False)
            self._ready_bytes -= gone.nbytes
        return ready

    def _check_author(
        self, named: frozenset[bytes], sources: Mapping[bytes, Source], author: Author, *, unchecked: bool
    ) -> None:
        """Make sure that kernels in texts which nobody here can check, or shall, come from somebody who may bring them.

        Raises:
            OpaqueKernelError: they do not.
        """
        if author.opaque:
            return
        foreign = self._runtime.foreign
        opaque = [f"in {language}" for language in {sources[n].language for n in named} & foreign.opaque]
        if unchecked and foreign.unchecked:
            opaque.append(f"that is launched with the option {UNCHECKED}")
        if opaque:
            whose = f"tenant {author.tenant or 'default'}"
            raise OpaqueKernelError(
                f"what a kernel {min(opaque)} loads and stores cannot be checked on this device, so it needs the permission "
                f"opaque_kernels, which {whose} does not have; an administrator gives it: PUT /api/v1/tenants/NAME with "
                '{"opaque_kernels": true}'
            )

    def _form(self, raw: bytes) -> Form:
        form = self._forms.get(raw)
        if form is None:
            form = decode_form(raw)
            _check_references(form)
            if len(self._forms) >= FORMS_KEPT or self._form_bytes + len(raw) > FORM_BYTES_KEPT:
                # The verifier remembers the forms too, so both start anew.
                self._forms.clear()
                self._form_ns.clear()
                self._form_bytes = 0
                self._verifier = Verifier()
            self._forms[raw] = form
            self._form_bytes += len(raw)
        return form

    def _expected(self, raw: bytes, form: Form) -> int:
        ns = self._form_ns.get(raw)
        if ns is None:
            ns = self._form_ns[raw] = instruction_ns(form, self._rates)
        return ns


def _check_sources(named: frozenset[bytes], sources: Mapping[bytes, Source]) -> None:
    """Make sure that whoever names a source has it: a digest alone opens nobody's text.

    Raises:
        UnknownSourceError: one is missing.
    """
    missing = named - sources.keys()
    if missing:
        raise UnknownSourceError(f"this session has not sent the kernel source {min(missing).hex()[:16]}")


def _check_references(form: Form) -> None:
    """Make sure that a form's arguments are operands that have a value before the call.

    Raises:
        VerifyError: one refers to an operand that is only written, or a `fill` refers to any.
    """

    def check(value: Attr) -> None:
        if isinstance(value, OperandRef) and value.index < len(form.operands):
            if form.opcode == "fill" or form.operands[value.index].role is Role.OUT:
                raise VerifyError(f"{form.opcode}: operand {value.index} is only written", law="argument-has-value")
        elif isinstance(value, tuple):
            for item in value:
                check(item)

    for _, value in form.attrs:
        check(value)


def _dynamic_slots(program: Program) -> frozenset[int]:
    """Slots whose size only the operator knows that fills them.

    Raises:
        VerifyError: one is used a second time, where nothing could have checked its bounds.
    """
    dynamic: dict[int, int] = {}
    used: set[int] = set()
    for i, instruction in enumerate(program.body):
        form = program.forms[instruction.form]
        for slot, operand in zip(instruction.slots, form.operands, strict=True):
            unsized = form.opcode == "extern" and operand.view is None
            if slot in dynamic or (unsized and slot in used):
                raise VerifyError(
                    f"slot {slot} is of unknown size and used twice", instruction=i, law="unknown-size-once"
                )
            if unsized:
                dynamic[slot] = i
            used.add(slot)
    return frozenset(dynamic)


def _written_slots(program: Program) -> frozenset[int]:
    return frozenset(
        slot
        for i in program.body
        for slot, o in zip(i.slots, program.forms[i.form].operands, strict=True)
        if o.role is not Role.IN
    )


def _peak_bytes(program: Program, facts: ProgramFacts) -> int:
    held = peak = 0
    for instruction in program.body:
        opcode = program.forms[instruction.form].opcode
        if opcode == "alloc":
            held += facts.slot_alloc[instruction.slots[0]] or 0
            peak = max(peak, held)
        elif opcode == "free":
            held -= facts.slot_alloc[instruction.slots[0]] or 0
    return peak


__all__ = ["ExecutorError", "ProgramStore", "ReadyProgram"]
