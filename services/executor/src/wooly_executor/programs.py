"""The programs that sessions have defined: decoded, verified, prepared, and shared by digest.

Forms are cached by their bytes: a program with one new shape decodes and verifies one new form. The decoder threads and the
device's thread share the store. Long operations pause (`wooly_wis.pauses`), and no thread pauses while it holds the lock.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from wooly_wis.codec import body_of, decode_form, digest, split_program
from wooly_wis.errors import DecodeError, VerifyError, WisError
from wooly_wis.foreign import OPCODE, UNCHECKED, Launch, Source, launch_of
from wooly_wis.limits import MAX_NODES, MAX_PROGRAM_BYTES
from wooly_wis.pauses import pause
from wooly_wis.program import Attr, Form, Instruction, OperandRef, ParamKind, Program, Role
from wooly_wis.verifier import ProgramFacts, Verifier, nodes_of

from wooly_executor.errors import (
    BindingError,
    ExecutorError,
    OpaqueKernelError,
    OperationError,
    UnknownSourceError,
)
from wooly_executor.estimates import Cut, Estimate, Estimates, instruction_ns
from wooly_executor.memory.pool import room_of
from wooly_executor.runtime.bindings import BindingCheck
from wooly_executor.runtime.extensions import unchecked_operators
from wooly_executor.runtime.foreign import ForeignKernel
from wooly_executor.runtime.protocol import Runtime

_FORMAT = {ParamKind.F64: "d", ParamKind.I64: "q", ParamKind.C128: "dd", ParamKind.BOOL: "q"}
#: Maximum number of cached forms, and of cached programs that no session has, however small they are.
FORMS_KEPT = 65536
#: Maximum number of instructions of the bodies that are kept to find equal ones. An instruction takes about 200 bytes.
INSTRUCTIONS_KEPT = 1 << 16
PROGRAMS_KEPT = 8192
#: Estimated host memory, in bytes: per program; per instruction and per slot that it names; per kernel of a run, with its
#: measured times; per form and per operand or value of a form. Measured with tracemalloc on CPython 3.11, over programs of 64 to
#: 8,000 instructions, and rounded up for the data that is built when a program runs often.
PROGRAM_BYTES = 4096
INSTRUCTION_BYTES = 1024
REFERENCE_BYTES = 400
KERNEL_BYTES = 1536
FORM_BYTES = 1792
NODE_BYTES = 320
_NO_SOURCES: Mapping[bytes, Source] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that can run.

    Attributes:
        digest: the program's name.
        facts: the verifier's facts; a run must satisfy them.
        prepared: the form that the runtime executes.
        estimate: the expected times.
        params: layout of the param words.
        kinds: kinds of the params.
        plain_params: the param words need no conversion.
        dynamic: slots whose buffers a run creates without an `alloc`.
        written: slots that the program writes.
        peak_bytes: most bytes that the program's own slots hold at one time.
        nbytes: size of its definition.
        held: estimated host memory of the program and its forms, in bytes.
        kept: (slot, bytes) of the buffers that remain after a run.
        workspace: bytes that a run needs besides those buffers.
        room: most bytes that a run takes, with blocks rounded up.
        computing: number of instructions that compute.
        sources: digests of the sources of its foreign kernels.
        kernels: its foreign kernels; a run begins only after they are compiled.
        unchecked: a launch asks to run its kernel without checks.
        opaque_operators: extension operators that cannot be checked.
        bindings: checks the buffers of a run.
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
    held: int
    kept: tuple[tuple[int, int], ...]
    workspace: int
    room: int
    computing: int
    sources: frozenset[bytes]
    kernels: tuple[ForeignKernel, ...]
    unchecked: bool
    opaque_operators: frozenset[str]
    bindings: BindingCheck

    def unpack_params(self, words: bytes) -> list[Any]:
        """Python values of a run's param words.

        Raises:
            BindingError: the number of words is wrong.
        """
        if len(words) != self.params.size:
            raise BindingError(f"the run has {len(words) // 8} param words, the program needs {self.params.size // 8}")
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

    def observe(self, cut: Cut, first: int, times: list[int], host_bound: Sequence[bool] = ()) -> None:
        """Add the measured times of kernels, from kernel `first` on: see `Estimate.observe`."""
        estimate, prepared = self.estimate, self.prepared
        estimate.observe(cut, first, times, host_bound)
        # a program that shares the estimate may have moved the edges
        prepared.edges, prepared.settled = estimate.cut.edges, estimate.settled


@dataclass(frozen=True, slots=True)
class Author:
    """The session that defines a program.

    Attributes:
        tenant: the tenant whose turn the compilation of its kernels uses.
        opaque: it may use kernels that cannot be checked.
    """

    tenant: str = ""
    opaque: bool = False


class _Known(NamedTuple):
    """A verified form.

    Attributes:
        form: the decoded form.
        ends: bytes that the buffer of each operand must have.
        ns: expected time of an instruction of this form.
        nodes: number of its operands and values.
        notes: what the runtime has found out about the form.
    """

    form: Form
    ends: tuple[int, ...]
    ns: int
    nodes: int
    notes: dict[str, Any]

    @property
    def held(self) -> int:
        """Estimated host memory, in bytes."""
        return FORM_BYTES + NODE_BYTES * self.nodes


class ProgramStore:
    """The programs of all sessions of one executor, by digest.

    Args:
        runtime: prepares programs.
        kept_bytes: maximum host memory, in bytes, of cached programs that no session has. Forms may use half as much.
        dropped: called in the device's thread with the digest of a program that leaves the store.

    Attributes:
        held: estimated host memory of the programs that sessions have, each counted once, in bytes.
    """

    def __init__(
        self, runtime: Runtime, kept_bytes: int = 256 << 20, dropped: Callable[[bytes], None] | None = None
    ) -> None:
        self._runtime = runtime
        self._kept_bytes, self._forms_bytes = kept_bytes, kept_bytes // 2
        self._rates, self._estimates = runtime.rates(), Estimates()
        self._lock = threading.Lock()
        self._forms: OrderedDict[bytes, _Known] = OrderedDict()
        self._forms_held = 0
        self._bodies: OrderedDict[tuple[bytes, tuple[int, ...]], tuple[Instruction, ...]] = OrderedDict()
        self._instructions = 0
        self._ready: dict[bytes, ReadyProgram] = {}
        self._idle: OrderedDict[bytes, ReadyProgram] = OrderedDict()
        self._idle_held = 0
        self._holders: Counter[bytes] = Counter()
        self.held = 0
        self._dropped = dropped

    # -- references of sessions (device's thread) --------------------------------------------------------------------

    def hold(self, ready: ReadyProgram) -> None:
        """Note that one more session has a program."""
        name = ready.digest
        self._holders[name] += 1
        if self._holders[name] > 1:
            return
        self.held += ready.held
        with self._lock:
            idle = self._idle.pop(name, None)
            if idle is not None:
                self._idle_held -= idle.held
            self._ready[name] = ready
        self._trim()

    def let_go(self, ready: ReadyProgram) -> None:
        """Note that one session less has a program. Without a session, the program stays cached for a while."""
        name = ready.digest
        self._holders[name] -= 1
        if self._holders[name]:
            return
        del self._holders[name]
        self.held -= ready.held
        with self._lock:
            self._idle[name] = ready
            self._idle_held += ready.held
        self._trim()

    def _trim(self) -> None:
        """Drop the oldest cached programs while the cache is too large."""
        while self._idle and (self._idle_held > self._kept_bytes or len(self._idle) > PROGRAMS_KEPT):
            with self._lock:
                name, gone = self._idle.popitem(last=False)
                self._idle_held -= gone.held
                del self._ready[name]
            if self._dropped is not None:
                self._dropped(name)

    # -- definitions (any thread) ------------------------------------------------------------------------------------

    def known(self, name: bytes) -> bool:
        """Whether the store has a program, so that `define` is quick."""
        return name in self._ready

    def define(
        self, raw: bytes, sources: Mapping[bytes, Source] = _NO_SOURCES, author: Author | None = None
    ) -> ReadyProgram:
        """Decode, verify and prepare a program, or return the prepared one from the store.

        Args:
            raw: the definition.
            sources: kernel sources of the defining session, by digest.
            author: the defining session.

        Raises:
            ExecutorError: the program is malformed, breaks a law, or cannot run on this device.
        """
        if len(raw) > MAX_PROGRAM_BYTES:
            raise DecodeError(f"the program has {len(raw)} bytes, at most {MAX_PROGRAM_BYTES} are allowed")
        name = digest(raw)
        ready, author = self._ready.get(name), author or Author()
        if ready is not None:
            _check_sources(ready.sources, sources)
            self._check_author(ready.sources, sources, author, unchecked=ready.unchecked)
            _check_operators(ready.opaque_operators, author)
            for kernel in ready.kernels:
                kernel.retry()
            return ready
        ready = self._made(name, raw, sources, author)
        with self._lock:
            other = self._ready.get(name)
            if other is None:
                self._ready[name] = self._idle[name] = ready
                self._idle_held += ready.held
        return other or ready

    def _made(self, name: bytes, raw: bytes, sources: Mapping[bytes, Source], author: Author) -> ReadyProgram:
        """Decode, verify and prepare a program."""
        program, known, facts = self._checked(raw)
        kinds = program.param_kinds
        foreign: list[tuple[Form, Launch]] = []
        for k in known:
            if k.form.opcode == OPCODE:
                pause()
                foreign.append((k.form, launch_of(k.form)))
        named = frozenset([launch.source for _, launch in foreign])
        _check_sources(named, sources)
        unchecked = any(dict(launch.options).get(UNCHECKED) for _, launch in foreign)
        self._check_author(named, sources, author, unchecked=unchecked)
        opaque_operators = unchecked_operators([k.form for k in known])
        _check_operators(opaque_operators, author)
        kernels: list[ForeignKernel] = []
        for form, launch in foreign:
            pause()
            with self._lock:  # for each kernel separately, because the device's thread needs the lock, too
                kernels.append(self._runtime.foreign.kernel(sources[launch.source], launch, form, author.tenant))
        prepared = self._runtime.prepare(program, facts, [k.notes for k in known])
        form_ns = [k.ns for k in known]
        if prepared.family is not None:
            estimate = self._estimates.of(prepared.family, program, form_ns, self._rates)
        else:
            estimate = Estimate(program, form_ns, prepared.pieces, self._rates)
        prepared.edges, prepared.settled = estimate.cut.edges, estimate.settled
        survey = _survey(program, facts)
        kept = tuple(
            (slot, nbytes)
            for slot, (nbytes, gone) in enumerate(zip(facts.slot_alloc, facts.slot_freed, strict=True))
            if nbytes is not None and not gone
        )
        pause()
        workspace = max(0, survey.peak - facts.kept_bytes)
        return ReadyProgram(
            name,
            facts,
            prepared,
            estimate,
            struct.Struct("<" + "".join(_FORMAT[k] for k in kinds)),
            kinds,
            not any(k in (ParamKind.BOOL, ParamKind.C128) for k in kinds),
            survey.dynamic,
            survey.written,
            survey.peak,
            len(raw),
            _held(program, known, len(estimate.cut.edges)),
            kept,
            workspace,
            room_of([*[nbytes for _, nbytes in kept], workspace]),
            survey.computing,
            named,
            tuple(dict.fromkeys(kernels)),
            unchecked,
            opaque_operators,
            BindingCheck(facts, survey.dynamic),
        )

    def _checked(self, raw: bytes) -> tuple[Program, list[_Known], ProgramFacts]:
        """Decode and verify a program.

        Raises:
            OperationError: the program is malformed or breaks a law.
        """
        known: list[_Known] = []
        try:
            form_bytes, words = split_program(raw)
            if len(set(form_bytes)) != len(form_bytes):
                raise VerifyError("the program lists the same form twice", law="form-unique")
            nodes = 0
            for each in form_bytes:
                try:
                    known.append(self._form(each))
                except VerifyError:
                    # raises the error again, with the index of the instruction
                    Verifier().verify_form(decode_form(each), _first_use(words, known))
                    raise
                nodes += known[-1].nodes
                if nodes > MAX_NODES:
                    raise VerifyError(
                        f"the program's forms have more than {MAX_NODES} operands and values", law="limits"
                    )
            program = Program(tuple([k.form for k in known]), self._body(words, known))
            return program, known, Verifier().verify(program, [k.ends for k in known])
        except WisError as e:
            error = OperationError(str(e), getattr(e, "instruction", None))
            error.code = e.code
            raise error from e

    def _body(self, words: array[int], known: list[_Known]) -> tuple[Instruction, ...]:
        """Return a program's instructions. Equal ones are one object, by which the runtime knows similar programs."""
        arity = tuple([len(k.form.operands) for k in known])
        key = words.tobytes(), arity
        with self._lock:
            body = self._bodies.get(key)
            if body is not None:
                self._bodies.move_to_end(key)
                return body
        body = body_of(words, arity)
        with self._lock:
            found = self._bodies.setdefault(key, body)
            self._instructions += len(body) if found is body else 0
            while self._instructions > INSTRUCTIONS_KEPT:
                self._instructions -= len(self._bodies.popitem(last=False)[1])
        return found

    def _check_author(
        self, named: frozenset[bytes], sources: Mapping[bytes, Source], author: Author, *, unchecked: bool
    ) -> None:
        """Check that the author may use kernels that cannot be checked, or that ask to run without checks.

        Raises:
            OpaqueKernelError: the author lacks the permission.
        """
        if author.opaque:
            return
        foreign = self._runtime.foreign
        opaque = [f"in {language}" for language in {sources[n].language for n in named} & foreign.opaque]
        if unchecked and foreign.unchecked:
            opaque.append(f"that is launched with the option {UNCHECKED}")
        if opaque:
            raise _without_permission(
                f"the loads and stores of a kernel {min(opaque)} cannot be checked on this device, so it needs", author
            )

    def _form(self, raw: bytes) -> _Known:
        known = self._forms.get(raw)
        if known is not None:
            return known
        pause()
        form = decode_form(raw)
        _check_references(form)
        ends = Verifier(remember=0).verify_form(form)
        known = _Known(form, ends, instruction_ns(form, self._rates), nodes_of(form), {})
        with self._lock:
            self._forms[raw] = known
            self._forms_held += known.held
            while len(self._forms) > FORMS_KEPT or self._forms_held > self._forms_bytes:
                self._forms_held -= self._forms.popitem(last=False)[1].held
        return known


