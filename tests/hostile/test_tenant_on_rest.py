"""The attacker is a tenant with its own API token, on REST."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil
import pytest
from wooly_bus.blobs import name_of
from wooly_testkit.cluster import Cluster, enter
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_run
from wooly_wis.module import MAX_NODES, Module, encode_module
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

pytestmark = pytest.mark.connected
PATIENCE_S = 60
EMPTY = encode_module(Module((), (), (), (), ()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with tight limits, which are quickly reached."""
    router = {"TENANT_SESSIONS": "5", "TENANT_JOBS": "10", "TENANT_STREAMS": "3", "TENANT_OPENS": "8"}
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("tight"), stack, router=router)


# -- class and weight ------------------------------------------------------------------------------------------------


def test_job_and_class_above_ceilings_are_refused(cluster, bob):
    for wanted in ({"priority": 0}, {"priority": 1}, {"weight": 101}, {"gpu_mode": "exclusive"}):
        assert cluster.rest("POST", "tasks", {"module": "0" * 64, **wanted}, bob.token) == "router.above_ceiling"
    opened = bob.open()
    for priority in (0, 1):
        body = {"priority": priority}
        assert cluster.rest("PUT", f"tasks/{opened.session_id}/priority", body, bob.token) == "router.above_ceiling"
    assert (
        cluster.rest("PUT", f"tasks/{opened.session_id}/priority", {"priority": 3}, bob.token)["task"]["priority"] == 3
    )
    bob.close(opened)
    assert cluster.rest("PUT", "tenants/bob", {"class_ceiling": 0}, bob.token) == "router.forbidden"
    assert cluster.rest("GET", "tenants", token=bob.token) == "router.forbidden"


# -- the role of who runs the cluster --------------------------------------------------------------------------------


def test_operator_cannot_read_blobs_or_act_as_tenant(cluster, alice):
    data = b"weights of alice's"
    head = {"Authorization": f"Bearer {alice.token}", "Content-Type": "application/octet-stream"}
    put = urllib.request.Request(f"{cluster.url}/api/v1/blobs", data, head, method="POST")
    urllib.request.urlopen(put, timeout=20).close()
    operator = cluster.rest("POST", "tenants/admin/tokens", {"role": "operator"})["secret"]
    for tenant in ("", "?tenant=alice", "?tenant=admin"):
        assert cluster.rest("GET", f"blobs/{name_of(data)}{tenant}", token=operator) == "router.forbidden"
    for tenant in ("alice", "bob"):
        assert cluster.rest("POST", "credentials", {"tenant": tenant}, operator) == "router.forbidden"
        job = {"module": name_of(data), "tenant": tenant}
        assert cluster.rest("POST", "tasks", job, operator) == "router.forbidden"
    assert cluster.rest("POST", "credentials", {"role": "admin"}, operator) == "router.forbidden"
    assert cluster.rest("POST", "tenants/alice/tokens", {}, operator) == "router.forbidden"
    with pytest.raises(urllib.error.HTTPError) as error:
        head["Authorization"] = f"Bearer {operator}"
        urllib.request.urlopen(
            urllib.request.Request(f"{cluster.url}/api/v1/blobs", data, head, method="POST"), timeout=20
        )
    with error.value:
        assert error.value.code == 403
    assert cluster.rest("GET", "nodes", token=operator)["nodes"], "an operator must still be able to run the cluster"


# -- cancelled, and still running ----------------------------------------------------------------------------------------


def one_long_operator(rows):
    """A program with one library call that cannot be interrupted: the exponential of a matrix."""
    matrix = View(DType.F32, (rows, rows), (rows, 1))
    attrs = (("args", (OperandRef(0),)), ("name", "aten.linalg_matrix_exp.default"))
    forms = (
        Form("alloc", (Operand(Role.OUT, View(DType.U8, (matrix.end,), (1,))),)),
        Form("fill", (Operand(Role.OUT, matrix),), (), (("value", 1.0),)),
        Form("extern", (Operand(Role.IN, matrix), Operand(Role.OUT, matrix)), (), attrs),
    )
    body = (Instruction(0, (0,)), Instruction(1, (0,)), Instruction(0, (1,)), Instruction(2, (0, 1)))
    return encode_program(Program(forms, body))


