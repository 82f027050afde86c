"""Brings the frames of a group's ranks together. Pure: no clock, no I/O, no buffers.

    arrival = groups.arrive(tenant, session, call, now)     a rank's frame has come
    arrival.meetings                                        what it takes part in; complete when all ranks are there
    groups.finish(meeting, error)                           the work of a complete meeting is done, or failed
    groups.leave(session, why), groups.expire(now)          what ends the waiting of others

A session waits at its frame, so a rank has at most one arrival. A rank that dies, a deadline, or ranks that ask for different
things end the group: its later collectives fail with the same reason. An operand that cannot be used fails only its collective,
because all ranks know about it.

If a rank's session ends because its executor or its connection was lost, the other ranks may go on elsewhere with it: the
arrivals of ranks that can (`Collective.recovers`) are `lost` instead of failed. Such ranks come back as another group, whose
first frame says where its numbers begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from wooly_wis.collectives import Collective, What

from wooly_executor.errors import CollectiveError

#: Maximum number of groups of a tenant. A program with three dimensions of parallelism on 64 ranks has about 100.
GROUPS_OF_TENANT = 1024


@dataclass(eq=False, slots=True)
class Arrival:
    """One rank's frame in the executor.

    Attributes:
        session: id of the session.
        call: what the rank asks for.
        group: its group.
        since: when the frame came, in seconds.
        deadline: when the rank stops to wait for others, in seconds.
        meetings: what it takes part in.
        error: why it failed; empty if it did not.
        settled: nothing is left to wait for.
    """

    session: str
    call: Collective
    group: Group
    since: float
    deadline: float
    meetings: list[Meeting] = field(default_factory=list)
    error: str = ""
    settled: bool = False

    @property
    def lost(self) -> bool:
        """Whether the rank's session must go on elsewhere, with those of the other ranks, instead of getting an error."""
        return bool(self.error) and self.group.lost and self.call.recovers


@dataclass(eq=False, slots=True)
class Meeting:
    """Ranks that work together: all ranks of a group, or the two ends of one transfer.

    Attributes:
        group: the group.
        arrivals: the ranks that are there.
        needed: number of ranks that must be there.
        read: of a transfer: index of the range that the first arrival reads.
        write: of a transfer: index of the range that the second arrival writes.
        running: its work has begun, so its ranks are settled when it is done.
        error: why it failed; empty if it did not.
        done: the work is done, or will not be done.
    """

    group: Group
    arrivals: list[Arrival] = field(default_factory=list)
    needed: int = 2
    read: int = -1
    write: int = -1
    running: bool = False
    error: str = ""
    done: bool = False

    @property
    def complete(self) -> bool:
        """Whether all ranks are there."""
        return len(self.arrivals) == self.needed


@dataclass(eq=False, slots=True)
class Group:
    """A group of ranks.

    Attributes:
        tenant: the tenant of its sessions.
        name: its random id.
        size: number of ranks.
        members: session of each rank that has come.
        gone: ranks that have left or died, and why.
        sequence: number of the last collective of all ranks here; None: the first frame tells it.
        meeting: the collective for which ranks wait.
        channels: transfers that lack one end, by the ranks from and to.
        error: why the group has ended; empty: it has not.
        passed: ranks in `gone` whose sessions may go on elsewhere.
        lost: such a rank ended the group.
    """

    tenant: str
    name: bytes
    size: int
    members: dict[int, str] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    sequence: int | None = 0
    meeting: Meeting | None = None
    channels: dict[tuple[int, int], deque[Meeting]] = field(default_factory=dict)
    error: str = ""
    passed: set[int] = field(default_factory=set)
    lost: bool = False

    @property
    def following(self) -> int:
        """Number of the next collective of all ranks; the least number, if the group is a share of another one."""
        return (self.sequence or 0) + 1

    def expects(self, call: Collective) -> bool:
        """Whether a collective of all ranks may come next by its number."""
        return call.sequence == self.following or (call.share and call.sequence > self.following)


