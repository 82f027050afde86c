"""Tests of sessions over real channels: isolation, errors, poisoned buffers, freed memory."""

import base64
import struct
import subprocess
import sys

import pytest
from wooly.recorder import PROGRAMS_KEPT as CLIENT_PROGRAMS_KEPT
from wooly_bus.channel import ChannelClosedError
from wooly_executor import programs, session_programs
from wooly_executor.errors import AdmissionError
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_run
from wooly_wis.program import OperandRef, ParamKind, ParamRef

F4 = 16
ONES = struct.pack("<4f", 1, 1, 1, 1)


@pytest.fixture
def pair(device):
    """Two sessions of one device."""
    return device.open("a"), device.open("b")


@pytest.fixture
def v(wis):
    return wis.at(DType.F32, 4)


@pytest.fixture
def double(wis, v):
    """y = x + x, into a new buffer."""
    return wis.body().alloc("y", F4).call("aten.add.Tensor", ("in", "x", v), ("in", "x", v), ("out", "y", v))


@pytest.fixture
def broken(wis, v):
    """A matrix product of vectors: fails in the library, and should have written y."""
    return wis.body().alloc("y", F4).call("aten.mm.default", ("in", "x", v), ("in", "x", v), ("out", "y", v))


def test_sessions_with_equal_buffer_ids_have_separate_data(pair, wis):
    a, b = pair
    a.make(7, 1, 2)
    b.make(7, 3, 4)
    assert a.floats(7, 2) == [1, 2] and b.floats(7, 2) == [3, 4]
    a.start(bytes(32), [], frees=[7])
    with pytest.raises(wis.error, match="not defined"):
        a.sync()
    with pytest.raises(wis.error, match="buffer 7 does not exist"):
        a.read(7, 8)
    assert b.floats(7, 2) == [3, 4]


def test_memory_reused_from_another_session_is_zero(device, wis):
    a = device.open("a")
    a.make(1, *[7.0] * 4096)
    a.sync()
    a.close()
    device.wait_closed("a")
    b = device.open("b")
    b.run(wis.body().alloc("x", 4 * 4096), {"x": 1})
    assert b.read(1, 4 * 4096) == bytes(4 * 4096)


def test_program_of_another_session_is_unknown(pair, wis, double):
    a, b = pair
    a.make(1, 1, 2, 3, 4)
    b.make(1, 1, 2, 3, 4)
    a.run(double, {"x": 1, "y": 2})
    b.start(a.define(double), [2, 1])
    with pytest.raises(wis.error, match="has not defined the program") as caught:
        b.sync()
    assert caught.value.code == "executor.unknown_program"


def test_run_of_refused_program_fails_for_the_reason_of_the_refusal_and_keeps_what_it_reads(device, wis):
    a, v = device.open("a"), wis.at(DType.F32, 4)
    for buffer in (1, 2, 3):
        a.make(buffer, 1, 2, 3, 4)
    body = wis.body().alloc("y", F4).copy("x", v, "y", v)
    body.call("aten.no_such_operator.default", ("in", "x", v), ("out", "y", v)).free("z")
    name = a.define(body)
    with pytest.raises(wis.error, match="allow-list") as first:
        a.sync()
    for z, y in ((2, 4), (3, 5)):
        a.start(name, [{"x": 1, "y": y, "z": z}[slot] for slot in body.names])
        with pytest.raises(wis.error) as again:
            a.sync()
        assert (again.value.code, str(again.value)) == (first.value.code, str(first.value))
        with pytest.raises(wis.error, match="allow-list"):
            a.read(y, F4)
        with pytest.raises(wis.error, match=f"buffer {z} does not exist"):
            a.read(z, F4)
    assert a.floats(1, 4) == [1, 2, 3, 4]


