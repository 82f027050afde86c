"""REST: calls of every route in this process, and access by tokens."""

import asyncio
import contextlib
import json

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.authority import make_authority
from wooly_bus.blobs import BlobStore
from wooly_bus.credentials import Credentials
from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets, from_elsewhere
from wooly_router.gate import ROLES
from wooly_router.rest.access import Access
from wooly_router.rest.api import create_api
from wooly_router.state.config import AuditRecord
from wooly_router.state.nodes import Sample
from wooly_router.state.tenants import TenantChange, TenantRecord, new_token
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.credits import BudgetState, CreditsReply
from wooly_wis.messages import (
    GpusReply,
    GpuState,
    MemoryState,
    SessionMemory,
    SubmitJob,
    TaskRequest,
    TasksRequest,
)
from wooly_wis.module import Module, encode_module, module_digest

pytestmark = pytest.mark.connected
EMPTY = encode_module(Module((), (), (), (), ()))


@pytest.fixture
def rest(rig):
    """`async with rest("a") as (rig, client)`; `auth="tokens"` requires tokens."""
    with start_nats_server() as url:

        @contextlib.asynccontextmanager
        async def make(*names, auth="open", rate=1000.0):
            async with rig(*names, url=url, auth=auth) as r:
                now = [0.0]
                access = Access(r.actor.gate, Buckets(rate, rate, lambda: now[0]))
                api = create_api(r.actor, r.desk, access, r.traces)
                transport = httpx.ASGITransport(api, raise_app_exceptions=False)
                async with httpx.AsyncClient(base_url="http://127.0.0.1/api/v1", transport=transport) as http:
                    r.api, r.now, r.url = api, now, url
                    await r.duties().keep_nodes()
                    yield r, http

        yield make


async def call_rest(http, method, path, status=200, **more):
    answer = await http.request(method, path, **more)
    assert answer.status_code == status, answer.text
    content = answer.json() if answer.content else None
    if status == 503:
        assert int(answer.headers["retry-after"]) > 0
    if status >= 400:
        assert set(content) == {"code", "message", "retryable"} and content["message"]
    return content


async def test_config_keeps_written_values_and_defaults(rest):
    async with rest() as (_, http):
        assert (await call_rest(http, "GET", "config"))["default_vram_overcommit_percent"] == 0
        changed = await call_rest(
            http, "PUT", "config", json={"default_vram_overcommit_percent": 1000, "job_attempts": 2}
        )
        assert (changed["default_vram_overcommit_percent"], changed["job_attempts"]) == (1000, 2)
        assert (await call_rest(http, "PUT", "config", json={"job_attempts": 3}))[
            "default_vram_overcommit_percent"
        ] == 1000
        for bad in (-1, 1001, "x", None, 1.5):
            await call_rest(http, "PUT", "config", 422, json={"default_vram_overcommit_percent": bad})
        error = await call_rest(http, "PUT", "config", 422, json={"no_such": 1})
        assert error["code"] == "http.invalid" and "no_such" in error["message"]
        assert [e["action"] for e in (await call_rest(http, "GET", "audit"))["entries"]] == ["config.write"] * 2


async def test_overcommit_before_configuration_comes_from_environment(rest, monkeypatch, tmp_path):
    from wooly_router.settings import RouterSettings

    monkeypatch.setenv("CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT", "35")
    defaults = RouterSettings(state_dir=tmp_path).cluster()
    async with rest() as (r, http):
        r.actor.world.defaults = defaults
        assert (await call_rest(http, "GET", "config"))["default_vram_overcommit_percent"] == 35
        await call_rest(http, "PUT", "config", json={"job_attempts": 2})
        assert (await call_rest(http, "GET", "config"))["default_vram_overcommit_percent"] == 35
        await call_rest(http, "PUT", "config", json={"default_vram_overcommit_percent": 0})
        assert (await call_rest(http, "GET", "config"))["default_vram_overcommit_percent"] == 0
    monkeypatch.setenv("CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT", "1001")
    with pytest.raises(ValueError, match="1000"):
        RouterSettings(state_dir=tmp_path)


