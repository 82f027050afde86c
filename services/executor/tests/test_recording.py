"""Measuring of a session's steps while its client profiles, and the opcode `sleep`."""

import pytest
from wooly_executor.estimates import Estimate, instruction_ns
from wooly_executor.recording import RECORDS_AT_ONCE, RECORDS_KEPT, Recording
from wooly_executor.runtime.protocol import Rates
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError
from wooly_wis.frames import (
    PROFILE_BEGIN,
    PROFILE_END,
    PROFILE_HEAD,
    PROFILE_TAKE,
    WHOLE_FRAME,
    Kind,
    unpack_profile,
    unpack_records,
)
from wooly_wis.limits import MAX_SLEEP_NS
from wooly_wis.program import Form, Instruction, Program

from services.executor.tests.fake_gpu import MARK_NS, FakeDriver, gpu_runtime


def ask(client, what):
    client.channel.send(Kind.PROFILE, PROFILE_HEAD.pack(what))
    frame = client.channel.recv(30)
    assert frame.kind == Kind.RECORDS
    return unpack_records(frame.payload)


@pytest.fixture
def sums(wis):
    v = wis.at(DType.F32, 4)
    body = wis.body().alloc("t", 16).call("aten.add.Tensor", ("in", "x", v), ("in", "x", v), ("out", "t", v))
    body = body.alloc("y", 16).call("aten.mul.Tensor", ("in", "t", v), ("in", "x", v), ("out", "y", v))
    return body.free("t")


def test_recording_has_each_computing_instruction_once_in_order(device, sums):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    for i in range(30):  # also hot
        a.run(sums, {"x": 1, "y": 10 + i, "t": 60 + i})
    assert ask(a, PROFILE_BEGIN)[3] == []
    for i in range(3):
        a.run(sums, {"x": 1, "y": 100 + i, "t": 200 + i})
    clock, dropped, left, records = ask(a, PROFILE_TAKE)
    assert (dropped, left) == (0, 0) and [(r.instruction, r.instructions) for r in records] == [(1, 1), (3, 1)] * 3
    begins = [r.begin_ns for r in records]
    assert begins == sorted(begins) and begins[-1] <= clock and all(r.ns > 0 for r in records)
    assert a.floats(100, 4) == a.floats(10, 4) == [2, 8, 18, 32]
    kinds = [(r.instruction, r.instructions) for r in ask(a, PROFILE_TAKE)[3]]
    assert kinds == [(WHOLE_FRAME, 0)] * 2  # the two reads
    ask(a, PROFILE_END)
    a.run(sums, {"x": 1, "y": 300, "t": 301})
    assert ask(a, PROFILE_TAKE)[3] == [] and device.call(lambda: device.loop.sessions["a"].recording) is None


def test_recording_failed_instruction_ends_its_run(device, wis, sums):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    ask(a, PROFILE_BEGIN)
    v, i = wis.at(DType.F32, 4), wis.at(DType.I64, 1)
    body = wis.body().alloc("y", 4).alloc("z", 16)
    body = body.call(
        "aten.index_select.default",
        ("in", "x", v),
        ("in", "i", i),
        ("out", "y", wis.at(DType.F32, 1)),
        args=(wis.ref(0), 0, wis.ref(1)),
    ).call("aten.add.Tensor", ("in", "x", v), ("in", "x", v), ("out", "z", v))
    a.run(wis.body().alloc("i", 8), {"i": 2})
    a.write(2, (99).to_bytes(8, "little"))
    a.run(body, {"y": 3, "z": 4, "x": 1, "i": 2})
    with pytest.raises(wis.error, match="index out of range"):
        a.sync()
    records = [r for r in ask(a, PROFILE_TAKE)[3] if r.instruction != WHOLE_FRAME]
    assert [r.instruction for r in records] == [2]
    a.run(sums, {"x": 1, "y": 10, "t": 11})
    assert a.floats(10, 4) == [2, 8, 18, 32]


def test_recording_other_sessions_are_not_measured(device, sums):
    a, b = device.open("a"), device.open("b")
    for client in (a, b):
        client.make(1, 1, 2, 3, 4)
    ask(a, PROFILE_BEGIN)
    b.run(sums, {"x": 1, "y": 2, "t": 3})
    b.sync()
    assert ask(a, PROFILE_TAKE)[3] == [] and ask(b, PROFILE_TAKE)[3] == []


def test_recording_full_counts_dropped_records_and_answers_in_parts():
    recording = Recording()
    for k in range(RECORDS_KEPT + 5):
        recording.add(7, k, 1, k, 1)
    assert recording.nbytes == 32 * RECORDS_KEPT
    _, dropped, left, records = unpack_records(recording.take())
    assert (dropped, left, len(records)) == (5, RECORDS_KEPT - RECORDS_AT_ONCE, RECORDS_AT_ONCE)
    taken = [r.instruction for r in records]
    while left:
        _, dropped, left, records = unpack_records(recording.take())
        assert dropped == 0
        taken += [r.instruction for r in records]
    assert taken == list(range(RECORDS_KEPT)) and recording.nbytes == 0


def test_unpack_profile_refuses_malformed_frames():
    for payload in (b"", bytes(8), PROFILE_HEAD.pack(9)):
        with pytest.raises(DecodeError):
            unpack_profile(payload)
    with pytest.raises(DecodeError):
        unpack_records(bytes(25))


def sleep_form(ns):
    return Form("sleep", (), (), (("ns", ns),))


def test_sleep_occupies_device_and_is_billed(device, wis):
    a = device.open("a")
    a.run(wis.body().add(sleep_form(5_000_000)), {})
    a.sync()
    (usage,) = [u for u in device.call(device.loop.take_usage) if u.session_id == "a"]
    assert usage.gpu_ns >= 5_000_000 and usage.core_ns >= 5_000_000


@pytest.mark.parametrize("ns", [0, -1, MAX_SLEEP_NS + 1, 1.5, True])
def test_sleep_of_unbounded_time_is_refused(device, wis, ns):
    a = device.open("a")
    a.run(wis.body().add(sleep_form(ns)), {})
    with pytest.raises(wis.error, match="'ns' must be an integer"):
        a.sync()


def test_sleep_pieces_are_kernels_of_their_own():
    body = tuple(Instruction(0, ()) for _ in range(3))
    program = Program((sleep_form(MAX_SLEEP_NS),), body)
    rates = Rates(1000, 1000, 1000)
    cut = Estimate(program, [instruction_ns(f, rates) for f in program.forms]).cut
    assert cut.edges == (1, 2, 3) and min(cut.kernels) >= MAX_SLEEP_NS


def test_recording_on_gpu_takes_times_of_the_streams_events(make_device, wis, sums):
    driver = FakeDriver()
    device = make_device(runtime=gpu_runtime(driver))
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    for i in range(30):
        a.run(sums, {"x": 1, "y": 10 + i, "t": 60 + i})
    ask(a, PROFILE_BEGIN)
    a.run(sums, {"x": 1, "y": 100, "t": 200})
    a.run(wis.body().add(sleep_form(7_000_000)), {})
    records = ask(a, PROFILE_TAKE)[3]
    assert [r.instruction for r in records] == [1, 3, 0]
    assert [r.ns for r in records[:2]] == [MARK_NS] * 2 and records[2].ns == 7_000_000 + MARK_NS
    assert a.floats(100, 4) == [2, 8, 18, 32]
