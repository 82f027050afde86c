"""Collectives of sessions here in groups that another executor carries. The device loop's thread owns this module.

The executor that has the group's first rank carries the collectives of the whole group. For a rank here, its operands are copied
to host memory, and a connection (`peers`) takes them there and brings the results back. Meanwhile the frame waits. If the session
has nothing else to do, its memory may leave the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from wooly_bus.channel import ProtocolError
from wooly_bus.channel.token import SharedPass, SignedPass
from wooly_wis.collectives import Collective, Range, What
from wooly_wis.frames import unpack_json

from wooly_executor.collectives.groups import describe
from wooly_executor.collectives.peers import Errand, Introduction, Peer, PeerLink, laid_out
from wooly_executor.collectives.work import Part, WorkJob, steps
from wooly_executor.errors import CollectiveError
from wooly_executor.flow import Readiness, Signal
from wooly_executor.mover import Job
from wooly_executor.post import Post
from wooly_executor.session import Session
from wooly_executor.vram import Vram

#: Seconds, besides the group's timeout, after which the other executor should have answered: it tells which rank is missing.
MARGIN_S = 10.0
#: Maximum number of groups of one session that other executors carry.
GROUPS_OF_SESSION = 1024
#: Maximum bytes that are copied in the device's thread.
COPIED_HERE = 512 << 10
_MOVED = Collective(bytes(16), 1, 0, 1, 1, What.BARRIER)


class Stage(Enum):
    """Where a rank's part in a collective is."""

    READING = auto()  # its operands are copied off the device
    AWAY = auto()  # the other executor has them
    BACK = auto()  # the results are in host memory
    WRITING = auto()  # they are copied to the device
    DONE = auto()


@dataclass(eq=False, slots=True)
class Visit:
    """One rank's part in a collective that another executor carries.

    Attributes:
        call: the rank's frame.
        link: the connection to the other executor.
        data: host memory with what the rank reads.
        results: host memory for what it writes.
        deadline: when the other executor should have answered, in seconds.
        error: why it failed; empty if it did not.
        broken: it failed because the other executor cannot be used any more.
    """

    call: Collective
    link: PeerLink
    data: Tensor
    results: Tensor
    deadline: float
    stage: Stage = Stage.READING
    error: str = ""
    broken: bool = False


@dataclass(eq=False, slots=True)
class _Guest:
    """A session whose groups other executors carry. `links` are by process and session there, `groups` by id."""

    links: dict[tuple[str, str], PeerLink] = field(default_factory=dict)
    groups: dict[bytes, PeerLink] = field(default_factory=dict)
    visit: Visit | None = None


#: The memory of a range of a session, to read or to write.
TensorOf = Callable[[Session, Collective, Range, bool], Tensor]


