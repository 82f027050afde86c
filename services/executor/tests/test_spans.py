"""Tests of a session's spans: which spans there are, and that their number does not depend on how much is run."""

import itertools
import time

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags
from wooly_bus.channel.token import SharedPass
from wooly_bus.tracing import SpanQueue, provider_of
from wooly_executor import spans
from wooly_executor.memory.swap import Policy
from wooly_executor.spans import spans_of
from wooly_executor.vram import SwapSettings
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType

HOSTED = SpanContext(0xAB, 0xCD, is_remote=True, trace_flags=TraceFlags(1))


@pytest.fixture
def recorded(monkeypatch):
    queue = SpanQueue(10_000)
    provider = provider_of("executor", queue, None)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield queue
    provider.shutdown()


@pytest.fixture
def add(wis):
    v = wis.at(DType.F32, 4)
    return wis.body().alloc("y", 16).call("aten.add.Tensor", ("in", "x", v), ("in", "x", v), ("out", "y", v))


@pytest.fixture
def traced(device, wis, recorded):
    """`traced("name")`: a client whose session the control plane opened within a trace."""

    def make(name, device=device, hosted=HOSTED):
        device.call(lambda: device.loop.sessions.open(name, SharedPass(f"token of {name}"), None, hosted=hosted))
        device.clients.append(wis.client(device.endpoint, name, f"token of {name}"))
        return device.clients[-1]

    return make


def taken(queue, name=None):
    found = []
    while len(queue):
        found += queue.take()
    return [s for s in found if name in (None, s.name)]


def test_spans_first_events_and_sums_are_recorded(device, traced, add, recorded):
    a = traced("a")
    a.make(1, 1, 2, 3, 4)
    for i in range(50):
        a.run(add, {"x": 1, "y": 10 + i})
    a.sync()
    device.call(
        lambda: [
            s.spans.sample(s.counters, s.work, time.time_ns() + spans.PERIOD_NS) for s in device.loop.sessions.all()
        ]
    )
    for i in range(5):
        a.run(add, {"x": 1, "y": 100 + i})
    a.sync()
    a.close()
    device.wait_closed("a")
    found = taken(recorded)
    by_name = {n: [s for s in found if s.name == f"executor.{n}"] for n in ("session", "define", "first_run", "runs")}
    (session,) = by_name["session"]
    assert session.trace_id == f"{0xAB:032x}" and session.parent_id == f"{0xCD:016x}" and not session.error
    assert {s.parent_id for s in found} - {session.parent_id} == {session.span_id}
    assert len(by_name["define"]) == len(by_name["first_run"]) == 2  # the program that makes the buffer, and the sum
    assert [s.attributes["programs"] for s in by_name["runs"]] == [51, 5]
    assert session.attributes["total_programs"] == 56 and session.attributes["left_out"] == 0
    assert len(found) == 7 and digest(add.raw).hex()[:16] in {s.attributes["program"] for s in by_name["first_run"]}


def test_spans_first_failure_is_on_the_sessions_span(device, traced, wis, recorded):
    a = traced("a")
    a.start(bytes(32), [], frees=[7])
    with pytest.raises(wis.error):
        a.sync()
    a.close()
    device.wait_closed("a")
    (session,) = taken(recorded, "executor.session")
    assert session.error and session.attributes["error.type"] == "executor.unknown_program"


def test_spans_untraced_session_has_none(device, add, recorded):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    a.run(add, {"x": 1, "y": 2})
    a.sync()
    assert device.call(lambda: [s.spans for s in device.loop.sessions.all()]) == [None] and not taken(recorded)


def test_spans_swapped_session_has_swap_spans(make_device, traced, wis, recorded, tmp_path):
    swap = SwapSettings(Policy(0, 1 << 20, 0), 64 << 20, 64 << 20, tmp_path, 30_000_000_000)
    device = make_device(memory=8 << 20, swap=swap)
    a, b = traced("a", device), traced("b", device)
    for client in (a, b):
        client.run(wis.body().alloc("x", 5 << 20), {"x": 1})
        client.sync()
    assert a.read(1, 4) == bytes(4)
    for client in (a, b):
        client.close()
    found = taken(recorded)
    out, back = [next(s for s in found if s.name == f"executor.swap_{way}") for way in ("out", "in")]
    assert out.attributes["bytes"] == back.attributes["bytes"] == 5 << 20 and out.end_ns <= back.start_ns


def test_spans_number_for_many_programs_is_limited(recorded, monkeypatch):
    monkeypatch.setattr(spans, "SINGLE", 10)
    found = spans_of("a", HOSTED, None)
    for i in range(100):
        name = i.to_bytes(32, "little")
        found.defined(name, 5, time.time_ns())
        found.ran(name, 0, 5, 5, False)
        found.ran(name, 0, 5, 5, False)
        found.swapped("out", time.time_ns(), 5)
    # five programs use up all spans for single events; ten swaps use up theirs
    assert len(taken(recorded)) == 20 and len(found.fresh) == 0 and found.left_out == 95 + 90


def test_spans_period_of_sums_grows(recorded):
    class Ran:
        class work:
            to_json = staticmethod(dict)

        class counters:
            programs = instructions = bytes_in = bytes_out = 0

    now = time.time_ns()
    found = spans_of("a", HOSTED, None)
    for _ in range(24 * 3600):
        now += spans.PERIOD_NS
        Ran.counters.programs += 1000
        found.sample(Ran.counters, Ran.work, now)
    sums = taken(recorded, "executor.runs")
    assert 100 < len(sums) < 300
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(sums))


@pytest.mark.parametrize(
    ("hello", "parent"),
    [
        (f"00-{0xAB:032x}-{0xEF:016x}-01", 0xEF),
        (f"00-{0xAC:032x}-{0xEF:016x}-01", 0xCD),
        ("nonsense", 0xCD),
        (7, 0xCD),
        (None, 0xCD),
        ("00-" + "a" * 5000, 0xCD),
    ],
)
def test_spans_hello_from_another_trace_is_ignored(recorded, hello, parent):
    found = spans_of("a", HOSTED, hello)
    found._span.end()
    (span,) = taken(recorded)
    assert span.trace_id == f"{0xAB:032x}" and span.parent_id == f"{parent:016x}"


def test_spans_hello_without_a_hosted_trace_is_ignored(recorded):
    assert spans_of("a", None, f"00-{0xAB:032x}-{0xEF:016x}-01") is None and not taken(recorded)
