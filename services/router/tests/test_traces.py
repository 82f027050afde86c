"""Traces of the router: owners, limits, removal, and who may read and add spans."""

import httpx
import pytest
from opentelemetry import trace
from wooly_bus.errors import RefusedError
from wooly_bus.tracing import SpanQueue, provider_of
from wooly_bus.web import Buckets
from wooly_router.rest.access import Access
from wooly_router.rest.api import create_api
from wooly_router.state import traces as state_traces
from wooly_router.state.database import Database
from wooly_router.state.tasks import TaskRecord
from wooly_router.state.tenants import TenantRecord, new_token
from wooly_router.state.traces import TraceStore
from wooly_router.traces import TraceActor, trace_of
from wooly_wis.traces import AddSpansRequest, SpanRecord, SpansRecorded, TraceRequest, TracesRequest

A, B = "a" * 32, "b" * 32


def span(number=1, trace_id=A, start=10, end=20, **more):
    return SpanRecord(
        trace_id=trace_id, span_id=f"{number:016x}", name="router.place", start_ns=start, end_ns=end, **more
    )


@pytest.fixture
async def store(stored_url):
    database = Database(stored_url, durable=False)
    found = TraceStore(database)
    found.keeps = True
    yield found
    await database.close()


async def ids(store, trace_id=A, tenant=None):
    return [int(s.span_id, 16) for s in await store.spans(trace_id, tenant) or ()]


async def test_store_keeps_spans_of_task_traces_only(store):
    assert await store.bind(A, "t1", "x", "train.py", 1.0)
    assert await store.add(
        [("router", span(2, start=30, end=45)), ("client", span(1, error=True)), ("router", span(3, B))]
    ) == (1, 0)
    assert await store.add(
        [("router", span(2)), ("executor", span(4, parent_id=f"{1:016x}", attributes={"n": 3}))]
    ) == (0, 0)
    assert await ids(store) == [1, 4, 2] and await store.spans(B, None) is None
    (info,) = await store.recent(None, 9)
    assert (info.trace_id, info.task_id, info.name) == (A, "t1", "train.py")
    assert (info.start_ns, info.duration_ns, info.spans, info.error) == (10, 35, 3, True)
    assert (await store.spans(A, None))[1].attributes == {"n": 3}


async def test_trace_belongs_to_tenant_of_first_task(store):
    assert await store.bind(A, "t1", "x", "", 1.0) and await store.bind(A, "t2", "x", "", 2.0)
    assert not await store.bind(A, "t3", "y", "", 3.0)
    assert [await store.of_task(t, None) for t in ("t1", "t2", "t3")] == [A, A, None]
    assert await store.of_task("t1", "y") is None and await store.of_task("t1", "x") == A
    await store.add(
        [
            ("router", span(1)),
            ("router", span(2, attributes={"tenant": "y"})),
            ("router", span(3, attributes={"tenant": "x"})),
        ]
    )
    assert await ids(store, tenant="x") == [1, 3] and await store.spans(A, "y") is None
    assert await store.recent("y", 9) == [] and len(await store.recent("x", 9)) == 1


async def test_trace_beyond_its_limit_drops_spans(store, monkeypatch):
    monkeypatch.setattr(state_traces, "MAX_TRACE_SPANS", 5)
    await store.bind(A, "t", "x", "", 1.0)
    assert await store.add([("router", span(i)) for i in range(1, 4)]) == (0, 0)
    assert await store.add([("router", span(i)) for i in range(2, 9)]) == (0, 3)
    assert await ids(store) == [1, 2, 3, 4, 5]


async def test_forget_removes_old_and_surplus_traces(store):
    for i in range(1, 8):
        await store.bind(f"{i:032x}", f"t{i}", "x", "", float(i))
        await store.add([("router", span(1, f"{i:032x}"))])
    assert await store.forget(3.0, 100) == 2 and await store.forget(3.0, 100) == 0
    assert await store.forget(0.0, 3) == 2
    assert [t.task_id for t in await store.recent(None, 9)] == ["t7", "t6", "t5"]
    assert await store.of_task("t1", None) is None and await store.spans(f"{1:032x}", None) is None
    assert await store.forget(0.0, 0) == 3 and await store.recent(None, 9) == []


# -- where traces begin ----------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    queue = SpanQueue(1000)
    provider = provider_of("router", queue, None)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield queue
    provider.shutdown()


def task(name="t1", tenant="x"):
    return TaskRecord(id=name, kind="session", tenant=tenant, created_at=5.0, name="train.py")


