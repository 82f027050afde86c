"""Tenants steer their own sessions within their ceilings, which the router knows."""

import contextlib
from types import SimpleNamespace

import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_dispatch.events import Policy
from wooly_scheduler import actor as scheduler_actor
from wooly_scheduler.actor import SchedulerActor
from wooly_scheduler.core.admission import Demand, Verdict
from wooly_scheduler.settings import SchedulerSettings
from wooly_wis.messages import (
    CheckCeilingReply,
    SessionPolicy,
    SteerSessionReply,
    SteerSessionRequest,
)

pytestmark = pytest.mark.connected


class Cluster:
    """A scheduler that knows one session of bob, the session's executor, and a router that knows bob's ceilings."""

    def __init__(self, app, router_answers):
        self.steered, self.asked = [], []
        self.scheduler = SchedulerActor(SchedulerSettings(), app)
        self.scheduler._read_all = True
        gpu = SimpleNamespace(executor_id="gpu-0", caught_up=True, has=lambda name: name == "s")
        gpu.demand = lambda name: Demand("s", "bob", Policy()) if name == "s" else None
        gpu.judge = lambda candidate: Verdict()
        self.scheduler.gpus["gpu-0"] = gpu
        app.serve(contracts.EXECUTOR_SESSION_STEER.at("gpu-0"), self.on_steer)
        if router_answers:
            app.serve(contracts.ROUTER_CEILING_CHECK, self.on_check)

    async def on_steer(self, request):
        self.steered.append(request)
        return SteerSessionReply(policy=SessionPolicy(), suspended=bool(request.suspended), exclusive=False)

    async def on_check(self, request):
        self.asked.append(request)
        above = (request.priority or 4) < 2 or (request.priority == 0) or (request.weight or 1) > 100
        return CheckCeilingReply(refusal=f"tenant {request.tenant} may not" if above else "")

    async def steer(self, **changes):
        return await self.scheduler.on_steer_of(SteerSessionRequest(session_id="s", **changes), "bob")


@pytest.fixture
def cluster(nats):
    @contextlib.asynccontextmanager
    async def make(router_answers=True):
        app = ServiceApp("scheduler", nats)
        found = Cluster(app, router_answers)
        async with app.running():
            yield found

    return make


@pytest.mark.parametrize(
    "wanted", [{"priority": 0}, {"priority": 1}, {"weight": 1 << 20}, {"priority": 2, "weight": 101}]
)
async def test_steering_above_a_ceiling_is_refused_and_nothing_is_changed(cluster, wanted):
    async with cluster() as c:
        with pytest.raises(RefusedError, match="tenant bob may not") as error:
            await c.steer(**wanted)
        assert error.value.code == "scheduler.above_ceiling" and not c.steered
        assert [(a.tenant, a.priority, a.weight) for a in c.asked] == [
            ("bob", wanted.get("priority"), wanted.get("weight"))
        ]


async def test_steering_within_the_ceilings_reaches_the_executor(cluster):
    async with cluster() as c:
        await c.steer(priority=3, weight=100)
        assert [(s.priority, s.weight) for s in c.steered] == [(3, 100)]


async def test_steering_without_a_router_refuses_a_class_but_suspends(cluster, monkeypatch):
    monkeypatch.setattr(scheduler_actor, "ROUTER_TIMEOUT_S", 0.2)
    async with cluster(router_answers=False) as c:
        with pytest.raises(RefusedError, match="no router states") as error:
            await c.steer(priority=3)
        assert error.value.retryable and not c.steered
        assert (await c.steer(suspended=True)).suspended