FAULTS = {
    "unknown-buffer": ("executor.binding", "buffer 99 does not exist"),
    "undefined-program": ("executor.unknown_program", "has not defined"),
    "too-few-bindings": ("executor.binding", "the run has 1 bindings, the program has 2 slots"),
    "twice-bound": ("executor.binding", "binds one buffer to two slots"),
    "params": ("executor.binding", "the run has 1 param words, the program needs 0"),
    "too-small": ("executor.binding", "has 8 bytes, the program accesses 16 bytes"),
    "double-alloc": ("executor.binding", "buffer 1 already exists"),
    "garbage-program": ("wis.decode", "not a WIS program"),
    "unlawful-program": ("wis.verify", "use-after-free"),
    "unknown-size-again": ("wis.verify", "unknown-size-once"),
    "argument-without-value": ("wis.verify", "argument-has-value"),
    "foreign-operator": ("wis.verify", "allow-list"),
    "garbage-run": ("wis.decode", "shorter than its header"),
    "counts-of-run": ("wis.decode", "the limits are 262144, 262144 and 65536"),
    "read-of-unknown": ("executor.binding", "buffer 99 does not exist"),
    "read-beyond": ("executor.binding", "bytes 8 to 24 are out of bounds: buffer 1"),
    "read-of-garbage": ("wis.decode", "READ frame has"),
    "write-to-unknown": ("executor.binding", "buffer 99 does not exist"),
    "write-beyond": ("executor.binding", "bytes 12 to 28 are out of bounds: buffer 1"),
    "quota": ("executor.out_of_memory", "CUDA out of memory"),
    "transient-quota": ("executor.out_of_memory", "CUDA out of memory"),
    "operator": ("executor.operation", "must be a matrix|2D"),
}


def commit(fault, client, wis, double, broken):
    """Provoke the named fault; buffer 1 has four floats, buffer 3 has two."""
    body, at = wis.body, wis.at
    v = at(DType.F32, 4)
    indices = at(DType.I64, 4, 1)
    unlawful = body().alloc("x", F4).free("x").copy("x", v, "x", v)
    match fault:
        case "unknown-buffer":
            client.run(double, {"x": 99, "y": 2})
        case "undefined-program":
            client.start(bytes(32), [1])
        case "too-few-bindings":
            client.run(double, [1])
        case "twice-bound":
            client.run(double, [1, 1])
        case "params":
            client.run(double, {"x": 1, "y": 2}, bytes(8))
        case "too-small":
            client.run(double, {"x": 3, "y": 2})
        case "double-alloc":
            client.run(double, {"x": 3, "y": 1})
        case "garbage-program":
            client.define(b"garbage" * 10)
        case "unlawful-program":
            client.define(unlawful)
        case "unknown-size-again":
            nonzero = body().call("aten.nonzero.default", ("in", "x", v), ("out", "y", None))
            client.define(nonzero.alloc("z", 32).copy("y", indices, "z", indices))
        case "argument-without-value":
            operands = (("in", "x", v), ("out", "y", v))
            client.define(body().call("aten.add.Tensor", *operands, args=(OperandRef(0), OperandRef(1))))
        case "foreign-operator":
            client.define(body().call("aten.from_file.default", ("out", "y", v)))
        case "garbage-run":
            client.channel.send(Kind.RUN, b"short")
        case "counts-of-run":
            client.channel.send(Kind.RUN, bytes(32) + struct.pack("<4I", 1 << 31, 0, 0, 0))
        case "read-of-unknown":
            client.ask(99, 4)
        case "read-beyond":
            client.ask(1, 16, 8)
        case "read-of-garbage":
            client.channel.send(Kind.READ, b"short")
        case "write-to-unknown":
            client.write(99, ONES)
        case "write-beyond":
            client.write(1, ONES, 12)
        case "quota":
            client.run(body().alloc("y", 1 << 40), {"y": 2})
        case "transient-quota":
            client.run(body().alloc("y", 1 << 40).free("y"), {"y": 2})
        case "operator":
            client.run(broken, {"x": 1, "y": 2})


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported_once_and_affects_no_other_session(pair, wis, double, broken, fault):
    a, b = pair
    for client in pair:
        client.make(1, 1, 2, 3, 4)
        client.make(3, 5, 6)
    code, message = FAULTS[fault]
    commit(fault, a, wis, double, broken)
    with pytest.raises(wis.error, match=message) as caught:
        a.answer() if fault.startswith("read") else a.sync()
    assert caught.value.code == code
    assert a.sync() == {}
    a.make(50, 8, 9)
    assert a.floats(50, 2) == [8, 9]
    b.run(double, {"x": 1, "y": 2})
    assert b.floats(2, 4) == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "fault", ["unknown-buffer", "too-small", "params", "quota", "transient-quota", "operator", "read-beyond"]
)
def test_fault_leaves_its_inputs_readable(pair, wis, double, broken, fault):
    a, _ = pair
    a.make(1, 1, 2, 3, 4)
    a.make(3, 5, 6)
    commit(fault, a, wis, double, broken)
    with pytest.raises(wis.error):
        a.answer() if fault.startswith("read") else a.sync()
    assert a.floats(1, 4) == [1, 2, 3, 4] and a.floats(3, 2) == [5, 6]