@pytest.mark.on_both
async def test_node_routes_configure_cordon_and_drain(rest):
    async with rest("a", "b") as (r, http):
        (node,) = (await call_rest(http, "GET", "nodes"))["nodes"]
        assert (node["node_id"], node["state"], node["overcommit_vram_percent"]) == ("host", "active", None)
        total = node["gpus"][0]["device"]["total_memory"]
        whole = {"takes": True, "takes_exclusive": True, "swappable": total, "fixed": total}
        assert node["gpus"][0]["room"] == whole
        assert [g["executor_id"] for g in node["gpus"]] == ["a", "b"]
        await call_rest(http, "PUT", "config", json={"default_vram_overcommit_percent": 50})
        for given, effective in ((0, 0), (20, 20), (None, 50)):
            node = await call_rest(http, "PUT", "nodes/host/config", json={"overcommit_vram_percent": given})
            assert (node["overcommit_vram_percent"], node["effective_overcommit_vram_percent"]) == (given, effective)
        await call_rest(http, "PUT", "nodes/host/config", 422, json={})
        await call_rest(http, "PUT", "nodes/host/config", 422, json={"overcommit_vram_percent": 1001})
        await call_rest(http, "PUT", "nodes/other/config", 404, json={"overcommit_vram_percent": 1})
        opened = await r.open()
        assert (await call_rest(http, "PUT", "nodes/host/state", json={"state": "draining"}))["state"] == "draining"
        await r.actor.end(await r.tasks.get(opened.session_id), "completed", "")
        assert (await call_rest(http, "GET", "nodes/host"))["state"] == "drained"
        assert (await call_rest(http, "PUT", "nodes/host/state", json={"state": "cordoned"}))["state"] == "cordoned"
        r.clock.now += 6
        assert (await call_rest(http, "GET", "nodes/host"))["state"] == "lost"


async def test_group_routes_create_change_and_delete(rest):
    async with rest("a") as (_, http):
        made = await call_rest(http, "PUT", "groups/fast", json={"description": "d", "nodes": ["host", "later"]})
        assert made["nodes"] == ["host", "later"] and (await call_rest(http, "GET", "nodes/host"))["groups"] == ["fast"]
        assert (await call_rest(http, "PUT", "groups/fast", json={}))["nodes"] == []
        assert [g["name"] for g in (await call_rest(http, "GET", "groups"))["groups"]] == ["fast"]
        await call_rest(http, "DELETE", "groups/fast", 204)
        await call_rest(http, "DELETE", "groups/fast", 404)


@pytest.mark.on_both
async def test_task_routes_create_list_prioritize_and_cancel(rest):
    async with rest() as (r, http):
        blob = await call_rest(http, "POST", "blobs", 201, content=EMPTY)
        assert blob == {"digest": module_digest(EMPTY).hex(), "nbytes": len(EMPTY)}
        assert (await http.get(f"blobs/{blob['digest']}")).content == EMPTY
        await call_rest(http, "GET", f"blobs/{'0' * 64}", 404)
        body = {"module": blob["digest"], "noswap": 1, "name": "mine", "required_vram": 5, "job_id": "job-0001"}
        made = await call_rest(http, "POST", "tasks", 201, json=body)
        assert made["task"]["noswap"] == 1 and made["task"]["state"] == "pending" and len(made["story"]) == 1
        assert (await call_rest(http, "POST", "tasks", 201, json=body))["task"]["task_id"] == "job-0001"
        await call_rest(http, "POST", "tasks", 422, json=body | {"noswap": 2})
        assert (await call_rest(http, "POST", "tasks", 409, json=body | {"tenant": "u"}))["code"] == "router.id_taken"
        assert (await call_rest(http, "PUT", "tasks/job-0001/priority", json={"priority": 0}))["task"]["priority"] == 0
        for _ in range(4):
            r.clock.now += 1
            await call_rest(http, "POST", "tasks", 201, json={"module": blob["digest"], "noswap": 0})
        page = await call_rest(http, "GET", "tasks", params={"limit": 3, "state": ["pending", "started"]})
        rest_of = await call_rest(http, "GET", "tasks", params={"limit": 3, "after": page["next"]})
        assert (
            len(page["tasks"]) == 3
            and [t["task_id"] for t in rest_of["tasks"]][-1] == "job-0001"
            and not rest_of["next"]
        )
        assert [t["name"] for t in (await call_rest(http, "GET", "tasks", params={"text": "min"}))["tasks"]] == ["mine"]
        await call_rest(http, "GET", "tasks", 422, params={"state": "odd"})
        assert (await call_rest(http, "GET", "tasks", 422, params={"after": "odd"}))["code"] == "router.bad_cursor"
        ended = await call_rest(http, "POST", "tasks/job-0001/cancel", json={"reason": "enough"})
        assert (ended["task"]["state"], ended["task"]["reason"]) == ("cancelled", "enough")
        assert (await call_rest(http, "PUT", "tasks/job-0001/priority", 409, json={"priority": 1}))[
            "code"
        ] == "router.task_ended"
        assert (await call_rest(http, "GET", "tasks/nobody", 404))["code"] == "router.no_task"


