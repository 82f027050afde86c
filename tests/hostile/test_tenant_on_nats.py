"""The attacker is a tenant with its own credentials, on NATS."""

import json
import threading

import pytest
from wooly_bus import subjects
from wooly_bus.errors import RefusedError
from wooly_wis.messages import ErrorReply, Message, TasksReply, TasksRequest

pytestmark = pytest.mark.connected


def sent_raw(tenant, subject, data):
    """The code with which a request that is no message of ours is refused."""

    class Raw(Message):
        def model_dump_json(self, **_):
            return data

    with pytest.raises(RefusedError) as refused:
        tenant.ask(subject, Raw(), ErrorReply)
    return refused.value.code


@pytest.mark.parametrize(
    ("subject", "fields"),
    [
        (subjects.ROUTER_JOB_SUBMIT, {"job_id": "a" * 8, "module": "0" * 64, "inputs": [{}] * 150_000}),
        (subjects.ROUTER_SESSION_OPEN, {"node_groups": [1] * 40_000}),
        (subjects.ROUTER_SESSION_OPEN, {"model": "x" * 900_000}),
        (subjects.ROUTER_TASK_LIST, {str(i): 1 for i in range(10_000)}),
        (subjects.ROUTER_TRACE_ADD, {"task_id": "a", "spans": [{}] * 200_000}),
    ],
)
def test_message_with_a_great_many_mistakes_is_refused_at_the_first(alice, bob, subject, fields):
    assert sent_raw(bob, subject, json.dumps(fields)) == "bus.envelope"
    assert alice.ask(subjects.ROUTER_TASK_LIST, TasksRequest(limit=1), TasksReply).tasks is not None


def test_flood_of_requests_of_one_tenant_leaves_room_for_another_s(alice, bob):
    stop, asked, codes = threading.Event(), [0] * 48, set()

    def flood(number):
        while not stop.is_set():
            try:
                bob.ask(subjects.ROUTER_TASK_LIST, TasksRequest(limit=200), TasksReply)
            except RefusedError as e:
                codes.add(e.code)
            asked[number] += 1

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    try:
        while sum(asked) < 50:
            stop.wait(0.01)
        before = sum(asked)
        opened = alice.open()
        assert alice.ask(subjects.ROUTER_TASK_LIST, TasksRequest(limit=1), TasksReply).tasks
        assert alice.close(opened).closed
        while sum(asked) == before:  # the flood went on meanwhile, and goes on
            stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert codes <= {"router.limit"}
