"""What other executors carry of the collectives of sessions here. The device loop's thread owns this module.

A group with ranks on several executors is carried by the executor of its first rank, or divided among all of them (`shares`). For
a rank here, the operands of what others carry are copied to host memory, and connections (`peers`) take them there and bring the
results back, all at once. Meanwhile the frame waits. If the session has nothing else to do, its memory may leave the device.
"""

from __future__ import annotations

import logging
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
from wooly_wis.collectives import Collective, Range, What, share_of
from wooly_wis.frames import unpack_json

from wooly_executor.collectives.groups import describe
from wooly_executor.collectives.peers import DividedGroup, Errand, Introduction, Peer, PeerLink, laid_out
from wooly_executor.collectives.shares import Division, divide
from wooly_executor.collectives.work import Part, WorkJob, steps
from wooly_executor.errors import CollectiveError, ContextLostError, ExecutorError, forget_frames
from wooly_executor.flow import Readiness, Signal
from wooly_executor.mover import Job
from wooly_executor.post import Post
from wooly_executor.session import Session
from wooly_executor.vram import Vram

log = logging.getLogger("wooly.executor")
#: Seconds, besides the group's timeout, after which the other executor should have answered: it tells which rank is missing.
MARGIN_S = 10.0
#: Maximum number of groups of one session that other executors carry.
GROUPS_OF_SESSION = 1024
#: Maximum number of connections of one session to other executors. Each has a thread. A rank's groups have at most as many other
#: executors as the program has.
LINKS_OF_SESSION = 256
#: Maximum bytes that are copied in the device's thread.
COPIED_HERE = 1 << 20
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
    """One rank's part in what another executor carries of a collective.

    Attributes:
        call: the rank's frame, or its share.
        link: the connection to the other executor.
        data: host memory with what the rank reads.
        results: host memory for what it writes.
        since: when it began, in seconds.
        deadline: when the other executor should have answered, in seconds.
        error: why it failed; empty if it did not.
        broken: it failed because the other executor cannot be used any more.
    """

    call: Collective
    link: PeerLink
    data: Tensor
    results: Tensor
    since: float
    deadline: float
    stage: Stage = Stage.READING
    error: str = ""
    broken: bool = False


