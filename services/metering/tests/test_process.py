"""`python -m wooly_metering` as a process: exactly one entry per event even after kills; budgets, REST, events, `/metrics`."""

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import httpx
import pytest
from nats.js.errors import Error as JetStreamError
from prometheus_client.parser import text_string_to_metric_families
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import Event
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_metering.core.budgets import Budget
from wooly_metering.enforcement import Enforcer
from wooly_metering.ledger.database import Database
from wooly_metering.ledger.reader import Reader
from wooly_metering.ledger.writer import BookedRun, Writer
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.credits import (
    AddPlanRequest,
    CheckBudgetRequest,
    CorrectEntryRequest,
    CreditsReply,
    CreditsRequest,
    EntriesRequest,
    MakeStatementRequest,
    PricePlan,
    QuarantineRequest,
    SetBudgetRequest,
    StatementMade,
    UsageQuarantined,
)
from wooly_wis.messages import CheckTokenReply, SessionPolicy, SteerSessionReply

from .conftest import NOW, event, free_port, record, until

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
#: The tests of the ledger use both databases in the quick suite, too.
QUICK_ON_SQLITE = pytest.mark.parametrize(
    "url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


def now():
    return int(time.time() * 1e6)


@pytest.fixture
def nats():
    """A NATS server for one test, because the stream is shared by all clients."""
    with start_nats_server() as url:
        yield url


class Nats:
    """A nats-server that can be killed, and restarted with its streams on the same port."""

    def __init__(self, directory):
        port = free_port()
        self.url = f"nats://127.0.0.1:{port}"
        binary = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        self._argv = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()


@contextlib.asynccontextmanager
async def connected(url):
    app = ServiceApp("executor", url)
    async with app.running():
        await until(lambda: streamed(app))
        yield app


async def streamed(app):
    with contextlib.suppress(StreamError):
        await ensure_stream(app.jetstream(), contracts.EXECUTOR_USAGE_RECORDED)
        return True


async def say(app, what, id=None):
    """Publish as an executor does, until the stream has stored the message."""
    event = contracts.EXECUTOR_USAGE_RECORDED.at("gpu-0")
    if isinstance(what, bytes):
        event = Event(event.subject, bytes)
    id = id or f"{what.source}:{what.batch}"
    while True:
        try:
            return await publish(app.jetstream(), event, what, id=id)
        except StreamError:
            await asyncio.sleep(0.1)
            with contextlib.suppress(StreamError):
                await streamed(app)


async def ask(app, rpc, message, timeout=10):
    return await app.request(rpc, message, timeout=timeout)


async def shown(app, **which):
    """Metering's reply, as soon as it has rows."""
    with contextlib.suppress(BusError):
        return await ask(app, contracts.METERING_CREDITS_SHOW, CreditsRequest(**which))


def held(url):
    database = Database(url)
    try:
        return Reader(database).entries(EntriesRequest(limit=1000))[0]
    finally:
        database.close()


@QUICK_ON_SQLITE
@pytest.mark.parametrize("seed", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8)]])
async def test_metering_and_nats_killed_book_one_entry_per_event(tmp_path, url, start_metering, seed):
    """Metering and NATS are killed at random moments while events arrive, some of them twice. The ledger has each event once."""
    chance = random.Random(seed)
    nats = Nats(tmp_path / "js")
    metering = start_metering(nats.url, url)
    try:
        async with connected(nats.url) as app:
            for batch in range(1, 121):
                await say(app, event(*[record(f"s{n}", at_us=now(), core_ns=batch) for n in range(3)], batch=batch))
                if chance.random() < 0.15:  # delivered again after NATS forgot the message id, as after two minutes
                    again = event(*[record(f"s{n}", at_us=now(), core_ns=batch) for n in range(3)], batch=batch)
                    await say(app, again, id=f"again {batch}")
                if batch % 24 == 12:
                    await asyncio.sleep(chance.random() * 1.5)
                    metering.kill()
                    metering.wait()
                    metering = start_metering(nats.url, url)
                if batch % 60 == 50:
                    nats.kill()
                    await asyncio.sleep(0.2)
                    nats.start()
            expected = 3 * sum(range(1, 121))
            await until(lambda: booked(app, expected))
            entries = held(url)
            assert sorted((e.core_ns, e.session_id) for e in entries) == sorted(
                (b, f"s{n}") for b in range(1, 121) for n in range(3)
            )
            assert sum(e.core_ucr for e in entries) == expected
            reply = await shown(app)
            assert reply.quarantined == 0 and sum(r.core_ucr for r in reply.rows) == expected
    finally:
        nats.kill()


