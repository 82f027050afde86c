"""The tables on SQLite and PostgreSQL: migrations with rows in both directions, tasks, nodes, tenants, config, audit."""

import asyncio
import contextlib
import gc
import json
import sqlite3
import threading
import time

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, event, inspect, text
from sqlalchemy.exc import IntegrityError, StatementError
from wooly_router.app import first_token
from wooly_router.core.cluster import ClusterConfig
from wooly_router.core.placement import Claim, DeviceRequest
from wooly_router.settings import RouterSettings
from wooly_router.state.brought import BroughtStore
from wooly_router.state.config import AuditLog, AuditRecord, ConfigStore
from wooly_router.state.database import Database, migrate, revert
from wooly_router.state.nodes import GpuRecord, GroupRecord, NodeRecord, NodeStore, Sample
from wooly_router.state.tables import Base
from wooly_router.state.tasks import Lease, PartRecord, TaskFilter, TaskRecord, TaskStore
from wooly_router.state.tenants import TenantChange, TenantRecord, TenantStore, hash_of, new_token
from wooly_router.state.world import World

BIG = (1 << 63) - 1


def task(task_id="s", on="", **changes):
    parts = tuple(PartRecord(e, "n") for e in on.split())
    return TaskRecord(id=task_id, **{"kind": "session", "tenant": "x", "created_at": 1.0, "parts": parts} | changes)


def engine_of(url):
    return create_engine(url.replace("+aiosqlite", ""))


@pytest.fixture
async def database(stored_url):
    database = Database(stored_url, durable=False)
    yield database
    await database.close()


@pytest.fixture
def tasks(database):
    return TaskStore(database)


async def put(store, *records):
    async with store.database.writing() as s:
        for record in records:
            assert await store.add(s, record)


async def move(store, *args, **kwargs):
    async with store.database.writing() as s:
        return await store.move(s, *args, **kwargs)


# -- migrations ------------------------------------------------------------------------------------------------------