async def test_history_and_audit_return_stored_entries(rest):
    async with rest() as (r, http):
        await r.actor.world.nodes.sample([Sample(float(t), "a", "host", 0.5, 0.25, 1, 2, 3) for t in (10, 20)])
        (sample,) = (await call_rest(http, "GET", "metrics/history", params={"since": 15}))["samples"]
        assert (sample["at"], sample["starvation"], sample["memory_total"]) == (20.0, 0.25, 2)
        for i in range(3):
            await r.actor.world.audit.add(AuditRecord(1.0, "me", "t", "x", str(i), {}))
        first = (await call_rest(http, "GET", "audit", params={"limit": 2}))["entries"]
        rest_of = (await call_rest(http, "GET", "audit", params={"before": first[-1]["id"]}))["entries"]
        assert [e["target"] for e in first + rest_of] == ["2", "1", "0"]


@pytest.mark.on_both
async def test_history_with_step_returns_one_sample_per_step(rest):
    async with rest() as (r, http):
        await r.actor.world.nodes.sample([Sample(float(t), "a", "host", t / 100, 0.0, t, 2, 3) for t in (10, 20, 30)])
        found = (await call_rest(http, "GET", "metrics/history", params={"step": 20}))["samples"]
        assert [(s["at"], s["utilization"], s["memory_used"]) for s in found] == [(0.0, 0.1, 10), (20.0, 0.25, 30)]
        await call_rest(http, "GET", "metrics/history", 422, params={"step": 9})


@pytest.mark.on_both
async def test_task_history_counts_tasks_over_time(rest):
    async with rest("a") as (r, http):
        await r.open()
        r.clock.now += 10
        found = (await call_rest(http, "GET", "metrics/tasks", params={"since": 999_990, "step": 5}))["counts"]
        assert [(c["at"], c["waiting"], c["running"]) for c in found] == [
            (999_995.0, 0, 0),
            (1_000_000.0, 0, 0),
            (1_000_005.0, 0, 1),
            (1_000_010.0, 0, 1),
        ]
        assert (await call_rest(http, "GET", "metrics/tasks", params={"since": 2e6}))["counts"] == []
        await call_rest(http, "GET", "metrics/tasks", 422)


@pytest.mark.on_both
async def test_overview_counts_nodes_and_tasks_by_state(rest):
    async with rest("a", "b") as (r, http):
        await r.open()
        r.actor.world.starvation = {"a": 250}
        found = await call_rest(http, "GET", "overview")
        assert (found["nodes"], found["tasks"]) == ({"active": 1}, {"started": 1})
        assert [(g["executor_id"], g["starvation"], g["memory_total"]) for g in found["gpus"]] == [
            ("a", 0.25, 1000),
            ("b", None, 1000),
        ]


async def test_gpu_metrics_are_read_from_scheduler_in_pages(rest):
    async with rest() as (r, http):
        assert (await call_rest(http, "GET", "metrics/gpus", 404))["code"] == "router.no_scheduler"
        scheduler = ServiceApp("scheduler", r.url)

        async def page(request):
            left = [n for n in "abc" if n > request.after]
            gpus = tuple(GpuState(executor_id=n, journal="j", entries=1) for n in left[:2])
            return GpusReply(gpus=gpus, more=len(left) > 2)

        scheduler.serve(contracts.SCHEDULER_GPU_LIST, page)
        async with scheduler.running():
            found = (await call_rest(http, "GET", "metrics/gpus"))["gpus"]
        assert [g["executor_id"] for g in found] == ["a", "b", "c"]


async def test_credits_are_read_from_metering_within_own_tenant(rest):
    asked = []

    async def show(request):
        asked.append(request.tenant)
        return CreditsReply(core_ucr=3, vram_ucr=4)

    async def budget(request):
        return BudgetState(tenant=request.tenant, hard_ucr=request.hard_ucr)

    async with rest(auth="tokens") as (r, http):
        _, admin = await token_for(r, "ops", "admin")
        _, operator = await token_for(r, "ops", "operator")
        _, mine = await token_for(r, "mine", "user")
        for path in ("credits", "credits/plans", "credits/statements/ops"):
            assert (await call_rest(http, "GET", path, 404, headers=admin))["code"] == "router.no_metering"
        metering = ServiceApp("metering", r.url)
        metering.serve(contracts.METERING_CREDITS_SHOW, show)
        metering.serve(contracts.METERING_BUDGET_SET, budget)
        async with metering.running():
            assert (await call_rest(http, "GET", "credits", headers=mine))["vram_ucr"] == 4
            await call_rest(http, "GET", "credits", headers=operator, params={"tenant": "x"})
            await call_rest(http, "GET", "credits", 403, headers=mine, params={"tenant": "yours"})
            await call_rest(http, "GET", "credits/statements/yours", 403, headers=mine)
            assert asked == ["mine", "x"]
            for headers, status in ((mine, 403), (operator, 403), (admin, 200)):
                await call_rest(http, "PUT", "credits/budgets/mine", status, json={"hard_ucr": 5}, headers=headers)
            await call_rest(http, "PUT", "credits/budgets/mine", 422, json={"hard_ucr": -1}, headers=admin)
        assert "budget.set" in [e["action"] for e in (await call_rest(http, "GET", "audit", headers=admin))["entries"]]


