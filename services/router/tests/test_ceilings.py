"""Ceilings of tenants: the rule, and every path on which a session or job gets a class, a weight or an exclusive device."""

import contextlib

import pytest
from wooly_bus import contracts
from wooly_bus.errors import RefusedError
from wooly_router.core.ceilings import RESTRICTED, UNLIMITED, Ceilings, Grant, Refusal, Wish, grant, overridden
from wooly_router.gate import Caller
from wooly_router.settings import RouterSettings
from wooly_router.state.tasks import TaskRecord
from wooly_router.state.tenants import TenantChange, TenantRecord, new_token
from wooly_wis.messages import (
    CheckCeilingRequest,
    PrioritizeTaskRequest,
    SetTenantRequest,
    SubmitJob,
    TenantsRequest,
)

HEX = "0" * 64


# -- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ceilings", "wish", "found"),
    [
        (RESTRICTED, Wish(), Grant(2, 1)),
        (RESTRICTED, Wish(4, 100), Grant(4, 100)),
        (RESTRICTED, Wish(2, exclusive=False), Grant(2, 1)),
        (UNLIMITED, Wish(0, 1 << 20, True), Grant(0, 1 << 20)),
        (
            Ceilings(4, 1, False),
            Wish(),
            Grant(4, 1),
        ),  # a request without a class gets the highest class that the ceiling allows
        (Ceilings(0, 1, False), Wish(), Grant(2, 1)),
    ],
)
def test_grant_within_ceilings_is_unchanged(ceilings, wish, found):
    assert grant("bob", ceilings, wish) == found


@pytest.mark.parametrize(
    ("ceilings", "wish", "words"),
    [
        (RESTRICTED, Wish(0), ["class P2 or a lower one", "P0 was requested", "--class-ceiling 0"]),
        (Ceilings(4, 1, True), Wish(2), ["may use class P4,", "--class-ceiling 2"]),
        (RESTRICTED, Wish(4, 101), ["at most 100", "101", "--weight-ceiling 101"]),
        (RESTRICTED, Wish(exclusive=True), ["use a device exclusively", "--exclusive"]),
    ],
)
def test_grant_above_ceiling_is_refused_with_remedy(ceilings, wish, words):
    found = grant("bob", ceilings, wish)
    assert isinstance(found, Refusal) and all(w in found.message for w in [*words, "wooly tenants set bob"])


def test_wish_with_default_class_has_no_class():
    assert Wish.of_start(2, 5, "shared") == Wish(None, 5, False)
    assert Wish.of_start(1, 1, "exclusive") == Wish(1, 1, True)


def test_overridden_prefers_own_values_even_zero_or_false():
    assert overridden(RESTRICTED, None, None, None) == RESTRICTED
    assert overridden(RESTRICTED, 0, None, True) == Ceilings(0, 100, True)
    assert overridden(UNLIMITED, None, 7, False) == Ceilings(0, 7, False)


def test_default_ceilings_with_required_tokens_are_modest(tmp_path):
    assert RouterSettings(state_dir=tmp_path, auth="tokens").ceilings() == RESTRICTED
    assert RouterSettings(state_dir=tmp_path).ceilings() == UNLIMITED
    given = {"default_class_ceiling": 1, "default_weight_ceiling": 9, "default_exclusive": True}
    assert RouterSettings(state_dir=tmp_path, auth="tokens", **given).ceilings() == Ceilings(1, 9, True)


# -- the ways --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(words):
    with pytest.raises(RefusedError, match=words) as error:
        yield
    assert error.value.code == "router.above_ceiling" and not error.value.retryable


async def tenant(r, name, role="user", **ceilings):
    """Create a tenant. Returns the secret of its token."""
    await r.actor.world.tenants.add(TenantRecord(name, 0.0, **ceilings))
    token, secret = new_token(name, "t", role, r.clock())
    await r.actor.world.tenants.add_token(token, secret)
    return secret


ABOVE = [
    ({"priority": 0}, "P0 was requested"),
    ({"priority": 1}, "P1 was requested"),
    ({"weight": 1 << 20}, "1048576 was requested"),
    ({"gpu_mode": "exclusive"}, "exclusively"),
]


@pytest.mark.parametrize(("wanted", "words"), ABOVE)
async def test_open_above_ceiling_is_refused_on_every_path(rig, wanted, words):
    async with rig("a", auth="tokens") as r:
        bob = await tenant(r, "bob")
        with refused(words):
            await r.open(credential=bob, **wanted)
        with refused(words):
            await r.actor.on_open_tenants(r.ask(**wanted), "bob")
        assert not await r.sessions() and not r.executors[0].sessions
        await r.actor.world.tenants.change("bob", TenantChange(class_ceiling=0, weight_ceiling=1 << 20, exclusive=True))
        await r.open(credential=bob, **wanted)
        (hosted,) = r.executors[0].sessions.values()
        assert hosted.priority == wanted.get("priority", 2)