async def test_trace_of_task_with_client_trace_continues_it(store, recorded):
    with trace.get_tracer("t").start_as_current_span("asking") as asking:
        async with trace_of(store, task()) as parent:
            assert trace.get_current_span() is asking
    assert parent.split("-")[1] == await store.of_task("t1", "x") and len(recorded) == 1


async def test_trace_of_task_without_client_trace_is_new(store, recorded):
    async with trace_of(store, task()) as parent:
        pass
    (root,) = recorded.take()
    assert root.name == "router.session" and root.parent_id is None and root.trace_id == await store.of_task("t1", "x")
    assert parent == f"00-{root.trace_id}-{root.span_id}-01"


async def test_trace_of_task_with_trace_of_other_tenant_is_new(store, recorded):
    with trace.get_tracer("t").start_as_current_span("asking") as asking:
        async with trace_of(store, task("t1", "x")) as mine:
            pass
        async with trace_of(store, task("t2", "y")) as theirs:
            pass
    assert mine.split("-")[1] != theirs.split("-")[1] == await store.of_task("t2", "y")
    spans = recorded.take()
    assert asking.attributes == {"tenant": "y"}
    await store.add([("router", s) for s in spans])
    assert await store.recent("x", 9) == [] and [t.task_id for t in await store.recent("y", 9)] == ["t2"]


async def test_trace_of_task_with_unsampled_trace_is_not_recorded(store, recorded):
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=True))
    with trace.use_span(unsampled):
        async with trace_of(store, task()) as parent:
            assert parent == ""
    assert not len(recorded) and await store.of_task("t1", None) is None


# -- who may add and read --------------------------------------------------------------------------------------------


@pytest.mark.connected
async def test_spans_from_services_and_own_tenant_are_accepted(rig):
    async with rig(auth="tokens") as r:
        tenants, traces = r.actor.world.tenants, r.traces
        secrets = {}
        for name in "xy":
            await tenants.add(TenantRecord(name, 1.0))
            token, secrets[name] = new_token(name, "t", "user", 1.0)
            await tenants.add_token(token, secrets[name])
        await traces.store.bind(A, "t1", "x", "", 1.0)
        ask = AddSpansRequest(task_id="t1", credential=secrets["x"], spans=(span(1), span(2, B)))
        assert (await traces.on_add_spans(ask)).taken == 1
        for credential in ("", "wooly_no"):
            with pytest.raises(RefusedError, match="token"):
                await traces.on_add_spans(ask.model_copy(update={"credential": credential}))
        with pytest.raises(RefusedError, match="no trace"):
            await traces.on_add_spans(ask.model_copy(update={"credential": secrets["y"]}))
        await traces.on_spans(SpansRecorded(service="executor", dropped=4, spans=(span(3), span(4, B))))
        await traces.write()
        assert await ids(traces.store) == [1, 3] and traces.kept == 2
        assert traces.dropped == {("client", "unknown"): 1, ("executor", "sender"): 4, ("router", "unknown"): 1}
        for name, there in (("x", True), ("y", False)):
            found = await traces._read_traces(TracesRequest(credential=secrets[name]))
            assert bool(found.traces) is there
            for which in ({"trace_id": A}, {"task_id": "t1"}):
                try:
                    reply = await traces._read_trace(TraceRequest(credential=secrets[name], **which))
                    assert there and len(reply.spans) == 2
                except RefusedError as e:
                    assert not there and e.code == "router.no_trace"


@pytest.mark.connected
async def test_spans_beyond_queue_limit_are_dropped(rig, monkeypatch):
    monkeypatch.setattr("wooly_router.traces.QUEUE_SPANS", 10)
    async with rig() as r:
        await r.traces.on_spans(SpansRecorded(service="executor", spans=tuple([span(i) for i in range(1, 26)])))
        assert len(r.traces._waiting) == 10 and r.traces.dropped == {("executor", "queue"): 15}