def _first_use(words: array[int], known: list[_Known]) -> int:
    """Index of the first instruction whose form comes after these forms."""
    at = count = 0
    while at < len(words) and words[at] < len(known):
        at, count = at + 1 + len(known[words[at]].form.operands), count + 1
    return count


def _held(program: Program, known: list[_Known], kernels: int) -> int:
    """Estimated host memory of a program and its forms, in bytes."""
    references = sum([len(i.slots) for i in program.body])
    own = PROGRAM_BYTES + INSTRUCTION_BYTES * len(program.body) + REFERENCE_BYTES * references + KERNEL_BYTES * kernels
    return own + sum([k.held for k in known])


def _check_sources(named: frozenset[bytes], sources: Mapping[bytes, Source]) -> None:
    """Check that the session has sent each source that it names. A digest alone gives no access to another session's text.

    Raises:
        UnknownSourceError: a source is missing.
    """
    missing = named - sources.keys()
    if missing:
        raise UnknownSourceError(
            f"the program names the kernel source {min(missing).hex()[:16]}, which this session has not sent"
        )


def _without_permission(why: str, author: Author) -> OpaqueKernelError:
    return OpaqueKernelError(
        f"{why} the permission opaque_kernels, which tenant {author.tenant or 'default'} does not have; ask an administrator "
        'for it: PUT /api/v1/tenants/NAME with {"opaque_kernels": true}'
    )


