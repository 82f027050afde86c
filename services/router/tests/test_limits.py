"""Limits of each tenant, on both databases: the error names the reached limit, and other tenants are not affected."""

import asyncio

import pytest
from wooly_bus.blobs import BlobStore
from wooly_bus.errors import RefusedError
from wooly_router.blobs import TenantBlobs
from wooly_router.limits import Limits
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import SubmitJob
from wooly_wis.module import Module, encode_module

pytestmark = pytest.mark.connected
EMPTY = encode_module(Module((), (), (), (), ()))


def refusals(answers, setting):
    """Count the refusals that name a setting. All other answers must be successes."""
    refused = [a for a in answers if isinstance(a, BaseException)]
    assert all(isinstance(a, RefusedError) and a.code == "router.limit" and setting in str(a) for a in refused), refused
    return len(refused)


@pytest.mark.on_both
async def test_session_limit_of_tenant_counts_over_all_routers(rig, settings):
    settings.tenant_sessions = 3
    async with rig("a") as r:
        other = r.another()
        await other.on_heartbeat(r.executors[0].heartbeat())
        asks = [router.on_open_session(r.ask(tenant="bob")) for router in (r.actor, other) for _ in range(4)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert refusals(answers, "WOOLY_ROUTER_TENANT_SESSIONS") == 5
        await r.open(tenant="alice")
        (first, *_) = [t for t in await r.tasks.in_states("started", kind="session") if t.tenant == "bob"]
        await r.actor.end(first, "completed", "")
        await r.open(tenant="bob")


@pytest.mark.on_both
async def test_job_limit_of_tenant_ignores_repeated_submission(rig, settings):
    settings.tenant_jobs = 3
    with start_nats_server() as url:
        async with rig(url=url) as r:

            def job(number, tenant):
                return r.jobs.on_submit_job(SubmitJob(job_id=f"{tenant}-{number:04}", tenant=tenant, module=module))

            for tenant in ("bob", "alice"):
                module = await BlobStore(r.app.jetstream(), tenant).put(EMPTY)
            answers = await asyncio.gather(*[job(i, "bob") for i in range(8)], return_exceptions=True)
            assert refusals(answers, "WOOLY_ROUTER_TENANT_JOBS") == 5
            (kept, *_) = [a for a in answers if not isinstance(a, BaseException)]
            assert (await r.jobs.on_submit_job(SubmitJob(job_id=kept.id, tenant="bob", module=module))).id == kept.id
            assert (await job(0, "alice")).state == "pending"
            await r.jobs.end(kept, "cancelled", "")
            assert (await job(9, "bob")).state == "pending"


def test_open_rate_of_tenant_is_limited(settings):
    settings.tenant_opens = 2.0
    limits = Limits(settings)
    for _ in range(8):
        limits.begin("bob")
    with pytest.raises(RefusedError, match="WOOLY_ROUTER_TENANT_OPENS") as refused:
        limits.begin("bob")
    assert refused.value.retry_s == 1.0 and refused.value.retryable
    limits.begin("alice")


async def test_blob_quota_of_tenant_refuses_blobs_and_jobs(rig, settings):
    settings.tenant_blob_bytes, settings.tenant_blob_pieces = 4000, 8
    with start_nats_server() as url:
        async with rig(url=url) as r:
            blobs = TenantBlobs(r.app, settings)
            await blobs.room_for("bob", 3000, begins=True)
            with pytest.raises(RefusedError, match="WOOLY_ROUTER_TENANT_BLOB_BYTES"):
                await blobs.room_for("bob", 3000, begins=True)
            await blobs.room_for("alice", 3000, begins=True)
            store = blobs.store("carol")
            module = await store.put(EMPTY)
            for i in range(3):
                await store.put(bytes([i]))
            with pytest.raises(RefusedError, match="WOOLY_ROUTER_TENANT_BLOB_PIECES"):
                await blobs.room_for("carol", 1, begins=True)
            config = (await r.app.jetstream().stream_info(f"OBJ_{store.bucket}")).config
            assert config.max_msgs == 9
            r.actor.blobs = blobs
            blobs._held.clear()
            with pytest.raises(RefusedError, match="TENANT_BLOB_PIECES"):
                await r.jobs.on_submit_job(SubmitJob(job_id="job-0001", tenant="carol", module=module))


async def test_job_submission_counts_once_against_rate(rig, settings):
    settings.tenant_opens = 0.25  # a burst of one
    with start_nats_server() as url:
        async with rig(url=url) as r:
            module = await BlobStore(r.app.jetstream(), "bob").put(EMPTY)
            task = await r.jobs.on_submit_job(SubmitJob(job_id="bob-0001", tenant="bob", module=module))
            assert task.state == "pending"
            with pytest.raises(RefusedError, match="WOOLY_ROUTER_TENANT_OPENS"):
                await r.jobs.on_submit_job(SubmitJob(job_id="bob-0002", tenant="bob", module=module))
