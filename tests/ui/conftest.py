"""A router with fake devices, and a browser that opens its pages."""

import asyncio
import contextlib
import os
import re
import shutil
import threading
import time

import httpx
import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.credits import (
    BudgetState,
    CreditsReply,
    CreditsRow,
    PlansReply,
    PricePlan,
)
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionReply,
    DeviceFacts,
    ExecutorHeartbeat,
    GpuSession,
    GpusReply,
    GpuState,
    HostSessionReply,
    MemoryState,
    OpenSessionRequest,
    SessionMemory,
    SessionPolicy,
)
from wooly_wis.traces import SpansRecorded

GIB = 1 << 30
OWNER = "wooly_" + "o" * 43
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
#: Every drawn row: name, service, depth, left and right edge of its bar (as shares of the width), duration.
ROWS = """() => [...document.querySelectorAll(".waterfall button.span")].map((row) => {
  const bar = row.querySelector(".bar").style;
  const left = parseFloat(bar.left);
  return {
    name: row.querySelector(".text").textContent,
    service: row.querySelector(".name .hint").textContent.trim(),
    depth: Math.round(parseFloat(row.querySelector(".name").style.paddingLeft) / 14),
    left,
    right: left + parseFloat(bar.width.replace("max(2px, ", "")),
    took: row.querySelector(".took").textContent,
    title: row.title,
  };
})"""


class Device:
    """A fake executor that accepts sessions and reports the values that a test sets."""

    def __init__(self, app, name, node):
        self.app, self.name, self.node = app, name, node
        self.sessions, self.utilization = {}, 0.5
        app.serve(contracts.EXECUTOR_SESSION_OPEN.at(name), self.on_open)
        app.serve(contracts.EXECUTOR_SESSION_CLOSE.at(name), self.on_close)

    async def on_open(self, request):
        self.sessions[request.session_id] = request
        return HostSessionReply(endpoints=(f"unix:///tmp/{self.name}.sock",))

    async def on_close(self, request):
        return CloseSessionReply(closed=self.sessions.pop(request.session_id, None) is not None)

    def heartbeat(self):
        held = tuple(
            SessionMemory(session_id=s, tenant=r.tenant, own=4 * GIB, shared=GIB, host=GIB)
            for s, r in sorted(self.sessions.items())
        )
        own, contents, capacity = sum(s.own for s in held), sum(s.shared for s in held), 80 * GIB
        memory = MemoryState(
            capacity=capacity,
            own=own,
            contents=contents,
            reserve=2 * GIB,
            free=capacity - own - contents - 2 * GIB,
            host=sum(s.host for s in held),
            sessions=held,
        )
        return ExecutorHeartbeat(
            executor_id=self.name,
            node=self.node,
            pid=1,
            device=DeviceFacts(name="H100 <b>", vendor="nvidia", runtime="cuda", total_memory=capacity, cores=132),
            endpoints=(),
            sessions=tuple(self.sessions),
            memory_used=own + contents,
            utilization=self.utilization,
            memory=memory,
        )


