"""Tests of the decoders: turns of tenants, pauses while the device works, cancellation, and use by the device loop."""

import threading
import time
from concurrent.futures import Future

import pytest
from wooly_executor.decoding import HIGHER_WAIT, SLICE_NS, Decoders, Decoding
from wooly_executor.errors import DecodingCancelledError, DecodingTooLongError
from wooly_executor.flow import core
from wooly_executor.launching import MANY_BUFFERS
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Source, encode_source
from wooly_wis.frames import Kind
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role

WAIT_S = 60


@pytest.fixture
def make_decoders():
    made = []

    def make(**limits):
        made.append(Decoders(**limits))
        made[-1].activity.resting = True
        return made[-1]

    yield make
    for decoders in made:
        decoders.stop()


def submit(decoders, work, tenant="a", priority=2, nbytes=1):
    found = Future()

    def done(result, error, core_ns):
        if error is None:
            found.set_result((result, core_ns))
        else:
            found.set_exception(error)

    decoding = Decoding(tenant, priority, nbytes, work, done)
    decoders.submit(decoding)
    return found, decoding


def spin(until):
    while not until():
        pause()
    return "done"


def test_decoding_finished_reports_result_and_core_time(make_decoders):
    decoders = make_decoders()

    def work():
        begun = time.thread_time()  # CPU time of the decoder's thread
        return spin(lambda: time.thread_time() - begun > 0.01)

    result, core_ns = submit(decoders, work)[0].result(WAIT_S)
    assert result == "done" and core_ns >= 5_000_000


def test_decoding_failed_reports_the_error(make_decoders):
    def work():
        raise MemoryError("none left")

    found, _ = submit(make_decoders(), work)
    with pytest.raises(MemoryError):
        found.result(WAIT_S)


def test_decoding_over_the_time_limit_is_refused(make_decoders):
    found, _ = submit(make_decoders(limit_s=0.05), lambda: spin(lambda: False))
    with pytest.raises(DecodingTooLongError, match=r"more than 0\.05 s of a core"):
        found.result(WAIT_S)


def test_decoding_cancelled_ends(make_decoders):
    begun = threading.Event()
    found, decoding = submit(make_decoders(), lambda: spin(lambda: begun.set()))
    assert begun.wait(WAIT_S)
    decoding.cancelled = True
    with pytest.raises(DecodingCancelledError):
        found.result(WAIT_S)


def test_decoders_tenants_take_turns_while_one_has_a_long_queue(make_decoders):
    decoders, order = make_decoders(), []
    blocked = threading.Event()
    first, _ = submit(decoders, lambda: spin(blocked.is_set), "bob")
    later = [submit(decoders, lambda k=k: order.append(("bob", k)), "bob")[0] for k in range(5)]
    others = [submit(decoders, lambda t=t: order.append((t, 0)), t)[0] for t in ("alice", "carol")]
    for found in others:
        found.result(WAIT_S)  # bob's first decoding is still in progress
    assert not first.done() and {t for t, _ in order} == {"alice", "carol"}
    blocked.set()
    for found in later:
        found.result(WAIT_S)
    assert [k for t, k in order if t == "bob"] == [0, 1, 2, 3, 4]


def test_decoders_two_large_decodings_do_not_block_small_ones(make_decoders):
    decoders = make_decoders()
    stop = threading.Event()
    large = [submit(decoders, lambda: spin(stop.is_set), f"t{k}", nbytes=1 << 20)[0] for k in range(6)]
    assert submit(decoders, lambda: "small", "alice")[0].result(WAIT_S)[0] == "small"
    stop.set()
    assert [f.result(WAIT_S)[0] for f in large] == ["done"] * 6


@pytest.mark.parametrize(("priority", "slices"), [(2, 1), (4, HIGHER_WAIT)])
def test_decoder_while_the_device_works_pauses_after_each_slice(make_decoders, monkeypatch, priority, slices):
    decoders = make_decoders()
    decoders.activity.resting, decoders.activity.priority = False, 2
    decoding = Decoding("a", priority, 1, lambda: None, lambda *_: None)
    begun = time.perf_counter_ns()
    assert decoders.slice_over(decoding, time.thread_time_ns(), SLICE_NS)
    assert time.perf_counter_ns() - begun >= slices * SLICE_NS
    decoders.activity.resting = True
    assert not decoders.slice_over(decoding, time.thread_time_ns(), SLICE_NS)


# -- in the device loop ----------------------------------------------------------------------------------------------


def large(wis, first=0, forms=300):
    """A definition that is too large for the device's thread to decode itself."""
    found = [Form("alloc", (Operand(Role.OUT, wis.at(DType.U8, 1 << 20)),))]
    body = [Instruction(0, (0,)), Instruction(0, (1,))]
    for k in range(forms):
        v = wis.at(DType.F32, first + k + 1)
        attrs = (("args", (OperandRef(0), OperandRef(1))), ("kwargs", ()), ("name", "aten.add_.Tensor"))
        found.append(Form("extern", (Operand(Role.INOUT, v), Operand(Role.IN, v)), (), attrs))
        body.append(Instruction(k + 1, (0, 1)))
    return encode_program(Program(tuple(found), tuple(body)))


class Held:
    """Decoders that keep submitted decodings until `go`."""

    def __init__(self, device, monkeypatch):
        self.waiting, self._submit = [], device.loop.decoders.submit
        monkeypatch.setattr(device.loop.decoders, "submit", self.waiting.append)

    def go(self):
        for decoding in self.waiting:
            self._submit(decoding)
        self.waiting.clear()