async def test_errors_have_one_format(rest):
    async with rest() as (r, http):
        await call_rest(http, "GET", "nothing", 404)
        await call_rest(http, "DELETE", "config", 405)
        await call_rest(http, "PUT", "config", 422, content=b"{")
        await r.actor.world.database._engine.dispose()

        async def broken(s=None):
            raise RuntimeError("secret detail")

        r.actor.world.config.read = broken
        error = await call_rest(http, "GET", "config", 500)
        assert error["code"] == "internal" and "secret detail" not in error["message"] and error["retryable"]


@pytest.mark.on_both
async def test_token_while_database_is_away_is_refused_as_retryable(rest):
    async with rest(auth="tokens") as (r, http):
        _, mine = await token_for(r, "mine", "user")

        async def away(*args, **kwargs):
            raise OperationalError("SELECT secret", {}, Exception("secret detail"))

        r.actor.world.tenants.by_hash = away
        error = await call_rest(http, "GET", "config", 503, headers=mine)
        assert error["code"] == "router.database" and error["retryable"] and "secret" not in error["message"]


# -- access ----------------------------------------------------------------------------------------------------------


async def token_for(r, tenant, role, scopes=(), **more):
    await r.actor.world.tenants.add(TenantRecord(tenant, 0.0))
    token, secret = new_token(tenant, "t", role, r.clock.now, scopes, **more)
    await r.actor.world.tenants.add_token(token, secret)
    return token, {"Authorization": f"Bearer {secret}"}


#: What `routes` returns: making the OpenAPI document takes most of a second, and all applications have the same.
ROUTES = []


def routes(api):
    """(method, path) of every route under /api/v1."""
    if not ROUTES:
        schema = api.openapi()["paths"]
        ROUTES.extend((m.upper(), p) for p, methods in schema.items() for m in methods if p.startswith("/api/v1"))
    return ROUTES


async def test_routes_without_valid_token_are_refused(rest):
    async with rest("a", auth="tokens") as (r, http):
        every = routes(r.api)
        assert len(every) > 20
        ended, gone = await token_for(r, "t", "admin", expires_at=r.clock.now + 5)
        _, off = await token_for(r, "off", "admin")
        await r.actor.world.tenants.change("off", TenantChange(disabled=True))
        revoked, late = await token_for(r, "t", "admin")
        await r.actor.world.tenants.revoke("t", revoked.id, r.clock.now)
        r.clock.now += 5
        assert ended.expires_at == r.clock.now
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic x"}, gone, off, late):
            for method, path in every:
                answer = await http.request(
                    method, "http://127.0.0.1" + path.replace("{", "").replace("}", ""), headers=headers
                )
                assert answer.status_code in (401, 422), (method, path, answer.text)
                assert answer.status_code == 401 or answer.json()["code"] == "http.invalid"
        assert (await http.get("http://127.0.0.1/healthz")).status_code == 200


async def test_token_rights_are_limited_by_role_and_scopes(rest):
    async with rest("a", auth="tokens") as (r, http):
        _, admin = await token_for(r, "ops", "admin")
        _, operator = await token_for(r, "ops", "operator")
        _, user = await token_for(r, "t", "user")
        _, narrow = await token_for(r, "t", "user", ("tasks:read",))
        _, widened = await token_for(r, "t", "user", ("tasks:read", "config:write"))
        config = {"job_attempts": 2}
        for headers, status in ((admin, 200), (operator, 403), (user, 403), (widened, 403)):
            await call_rest(http, "PUT", "config", status, json=config, headers=headers)
        for headers, status in ((operator, 200), (user, 403)):
            await call_rest(http, "PUT", "nodes/host/state", status, json={"state": "active"}, headers=headers)
            await call_rest(http, "GET", "audit", status, headers=headers)
        for headers, status in ((admin, 200), (operator, 403), (user, 403)):
            await call_rest(http, "GET", "tenants", status, headers=headers)
        await call_rest(http, "GET", "tasks", headers=narrow)
        await call_rest(http, "POST", "blobs", 403, content=b"x", headers=narrow)
        assert ROLES["user"] < ROLES["admin"] > ROLES["operator"] and not ROLES["operator"] & {
            "blobs:read",
            "blobs:write",
        }