def test_frame_of_an_invalid_kind_ends_only_its_session(pair, device):
    a, b = pair
    a.channel.send(77, b"?")
    with pytest.raises(ChannelClosedError):
        a.sync()
    device.wait_closed("a")
    assert b.sync() == {}


@pytest.mark.parametrize(
    ("session_id", "token"), [("a", "wrong"), ("nobody", "token of nobody"), ("taken", "token of taken")]
)
def test_hello_with_a_wrong_token_is_refused(device, wis, session_id, token):
    device.admit("a")
    taken = device.open("taken")
    with pytest.raises(wis.error) as refused:
        wis.client(device.endpoint, session_id, token)
    assert refused.value.code == ("executor.no_session" if session_id == "nobody" else "executor.turned_away")
    assert taken.sync() == {}
    rightful = wis.client(device.endpoint, "a", "token of a")
    assert rightful.sync() == {}
    rightful.close()


# -- poison ----------------------------------------------------------------------------------------------------------


def test_failed_operation_poisons_dependent_buffers_only(device, wis, v, double, broken):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    a.run(double, {"x": 1, "y": 5})
    a.run(broken, {"x": 1, "y": 2})
    a.run(double, {"x": 2, "y": 3})
    a.run(double, {"x": 5, "y": 6})
    with pytest.raises(wis.error) as first:
        a.read(6, F4)
    assert first.value.instruction == 1 and first.value.code == "executor.operation"
    assert a.floats(6, 4) == [4, 8, 12, 16] and a.floats(1, 4) == [1, 2, 3, 4]
    for buffer in (2, 3, 3, 2):
        with pytest.raises(wis.error) as later:
            a.read(buffer, F4)
        assert later.value.message == first.value.message


def test_failed_program_keeps_results_of_earlier_instructions(device, wis, v):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    body = wis.body().alloc("y", F4).call("aten.neg.default", ("in", "x", v), ("out", "y", v)).alloc("z", F4)
    body.call("aten.mm.default", ("in", "x", v), ("in", "x", v), ("out", "z", v)).fill("x", v, 0.0)
    a.run(body, {"x": 1, "y": 2, "z": 3})
    with pytest.raises(wis.error) as caught:
        a.sync()
    assert caught.value.instruction == 3
    assert a.floats(2, 4) == [-1, -2, -3, -4]
    for buffer in (1, 3):
        with pytest.raises(wis.error, match=caught.value.message[:20]):
            a.read(buffer, F4)


def test_run_that_could_not_start_poisons_its_results_with_the_cause(device, wis, double):
    a = device.open("a")
    a.run(double, {"x": 99, "y": 2})
    with pytest.raises(wis.error) as first:
        a.sync()
    with pytest.raises(wis.error) as later:
        a.read(2, F4)
    assert later.value.message == first.value.message == "buffer 99 does not exist"


def test_poisoned_buffer_overwritten_or_recreated_is_valid(device, wis, v, broken):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    a.run(broken, {"x": 1, "y": 2})
    a.run(broken, {"x": 1, "y": 3})
    with pytest.raises(wis.error):
        a.sync()
    a.write(2, ONES[:8])
    with pytest.raises(wis.error):
        a.sync()
    a.write(2, ONES)
    a.make(3, 5, 6, 7, 8)
    assert a.floats(2, 4) == [1, 1, 1, 1] and a.floats(3, 4) == [5, 6, 7, 8]


def test_run_with_reply_answers_with_the_first_failure(device, wis, double, broken):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    a.run(broken, {"x": 1, "y": 2})
    with pytest.raises(wis.error) as caught:
        a.run(double, {"x": 1, "y": 3}, reply=True)
    assert caught.value.code == "executor.operation"
    assert a.run(double, {"x": 1, "y": 4}, reply=True) == {"outputs": [], "values": []}


# -- memory ----------------------------------------------------------------------------------------------------------


def test_free_of_an_unknown_buffer_is_ignored(device, wis):
    a = device.open("a")
    a.make(1, 1, 2)
    a.run(wis.body(), {}, frees=[99, 1, 1])
    assert a.sync() == {} and device.held() == {"a": (0, 0)}


