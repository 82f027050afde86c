"""Shared parts of the scheduler's tests: a NATS server, a fake executor, the scheduler's process."""

import asyncio
import contextlib
import os
import subprocess
import time

import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_bus.streams import ensure_stream
from wooly_dispatch.events import (
    EpochEndedEvent,
    Policy,
    PolicyChangedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
)
from wooly_dispatch.journal import Journal
from wooly_testkit.dispatch import Rig
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import (
    EndEpochReply,
    GpusRequest,
    SessionPolicy,
    SteerSessionReply,
)

MS = 1_000_000


@pytest.fixture
def nats():
    """A NATS server for one test, because journals stay in its stream."""
    with start_nats_server() as url:
        yield url


class FakeExecutor:
    """A device in virtual time that publishes its journal and obeys requests."""

    def __init__(self, app, name, run="1"):
        self.app, self.name = app, name
        self.epochs, self.steered = [], []
        self.begin(run)
        app.serve(contracts.EXECUTOR_SESSION_STEER.at(name), self.on_steer)
        app.serve(contracts.EXECUTOR_EPOCH_END.at(name), self.on_epoch)

    def begin(self, run):
        self.rig, self.told = Rig(books=False), 0
        self.journal = Journal(f"{self.name}/{run}")

    def cut(self):
        for event, decisions in self.rig.entries[self.told :]:
            self.journal.record(event, decisions)
        self.told = len(self.rig.entries)
        return self.journal.cut()

    async def send(self, data):
        await self.app.jetstream().publish(contracts.EXECUTOR_DISPATCH_JOURNALED.at(self.name).subject, data)

    async def publish(self):
        batch = self.cut()
        if batch is not None:
            await self.send(batch.encode())

    async def on_epoch(self, request):
        self.epochs.append(request)
        self.rig.send(EpochEndedEvent(self.rig.now, request.slowdown_permille, request.idle_permille))
        await self.publish()
        return EndEpochReply(windows_ns=self.rig.state.windows)

    async def on_steer(self, request):
        self.steered.append(request)
        session = self.rig.state.sessions.get(request.session_id)
        if session is None:
            raise RefusedError("executor.no_session", f"session {request.session_id} is not open here")
        p = session.policy
        if request.priority is not None or request.weight is not None:
            p = Policy(
                p.priority if request.priority is None else request.priority,
                request.weight or p.weight,
                p.service_ns,
                p.objective_ns,
                p.rate_permille,
                p.burst_ns,
            )
            self.rig.send(PolicyChangedEvent(self.rig.now, session.id, p))
        if request.suspended is not None:
            kind = SessionSuspendedEvent if request.suspended else SessionResumedEvent
            self.rig.send(kind(self.rig.now, session.id))
        await self.publish()
        policy = SessionPolicy(priority=p.priority, weight=p.weight)
        return SteerSessionReply(policy=policy, suspended=session.suspended, exclusive=False)

    def work(self, rounds=20, extra_ns=0):
        """Run P0 requests beside a P4 session."""
        for _ in range(rounds):
            self.rig.submit("bg", 300_000, 200_000)
            self.rig.submit("p0", 400_000)
            while self.rig.in_flight:
                self.rig.finish()
                self.rig.now += extra_ns

    def populate(self):
        self.rig.open("p0", 0, objective_ns=MS, service_ns=400_000)
        self.rig.open("bg", 4)
        self.work()


@pytest.fixture
def executor(nats):
    """`async with executor("gpu-0") as e`: a fake executor with its own connection and the journal's stream."""

    @contextlib.asynccontextmanager
    async def make(name="gpu-0"):
        app = ServiceApp("executor", nats)
        found = FakeExecutor(app, name)
        async with app.running():
            await ensure_stream(app.jetstream(), contracts.EXECUTOR_DISPATCH_JOURNALED)
            yield found

    return make


@pytest.fixture
def start_scheduler(nats, tmp_path):
    """Starts schedulers as processes; stops them at the end of the test."""
    running = []

    def start(**env):
        process = Forked(
            "wooly_scheduler",
            env=os.environ
            | {
                "WOOLY_SCHEDULER_NATS_URL": nats,
                "WOOLY_SCHEDULER_STATE_DIR": str(tmp_path / "scheduler"),
                "WOOLY_SCHEDULER_METRICS_PORT": "0",
            }
            | env,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


async def until(condition, seconds=30):
    """Wait until `condition()` (or the awaited result) is true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)


async def listed(app, name="gpu-0"):
    """The scheduler's state of a GPU, or None."""
    try:
        reply = await app.request(contracts.SCHEDULER_GPU_LIST, GpusRequest(), timeout=2)
    except Exception:
        return None
    return next((g for g in reply.gpus if g.executor_id == name), None)


async def followed(executor, entries=None):
    """The scheduler's state of the executor's GPU, after the replay of all entries."""
    wanted = executor.told if entries is None else entries

    async def seen():
        state = await listed(executor.app, executor.name)
        return (
            state if state is not None and state.entries >= wanted and state.journal == executor.journal.name else None
        )

    return await until(seen)