async def booked(app, core_ucr):
    reply = await shown(app)
    return reply is not None and reply.core_ucr >= core_ucr


@QUICK_ON_SQLITE
async def test_replaced_stream_is_read_from_its_start(url, start_metering, nats):
    start_metering(nats, url)
    async with connected(nats) as app:
        for batch in range(1, 6):
            await say(app, event(record(at_us=now()), batch=batch))
        await until(lambda: booked(app, 5 * 400_000_000))
        await app.jetstream().delete_stream(contracts.EXECUTOR_USAGE_RECORDED.stream_name)
        await say(app, event(record(at_us=now()), batch=5))
        await say(app, event(record(at_us=now()), batch=6))
        await until(lambda: booked(app, 6 * 400_000_000))
        assert len(held(url)) == 6


async def test_booked_messages_are_removed_from_the_stream(url, start_metering, nats, monkeypatch):
    from wooly_metering import follower
    from wooly_metering.ledger.database import migrate
    from wooly_metering.ledger.writer import Writer

    migrate(url)
    database = Database(url)
    monkeypatch.setattr(follower, "STREAM_CHECK_S", 0.1)
    monkeypatch.setattr(follower, "PURGE_INTERVAL_S", 0.1)
    done = []

    async def on_booked(what):
        done.append(what)

    async with connected(nats) as app:
        reading = asyncio.create_task(follower.Follower(app.jetstream(), Writer(database), 2, on_booked).run())
        for batch in range(1, 8):
            await say(app, event(record(at_us=now()), batch=batch))

        async def empty():
            with contextlib.suppress(JetStreamError):
                return (
                    await app.jetstream().stream_info(contracts.EXECUTOR_USAGE_RECORDED.stream_name)
                ).state.messages == 0

        await until(empty)
        assert sum(d.entries for d in done) == 7 and all(d.entries <= 2 for d in done)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    database.close()