class Groups:
    """All groups of one device."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, bytes], Group] = {}
        self._of_session: dict[str, dict[Group, int]] = {}
        self._waiting: dict[str, Arrival] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def arrive(self, tenant: str, session: str, call: Collective, now: float) -> Arrival:
        """Take in a rank's frame. If it completes or ends something, the arrivals of other sessions change, too.

        Raises:
            CollectiveError: the frame does not belong here. Other sessions do not notice it.
        """
        if call.what is What.LEAVE and call.recovers and (tenant, call.group) not in self._groups:
            # Its other frames were before the checkpoint from which the ranks go on.
            return Arrival(session, call, Group(tenant, call.group, call.size), now, now, settled=True)
        group = self._group_for(tenant, session, call)
        if call.what is What.LEAVE:
            arrival = Arrival(session, call, group, now, now, settled=True)
            self._leave(session, group, call.rank, "has left the group")
            return arrival
        if call.what is not What.EXCHANGE and group.sequence is None:
            group.sequence = call.sequence - 1
        if call.what is not What.EXCHANGE and not group.error and not group.expects(call):
            raise CollectiveError(
                f"rank {call.rank} sends number {call.sequence} of its group's collectives, but the next one has number "
                f"{group.following}"
            )
        arrival = Arrival(session, call, group, now, now + call.timeout_ms / 1e3)
        if group.error:
            arrival.error, arrival.settled = group.error, True
            return arrival
        self._waiting[session] = arrival
        if call.what is What.EXCHANGE:
            self._exchange(arrival)
        else:
            self._meet(arrival)
        return arrival

    def _group_for(self, tenant: str, session: str, call: Collective) -> Group:
        """The group of a frame. The first frame of a rank makes its session a member."""
        if session in self._waiting:
            raise CollectiveError("the session waits for another collective")
        group = self._groups.get((tenant, call.group))
        if group is None:
            if call.what is What.LEAVE:
                raise CollectiveError("the group that the rank leaves does not exist")
            if sum([known.tenant == tenant for known in self._groups.values()]) >= GROUPS_OF_TENANT:
                raise CollectiveError(
                    f"the tenant has {GROUPS_OF_TENANT} groups on this device, which is the limit; end groups with "
                    "torch.distributed.destroy_process_group"
                )
            group = self._groups[tenant, call.group] = Group(tenant, call.group, call.size)
            if call.recovers:
                group.sequence = None
        if group.size != call.size:
            raise CollectiveError(f"the group has {group.size} ranks, but the frame says {call.size}")
        if call.rank in group.gone:
            raise CollectiveError(f"rank {call.rank} {group.gone[call.rank]}")
        if group.members.get(call.rank, session) != session:
            raise CollectiveError(f"another session is rank {call.rank} of the group")
        mine = self._of_session.setdefault(session, {})
        if mine.setdefault(group, call.rank) != call.rank:
            raise CollectiveError(f"the session is rank {mine[group]} of the group, so it cannot be rank {call.rank}")
        group.members[call.rank] = session
        return group

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self, arrival: Arrival) -> None:
        group = arrival.group
        meeting = group.meeting = group.meeting or Meeting(group, needed=group.size)
        meeting.arrivals.append(arrival)
        arrival.meetings.append(meeting)
        if group.gone:
            group.lost = group.gone.keys() <= group.passed
            self._end(group, _gone(group, group.gone, arrival))
        elif why := own_difference(arrival.call) or _first_difference(meeting, arrival):
            self._end(group, why)

    def _exchange(self, arrival: Arrival) -> None:
        group, me = arrival.group, arrival.call.rank
        for k, r in enumerate(arrival.call.reads):
            self._transfer(arrival, (me, r.peer), read=k)
        for k, w in enumerate(arrival.call.writes):
            self._transfer(arrival, (w.peer, me), write=k)
        alone = {other for m in arrival.meetings if not m.complete for other in _others(m, arrival)} & group.gone.keys()
        if alone and not group.error:
            group.lost = alone <= group.passed
            self._end(group, _gone(group, alone, arrival))

    def _transfer(self, arrival: Arrival, way: tuple[int, int], read: int = -1, write: int = -1) -> None:
        group, sends = arrival.group, write < 0
        if group.error:
            return
        queue = group.channels.setdefault(way, deque())
        if queue and (queue[0].read < 0) == sends:  # the other end waits
            meeting = queue.popleft()
            meeting.arrivals.insert(0 if sends else 1, arrival)
            arrival.meetings.append(meeting)
            if sends:
                meeting.read = read
            else:
                meeting.write = write
            if not queue:
                del group.channels[way]
            if why := _transfer_difference(meeting):
                self._end(group, why)
            return
        meeting = Meeting(group, [arrival], read=read, write=write)
        queue.append(meeting)
        arrival.meetings.append(meeting)

    # -- the end of waiting ------------------------------------------------------------------------------------------

    def finish(self, meeting: Meeting, error: str = "") -> list[Arrival]:
        """The work of a complete meeting is done, or has failed.

        Returns:
            The arrivals that are settled by this.
        """
        group = meeting.group
        meeting.running, meeting.done = False, True
        meeting.error = meeting.error or group.error or error
        if meeting is group.meeting:
            group.meeting = None
            group.sequence = meeting.arrivals[0].call.sequence
        found = []
        for arrival in meeting.arrivals:
            arrival.error = arrival.error or meeting.error
            if not arrival.settled and all(m.done for m in arrival.meetings):
                arrival.settled = True
                self._waiting.pop(arrival.session, None)
                found.append(arrival)
        return found

    def leave(self, session: str, why: str, *, passing: bool = False) -> list[Arrival]:
        """A session has ended. Returns the arrivals of other sessions that are settled by this.

        Args:
            session: its id.
            why: the reason; empty: its client closed it.
            passing: it may go on in another executor.
        """
        before = self._unsettled()
        for group, rank in self._of_session.pop(session, {}).items():
            if passing:
                group.passed.add(rank)
            self._leave(session, group, rank, f"has ended: {why}" if why else "has closed its session")
        self._waiting.pop(session, None)
        return [arrival for arrival in before if arrival.settled and arrival.session != session]

    def _leave(self, session: str, group: Group, rank: int, why: str) -> None:
        group.gone[rank] = why
        group.members.pop(rank, None)
        self._of_session.get(session, {}).pop(group, None)
        if not group.members:
            del self._groups[group.tenant, group.name]
        waiting = self._waiting_in(group)
        if group.error:
            return
        mine = self._waiting.get(session)
        if mine is not None and mine.group is group:
            group.lost = rank in group.passed
            self._end(group, f"rank {rank} {why}, in {describe(mine.call)}")
        elif group.meeting is not None and group.meeting.arrivals:
            group.lost = rank in group.passed
            self._end(group, _gone(group, [rank], group.meeting.arrivals[0]))
        else:
            for arrival in waiting:
                if any(not m.complete and rank in _others(m, arrival) for m in arrival.meetings):
                    group.lost = rank in group.passed
                    self._end(group, _gone(group, [rank], arrival))
                    return

    def expire(self, now: float) -> list[Arrival]:
        """End the groups in which a rank has waited for too long. Returns the arrivals that are settled by this."""
        before = self._unsettled()
        for arrival in before:
            late = [m for m in arrival.meetings if not m.complete]
            if arrival.settled or not late or arrival.deadline > now:
                continue
            group = arrival.group
            there = {a.call.rank for a in late[0].arrivals}
            missing = sorted(set(range(group.size)) - there if arrival.call.sequence else _others(late[0], arrival))
            self._end(
                group,
                f"{_ranks(missing)} did not come to {describe(arrival.call)} within {arrival.deadline - arrival.since:g} s "
                f"({_limit(arrival)}); {_ranks(sorted(there))} waited there",
            )
        return [arrival for arrival in before if arrival.settled]

    def next_deadline(self) -> float | None:
        """When `expire` should be called next, in seconds. None: no rank waits for others."""
        waiting = [a.deadline for a in self._waiting.values() if any(not m.complete for m in a.meetings)]
        return min(waiting, default=None)

    def _end(self, group: Group, why: str) -> None:
        """End a group. All its ranks that wait are settled, except those whose work is running."""
        group.error = why
        group.channels.clear()
        group.meeting = None
        for arrival in self._waiting_in(group):
            for meeting in arrival.meetings:
                meeting.error = meeting.error or why
                meeting.done = meeting.done or not meeting.running
            if all(m.done for m in arrival.meetings):
                arrival.error, arrival.settled = arrival.error or why, True
                del self._waiting[arrival.session]

    def _unsettled(self) -> list[Arrival]:
        return list(self._waiting.values())

    def _waiting_in(self, group: Group) -> list[Arrival]:
        return [arrival for arrival in self._waiting.values() if arrival.group is group]

    def check(self) -> None:
        """Check that the tables agree.

        Raises:
            AssertionError: they disagree.
        """
        for session, arrival in self._waiting.items():
            assert arrival.session == session and not arrival.settled, "a settled rank waits"
            assert any(not m.done for m in arrival.meetings), "a rank waits for nothing"
            assert not arrival.group.error or any(m.running for m in arrival.meetings), "a rank waits in an ended group"
        for group in self._groups.values():
            assert group.members, "a group has no members"
            for rank, session in group.members.items():
                assert self._of_session[session][group] == rank, "a member's session does not know its rank"
            meeting = group.meeting
            ranks = [] if meeting is None else [a.call.rank for a in meeting.arrivals]
            assert len(ranks) == len(set(ranks)) <= group.size, "a rank has come twice"


def _others(meeting: Meeting, arrival: Arrival) -> set[int]:
    """The ranks for which an arrival waits in a meeting."""
    call = arrival.call
    if call.what is What.EXCHANGE:
        return {call.reads[meeting.read].peer if meeting.read >= 0 else call.writes[meeting.write].peer}
    return set(range(call.size)) - {a.call.rank for a in meeting.arrivals}


def _limit(arrival: Arrival) -> str:
    timeout = arrival.deadline - arrival.since >= arrival.call.timeout_ms / 1e3
    return "the group's timeout" if timeout else "another executor's share of it has failed"


def describe(call: Collective) -> str:
    """A collective in words."""
    number = f" (number {call.sequence} of the group)" if call.sequence else ""
    return f"{call.name}{number}" + (f" at {call.origin}" if call.origin else "")


def _ranks(ranks: Iterable[int]) -> str:
    found = [str(rank) for rank in ranks]
    shown = ", ".join(found[:16]) + (", …" if len(found) > 16 else "")
    return f"rank {shown}" if len(found) == 1 else f"ranks {shown}"


def _gone(group: Group, ranks: Iterable[int], waiting: Arrival) -> str:
    why = "; ".join([f"rank {rank} {group.gone[rank]}" for rank in sorted(ranks)][:4])
    return f"{why}. Rank {waiting.call.rank} waits for it in {describe(waiting.call)}"


def _first_difference(meeting: Meeting, arrival: Arrival) -> str:
    """The first difference between a new arrival and the others; empty: there is none."""
    others, call = meeting.arrivals[:-1], arrival.call
    if call.what in (What.GATHER, What.SCATTER):  # the root has the sizes of all parts
        compared = others if call.rank == call.root else [*others[:1], *[a for a in others if a.call.rank == call.root]]
    else:
        compared = others if call.what is What.ALL_TO_ALL else others[:1]
    return next((why for other in compared if (why := difference(other, arrival))), "")


def difference(first: Arrival, other: Arrival) -> str:
    """What two ranks of one collective ask for that does not fit; empty: it fits."""
    if first.call.rank > other.call.rank:
        first, other = other, first
    a, b = first.call, other.call
    for name in ("what", "reduction", "dtype", "root", "factor", "sequence"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            words = [getattr(v, "label", getattr(v, "name", str(v))).lower() for v in (mine, theirs)]
            word = {"what": "collective", "sequence": "numbers"}.get(name, name)
            return _differ(first, other, f"different {word}: {words[0]} and {words[1]}")
    what = a.what
    found: Iterable[tuple[int, int]] = ()
    if what in (What.ALL_REDUCE, What.REDUCE):
        found = [(a.reads[0].elements, b.reads[0].elements)]
    elif what is What.REDUCE_SCATTER:
        found = zip([r.elements for r in a.reads], [r.elements for r in b.reads], strict=True)
    elif what is What.ALL_GATHER:
        found = [
            *zip([w.elements for w in a.writes], [w.elements for w in b.writes], strict=True),
            (a.reads[0].elements, b.writes[a.rank].elements),
            (a.writes[b.rank].elements, b.reads[0].elements),
        ]
    elif what is What.ALL_TO_ALL:
        found = [
            (a.reads[b.rank].elements, b.writes[a.rank].elements),
            (a.writes[b.rank].elements, b.reads[a.rank].elements),
        ]
    elif what in (What.BROADCAST, What.GATHER, What.SCATTER):
        found = _rooted(a, b)
    wrong = next(((m, n) for m, n in found if m != n), None)
    if wrong is None:
        return ""
    where = " of the part that one executor carries" if a.share else ""
    return _differ(first, other, f"different sizes: {wrong[0]} and {wrong[1]} elements{where}")


def own_difference(call: Collective) -> str:
    """What one rank's frame contains that does not fit its own part; empty: it fits."""
    what, me, reads, writes = call.what, call.rank, call.reads, call.writes
    if what is What.EXCHANGE or not reads or not writes:
        return ""
    read = reads[me if what in (What.REDUCE_SCATTER, What.ALL_TO_ALL, What.SCATTER) else 0]
    written = writes[me if what in (What.ALL_GATHER, What.ALL_TO_ALL, What.GATHER) else 0]
    if read.elements == written.elements:
        return ""
    return f"rank {me} reads {read.elements} elements of its own part in {call.name}, but writes {written.elements}"


