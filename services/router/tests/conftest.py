"""Shared fixtures of the router's tests: a manual clock, a fake executor, a router in this process."""

import asyncio
import contextlib
import dataclasses
import shutil

import pytest
from sqlalchemy import exc, make_url
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_router import opening
from wooly_router.actor import RouterActor
from wooly_router.duties import Duties
from wooly_router.gate import Gate
from wooly_router.jobs import JobActor
from wooly_router.settings import RouterSettings
from wooly_router.state.database import Database, migrate
from wooly_router.state.world import World
from wooly_router.stops import Stops
from wooly_router.tasks import TaskActor
from wooly_router.traces import TraceActor
from wooly_router.waiting import SOONEST_S
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionReply,
    CloseSessionRequest,
    DeviceFacts,
    ExecutorHeartbeat,
    HostSessionReply,
    KeepCheckpointsReply,
    OpenSessionRequest,
    QueuePlace,
    RenewSessionReply,
    RunJobReply,
    SteerSessionReply,
)

DEVICE = DeviceFacts(name="device", vendor="cpu", runtime="cpu", total_memory=1000, cores=1)


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


class FakeExecutor:
    """Takes sessions like an executor, and records the requests."""

    def __init__(self, app, name):
        self.app, self.name = app, name
        self.sessions, self.closed, self.jobs = {}, [], []
        #: The requests to close after which sessions may go on in other executors.
        self.left = []
        self.policies = {}
        self.refuse = None
        #: Called with the request before a session opens.
        self.before_open = None
        self.asked, self.held_up = [], 0
        self.late_s = 0.0
        #: How sessions ended that this executor no longer has.
        self.ended = {}
        self.kept, self.dropped, self.kept_devices = [], [], []
        app.serve(contracts.EXECUTOR_SESSION_OPEN.at(name), self.on_open)
        app.serve(contracts.EXECUTOR_SESSION_RENEW.at(name), self.on_renew)
        app.serve(contracts.EXECUTOR_SESSION_CLOSE.at(name), self.on_close)
        app.serve(contracts.EXECUTOR_SESSION_STEER.at(name), self.on_steer)
        app.serve(contracts.EXECUTOR_JOB_RUN.at(name), self.on_run_job)
        app.serve(contracts.EXECUTOR_CHECKPOINT_KEEP.at(name), self.on_keep_checkpoints)

    async def on_open(self, request):
        self.asked.append(request)
        if len(self.asked) <= self.held_up:
            await asyncio.sleep(0.4)
        if self.refuse:
            raise self.refuse
        if self.before_open:
            await self.before_open(request)
        self.sessions[request.session_id] = request
        self.policies[request.session_id] = request.policy
        return HostSessionReply(endpoints=(f"unix:///tmp/{self.name}.sock",))

    async def on_steer(self, request):
        if request.session_id not in self.policies:
            raise RefusedError("executor.no_session", "not here")
        changes = request.model_dump(include={"priority", "weight"}, exclude_none=True)
        policy = self.policies[request.session_id].model_copy(update=changes)
        self.policies[request.session_id] = policy
        return SteerSessionReply(policy=policy, suspended=False, exclusive=False)

    async def on_run_job(self, request):
        await asyncio.sleep(self.late_s)
        if self.refuse:
            raise self.refuse
        self.jobs.append(request)
        self.sessions[request.session_id] = request
        return RunJobReply()

    async def on_keep_checkpoints(self, request):
        self.kept += [n.session_id for n in request.keep]
        self.kept_devices += [(n.session_id, n.devices) for n in request.keep]
        self.dropped += [n.session_id for n in request.drop]
        return KeepCheckpointsReply()

    async def on_renew(self, request):
        if request.session_id not in self.sessions:
            raise RefusedError("executor.no_session", "not here")
        return RenewSessionReply(lease_s=self.sessions[request.session_id].lease_s)

    async def on_close(self, request):
        self.closed.append((request.session_id, request.reason))
        if request.passing:
            self.left.append(request.session_id)
        closed = self.sessions.pop(request.session_id, None) is not None
        return CloseSessionReply(closed=closed, ended=self.ended.get(request.session_id))

    def heartbeat(self, **changes):
        return ExecutorHeartbeat(
            **{
                "executor_id": self.name,
                "node": "host",
                "pid": 1,
                "device": DEVICE,
                "endpoints": (),
                "sessions": tuple(self.sessions),
            }
            | changes
        )


class AlwaysLeader:
    held, alone = True, False