@QUICK_ON_SQLITE
async def test_metering_serves_requests_rest_events_and_metrics(url, start_metering, nats, tmp_path):
    metering = start_metering(nats, url)
    heard = []
    app = ServiceApp("executor", nats)

    async def hear(message):
        heard.append(message)

    app.listen(contracts.METERING_USAGE_QUARANTINED, hear)
    app.listen(contracts.METERING_STATEMENT_MADE, hear)
    async with app.running():
        await until(lambda: streamed(app))
        await say(app, event(record("a", at_us=now()), record("b", at_us=now(), core_ns=-1)))
        await say(app, b"nonsense", id="x")
        await say(app, event(record("a", at_us=now(), ended=True), batch=2))
        reply = await until(lambda: shown(app, session_id="a", settled=True))
        await until(lambda: booked(app, 800_000_000))
        reply = await shown(app, session_id="a", settled=True)
        assert (reply.rows[0].core_ucr, reply.rows[0].ended, reply.quarantined) == (800_000_000, True, 2)
        found = await ask(app, contracts.METERING_QUARANTINE_LIST, QuarantineRequest())
        assert len(found.found) == 2

        plan = AddPlanRequest(plan=PricePlan(name="night", core_rate=1))
        assert (await ask(app, contracts.METERING_PLAN_ADD, plan)).id == 1
        with pytest.raises(RefusedError, match="add a plan with another name"):
            await ask(app, contracts.METERING_PLAN_ADD, plan)
        wrong = CorrectEntryRequest(request_id="r1", entry=1, core_ucr=100_000_000, reason="late")
        for _ in range(2):
            made = await ask(app, contracts.METERING_ENTRY_CORRECT, wrong)
            assert (made.id, made.corrects, made.core_ucr) == (3, 1, -100_000_000)
        statement = await ask(app, contracts.METERING_STATEMENT_MAKE, MakeStatementRequest(tenant="acme"))
        assert statement.core_ucr == 700_000_000
        await until(lambda: len(heard) == 3)
        assert {type(m) for m in heard} == {UsageQuarantined, StatementMade}

        port = (tmp_path / "metering" / "metering.port").read_text()
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as http:
            nobody = await http.get("/api/v1/credits")  # no router is there to check the token
            assert (nobody.status_code, nobody.json()["code"]) == (503, "metering.no_router")
        everything = CheckTokenReply(actor="open:nats", tenant=None, may=("credits:read", "credits:write"), auth="open")
        asking = httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}")
        async with router(nats, {"": everything}), asking as http:
            got = (await http.get("/api/v1/credits", params={"by": "model"})).json()
            assert got["core_ucr"] == 700_000_000 and got["rows"][0]["name"] == "llama"
            assert CreditsReply.model_validate((await http.get("/api/v1/credits/runs/a")).json()).rows[0].name == "a"
            assert (await http.get("/api/v1/credits/statements/acme")).json()["statements"] == [
                json.loads(statement.model_dump_json())
            ]
            assert (await http.post("/api/v1/credits/statements/acme")).json()["number"] == 1
            refused = await http.post("/api/v1/credits/statements/nobody")
            assert refused.status_code == 404 and "has no booked usage" in refused.json()["message"]
            assert (await http.post("/api/v1/credits/plans", json={"name": "night"})).status_code == 409
            assert (await http.get("/api/v1/credits/plans")).json()["plans"][0]["name"] == "night"
            assert len((await http.get("/api/v1/credits/entries", params={"after": 1})).json()["entries"]) == 2
            assert len((await http.get("/api/v1/credits/quarantine")).json()["found"]) == 2
            budget = await http.put("/api/v1/credits/budgets/acme", json={"tenant": "acme", "soft_ucr": 5})
            assert budget.json()["spent_ucr"] > 700_000_000
            answer = await http.get("/metrics")
        samples = {
            (s.name, *sorted(s.labels.items())): s.value
            for family in text_string_to_metric_families(answer.text)
            for s in family.samples
        }
        assert samples["wooly_tenant_core_credits", ("tenant", "acme")] == 700.0
        assert samples["wooly_tenant_programs_total", ("tenant", "acme")] == 20.0
        assert samples["wooly_metering_quarantined_total",] == 2.0
    metering.send_signal(signal.SIGTERM)
    assert metering.wait(15) == 0


@contextlib.asynccontextmanager
async def router(nats, tokens):
    """Checks tokens as a router does; `tokens` (by secret) may change. Yields the number of checks."""
    asked = []

    async def on_check_token(request):
        asked.append(request.secret_hash)
        for secret, reply in tokens.items():
            if request.secret_hash == (hashlib.sha256(secret.encode()).hexdigest() if secret else ""):
                return reply
        raise RefusedError("router.unauthorized", "a valid token is needed")

    app = ServiceApp("router", nats)
    app.serve(contracts.ROUTER_TOKEN_CHECK, on_check_token)
    async with app.running():
        yield asked