def _rooted(a: Collective, b: Collective) -> list[tuple[int, int]]:
    if a.rank != a.root and b.rank != b.root:
        if a.what is What.BROADCAST:
            return [(a.writes[0].elements, b.writes[0].elements)]
        return []  # each is compared with the root's part for it
    root, other = (a, b) if a.rank == a.root else (b, a)
    if a.what is What.BROADCAST:
        return [(root.reads[0].elements, other.writes[0].elements)]
    if a.what is What.GATHER:
        return [(root.writes[other.rank].elements, other.reads[0].elements)]
    return [(root.reads[other.rank].elements, other.writes[0].elements)]


def _transfer_difference(meeting: Meeting) -> str:
    source, target = meeting.arrivals
    sent, wanted = source.call.reads[meeting.read], target.call.writes[meeting.write]
    if source.call.dtype is not target.call.dtype:
        found = f"different dtype: {source.call.dtype.label} and {target.call.dtype.label}"
    elif sent.elements != wanted.elements:
        found = f"different sizes: {sent.elements} and {wanted.elements} elements"
    else:
        return ""
    return _differ(source, target, found)


def _differ(first: Arrival, other: Arrival, what: str) -> str:
    return (
        f"the ranks of a group ask for {what}. Rank {first.call.rank}: {describe(first.call)}; rank {other.call.rank}: "
        f"{describe(other.call)}. All ranks must call the same collectives in the same order"
    )