def _check_operators(opaque: frozenset[str], author: Author) -> None:
    """Check that the author may call extension operators that cannot be checked.

    Raises:
        OpaqueKernelError: the author lacks the permission.
    """
    if opaque and not author.opaque:
        raise _without_permission(
            f"the loads and stores of the extension operator {min(opaque)} cannot be checked, so it needs", author
        )


def _check_references(form: Form) -> None:
    """Check that the arguments of a form refer only to operands that have a value before the call.

    Raises:
        VerifyError: an argument refers to an operand that is only written, or a `fill` refers to an operand.
    """
    for _, value in form.attrs:
        _check_value(form, value)


def _check_value(form: Form, value: Attr) -> None:
    if isinstance(value, OperandRef) and value.index < len(form.operands):
        if form.opcode == "fill" or form.operands[value.index].role is Role.OUT:
            raise VerifyError(
                f"{form.opcode}: an argument refers to operand {value.index}, which is only written",
                law="argument-has-value",
            )
    elif isinstance(value, tuple):
        for item in value:
            _check_value(form, item)


class _Survey(NamedTuple):
    """Facts from all instructions: slots of unknown size, written slots, peak of held bytes, number of computing instructions."""

    dynamic: frozenset[int]
    written: frozenset[int]
    peak: int
    computing: int


