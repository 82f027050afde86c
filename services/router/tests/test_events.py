"""Events: which client receives which event, and the fate of slow, refused and last followers."""

import asyncio
import contextlib
import json

import httpx
import pytest
from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets
from wooly_router.gate import ROLES, Caller
from wooly_router.rest import events
from wooly_router.rest.access import Access
from wooly_router.rest.api import create_api
from wooly_router.rest.events import Hub
from wooly_router.state.nodes import GroupRecord

pytestmark = pytest.mark.connected


def caller(tenant=None, role="admin", may=None):
    return Caller("test", tenant, tenant or "ops", ROLES[role] if may is None else frozenset(may))


@contextlib.asynccontextmanager
async def following(rig, *callers):
    """Followers of a hub that has polled once."""
    hub = Hub(rig.actor, every_s=0.02)
    followers = [hub.join(c) for c in callers]
    await asyncio.sleep(0)
    begun = hub.join(caller())
    while begun.queue.qsize() < 2:  # metrics come before and after the first poll
        await asyncio.sleep(0.01)
    hub.leave(begun)
    try:
        yield followers
    finally:
        for follower in followers:
            hub.leave(follower)


async def hear(follower, name):
    """The data of the next event with that name."""
    async with asyncio.timeout(10):
        while True:
            event, _, data = (await follower.queue.get()).partition("\n")
            if event == f"event: {name}":
                return json.loads(data.removeprefix("data: "))


def names(follower):
    """The names of the waiting events."""
    return {follower.queue.get_nowait().partition("\n")[0][7:] for _ in range(follower.queue.qsize())}


async def test_events_name_the_changes(rig):
    async with rig("a") as r, following(r, caller()) as (me,):
        figures = await hear(me, "metrics")
        assert [g["executor_id"] for g in figures["gpus"]] == ["a"] and figures["at"] == r.clock.now
        opened = await r.open()
        assert {c["task_id"] for c in (await hear(me, "tasks"))["changed"]} == {opened.session_id}
        await r.actor.world.tasks.set_priority(opened.session_id, 0)
        assert (await hear(me, "tasks"))["changed"] == [{"task_id": opened.session_id, "state": "started"}]
        r.clock.now += 60  # so that the task is not new when it ends
        await r.beat()
        seen = 0
        while seen < 3:
            seen += (await hear(me, "metrics"))["at"] == r.clock.now
        await r.actor.end(await r.tasks.get(opened.session_id), "completed", "")
        while (await hear(me, "tasks"))["changed"][-1]["state"] is not None:
            continue
        await r.duties().keep_nodes()
        assert (await hear(me, "nodes"))["changed"] == ["host"]
        await r.actor.world.nodes.put_group(GroupRecord("g", "", 0.0))
        assert await hear(me, "groups") == {}
        await r.actor.world.config.write({"job_attempts": 2}, 0.0, "me")
        assert await hear(me, "config") == {}
        r.clock.now += 60
        assert (await hear(me, "nodes"))["changed"] == ["host"]  # lost


async def test_events_for_tenant_have_own_tasks_and_respect_scopes(rig):
    async with rig("a") as r:
        callers = caller("mine", "user"), caller("yours", "user"), caller(may=["metrics:read"]), caller()
        async with following(r, *callers) as (mine, yours, figures, everybody):
            opened = await r.open(tenant="mine")
            assert (await hear(everybody, "tasks"))["changed"][0]["task_id"] == opened.session_id
            assert (await hear(mine, "tasks"))["changed"][0]["task_id"] == opened.session_id
            await r.actor.world.config.write({"job_attempts": 2}, 0.0, "me")
            await hear(everybody, "config")
            assert names(yours) == set() and names(figures) == {"metrics"}


async def test_follower_that_is_too_slow_gets_resync(rig):
    async with rig("a") as r:
        hub = Hub(r.actor)
        slow = hub.join(caller())
        for i in range(events.MAX_QUEUED_EVENTS + 1):
            slow.tell("tasks", {"changed": [i]})
        assert slow.queue.qsize() == 1 and names(slow) == {"resync"}
        hub.leave(slow)


async def test_streams_of_tenant_are_limited_and_leave_room_for_others(rig, settings):
    settings.tenant_streams, settings.streams = 3, 8
    async with rig("a") as r:
        hub = Hub(r.actor)
        bobs = [hub.join(caller("bob", "user")) for _ in range(3)]
        with pytest.raises(
            RefusedError, match=r"bob has 3 event streams .* the limit is 3 \(WOOLY_ROUTER_TENANT_STREAMS\)"
        ):
            hub.join(caller("bob", "user"))
        others = [hub.join(caller(name, "user")) for name in ("alice", "carol", "alice", "carol")]
        with pytest.raises(RefusedError, match=r"all tenants together .* 7 times") as full:
            hub.join(caller("dave", "user"))
        assert full.value.code == "router.limit" and full.value.retry_s > 0
        operator = hub.join(caller())
        with pytest.raises(RefusedError, match="all callers together"):
            hub.join(caller())
        hub.leave(bobs[0])
        hub.join(caller("dave", "user"))
        for follower in (*bobs, *others, operator):
            hub.leave(follower)
        hub.close()
        for follower in list(hub._followers):
            hub.leave(follower)


async def test_hub_without_followers_does_not_poll(rig):
    async with rig("a") as r:
        hub = Hub(r.actor, every_s=0.01)
        first, second = hub.join(caller()), hub.join(caller())
        watching = hub._watching
        hub.leave(first)
        assert not watching.cancelled() and hub._watching is watching
        hub.leave(second)
        await asyncio.wait([watching])
        assert watching.cancelled()
        again = hub.join(caller())
        await hear(again, "metrics")
        hub.close()
        while (item := await asyncio.wait_for(again.queue.get(), 10)) is not None:
            assert item.startswith("event: ")
        hub.leave(again)


async def test_stream_requires_token_and_ends_with_token(rig, monkeypatch):
    """Calls the application directly: httpx's transport would wait for the end of the stream."""
    from wooly_bus.web import Buckets
    from wooly_router.rest.access import Access
    from wooly_router.rest.api import create_api
    from wooly_router.state.tenants import TenantRecord, new_token

    monkeypatch.setattr(events, "RECHECK_S", 0.05)
    async with rig("a", auth="tokens") as r:
        api = create_api(r.actor, r.desk, Access(r.actor.gate, Buckets(1000.0, 1000.0)), r.traces)
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(base_url="http://127.0.0.1/api/v1", transport=transport) as http:
            assert (await http.get("events")).status_code == 401
            await r.actor.world.tenants.add(TenantRecord("t", 0.0))
            token, secret = new_token("t", "", "admin", r.clock.now)
            await r.actor.world.tenants.add_token(token, secret)
            reading = asyncio.create_task(http.get("events", headers={"Authorization": f"Bearer {secret}"}))
            while not api.state.hub._followers:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert not reading.done()
            await r.actor.world.tenants.revoke("t", token.id, r.clock.now)
            answer = await asyncio.wait_for(reading, 10)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text.startswith("retry: 2000") and "event: metrics" in answer.text
            assert not api.state.hub._followers


async def test_stream_with_client_gone_before_start_is_released(rig):
    async with rig("a") as r:
        api = create_api(r.actor, r.desk, Access(r.actor.gate, Buckets(100.0, 100.0)), r.traces)
        came = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            return came.pop() if came else {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(0)

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "path": "/api/v1/events", "raw_path": b"/api/v1/events", "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        await asyncio.wait_for(api(scope, receive, send), 10)
        assert not api.state.hub._followers