def test_cancel_with_running_operator_reports_it_until_end(cluster, bob):
    opened = bob.open()
    channel, _ = enter(opened)
    program = one_long_operator(1400)
    executor = psutil.Process(cluster.processes["x"].pid)
    before = executor.cpu_times().user
    channel.send(Kind.DEFINE, program)
    channel.send(Kind.RUN, pack_run(digest(program), [1, 2], b"", []))
    cluster.wait(lambda: executor.cpu_times().user > before + 0.2)  # only the operator uses this time
    task = cluster.rest("POST", f"tasks/{opened.session_id}/cancel", {"reason": "enough"}, bob.token)["task"]
    assert task["state"] == "cancelled"
    assert task["reason"].startswith("enough; one operator still runs on executor "), task["reason"]
    assert "it holds the device, and is billed, until it ends" in task["reason"]

    def now():
        return cluster.rest("GET", f"tasks/{opened.session_id}", token=bob.token)

    cluster.wait(lambda: now()["task"]["reason"] == "enough")
    assert now()["story"][-1]["reason"].startswith("its last operator ended")
    channel.close()


# -- what a tenant may have at a time ----------------------------------------------------------------------------------


@contextlib.contextmanager
def send_request(cluster, method, path, token, body=None):
    """The open response of a request. A body may be bytes or a value for JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc, timeout=PATIENCE_S)
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request(method, f"/api/v1/{path}", data, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def response_of(cluster, method, path, token, body=None):
    """(status, JSON, seconds until a retry) of a response."""
    with send_request(cluster, method, path, token, body) as answer:
        assert answer.headers.get_content_type() == "application/json", "the response must not be an endless stream"
        return answer.status, json.loads(answer.read() or b"null"), answer.headers.get("Retry-After")


def blob(cluster, tenant, data):
    status, answer, _ = response_of(cluster, "POST", "blobs", tenant.token, data)
    assert status == 201, answer
    return answer["digest"]


def waiting_job(module):
    """A job that keeps waiting: no node is in its group."""
    return {"module": module, "node_groups": ["nowhere"]}


def hostile_module(programs, forms=0):
    """A valid module that takes long to check: many programs at the limits, each with many different forms."""
    takes = [View(DType.U8, (nbytes + 1,), (1,)) for nbytes in range(forms)]
    body = tuple([Instruction(i, (i,)) for i in range(forms)])
    program = Program(tuple([Form("alloc", (Operand(Role.OUT, view),)) for view in takes]), body)
    return encode_module(Module((encode_program(program),) * programs, (), (), (), ()))


def test_body_beyond_route_limit_is_refused(cluster, alice, bob):
    status, answer, _ = response_of(cluster, "POST", "tasks", bob.token, b" " * (2 << 20))
    assert (status, answer["code"]) == (413, "router.too_large") and "1048576" in answer["message"]
    for body in (b"[" * 500_000, json.dumps({"module": "x", "inputs": [{}] * 200_000}).encode()):
        assert response_of(cluster, "POST", "tasks", bob.token, body)[0] in (400, 422)
    assert response_of(cluster, "GET", "tasks", alice.token)[0] == 200


def test_event_streams_of_tenant_are_limited(cluster, alice, bob):
    with contextlib.ExitStack() as held:
        for _ in range(3):
            assert held.enter_context(send_request(cluster, "GET", "events", bob.token)).status == 200
        status, answer, _ = response_of(cluster, "GET", "events", bob.token)
        assert (status, answer["code"]) == (429, "router.limit")
        assert "3 event streams" in answer["message"] and "WOOLY_ROUTER_TENANT_STREAMS" in answer["message"]
        for token in (alice.token, cluster.token):
            assert held.enter_context(send_request(cluster, "GET", "events", token)).status == 200


def test_session_limit_holds_for_concurrent_opens(cluster, alice, bob):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: _opened(bob), range(8)))
    opened = [a for a in answers if not isinstance(a, str)]
    refused = [a for a in answers if isinstance(a, str)]
    assert 1 <= len(opened) <= 5 and all("WOOLY_ROUTER_TENANT_SESSIONS" in why for why in refused), answers
    hers = alice.open()
    assert alice.close(hers).closed
    for one in opened:
        assert bob.close(one).closed
    assert bob.close(bob.open()).closed  # closed sessions do not count


def _opened(tenant):
    try:
        return tenant.open()
    except Exception as e:
        assert e.code == "router.limit"
        return str(e)


def test_waiting_jobs_and_submission_rate_are_limited(cluster, alice, bob):
    module, answers, until = blob(cluster, bob, EMPTY), [], time.monotonic() + 60

    def refusals(limit):
        return [(a["code"], after) for status, a, after in answers if status == 429 and limit in a["message"]]

    def submit(_):
        while time.monotonic() < until:  # a busy machine needs many to exceed the rate
            answers.append(response_of(cluster, "POST", "tasks", bob.token, waiting_job(module)))
            if refusals("WOOLY_ROUTER_TENANT_JOBS") and refusals("WOOLY_ROUTER_TENANT_OPENS"):
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(submit, range(8)))
    made = [a["task"]["task_id"] for status, a, _ in answers if status == 201]
    assert 1 <= len(made) <= 10
    assert {status for status, _, _ in answers} == {201, 429}
    assert {code for code, _ in refusals("WOOLY_ROUTER_TENANT_JOBS")} == {"router.limit"}
    assert set(refusals("WOOLY_ROUTER_TENANT_OPENS")) == {("router.limit", "1")}
    hers = blob(cluster, alice, EMPTY)
    assert response_of(cluster, "POST", "tasks", alice.token, waiting_job(hers))[0] == 201
    for task in made:
        assert response_of(cluster, "POST", f"tasks/{task}/cancel", bob.token, {})[0] == 200


def test_slow_module_check_delays_no_other_tenant(cluster, alice, bob):
    hers = blob(cluster, alice, EMPTY)
    for size in (1000, 2000, 3000):  # on a busy machine, the other requests may take longer than a check
        job = f"job-of-bob-{size}"
        request = {"job_id": job, **waiting_job(blob(cluster, bob, hostile_module(size, 40)))}
        with ThreadPoolExecutor(1) as pool:
            submitting = pool.submit(response_of, cluster, "POST", "tasks", bob.token, request)
            for path in ("me", "tasks", "overview"):
                assert response_of(cluster, "GET", path, alice.token)[0] == 200
            served_meanwhile = not submitting.done()
            status, answer, _ = response_of(cluster, "POST", "tasks", alice.token, waiting_job(hers))
            assert status == 201, answer
            assert alice.close(alice.open()).closed
            assert response_of(cluster, "POST", f"tasks/{answer['task']['task_id']}/cancel", alice.token, {})[0] == 200
            status, answer, _ = submitting.result()
        assert status == 201, answer
        assert response_of(cluster, "POST", f"tasks/{job}/cancel", bob.token, {})[0] == 200
        if served_meanwhile:
            break
    assert served_meanwhile
    for token, shown in ((cluster.token, True), (alice.token, False)):
        with http_text(cluster.url + "/metrics", token) as text:
            assert ('wooly_module_check_seconds_total{tenant="bob"}' in text) is shown


def test_module_beyond_limits_fails_with_limit_and_remedy(cluster, bob):
    module = blob(cluster, bob, hostile_module(MAX_NODES + 1))
    status, answer, _ = response_of(cluster, "POST", "tasks", bob.token, {"module": module})
    assert status == 201 and answer["task"]["state"] == "failed"
    assert str(MAX_NODES) in answer["task"]["reason"] and "split the module" in answer["task"]["reason"]


def test_blob_quota_holds_for_concurrent_uploads(cluster, alice, carol):
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda i: response_of(cluster, "POST", "blobs", carol.token, bytes([i]) * (3 << 20)), range(8))
        )
    kept = [a["nbytes"] for status, a, _ in answers if status == 201]
    refused = {(status, a["code"]) for status, a, _ in answers if status != 201}
    assert 1 <= len(kept) <= 4 and refused == {(429, "router.limit")}
    assert blob(cluster, alice, b"hers")


@contextlib.contextmanager
def http_text(url, token):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)
    try:
        connection.request("GET", parts.path, headers={"Authorization": f"Bearer {token}"})
        yield connection.getresponse().read().decode()
    finally:
        connection.close()
