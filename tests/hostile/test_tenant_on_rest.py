"""The attacker is a tenant with its own API token, on REST."""

import time
import urllib.error
import urllib.request

import pytest
from wooly_bus.blobs import name_of
from wooly_testkit.cluster import enter
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_run
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

pytestmark = pytest.mark.connected


# -- class and weight ------------------------------------------------------------------------------------------------


def test_tenant_gets_no_job_nor_class_above_its_ceilings_and_does_not_raise_them(cluster, bob):
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


def test_operator_reads_no_tenants_blobs_and_is_no_tenant(cluster, alice):
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
    assert cluster.rest("GET", "nodes", token=operator)["nodes"], "what runs the cluster stays open to it"


# -- cancelled, and still running ----------------------------------------------------------------------------------------


def one_long_operator(rows):
    """A program that is one call of the library, which nothing interrupts: the exponential of a matrix."""
    matrix = View(DType.F32, (rows, rows), (rows, 1))
    attrs = (("args", (OperandRef(0),)), ("name", "aten.linalg_matrix_exp.default"))
    forms = (
        Form("alloc", (Operand(Role.OUT, View(DType.U8, (matrix.end,), (1,))),)),
        Form("fill", (Operand(Role.OUT, matrix),), (), (("value", 1.0),)),
        Form("extern", (Operand(Role.IN, matrix), Operand(Role.OUT, matrix)), (), attrs),
    )
    body = (Instruction(0, (0,)), Instruction(1, (0,)), Instruction(0, (1,)), Instruction(2, (0, 1)))
    return encode_program(Program(forms, body))


def test_cancel_of_a_session_whose_operator_still_runs_says_so_until_it_has_ended(cluster, bob):
    opened = bob.open()
    channel, _ = enter(opened)
    program = one_long_operator(1800)
    channel.send(Kind.DEFINE, program)
    channel.send(Kind.RUN, pack_run(digest(program), [1, 2], b"", []))
    time.sleep(0.5)
    task = cluster.rest("POST", f"tasks/{opened.session_id}/cancel", {"reason": "enough"}, bob.token)["task"]
    assert task["state"] == "cancelled"
    assert task["reason"].startswith("enough; one operator still runs on executor "), task["reason"]
    assert "it holds the device, and is billed, until it ends" in task["reason"]

    def now():
        return cluster.rest("GET", f"tasks/{opened.session_id}", token=bob.token)

    cluster.wait(lambda: now()["task"]["reason"] == "enough")
    assert now()["story"][-1]["reason"].startswith("its last operator ended")
    channel.close()
