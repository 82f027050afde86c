"""One client's world on this device: its buffers, its programs, its first unreported error, its counters.

Everything is named by the session's own ids, so no request can reach another session's bytes. Owned by the device loop's thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanContext
from torch import Tensor
from wooly_bus.channel import Connection
from wooly_bus.channel.token import Pass
from wooly_wis.codec import digest
from wooly_wis.foreign import MAX_SOURCES, MAX_SOURCES_BYTES, Source, decode_source
from wooly_wis.frames import Run

from wooly_executor.decoding import Decoding
from wooly_executor.errors import (
    BindingError,
    ExecutorError,
    OutOfMemoryError,
    PoisonedError,
    UnknownProgramError,
    UnknownSourceError,
)
from wooly_executor.estimates import UNKNOWN, Cut
from wooly_executor.host_account import BUFFER_BYTES, FRAME_BYTES, PIECE_BYTES, HostLimits, HostUse
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.ledger import WORKSPACE_KEPT
from wooly_executor.mover import Job
from wooly_executor.programs import Author, ProgramStore, ReadyProgram
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_executor.runtime.protocol import Execution, Outcome, Runtime
from wooly_executor.spans import SessionSpans
from wooly_executor.stowage import Copy
from wooly_executor.tiers import Jit, Tiers, Work, choose
from wooly_executor.usage import Used

if TYPE_CHECKING:
    from wooly_executor.vram import Vram

#: Programs that a session may refer to by digest. The client keeps fewer, in the same order of use.
PROGRAMS_KEPT = 1100
#: Buffers of a session, lost ones among them.
BUFFERS_KEPT = 1 << 20
#: Buffers that a run of an unknown program may lose though they never were: each takes a microsecond, and memory.
LOST_AT_ONCE = 1 << 15
#: Contents of a session, the largest that it shared, that the router remembers of it.
BROUGHT = 64


class Residence(Enum):
    """Where a session's memory is."""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong since the client was last answered."""

    code: str
    message: str
    seq: int
    instruction: int | None

    def to_json(self) -> dict[str, Any]:
        """Payload of an ERROR frame."""
        return {"code": self.code, "message": self.message, "seq": self.seq, "instruction": self.instruction}


@dataclass(slots=True)
class Counters:
    """What a session has done."""

    programs: int = 0
    instructions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Running:
    """A program of a session that was begun and is not finished.

    Attributes:
        gpu_ns: device time so far.
        core_ns: time of cores so far.
        paced_ns: the same at full pace.
        priced_ns: what it counts for so far.
    """

    run: Run
    seq: int
    ready: ReadyProgram
    execution: Execution
    before: int
    freed: int
    prepared: Any
    gpu_ns: int = 0
    core_ns: int = 0
    paced_ns: int = 0
    priced_ns: int = 0


@dataclass(eq=False, slots=True)
class Frame:
    """A frame that was received and is not processed.

    Attributes:
        cut: of a frame that occupies the device: its kernels.
        next: the first of them that is not done.
        running: its program, once begun.
        ended: it is processed, or failed to.
        need: bytes that it lacks, where it waits for room.
        reserved: bytes that are promised to it.
        refused: what it asks for was answered already: its session is held.
        begun_ns: when its program began, or it was first looked at, where that is to be told; ns since 1970.
        decoded: what it defines, once that is taken in: the result, or what was raised.
    """

    seq: int
    kind: int
    payload: Any
    cut: Cut = UNKNOWN
    next: int = 0
    running: Running | None = None
    ended: bool = False
    need: int = 0
    reserved: int = 0
    refused: bool = False
    begun_ns: int = 0
    decoded: tuple[Any, Exception | None] | None = None