async def test_open_without_class_respects_class_ceiling(rig):
    async with rig("a", auth="tokens") as r:
        low = await tenant(r, "low", class_ceiling=4)
        opened = await r.open(credential=low)
        hosted = r.executors[0].sessions[opened.session_id]
        assert (hosted.priority, hosted.policy.priority) == (4, 4) and (
            await r.tasks.get(opened.session_id)
        ).priority == 4


async def test_ceilings_bind_operators_but_not_administrators(rig):
    async with rig("a", auth="tokens") as r:
        await tenant(r, "bob")
        admin, operator = [await tenant(r, f"{role}s", role) for role in ("admin", "operator")]
        opened = await r.open(credential=admin, tenant="bob", priority=0, weight=1 << 20)
        assert (await r.tasks.get(opened.session_id)).tenant == "bob"
        with refused("tenant operators may use"):
            await r.open(credential=operator, priority=0)
        with pytest.raises(RefusedError, match="cannot act for tenant"):
            await r.open(credential=operator, tenant="bob")


async def test_ceilings_without_required_tokens_bind_named_tenants(rig):
    async with rig("a") as r:
        await tenant(r, "batch", class_ceiling=3)
        with refused("class P3"):
            await r.open(tenant="batch", priority=0)
        await r.open(tenant="batch", priority=3)
        await r.open(tenant="other", priority=0, weight=1 << 20)


def job(name, **more):
    return SubmitJob(job_id=name, tenant="bob", module=HEX, **more)


@pytest.mark.parametrize(("wanted", "words"), ABOVE)
async def test_job_above_ceiling_is_refused_or_failed(rig, wanted, words):
    async with rig("a", auth="tokens") as r:
        bob = await tenant(r, "bob")
        with refused(words):
            await r.jobs.on_submit_tenants(job("job-00001", **wanted), "bob")
        assert await r.tasks.get("job-00001") is None
        caller = await r.actor.gate.over_nats(bob, "bob", "tasks:write")
        await r.jobs._submit_command(job("job-00002", **wanted), caller)
        failed = await r.tasks.get("job-00002")
        assert failed.state == "failed" and "router.above_ceiling" in failed.reason and words in failed.reason


async def test_prioritize_above_ceiling_is_for_administrators_only(rig):
    async with rig("a", auth="tokens") as r:
        bob, admin = await tenant(r, "bob"), await tenant(r, "admins", "admin")
        name = (await r.open(credential=bob)).session_id
        with refused("P0 was requested"):
            await r.desk._on_prioritize(PrioritizeTaskRequest(task_id=name, priority=0, credential=bob))
        with refused("P1 was requested"):
            await r.desk._on_prioritize_of(PrioritizeTaskRequest(task_id=name, priority=1), "bob")
        assert (await r.tasks.get(name)).priority == 2
        await r.desk._on_prioritize(PrioritizeTaskRequest(task_id=name, priority=4, credential=bob))
        assert (await r.tasks.get(name)).priority == 4
        await r.desk._on_prioritize(PrioritizeTaskRequest(task_id=name, priority=0, credential=admin, tenant="bob"))
        assert (await r.tasks.get(name)).priority == 0


async def test_ceiling_check_answers_other_services(rig):
    async with rig(auth="tokens") as r:
        await tenant(r, "bob", weight_ceiling=5)

        async def check(**wanted):
            request = CheckCeilingRequest(tenant="bob", **wanted)
            return (await r.app.request(contracts.ROUTER_CEILING_CHECK, request, timeout=4.0)).refusal

        assert not await check(priority=2, weight=5) and not await check()
        assert "P1" in await check(priority=1) and "at most 5" in await check(weight=6)


# -- lowering --------------------------------------------------------------------------------------------------------


NOBODY = Caller("test", None, "admins", frozenset())


