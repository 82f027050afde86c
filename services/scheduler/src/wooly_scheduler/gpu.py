"""The actor of one GPU: follows its journal, judges its epochs, admits and lists its sessions.

Batches come through a mailbox and are replayed in slices, so that requests are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError
from wooly_bus.stream_reader import Kept
from wooly_bus.streams import StreamError
from wooly_bus.supervision import start_task
from wooly_dispatch.metrics import Meter
from wooly_dispatch.overcommit import Commitment
from wooly_dispatch.policing import declared
from wooly_wis.messages import (
    AdmitSessionReply,
    AdmitSessionRequest,
    AuditViolated,
    DeviceFacts,
    EndEpochRequest,
    ExecutorHeartbeat,
    GpuSession,
    GpuState,
    MemoryState,
    SessionPolicy,
)

from wooly_scheduler.checkpoint import encode_follower
from wooly_scheduler.core.admission import Demand, Verdict, admit
from wooly_scheduler.core.book import Book
from wooly_scheduler.core.epochs import decide
from wooly_scheduler.core.follower import Follower, Violation
from wooly_scheduler.core.vram import VramBook
from wooly_scheduler.settings import SchedulerSettings
from wooly_scheduler.totals import messages, tell

log = logging.getLogger("wooly.scheduler")
#: Entries that are replayed before anybody else has a turn: some milliseconds.
SLICE = 100
#: Batches that wait for their turn; a reader that runs ahead of the replay waits too.
MAILBOX = 64
EXECUTOR_TIMEOUT_S = 1.0
#: Seconds after which an epoch that the journal does not show is taken to be lost.
EPOCH_PATIENCE_S = 2.0
#: Events of one batch; the others are counted.
MAX_EVENTS = 16
#: Seconds for which a gap may be closed by entries that come late.
GAP_PATIENCE_S = 2.0
#: Seconds of silence after which an executor is taken to be gone, and what its journal says is told to metering.
GONE_S = 10.0
#: Seconds between looks at whether there is something to tell metering.
TELL_S = 0.5
#: Silence in which the device is still taken to do what it did.
FRESH_NS = 2_000_000_000
MAX_LISTED = 1000


class GpuActor:
    """Everything of one GPU. Its state changes in `_work` alone.

    Args:
        follower: what was known of it before, if anything.
        sequence: the last message of the stream that is in there.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        executor_id: str,
        settings: SchedulerSettings,
        app: ServiceApp,
        clock: Callable[[], float],
        follower: Follower | None = None,
        sequence: int = 0,
    ) -> None:
        self.executor_id = executor_id
        self.follower = follower or Follower(executor_id)
        self.book = Book()
        self.vram = VramBook()
        self.memory: MemoryState | None = None  # as its executor last said
        self.sequence = self._taken = sequence
        self.heard = clock()  # of its executor, in any way
        self.entered = 0.0  # when its last entries were kept
        self._settings, self._app, self._clock = settings, app, clock
        self._mailbox: asyncio.Queue[Kept[bytes]] = asyncio.Queue(MAILBOX)
        self._turn = asyncio.Lock()
        self._told: tuple[int, float] | None = None
        self._complaint = ""
        self._gap_since: float | None = None
        self._device: DeviceFacts | None = None
        self._counted = ("", 0)  # journal and entries that metering was told of
        works = {"journal": self._work(), "epochs": self._epochs(), "totals": self._totals()}
        self._tasks = [start_task(work, f"{name} of {executor_id}") for name, work in works.items()]

    async def stop(self) -> None:
        """End its tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, kept: Kept[bytes]) -> None:
        """A batch of its journal; waits while the mailbox is full."""
        self._taken = kept.sequence
        await self._mailbox.put(kept)

    @property
    def caught_up(self) -> bool:
        """Whether everything that was read is replayed."""
        return self.sequence >= self._taken

    async def checkpoint(self) -> tuple[int, bytes]:
        """Its follower as of a whole batch, and that batch's number in the stream."""
        async with self._turn:
            return self.sequence, encode_follower(self.follower)

    # -- the journal -------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            kept = await self._mailbox.get()
            async with self._turn:
                try:
                    await self._replay(kept)
                except Exception:  # the next batch may be better; this one is counted by nobody else
                    log.exception("GPU %s: a batch of its journal failed", self.executor_id)
                self.sequence = kept.sequence

    async def _replay(self, kept: Kept[bytes]) -> None:
        follower = self.follower
        journal, lost, gaps = follower.journal, follower.lost, follower.gaps
        found: list[Violation] = []
        for n, violation in enumerate(follower.feed(kept.payload())):
            if violation is not None:
                found.append(violation)
            if n % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        self.entered = max(self.entered, kept.at)
        self.heard = max(self.heard, kept.at)
        if follower.journal != journal:
            log.info("GPU %s: follows journal %s", self.executor_id, follower.journal)
            self._told = None
        if follower.gaps > gaps:
            self._say_gap()
        elif follower.lost and follower.lost != lost:
            log.error("GPU %s: journal %s is followed no more: %s", self.executor_id, follower.journal, follower.lost)
        self._gap_since = (self._gap_since or self._clock()) if follower.waiting else None
        await self._report(found)

    def _say_gap(self) -> None:
        log.warning(
            "GPU %s: journal %s has a gap (%s); its sessions are not seen until its executor begins another",
            self.executor_id,
            self.follower.journal,
            self.follower.lost,
        )

    async def _report(self, found: list[Violation]) -> None:
        for violation in found[:MAX_EVENTS]:
            log.error("GPU %s: %s: %s", self.executor_id, violation.law, violation)
            event = AuditViolated(
                executor_id=self.executor_id,
                journal=violation.journal,
                entry=max(violation.entry, 0),
                law=violation.law,
                message=violation.message,
            )
            with contextlib.suppress(BusError):  # it is counted, and in the log
                await self._app.publish(contracts.SCHEDULER_AUDIT_VIOLATED, event)
        if len(found) > MAX_EVENTS:
            log.error("GPU %s: %d more violations in the same batch", self.executor_id, len(found) - MAX_EVENTS)

    # -- totals ------------------------------------------------------------------------------------------------------

    async def _totals(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            try:
                await self._tell_totals()
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning("GPU %s: metering was not told what its journal says: %s", self.executor_id, e)
                self._complaint = str(e)

    async def _tell_totals(self) -> None:
        """Tell metering what journals that are over say, and this one's while nothing is heard of the executor."""
        follower, at_us = self.follower, int((self.entered or self._clock()) * 1e6)
        while follower.finished:
            totals = follower.finished[0]
            await tell(self._app.jetstream(), messages(totals, self.executor_id, self._device, at_us))
            follower.finished = [other for other in follower.finished if other is not totals]
        now = (follower.journal, follower.entries)
        silent = self._clock() - self.heard > min(GONE_S, self._settings.silence_s / 2)
        if silent and self.caught_up and follower.journal and now != self._counted:
            await tell(self._app.jetstream(), messages(follower.totals(), self.executor_id, self._device, at_us))
            self._counted = now

    # -- epochs ------------------------------------------------------------------------------------------------------

    async def _epochs(self) -> None:
        while True:
            await asyncio.sleep(self._settings.epoch_s)
            now = self._clock()
            if self._gap_since is not None and now - self._gap_since > GAP_PATIENCE_S:
                async with self._turn:
                    if self.follower.give_up():
                        self._say_gap()
                    self._gap_since = None
            try:
                await self._judge(now)
            except BusError as e:
                if str(e) != self._complaint:
                    log.warning("GPU %s: its executor was not told of an epoch: %s", self.executor_id, e)
                self._complaint = str(e)
            except Exception:
                log.exception("GPU %s: an epoch could not be judged", self.executor_id)

    async def _judge(self, now: float) -> None:
        follower = self.follower
        if follower.lost or not self.caught_up or now - self.entered > EPOCH_PATIENCE_S:
            return  # what is old says nothing of now
        if self._told is not None and self._told[0] == follower.meters.epochs and now < self._told[1]:
            return  # the journal does not show the last one yet
        decision = decide(follower.state, follower.meters)
        if decision is None:
            return
        self._told = (follower.meters.epochs, now + EPOCH_PATIENCE_S)
        request = EndEpochRequest(
            slowdown_permille=min(decision.slowdown_permille, (1 << 31) - 1), idle_permille=decision.idle_permille
        )
        reply = await self._app.request(
            contracts.EXECUTOR_EPOCH_END.at(self.executor_id), request, timeout=EXECUTOR_TIMEOUT_S
        )
        self._complaint = ""
        log.info(
            "GPU %s: P0's p99 is %.2f of that alone, %.0f %% idle: windows are %s us now",
            self.executor_id,
            decision.slowdown_permille / 1000,
            decision.idle_permille / 10,
            ", ".join(f"{w / 1000:.0f}" for w in reply.windows_ns),
        )

    def hear(self, heartbeat: ExecutorHeartbeat) -> None:
        """Its executor lives, and says what its memory is used for."""
        self.heard, self._device = self._clock(), heartbeat.device
        memory = self.memory = heartbeat.memory
        if memory is not None:
            sessions = [Commitment(s.session_id, s.promised, s.swappable) for s in memory.sessions]
            self.vram.hear(memory.capacity, memory.overcommit_percent, sessions)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def has(self, session_id: str) -> bool:
        """Whether the session is open here, as far as the journal says, or was admitted a moment ago."""
        return any(d.session == session_id for d in self.book.demands(self.follower, self._clock()))

    def demand(self, session_id: str) -> Demand | None:
        """The session as the admission test sees it."""
        demands = self.book.demands(self.follower, self._clock())
        return next((d for d in demands if d.session == session_id), None)

    def judge(self, candidate: Demand) -> Verdict:
        """Whether all objectives hold with `candidate`."""
        state = self.follower.state
        demands = self.book.demands(self.follower, self._clock())
        return admit(candidate, demands, state.config, state.width, self._settings.error_permille)

    def on_admit_session(self, request: AdmitSessionRequest) -> AdmitSessionReply:
        """The response-time test."""
        policy = declared(
            request.priority, request.weight, request.service_ns, request.objective_ns, request.interval_ns
        )
        candidate = Demand(request.session_id, request.tenant, policy)
        verdict = self.judge(candidate)
        if not verdict.admitted:
            log.info("GPU %s: session %s is refused: %s", self.executor_id, request.session_id, verdict.reason)
            reason = f"GPU {self.executor_id}: {verdict.reason}"
            return AdmitSessionReply(admitted=False, reason=reason[:4096], missed_by_ns=verdict.missed_by_ns)
        asked, now = Commitment(request.session_id, request.required_vram, request.swappable), self._clock()
        why = self.vram.refusal(asked, request.overcommit_vram_percent, now)
        if why:
            log.info("GPU %s: session %s is refused: %s", self.executor_id, request.session_id, why)
            return AdmitSessionReply(admitted=False, reason=f"GPU {self.executor_id}: {why}"[:4096])
        self.book.promise(candidate, now)
        self.vram.promise(asked, now)
        return AdmitSessionReply(
            admitted=True,
            policy=SessionPolicy(
                priority=policy.priority,
                weight=policy.weight,
                service_ns=policy.service_ns,
                objective_ns=policy.objective_ns,
                rate_permille=policy.rate_permille,
                burst_ns=policy.burst_ns,
            ),
        )

    # -- figures -----------------------------------------------------------------------------------------------------

    def listing(self) -> GpuState:
        """What `wooly top` shows."""
        follower, age = self.follower, max(self._clock() - self.entered, 0.0)
        meters, state = follower.meters, follower.state
        silent = int(age * 1e9)
        recent = meters.recent(silent if silent > FRESH_NS else 0)
        wall, ran = max(recent.wall, 1), max(sum(recent.run.values()), 1)
        sessions = sorted(state.sessions.values(), key=lambda s: (-recent.run.get(s.id, 0), s.id))
        memory = {m.session_id: m for m in self.memory.sessions} if self.memory is not None else {}
        listed = []
        for s in sessions[:MAX_LISTED]:
            meter = meters.meters.get(s.id) or Meter(s.tenant)
            p = s.policy
            listed.append(
                GpuSession(
                    session_id=s.id,
                    tenant=s.tenant or "default",
                    policy=SessionPolicy(
                        priority=p.priority,
                        weight=p.weight,
                        service_ns=p.service_ns,
                        objective_ns=p.objective_ns,
                        rate_permille=min(p.rate_permille, 1000),
                        burst_ns=p.burst_ns,
                    ),
                    suspended=s.suspended,
                    queued=len(s.programs),
                    in_flight=s.in_flight,
                    share_permille=recent.run.get(s.id, 0) * 1000 // ran,
                    run_ns=meter.run_ns,
                    unjust_ns=meter.unjust_ns,
                    programs=meter.programs,
                    p50_ns=meter.responses.quantile(500),
                    p99_ns=meter.responses.quantile(990),
                    attainment_permille=meter.attainment_permille,
                    memory=memory.get(s.id),
                )
            )
        last = follower.last
        return GpuState(
            executor_id=self.executor_id,
            journal=follower.journal,
            entries=follower.entries,
            utilization_permille=min(recent.executing * 1000 // wall, 1000),
            starvation_permille=min(recent.starving * 1000 // wall, 1000),
            share_error_permille=max(share.worst for share in meters.shares),
            windows_ns=state.windows,
            violations=follower.counts.total(),
            last_violation=""
            if last is None
            else f"{last.journal}, entry {last.entry}: {last.law}: {last.message}"[:4096],
            lost=follower.lost[:4096],
            gaps=follower.gaps,
            age_s=age if self.entered else 0.0,
            open_sessions=len(state.sessions),
            sessions=tuple(listed),
            memory=self._others(set(state.sessions)),
        )

    def _others(self, sessions: set[str]) -> MemoryState | None:
        """Where its memory is; by name only who is no session of the journal's, such as what is pinned."""
        if self.memory is None:
            return None
        rest = tuple([m for m in self.memory.sessions if m.session_id not in sessions])
        return self.memory.model_copy(update={"sessions": rest})