#: Every route, and whether it is closed to operators: a tenant's data and the means to act as a tenant are closed.
CLOSED_TO_OPERATORS = {
    ("POST", "/api/v1/blobs"),
    ("GET", "/api/v1/blobs/{digest}"),
    ("GET", "/api/v1/tenants"),
    ("PUT", "/api/v1/tenants/{name}"),
    ("GET", "/api/v1/tenants/{name}/tokens"),
    ("POST", "/api/v1/tenants/{name}/tokens"),
    ("DELETE", "/api/v1/tenants/{name}/tokens/{token_id}"),
    ("PUT", "/api/v1/config"),
    ("PUT", "/api/v1/credits/budgets/{tenant}"),
}
OPEN_TO_OPERATORS = {
    ("GET", "/api/v1/audit"),
    ("GET", "/api/v1/config"),
    ("POST", "/api/v1/credentials"),  # for the operator's own tenant, without blobs
    ("GET", "/api/v1/credits"),
    ("GET", "/api/v1/credits/plans"),
    ("GET", "/api/v1/credits/statements/{tenant}"),
    ("GET", "/api/v1/groups"),
    ("PUT", "/api/v1/groups/{name}"),
    ("DELETE", "/api/v1/groups/{name}"),
    ("POST", "/api/v1/login"),
    ("DELETE", "/api/v1/login"),
    ("POST", "/api/v1/login/code"),  # a code of the operator's own
    ("GET", "/api/v1/me"),
    ("GET", "/api/v1/nodes"),
    ("GET", "/api/v1/nodes/{node_id}"),
    ("PUT", "/api/v1/nodes/{node_id}/config"),
    ("PUT", "/api/v1/nodes/{node_id}/state"),
    ("GET", "/api/v1/overview"),
    ("GET", "/api/v1/metrics/gpus"),
    ("GET", "/api/v1/metrics/history"),
    ("GET", "/api/v1/metrics/tasks"),
    ("GET", "/api/v1/sessions"),
    ("GET", "/api/v1/tasks"),
    ("POST", "/api/v1/tasks"),  # for the operator's own tenant
    ("GET", "/api/v1/tasks/{task_id}"),
    ("POST", "/api/v1/tasks/{task_id}/cancel"),
    ("POST", "/api/v1/tasks/{task_id}/move"),
    ("POST", "/api/v1/tasks/{task_id}/hibernate"),
    ("POST", "/api/v1/tasks/{task_id}/wake"),
    ("PUT", "/api/v1/tasks/{task_id}/priority"),
    ("GET", "/api/v1/tasks/{task_id}/trace"),
    ("GET", "/api/v1/traces"),
    ("GET", "/api/v1/traces/{trace_id}"),
}
BODIES = {
    "/api/v1/tenants/{name}": {"class_ceiling": 0},
    "/api/v1/tenants/{name}/tokens": {"role": "admin"},
    "/api/v1/config": {"job_attempts": 2},
    "/api/v1/credits/budgets/{tenant}": {},
}


async def test_routes_for_operators_match_the_table(rest, tmp_path):
    async with rest("a", auth="tokens") as (r, http):
        assert set(routes(r.api)) == CLOSED_TO_OPERATORS | OPEN_TO_OPERATORS
        _, theirs = await token_for(r, "victim", "user")
        _, operator = await token_for(r, "ops", "operator")
        digest = (await call_rest(http, "POST", "blobs", 201, content=EMPTY, headers=theirs))["digest"]
        places = {"name": "victim", "tenant": "victim", "digest": digest, "token_id": "t"}
        for method, path in sorted(CLOSED_TO_OPERATORS):
            error = await call_rest(
                http,
                method,
                path.removeprefix("/api/v1/").format(**places),
                403,
                json=BODIES.get(path),
                headers=operator,
            )
            assert error["code"] == "router.forbidden", path
        for tenant in ("victim", "ops"):
            await call_rest(http, "GET", f"blobs/{digest}", 403, params={"tenant": tenant}, headers=operator)
        error = await call_rest(
            http, "POST", "tasks", 403, json={"module": digest, "noswap": 0, "tenant": "victim"}, headers=operator
        )
        assert error["code"] == "router.forbidden" and not await r.tasks.in_states("pending")
        r.actor.issuer = make_authority(tmp_path / "keys").issuer()
        await call_rest(http, "POST", "credentials", 403, json={"tenant": "victim"}, headers=operator)
        made = await call_rest(http, "POST", "credentials", 201, json={}, headers=operator)
        held = Credentials.parse(made["credentials"])
        blobs = [rpc.for_tenant("ops") for rpc in (contracts.ROUTER_BLOB_GET, contracts.ROUTER_BLOB_PUT)]
        assert (made["tenant"], made["role"]) == ("ops", "user") and held.permissions.publish
        assert not any(held.permissions.may_publish(subject) for subject in blobs)


