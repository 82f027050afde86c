"""The table of sessions: migrations make what the models say; rows survive."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from wooly_router.core.placement import Claim
from wooly_router.settings import RouterSettings
from wooly_router.store import Base, PartRecord, SessionRecord, SessionStore, migrate


def record(name="s", executor="a", **changes):
    values = {
        "id": name,
        "parts": tuple(PartRecord(e, "n") for e in executor.split()),
        "token": "t",
        "tenant": "x",
        "priority": 2,
        "gpu_mode": "shared",
        "required_vram": None,
        "program": "",
        "client_host": "h",
        "opened_at": 1.0,
        "lease_until": 10.0,
    }
    return SessionRecord(**values | changes)


@pytest.fixture
def url(tmp_path):
    directory = tmp_path / "with space and 100%"
    directory.mkdir()
    url = RouterSettings(state_dir=directory).database()
    migrate(url)
    return url


def test_migrations_make_exactly_the_models(url):
    engine = create_engine(url.replace("+aiosqlite", ""))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_migration_keeps_sessions_of_before(tmp_path):
    url = RouterSettings(state_dir=tmp_path).database()
    migrate(url, "0001")
    engine = create_engine(url.replace("+aiosqlite", ""))
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO sessions VALUES ('s', 'a', 'n', 't', 'x', 2, 'shared', NULL, '', 'h', 1.0, 10.0)")
        )
    migrate(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM session_parts")).all() == [("s", 0, "a", "n")]
        assert connection.execute(text("SELECT id, token FROM sessions")).all() == [("s", "t")]
    engine.dispose()


def test_migrating_twice_changes_nothing(url):
    migrate(url)


async def test_rows_survive_a_new_store(url):
    rows = [
        record("1", opened_at=2.0, required_vram=(1 << 63) - 1, gpu_mode="exclusive"),
        record("2", "c b", opened_at=1.0, lease_until=5.0, program="ü" * 1024),
    ]
    store = SessionStore(url)
    for row in rows:
        await store.add(row)
    await store.close()
    store = SessionStore(url)
    assert await store.all() == rows[::-1]
    assert await store.on_executor("a") == rows[:1] and await store.on_executor("b") == rows[1:]
    assert await store.get("1") == rows[0] and await store.get("3") is None
    assert rows[0].claims() == [Claim("a", (1 << 63) - 1, True)] and len(rows[1].claims()) == 2
    await store.close()


async def test_leases_move_and_lapse(url):
    store = SessionStore(url)
    for row in (record("1", lease_until=5.0), record("2", lease_until=50.0)):
        await store.add(row)
    assert [r.id for r in await store.lapsed(6.0)] == ["1"]
    await store.prolong_all(20.0)
    assert [r.lease_until for r in await store.all()] == [20.0, 50.0]
    await store.prolong("1", 30.0)
    await store.prolong("gone", 30.0)
    assert (await store.get("1")).lease_until == 30.0
    assert await store.remove("1") and not await store.remove("1")
    assert await store.on_executor("a") == [record("2", lease_until=50.0)]
    assert [r.id for r in await store.all()] == ["2"]
    await store.close()
