"""The duties of the leading router for all routers: it ends what is over, maintains nodes and their history, removes old data."""

from __future__ import annotations

import logging

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError
from wooly_bus.leadership import Leadership
from wooly_wis.messages import GpusRequest

from wooly_router.actor import RouterActor
from wooly_router.blobs import AbandonedUploads
from wooly_router.jobs import JobActor
from wooly_router.state.database import UNREACHABLE, log_away
from wooly_router.state.nodes import GpuRecord, Sample

log = logging.getLogger("wooly.router")
EVERY_S = 1.0
#: Seconds between two samples of every device.
SAMPLE_S = 10.0
#: Seconds between two searches for old data and abandoned uploads.
FORGET_S = 300.0


class Duties:
    """The leader's periodic work.

    Every change is conditional on the state that the leader saw, so a second leader does no harm.
    """

    def __init__(self, app: ServiceApp, actor: RouterActor, jobs: JobActor, leadership: Leadership) -> None:
        self._app, self._actor, self._jobs, self._leadership = app, actor, jobs, leadership
        self._uploads = AbandonedUploads(app, actor.settings.upload_idle_s)
        #: Whether the database did not answer in the last round.
        self._database_away = False
        self._kept: dict[str, GpuRecord] = {}
        self._due: dict[str, float] = {}

    async def run(self, every_s: float = EVERY_S) -> None:
        """Run rounds until cancelled. A database that is unreachable for a while does not end the loop.

        Such a time does not end sessions either: no client could renew its lease meanwhile, so all leases are extended after it.
        The same holds after a time in which this process was stopped or without NATS: it has not read what was said meanwhile.
        """
        while True:
            await self._jobs.wait(every_s)
            try:
                await self.step()
            except UNREACHABLE as e:
                self._database_away = True
                log_away("the leader's duties wait", e)
            except Exception:
                log.exception("a round of the leader's duties failed; trying again")

    async def step(self) -> None:
        """Do what every router does from time to time and, if this one leads, a round of the leader's work."""
        if missed := self._actor.missed():
            log.warning("%s; the leases of all sessions are extended", missed)
            await self._actor.resume()
        if self._database_away:
            await self._actor.resume()
            self._database_away = False
            log.info("the database answers again; the leases of all sessions are extended")
        await self.listen_to_scheduler()
        if self._is_due("settings", 2 * EVERY_S):
            self._actor.hibernate_after_s = (await self._actor.world.settings())[0].hibernate_after_s
        if self._leadership.held and self._app.connected:  # otherwise nobody hears it
            await self.round()

    async def round(self) -> None:
        """Do all work that is due."""
        await self.keep_nodes()
        await self._actor.lapse()
        await self._actor.reconcile()
        await self._actor.moves.drain()
        await self._jobs.round()
        if not self._leadership.alone:  # JetStream is available
            await self._jobs.tell()
            if self._is_due("uploads", FORGET_S):
                await self._uploads.drop()
        if self._is_due("sample", SAMPLE_S):
            await self.sample()
        if self._is_due("checkpoints", FORGET_S):
            await self._actor.moves.keep_checkpoints()
        if self._is_due("forget", FORGET_S):
            await self.forget()

    def _is_due(self, name: str, every_s: float) -> bool:
        now = self._actor.clock()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + every_s
        return True

    async def listen_to_scheduler(self) -> None:
        """Read the starvation of every device from the scheduler. Every router needs it to place sessions."""
        if not self._is_due("starvation", 2 * EVERY_S):
            return
        found: dict[str, int] = {}
        after, more = "", True
        try:
            while more:
                ask = GpusRequest(after=after)
                reply = await self._app.request(contracts.SCHEDULER_GPU_LIST, ask, timeout=0.5)
                found |= {g.executor_id: g.starvation_permille for g in reply.gpus}
                more = reply.more and bool(reply.gpus)
                after = reply.gpus[-1].executor_id if reply.gpus else ""
        except BusError:
            found = {}  # without a scheduler, starvation is unknown
        self._actor.world.starvation = found

    async def keep_nodes(self) -> None:
        """Store new devices and changed facts at once, and the times of heartbeats once a minute."""
        registry, changed = self._actor.registry, []
        for heartbeat in registry.all():
            facts = heartbeat.device.model_dump(exclude={"schema_version"})
            gpu = GpuRecord(heartbeat.executor_id, heartbeat.node, facts, registry.heard(heartbeat.executor_id) or 0.0)
            before = self._kept.get(gpu.executor_id)
            if (
                before is None
                or (before.facts, before.node_id) != (gpu.facts, gpu.node_id)
                or gpu.last_seen - before.last_seen > 60
            ):
                changed.append(gpu)
        if changed:
            await self._actor.world.nodes.see(changed)
            self._kept |= {g.executor_id: g for g in changed}

    async def sample(self) -> None:
        """Store one sample of every device that is alive."""
        actor = self._actor
        now = actor.clock()
        starvation = actor.world.starvation
        await actor.world.nodes.sample(
            [
                Sample(
                    at=round(now),
                    executor_id=h.executor_id,
                    node_id=h.node,
                    utilization=h.utilization,
                    starvation=starvation.get(h.executor_id, 0) / 1000,
                    memory_used=h.memory_used,
                    memory_total=h.device.total_memory,
                    sessions=len(h.sessions),
                )
                for h in actor.registry.alive(now)
            ]
        )

    async def forget(self) -> None:
        """Drop old tasks, remembered contents, samples and traces, and traces beyond the configured number."""
        world, now = self._actor.world, self._actor.clock()
        config, _ = await world.settings()
        await world.nodes.forget_samples(now - config.history_retention_s)
        await world.brought.forget(now - config.task_retention_s)
        while await world.tasks.forget_ended(now - config.task_retention_s) == 1000:
            continue
        while await world.traces.forget(now - self._actor.settings.trace_retention_s, self._actor.settings.traces_kept):
            continue