def _survey(program: Program, facts: ProgramFacts) -> _Survey:
    """Compute the facts in one pass over the instructions.

    Raises:
        OperationError: a slot of unknown size is used a second time, although its bounds cannot be checked.
    """
    dynamic: set[int] = set()
    used: set[int] = set()
    written: set[int] = set()
    held = peak = computing = 0
    for i, instruction in enumerate(program.body):
        if not i & 15 or len(instruction.slots) > 64:
            pause()
        form = program.forms[instruction.form]
        for slot, operand in zip(instruction.slots, form.operands, strict=True):
            unsized = form.opcode == "extern" and operand.view is None
            if slot in dynamic or (unsized and slot in used):
                complaint = VerifyError(
                    f"slot {slot} has an unknown size and is used twice", instruction=i, law="unknown-size-once"
                )
                error = OperationError(str(complaint), i)
                error.code = complaint.code
                raise error
            if unsized:
                dynamic.add(slot)
            used.add(slot)
            if operand.role is not Role.IN:
                written.add(slot)
        if form.opcode == "alloc":
            held += facts.slot_alloc[instruction.slots[0]] or 0
            peak = max(peak, held)
        elif form.opcode == "free":
            held -= facts.slot_alloc[instruction.slots[0]] or 0
        else:
            computing += 1
    return _Survey(frozenset(dynamic), frozenset(written), peak, computing)


__all__ = ["ExecutorError", "ProgramStore", "ReadyProgram"]
