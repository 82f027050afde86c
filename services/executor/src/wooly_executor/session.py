"""One client's world on this device: its buffers, its programs, its first unreported error, its counters.

Everything is named by the session's own ids, so no request can reach another session's bytes. Owned by the device loop's thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext
from torch import Tensor
from wooly_bus.channel import Connection
from wooly_bus.channel.token import Pass

from wooly_executor.counters import Counters, Work
from wooly_executor.decoding import Decoding
from wooly_executor.flow import Flow
from wooly_executor.frames import Failure, Frame
from wooly_executor.holdings import Holdings
from wooly_executor.host_account import BUFFER_BYTES, FRAME_BYTES, PIECE_BYTES, HostUse
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.session_programs import SessionPrograms
from wooly_executor.spans import SessionSpans
from wooly_executor.tiers import Jit, Tiers
from wooly_executor.usage import SessionUsage

#: Contents of a session, the largest that it shared, that the router remembers of it.
BROUGHT = 64


@dataclass(eq=False, slots=True)
class Unread:
    """Answers that wait for a client to read, of a session that goes on only then.

    Attributes:
        since: when its client last read some of them, monotonic seconds.
        nbytes: how much was left then.
        lent: what is left to send of an answer that leaves in pieces.
    """

    since: float = 0.0
    nbytes: int = 0
    lent: Tensor | None = None


@dataclass(eq=False)
class Session:
    """State of one session.

    Attributes:
        id: session id.
        tenant: whose it is.
        entry: what lets its client in.
        quota: bytes it may hold.
        holdings: what it holds of the device's memory.
        programs: what its runs may name.
        used: what it uses of the device, for metering.
        tiers: what decides how its programs run; None where all run as they are.
        hosted: what it was opened under, where it is traced.
        flow: where it is in its life.
        conn: the connection to its client.
        jit: how its programs are to run.
        buffers: by id, lost ones among them.
        held_bytes: bytes it holds.
        running: a program was begun and has not ended.
        decoding: what decodes its next definition.
        unread: answers that its client has not read.
        finish_upload: brings what was received last to the device, where it was not received there.
        brought: bytes of contents that it shares or has shared, the largest of them, by their names in their circle.
        work: who did how much of what it asked for.
        counters: what it has done.
        failure: the first thing that went wrong since the client was last answered.
        spans: what is told of it, from its client's hello on.
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
    flow: Flow[Frame] = field(default_factory=Flow)
    conn: Connection | None = None
    jit: Jit = "0"
    buffers: dict[int, Buffer] = field(default_factory=dict)
    held_bytes: int = 0
    running: bool = False
    decoding: Decoding | None = None
    unread: Unread = field(default_factory=Unread)
    finish_upload: Callable[[], None] | None = None
    brought: dict[str, int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    counters: Counters = field(default_factory=Counters)
    failure: Failure | None = None
    spans: SessionSpans | None = None

    def largest_brought(self) -> tuple[str, ...]:
        """The names of the largest contents that it shared, largest first."""
        return tuple(heapq.nlargest(BROUGHT, self.brought, key=lambda name: self.brought[name]))

    def host_use(self) -> HostUse:
        """What it makes the host hold now."""
        conn, inbox = self.conn, self.flow.inbox
        queue = inbox.nbytes + FRAME_BYTES * len(inbox.frames)
        return HostUse(
            queue=queue + (0 if conn is None else conn.receiving_bytes),
            answers=0 if conn is None else conn.queued_bytes + PIECE_BYTES * conn.queued_pieces,
            definitions=self.programs.nbytes,
            decoded=self.programs.held,
            sources=self.programs.source_bytes,
            buffers=BUFFER_BYTES * len(self.buffers),
        )

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
        """Let go of everything but its memory, which is `Vram`'s to free."""
        self.buffers.clear()
        if self.decoding is not None:
            self.decoding.cancelled, self.decoding = True, None
        self.programs.release()
        self.unread.lent = None
        self.held_bytes = 0
