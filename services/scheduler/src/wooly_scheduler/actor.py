"""The scheduler's front: the reader of all journals, one actor per GPU, replies to requests over NATS, checkpoints."""

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
from wooly_bus.streams import StreamError, ensure_stream, replicas, reserve
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

from wooly_scheduler.checkpoint import MAX_BYTES, CheckpointError, decode, decode_follower, encode
from wooly_scheduler.core.admission import Demand
from wooly_scheduler.gpu import EXECUTOR_TIMEOUT_S, GpuActor
from wooly_scheduler.settings import SchedulerSettings

log = logging.getLogger("wooly.scheduler")
BUCKET = "WOOLY_SCHEDULER"
#: Maximum size of the bucket, in bytes: one checkpoint, and the next one while it is written.
BUCKET_BYTES = 2 * MAX_BYTES + (1 << 20)
OBJECT = "checkpoint"
#: Seconds to wait for the router's answer about a tenant's ceilings.
ROUTER_TIMEOUT_S = 2.0
#: Seconds that a request waits for the replay of the journals.
SETTLE_S = 1.0
#: Seconds for which, and maximum number of bytes in which, the states of forgotten GPUs are kept. NATS, or the way to it, may
#: have been away: such an executor goes on with its journal, which nothing can follow from its middle.
QUIET_S, QUIET_BYTES = 86_400.0, 32 << 20
#: Approximate size, in bytes, of one piece of a listing.
LISTING_BYTES = 600_000


