"""The programs and kernel sources that one session may name.

Owned by the device loop's thread; `define` and `take_source` run in a decoder's.
"""

from __future__ import annotations

from collections import OrderedDict

from wooly_wis.codec import digest
from wooly_wis.foreign import MAX_SOURCES, MAX_SOURCES_BYTES, Source, decode_source

from wooly_executor.errors import UnknownProgramError, UnknownSourceError
from wooly_executor.programs import Author, ProgramStore, ReadyProgram

#: Programs that a session may refer to by digest. The client keeps fewer, in the same order of use.
PROGRAMS_KEPT = 1100


class SessionPrograms:
    """One session's.

    Args:
        store: has the programs of all sessions.
        author: whose they are, and what they may do.
        most: bytes of host memory that they may take; with more, those that were used longest ago are forgotten.

    Attributes:
        nbytes: of their definitions.
        held: bytes of host memory that they take, decoded and prepared.
        sources: texts of its own kernels, by digest.
        source_bytes: of these.
    """

    def __init__(self, store: ProgramStore, author: Author, most: int) -> None:
        self._store, self._author, self._most = store, author, most
        self._known: OrderedDict[bytes, ReadyProgram] = OrderedDict()
        self._lost = False  # some were forgotten, as they took too much
        self.nbytes = self.held = self.source_bytes = 0
        self.sources: dict[bytes, Source] = {}

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[ReadyProgram]:
        """Every program, the one that was used longest ago first."""
        return list(self._known.values())

    def get(self, name: bytes) -> ReadyProgram | None:
        """The program of this digest, if it was defined and is not forgotten."""
        return self._known.get(name)

    def use(self, name: bytes) -> ReadyProgram:
        """The program of this digest; it is the last that is forgotten.

        Raises:
            UnknownProgramError: there is none.
        """
        ready = self._known.get(name)
        if ready is None:
            raise UnknownProgramError(self._unknown(name))
        self._known.move_to_end(name)
        return ready

    def _unknown(self, name: bytes) -> str:
        said = f"this session has not defined the program {name.hex()[:16]}"
        if self._lost:
            said += (
                f", or it was forgotten: the session's programs took more than {self._most} bytes of host memory "
                "(WOOLY_EXECUTOR_DEFINITIONS)"
            )
        return said

    def define(self, raw: bytes) -> ReadyProgram:
        """Decode a program's definition, for `keep`. A decoder's thread may do so while nothing else of the session is done."""
        return self._store.define(raw, self.sources, self._author)

    def keep(self, ready: ReadyProgram) -> None:
        """From now on runs may name this program."""
        known = self._known
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

    def _let_go(self, gone: ReadyProgram) -> None:
        self.nbytes -= gone.nbytes
        self.held -= gone.held
        self._store.let_go(gone)

    def take_source(self, raw: bytes) -> tuple[bytes, Source, int]:
        """Decode the source of kernels, for `keep_source`; threads as in `define`. Returns its digest, itself, its bytes.

        Raises:
            DecodeError: the bytes are no source.
        """
        return digest(raw), decode_source(raw), len(raw)

    def keep_source(self, name: bytes, source: Source, nbytes: int) -> None:
        """From now on programs may name this source.

        Raises:
            UnknownSourceError: the session has sent too many.
        """
        if name in self.sources:
            return
        if len(self.sources) >= MAX_SOURCES or self.source_bytes + nbytes > MAX_SOURCES_BYTES:
            raise UnknownSourceError(
                f"a session defines at most {MAX_SOURCES} kernel sources, and {MAX_SOURCES_BYTES} bytes of them"
            )
        self.sources[name] = source
        self.source_bytes += nbytes

    def release(self) -> None:
        """Let go of all of them."""
        for gone in self._known.values():
            self._let_go(gone)
        self._known.clear()
        self.sources = {}
        self.source_bytes = 0
