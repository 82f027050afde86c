"""Tests of the control plane while the device's thread is busy for several lease lengths: renewals need no device."""

import asyncio
import contextlib
import threading

import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.channel.tunnel import TunnelListener
from wooly_bus.errors import RefusedError
from wooly_executor import control
from wooly_executor.control import ExecutorActor
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.settings import ExecutorSettings
from wooly_wis.messages import (
    CloseSessionRequest,
    HostSessionRequest,
    RenewSessionRequest,
    SteerSessionRequest,
)

pytestmark = pytest.mark.connected
LEASE_S = 1.0
#: Number of lease lengths for which the device is held.
HELD = 2


class Bench:
    """An executor's control plane in this process, reached over NATS."""

    def __init__(self, app, loop, actor):
        self.app, self.loop, self.actor = app, loop, actor
        self.heartbeats, self.closed = [], []
        self._back, self._away = threading.Event(), threading.Event()

    def hold(self):
        """Block the device's thread, as a long operator would, until `release`."""
        self._back.clear()
        self.loop.call(lambda: (self._away.set(), self._back.wait()))
        assert self._away.wait(30)

    def release(self):
        self._back.set()

    def begin(self, rpc, request, timeout=30.0):
        return asyncio.create_task(self.app.request(rpc.at("x"), request, timeout=timeout))

    def open(self, session_id, token="t", timeout=30.0, lease_s=LEASE_S):
        request = HostSessionRequest(session_id=session_id, token=token, tenant="a", priority=2, lease_s=lease_s)
        return self.begin(contracts.EXECUTOR_SESSION_OPEN, request, timeout)

    def renew(self, session_id, token="t", timeout=30.0):
        request = RenewSessionRequest(session_id=session_id, token=token)
        return self.begin(contracts.EXECUTOR_SESSION_RENEW, request, timeout)

    def close(self, session_id):
        return self.begin(contracts.EXECUTOR_SESSION_CLOSE, CloseSessionRequest(session_id=session_id))

    def steer(self, session_id, **wish):
        request = SteerSessionRequest(session_id=session_id, **wish)
        return self.begin(contracts.EXECUTOR_SESSION_STEER, request)

    def sessions(self):
        return {s.id for s in self.loop.call(self.loop.sessions.all).result(30)}

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench(nats_server):
    settings = ExecutorSettings(id="x", nats_url=nats_server, heartbeat_s=0.1)
    loop = DeviceLoop(TorchCpuRuntime(), 1 << 30)
    thread = threading.Thread(target=loop.run)
    thread.start()
    app = ServiceApp("executor", nats_server)
    tunnels = TunnelListener(nats_server, lambda sock, peer: None)
    bench = Bench(app, loop, ExecutorActor(settings, app, loop, [], tunnels))

    async def beat(heartbeat):
        bench.heartbeats.append(heartbeat)

    async def ended(event):
        bench.closed.append((event.session_id, event.reason))

    app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, beat)
    app.listen(contracts.EXECUTOR_SESSION_CLOSED, ended)
    try:
        async with app.running():
            works = [asyncio.create_task(work()) for work in bench.actor.works().values()]
            try:
                yield bench
            finally:
                bench.release()
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)
    finally:
        loop.stop()
        thread.join(30)


async def test_lease_renewal_is_answered_while_the_device_is_busy(bench):
    await asyncio.gather(bench.open("p0"), bench.open("other"))
    bench.hold()
    waiting = [
        bench.open("new"),
        bench.open("new"),  # the router repeats its request
        bench.steer("p0", priority=0),
        bench.close("other"),
    ]
    clock = asyncio.get_running_loop().time
    until, longest = clock() + HELD * LEASE_S, 0.0
    while clock() < until:
        asked = clock()
        assert (await bench.renew("p0")).lease_s == LEASE_S
        longest = max(longest, clock() - asked)
        await asyncio.sleep(LEASE_S / 5)
    assert longest < LEASE_S
    assert [w.done() for w in waiting] == [
        False,
        False,
        False,
        True,
    ]  # a close is answered at once and carried out as soon as possible
    assert "p0" in bench.heartbeats[-1].sessions and "other" not in bench.heartbeats[-1].sessions
    bench.release()
    first, second, steered, closed = await asyncio.gather(*waiting)
    assert first == second and steered.policy.priority == 0 and closed.closed
    assert bench.sessions() == {"p0", "new"}
    assert ("p0", "the session's lease lapsed") not in bench.closed