async def test_rest_admits_the_routers_callers_and_tenants_see_their_own_credits(tmp_path, nats, start_metering):
    def token(tenant, *may, **more):
        return CheckTokenReply(actor="token:1", tenant=tenant, may=may, auth="tokens", **more)

    metering = start_metering(nats, f"sqlite:///{tmp_path}/credits.db")
    tokens = {
        "admin": token(None, "credits:read", "credits:write"),
        "reader": token(None, "credits:read"),
        "acme": token("acme", "credits:read"),
        "other": token("acme", "tasks:read"),
        "ended": token(None, "credits:read", until=time.time() - 1),
    }
    async with connected(nats) as app, router(nats, tokens) as asked:
        other = record("b", at_us=now(), tenant="umbrella")
        await say(app, event(record("a", at_us=now()), other, batch=1))
        await until(lambda: shown(app))
        await until(lambda: booked(app, 800_000_000))
        port = (tmp_path / "metering" / "metering.port").read_text()
        http = httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}/api/v1")

        async def get(path, secret="", method="GET", **more):
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            answer = await http.request(method, f"credits{path}", headers=headers | more.pop("headers", {}), **more)
            if answer.status_code >= 400:
                assert set(answer.json()) == {"code", "message", "retryable"}, answer.text
            return answer

        async def code(*args, **more):
            answer = await get(*args, **more)
            return answer.status_code, answer.json().get("code")

        unauthorized, forbidden = (401, "router.unauthorized"), (403, "router.forbidden")
        for secret in ("", "guess", "ended"):
            assert await code("", secret) == unauthorized
        assert (await get("", "guess")).headers["WWW-Authenticate"] == "Bearer"
        everybody = (await get("", "admin")).json()
        assert {r["tenant"] for r in everybody["rows"]} == {"acme", "umbrella"}
        for path in ("", "?tenant=acme", "/runs/a"):
            assert {r["tenant"] for r in (await get(path, "acme")).json()["rows"]} == {"acme"}
        assert (await get("/runs/b", "acme")).json()["rows"] == []
        assert {e["tenant"] for e in (await get("/entries", "acme")).json()["entries"]} == {"acme"}
        assert (await get("/entries?session_id=b", "acme")).json()["entries"] == []
        budget = {"tenant": "acme", "hard_ucr": 1}
        for path, secret, method, body in (
            ("?tenant=umbrella", "acme", "GET", None),
            ("/entries?tenant=umbrella", "acme", "GET", None),
            ("/statements/umbrella", "acme", "GET", None),
            ("/quarantine", "acme", "GET", None),
            ("", "other", "GET", None),
            ("/budgets/acme", "acme", "PUT", budget),
            ("/budgets/acme", "reader", "PUT", budget),
            ("/statements/acme", "reader", "POST", None),
            ("/plans", "reader", "POST", {"name": "free"}),
            ("/corrections", "reader", "POST", {"request_id": "r", "entry": 1, "core_ucr": 1, "reason": "x"}),
        ):
            assert await code(path, secret, method, json=body) == forbidden, path
        assert await code("", "admin", headers={"Origin": "http://elsewhere.example"}) == forbidden
        assert await code("?limit=0", "admin") == (422, "http.invalid")
        assert await code("/nothing", "admin") == (404, "http.404")
        assert (await get("/budgets/acme", "admin", "PUT", json=budget)).json()["held"] is True
        assert (await get("/quarantine", "reader")).json()["found"] == []
        before = len(asked)
        for _ in range(5):
            await get("", "admin")
        assert len(asked) - before <= 1
        del tokens["admin"]  # the token is revoked

        async def shut():
            return await code("", "admin") == unauthorized

        await until(shut, 15)
        host = f"http://127.0.0.1:{port}"
        for path in ("/metrics", "/healthz"):  # open for scrapers
            assert (await http.get(host + path)).status_code == 200
        await http.aclose()
    metering.send_signal(signal.SIGTERM)
    assert metering.wait(15) == 0


class FakeExecutor:
    """Accepts holds, or refuses to answer."""

    def __init__(self, app):
        self.holds, self.silent = {}, False
        app.serve(contracts.EXECUTOR_SESSION_STEER.at("gpu-0"), self.on_steer)

    async def on_steer(self, request):
        if self.silent:
            return None
        self.holds[request.session_id] = request.hold
        return SteerSessionReply(policy=SessionPolicy(), suspended=bool(request.hold), exclusive=False)


