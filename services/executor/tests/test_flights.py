"""Launches in flight on a GPU: what is charged for them, and when the host waits."""

import functools
import itertools
import random
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import Buffer, Buffers
from wooly_executor.runtime.flights import KNOWN, Flight, Flights
from wooly_executor.runtime.prepared import Span
from wooly_testkit.effort import examples
from wooly_testkit.tape import Tape
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType

from services.executor.tests.conftest import RemoteError, known_times
from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime

TIMES = st.integers(0, 10_000_000)


class Clock:
    """A driver whose marks are times."""

    def elapsed_ns(self, marks):
        return [after - before for before, after in itertools.pairwise(marks)]


@given(st.lists(st.tuples(st.integers(0, 3), TIMES, TIMES), max_size=40))
def test_flights_sessions_pay_what_was_measured(launches):
    flights, owners, paid, took = Flights(Clock()), [Buffers() for _ in range(4)], [0] * 4, [0] * 4
    prepared = SimpleNamespace(device_times={})
    for who, known, measured in launches:
        times = flights.charge(owners[who], [known // 2, known - known // 2])
        assert all(t >= 0 for t in times)
        flights.add(
            Flight(prepared, Span(True, 0, (1, 2)), [0, measured // 3, measured], [0, 1, 2], known, owners[who])
        )
        paid[who] += sum(times)
        took[who] += measured
        flights.make_way(5_000_000)
        assert len(flights) <= 1 or sum(f.expected for f in flights._flying) <= 5_000_000
    flights.land()
    assert not len(flights)
    assert [one + owner.owed_ns for one, owner in zip(paid, owners, strict=True)] == took


def test_flights_keep_limited_number_of_device_times():
    flights, prepared = Flights(Clock()), SimpleNamespace(device_times={})
    for k in range(3 * KNOWN):
        flights.measured(prepared, Span(True, 0, (k,)), [0, 7], [0, 7])
        assert flights.known(prepared, Span(True, 0, (k,))).ns == [7] and len(prepared.device_times) <= KNOWN


def test_flights_tell_whether_device_waited_for_host():
    flights, prepared, us = Flights(Clock()), SimpleNamespace(device_times={}), 1000
    # device: 100 us, 300 us, 300 us; host: 100 us, 100 us, 290 us
    marks, enqueued = [0, 100 * us, 400 * us, 700 * us], [5 * us, 105 * us, 205 * us, 495 * us]
    found = flights.measured(prepared, Span(True, 0, (1, 2, 3)), marks, enqueued)
    assert found.ns == [100 * us, 300 * us, 300 * us] and found.host_bound() == [True, False, True]


@pytest.fixture
def gpu(driver):
    return gpu_runtime(driver, hot=2)


@pytest.fixture
def run(gpu):
    t = Tape()
    held = x = t.input(DType.F32, 16)
    for _ in range(6):
        held = t.op("tanh", held)
    program, slots = t.program()
    ready, owner = ProgramStore(gpu).define(encode_program(program)), Buffers()

    def once(ahead_ns):
        owner.clear()
        owner[slots[x.slot]] = Buffer(64, torch.ones(16))
        execution = gpu.begin(ready.prepared, owner, list(range(program.n_slots)), [])
        (ns,) = execution.advance((len(program.body),), ahead_ns)
        assert ns > 0 and execution.ended and execution.outcome.failed_at is None

    return once


def test_flights_known_work_returns_before_it_is_done(gpu, driver, run):
    waited, real = [], driver.elapsed_ns
    driver.elapsed_ns = lambda marks: waited.append(1) or real(marks)
    found = []
    for _ in range(6):
        waited.clear()
        run(1 << 40)
        found.append(bool(waited))
    # the first run of the single steps and the first one of the combined steps are measured at once
    assert found.count(True) == 2 and found[0] and len(gpu.flights)
    gpu.settle()
    assert not len(gpu.flights)


def test_flights_one_launch_is_in_flight_while_the_next_is_prepared(gpu, run):
    for _ in range(8):
        run(1 << 40)
    assert len(gpu.flights) > 2
    for _ in range(3):
        run(1)
        assert len(gpu.flights) == 2  # the launch before, which the device does meanwhile, and this one


def test_flights_all_work_is_done_at_return_unless_caller_allows_otherwise(gpu, run):
    for _ in range(4):
        run(0)
        assert not len(gpu.flights)


# -- violations that are found when a launch has landed ----------------------------------------------------------------

F32, I64 = DType.F32, DType.I64


def tape(write):
    t = Tape()
    write(t)
    program, slots = t.program()
    return encode_program(program), slots


def look(t):
    """A lookup that makes a buffer."""
    t.extern("aten.index_select.default", t.input(F32, 4, 2), 0, t.input(I64, 2), results=[(F32, (2, 2))])


def look_into(t):
    """A lookup whose rows are added to a buffer that exists, after another instruction has written it."""
    w, i, y = t.input(F32, 4, 2), t.input(I64, 2), t.input(F32, 2, 2)
    t.op("add", y, y, into=y)
    (rows,) = t.extern("aten.index_select.default", w, 0, i, results=[(F32, (2, 2))])
    t.op("add", y, rows, into=y)
    t.free(rows)


def step(t):
    t.op("tanh", t.input(F32, 2, 2))


def in_place(t):
    y = t.input(F32, 2, 2)
    t.op("add", y, y, into=y)


def both(t):
    """An instruction that uses nothing of earlier runs, then one that does, then a lookup."""
    w, i, y = t.input(F32, 4, 2), t.input(I64, 2), t.input(F32, 2, 2)
    t.op("tanh", w)
    z = t.op("tanh", y)
    (rows,) = t.extern("aten.index_select.default", w, 0, i, results=[(F32, (2, 2))])
    t.op("add", z, rows)
    t.free(z, rows)


PROGRAMS = [tape(write) for write in (look, look_into, step, in_place, both)]


def history(seed):
    """Random runs and reads of a session; every fourth index is out of range. Ids of buffers are never used again."""
    draw = random.Random(seed)
    ids, live, ops = itertools.count(100), [], []
    for _ in range(60):
        which = draw.randrange(len(PROGRAMS)) if live else 0
        y = draw.choice(live) if live else 0
        kind = draw.randrange(10)
        if kind == 0 and live:
            ops.append(("read", y))
        elif kind == 1:
            ops.append(("sync",))
        else:
            index = 3 if not draw.randrange(4) else 2
            given = [[1, index], [1, index, y], [y], [y], [1, index, y]][which]
            made = [next(ids) for _ in range([1, 1, 1, 0, 4][which])]
            frees = [y] if live and which in (2, 4) and draw.randrange(2) else []
            ops.append(("run", which, given, made, frees))
            live = [b for b in live if b not in frees] + {0: made, 2: made, 4: made[::3]}.get(which, [])
    return [*ops, *[("read", b) for b in live]]


def told(client, ops):
    """What the client of a session is told."""
    names = [client.define(raw) for raw, _ in PROGRAMS]
    client.make(1, *range(8))
    for buffer, index in ((2, (0, 3)), (3, (1, 4))):
        client.make(buffer, 0.0, 0.0, 0.0, 0.0)
        client.write(buffer, struct.pack("<2q", *index))
    client.sync()
    found = []
    for op, *how in ops:
        try:
            if op == "run":
                which, given, made, frees = how
                client.start(names[which], bound(which, given, made), frees=frees)
            elif op == "read":
                found.append(client.floats(how[0], 4))
            else:
                client.sync()
        except RemoteError as e:
            found.append((e.code, e.message, e.instruction))
    return found


def bound(which, given, made):
    """The buffer of each slot: inputs come first in the tape, and results in the order in which they are made."""
    slots = PROGRAMS[which][1]
    tensors = sorted(slots)
    ids = iter([*given, *made])
    at = {slots[name]: next(ids) for name in tensors}
    return [at[k] for k in range(len(at))]


@pytest.mark.parametrize("seed", range(examples(8, 48)))
def test_flights_violations_are_told_as_if_host_had_waited(make_device, seed):
    answers = []
    for known in (lambda prepared, span: None, functools.partial(known_times, None)):
        runtime = gpu_runtime(FakeDriver(), hot=3)
        runtime.flights.known = known
        device = make_device(runtime=runtime)
        client = device.open("s")
        answers.append(told(client, history(seed)))
        client.close()
    waited, in_flight = answers
    assert in_flight == waited
    assert any(isinstance(answer, tuple) for answer in waited)