def test_loop_other_sessions_run_during_a_decoding(device, wis, monkeypatch):
    a, b = device.open("a"), device.open("b")
    b.make(1, 1.0, 2.0)
    assert b.floats(1, 2) == [1.0, 2.0]
    held = Held(device, monkeypatch)
    name = a.define(large(wis))
    a.start(name, [1, 2], reply=True)
    while not held.waiting:
        time.sleep(0.001)
    for _ in range(20):
        assert b.floats(1, 2) == [1.0, 2.0]  # a's definition is not decoded, so a's run waits
    held.go()
    assert a.answer()["outputs"] == []
    assert a.floats(1, 1) == [0.0]


def test_loop_definition_is_decoded_during_earlier_runs(device, wis, monkeypatch):
    a, _ = device.open("a"), device.open("b")
    a.make(1, 3.0)
    assert a.floats(1, 1) == [3.0]
    device.steer("a", suspended=True)
    held = Held(device, monkeypatch)
    a.run(wis.body(), {})  # the run waits, because the session is suspended
    raw = large(wis)
    a.define(raw)
    a.channel.send(Kind.SYNC)
    held.go()
    device.steer("a", suspended=False)
    deadline = time.monotonic() + WAIT_S
    while device.call(lambda: device.loop.sessions["a"].programs.get(digest(raw)) is None):
        held.go()
        assert time.monotonic() < deadline
    assert a.answer() == {}


def test_loop_session_closed_during_its_decoding_leaves_nothing(device, wis, monkeypatch):
    a, b = device.open("a"), device.open("b")
    held = Held(device, monkeypatch)
    a.define(large(wis))
    while not held.waiting:
        time.sleep(0.001)
    (decoding,) = held.waiting
    device.call(lambda: device.loop.sessions.close("a", "its time is over"))
    assert decoding.cancelled
    held.go()
    assert b.sync() == {} and device.loop.store.held == 0


def test_loop_held_session_decodes_nothing_until_the_hold_ends(device, wis):
    a, _ = device.open("a"), device.open("b")
    device.call(lambda: device.loop.sessions.suspend("a", None, "over its budget"))
    raw = large(wis)
    a.define(raw)
    a.channel.send(Kind.SYNC)
    with pytest.raises(wis.error, match="over its budget"):
        a.answer()
    assert device.call(lambda: device.loop.sessions["a"].decoding) is None
    device.call(lambda: device.loop.sessions.suspend("a", None, ""))
    assert a.sync() == {}
    assert device.call(lambda: device.loop.sessions["a"].programs.get(digest(raw)) is not None)


def test_loop_known_or_small_definition_is_decoded_at_once(device, wis, monkeypatch):
    a = device.open("a")
    held = Held(device, monkeypatch)
    a.make(1, 1.0)
    assert a.sync() == {}  # the only session, and a small definition
    held.go()
    raw = large(wis)
    a.define(raw)
    while not held.waiting:
        time.sleep(0.001)
    held.go()
    assert a.sync() == {}
    b = device.open("b")
    b.define(raw)
    assert b.sync() == {} and not held.waiting


def test_loop_decoding_is_billed_to_its_session(device, wis):
    a, _ = device.open("a"), device.open("b")
    device.call(device.loop.take_usage)
    a.define(large(wis))
    a.channel.send(Kind.SOURCE, encode_source(Source("ttir", "é" * 100_000)))
    assert a.sync() == {}
    (taken,) = [t for t in device.call(device.loop.take_usage) if t.session_id == "a"]
    assert taken.core_ns > 1_000_000 and taken.gpu_ns == 0


def test_loop_invalid_definition_reports_cause_and_instruction(device, wis):
    a, _ = device.open("a"), device.open("b")
    v = wis.at(DType.F32, 2)
    bad = wis.body().alloc("x", 8).alloc("y", 8).call("aten.neg.default", ("in", "x", v), ("out", "y", v), conj=(1,))
    for raw, code, instruction in ((b"garbage" * 3000, "wis.decode", None), (bad.raw, "wis.verify", 2)):
        a.define(raw)
        with pytest.raises(wis.error) as caught:
            a.sync()
        assert (caught.value.code, caught.value.instruction) == (code, instruction)


def test_loop_many_small_frames_leave_other_sessions_their_turn(device, wis, monkeypatch):
    monkeypatch.setattr(core, "TURN", 4)
    a, b = device.open("a"), device.open("b")
    a.make(1, 5.0)
    for _ in range(300):
        a.channel.send(Kind.STATS)
    assert b.sync() == {}
    for _ in range(300):
        assert a.answer()["programs"] == 1
    assert a.floats(1, 1) == [5.0]


def test_loop_run_with_many_buffers_is_billed_for_the_lookups(device, wis, monkeypatch):
    """Looking up thousands of buffers takes time of the device's thread, so it must be billed."""
    runs = device.loop.runs

    def slow(method):
        def slowly(*args):
            time.sleep(0.05)
            return method(*args)

        return slowly

    a, count = device.open("a"), MANY_BUFFERS // 8
    body = wis.body()
    for k in range(count):
        body.alloc(f"x{k}", 4)
    a.run(body, range(count))
    a.sync()
    monkeypatch.setattr(runs, "begin", slow(runs.begin))
    monkeypatch.setattr(runs, "finish", slow(runs.finish))
    device.call(device.loop.take_usage)
    a.run(body, range(count, 2 * count))
    a.sync()
    (taken,) = device.call(device.loop.take_usage)
    assert taken.gpu_ns > 90_000_000
    a.start(b"?" * 32, range(count))  # a run that fails has also used the time
    with pytest.raises(wis.error):
        a.sync()
    (taken,) = device.call(device.loop.take_usage)
    assert taken.gpu_ns > 40_000_000
