"""The state of one session on this device: its buffers, its programs, its first unreported error, its counters.

All names are the session's own ids, so no request can reach the bytes of another session. The device loop's thread owns this
module.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext
from torch import Tensor
from wooly_bus.channel import Connection
from wooly_bus.channel.token import Pass

from wooly_executor.billing.usage import SessionUsage
from wooly_executor.checkpoints.state import SessionCuts
from wooly_executor.counters import Counters, Work
from wooly_executor.decoding import Decoding
from wooly_executor.flow import Flow
from wooly_executor.frames import Failure, Frame, Running
from wooly_executor.holdings import Holdings
from wooly_executor.host_account import BUFFER_BYTES, FRAME_BYTES, PIECE_BYTES, HostUse
from wooly_executor.plans.tiers import Jit, Tiers
from wooly_executor.recording import Recording
from wooly_executor.runtime.buffers import Buffers
from wooly_executor.session_programs import SessionPrograms
from wooly_executor.spans import SessionSpans

#: Maximum number of contents that the router is told about when the session ends; the largest ones are chosen.
SHARED_KEPT = 64


@dataclass(eq=False, slots=True)
class Unread:
    """Answers that a client has not read, while its session waits for that.

    Attributes:
        since: when the client last read some bytes, in monotonic seconds.
        nbytes: bytes that were queued then.
        lent: the rest of a large answer that is sent in pieces.
        place: where in shared memory the client wants the rest; None: anywhere.
    """

    since: float = 0.0
    nbytes: int = 0
    lent: Tensor | None = None
    place: int | None = None


@dataclass(eq=False)
class Session:
    """State of one session.

    Attributes:
        id: session id.
        tenant: tenant of the session.
        entry: the pass that admits its client.
        quota: maximum bytes of its buffers.
        holdings: its device memory.
        programs: the programs that its runs may name.
        used: its usage, for metering.
        tiers: decides how its programs run; None: all programs run at tier 0.
        hosted: trace context in which it was opened; None: it is not traced.
        job_bytes: returns the host memory of its client in this process; None: it is no job.
        epoch: how often it has gone on in another executor.
        part: index of this device among its devices.
        flow: state of its life.
        conn: connection to its client.
        jit: the mode of its programs.
        buffers: its buffers by id, poisoned ones included.
        held_bytes: bytes of its buffers.
        running: a program has begun and not ended.
        decoding: the decoding of its next definition.
        unread: answers that its client has not read.
        finish_upload: copies the last received bytes to the device, if they were not received there directly.
        shared_contents: the largest contents that it shares or has shared: bytes by name (`shared_name`).
        work: how its programs ran.
        counters: what it has done.
        failure: the first failure since the last answer.
        unchecked: the last run, if it has ended but may still turn out to have failed.
        spans: its spans, after its client's hello; None: it is not traced.
        recording: the records of its work; None: its client does not profile.
        cuts: its cuts; None: its client has asked for none.
        peer_bytes: host memory of its collective that another executor carries.
        done_early: number of the last frame that was processed before a collective in front of it; 0: there is none.
    """

    id: str
    tenant: str
    entry: Pass
    quota: int
    holdings: Holdings
    programs: SessionPrograms
    used: SessionUsage
    tiers: Tiers | None = None
    hosted: SpanContext | None = None
    job_bytes: Callable[[], int] | None = None
    epoch: int = 0
    part: int = 0
    flow: Flow[Frame] = field(default_factory=Flow)
    conn: Connection | None = None
    jit: Jit = "0"
    buffers: Buffers = field(default_factory=Buffers)
    held_bytes: int = 0
    running: bool = False
    decoding: Decoding | None = None
    unread: Unread = field(default_factory=Unread)
    finish_upload: Callable[[], None] | None = None
    shared_contents: dict[str, int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    counters: Counters = field(default_factory=Counters)
    failure: Failure | None = None
    unchecked: Running | None = None
    spans: SessionSpans | None = None
    recording: Recording | None = None
    cuts: SessionCuts | None = None
    peer_bytes: int = 0
    done_early: int = 0

    def largest_shared(self) -> tuple[str, ...]:
        """Names of the largest contents that it shared, largest first."""
        return tuple(heapq.nlargest(SHARED_KEPT, self.shared_contents, key=lambda name: self.shared_contents[name]))

    def host_use(self) -> HostUse:
        """The host memory that the session uses now."""
        conn, inbox = self.conn, self.flow.inbox
        queue = inbox.nbytes + FRAME_BYTES * len(inbox.frames)
        return HostUse(
            queue=queue + (0 if conn is None else conn.receiving_bytes),
            answers=0 if conn is None else conn.queued_bytes + PIECE_BYTES * conn.queued_pieces,
            definitions=self.programs.nbytes,
            decoded=self.programs.held,
            sources=self.programs.source_bytes,
            buffers=BUFFER_BYTES * (len(self.buffers) + len(self.holdings.ipc)),
            records=0 if self.recording is None else self.recording.nbytes,
            job=0 if self.job_bytes is None else self.job_bytes(),
            peers=self.peer_bytes,
            segment=0 if conn is None else conn.shared_bytes,
        )

    def fail(self, code: str, message: str, seq: int, instruction: int | None = None) -> None:
        """Keep the first failure until the client is answered."""
        if self.failure is None:
            self.failure = Failure(code, message, seq, instruction)
            if self.spans is not None:
                self.spans.failed(code, message)

    def take_failure(self) -> Failure | None:
        """Return the failure and clear it."""
        failure, self.failure = self.failure, None
        return failure

    def release(self) -> None:
        """Release everything except the device memory, which `Vram` frees."""
        self.buffers.clear()
        if self.decoding is not None:
            self.decoding.cancelled, self.decoding = True, None
        self.programs.release()
        self.unread.lent = None
        self.held_bytes = 0
