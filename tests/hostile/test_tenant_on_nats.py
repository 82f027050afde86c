"""The attacker is a tenant with its own credentials, on NATS."""

import pytest
from wooly_bus import subjects
from wooly_bus.errors import RefusedError
from wooly_wis.messages import (
    CheckCeilingReply,
    CheckCeilingRequest,
    GpusReply,
    GpusRequest,
    PrioritizeTaskRequest,
    SetTenantRequest,
    SteerSessionReply,
    SteerSessionRequest,
    SubmitJob,
    SubmitJobReply,
    TaskReply,
    TaskRequest,
    TenantInfo,
)

pytestmark = pytest.mark.connected


# -- class and weight ------------------------------------------------------------------------------------------------


def _refused(code, act, *ask, **wanted):
    with pytest.raises(RefusedError) as error:
        act(*ask, **wanted)
    assert error.value.code == code, error.value
    return str(error.value)


def test_tenant_gets_no_class_weight_or_device_above_its_ceilings_by_any_subject(cluster, bob):
    """Defaults of a router that asks for tokens: P2, weight 100, no device to itself."""
    above = ({"priority": 0}, {"priority": 1}, {"weight": 101}, {"weight": 1 << 20}, {"gpu_mode": "exclusive"})
    for wanted in above:
        assert "wooly tenants set bob" in _refused("router.above_ceiling", bob.open, **wanted)
        job = SubmitJob(job_id="bobs-job-above", module="0" * 64, **wanted)
        _refused("router.above_ceiling", bob.ask, subjects.ROUTER_JOB_SUBMIT, job, SubmitJobReply)
    opened = bob.open(weight=100)
    name = opened.session_id
    for wanted in ({"priority": 0}, {"weight": 101}, {"priority": 2, "weight": 1 << 20}):
        steer = SteerSessionRequest(session_id=name, **wanted)
        _refused("scheduler.above_ceiling", bob.ask, subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply)
    for wanted in ({"exclusive": True}, {"policy": {"priority": 0}}):
        steer = SteerSessionRequest.model_validate({"session_id": name, **wanted})
        _refused("scheduler.forbidden", bob.ask, subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply)
    prioritize = PrioritizeTaskRequest(task_id=name, priority=1)
    _refused("router.above_ceiling", bob.ask, subjects.ROUTER_TASK_PRIORITIZE, prioritize, TaskReply)
    assert bob.ask(subjects.ROUTER_TASK_GET, TaskRequest(task_id=name), TaskReply).task.priority == 2
    steer = SteerSessionRequest(session_id=name, priority=3, weight=99)
    policy = bob.ask(subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply).policy
    assert (policy.priority, policy.weight) == (3, 99)
    bob.close(opened)


def test_tenant_neither_asks_for_nor_changes_ceilings_itself(bob):
    asks = [
        (subjects.ROUTER_TENANT_SET, SetTenantRequest(tenant="bob", class_ceiling=0, credential=bob.token), TenantInfo),
        (subjects.ROUTER_CEILING_CHECK, CheckCeilingRequest(tenant="alice"), CheckCeilingReply),
    ]
    for subject, message, _ in asks:
        for published in (subject, subjects.for_tenant(subject, "bob")):
            assert not bob.held.permissions.may_publish(published), message


def test_lowered_ceiling_brings_a_running_session_of_the_tenants_down(cluster, bob):
    cluster.rest("PUT", "tenants/bob", {"class_ceiling": 0, "weight_ceiling": 5000})
    opened = bob.open(priority=0, weight=5000)
    changed = cluster.rest("PUT", "tenants/bob", {"class_ceiling": 2, "weight_ceiling": 100})
    assert (changed["class_ceiling"], changed["weight_ceiling"], changed["exclusive"]) == (2, 100, False)
    steer = SteerSessionRequest(session_id=opened.session_id, suspended=False)
    cluster.wait(lambda: opened.session_id in _seen(bob))
    policy = bob.ask(subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply).policy
    assert (policy.priority, policy.weight) == (2, 100)
    bob.close(opened)


def _seen(tenant):
    """The sessions of a tenant's that the scheduler follows."""
    gpus = tenant.ask(subjects.SCHEDULER_GPU_LIST, GpusRequest(), GpusReply).gpus
    return [s.session_id for gpu in gpus for s in gpu.sessions]