class SchedulerActor:
    """Owns the actors of all GPUs.

    Args:
        settings: settings of the scheduler.
        app: connection to NATS.
        clock: returns seconds since the epoch.
    """

    def __init__(self, settings: SchedulerSettings, app: ServiceApp, clock: Callable[[], float] = time.time) -> None:
        self.gpus: dict[str, GpuActor] = {}
        self.started = clock()
        self.read_until = 0
        self._settings, self._app, self._clock = settings, app, clock
        self._kept = -1
        #: Of forgotten GPUs: when they were forgotten, the last message that the state covers, and the state.
        self._quiet: dict[str, tuple[float, int, bytes]] = {}
        self._read_all = False  # whether all messages were read that the stream had at the start
        app.serve(contracts.SCHEDULER_SESSION_ADMIT, self.on_admit_session)
        app.serve(contracts.SCHEDULER_SESSION_STEER, self.on_steer_session)
        app.serve(contracts.SCHEDULER_GPU_LIST, self.on_gpus)
        app.serve_tenants(contracts.SCHEDULER_SESSION_STEER, self.on_steer_of)
        app.serve_tenants(contracts.SCHEDULER_GPU_LIST, self.on_gpus_of)
        app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, self.on_heartbeat)
        app.listen(contracts.EXECUTOR_SESSION_CLOSED, self.on_session_closed)

    def gpu(self, executor_id: str) -> GpuActor:
        """The actor of a GPU. It is created if it does not exist."""
        found = self.gpus.get(executor_id)
        if found is None:
            _, position, data = self._quiet.pop(executor_id, (0.0, 0, b""))
            follower = decode_follower(data) if data else None
            found = GpuActor(executor_id, self._settings, self._app, self._clock, follower, position)
            self.gpus[executor_id] = found
        return found

    # -- journals ----------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read all journals without end, from the last checkpoint or from the start of the stream."""
        first = await self._resume()
        js = self._app.jetstream()
        while True:
            try:
                await js.stream_info(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name)
                break
            except NotFoundError:
                await self._make_stream()
            except (nats.errors.Error, JetStreamError, OSError) as e:
                log.warning("JetStream does not answer: %s; the scheduler tries again", str(e) or type(e).__name__)
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
            log.warning("%s; the scheduler tries again", e)
            await asyncio.sleep(1)

    async def forget(self) -> None:
        """Forget silent GPUs, without end."""
        silence = self._settings.silence_s
        while True:
            await asyncio.sleep(min(silence / 4, 5.0))
            now = self._clock()
            for name, gpu in list(self.gpus.items()):
                if self._read_all and gpu.caught_up and now - max(gpu.heard, self.started) > silence:
                    position, data = await self._state_of(gpu)
                    if not gpu.caught_up or now - gpu.heard <= silence:
                        continue  # it sent something meanwhile
                    log.info("GPU %s is forgotten, because it sent nothing for %.0f s", name, now - gpu.heard)
                    del self.gpus[name]
                    self._keep_quiet(name, now, position, data)
                    await gpu.stop()

    @staticmethod
    async def _state_of(gpu: GpuActor) -> tuple[int, bytes]:
        try:
            return await gpu.checkpoint()
        except CheckpointError as e:
            log.warning("%s; if its executor goes on, the scheduler does not see its sessions until it is restarted", e)
            return 0, b""

    def _keep_quiet(self, name: str, now: float, position: int, data: bytes) -> None:
        self._quiet[name] = now, position, data
        self._quiet = {n: kept for n, kept in self._quiet.items() if now - kept[0] <= QUIET_S}
        while sum(len(data) for _, _, data in self._quiet.values()) > QUIET_BYTES:
            del self._quiet[min(self._quiet, key=lambda n: self._quiet[n][0])]

    async def on_heartbeat(self, heartbeat: ExecutorHeartbeat) -> None:
        """An executor is alive, even if its journal has no new entries."""
        self.gpu(heartbeat.executor_id).hear(heartbeat)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """Release a session's promised memory before the next heartbeat reports it."""
        found = self.gpus.get(event.executor_id)
        if found is not None:
            found.vram.forget(event.session_id)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def make_checkpoints(self) -> None:
        """Make a checkpoint every `checkpoint_s`, without end."""
        while True:
            await asyncio.sleep(self._settings.checkpoint_s)
            await self.checkpoint()

    async def checkpoint(self) -> bool:
        """Store a checkpoint in JetStream. Returns False if nothing is new, or if the checkpoint could not be stored."""
        whole, sequence, quiet = [], self.read_until, dict(self._quiet)  # one may come back meanwhile
        try:
            for name, gpu in sorted(self.gpus.items()):
                position, data = await gpu.checkpoint()
                whole.append((name, position, data))
                if not gpu.caught_up:
                    sequence = min(sequence, position)
            known = {name for name, _, _ in whole}
            whole += [(n, position, data) for n, (_, position, data) in quiet.items() if data and n not in known]
            checkpoint = encode(sequence, whole)
        except CheckpointError as e:
            log.error("the checkpoint could not be encoded: %s; a restart replays from the previous checkpoint", e)
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
                store = await reserve(
                    js,
                    f"OBJ_{BUCKET}",
                    BUCKET_BYTES,
                    BUCKET_BYTES,
                    lambda _: js.create_object_store(BUCKET, config=config),
                )
            await store.put(OBJECT, checkpoint)
        except (nats.errors.Error, JetStreamError, OSError) as e:
            log.warning(
                "the checkpoint could not be stored: %s; a restart replays from the previous checkpoint",
                str(e) or type(e).__name__,
            )
            return False
        self._kept = sequence
        return True

    async def _resume(self) -> int:
        """Load the last checkpoint. Returns the number of the first message that the checkpoint does not cover."""
        try:
            store = await self._app.jetstream().object_store(BUCKET)
            size = (await store.get_info(OBJECT)).size or 0
            if size > MAX_BYTES:
                raise CheckpointError(f"it has {size} bytes; the limit is {MAX_BYTES}")
            sequence, followers = decode((await store.get(OBJECT)).data or b"")
        except NotFoundError:
            return 1
        except (CheckpointError, nats.errors.Error, JetStreamError, OSError) as e:
            log.warning("the last checkpoint cannot be used (%s); the scheduler replays the stream from its start", e)
            return 1
        for name, position, follower in followers:
            if name in self.gpus:  # its heartbeat arrived first
                await self.gpus[name].stop()
            self.gpus[name] = GpuActor(name, self._settings, self._app, self._clock, follower, position)
        log.info("loaded the checkpoint of %d GPUs at message %d", len(followers), sequence)
        self.read_until = self._kept = sequence
        return sequence + 1

    async def stop(self) -> None:
        """Make a last checkpoint and stop the GPUs' actors."""
        await self.checkpoint()
        for gpu in self.gpus.values():
            await gpu.stop()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def on_admit_session(self, request: AdmitSessionRequest) -> AdmitSessionReply:
        """Test whether a session may run on a GPU."""
        gpu = self.gpu(request.executor_id)
        await self._settled(gpu)
        with step("scheduler", "admit", executor=request.executor_id, priority=request.priority) as span:
            reply = gpu.on_admit_session(request)
            span.set_attributes({"admitted": reply.admitted, "reason": reply.reason})
        return reply

    async def _settled(self, *gpus: GpuActor) -> None:
        """Wait until the journals are replayed, because admission and steering need all sessions."""
        until = self._clock() + SETTLE_S
        while not self._read_all or not all(gpu.caught_up for gpu in gpus):
            if self._clock() > until:
                raise RefusedError(
                    "scheduler.behind",
                    "the scheduler is still replaying journals; try again in a few seconds",
                    retryable=True,
                )
            await asyncio.sleep(0.01)

    async def on_steer_session(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Change the class, weight or policy of a running session on all its GPUs; suspend or resume the session."""
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
        """A tenant changes its own session: class, weight, whether the session is suspended."""
        if any(value is not None for value in (request.policy, request.exclusive, request.hold)):
            raise RefusedError(
                "scheduler.forbidden",
                "a tenant's credentials may change only class, weight and suspension of a session",
            )
        await self._settled(*self.gpus.values())
        found = [gpu.demand(request.session_id) for gpu in self.gpus.values()]
        if not any(demand is not None and demand.tenant == tenant for demand in found):
            raise RefusedError("scheduler.no_session", f"session {request.session_id} is not open on any GPU")
        if request.priority is not None or request.weight is not None:
            await self._check_ceilings(tenant, request)
        return await self.on_steer_session(request)

    async def _check_ceilings(self, tenant: str, request: SteerSessionRequest) -> None:
        """Refuse values above the tenant's ceilings, which the router knows. Without an answer of the router, refuse all values.

        Raises:
            RefusedError: a value is above a ceiling, or no router answers.
        """
        ask = CheckCeilingRequest(tenant=tenant, priority=request.priority, weight=request.weight)
        try:
            reply = await self._app.request(contracts.ROUTER_CEILING_CHECK, ask, timeout=ROUTER_TIMEOUT_S)
        except BusError as e:
            raise RefusedError(
                "scheduler.router_silent",
                f"session {request.session_id} is unchanged: no router states the ceilings of tenant {tenant} ({e}); try again",
                retryable=True,
            ) from e
        if reply.refusal:
            raise RefusedError("scheduler.above_ceiling", reply.refusal)

    async def on_gpus_of(self, request: GpusRequest, tenant: str) -> GpusReply:
        """List every GPU, with the tenant's own sessions only."""
        reply = await self.on_gpus(request)
        return reply.model_copy(update={"gpus": tuple([g.of_tenant(tenant) for g in reply.gpus])})

    def _judge(self, gpu: GpuActor, request: SteerSessionRequest) -> None:
        """Refuse a change that would make an admitted session miss its objective."""
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
        """List every GPU and its sessions."""
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