def test_quota_exceeded_fails_the_run_and_the_session_goes_on(device, wis):
    a = device.open("a", quota=100)
    assert a.welcome["device"]["total_memory"] == 100
    a.run(wis.body().alloc("x", 60), {"x": 1})
    a.run(wis.body().alloc("x", 41), {"x": 2})
    with pytest.raises(wis.error, match="CUDA out of memory") as caught:
        a.sync()
    assert caught.value.code == "executor.out_of_memory"
    a.run(wis.body().alloc("x", 40), {"x": 2})
    assert a.read(2, 40) == bytes(40) and device.held() == {"a": (100, 2)}


def test_quota_counts_the_peak_of_a_program_not_the_sum(device, wis):
    a = device.open("a", quota=100)
    body = wis.body()
    for name in "xyz":
        body.alloc(name, 80).free(name)
    a.run(body, {"x": 1, "y": 2, "z": 3})
    assert a.stats()["peak_bytes"] == 80 and device.held() == {"a": (0, 0)}


def test_result_of_unknown_size_beyond_the_quota_is_refused(device, wis):
    a = device.open("a", quota=20)
    a.make(1, 1, 2, 3, 4)
    with pytest.raises(wis.error) as caught:
        body = wis.body().call("aten.nonzero.default", ("in", "x", wis.at(DType.F32, 4)), ("out", "i", None))
        a.run(body, {"x": 1, "i": 2}, reply=True)
    assert caught.value.code == "executor.out_of_memory"
    assert device.held() == {"a": (16, 2)} and a.floats(1, 4) == [1, 2, 3, 4]


def test_quota_above_the_capacity_is_refused(device):
    with pytest.raises(AdmissionError, match=r"only 1\.00 GiB of 1\.00 GiB are left"):
        device.admit("a", quota=1 << 50)
    device.admit("a")
    with pytest.raises(AdmissionError, match="already open"):
        device.admit("a")


def test_buffer_in_the_free_list_of_a_failed_run_is_freed(device, wis, v):
    a = device.open("a")
    for buffer in (1, 2):
        a.make(buffer, 1, 2, 3, 4)
    a.run(wis.body().call("aten.mm.default", ("in", "x", v), ("in", "x", v)).free("x"), {"x": 1})
    a.run(wis.body().alloc("y", 1 << 40).free("x").free("y"), {"x": 2, "y": 3})
    with pytest.raises(wis.error):
        a.sync()
    assert device.held() == {"a": (0, 0)}


@pytest.mark.parametrize("end", ["close", "disconnect", "control"])
def test_memory_of_a_closed_session_is_freed(device, end):
    a, b = device.open("a"), device.open("b")
    b.make(1, 1)
    a.make(1, *range(1000))
    for client in (a, b):  # only the own channel of a session has an order
        client.sync()
    if end == "close":
        a.close()
    elif end == "disconnect":
        a.channel.close()
    else:
        assert device.call(lambda: device.loop.sessions.close("a", "enough"))
    device.wait_closed("a")
    assert device.held() == {"b": (4, 1)} and b.floats(1, 1) == [1]


KILLED = """
import struct, sys, time
from wooly_bus.channel import ChannelClient, Endpoint
channel = ChannelClient.connect(Endpoint.parse(sys.argv[1]))
channel.send(2, b'{"protocol": 1, "session_id": "victim", "token": "token of victim"}')
channel.recv(30)
frames = bytes.fromhex(sys.stdin.readline())
while frames:
    kind, size = struct.unpack_from("<BI", frames)
    channel.send(kind, frames[5 : 5 + size])
    frames = frames[5 + size :]
channel.recv(30)
channel.send(6, bytes(16))
print("in the middle", flush=True)
time.sleep(60)
"""