@pytest.mark.on_both
async def test_tenant_cannot_read_or_change_other_tenants(rest):
    async with rest("a", auth="tokens") as (r, http):
        _, mine = await token_for(r, "mine", "user")
        _, yours = await token_for(r, "yours", "user")
        _, operator = await token_for(r, "ops", "operator")
        digest = (await call_rest(http, "POST", "blobs", 201, content=EMPTY, headers=mine))["digest"]
        made = await call_rest(http, "POST", "tasks", 201, json={"module": digest, "noswap": 0}, headers=mine)
        name, session = made["task"]["task_id"], (await r.open(credential=mine["Authorization"][7:])).session_id
        assert made["task"]["tenant"] == "mine"
        for task in (name, session):
            assert (await call_rest(http, "GET", f"tasks/{task}", headers=mine))["task"]["task_id"] == task
            for method, path, body in (
                ("GET", f"tasks/{task}", None),
                ("POST", f"tasks/{task}/cancel", {}),
                ("PUT", f"tasks/{task}/priority", {"priority": 0}),
            ):
                error = await call_rest(http, method, path, 404, json=body, headers=yours)
                assert error == await call_rest(
                    http, method, path.replace(task, "no-such-task"), 404, json=body, headers=yours
                ) | {"message": error["message"]}
        assert (await call_rest(http, "GET", "tasks", headers=yours))["tasks"] == []
        assert (await call_rest(http, "GET", "sessions", headers=yours))["sessions"] == []
        await call_rest(http, "GET", "tasks", 403, params={"tenant": "mine"}, headers=yours)
        await call_rest(http, "GET", f"blobs/{digest}", 404, headers=yours)
        await call_rest(http, "GET", f"blobs/{digest}", 403, params={"tenant": "mine"}, headers=yours)
        await call_rest(http, "POST", "tasks", 403, json={"module": digest, "tenant": "mine"}, headers=yours)
        stolen = await call_rest(http, "POST", "tasks", 201, json={"module": digest}, headers=yours)
        assert stolen["task"]["state"] == "failed" and "bus.blob_missing" in stolen["task"]["reason"]
        await call_rest(http, "POST", "tasks", 409, json={"module": digest, "job_id": name}, headers=yours)
        assert (await r.tasks.get(name)).state == "pending" and session in await r.sessions()
        assert {t["tenant"] for t in (await call_rest(http, "GET", "tasks", headers=operator))["tasks"]} == {
            "mine",
            "yours",
        }


async def test_node_memory_of_other_tenants_is_anonymous(rest):
    async with rest("a", auth="tokens") as (r, http):
        _, mine = await token_for(r, "mine", "user")
        _, operator = await token_for(r, "ops", "operator")
        held = [("s1", "mine", 1), ("s2", "yours", 2), ("s3", "theirs", 4)]
        sessions = tuple(SessionMemory(session_id=s, tenant=t, own=n) for s, t, n in held)
        memory = MemoryState(capacity=100, own=7, free=93, sessions=sessions)
        await r.actor.on_heartbeat(r.executors[0].heartbeat(memory=memory))
        for path in ("nodes", "nodes/host"):
            answer = await http.get(path, headers=mine)
            assert not [x for x in ("yours", "theirs", "s2", "s3") if x in answer.text]
            node = answer.json().get("nodes", [answer.json()])[0]
            found = node["gpus"][0]["memory"]["sessions"]
            assert [(s["session_id"], s["own"]) for s in found] == [("s1", 1), ("others", 6)]
            assert "theirs" in (await http.get(path, headers=operator)).text


async def test_cookie_has_rights_of_token_and_changes_need_page_header(rest):
    async with rest("a", auth="tokens") as (r, http):
        token, head = await token_for(r, "ops", "operator")
        secret = head["Authorization"][7:]
        await call_rest(http, "POST", "login", 401, json={"token": "guess"})
        await call_rest(http, "POST", "login", 403, json={"token": secret}, headers={"Origin": "http://evil.example"})
        assert not http.cookies
        answer = await http.post("login", json={"token": secret})
        assert answer.json()["own"] == "ops" and answer.json()["tenant"] is None and secret not in answer.text
        cookie = answer.headers["set-cookie"].lower()
        assert (
            "httponly" in cookie and "samesite=strict" in cookie and "path=/api/v1" in cookie and "secure" not in cookie
        )
        assert (await call_rest(http, "GET", "me"))["actor"] == f"token:{token.id}"
        state, ours = {"state": "cordoned"}, {"x-wooly-page": "1"}
        await call_rest(http, "PUT", "nodes/host/state", 403, json=state)
        await call_rest(http, "PUT", "nodes/host/state", json=state, headers=ours)
        await call_rest(http, "PUT", "config", 403, json={}, headers=ours)
        await call_rest(http, "DELETE", "login", 403)
        await call_rest(http, "DELETE", "login", 204, headers=ours)
        assert not http.cookies
        await call_rest(http, "GET", "me", 401)
        secured = await http.post("https://127.0.0.1/api/v1/login", json={"token": secret})
        assert "secure" in secured.headers["set-cookie"].lower()
        await r.actor.world.tenants.revoke("ops", token.id, r.clock.now)
        http.cookies.set("wooly_token", secret)
        await call_rest(http, "GET", "nodes", 401)