@QUICK_ON_SQLITE
async def test_budget_holds_a_tenants_sessions_until_it_is_raised(url, start_metering, nats):
    metering = start_metering(nats, url)
    app = ServiceApp("executor", nats)
    executor, heard = FakeExecutor(app), []

    async def hear(message):
        heard.append((message.limit, message.budget.spent_ucr))

    app.listen(contracts.METERING_BUDGET_REACHED, hear)
    async with app.running():
        await until(lambda: streamed(app))
        await until(lambda: shown(app))
        limits = SetBudgetRequest(tenant="acme", soft_ucr=400_000_000, hard_ucr=900_000_000)
        state = await ask(app, contracts.METERING_BUDGET_SET, limits)
        assert (state.spent_ucr, state.held) == (0, False)
        await say(app, event(record("a", at_us=now()), record("other", tenant="bits", at_us=now())))
        await until(lambda: heard == [("soft", 440_000_000)])
        assert not executor.holds
        await say(app, event(record("a", at_us=now()), record("b", at_us=now()), batch=2))
        await until(lambda: set(executor.holds) == {"a", "b"})
        assert "1320.000000 of 900.000000" in executor.holds["a"] and "wooly credits budget acme" in executor.holds["b"]
        assert heard[-1] == ("hard", 1_320_000_000)
        check = await ask(app, contracts.METERING_BUDGET_CHECK, CheckBudgetRequest(tenant="acme"))
        assert "1320.000000 of 900.000000" in check.refusal and "wooly credits budget acme --hard" in check.refusal
        for tenant in ("bits", "nobody"):
            free = await ask(app, contracts.METERING_BUDGET_CHECK, CheckBudgetRequest(tenant=tenant))
            assert free.refusal == ""
        # A session that opens later is held at its first usage. After a restart, all sessions are held again.
        await say(app, event(record("c", at_us=now()), batch=3))
        await until(lambda: executor.holds.get("c"))
        metering.kill()
        metering.wait()
        executor.holds.clear()
        start_metering(nats, url)
        await until(lambda: set(executor.holds) == {"a", "b", "c"} and all(executor.holds.values()))
        raised = SetBudgetRequest(tenant="acme", hard_ucr=9_000_000_000)
        assert not (await ask(app, contracts.METERING_BUDGET_SET, raised)).held
        await until(lambda: set(executor.holds.values()) == {""})


class OneBudget:
    """A ledger with one budget, which is spent."""

    limit = 1

    def open_runs(self):
        return []

    def budgets(self):
        return [Budget("acme", hard_ucr=self.limit)]

    def spent(self, budget, now_us):
        return 5


async def test_session_that_came_back_to_its_executor_is_resumed_although_its_end_there_was_booked_late():
    told, ledger = [], OneBudget()

    class App:
        async def publish(self, *_):
            pass

        async def request(self, rpc, request, timeout):
            told.append(bool(request.hold))

    enforcer = Enforcer(App(), ledger)
    enforcer.note_runs((BookedRun("a", "gpu-0", "acme", 2, False),))
    await enforcer.begin(NOW)
    enforcer.note_runs((BookedRun("a", "gpu-0", "acme", 1, True),))
    ledger.limit = 9
    await enforcer.look(None, NOW)
    assert told == [True, False]


@QUICK_ON_SQLITE
async def test_session_that_was_held_is_resumed_if_its_budget_allows_it_when_metering_starts_again(
    url, start_metering, nats
):
    """A day may begin while metering is away. The next process does not know what the last one held."""
    metering = start_metering(nats, url)
    app = ServiceApp("executor", nats)
    executor = FakeExecutor(app)
    async with app.running():
        await until(lambda: streamed(app))
        await until(lambda: shown(app))
        await ask(app, contracts.METERING_BUDGET_SET, SetBudgetRequest(tenant="acme", hard_ucr=1))
        await say(app, event(record("a", at_us=now())))
        await until(lambda: executor.holds.get("a"))
        metering.kill()
        metering.wait()
        database = Database(url)
        Writer(database).set_budget(Budget("acme", hard_ucr=9_000_000_000))
        database.close()
        start_metering(nats, url)
        await until(lambda: executor.holds == {"a": ""})