@dataclass(eq=False, slots=True)
class _Guest:
    """A session in whose groups other executors work.

    Attributes:
        links: by process and session there.
        groups: by the id of a group or a share that another executor carries.
        divisions: by the id of a group that is divided.
        visits: what other executors carry of the collective in progress.
    """

    links: dict[tuple[str, str], PeerLink] = field(default_factory=dict)
    groups: dict[bytes, PeerLink] = field(default_factory=dict)
    divisions: dict[bytes, Division] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)


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
        """Process a GROUP frame: from now on, another executor carries a group, or a group is divided.

        Args:
            session: a rank's session.
            payload: the frame's content.
            direct: clients may say themselves where the other executor is, because this one has no router.

        Raises:
            CollectiveError: the content is not valid, or the router has not signed it.
            DecodeError: it is no JSON.
        """
        told = unpack_json(payload)
        try:
            said = (DividedGroup if "carriers" in told else Introduction).model_validate(told)
        except ValidationError as e:
            wrong = e.errors()[0]
            raise CollectiveError(
                f"the GROUP frame's {'.'.join([str(part) for part in wrong['loc']])} is not valid: {wrong['msg']}"
            ) from e
        guest = self._guests.setdefault(session.id, _Guest())
        if len(guest.groups) >= GROUPS_OF_SESSION or len(guest.divisions) >= GROUPS_OF_SESSION:
            raise CollectiveError(
                f"the session has {GROUPS_OF_SESSION} groups that other executors carry, which is the limit; end groups with "
                "torch.distributed.destroy_process_group"
            )
        group = bytes.fromhex(said.group)
        if isinstance(said, DividedGroup):
            self._divide(guest, group, said)
            return
        link = None
        if not said.ticket and said.peer is None:
            link = next((known for (instance, _), known in guest.links.items() if instance == said.instance), None)
        if link is None:
            peer = Peer.read(self._told(session, said, direct=direct))
            key = said.instance, peer.session_id
            link = guest.links.get(key)
            if link is None:
                if len(guest.links) >= LINKS_OF_SESSION:
                    raise CollectiveError(
                        f"the session has connections to {LINKS_OF_SESSION} other executors, which is the limit"
                    )
                link = guest.links[key] = PeerLink(peer, said.instance, self._tls_ca)
        guest.groups[group] = link

    @staticmethod
    def _divide(guest: _Guest, group: bytes, said: DividedGroup) -> None:
        division = Division(said.carriers, said.least)
        why = division.problem()
        here = [k for k in range(division.count) if share_of(group, k) not in guest.groups]
        if not why and len(here) > 1:
            why = f"no frame before it has said who carries the shares {here}, but this executor carries one at most"
        if why:
            raise CollectiveError(f"the GROUP frame's division is not valid: {why}")
        guest.divisions[group] = division

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

    def divide(self, session: Session, call: Collective) -> tuple[Collective | None, list[Collective]]:
        """Tell what this executor carries of a session's collective (None: nothing), and what others carry.

        Raises:
            CollectiveError: the frame does not fit how the group is divided.
        """
        guest = self._guests.get(session.id)
        if guest is None:
            return call, []
        division = guest.divisions.get(call.group)
        if division is None:
            return (None, [call]) if call.group in guest.groups else (call, [])
        if len(division.carriers) != call.size:
            raise CollectiveError(f"the group has {len(division.carriers)} ranks, but the frame says {call.size}")
        here, others = None, []
        for share in divide(call, division).values():
            if share.group in guest.groups:
                others.append(share)
            else:
                here = share
        return here, others

    # -- one collective ----------------------------------------------------------------------------------------------

    def begin(self, session: Session, call: Collective, others: Sequence[Collective], fault: str) -> str:
        """Begin what others carry of a session's collective. The session's memory is on the device.

        Args:
            session: the session.
            call: its collective, whole.
            others: what others carry of it.
            fault: why the rank cannot take part; empty: it can.

        Returns:
            Why the rank cannot take part.
        """
        size = call.dtype.itemsize
        in_place = call.what is What.ALL_REDUCE  # its ranges are equal, and the data is away before the results come
        needs = [(laid_out(c.reads, size)[1], 0 if in_place else laid_out(c.writes, size)[1]) for c in others]
        need = sum([reads + writes for reads, writes in needs])
        if not fault and need > self._most:
            fault = (
                f"rank {call.rank}, {describe(call)}: it needs {need} bytes of host memory of the rank's executor, because "
                f"another executor carries it; at most {self._most} are allowed; use smaller tensors, or raise "
                "WOOLY_EXECUTOR_SESSION_HOST"
            )
        guest = self._guests[session.id]
        links = [guest.groups[share.group] for share in others]
        host = [(_nothing(), _nothing())] * len(others)
        if not fault:
            try:
                host = [(_host_memory(k, n), _host_memory(k, m)) for k, (n, m) in zip(links, needs, strict=True)]
            except Exception as e:
                fault = f"rank {call.rank}, {describe(call)}: {_reason(e)}"
        now = self._clock()
        deadline = now + call.timeout_ms / 1e3 + MARGIN_S
        session.holdings.parked, session.peer_bytes = 0, 0 if fault else need
        for share, link, (data, results) in zip(others, links, host, strict=True):
            results = data if in_place else results
            guest.visits.append(Visit(replace(share, fault=fault), link, data, results, now, deadline))
        if fault:
            for visit in guest.visits:
                self._send(session, visit)
        else:
            self._copy(session, guest.visits, self._read_parts, self._was_read)
        return fault

    def go_on(self, session: Session) -> Signal:
        """Go on with what others carry of a session's collective: see `Collectives.reach`."""
        visits = self._guests[session.id].visits
        back = [v for v in visits if v.stage is Stage.BACK]
        if back and not any(isinstance(job, WorkJob) for job in session.holdings.jobs):
            if not self._vram.present(session) or not self._room(session, back):
                return Signal.MEMORY_AWAITED
            session.holdings.parked = 0
            for visit in back:
                visit.stage = Stage.WRITING
            self._copy(session, back, self._written_parts, self._was_written)
        if all(v.stage is Stage.DONE for v in visits):
            session.holdings.parked = 0
            return Signal.MEMORY_READY
        return Signal.PEERS_AWAITED

    def waits(self, session: Session) -> bool:
        """Whether other executors have all that they carry of a session's collective and is not done."""
        guest = self._guests.get(session.id)
        return guest is None or all(v.stage in (Stage.AWAY, Stage.DONE) for v in guest.visits)

    def error(self, session: Session) -> str:
        """Why what another executor carries has failed; empty: nothing has failed yet."""
        guest = self._guests.get(session.id)
        return "" if guest is None else next((v.error for v in guest.visits if v.error), "")

    def hurry(self, session: Session, until: float) -> None:
        """Wait for other executors until this time at most, in seconds."""
        for visit in self._guests[session.id].visits if session.id in self._guests else ():
            visit.deadline = min(visit.deadline, until)

    def finish(self, session: Session, call: Collective) -> None:
        """The session's collective is done."""
        guest = self._guests.get(session.id)
        if guest is None:
            return
        guest.visits, session.peer_bytes = [], 0
        if call.what is What.LEAVE:
            division = guest.divisions.pop(call.group, None)
            for k in range(1 if division is None else division.count):
                guest.groups.pop(share_of(call.group, k), None)

    def lost(self, session: Session) -> str:
        """Why a session must go on elsewhere, together with the other ranks of its group; empty: it need not."""
        guest = self._guests.get(session.id)
        broken = [] if guest is None else [v for v in guest.visits if v.broken and v.call.recovers]
        return broken[0].error if broken else ""

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
                waited = visit.deadline - visit.since
                visit.deadline = float("inf")
                visit.link.abort(
                    f"it has not answered within {waited:.3g} s. Rank {visit.call.rank} waits for it in "
                    f"{describe(visit.call)}"
                )

    def _away(self) -> list[Visit]:
        return [v for g in self._guests.values() for v in g.visits if v.stage is Stage.AWAY]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _room(self, session: Session, visits: Sequence[Visit]) -> bool:
        writes = [w.buffer for v in visits for w in v.call.writes if w.elements]
        guarded = [buffer for buffer in dict.fromkeys(writes) if buffer in session.holdings.guarded]
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
        self,
        session: Session,
        visits: Sequence[Visit],
        parts_of: Callable[[Session, Visit], list[Part]],
        then: Callable[[Session, Visit, str], None],
    ) -> None:
        """Copy between device and host: little memory now, more in the mover's thread. A failure is that of the visits."""
        begun, why = time.perf_counter_ns(), ""
        parts: list[Part] = []
        try:
            parts = [part for visit in visits for part in parts_of(session, visit)]
            small = sum([part.nbytes for part in parts]) <= COPIED_HERE
            for _ in steps(parts, _MOVED, self._piece) if small else ():
                pass
        except ContextLostError:
            raise
        except Exception as e:
            small, why = True, _reason(e)
        if small:
            took = time.perf_counter_ns() - begun
            self._bill([session], took, took)
            for visit in visits:
                then(session, visit, why)
            return

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._copied(session, visits, job, error, then))

        job = WorkJob(self._vram.priority(session), done, parts=parts, call=_MOVED, piece=self._piece)
        session.holdings.jobs.append(job)
        self._vram.mover.submit(job)

    def _copied(
        self,
        session: Session,
        visits: Sequence[Visit],
        job: Job,
        error: Exception | None,
        then: Callable[[Session, Visit, str], None],
    ) -> None:
        assert isinstance(job, WorkJob)
        job.parts = []
        session.holdings.jobs.remove(job)
        if session.holdings.closed:
            self._vram.release(session)
            return
        self._bill([session], job.took_ns, job.core_ns)
        for visit in visits:
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


def _reason(error: Exception) -> str:
    """Why a rank cannot go on. An unexpected error is logged, too."""
    if not isinstance(error, ExecutorError):
        log.error("unexpected error in a collective; its rank gets it", exc_info=error)
    forget_frames(error)
    return str(error) or type(error).__name__


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