async def test_login_without_required_tokens_sets_no_cookie(rest):
    async with rest() as (_, http):
        assert (await call_rest(http, "GET", "me"))["auth"] == "open"
        answer = await http.post("login", json={"token": "anything"})
        assert answer.status_code == 200 and "set-cookie" not in answer.headers


async def test_opaque_kernels_are_permitted_by_administrators_per_session(rest):
    async with rest("a", auth="tokens") as (r, http):
        _, admin = await token_for(r, "ops", "admin")
        _, user = await token_for(r, "mine", "user")

        async def hosted():
            opened = await r.open(credential=user["Authorization"][7:])
            return r.executors[0].sessions[opened.session_id].opaque_kernels

        assert not await hosted()
        await call_rest(http, "PUT", "tenants/mine", 403, json={"opaque_kernels": True}, headers=user)
        assert (await call_rest(http, "PUT", "tenants/mine", json={"opaque_kernels": True}, headers=admin))[
            "opaque_kernels"
        ]
        assert await hosted()
        kept = await call_rest(http, "PUT", "tenants/mine", json={"description": "of others"}, headers=admin)
        assert kept["opaque_kernels"] and await hosted()
        await call_rest(http, "PUT", "tenants/mine", json={"opaque_kernels": False}, headers=admin)
        assert not await hosted()


@pytest.mark.on_both
async def test_token_secret_is_shown_once_and_revoked_token_is_refused(rest):
    async with rest(auth="tokens") as (r, http):
        _, admin = await token_for(r, "ops", "admin")
        await call_rest(http, "PUT", "tenants/new", json={"description": "d"}, headers=admin)
        made = await call_rest(
            http, "POST", "tenants/new/tokens", 201, json={"name": "ci", "expires_in_s": 60}, headers=admin
        )
        theirs = {"Authorization": f"Bearer {made['secret']}"}
        await call_rest(http, "GET", "tasks", headers=theirs)
        listed = await http.get("tenants/new/tokens", headers=admin)
        assert listed.json()["tokens"][0]["id"] == made["id"] and made["secret"] not in listed.text
        logged = await http.get("audit", headers=admin)
        assert made["id"] in logged.text and made["secret"] not in logged.text
        await call_rest(http, "DELETE", f"tenants/new/tokens/{made['id']}", 204, headers=admin)
        await call_rest(http, "GET", "tasks", 401, headers=theirs)
        await call_rest(http, "DELETE", f"tenants/new/tokens/{made['id']}", 404, headers=admin)
        await call_rest(http, "POST", "tenants/no/tokens", 404, json={}, headers=admin)
        await call_rest(http, "POST", "tenants/new/tokens", 422, json={"scopes": ["all:all"]}, headers=admin)


