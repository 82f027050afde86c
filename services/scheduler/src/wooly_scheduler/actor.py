"""The scheduler's front: one reader of all journals, an actor per GPU, answers over NATS, checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import nats.errors
from nats.js.api import ObjectStoreConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.stream_reader import read_stream
from wooly_bus.streams import StreamError, ensure_stream, replicas
from wooly_bus.tracing import step
from wooly_dispatch.events import Policy
from wooly_wis.messages import (
    AdmitSessionReply,
    AdmitSessionRequest,
    CheckCeilingRequest,
    ExecutorHeartbeat,
    GpusReply,
    GpusRequest,
    GpuState,
    SessionClosed,
    SteerSessionReply,
    SteerSessionRequest,
)

from wooly_scheduler.checkpoint import MAX_BYTES, CheckpointError, decode, encode
from wooly_scheduler.core.admission import Demand
from wooly_scheduler.gpu import EXECUTOR_TIMEOUT_S, GpuActor
from wooly_scheduler.settings import SchedulerSettings

log = logging.getLogger("wooly.scheduler")
BUCKET = "WOOLY_SCHEDULER"
#: Bytes that the bucket may take: a checkpoint, and the next one while it is written.
BUCKET_BYTES = 2 * MAX_BYTES + (1 << 20)
OBJECT = "checkpoint"
#: Seconds that a router has to say what a tenant may have.
ROUTER_TIMEOUT_S = 2.0
#: Seconds that a request waits for a scheduler that is behind with its journals.
SETTLE_S = 1.0
#: A listing is sent in pieces of about so many bytes.
LISTING_BYTES = 600_000


class SchedulerActor:
    """Owns the actors of all GPUs.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, settings: SchedulerSettings, app: ServiceApp, clock: Callable[[], float] = time.time) -> None:
        self.gpus: dict[str, GpuActor] = {}
        self.started = clock()
        self.read_until = 0
        self._settings, self._app, self._clock = settings, app, clock
        self._kept = -1
        self._read_all = False  # everything that was in the stream when this one came
        app.serve(contracts.SCHEDULER_SESSION_ADMIT, self.on_admit_session)
        app.serve(contracts.SCHEDULER_SESSION_STEER, self.on_steer_session)
        app.serve(contracts.SCHEDULER_GPU_LIST, self.on_gpus)
        app.serve_tenants(contracts.SCHEDULER_SESSION_STEER, self.on_steer_of)
        app.serve_tenants(contracts.SCHEDULER_GPU_LIST, self.on_gpus_of)
        app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, self.on_heartbeat)
        app.listen(contracts.EXECUTOR_SESSION_CLOSED, self.on_session_closed)

    def gpu(self, executor_id: str) -> GpuActor:
        """The actor of a GPU; a new one where there is none."""
        found = self.gpus.get(executor_id)
        if found is None:
            found = self.gpus[executor_id] = GpuActor(executor_id, self._settings, self._app, self._clock)
        return found

    # -- journals ----------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read all journals, for ever, from where the last checkpoint was made, or from the start of the stream."""
        first = await self._resume()
        js = self._app.jetstream()
        while True:
            try:
                await js.stream_info(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name)
                break
            except NotFoundError:
                await self._make_stream()
            except (nats.errors.Error, JetStreamError, OSError) as e:
                log.warning("JetStream does not answer: %s; trying again", str(e) or type(e).__name__)
                await asyncio.sleep(1)
        async for kept in read_stream(js, contracts.EXECUTOR_DISPATCH_JOURNALED, first=first):
            if kept is not None:
                await self.gpu(kept.event.address_of(kept.subject)).take(kept)
                self.read_until = kept.sequence
            self._read_all |= kept is None or not kept.pending

    async def _make_stream(self) -> None:
        try:
            await ensure_stream(self._app.jetstream(), contracts.EXECUTOR_DISPATCH_JOURNALED)
        except StreamError as e:
            log.warning("%s; trying again", e)
            await asyncio.sleep(1)

    async def forget(self) -> None:
        """Drop GPUs of which nothing is heard any more, for ever."""
        silence = self._settings.silence_s
        while True:
            await asyncio.sleep(min(silence / 4, 5.0))
            now = self._clock()
            for name, gpu in list(self.gpus.items()):
                if self._read_all and gpu.caught_up and now - max(gpu.heard, self.started) > silence:
                    log.info("GPU %s is forgotten: nothing was heard of it for %.0f s", name, now - gpu.heard)
                    del self.gpus[name]
                    await gpu.stop()

    async def on_heartbeat(self, heartbeat: ExecutorHeartbeat) -> None:
        """An executor lives, even if its journal has nothing to say."""
        self.gpu(heartbeat.executor_id).hear(heartbeat)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """What a session was promised is free, sooner than the next heartbeat says so."""
        found = self.gpus.get(event.executor_id)
        if found is not None:
            found.vram.forget(event.session_id)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep what was folded, every so often, for ever."""
        while True:
            await asyncio.sleep(self._settings.checkpoint_s)
            await self.checkpoint()

    async def checkpoint(self) -> bool:
        """Keep what was folded in JetStream. False if nothing is new, or if it could not be kept."""
        whole, sequence = [], self.read_until
        try:
            for name, gpu in sorted(self.gpus.items()):
                position, data = await gpu.checkpoint()
                whole.append((name, position, data))
                if not gpu.caught_up:
                    sequence = min(sequence, position)
            checkpoint = encode(sequence, whole)
        except CheckpointError as e:
            log.error("no checkpoint could be made: %s; a restart replays from the last one", e)
            return False
        if sequence == self._kept or not sequence:
            return False
        try:
            js = self._app.jetstream()
            try:
                store = await js.object_store(BUCKET)
            except NotFoundError:
                config = ObjectStoreConfig(
                    description="the scheduler's own", max_bytes=BUCKET_BYTES, replicas=replicas()
                )
                store = await js.create_object_store(BUCKET, config=config)
            await store.put(OBJECT, checkpoint)
        except (nats.errors.Error, JetStreamError, OSError) as e:
            log.warning(
                "no checkpoint could be kept: %s; a restart replays from the last one", str(e) or type(e).__name__
            )
            return False
        self._kept = sequence
        return True

    async def _resume(self) -> int:
        """Take up the last checkpoint. Returns the first message of the stream that is not in it."""
        try:
            store = await self._app.jetstream().object_store(BUCKET)
            size = (await store.get_info(OBJECT)).size or 0
            if size > MAX_BYTES:
                raise CheckpointError(f"it has {size} bytes; {MAX_BYTES} are allowed")
            sequence, followers = decode((await store.get(OBJECT)).data or b"")
        except NotFoundError:
            return 1
        except (CheckpointError, nats.errors.Error, JetStreamError, OSError) as e:
            log.warning("the last checkpoint cannot be used (%s); replaying the stream from its start", e)
            return 1
        for name, position, follower in followers:
            if name in self.gpus:  # its heartbeat came first
                await self.gpus[name].stop()
            self.gpus[name] = GpuActor(name, self._settings, self._app, self._clock, follower, position)
        log.info("took up the checkpoint of %d GPUs at message %d", len(followers), sequence)
        self.read_until = self._kept = sequence
        return sequence + 1

    async def stop(self) -> None:
        """Keep what is known and end the GPUs' actors."""
        await self.checkpoint()
        for gpu in self.gpus.values():
            await gpu.stop()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def on_admit_session(self, request: AdmitSessionRequest) -> AdmitSessionReply:
        """May a session run on that GPU?"""
        gpu = self.gpu(request.executor_id)
        await self._settled(gpu)
        with step("scheduler", "admit", executor=request.executor_id, priority=request.priority) as span:
            reply = gpu.on_admit_session(request)
            span.set_attributes({"admitted": reply.admitted, "reason": reply.reason})
        return reply

    async def _settled(self, *gpus: GpuActor) -> None:
        """Wait until the journals are replayed: a test against half of the sessions would be none."""
        until = self._clock() + SETTLE_S
        while not self._read_all or not all(gpu.caught_up for gpu in gpus):
            if self._clock() > until:
                raise RefusedError("scheduler.behind", "the scheduler is still replaying journals", retryable=True)
            await asyncio.sleep(0.01)

    async def on_steer_session(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Another class, weight or policy for a running session, on all its GPUs; suspend or resume it."""
        await self._settled(*self.gpus.values())
        found = [gpu for gpu in self.gpus.values() if gpu.has(request.session_id)]
        if not found:
            raise RefusedError(
                "scheduler.no_session",
                f"session {request.session_id} is not open on any GPU; `wooly top` lists those that are",
            )
        for gpu in found:
            self._judge(gpu, request)
        answers = await asyncio.gather(
            *[
                self._app.request(
                    contracts.EXECUTOR_SESSION_STEER.at(gpu.executor_id),
                    request,
                    timeout=EXECUTOR_TIMEOUT_S,
                )
                for gpu in found
            ],
            return_exceptions=True,
        )
        for gpu, answer in zip(found, answers, strict=True):
            if isinstance(answer, RefusedError):
                raise RefusedError(
                    answer.code, f"executor {gpu.executor_id}: {answer}", retryable=answer.retryable
                ) from answer
            if isinstance(answer, BusError):
                raise RefusedError(
                    "scheduler.executor_silent", f"executor {gpu.executor_id} did not answer: {answer}", retryable=True
                ) from answer
            if isinstance(answer, BaseException):
                raise answer
        first = answers[0]
        assert isinstance(first, SteerSessionReply)
        return first

    async def on_steer_of(self, request: SteerSessionRequest, tenant: str) -> SteerSessionReply:
        """A tenant treats a session of its own otherwise: its class, its weight, whether it is suspended."""
        if any(value is not None for value in (request.policy, request.exclusive, request.hold)):
            raise RefusedError("scheduler.forbidden", "these credentials set class, weight and suspension only")
        await self._settled(*self.gpus.values())
        found = [gpu.demand(request.session_id) for gpu in self.gpus.values()]
        if not any(demand is not None and demand.tenant == tenant for demand in found):
            raise RefusedError("scheduler.no_session", f"session {request.session_id} is not open on any GPU")
        if request.priority is not None or request.weight is not None:
            await self._may(tenant, request)
        return await self.on_steer_session(request)

    async def _may(self, tenant: str, request: SteerSessionRequest) -> None:
        """Refuse what is above the tenant's ceilings, which the router knows; and everything while it does not answer.

        Raises:
            RefusedError: see above.
        """
        ask = CheckCeilingRequest(tenant=tenant, priority=request.priority, weight=request.weight)
        try:
            reply = await self._app.request(contracts.ROUTER_CEILING_CHECK, ask, timeout=ROUTER_TIMEOUT_S)
        except BusError as e:
            raise RefusedError(
                "scheduler.router_silent",
                f"session {request.session_id} stays as it is: no router says what tenant {tenant} may have ({e}); try again",
                retryable=True,
            ) from e
        if reply.refusal:
            raise RefusedError("scheduler.above_ceiling", reply.refusal)

    async def on_gpus_of(self, request: GpusRequest, tenant: str) -> GpusReply:
        """What every GPU does, and a tenant's own sessions there."""
        reply = await self.on_gpus(request)
        return reply.model_copy(update={"gpus": tuple([g.of_tenant(tenant) for g in reply.gpus])})

    def _judge(self, gpu: GpuActor, request: SteerSessionRequest) -> None:
        """Refuse what would make an admitted session late."""
        now = gpu.demand(request.session_id)
        if now is None or request.suspended:
            return
        policy = now.policy
        if request.policy is not None:
            p = request.policy
            policy = Policy(p.priority, p.weight, p.service_ns, p.objective_ns, p.rate_permille, p.burst_ns)
        policy = Policy(
            policy.priority if request.priority is None else request.priority,
            policy.weight if request.weight is None else request.weight,
            policy.service_ns,
            policy.objective_ns,
            policy.rate_permille,
            policy.burst_ns,
        )
        suspended = now.suspended if request.suspended is None else request.suspended
        if suspended or (policy == now.policy and suspended == now.suspended):
            return
        verdict = gpu.judge(Demand(now.session, now.tenant, policy, now.longest_ns))
        if not verdict.admitted:
            raise RefusedError("scheduler.refused", f"GPU {gpu.executor_id}: {verdict.reason}")

    async def on_gpus(self, request: GpusRequest) -> GpusReply:
        """What every GPU does."""
        found: list[GpuState] = []
        size = 0
        names = sorted(name for name in self.gpus if name > request.after)
        for name in names:
            state = self.gpus[name].listing()
            size += len(state.model_dump_json())
            if found and size > LISTING_BYTES:
                return GpusReply(gpus=tuple(found), more=True)
            found.append(state)
        return GpusReply(gpus=tuple(found))