@dataclass(eq=False)
class Session:
    """State of one session.

    Attributes:
        brought: bytes of contents that it shares or has shared, by their names in their circle; the largest of them.
        id: session id.
        entry: what lets its client in.
        quota: bytes it may hold.
        held_bytes: bytes it holds.
        queue: frames received and not yet processed.
        known: how many of them, from the first, wait for the device or for those before them.
        barred: one of these is to be processed before anything is known of those behind them.
        lending: an answer may still be leaving straight from the buffers' memory.
        unread: its client has to read answers before anything else of it is processed.
        unread_since: when its client last read some of these, monotonic seconds.
        unread_bytes: how much was left then.
        lent: what is left to send of an answer that leaves in pieces.
        decoding: what takes in its next definition.
        turn: the loop's turn in which it was last served.
        served: how many of its frames were processed in that.
        running: a program was begun and has not ended.
        swappable: its memory may leave the device.
        promised: bytes that it declared to need.
        residence: where its memory is.
        idle_since: when it last had something to do, ns; None while it has.
        lacking: since when its next program or write waits for room, ns; 0 if it does not.
        writing: bytes that its client's next write lacks: the buffer is shared, and a copy is to be made.
        given_up: there will be no room for that write.
        chosen: the number of the choice at which it last had to leave.
        swaps: how often it was swapped out.
        guarded: buffers that are shared, or being hashed: a write must be announced.
        sealing: those being hashed.
        copies: its own buffers' bytes while it is away.
        job: what moves its memory now.
        leaving_bytes: what will be free when it has left.
        buried: it is over; its blocks are freed when `job` is done with them.
        jit: how its programs are to run.
        tiers: what decides on that; None where all run as they are.
        awaiting: its next program waits until it is known how that runs.
        work: who did how much of what it asked for.
        paused: somebody suspended it.
        hold: why it is suspended beside that; empty: it is not.
        used: what it uses of the device, for metering.
        tenant: whose it is.
        opaque: whether it may launch kernels in texts that nobody here can check.
        program_bytes: of the definitions of its programs.
        program_held: of host memory, that its programs take.
        programs_lost: it has forgotten some, as they took too much.
        limits: what it may make the host hold.
        sources: texts of its own kernels, by digest.
        compiling: its next program waits for kernels that are being compiled.
        landing: brings what was received last to the device, where it was not received there.
        hosted: what it was opened under, where it is traced.
        spans: what is told of it, from its client's hello on.
    """

    id: str
    entry: Pass
    quota: int
    store: ProgramStore
    runtime: Runtime
    conn: Connection | None = None
    held_bytes: int = 0
    buffers: dict[int, Buffer] = field(default_factory=dict)
    queue: deque[Frame] = field(default_factory=deque)
    queued_bytes: int = 0
    known: int = 0
    barred: bool = False
    lending: bool = False
    unread: bool = False
    unread_since: float = 0.0
    unread_bytes: int = 0
    lent: Tensor | None = None
    decoding: Decoding | None = None
    turn: int = 0
    served: int = 0
    running: bool = False
    swappable: bool = True
    promised: int = 0
    vram: Vram = field(init=False)
    account: Account = field(init=False)
    residence: Residence = Residence.HERE
    idle_since: int | None = None
    lacking: int = 0
    writing: int = 0
    given_up: bool = False
    chosen: int = 0
    swaps: int = 0
    guarded: set[int] = field(default_factory=set)
    sealing: dict[int, Job] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    job: Job | None = None
    leaving_bytes: int = 0
    buried: bool = False
    jit: Jit = "0"
    tiers: Tiers | None = None
    awaiting: bool = False
    work: Work = field(default_factory=Work)
    failure: Failure | None = None
    counters: Counters = field(default_factory=Counters)
    paused: bool = False
    hold: str = ""
    used: Used = field(init=False)
    hosted: SpanContext | None = None
    spans: SessionSpans | None = None
    programs: OrderedDict[bytes, ReadyProgram] = field(default_factory=OrderedDict)
    program_bytes: int = 0
    program_held: int = 0
    programs_lost: bool = False
    tenant: str = ""
    opaque: bool = False
    brought: dict[str, int] = field(default_factory=dict)
    sources: dict[bytes, Source] = field(default_factory=dict)
    source_bytes: int = 0
    compiling: bool = False
    landing: Callable[[], None] | None = None
    limits: HostLimits = field(default_factory=HostLimits)

    def largest_brought(self) -> tuple[str, ...]:
        """The names of the largest contents that it shared, largest first."""
        return tuple(heapq.nlargest(BROUGHT, self.brought, key=lambda name: self.brought[name]))

    # -- programs ----------------------------------------------------------------------------------------------------

    def define(self, raw: bytes) -> ReadyProgram:
        """Take in a program's definition, for `keep`. A decoder's thread may do so while nothing else of the session is done."""
        return self.store.define(raw, self.sources, Author(self.tenant or self.id, self.opaque))

    def keep(self, ready: ReadyProgram) -> None:
        """From now on runs may name this program."""
        programs = self.programs
        if ready.digest not in programs:
            self.program_bytes += ready.nbytes
            self.program_held += ready.held
            self.store.hold(ready)
            programs[ready.digest] = ready
        programs.move_to_end(ready.digest)
        most = self.limits.definitions
        while len(programs) > PROGRAMS_KEPT or (self.program_held > most and len(programs) > 1):
            self.programs_lost = self.programs_lost or len(programs) <= PROGRAMS_KEPT
            _, gone = programs.popitem(last=False)
            self._let_go(gone)

    def _let_go(self, gone: ReadyProgram) -> None:
        self.program_bytes -= gone.nbytes
        self.program_held -= gone.held
        self.store.let_go(gone)

    def take_source(self, raw: bytes) -> tuple[bytes, Source, int]:
        """Take in the source of kernels, for `keep_source`; threads as in `define`. Returns its name, itself, its bytes.

        Raises:
            DecodeError: it is none.
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

    def host_use(self) -> HostUse:
        """What it makes the host hold now."""
        conn = self.conn
        return HostUse(
            queue=self.queued_bytes + FRAME_BYTES * len(self.queue) + (0 if conn is None else conn.receiving_bytes),
            answers=0 if conn is None else conn.queued_bytes + PIECE_BYTES * conn.queued_pieces,
            definitions=self.program_bytes,
            decoded=self.program_held,
            sources=self.source_bytes,
            buffers=BUFFER_BYTES * len(self.buffers),
        )

    def expected(self, digest: bytes) -> Cut:
        """What a run of a program is expected to take."""
        ready = self.programs.get(digest)
        return ready.estimate.cut if ready is not None else UNKNOWN

    def begin(self, run: Run, seq: int) -> Running:
        """Begin to run one program; `finish` or `abandon` follows, and until then nothing else of this session is done.

        Raises:
            ExecutorError: it could not be started; nothing was executed, but what the client says is dead is freed.
        """
        try:
            return self._begin(run, seq)
        except Exception as e:
            if isinstance(e, ExecutorError):
                self._lose(run, str(e))
            self._free(run.frees)
            raise

    def finish(self, running: Running) -> Outcome:
        """A program ran to its end: free what the client says is dead.

        Raises:
            OutOfMemoryError: its results are more than the session may hold.
        """
        try:
            return self._finish(running)
        except ExecutorError as e:
            self._lose(running.run, str(e))
            raise
        finally:
            self._free(running.run.frees)

    def abandon(self, running: Running) -> None:
        """The executor failed at a program that was begun."""
        self.running = False
        for slot, _ in running.ready.kept:
            buffer = running.run.bindings[slot]
            if buffer not in self.buffers:
                self.vram.free(self, [buffer])
        self._free(running.run.frees)

    def _free(self, buffers: list[int]) -> None:
        known = self.buffers
        for buffer in buffers:
            gone = known.pop(buffer, None)
            if gone is not None:
                self.held_bytes -= gone.nbytes
        if buffers:
            self.vram.free(self, buffers)

    def _lose(self, run: Run, why: str) -> None:
        """Poison what a run that could not start should have written, and free what it should have freed.

        Where it is not known which buffers those are, everything that the run names is lost.
        """
        ready = self.programs.get(run.digest)
        fits = ready is not None and len(run.bindings) == len(ready.facts.slot_bytes)
        for slot, buffer in enumerate(run.bindings):
            if ready is not None and fits:
                if ready.facts.slot_freed[slot]:
                    self.free(buffer)
                    continue
                if slot not in ready.written:
                    continue
            known = self.buffers.get(buffer)
            if known is None and (len(self.buffers) >= BUFFERS_KEPT or (not fits and slot >= LOST_AT_ONCE)):
                continue  # whoever reads it is told that it does not exist
            if known is None:
                self.buffers[buffer] = Buffer(0, None, None, why)
            else:
                known.base, known.view, known.poison = None, None, known.poison or why

    def _begin(self, run: Run, seq: int) -> Running:
        ready = self.programs.get(run.digest)
        if ready is None:
            raise UnknownProgramError(self._unknown(run.digest))
        self.programs.move_to_end(run.digest)
        params = ready.unpack_params(run.params)
        self._check_bindings(ready, run.bindings)
        bindings, vram = run.bindings, self.vram
        if self.guarded:
            vram.contents.unshare(self, [bindings[slot] for slot in ready.written])
        before = self.held_bytes
        freed = sum([self.buffers[bindings[slot]].nbytes for slot in ready.prepared.dropped])
        prepared = choose(self.tiers, ready, self.jit, params, self.spans)
        kept = [(bindings[slot], nbytes) for slot, nbytes in ready.kept]
        vram.ledger.begin(self.account, kept, ready.workspace, vram.clock())
        self.running = True
        execution = self.runtime.begin(prepared, self.buffers, bindings, params)
        return Running(run, seq, ready, execution, before, freed, prepared)

    def _unknown(self, name: bytes) -> str:
        said = f"this session has not defined the program {name.hex()[:16]}"
        if self.programs_lost:
            said += (
                f", or it was forgotten: the session's programs took more than {self.limits.definitions} bytes of host memory "
                "(WOOLY_EXECUTOR_DEFINITIONS)"
            )
        return said

    def _finish(self, running: Running) -> Outcome:
        run, ready, before, outcome = running.run, running.ready, running.before, running.execution.outcome
        vram = self.vram
        self.running = False
        self.held_bytes += ready.facts.kept_bytes - running.freed
        if ready.prepared.dropped:
            vram.free(self, [run.bindings[slot] for slot in ready.prepared.dropped])
        if self.account.workspace > WORKSPACE_KEPT:
            vram.ledger.end(self.account, vram.clock())
        for slot in ready.dynamic:
            made = self.buffers.get(run.bindings[slot])
            if made is not None:
                self.held_bytes += made.nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, before + ready.peak_bytes, self.held_bytes)
        self.counters.programs += 1
        self.counters.instructions += len(ready.prepared.program.body)
        if outcome.failed_at is not None:
            self.fail(outcome.code, outcome.error, running.seq, outcome.failed_at)
        if ready.dynamic:
            self._take_in(run, ready, before)
        return outcome

    def _take_in(self, run: Run, ready: ReadyProgram, before: int) -> None:
        """Put results of unknown size on the account.

        Raises:
            OutOfMemoryError: they are more than the session may hold, or than there is room for.
        """
        try:
            if self.held_bytes > self.quota:
                raise self._out_of_memory(self.held_bytes - before, before)
            for slot in ready.dynamic:
                made = self.buffers.get(run.bindings[slot])
                if made is not None:
                    self.vram.ledger.allocate(self.account, run.bindings[slot], made.nbytes, self.vram.clock())
        except OutOfMemoryError:
            for slot in ready.dynamic:
                self.free(run.bindings[slot])
            raise

    def _check_bindings(self, ready: ReadyProgram, bindings: list[int]) -> None:
        facts = ready.facts
        if len(bindings) != len(facts.slot_bytes):
            raise BindingError(f"{len(bindings)} bindings, the program has {len(facts.slot_bytes)} slots")
        if len(set(bindings)) != len(bindings):
            raise BindingError("one buffer is bound to two slots")
        get, made = self.buffers.get, facts.slot_alloc
        if ready.dynamic:
            made = tuple([0 if slot in ready.dynamic else size for slot, size in enumerate(made)])
        for buffer, need, size in zip(bindings, facts.slot_bytes, made, strict=True):  # hundreds, in each run
            known = get(buffer)
            if size is not None:
                if known is not None:
                    if not known.poison:
                        raise BindingError(f"buffer {buffer} is allocated again")
                    self.free(buffer)
            elif known is None:
                raise BindingError(f"buffer {buffer} does not exist")
            elif known.nbytes < need and not known.poison:
                raise BindingError(f"buffer {buffer} has {known.nbytes} bytes, the program reaches byte {need}")
        if len(self.buffers) + len(ready.kept) + len(ready.dynamic) > BUFFERS_KEPT:
            raise OutOfMemoryError(f"the session has {len(self.buffers)} buffers, at most {BUFFERS_KEPT}")
        if self.held_bytes + ready.peak_bytes > self.quota:
            raise self._out_of_memory(ready.peak_bytes, self.held_bytes)

    def _out_of_memory(self, wanted: int, held: int) -> OutOfMemoryError:
        self.account.ooms += 1
        return OutOfMemoryError(self.vram.ledger.out_of_memory(self.account, wanted, self.quota, held))

    # -- memory ------------------------------------------------------------------------------------------------------

    def free(self, buffer: int) -> None:
        """Forget a buffer; unknown ids are ignored (a failed program may never have made it)."""
        self._free([buffer])

    def memory(self, buffer: int, offset: int, nbytes: int, *, writing: bool) -> Tensor:
        """The bytes of a buffer on the device, for reading or for being written.

        Raises:
            ExecutorError: no such buffer, out of its bounds, or its content was lost to a failed operation.
        """
        known = self.buffers.get(buffer)
        if known is None:
            raise BindingError(f"buffer {buffer} does not exist")
        if known.base is None and (not writing or nbytes != known.nbytes):
            raise PoisonedError(known.poison)
        if offset + nbytes > known.nbytes:
            raise BindingError(f"bytes {offset} to {offset + nbytes} of buffer {buffer}, which has {known.nbytes}")
        if writing and self.guarded:
            self.vram.contents.unshare(self, [buffer], whole=nbytes == known.nbytes)
        if known.base is None:
            known.base, known.poison = self.runtime.device.zeroed(known.nbytes), ""
        return bytes_of(known.base, offset, nbytes)

    def borne(self, now: int) -> tuple[int, int]:
        """What it bears of the device's memory now, and has borne: bytes, and bytes times ns."""
        bearing = self.vram.ledger.bearing(self.account, now)
        return bearing.own + bearing.shared, bearing.own_byte_ns + bearing.shared_byte_ns

    # -- errors ------------------------------------------------------------------------------------------------------

    def fail(self, code: str, message: str, seq: int, instruction: int | None = None) -> None:
        """Keep the first failure until the client is answered."""
        if self.failure is None:
            self.failure = Failure(code, message, seq, instruction)
            if self.spans is not None:
                self.spans.failed(code, message)

    def take_failure(self) -> Failure | None:
        """The kept failure, once."""
        failure, self.failure = self.failure, None
        return failure

    def release(self) -> None:
        """Let go of everything."""
        self.vram.close(self)
        self.buffers.clear()
        self.queue.clear()
        if self.decoding is not None:
            self.decoding.cancelled, self.decoding = True, None
        for gone in self.programs.values():
            self._let_go(gone)
        self.programs.clear()
        self.sources = {}
        self.lent = None
        self.held_bytes = self.queued_bytes = self.source_bytes = self.known = 0


__all__ = ["Counters", "ExecutorError", "Failure", "Frame", "Residence", "Running", "Session"]