async def test_lowered_ceiling_lowers_running_and_waiting_tasks(rig):
    async with rig("a", auth="tokens") as r:
        mine, lighter, yours = [
            (await r.open(credential=await tenant(r, name, class_ceiling=0, weight_ceiling=1000), **wanted)).session_id
            for name, wanted in (
                ("bob", {"priority": 0, "weight": 900}),
                ("carol", {"priority": 3, "weight": 4}),
                ("dave", {"priority": 0, "weight": 900}),
            )
        ]
        policies = r.executors[0].policies
        async with r.actor.world.database.writing() as s:
            await r.tasks.add(s, TaskRecord("job-00001", "job", "bob", r.clock(), priority=1, spec={"weight": 500}))
        steered = await r.actor.tenants.put(NOBODY, "bob", TenantChange(class_ceiling=2, weight_ceiling=50))
        await r.actor.tenants.put(NOBODY, "carol", TenantChange(class_ceiling=2, weight_ceiling=50))
        assert (steered.class_ceiling, steered.weight_ceiling) == (2, 50)
        treated = {name: (policies[name].priority, policies[name].weight) for name in (mine, lighter, yours)}
        assert treated == {mine: (2, 50), lighter: (3, 4), yours: (0, 900)}
        assert [(await r.tasks.get(name)).priority for name in (mine, lighter, yours)] == [2, 3, 0]
        waiting = await r.tasks.get("job-00001")
        assert (waiting.priority, waiting.spec["weight"]) == (2, 50)


async def test_session_whose_class_is_changed_while_it_opens_gets_the_new_class(rig):
    async with rig("a") as r:
        (executor,) = r.executors

        async def lower(request):
            await r.actor.tenants.put(NOBODY, request.tenant, TenantChange(class_ceiling=3))

        executor.before_open = lower
        opened = await r.open(priority=2)
        assert executor.policies[opened.session_id].priority == (await r.tasks.get(opened.session_id)).priority == 3


async def test_withdrawn_exclusive_permission_makes_waiting_tasks_shared(rig):
    async with rig("a", auth="tokens") as r:
        await tenant(r, "bob", exclusive=True)
        async with r.actor.world.database.writing() as s:
            for name, state in (("job-00001", "pending"), ("job-00002", "started")):
                task = TaskRecord(name, "job", "bob", r.clock(), gpu_mode="exclusive", state=state)
                await r.tasks.add(s, task)
        await r.actor.tenants.put(NOBODY, "bob", TenantChange(exclusive=False))
        modes = [(await r.tasks.get(name)).gpu_mode for name in ("job-00001", "job-00002")]
        assert modes == ["shared", "exclusive"], "a running task keeps its exclusive device until it ends"


async def test_lowered_ceiling_with_refusing_executor_is_stored(rig):
    async with rig("a", auth="tokens") as r:
        opened = await r.open(credential=await tenant(r, "bob", class_ceiling=0), priority=0)
        del r.executors[0].policies[opened.session_id]  # the executor refuses, because it does not know the session
        changed = await r.actor.tenants.put(NOBODY, "bob", TenantChange(class_ceiling=2))
        assert changed.class_ceiling == 2 and (await r.tasks.get(opened.session_id)).priority == 2


async def test_tenant_change_is_for_administrators_and_keeps_other_fields(rig):
    async with rig(auth="tokens") as r:
        admin, operator = await tenant(r, "admins", "admin"), await tenant(r, "ops", "operator")
        bob = await tenant(r, "bob")

        async def change(credential, **changes):
            request = SetTenantRequest(credential=credential, **{"tenant": "bob"} | changes)
            return await r.app.request(contracts.ROUTER_TENANT_SET, request, timeout=4.0)

        for credential in (operator, bob, "", "no"):
            with pytest.raises(RefusedError):
                await change(credential, class_ceiling=0)
            with pytest.raises(RefusedError):
                await r.app.request(contracts.ROUTER_TENANT_LIST, TenantsRequest(credential=credential), timeout=4.0)
        await change(admin, disabled=True, description="late payer", opaque_kernels=True)
        await change(admin, class_ceiling=1, exclusive=True)
        changed = await change(admin, weight_ceiling=7)
        assert (changed.disabled, changed.description, changed.opaque_kernels) == (True, "late payer", True)
        assert (changed.class_ceiling, changed.weight_ceiling, changed.exclusive) == (1, 7, True)
        made = await change(admin, tenant="new")
        assert (made.class_ceiling, made.weight_ceiling, made.exclusive) == (2, 100, False)
        with pytest.raises(RefusedError, match="slash"):
            await change(admin, tenant="a/b")
        listed = await r.app.request(contracts.ROUTER_TENANT_LIST, TenantsRequest(credential=admin), timeout=4.0)
        assert {t.name: t.class_ceiling for t in listed.tenants}["bob"] == 1
        logged = await r.actor.world.audit.page(10)
        assert [a.detail.get("class_ceiling") for a in logged if a.action == "tenant.put"] == [None, None, 1, None]