@pytest.mark.connected
async def test_spans_of_flooding_tenant_displace_no_other_spans(rig, monkeypatch):
    monkeypatch.setattr("wooly_router.traces.QUEUE_SPANS", 16)
    async with rig(auth="tokens") as r:
        tenants, asks = r.actor.world.tenants, {}
        for name, trace_id in (("bob", A), ("dave", B), ("alice", "c" * 32)):
            await tenants.add(TenantRecord(name, 1.0))
            token, secret = new_token(name, "t", "user", 1.0)
            await tenants.add_token(token, secret)
            await r.traces.store.bind(trace_id, name, name, "", 1.0)
            spans = tuple([span(i, trace_id) for i in range(1, 11)])
            asks[name] = AddSpansRequest(task_id=name, credential=secret, spans=spans)
        for name in ("bob", "bob", "dave", "dave", "alice"):
            await r.traces.on_add_spans(asks[name])
        await r.traces.on_spans(SpansRecorded(service="executor", spans=tuple([span(i) for i in range(20, 28)])))
        await r.traces.write()
        kept = {name: len(await ids(r.traces.store, a.spans[0].trace_id)) for name, a in asks.items()}
        assert kept == {"bob": 4 + 8, "dave": 4, "alice": 0}, "all spans of bob and of the executor"
        assert (await r.traces.on_add_spans(asks["alice"])).taken == 4


@pytest.mark.connected
async def test_trace_with_many_spans_is_read_in_pages(rig, monkeypatch):
    async with rig() as r:
        await r.traces.store.bind(A, "t", "x", "", 1.0)
        await r.traces.store.add([("executor", span(i, start=i, end=i)) for i in range(1, 300)])
        first = await r.traces.on_trace(TraceRequest(task_id="t"))
        rest = await r.traces.on_trace(TraceRequest(task_id="t", offset=len(first.spans)))
        assert first.more and not rest.more
        assert [int(s.span_id, 16) for s in (*first.spans, *rest.spans)] == list(range(1, 300))


@pytest.mark.connected
async def test_rest_shows_traces_to_own_tenant_only(rig):
    async with rig(auth="tokens") as r:
        tenants, http = r.actor.world.tenants, {}
        api = create_api(r.actor, r.desk, Access(r.actor.gate, Buckets(1000, 1000)), r.traces)
        for name, role in (("x", "user"), ("y", "user"), ("z", "operator")):
            await tenants.add(TenantRecord(name, 1.0))
            token, secret = new_token(name, "t", role, 1.0)
            await tenants.add_token(token, secret)
            headers = {"Authorization": f"Bearer {secret}"}
            http[name] = httpx.AsyncClient(
                base_url="http://127.0.0.1", transport=httpx.ASGITransport(api), headers=headers
            )
        await r.traces.store.bind(A, "t1", "x", "train.py", 1.0)
        await r.traces.on_spans(SpansRecorded(service="executor", spans=(span(1, attributes={"n": 1}),)))
        await r.traces.write()
        for name in "xz":
            listed = (await http[name].get("/api/v1/traces?limit=5")).json()
            assert listed == {
                "traces": [
                    {
                        "trace_id": A,
                        "name": "train.py",
                        "task_id": "t1",
                        "start_ns": 10,
                        "duration_ns": 10,
                        "spans": 1,
                        "error": False,
                    }
                ]
            }
            for path in (f"traces/{A}", "tasks/t1/trace"):
                assert (await http[name].get(f"/api/v1/{path}")).json() == {
                    "trace_id": A,
                    "spans": [
                        {
                            "span_id": f"{1:016x}", "parent_id": None, "name": "router.place", "service": "executor",
                            "start_ns": 10, "end_ns": 20, "error": False, "attributes": {"n": 1},
                        }
                    ],
                }  # fmt: skip
        assert (await http["y"].get("/api/v1/traces")).json() == {"traces": []}
        for name, path in (
            ("y", f"traces/{A}"),
            ("y", "tasks/t1/trace"),
            ("x", f"traces/{B}"),
            ("x", "traces/no"),
            ("x", "tasks/t9/trace"),
        ):
            answer = await http[name].get(f"/api/v1/{path}")
            assert answer.status_code == 404 and answer.json()["code"] == "router.no_trace"
        assert (await http["x"].get("/api/v1/traces?limit=0")).status_code == 422
        metrics = (await http["x"].get("/metrics")).text
        assert "wooly_spans_kept_total 1.0" in metrics
        for client in http.values():
            await client.aclose()


@pytest.mark.connected
async def test_spans_without_database_are_dropped_and_counted(rig):
    async with rig() as r:
        actor: TraceActor = r.traces
        await actor.on_spans(SpansRecorded(service="executor", spans=(span(1),)))
        real = actor.store
        away = Database("sqlite+aiosqlite:////no/such/folder/x.sqlite")
        actor.store = TraceStore(away)
        await actor.write()
        actor.store = real
        await away.close()
        assert actor.dropped == {("router", "database"): 1} and actor.kept == 0