def test_memory_of_a_killed_client_is_freed(device, wis):
    device.admit("victim")
    raw = wis.body().alloc("x", 1 << 20).raw
    frames = [(Kind.DEFINE, raw), (Kind.RUN, pack_run(digest(raw), [1], b"", [])), (Kind.SYNC, b"")]
    text = b"".join(struct.pack("<BI", kind, len(payload)) + payload for kind, payload in frames).hex()
    argv = [sys.executable, "-c", KILLED, str(device.endpoint)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(text + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "in the middle\n"
        assert device.held() == {"victim": (1 << 20, 1)}
        process.kill()
    device.wait_closed("victim")
    assert device.held() == {}


# -- answers ---------------------------------------------------------------------------------------------------------


def test_read_returns_the_value_at_the_time_of_the_read(device, wis):
    n = 3 << 20
    a = device.open("a")
    a.run(wis.body().alloc("x", n), {"x": 1})
    ones = wis.body().fill("x", wis.at(DType.U8, n), 1)
    a.ask(1, n)
    a.run(ones, {"x": 1})
    a.ask(1, n)
    a.write(1, b"\2" * n)
    assert [a.take(n) == bytes([k]) * n for k in range(2)] == [True, True]
    assert a.read(1, n) == b"\2" * n


def test_same_seed_and_offset_give_the_same_numbers(device, wis):
    a, b = device.open("a"), device.open("b")
    at = wis.at(DType.F32, 64)
    body = wis.body().alloc("x", 256)
    body.call("aten.uniform_.default", ("inout", "x", at), params=(ParamKind.I64,) * 2, rng=(ParamRef(0), ParamRef(1)))
    draws = {}
    for i, (client, seed, offset) in enumerate([(a, 1, 0), (b, 1, 0), (a, 1, 1), (a, 2, 0), (a, 1, 0)]):
        client.run(body, {"x": i}, struct.pack("<2q", seed, offset))
        draws.setdefault((seed, offset), set()).add(client.read(i, 256))
    assert [len(d) for d in draws.values()] == [1, 1, 1] and len(set.union(*draws.values())) == 3


def test_result_of_unknown_size_is_described_and_readable(device, wis):
    a = device.open("a")
    a.make(1, 0, 3, 0, 5)
    body = wis.body().call("aten.nonzero.default", ("in", "x", wis.at(DType.F32, 4)), ("out", "i", None))
    (described,) = a.run(body, {"x": 1, "i": 2}, reply=True)["outputs"]
    assert described["dtype"] == "i64" and described["sizes"] == [2, 1] and described["nbytes"] == 16
    assert struct.unpack("<2q", a.read(2, 16)) == (1, 3)
    assert base64.b64decode(described["data"]) == a.read(2, 16)
    assert device.held() == {"a": (32, 2)}
    a.make(3, 0, 0, 0, 0)
    (described,) = a.run(body, {"x": 3, "i": 4}, reply=True)["outputs"]
    assert described["sizes"] == [0, 1] and described["nbytes"] == 0 and "data" not in described
    a.make(5, *[1] * 129)
    body = wis.body().call("aten.nonzero.default", ("in", "x", wis.at(DType.F32, 129)), ("out", "i", None))
    (described,) = a.run(body, {"x": 5, "i": 6}, reply=True)["outputs"]
    assert described["nbytes"] == 129 * 8 and "data" not in described


def test_result_of_a_scalar_operator_is_answered_as_a_value(device, wis, v):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    body = wis.body().call("aten.equal.default", ("in", "x", v), ("in", "x", v), ("out", "i", None))
    assert a.run(body, {"x": 1, "i": 2}, reply=True)["values"] == [True]


def test_unsized_result_that_the_program_frees_is_refused(device, wis, v):
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    body = wis.body().call("aten.nonzero.default", ("in", "x", v), ("out", "i", None)).free("i")
    a.run(body, {"x": 1, "i": 2})
    with pytest.raises(wis.error, match="unknown-size-once"):
        a.sync()
    assert a.sync() == {}


# -- programs --------------------------------------------------------------------------------------------------------


def test_programs_above_the_limit_forget_the_least_recently_used(device, wis, monkeypatch):
    monkeypatch.setattr(session_programs, "PROGRAMS_KEPT", 3)
    a = device.open("a")
    names = [a.define(wis.body().alloc("x", n).free("x")) for n in (1, 2, 3)]
    a.start(names[0], [9])
    names.append(a.define(wis.body().alloc("x", 4).free("x")))
    for name in (names[0], names[2], names[3]):
        a.start(name, [9])
    assert a.sync() == {}
    a.start(names[1], [9])
    with pytest.raises(wis.error) as caught:
        a.sync()
    assert caught.value.code == "executor.unknown_program"


def test_executor_program_limit_exceeds_the_clients():
    kept = session_programs.PROGRAMS_KEPT
    assert programs.PROGRAMS_KEPT > kept > CLIENT_PROGRAMS_KEPT