async def test_session_is_refused_if_its_client_could_not_connect_for_lack_of_descriptors(bench, monkeypatch):
    """The router uses another executor then. A session that is open there already stays."""
    known = await bench.open("known", lease_s=60.0)
    monkeypatch.setattr(control, "free_descriptors", lambda: ExecutorSettings(id="x").spare_descriptors + 1)
    with pytest.raises(RefusedError, match=r"no free file descriptor for a client .* raise its limit with `ulimit -n`"):
        await bench.open("new")
    assert await bench.open("known", lease_s=60.0) == known and bench.sessions() == {"known"}


async def test_heartbeat_while_the_device_is_busy_lists_all_open_sessions(bench):
    await bench.until(lambda: bench.heartbeats)
    bench.loop.call(lambda: None).result(30)
    await bench.open("p0", lease_s=60.0)
    bench.hold()
    seen = len(bench.heartbeats)
    await bench.until(lambda: len(bench.heartbeats) > seen + 1)
    assert all("p0" in h.sessions for h in bench.heartbeats[seen + 1 :])


async def test_lease_expired_while_the_device_is_busy_closes_all_sessions_at_once(bench):
    await asyncio.gather(bench.open("a"), bench.open("b"))
    bench.hold()
    await bench.until(lambda: not bench.actor._leases)
    for session_id in "ab":
        with pytest.raises(RefusedError, match="not open here"):
            await bench.renew(session_id)
    bench.release()
    await bench.until(lambda: not bench.sessions())


async def test_lease_of_an_abandoned_open_expires(bench):
    bench.hold()
    gone = bench.open("gone", timeout=0.2)
    await asyncio.wait((gone,))
    assert gone.exception() is not None
    bench.release()
    await bench.until(lambda: ("gone", "the session's lease lapsed") in bench.closed)
    assert not bench.sessions()


async def test_session_closed_while_it_is_being_opened_is_not_open_afterwards(bench):
    bench.hold()
    opening = bench.open("brief")
    await bench.until(lambda: bench.actor._leases)
    assert (await bench.close("brief")).closed
    again = bench.open("brief", token="u")  # another session may use the id at once
    await asyncio.sleep(0.1)
    bench.release()
    with pytest.raises(RefusedError, match="closed while it was being opened") as caught:
        await opening
    assert caught.value.code == "executor.closed"
    await again
    assert bench.sessions() == {"brief"}
    assert (await bench.renew("brief", token="u")).lease_s == LEASE_S
    with pytest.raises(RefusedError):
        await bench.renew("brief", token="t")
    assert bench.closed == []  # no open session was reported as closed


async def test_session_being_opened_refuses_another_token(bench):
    bench.hold()
    opening = bench.open("mine")
    await bench.until(lambda: bench.actor._leases)
    with pytest.raises(RefusedError) as caught:
        await bench.open("mine", token="u", timeout=5.0)
    assert caught.value.code == "executor.admission"
    bench.release()
    await opening


async def test_call_with_a_cancelled_caller_is_carried_out(bench):
    """A tenant that cancels a job while the device is busy cancels a wait for the device's thread."""
    done = []
    bench.hold()
    waiting = asyncio.create_task(_wait_for(bench.loop.call(lambda: done.append(1))))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    bench.release()
    assert bench.loop.call(lambda: "alive").result(30) == "alive"
    assert done == [1]


async def _wait_for(future):
    await asyncio.wrap_future(future)