class RemoteCollectives:
    """The collectives of sessions here that other executors carry.

    Args:
        vram: the device's memory.
        call: runs a function in the device's thread; any thread may use it.
        post: queue of events of sessions.
        tensor: the memory of a range of a session: see `TensorOf`.
        bill: bills sessions for device time and core time, in ns.
        piece: size, in bytes, of the pieces in which memory is copied.
        most: maximum bytes of host memory for one collective of one session.
        tls_ca: certificate authorities of other executors; None: those of the system.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        vram: Vram,
        call: Callable[[Callable[[], None]], Any],
        post: Post,
        tensor: TensorOf,
        bill: Callable[[Sequence[Session], int, int], None],
        piece: int,
        most: int,
        tls_ca: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vram, self._call, self._post = vram, call, post
        self._tensor, self._bill, self._piece, self._most = tensor, bill, piece, most
        self._tls_ca, self._clock = tls_ca, clock
        self._guests: dict[str, _Guest] = {}

    # -- groups ------------------------------------------------------------------------------------------------------

    def introduce(self, session: Session, payload: bytes | memoryview, *, direct: bool) -> None:
        """Process a GROUP frame: from now on, another executor carries the collectives of a group.

        Args:
            session: a rank's session.
            payload: the frame's content.
            direct: clients may say themselves where the other executor is, because this one has no router.

        Raises:
            CollectiveError: the content is not valid, or the router has not signed it.
            DecodeError: it is no JSON.
        """
        try:
            said = Introduction.model_validate(unpack_json(payload))
        except ValidationError as e:
            wrong = e.errors()[0]
            raise CollectiveError(
                f"the GROUP frame's {'.'.join([str(part) for part in wrong['loc']])} is not valid: {wrong['msg']}"
            ) from e
        guest = self._guests.setdefault(session.id, _Guest())
        if len(guest.groups) >= GROUPS_OF_SESSION:
            raise CollectiveError(
                f"the session has {GROUPS_OF_SESSION} groups that other executors carry, which is the limit; end groups with "
                "torch.distributed.destroy_process_group"
            )
        link = None
        if not said.ticket and said.peer is None:
            link = next((known for (instance, _), known in guest.links.items() if instance == said.instance), None)
        if link is None:
            peer = Peer.read(self._told(session, said, direct=direct))
            key = said.instance, peer.session_id
            link = guest.links.get(key)
            if link is None:
                link = guest.links[key] = PeerLink(peer, said.instance, self._tls_ca)
        guest.groups[bytes.fromhex(said.group)] = link

    @staticmethod
    def _told(session: Session, said: Introduction, *, direct: bool) -> dict[str, Any]:
        if isinstance(session.entry, SignedPass):
            try:
                return session.entry.peer(said.ticket)
            except ProtocolError as e:
                raise CollectiveError(str(e)) from e
        if direct and isinstance(session.entry, SharedPass) and said.peer is not None:
            return said.peer
        raise CollectiveError(
            "this executor connects to another one only with a ticket that its router has signed, or if it is standalone"
        )

    def carries(self, session: Session, group: bytes) -> bool:
        """Whether another executor carries the collectives of a group of a session."""
        guest = self._guests.get(session.id)
        return guest is not None and (guest.visit is not None or group in guest.groups)

    # -- one collective ----------------------------------------------------------------------------------------------

    def reach(self, session: Session, call: Collective, unusable: Callable[[], str]) -> Signal:
        """Go on with a session's collective: see `Collectives.reach`.

        Args:
            session: the session.
            call: its frame.
            unusable: tells why an operand cannot be used; empty: all can. It is called when the session's memory is here.
        """
        guest = self._guests[session.id]
        visit = guest.visit
        if visit is None:
            if not self._vram.present(session):
                return Signal.MEMORY_AWAITED
            session.holdings.parked = 0
            visit = guest.visit = self._begin(session, guest.groups[call.group], call, unusable())
            if not visit.call.fault:
                self._copy(session, visit, self._read_parts(session, visit), self._was_read)
        if visit.stage is Stage.BACK:
            if not self._vram.present(session) or not self._room(session, visit.call):
                return Signal.MEMORY_AWAITED
            session.holdings.parked = 0
            visit.stage = Stage.WRITING
            self._copy(session, visit, self._written_parts(session, visit), self._was_written)
        if visit.stage is Stage.DONE:
            session.holdings.parked = 0
            return Signal.MEMORY_READY
        if visit.stage is Stage.AWAY:
            session.holdings.parked = session.holdings.parked or self._vram.clock()
        return Signal.PEERS_AWAITED

    def finish(self, session: Session) -> tuple[Collective, str] | None:
        """The session's collective, which is done, and its error; None: the session has none."""
        guest = self._guests.get(session.id)
        if guest is None or guest.visit is None:
            return None
        visit, guest.visit = guest.visit, None
        session.peer_bytes = 0
        if visit.call.what is What.LEAVE:
            guest.groups.pop(visit.call.group, None)
        return visit.call, visit.error

    def lost(self, session: Session) -> str:
        """Why a session must go on elsewhere, together with the other ranks of its group; empty: it need not."""
        guest = self._guests.get(session.id)
        visit = None if guest is None else guest.visit
        return visit.error if visit is not None and visit.broken and visit.call.recovers else ""

    def closed(self, session: Session, why: str, *, passing: bool) -> None:
        """A session has ended: so do its sessions at other executors. `passing`: it may go on elsewhere."""
        guest = self._guests.pop(session.id, None)
        for link in [] if guest is None else guest.links.values():
            link.close(why, passing=passing)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `expire` should be called next, in seconds. None: no rank waits."""
        return min([v.deadline for v in self._away()], default=None)

    def expire(self) -> None:
        """Break the connections whose other end has not answered in time."""
        now = self._clock()
        for visit in self._away():
            if now > visit.deadline:
                seconds = visit.call.timeout_ms / 1e3 + MARGIN_S
                visit.deadline = float("inf")
                visit.link.abort(
                    f"it has not answered within {seconds:g} s. Rank {visit.call.rank} waits for it in "
                    f"{describe(visit.call)}"
                )

    def _away(self) -> list[Visit]:
        visits = [g.visit for g in self._guests.values() if g.visit is not None]
        return [v for v in visits if v.stage is Stage.AWAY]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _begin(self, session: Session, link: PeerLink, call: Collective, fault: str) -> Visit:
        size = call.dtype.itemsize
        (_, reads), (_, writes) = laid_out(call.reads, size), laid_out(call.writes, size)
        in_place = call.what is What.ALL_REDUCE  # its ranges are equal, and the data is away before the results come
        if in_place:
            writes = 0
        if not fault and reads + writes > self._most:
            fault = (
                f"rank {call.rank}, {describe(call)}: it needs {reads + writes} bytes of host memory of the rank's executor, "
                f"because another executor carries it; at most {self._most} are allowed (WOOLY_EXECUTOR_SESSION_HOST)"
            )
        if fault:
            call, reads, writes = replace(call, fault=fault), 0, 0
        data = _host_memory(link, reads)
        results = data if in_place else _host_memory(link, writes)
        session.peer_bytes = reads + writes
        visit = Visit(call, link, data, results, self._clock() + call.timeout_ms / 1e3 + MARGIN_S)
        if fault:
            self._send(session, visit)
        return visit

    def _room(self, session: Session, call: Collective) -> bool:
        guarded = [w.buffer for w in call.writes if w.buffer in session.holdings.guarded]
        need = self._vram.ledger.cost_of_writing(session.holdings.account, guarded) if guarded else 0
        return self._vram.room_for(session, need)

    def _read_parts(self, session: Session, visit: Visit) -> list[Part]:
        return self._parts(session, visit, visit.call.reads, visit.data, writing=False)

    def _written_parts(self, session: Session, visit: Visit) -> list[Part]:
        return self._parts(session, visit, visit.call.writes, visit.results, writing=True)

    def _parts(
        self, session: Session, visit: Visit, ranges: Sequence[Range], host: Tensor, *, writing: bool
    ) -> list[Part]:
        size, parts = visit.call.dtype.itemsize, []
        starts, _ = laid_out(ranges, size)
        for r, at in zip(ranges, starts, strict=True):
            if r.elements:
                there = self._tensor(session, visit.call, r, writing).view(torch.uint8)
                here = host[at : at + r.elements * size]
                parts.append(Part((here,), (there,)) if writing else Part((there,), (here,)))
        return parts

    def _copy(
        self, session: Session, visit: Visit, parts: list[Part], then: Callable[[Session, Visit, str], None]
    ) -> None:
        """Copy between device and host: little memory now, more in the mover's thread."""
        if sum([part.nbytes for part in parts]) <= COPIED_HERE:
            begun = time.perf_counter_ns()
            for _ in steps(parts, _MOVED, self._piece):
                pass
            took = time.perf_counter_ns() - begun
            self._bill([session], took, took)
            then(session, visit, "")
            return

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._copied(session, visit, job, error, then))

        job = WorkJob(self._vram.priority(session), done, parts=parts, call=_MOVED, piece=self._piece)
        session.holdings.job = job
        self._vram.mover.submit(job)

    def _copied(
        self,
        session: Session,
        visit: Visit,
        job: Job,
        error: Exception | None,
        then: Callable[[Session, Visit, str], None],
    ) -> None:
        assert isinstance(job, WorkJob)
        job.parts = []
        if session.holdings.job is job:
            session.holdings.job = None
        if session.holdings.closed:
            self._vram.release(session)
            return
        self._bill([session], job.took_ns, job.core_ns)
        then(session, visit, f"{type(error).__name__}: {error}" if error is not None else "")
        self._post.add(session, Signal.PEERS_CAME)

    def _was_read(self, session: Session, visit: Visit, error: str) -> None:
        if error:
            visit.call = replace(visit.call, fault=error)
            visit.data, visit.results = _nothing(), _nothing()
        self._send(session, visit)

    def _send(self, session: Session, visit: Visit) -> None:
        visit.stage = Stage.AWAY

        def done(error: str, broken: bool) -> None:
            self._call(lambda: self._returned(session, visit, error, broken))

        results = visit.results.numpy().data
        visit.link.submit(Errand(visit.call, visit.data.numpy().data, results, done))

    def _returned(self, session: Session, visit: Visit, error: str, broken: bool) -> None:
        visit.error, visit.broken = error, broken
        visit.data = _nothing()
        visit.stage = Stage.DONE if error or not len(visit.results) else Stage.BACK
        if session.holdings.closed:
            return
        if session.flow.readiness is Readiness.MEMORY:
            self._post.add(session, Signal.MEMORY_CAME)
        self._post.add(session, Signal.PEERS_CAME)

    def _was_written(self, session: Session, visit: Visit, error: str) -> None:
        visit.error = error
        visit.results = _nothing()
        visit.stage = Stage.DONE


def _host_memory(link: PeerLink, nbytes: int) -> Tensor:
    shared = link.memory(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8) if shared is None else torch.frombuffer(shared, dtype=torch.uint8)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