async def test_rate_limit_applies_per_caller(rest):
    async with rest(rate=3.0, auth="tokens") as (r, http):
        _, first = await token_for(r, "a", "user")
        statuses = [(await http.get("tasks", headers=first)).status_code for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2
        r.now[0] += 1.0
        assert (await http.get("tasks", headers=first)).status_code == 200
        error = await http.get("tasks", headers={"Authorization": "Bearer guess"})
        assert error.status_code == 401


def test_buckets_refill_and_are_separate_per_caller():
    now = [0.0]
    buckets = Buckets(2.0, 4.0, lambda: now[0])
    assert [buckets.take("a") for _ in range(5)] == [True] * 4 + [False] and buckets.take("b")
    now[0] = 0.5
    assert buckets.take("a") and not buckets.take("a")
    now[0] = 100.0
    assert sum(buckets.take("a") for _ in range(10)) == 4


async def test_blobs_over_rest_are_readable_over_nats(rest):
    async with rest() as (r, http):
        name = await BlobStore(r.app.jetstream(), "default").put(b"hello")
        assert (await http.get(f"blobs/{name}")).content == b"hello"


async def test_nats_request_with_token_acts_for_tenant_of_token(rest):
    """Sessions, jobs and requests about tasks over NATS: the tenant comes from the token, whatever the message says."""
    async with rest("a", auth="tokens") as (r, _):
        _, mine = await token_for(r, "mine", "user")
        _, yours = await token_for(r, "yours", "user")
        _, reader = await token_for(r, "mine", "user", ("tasks:read",))
        _, operator = await token_for(r, "ops", "operator")
        me, you, read, ops = [h["Authorization"][7:] for h in (mine, yours, reader, operator)]
        for wanted, code in (
            ({}, "router.unauthorized"),
            ({"credential": "guess"}, "router.unauthorized"),
            ({"credential": read}, "router.forbidden"),
            ({"credential": you, "tenant": "mine"}, "router.forbidden"),
        ):
            with pytest.raises(RefusedError) as caught:
                await r.open(**wanted)
            assert caught.value.code == code and await r.tasks.counts() == {}
        opened = await r.open(credential=me)
        hosted = r.executors[0].sessions[opened.session_id]
        assert hosted.tenant == "mine" and (await r.tasks.get(opened.session_id)).tenant == "mine"

        async def ask(rpc, request):
            return await r.app.request(rpc, request, timeout=5)

        listed = await ask(contracts.ROUTER_TASK_LIST, TasksRequest(credential=read))
        assert [t.task_id for t in listed.tasks] == [opened.session_id]
        assert (await ask(contracts.ROUTER_TASK_LIST, TasksRequest(credential=you))).tasks == ()
        assert len((await ask(contracts.ROUTER_TASK_LIST, TasksRequest(credential=ops))).tasks) == 1
        for credential, code in ((you, "router.no_task"), (read, "router.forbidden"), ("", "router.unauthorized")):
            with pytest.raises(RefusedError) as caught:
                request = TaskRequest(task_id=opened.session_id, credential=credential)
                await ask(contracts.ROUTER_TASK_CANCEL, request)
            assert caught.value.code == code
        assert await r.sessions() == [opened.session_id]
        module = await BlobStore(r.app.jetstream(), "mine").put(EMPTY)
        taking = asyncio.create_task(r.jobs.take_commands())
        await r.jobs.prepare()
        js = r.app.jetstream()
        for name, credential, tenant in (
            ("job-bad1", "guess", "mine"), ("job-bad2", you, "mine"), ("job-bad3", read, "mine"), ("job-good", me, "default")
        ):  # fmt: skip
            job = SubmitJob(job_id=name, module=module, credential=credential, tenant=tenant)
            await js.publish(contracts.ROUTER_JOB_COMMAND.subject, job.model_dump_json().encode())
        while await r.tasks.get("job-good") is None:
            await asyncio.sleep(0.02)
        assert [await r.tasks.get(n) for n in ("job-bad1", "job-bad2", "job-bad3")] == [None] * 3
        assert (await r.tasks.get("job-good")).tenant == "mine" and me not in json.dumps(
            (await r.tasks.get("job-good")).spec
        )
        taking.cancel()
        await asyncio.wait([taking])


@pytest.mark.parametrize(
    ("origin", "host", "auth", "allowed"),
    [
        ("", "127.0.0.1:8420", "open", True),
        ("", "[::1]:8420", "open", True),
        ("", "localhost:8420", "open", True),
        ("http://localhost:8420", "localhost:8420", "open", True),
        ("http://evil.example", "localhost:8420", "open", False),
        ("null", "localhost:8420", "open", False),
        ("http://localhost:9999", "localhost:8420", "open", False),
        ("", "rebound.example:8420", "open", False),
        ("http://rebound.example:8420", "rebound.example:8420", "open", False),
        ("", "", "open", False),
        ("", "[bad", "open", False),
        ("http://[bad", "localhost", "tokens", False),
        ("", "wooly.example", "tokens", True),
        ("https://wooly.example", "wooly.example", "tokens", True),
        ("https://evil.example", "wooly.example", "tokens", False),
    ],
)
def test_from_elsewhere_refuses_other_origins(origin, host, auth, allowed):
    assert (from_elsewhere(origin, host, auth) == "") is allowed


async def test_routes_called_from_other_origin_are_refused(rest):
    async with rest() as (r, http):
        for method, path in routes(r.api):
            answer = await http.request(method, f"http://127.0.0.1{path}", headers={"Origin": "http://evil.example"})
            assert answer.status_code in (403, 422), (method, path)
        await call_rest(http, "POST", "tasks/x/cancel", 403, headers={"Origin": "http://evil.example"})


async def test_credentials_are_issued_with_signing_key(rest, tmp_path):
    async with rest() as (r, http):
        error = await call_rest(http, "POST", "credentials", 409, json={})
        assert error["code"] == "router.no_credentials" and "WOOLY_ROUTER_SIGNING_KEY" in error["message"]
        r.actor.issuer = make_authority(tmp_path / "keys").issuer()
        made = await call_rest(http, "POST", "credentials", 201, json={"expires_in_s": 60})
        assert (made["tenant"], made["role"], made["nats_url"]) == ("default", "user", "nats://127.0.0.1:4222")
        held = Credentials.parse(made["credentials"])
        assert held.tenant == "default" and held.expires_at == made["expires_at"] <= r.clock.now + 60
        assert (await call_rest(http, "POST", "credentials", 201, json={"tenant": "acme"}))["tenant"] == "acme"
        for wrong in ({"expires_in_s": 0}, {"role": "operator"}, {"tenant": "a/b"}, {"more": 1}):
            await call_rest(http, "POST", "credentials", 422, json=wrong)
        # Without required tokens, no caller is a proven administrator.
        assert (await call_rest(http, "POST", "credentials", 403, json={"role": "admin"}))["code"] == "router.forbidden"
