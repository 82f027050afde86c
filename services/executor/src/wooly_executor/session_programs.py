"""The programs and kernel sources that one session may name.

The device loop's thread owns this module; decoder threads call `define` and `take_source`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from wooly_wis.codec import decode_program, digest
from wooly_wis.errors import DecodeError
from wooly_wis.foreign import MAX_SOURCES, MAX_SOURCES_BYTES, Source, decode_source
from wooly_wis.program import Role

from wooly_executor.errors import (
    DecodingCancelledError,
    DecodingTooLongError,
    ExecutorError,
    RefusedProgramError,
    UnknownProgramError,
    UnknownSourceError,
)
from wooly_executor.programs import Author, ProgramStore, ReadyProgram

#: Maximum number of programs that a session may name by digest. The client's limit is lower, and it evicts in the same order.
PROGRAMS_KEPT = 1100
#: Maximum number of refused definitions of a session whose reason is kept.
_REFUSALS_KEPT = 64
#: Maximum length of such a reason, in characters.
_LONGEST_REASON = 2000


class Slots(NamedTuple):
    """What a program does with its slots: how many it has, which ones it makes or writes, and which ones it frees."""

    number: int
    written: frozenset[int]
    freed: frozenset[int]


class RefusedDefinitionError(ExecutorError):
    """A program cannot be used by its session. Code and message are those of the cause.

    Attributes:
        instruction: index in the body of the program of the instruction that was refused; None: the whole program.
        slots: what the program does with its slots; None: it cannot be decoded.
    """

    def __init__(self, cause: ExecutorError | DecodeError, slots: Slots | None) -> None:
        super().__init__(str(cause))
        self.code, self.slots = cause.code, slots
        self.instruction: int | None = getattr(cause, "instruction", None)


class Refusal(NamedTuple):
    """Why a definition was refused.

    Attributes:
        code: code of the error.
        message: message of the error.
        instruction: index in the body of the program of the instruction that was refused; None: the whole program.
        slots: what the program does with its slots; None: it cannot be decoded.
    """

    code: str
    message: str
    instruction: int | None
    slots: Slots | None


def _slots_of(raw: bytes) -> Slots | None:
    """What a program that was refused does with its slots, so that a run of it does not cost buffers that it only reads."""
    try:
        program = decode_program(raw)
    except DecodeError:
        return None
    written: set[int] = set()
    freed: set[int] = set()
    for instruction in program.body:
        form = program.forms[instruction.form]
        if form.opcode == "free":
            freed.update(instruction.slots)
            continue
        roles = [operand.role for operand in form.operands]
        makes = form.opcode == "alloc" or len(roles) != len(instruction.slots)
        written.update([slot for k, slot in enumerate(instruction.slots) if makes or roles[k] is not Role.IN])
    return Slots(program.n_slots, frozenset(written), frozenset(freed))


class SessionPrograms:
    """The programs of one session.

    Args:
        store: has the programs of all sessions.
        author: the session's tenant and permissions.
        most: maximum host memory of its programs, in bytes. Above it, the least recently used programs are forgotten.

    Attributes:
        author: the session's tenant and permissions.
        nbytes: size of the definitions.
        held: estimated host memory of the programs, in bytes.
        sources: its kernel sources, by digest.
        source_bytes: size of the sources.
    """

    def __init__(self, store: ProgramStore, author: Author, most: int) -> None:
        self._store, self.author, self._most = store, author, most
        self._known: OrderedDict[bytes, ReadyProgram] = OrderedDict()
        self._refused: OrderedDict[bytes, Refusal] = OrderedDict()
        self._lost = False  # a program was forgotten because of the limit `most`
        self.nbytes = self.held = self.source_bytes = 0
        self.sources: dict[bytes, Source] = {}

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[ReadyProgram]:
        """All programs, least recently used first."""
        return list(self._known.values())

    def get(self, name: bytes) -> ReadyProgram | None:
        """The program with this digest; None if it is unknown or forgotten."""
        return self._known.get(name)

    def use(self, name: bytes) -> ReadyProgram:
        """The program with this digest. It becomes the most recently used one.

        Raises:
            RefusedProgramError: its definition was refused.
            UnknownProgramError: the program is unknown or forgotten.
        """
        ready = self._known.get(name)
        if ready is None:
            refusal = self._refused.get(name)
            if refusal is not None:
                raise RefusedProgramError(refusal.message, refusal.code, refusal.instruction)
            raise UnknownProgramError(self._unknown(name))
        self._known.move_to_end(name)
        return ready

    def _unknown(self, name: bytes) -> str:
        said = f"this session has not defined the program {name.hex()[:16]}"
        if self._lost:
            said += (
                f", or the executor has forgotten it: the session's programs exceed {self._most} bytes of host memory "
                "(WOOLY_EXECUTOR_DEFINITIONS)"
            )
        return said

    def define(self, raw: bytes) -> ReadyProgram:
        """Decode a program's definition, for `keep`. A decoder's thread may call this, because no other frame of the session is
        processed meanwhile.

        Raises:
            DecodingTooLongError: the limit of core time is exceeded.
            DecodingCancelledError: the session has ended.
            RefusedDefinitionError: the program is malformed, breaks a law, or cannot run on this device.
        """
        try:
            return self._store.define(raw, self.sources, self.author)
        except (DecodingTooLongError, DecodingCancelledError):
            raise
        except (ExecutorError, DecodeError) as e:
            raise RefusedDefinitionError(e, _slots_of(raw)) from e

    def keep(self, ready: ReadyProgram) -> None:
        """Register a program, so that runs may name it."""
        known = self._known
        self._refused.pop(ready.digest, None)
        if ready.digest not in known:
            self.nbytes += ready.nbytes
            self.held += ready.held
            self._store.hold(ready)
            known[ready.digest] = ready
        known.move_to_end(ready.digest)
        while len(known) > PROGRAMS_KEPT or (self.held > self._most and len(known) > 1):
            self._lost = self._lost or len(known) <= PROGRAMS_KEPT
            _, gone = known.popitem(last=False)
            self._let_go(gone)

    def refusal(self, name: bytes) -> Refusal | None:
        """Why the definition of the program with this digest was refused; None: it was not, or long ago."""
        return self._refused.get(name)

    def refuse(self, raw: bytes, error: ExecutorError) -> None:
        """Note why a definition was refused: runs that name the program fail for the same reason."""
        instruction, slots = None, None
        if isinstance(error, RefusedDefinitionError):
            instruction, slots = error.instruction, error.slots
        self._refused[digest(raw)] = Refusal(error.code, str(error)[:_LONGEST_REASON], instruction, slots)
        while len(self._refused) > _REFUSALS_KEPT:
            self._refused.popitem(last=False)

    def _let_go(self, gone: ReadyProgram) -> None:
        self.nbytes -= gone.nbytes
        self.held -= gone.held
        self._store.let_go(gone)

    def take_source(self, raw: bytes) -> tuple[bytes, Source, int]:
        """Decode a kernel source, for `keep_source`. A decoder's thread may call this. Returns its digest, the source and its
        size.

        Raises:
            DecodeError: the bytes are not a valid source.
        """
        return digest(raw), decode_source(raw), len(raw)

    def keep_source(self, name: bytes, source: Source, nbytes: int) -> None:
        """Register a kernel source, so that programs may name it.

        Raises:
            UnknownSourceError: the session has sent too many sources.
        """
        if name in self.sources:
            return
        if len(self.sources) >= MAX_SOURCES or self.source_bytes + nbytes > MAX_SOURCES_BYTES:
            raise UnknownSourceError(
                f"too many kernel sources: a session may send {MAX_SOURCES} sources and {MAX_SOURCES_BYTES} bytes in all"
            )
        self.sources[name] = source
        self.source_bytes += nbytes

    def release(self) -> None:
        """Release all programs and sources."""
        for gone in self._known.values():
            self._let_go(gone)
        self._known.clear()
        self._refused.clear()
        self.sources = {}
        self.source_bytes = 0