@dataclasses.dataclass
class Rig:
    """A router and fake executors on one NATS connection."""

    app: ServiceApp
    actor: RouterActor
    clock: Clock
    executors: list[FakeExecutor]
    jobs: JobActor
    desk: TaskActor
    traces: TraceActor
    steady: Clock

    def stop(self, seconds):
        """Stop the router's process for some time: it does nothing, and its clocks go on."""
        self.clock.now += seconds
        self.steady.now += seconds

    async def beat(self):
        for executor in self.executors:
            await self.actor.on_heartbeat(executor.heartbeat())

    @property
    def tasks(self):
        return self.actor.world.tasks

    async def sessions(self):
        """The ids of the open sessions, oldest first."""
        return [t.id for t in await self.tasks.in_states("started", kind="session")]

    def another(self):
        """A second router on the same database and NATS; the test calls its methods directly."""
        other = RouterActor(
            self.actor.settings, ServiceApp("other", self.app.url), self.actor.world, self.actor.gate, self.clock
        )
        other._app = other.advice._app = other.executors._app = other.moves._app = self.app
        return other

    def duties(self):
        return Duties(self.app, self.actor, self.jobs, AlwaysLeader())

    ask = staticmethod(lambda **wanted: ask(**wanted))

    @staticmethod
    def database_away():
        """The error of a transaction while the database does not answer."""
        return exc.OperationalError("SELECT", {}, OSError("the server closed the connection"))

    async def open(self, **wanted):
        return await self.actor.on_open_session(ask(**wanted))

    async def queue(self, **wanted):
        """Open a session that may wait, a moment after the last one."""
        self.clock.now += 0.001
        return await self.open(queue=True, **wanted)

    async def turn(self, waiting, router=None, pause_s=SOONEST_S, **wanted):
        """Ask whether the turn of a session that waits has come, after the pause that a client makes."""
        self.clock.now += pause_s
        place = QueuePlace(session_id=waiting.session_id, token=waiting.token)
        return await (router or self.actor).on_open_session(ask(queue=True, place=place, **wanted))

    async def close(self, opened):
        return await self.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))


def ask(**wanted):
    return OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="train.py"), **wanted)


def sqlite_url(folder):
    directory = folder / "with space and 100%"
    directory.mkdir()
    return RouterSettings(state_dir=directory).database()


@pytest.fixture(params=["sqlite", "postgresql"])
def stored_url(request, copy_of_schema):
    """A database with our tables, of each supported kind."""
    return copy_of_schema(request.param)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """An empty database, of each supported kind."""
    return request.getfixturevalue("postgres").database() if request.param == "postgresql" else sqlite_url(tmp_path)


def pytest_generate_tests(metafunc):
    """Run tests with router state on both databases. On PostgreSQL, only tests with `on_both` are quick; the others are slow."""
    if "backend" in metafunc.fixturenames:
        quick = metafunc.definition.get_closest_marker("on_both") is not None
        other = pytest.param("postgresql", marks=() if quick else pytest.mark.slow)
        metafunc.parametrize("backend", ["sqlite", other], indirect=True)


@pytest.fixture
def backend(request):
    """The kind of database of the test."""
    return request.param


@pytest.fixture(scope="session")
def schema(postgres):
    """A PostgreSQL database with our tables, from which others are copied."""
    url = postgres.database()
    migrate(url)
    return make_url(url).database


@pytest.fixture(scope="session")
def schema_file(tmp_path_factory):
    """An SQLite file with our tables, from which others are copied."""
    url = RouterSettings(state_dir=tmp_path_factory.mktemp("schema")).database()
    migrate(url)
    return make_url(url).database


@pytest.fixture
def copy_of_schema(request, tmp_path):
    """`copy_of_schema("sqlite")` returns the URL of a new database with our tables. Copying is much faster than migrating."""

    def make(backend):
        if backend == "postgresql":
            return request.getfixturevalue("postgres").database(request.getfixturevalue("schema"))
        url = sqlite_url(tmp_path)
        shutil.copy(request.getfixturevalue("schema_file"), make_url(url).database)
        return url

    return make


@pytest.fixture
def settings(tmp_path, backend, copy_of_schema):
    return RouterSettings(state_dir=tmp_path, lease_s=9.0, database_url=copy_of_schema(backend), durable=False)


@pytest.fixture
def rig(nats_server, settings, monkeypatch):
    """`async with rig("a", "b") as r`: a router with executors of these names, which have sent heartbeats.

    The router does not wait for sessions that may be ending, so that refusals come at once.
    """
    monkeypatch.setattr(opening, "LEAVING_S", 0.0)

    @contextlib.asynccontextmanager
    async def make(*names, url=nats_server, auth="open"):
        world, clock = World(Database(settings.database(), durable=settings.durable), settings.cluster()), Clock()
        app = ServiceApp("test", url)
        actor = RouterActor(settings.model_copy(update={"auth": auth}), app, world, Gate(world, auth, clock), clock)
        jobs = JobActor(app, actor)
        world.traces.keeps = True
        desk, traces = TaskActor(app, actor, jobs), TraceActor(app, world, actor.gate)
        actor.stops = Stops(steady := Clock())
        actor.stops.note()
        built = Rig(app, actor, clock, [FakeExecutor(app, n) for n in names], jobs, desk, traces, steady)
        await actor.resume()
        try:
            async with app.running():
                await built.beat()
                yield built
        finally:
            jobs.modules.close()
            await world.close()

    return make


@pytest.fixture
def beating_executor(nats_server):
    """`async with beating_executor("a") as e`: an executor with its own connection, which sends heartbeats."""

    @contextlib.asynccontextmanager
    async def make(name):
        app = ServiceApp("executor", nats_server)
        executor = FakeExecutor(app, name)

        async def beat():
            while True:
                await app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, executor.heartbeat())
                await asyncio.sleep(0.1)

        async with app.running():
            task = asyncio.create_task(beat())
            yield executor
            task.cancel()

    return make