class Cluster:
    """Fake devices, scheduler and metering on a real NATS, in a thread of their own; and a real router."""

    def __init__(self, nats, directory, **env):
        self.nats, self.directory, self._env = nats, directory, env
        self.budgets = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._routers = []

    def __enter__(self):
        self._thread.start()
        self.call(self._start())
        self.url = self.router("router", **self._env)
        return self

    def __exit__(self, *_):
        for process in self._routers:
            process.kill()
            process.wait()
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self):
        self._app = ServiceApp("fake", self.nats)
        self.devices = [Device(self._app, f"gpu-{i}", f"node-{i}") for i in "ab"]
        self._app.serve(contracts.SCHEDULER_GPU_LIST, self._gpus)
        self._app.serve(contracts.METERING_CREDITS_SHOW, self._credits)
        self._app.serve(contracts.METERING_PLAN_LIST, self._plans)
        self._app.serve(contracts.METERING_BUDGET_SET, self._budget)
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self._app.running())
        self._beating = asyncio.create_task(self._beat())

    async def _stop(self):
        self._beating.cancel()
        await asyncio.wait([self._beating])
        await self._stack.aclose()

    async def _beat(self):
        while True:
            for device in self.devices:
                await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, device.heartbeat())
            await asyncio.sleep(0.25)

    async def _gpus(self, request):
        gpus = [
            GpuState(
                executor_id=d.name,
                journal="j",
                entries=9,
                starvation_permille=250,
                utilization_permille=round(1000 * d.utilization),
                sessions=tuple(
                    [
                        GpuSession(session_id=s, tenant=r.tenant, policy=SessionPolicy(), share_permille=200)
                        for s, r in sorted(d.sessions.items())
                    ]
                ),
            )
            for d in self.devices
        ]
        return GpusReply(gpus=tuple(g for g in gpus if g.executor_id > request.after))

    async def _credits(self, request):
        row = CreditsRow(tenant="acme", name="<i>run</i>", model="llama", runs=7, core_ucr=1_500_000, vram_ucr=250_000)
        shown = not request.tenant or request.tenant == row.tenant
        return CreditsReply(
            core_ucr=1_500_000, vram_ucr=250_000, rows=(row,) * shown, budgets=tuple(self.budgets.values())
        )

    async def _plans(self, request):
        return PlansReply(plans=(PricePlan(id=1, name="standard"),))

    async def _budget(self, request):
        values = request.model_dump(include={"tenant", "period", "soft_ucr", "hard_ucr"})
        self.budgets[request.tenant] = BudgetState(**values, spent_ucr=1_750_000)
        return self.budgets[request.tenant]

    def router(self, name, **env):
        """Start another router with its own state folder; returns its URL as soon as it knows the devices."""
        directory = self.directory / name
        known = {
            "WOOLY_ROUTER_NATS_URL": self.nats,
            "WOOLY_ROUTER_STATE_DIR": str(directory),
            "WOOLY_ROUTER_HTTP_PORT": "0",
            "WOOLY_ROUTER_LEASE_S": "3600",
        }
        process = Forked("wooly_router", env=os.environ | known | env)
        self._routers.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, httpx.HTTPError):
                url = f"http://127.0.0.1:{(directory / 'router.port').read_text()}"
                if httpx.get(f"{url}/healthz", trust_env=False).json()["executors"] == 2:
                    return url
            time.sleep(0.05)
        raise AssertionError("the router did not come up")

    def record(self, service, *spans):
        """Publish spans like this service."""
        message = SpansRecorded(service=service, spans=spans)
        self.call(self._app.publish(contracts.SERVICE_SPAN_RECORDED.at(service), message))

    def open(self, program, **wanted):
        """Open a session; returns its id."""
        request = OpenSessionRequest(client=ClientFacts(host="laptop", pid=1, program=program), **wanted)
        reply = self._app.request(contracts.ROUTER_SESSION_OPEN, request, timeout=10)
        return self.call(reply).session_id

    def rest(self, method, path, **more):
        answer = httpx.request(method, f"{self.url}/api/v1/{path}", trust_env=False, **more)
        answer.raise_for_status()
        return answer.json() if answer.content else None


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; the test is skipped without one."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("Chromium is not installed; on Debian: make browser")
    with sync.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=binary, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A router without required tokens that keeps traces, and two nodes with a device each."""
    with start_nats_server() as nats, Cluster(nats, tmp_path_factory.mktemp("ui"), WOOLY_TRACES="router") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A router with required tokens, one of them the owner's, and without traces."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "owner.token").write_text(OWNER)
    keys = {"WOOLY_ROUTER_AUTH": "tokens", "WOOLY_ROUTER_OWNER_TOKEN": str(directory / "owner.token")}
    with start_nats_server() as nats, Cluster(nats, directory, **keys) as running:
        yield running


VIEWPORT = {"width": 1280, "height": 900}
#: Maximum time for which a test waits for the page, in ms. On a loaded machine, opening a page alone may take 15 s.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def shared_page(browser):
    """One page for the first visit of most tests: a new browser context takes more than a second of CPU time."""
    context = browser.new_context(viewport=VIEWPORT)
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


def make_as_new(page):
    """Leave no trace of a test: its storage, cookies, routes and media settings."""
    page.unroute_all()
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    page.context.clear_cookies()
    page.emulate_media(color_scheme="null")
    page.set_viewport_size(VIEWPORT)


@pytest.fixture
def visit(browser, cluster, shared_page):
    """`visit("#/tasks")` opens a page. Errors that the browser reports fail the test.

    The first visit without options uses the shared page, each other a context of its own.
    """
    complaints = []
    with contextlib.ExitStack() as stack:
        free = [shared_page]

        def page_with(options):
            if free and not options:
                page = free.pop()
                stack.callback(make_as_new, page)
                return page
            context = browser.new_context(viewport=VIEWPORT, **options)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            return context.new_page()

        def make(where="", *, url=None, expected=(), **options):
            def on_error(error):
                complaints.append(str(error))

            def on_console(message):
                if message.type in ("error", "warning") and not any(e in message.text for e in expected):
                    complaints.append(f"{message.text} {message.location.get('url')}")

            page = page_with(options)
            for event, listener in (("pageerror", on_error), ("console", on_console)):
                page.on(event, listener)
                stack.callback(page.remove_listener, event, listener)
            page.goto(f"{url or cluster.url}/ui/{where}")
            return page

        yield make
    assert not complaints


class Waterfall:
    """Compares the page of a trace with the trace's spans."""

    def rows(self, page):
        """Every row of the page as it is drawn: see `ROWS`."""
        return page.evaluate(ROWS)

    def expected(self, spans):
        """(span, depth): each span is followed by its children, in the order of start times."""
        known = {s["span_id"] for s in spans}

        def nested(parent, depth):
            for s in sorted(spans, key=lambda s: (s["start_ns"], s["span_id"])):
                above = s["parent_id"] if s["parent_id"] in known else None
                if above == parent:
                    yield s, depth
                    yield from nested(s["span_id"], depth + 1)

        return list(nested(None, 0))

    def assert_is(self, rows, spans):
        """Check that the rows show these spans: nested, in order, with bars at their times."""
        expected = self.expected(spans)
        told = [(s["name"], s["service"], depth) for s, depth in expected]
        assert [(r["name"], r["service"], r["depth"]) for r in rows] == told
        begin, end = min(s["start_ns"] for s in spans), max(s["end_ns"] for s in spans)
        for row, (span, _) in zip(rows, expected, strict=True):
            assert abs(row["left"] - 100 * (span["start_ns"] - begin) / (end - begin)) < 0.02
            assert abs(row["right"] - 100 * (span["end_ns"] - begin) / (end - begin)) < 0.03
            took = span["end_ns"] - span["start_ns"]
            number, unit = re.fullmatch(r"([\d.]+) (ns|µs|ms|s)", row["took"]).groups()
            scale = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
            assert abs(float(number) * scale - took) <= 0.06 * took + 1
            assert row["title"].startswith(f"{span['name']} of {span['service']}: {row['took']}, begins after")


@pytest.fixture
def waterfall():
    """Compares the page of a trace with the trace's spans."""
    return Waterfall()
