"""The actor of one GPU: follows the GPU's journal, decides at epochs, admits and lists sessions.

Batches arrive in a mailbox. The actor replays them in slices, so that requests are answered in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError
from wooly_bus.stream_reader import StreamMessage
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
from wooly_scheduler.totals import messages, send_totals

log = logging.getLogger("wooly.scheduler")
#: Entries that are replayed without a pause; they take some milliseconds.
SLICE = 100
#: Maximum number of batches in the mailbox. A reader that is faster than the replay waits.
MAILBOX = 64
EXECUTOR_TIMEOUT_S = 1.0
#: Seconds after which an epoch is considered lost if the journal does not show it.
EPOCH_PATIENCE_S = 2.0
#: Maximum number of violation events per batch. Further violations are only counted.
MAX_EVENTS = 16
#: Seconds to wait for late entries that close a gap.
GAP_PATIENCE_S = 2.0
#: Seconds of silence after which the executor is considered gone, and the totals of its journal are sent to metering.
EXECUTOR_GONE_S = 10.0
#: Seconds between two checks whether totals must be sent to metering.
TOTALS_CHECK_S = 0.5
#: Silence, in ns, during which the recent figures remain valid.
FRESH_NS = 2_000_000_000
MAX_LISTED = 1000


class GpuActor:
    """All state of one GPU. Only `_work` changes it.

    Args:
        executor_id: the executor of the GPU.
        settings: settings of the scheduler.
        app: connection to NATS.
        clock: returns seconds since the epoch.
        follower: the state from a checkpoint, if any.
        sequence: number of the last message of the stream that `follower` covers.
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
        self.memory: MemoryState | None = None  # from the executor's last heartbeat
        self.sequence = self._taken = sequence
        self.heard = clock()  # time of the last message of the executor, of any kind
        self.entered = 0.0  # time at which the stream stored the journal's last entries
        self._settings, self._app, self._clock = settings, app, clock
        self._mailbox: asyncio.Queue[StreamMessage[bytes]] = asyncio.Queue(MAILBOX)
        self._turn = asyncio.Lock()
        self._told: tuple[int, float] | None = None
        self._complaint = ""
        self._gap_since: float | None = None
        self._device: DeviceFacts | None = None
        self._journal = ""  # name of the executor's journal by its last heartbeat
        self._counted = ("", 0)  # journal and number of entries whose totals metering has
        works = {"journal": self._work(), "epochs": self._epochs(), "totals": self._totals()}
        self._tasks = [start_task(work, f"{name} of {executor_id}") for name, work in works.items()]

    async def stop(self) -> None:
        """Stop the actor's tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, kept: StreamMessage[bytes]) -> None:
        """Put a batch into the mailbox; wait while the mailbox is full."""
        self._taken = kept.sequence
        await self._mailbox.put(kept)

    @property
    def caught_up(self) -> bool:
        """Whether all batches in the mailbox are replayed."""
        return self.sequence >= self._taken

    async def checkpoint(self) -> tuple[int, bytes]:
        """Number of the last replayed batch in the stream, and the encoded follower after it."""
        async with self._turn:
            return self.sequence, encode_follower(self.follower)

    # -- the journal -------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            kept = await self._mailbox.get()
            async with self._turn:
                try:
                    await self._replay(kept)
                except Exception:  # continue with the next batch; the log is the only trace of this error
                    log.exception("GPU %s: a batch of the journal could not be processed", self.executor_id)
                self.sequence = kept.sequence

    async def _replay(self, kept: StreamMessage[bytes]) -> None:
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
            log.info("GPU %s: the scheduler follows journal %s", self.executor_id, follower.journal)
            self._told = None
        if follower.gaps > gaps:
            self._log_gap()
        elif follower.lost and follower.lost != lost:
            log.error(
                "GPU %s: the scheduler stopped following journal %s: %s",
                self.executor_id,
                follower.journal,
                follower.lost,
            )
        self._gap_since = (self._gap_since or self._clock()) if follower.waiting else None
        await self._report(found)

    def _log_gap(self) -> None:
        log.warning(
            "GPU %s: journal %s has a gap (%s); the scheduler does not see the sessions until the executor begins a new journal",
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
            with contextlib.suppress(BusError):  # the violation is counted and logged
                await self._app.publish(contracts.SCHEDULER_AUDIT_VIOLATED, event)
        if len(found) > MAX_EVENTS:
            log.error("GPU %s: the same batch has %d more violations", self.executor_id, len(found) - MAX_EVENTS)

    # -- totals ------------------------------------------------------------------------------------------------------

    async def _totals(self) -> None:
        while True:
            await asyncio.sleep(TOTALS_CHECK_S)
            try:
                await self._send_totals()
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning(
                        "GPU %s: the totals of the journal could not be sent to metering: %s; the scheduler tries again",
                        self.executor_id,
                        e,
                    )
                self._complaint = str(e)

    async def _send_totals(self) -> None:
        """Send metering the totals of finished journals. Also those of the current journal if the executor is silent, or has
        begun another one: a process that was started again and has nothing to do publishes no entry.
        """
        follower, at_us = self.follower, int((self.entered or self._clock()) * 1e6)
        while follower.finished:
            totals = follower.finished[0]
            await send_totals(self._app.jetstream(), messages(totals, self.executor_id, self._device, at_us))
            follower.finished = [other for other in follower.finished if other is not totals]
        now = (follower.journal, follower.entries)
        silent = self._clock() - self.heard > min(EXECUTOR_GONE_S, self._settings.silence_s / 2)
        replaced = self._journal not in ("", follower.journal)
        if (silent or replaced) and self.caught_up and follower.journal and now != self._counted:
            await send_totals(self._app.jetstream(), messages(follower.totals(), self.executor_id, self._device, at_us))
            self._counted = now

    # -- epochs ------------------------------------------------------------------------------------------------------

    async def _epochs(self) -> None:
        while True:
            await asyncio.sleep(self._settings.epoch_s)
            now = self._clock()
            if self._gap_since is not None and now - self._gap_since > GAP_PATIENCE_S:
                async with self._turn:
                    if self.follower.give_up():
                        self._log_gap()
                    self._gap_since = None
            try:
                await self._judge(now)
            except BusError as e:
                if str(e) != self._complaint:
                    log.warning("GPU %s: an epoch could not be sent to the executor: %s", self.executor_id, e)
                self._complaint = str(e)
            except Exception:
                log.exception("GPU %s: an epoch could not be processed", self.executor_id)

    async def _judge(self, now: float) -> None:
        follower = self.follower
        if follower.lost or not self.caught_up or now - self.entered > EPOCH_PATIENCE_S:
            return  # old measurements do not describe the present
        if self._told is not None and self._told[0] == follower.meters.epochs and now < self._told[1]:
            return  # the journal does not show the last epoch yet
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
            "GPU %s: P0's p99 is %.2f times its p99 alone, the device is %.0f %% idle: the windows are now %s us",
            self.executor_id,
            decision.slowdown_permille / 1000,
            decision.idle_permille / 10,
            ", ".join(f"{w / 1000:.0f}" for w in reply.windows_ns),
        )

    def hear(self, heartbeat: ExecutorHeartbeat) -> None:
        """Take in a heartbeat: the executor is alive, and reports the use of its memory."""
        self.heard, self._device, self._journal = self._clock(), heartbeat.device, heartbeat.journal
        memory = self.memory = heartbeat.memory
        if memory is not None:
            sessions = [Commitment(s.session_id, s.promised, s.swappable) for s in memory.sessions]
            self.vram.hear(memory.capacity, memory.overcommit_percent, sessions)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def has(self, session_id: str) -> bool:
        """Whether the session is open on this GPU by the journal, or was admitted a moment ago."""
        return any(d.session == session_id for d in self.book.demands(self.follower, self._clock()))

    def demand(self, session_id: str) -> Demand | None:
        """The session as the admission test sees it; None if it is not on this GPU."""
        demands = self.book.demands(self.follower, self._clock())
        return next((d for d in demands if d.session == session_id), None)

    def judge(self, candidate: Demand) -> Verdict:
        """Test whether all objectives hold with `candidate`."""
        state = self.follower.state
        demands = self.book.demands(self.follower, self._clock())
        return admit(candidate, demands, state.config, state.width, self._settings.error_permille)

    def on_admit_session(self, request: AdmitSessionRequest) -> AdmitSessionReply:
        """Admit or refuse a session by the response-time test and the memory of the GPU."""
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
            return AdmitSessionReply(admitted=False, full=True, reason=f"GPU {self.executor_id}: {why}"[:4096])
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
        """The figures that `wooly top` shows."""
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
        """The state of the memory. Only entries that are not sessions of the journal, such as pinned contents, are listed by
        name.
        """
        if self.memory is None:
            return None
        rest = tuple([m for m in self.memory.sessions if m.session_id not in sessions])
        return self.memory.model_copy(update={"sessions": rest})