def test_migrations_on_empty_database_create_the_models(database_url):
    migrate(database_url)
    engine = engine_of(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_migrate_twice_changes_nothing(database_url):
    migrate(database_url)
    migrate(database_url)


@pytest.mark.parametrize("statements", [3, *[pytest.param(n, marks=pytest.mark.slow) for n in (9, 15)], 25])
def test_migration_when_interrupted_keeps_old_schema(database_url, statements):
    left = [statements]

    def break_off(*_):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    event.listen(Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(KeyboardInterrupt):
            migrate(database_url)
    finally:
        event.remove(Engine, "before_cursor_execute", break_off)
    migrate(database_url)
    migrate(database_url)


def test_migrations_up_and_down_keep_open_sessions(database_url):
    engine = engine_of(database_url)

    def rows(query):
        with engine.connect() as connection:
            return [tuple(r) for r in connection.execute(text(query))]

    migrate(database_url, "0001")
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO sessions VALUES ('s', 'a', 'n', 't', 'x', 2, 'shared', 7, 'train.py', 'h', 1.0, 10.0)")
        )
    migrate(database_url, "0002")
    assert rows("SELECT * FROM session_parts") == [("s", 0, "a", "n")]
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO session_parts VALUES ('s', 1, 'b', 'n')"))
    migrate(database_url)
    assert rows("SELECT id, kind, tenant, name, state, priority, required_vram, started_at FROM tasks") == [
        ("s", "session", "x", "train.py", "started", 2, 7, 1.0)
    ]
    assert rows("SELECT * FROM leases") == [("s", "t", 10.0)]
    assert rows("SELECT executor_id FROM task_parts ORDER BY position") == [("a",), ("b",)]
    with engine.begin() as connection:  # rows that the older schema cannot hold are dropped
        connection.execute(
            text(
                "INSERT INTO tasks (id, kind, tenant, name, client_host, state, reason, priority, gpu_mode, noswap, wants, "
                "placement, attempt, created_at) VALUES ('j', 'job', 'x', '', '', 'pending', '', 2, 'shared', false, "
                "'{}', '{}', 0, 2.0)"
            )
        )
        connection.execute(text("INSERT INTO task_events VALUES ('j', 1, 2.0, 'pending', '', false)"))
        connection.execute(
            text("INSERT INTO tenants (name, description, disabled, created_at) VALUES ('x', '', false, 1.0)")
        )
        connection.execute(text("INSERT INTO brought VALUES ('x', 'train.py', 'tenant', '[\"d\"]', 2.0)"))
        connection.execute(text("INSERT INTO traces VALUES ('t', 'x', 'j', 'train.py', 1.0, 1, 2, 1, false)"))
        connection.execute(text("INSERT INTO trace_tasks VALUES ('j', 't')"))
        connection.execute(text("INSERT INTO spans VALUES ('t', 's', NULL, 'run', 'router', 1, 2, false, '{}')"))
    revert(database_url, "0005")
    assert rows("SELECT task_id, trace_id FROM trace_tasks") == [("j", "t")]
    migrate(database_url)
    assert rows("SELECT * FROM brought") == [] and rows("SELECT id, tenant FROM traces") == [("t", "x")]
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO brought VALUES ('x', 'train.py', 'tenant', '[]', 2.0)"))
    revert(database_url, "0002")
    assert rows("SELECT id, token, tenant, program, opened_at, lease_until, required_vram FROM sessions") == [
        ("s", "t", "x", "train.py", 1.0, 10.0, 7)
    ]
    assert rows("SELECT session_id, position, executor_id FROM session_parts ORDER BY position") == [
        ("s", 0, "a"),
        ("s", 1, "b"),
    ]
    assert set(inspect(engine).get_table_names()) == {"sessions", "session_parts", "alembic_version"}
    migrate(database_url)
    assert rows("SELECT id, state FROM tasks") == [("s", "started")]
    revert(database_url, "0001")
    assert rows("SELECT id, executor_id, node FROM sessions") == [("s", "a", "n")]
    revert(database_url, "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 0)])
async def test_database_when_durable_syncs_commits_to_disk(tmp_path, durable, synchronous):
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/x.sqlite", durable=durable)
    async with database.writing() as s:
        assert (await s.execute(text("PRAGMA synchronous"))).scalar() == synchronous
    await database.close()


async def test_connection_to_postgresql_breaks_soon_after_the_server_has_vanished(postgres):
    url = postgres.database()
    for more, seconds in (
        ("", "10000"),
        ("&tcp_user_timeout=3000" if "?" in url else "?tcp_user_timeout=3000", "3000"),
    ):
        database = Database(url + more)
        async with database.reading() as s:
            raw = await (await s.connection()).get_raw_connection()
            found = raw.driver_connection.info.get_parameters()
        await database.close()
        assert (found["tcp_user_timeout"], found["connect_timeout"], found["keepalives_idle"]) == (seconds, "5", "10")


async def test_close_waits_for_operations_in_progress(stored_url):
    """Their connections belong to the closed pool, which nobody closes a second time."""
    database = Database(stored_url, durable=False)
    begun, done = asyncio.Event(), []

    async def work():
        async with database.writing() as s:
            await s.execute(text("SELECT 1"))
            begun.set()
            await asyncio.sleep(0.1)
            done.append((await s.execute(text("SELECT 2"))).scalar_one())

    working = asyncio.create_task(work())
    await begun.wait()
    await database.close()
    assert done == [2]
    await working
    del working
    gc.collect()  # a connection that is still open warns


async def test_close_after_cancelled_connecting_waits_for_its_thread(tmp_path, monkeypatch):
    """The thread reports to the event loop, which may be closed directly after this, as at the end of a process."""
    connect, connecting, opened = sqlite3.connect, threading.Event(), []

    def slow(*args, **options):
        connecting.set()
        time.sleep(0.2)
        opened.append(connect(*args, **options | {"check_same_thread": False}))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", slow)
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/x.sqlite")

    async def ask():
        async with database.reading() as s:
            await s.execute(text("SELECT 1"))

    before, asking = set(threading.enumerate()), asyncio.create_task(ask())
    await asyncio.to_thread(connecting.wait, 10)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await database.close()
    assert not [t for t in set(threading.enumerate()) - before if "_connection_worker_thread" in t.name]
    for connection in opened:  # the driver drops what nobody waits for, and Python 3.13 warns of it
        connection.close()


# -- tasks -----------------------------------------------------------------------------------------------------------


async def test_tasks_in_new_store_are_unchanged(tasks, stored_url):
    rows = [
        task("1", created_at=2.0, required_vram=BIG, gpu_mode="exclusive", noswap=True, priority=0),
        task("2", "c b", name="ü" * 1024, wants={"gpu_count": 2, "groups": ["g"], "weights": ["d"], "barred": ["z"]}),
        task("3", kind="job", spec={"module": "d"}, deadline_at=9.0, retry_at=3.0, placement={"why": "waiting"}),
    ]
    await put(tasks, *rows)
    again = TaskStore(Database(stored_url))
    assert [await again.get(r.id) for r in rows] == rows and await again.get("4") is None
    assert rows[0].want() == DeviceRequest(required_vram=BIG, exclusive=True, swappable=False)
    assert (await again.get("2")).want() == DeviceRequest(2, groups=("g",), weights=("d",), barred=frozenset("z"))
    async with again.database.reading() as s:
        assert await again.claims(s) == [Claim("c"), Claim("b")]
        used = {("c", "2"): 5, ("b", "other"): 7}
        assert await again.claims(s, used) == [Claim("c", 5), Claim("b")]
        assert [t.id for t in await again.queue(s)] == ["3", "1"]
    await again.database.close()


async def test_add_with_existing_id_is_refused(tasks):
    await put(tasks, task("1"))
    async with tasks.database.writing() as s:
        assert not await tasks.add(s, task("1", name="other"))
    assert (await tasks.get("1")).name == "" and len(await tasks.story("1")) == 1


async def test_move_allows_listed_transitions_and_writes_story(tasks):
    await put(tasks, task("1"))
    assert not await move(tasks, "1", "completed", "", 2.0)
    assert await move(tasks, "1", "started", "on a", 2.0, attempt=0)
    assert not await move(tasks, "1", "started", "again", 3.0)
    assert not await move(tasks, "1", "completed", "", 3.0, attempt=7)
    assert await move(tasks, "1", "completed", "done " + "x" * 9999, 4.0, outputs=[{"a": 1}])
    for state in ("pending", "started", "failed", "cancelled", "completed"):
        assert not await move(tasks, "1", state, "", 5.0)
    found = await tasks.get("1")
    assert (found.state, found.started_at, found.ended_at, found.outputs) == ("completed", 2.0, 4.0, [{"a": 1}])
    assert [(e.number, e.at, e.state) for e in await tasks.story("1")] == [
        (1, 1.0, "pending"),
        (2, 2.0, "started"),
        (3, 4.0, "completed"),
    ]
    assert not await move(tasks, "nobody", "started", "", 5.0)


async def test_move_concurrent_succeeds_once(tasks):
    await put(tasks, task("1"))
    moved = await asyncio.gather(
        *[move(tasks, "1", "started", f"by {i}", 2.0, only_from=["pending"]) for i in range(8)]
    )
    assert sum(moved) == 1 and len(await tasks.story("1")) == 2


async def test_move_back_to_pending_releases_devices(tasks):
    await put(tasks, task("1", "a"))
    await move(tasks, "1", "started", "", 2.0)
    async with tasks.database.writing() as s:
        await tasks.set_lease(s, Lease("1", "t", 9.0))
    assert [t.id for t in await tasks.started_on("a")] == ["1"] and await tasks.started_on("b") == []
    assert await move(tasks, "1", "pending", "lost a", 3.0, attempt=0, retry_at=5.0)
    async with tasks.database.reading() as s:
        assert await tasks.claims(s) == []
    assert await tasks.lease("1") is None and (await tasks.get("1")).waiting().not_before == 5.0


async def test_move_to_end_keeps_parts_and_releases_claims(tasks):
    await put(tasks, task("1", "a"))
    await move(tasks, "1", "failed", "why", 2.0)
    async with tasks.database.reading() as s:
        assert await tasks.claims(s) == []
    assert (await tasks.get("1")).parts == (PartRecord("a", "n"),)


async def test_leases_are_extended_and_lapse(tasks):
    await put(tasks, task("1"), task("2"))
    async with tasks.database.writing() as s:
        await tasks.set_lease(s, Lease("1", "t", 5.0))
        await tasks.set_lease(s, Lease("2", "u", 50.0))
    assert await tasks.lapsed(6.0) == ["1"]
    await tasks.prolong_all(20.0)
    assert [(await tasks.lease(i)).lease_until for i in "12"] == [20.0, 50.0]
    await tasks.prolong({"1": 30.0, "gone": 30.0})
    await tasks.prolong({"1": 29.0})
    assert await tasks.lease("1") == Lease("1", "t", 30.0) and await tasks.lease("3") is None


async def test_page_applies_filters_and_cursor(tasks):
    await put(
        tasks,
        *[
            task(f"t{i}", created_at=float(i // 2), tenant="xy"[i % 2], priority=i % 3, name=f"run_{i}%")
            for i in range(9)
        ],
        task("job", "a", kind="job", created_at=100.0),
    )
    await move(tasks, "t3", "cancelled", "", 9.0)

    async def ids(limit=99, after=None, **chosen):
        return [t.id for t in await tasks.page(TaskFilter(**chosen), limit, after)]

    assert await ids() == ["job", "t8", "t7", "t6", "t5", "t4", "t3", "t2", "t1", "t0"]
    assert await ids(tenant="y") == ["t7", "t5", "t3", "t1"] and await ids(kind="job") == ["job"]
    assert await ids(states=("cancelled",)) == ["t3"] and await ids(executor_id="a") == ["job"]
    assert await ids(priority=0, tenant="x") == ["t6", "t0"]
    assert await ids(text="7%") == ["t7"] and await ids(text="_") == (await ids())[1:] and await ids(text="%_") == []
    seen, after = [], None
    while page := await tasks.page(TaskFilter(), 3, after):
        seen += [t.id for t in page]
        after = page[-1].created_at, page[-1].id
    assert seen == await ids()
    assert await tasks.counts() == {"pending": 9, "cancelled": 1} and await tasks.counts("y") == {
        "pending": 3,
        "cancelled": 1,
    }


async def test_forget_ended_removes_old_tasks(tasks):
    await put(tasks, task("1", "a"), task("2"), task("3"))
    await move(tasks, "1", "failed", "", 2.0)
    await move(tasks, "2", "failed", "", 8.0)
    assert await tasks.forget_ended(5.0) == 1
    assert [await tasks.get(i) is None for i in "123"] == [True, False, False] and await tasks.story("1") == []


async def test_set_priority_of_ended_task_is_refused(tasks):
    await put(tasks, task("1"))
    assert await tasks.set_priority("1", 4) and (await tasks.get("1")).priority == 4
    await move(tasks, "1", "failed", "", 2.0)
    assert not await tasks.set_priority("1", 0) and not await tasks.set_priority("2", 0)


async def test_deciding_in_several_routers_is_serial(tasks, stored_url):
    """Each transaction reads all claims and adds one if there are fewer than three. There must never be a fourth."""
    others = [tasks, *[TaskStore(Database(stored_url)) for _ in range(3)]]

    async def decide(number):
        store = others[number % 4]
        async with store.database.deciding() as s:
            if len(await store.claims(s)) < 3:
                await asyncio.sleep(0.002)
                await store.add(s, task(f"t{number}", "a"))

    await asyncio.gather(*[decide(i) for i in range(12)])
    async with tasks.database.reading() as s:
        assert len(await tasks.claims(s)) == 3
    for other in others[1:]:
        await other.database.close()


async def test_transaction_when_failed_changes_nothing(tasks):
    with pytest.raises(RuntimeError):
        async with tasks.database.writing() as s:
            await tasks.add(s, task("1"))
            raise RuntimeError
    assert await tasks.get("1") is None


async def test_brought_store_returns_contents_of_last_run(database):
    store = BroughtStore(database)
    assert await store.of("x", "llama", "tenant") == []
    await asyncio.gather(*[store.remember("x", "llama", "tenant", [str(i)], float(i)) for i in range(4)])
    await store.remember("x", "llama", "tenant", ["b", "a"], 5.0)
    await store.remember("y", "llama", "tenant", ["c"], 9.0)
    await store.remember("x", "llama", "shared", ["d"], 9.0)
    assert await store.of("x", "llama", "tenant") == ["b", "a"] and await store.of("x", "opt", "tenant") == []
    await store.forget(6.0)
    assert [await store.of(t, "llama", d) for t, d in (("x", "tenant"), ("y", "tenant"), ("x", "shared"))] == [
        [], ["c"], ["d"],
    ]  # fmt: skip


# -- nodes -----------------------------------------------------------------------------------------------------------


async def test_nodes_after_heartbeat_keep_operator_settings(database):
    store = NodeStore(database)
    gpu = GpuRecord("a-0", "a", {"name": "d", "total_memory": BIG}, 1.0)
    await store.see([gpu, GpuRecord("a-1", "a", {}, 1.0)])
    assert await store.set_overcommit("a", 0) and await store.set_wish("a", "draining")
    assert not await store.set_overcommit("b", 5) and not await store.set_wish("b", "active")
    await store.see([GpuRecord("a-0", "a", {"name": "e"}, 3.0)])
    assert await store.nodes() == {"a": NodeRecord("a", "draining", 0, 1.0)}
    assert [(g.executor_id, g.facts, g.last_seen) for g in await store.gpus()] == [
        ("a-0", {"name": "e"}, 3.0),
        ("a-1", {}, 1.0),
    ]
    assert await store.set_overcommit("a", None) and (await store.nodes())["a"].overcommit_vram_percent is None
    assert await store.forget_gpu("a-1") and "a" in await store.nodes()
    assert await store.forget_gpu("a-0") and await store.nodes() == {} and not await store.forget_gpu("a-0")


async def test_groups_with_unknown_nodes_are_stored(database):
    store = NodeStore(database)
    assert await store.put_group(GroupRecord("g", "fast", 1.0, ("b", "a", "a")))
    assert not await store.put_group(GroupRecord("g", "faster", 2.0, ("b",)))
    await store.put_group(GroupRecord("h", "", 2.0, ("b",)))
    await store.see([GpuRecord("b-0", "b", {}, 5.0)])
    assert await store.groups() == [GroupRecord("g", "faster", 1.0, ("b",)), GroupRecord("h", "", 2.0, ("b",))]
    assert (await store.nodes())["b"].groups == {"g", "h"}
    assert await store.remove_group("g") and not await store.remove_group("g")
    assert (await store.nodes())["b"].groups == {"h"}


async def test_history_returns_samples_of_time_span(database):
    store = NodeStore(database)
    samples = [Sample(float(t), e, "n", 0.5, 0.25, BIG, BIG, t) for t in range(4) for e in "ab"]
    await store.sample(samples)
    await store.sample(samples[:1])
    assert await store.history(1.0, 3.0) == samples[2:6] and await store.history(0.0, 9.0, "b") == samples[1::2]
    await store.forget_samples(2.0)
    assert await store.history(0.0, 9.0) == samples[4:]


async def test_activity_counts_waiting_and_running_tasks_per_step(database):
    store = TaskStore(database)
    spans = {"a": (5, 10, 35), "b": (12, 31, None), "c": (15, None, 25), "d": (2, 3, 4), "e": (41, None, None)}
    for name, (made, began, ended) in spans.items():
        state = "pending" if began is ended is None else "started" if ended is None else "completed"
        tenant = "t" if name < "c" else "u"
        record = task(name, tenant=tenant, created_at=float(made), state=state, started_at=began, ended_at=ended)
        async with database.writing() as s:
            await store.add(s, record)

    def truth(at, names="abcde"):
        mine = [spans[n] for n in names if spans[n][0] < at and (spans[n][2] is None or spans[n][2] >= at)]
        began = [span for span in mine if span[1] is not None and span[1] < at]
        return (float(at), len(mine) - len(began), len(began))

    for since, step in ((0, 10), (20, 10), (8, 1), (0, 50)):
        ends = range(since + step, 51, step)
        assert await store.activity(float(since), 50.0, step) == [truth(t) for t in ends], (since, step)
    assert await store.activity(0.0, 50.0, 10, "t") == [truth(t, "ab") for t in range(10, 51, 10)]
    assert await store.activity(44.0, 50.0, 4) == [truth(48), truth(50)]


async def test_means_return_mean_shares_and_maximum_memory(database):
    store = NodeStore(database)
    await store.sample([Sample(float(t), e, "n", t / 100, 0.5, t, BIG, 1) for t in range(0, 60, 10) for e in "ab"])
    found = await store.means(10.0, 60.0, 30)
    assert [(s.at, s.executor_id) for s in found] == [(0.0, "a"), (0.0, "b"), (30.0, "a"), (30.0, "b")]
    assert [(round(s.utilization, 6), s.memory_used) for s in found[::2]] == [(0.15, 20), (0.4, 50)]
    assert found[0].memory_total == BIG and found[0].node_id == "n"
    assert [s.executor_id for s in await store.means(0.0, 60.0, 60, "b")] == ["b"]
    assert len(await store.means(0.0, 60.0, 30, limit=3)) == 3


async def test_glance_returns_live_and_new_tasks(tasks):
    await put(tasks, task("old", created_at=1.0), task("new", created_at=9.0), task("runs", created_at=1.0, priority=3))
    for name in ("old", "new"):
        assert await move(tasks, name, "failed", "no", 9.5)
    assert await tasks.glance(5.0) == {"new": ("x", "failed", "no", 2), "runs": ("x", "pending", "", 3)}


# -- tenants, config, audit ------------------------------------------------------------------------------------------


async def test_tenant_that_many_add_at_the_same_time_is_added_once(database):
    store = TenantStore(database)
    for name in "abcde":
        added = await asyncio.gather(*(store.add(TenantRecord(name, float(k))) for k in range(4)))
        assert sorted(added) == [False, False, False, True]
    assert [t.name for t in await store.all()] == list("abcde")


async def test_group_that_many_put_at_the_same_time_is_new_once(database):
    store = NodeStore(database)
    for name in "abcde":
        groups = [GroupRecord(name, str(k), float(k), ("n" + name,)) for k in range(4)]
        assert sorted(await asyncio.gather(*map(store.put_group, groups))) == [False, False, False, True]
    assert [g.nodes for g in await store.groups()] == [("n" + name,) for name in "abcde"]


async def test_tenant_whose_tokens_cannot_be_added_is_not_added(database):
    """A router that ends between the two would leave a controller that nobody can enter."""
    store = TenantStore(database)
    token, _ = new_token("x", "first", "admin", 1.0)
    with pytest.raises(OSError, match="no place"):
        await store.add(TenantRecord("x", 1.0), [(token, "secret")], before=refuse)
    assert await store.all() == []
    assert await store.add(TenantRecord("x", 1.0), [(token, "secret")])
    assert await store.by_hash(hash_of("secret")) == (token, TenantRecord("x", 1.0))
    with pytest.raises(IntegrityError):
        await store.add(TenantRecord("y", 1.0), [(new_token("y", "first", "admin", 1.0)[0], "secret")])
    assert [t.name for t in await store.all()] == ["x"]


def refuse():
    raise OSError("no place")


async def test_first_token_of_routers_that_start_together_is_made_once(database, tmp_path):
    world = World(database, ClusterConfig())
    folders = [tmp_path / str(k) for k in range(4)]
    for folder in folders:
        folder.mkdir()
    given = [RouterSettings(state_dir=folder, auth="tokens") for folder in folders]
    await asyncio.gather(*(first_token(settings, world, 1.0) for settings in given))
    (written,) = [f / "admin.token" for f in folders if (f / "admin.token").exists()]
    found, tenant = await world.tenants.by_hash(hash_of(written.read_text()))
    assert (found.role, tenant.name) == ("admin", "admin") and await world.tenants.tokens("admin") == [found]


async def test_first_token_whose_file_cannot_be_written_is_made_at_the_next_start(database, tmp_path):
    world, settings = World(database, ClusterConfig()), RouterSettings(state_dir=tmp_path, auth="tokens")
    place = tmp_path / "admin.token"
    place.mkdir()
    with pytest.raises(IsADirectoryError):
        await first_token(settings, world, 1.0)
    place.rmdir()
    await first_token(settings, world, 2.0)
    assert (await world.tenants.by_hash(hash_of(place.read_text())))[0].created_at == 2.0


async def test_token_is_found_by_hash_and_secret_is_not_stored(database, stored_url):
    store = TenantStore(database)
    assert await store.add(TenantRecord("x", 1.0)) and not await store.add(TenantRecord("x", 2.0))
    token, secret = new_token("x", "ci", "user", 1.0, ("tasks:read",), expires_at=9.0)
    await store.add_token(token, secret)
    assert await store.by_hash(hash_of(secret)) == (token, TenantRecord("x", 1.0))
    assert await store.by_hash(hash_of("no")) is None
    engine = engine_of(stored_url)
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM tokens")).one()
    engine.dispose()
    assert secret not in json.dumps([str(v) for v in row]) and hash_of(secret) in row
    assert token.valid(8.9) and not token.valid(9.0)
    assert not await store.revoke("y", token.id, 5.0) and await store.revoke("x", token.id, 5.0)
    assert not await store.revoke("x", token.id, 6.0) and not (await store.tokens("x"))[0].valid(5.0)
    assert await store.change("y", TenantChange(disabled=True)) is None
    await store.change("x", TenantChange(description="d", disabled=True, weight_ceiling=5))
    changed = await store.put("x", 2.0, TenantChange(class_ceiling=0, exclusive=False))
    assert changed == await store.get("x") and [t.name for t in await store.all()] == ["x"]
    assert (changed.description, changed.disabled, changed.created_at) == ("d", True, 1.0)
    assert (changed.class_ceiling, changed.weight_ceiling, changed.exclusive) == (0, 5, False)
    assert (await store.put("y", 2.0, TenantChange(exclusive=True))).created_at == 2.0 and (
        await store.get("y")
    ).exclusive


async def test_bring_down_changes_only_live_tasks_of_the_tenant(database):
    store = TaskStore(database)
    spec = {"weight": 90}
    for name, tenant in (("mine", "x"), ("over", "x"), ("yours", "y")):
        async with database.writing() as s:
            await store.add(s, task(name, kind="job", tenant=tenant, priority=0, spec=spec))
    async with database.writing() as s:
        await store.move(s, "over", "cancelled", "", 2.0)
    await store.bring_down("x", 3, 7, exclusive=False)
    found = {name: await store.get(name) for name in ("mine", "over", "yours")}
    assert {n: (t.priority, t.spec["weight"]) for n, t in found.items()} == {
        "mine": (3, 7),
        "over": (0, 90),
        "yours": (0, 90),
    }


async def test_config_write_is_atomic_and_stores_null(database):
    store = ConfigStore(database)
    assert await store.read() == {}
    await store.write({"a": 1, "b": None}, 1.0, "me")
    await store.write({"a": [2]}, 2.0, "me")
    assert await store.read() == {"a": [2], "b": None}
    with pytest.raises((StatementError, TypeError)):
        await store.write({"a": 3, "c": object()}, 3.0, "me")
    assert await store.read() == {"a": [2], "b": None}


async def test_audit_page_is_newest_first(database):
    log = AuditLog(database)
    for i in range(5):
        await log.add(AuditRecord(float(i), "me", "xy"[i % 2], "config.put", f"t{i}", {"i": i}))
    first = await log.page(2)
    assert [r.target for r in first] == ["t4", "t3"] and first[0].detail == {"i": 4}
    assert [r.target for r in await log.page(9, before=first[-1].id, tenant="x")] == ["t2", "t0"]
