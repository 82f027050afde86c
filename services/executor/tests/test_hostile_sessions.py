"""A session cannot end or corrupt the executor that it shares with others, whatever it sends."""

import random
import socket
import struct

import pytest
from wooly_bus.channel.framing import HEADER
from wooly_executor import runs
from wooly_executor.memory.book import Scope
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.frames import CONTENT, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run
from wooly_wis.program import ParamKind, ParamRef

VALUES = [float(k) for k in range(4)]
BYTES = struct.pack("<4f", *VALUES)


# -- read-only operands -------------------------------------------------------------------------------------------------


@pytest.fixture
def sharing(device):
    """Two sessions that share one content."""
    a, b = [device.open(name, scope=Scope.SHARED) for name in "ab"]
    assert not a.load(1, BYTES)
    a.sealed()
    assert b.load(1, BYTES)
    return a, b


def batch_norm(wis, name, training, params=()):
    x, n = wis.at(DType.F32, 1, 4, 2), wis.at(DType.F32, 4)
    refs = [wis.ref(k) for k in range(3)]
    tail = (training, 0.1, 1e-5) if name == "native_batch_norm" else (0.1,)
    args = (refs[0], None, None, refs[1], refs[2], *tail) if name == "native_batch_norm" else (*refs, *tail)
    operands = [("in", "y", x), ("in", "x", n), ("in", "z", n)]
    results = [("out", k, None) for k in ("p", "q", "r")[: 3 if name == "native_batch_norm" else 2]]
    return wis.body().call(f"aten.{name}.default", *operands, *results, args=args, params=params)


def writers(wis):
    """Programs that write buffer x but declare it as read-only."""
    v = wis.at(DType.F32, 4)
    yield b"", wis.body().call("aten.zero_.default", ("in", "x", v))
    yield (
        b"",
        wis.body().call(
            "aten.neg.out", ("in", "y", v), ("in", "x", v), args=(wis.ref(0),), kwargs=(("out", wis.ref(1)),)
        ),
    )
    yield b"", wis.body().call("aten._foreach_neg_.default", ("in", "x", v), args=((wis.ref(0),),))
    yield b"", batch_norm(wis, "native_batch_norm", True)
    yield struct.pack("<q", 1), batch_norm(wis, "native_batch_norm", ParamRef(0), (ParamKind.BOOL,))
    yield b"", batch_norm(wis, "batch_norm_update_stats", None)


@pytest.mark.parametrize("number", range(6))
def test_write_to_operand_declared_read_only_is_refused(sharing, wis, number):
    a, b = sharing
    params, body = list(writers(wis))[number]
    b.make(2, *VALUES, *VALUES)
    b.make(3, *VALUES)
    ids = {"x": 1, "y": 2, "z": 3, "p": 4, "q": 5, "r": 6}
    b.run(body, ids, params)
    with pytest.raises(wis.error, match="has the role 'in'"):
        b.sync()
    assert a.floats(1, 4) == b.floats(1, 4) == VALUES


def test_batch_norm_in_evaluation_may_read_shared_statistics(sharing, wis):
    a, b = sharing
    b.make(2, *VALUES, *VALUES)
    b.make(3, *VALUES)
    b.run(batch_norm(wis, "native_batch_norm", False), {"y": 2, "x": 1, "z": 3, "p": 4, "q": 5, "r": 6})
    assert b.sync() == {} and a.floats(1, 4) == VALUES


def test_declared_write_to_shared_content_gets_own_copy(sharing, wis):
    a, b = sharing
    b.run(wis.body().call("aten.zero_.default", ("inout", "x", wis.at(DType.F32, 4))), {"x": 1})
    assert b.floats(1, 4) == [0.0] * 4 and a.floats(1, 4) == VALUES


# -- host memory --------------------------------------------------------------------------------------------------------


def test_undefined_buffers_memory_stays_bounded(device, wis, monkeypatch):
    monkeypatch.setattr(runs, "BUFFERS_KEPT", 100)
    a = device.open("a")
    for k in range(5):
        a.start(b"?" * 32, range(1000 * k, 1000 * k + 90))
    with pytest.raises(wis.error, match="has not defined"):
        a.sync()
    assert device.held()["a"] == (0, 100)
    a.run(wis.body().alloc("x", 4), {"x": 5000})
    with pytest.raises(wis.error, match="more than the limit of 100"):
        a.sync()


def test_view_repeating_one_number_without_limit_is_refused(device, wis):
    a = device.open("a")
    a.make(1, 1.0)
    endless = wis.at(DType.F32, *[1 << 40] * 64, strides=[0] * 64)
    a.run(wis.body().call("aten.sum.default", ("in", "x", endless), ("out", "y", None)), {"x": 1, "y": 2})
    with pytest.raises(wis.error, match="elements") as caught:
        a.sync()
    assert caught.value.code == "wis.verify"


# -- frames --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["token", "session_id", "jit", "protocol", "trace"])
@pytest.mark.parametrize(
    "value",
    ["\ud800", "x" * 10_000, None, {}, [[]], 1e400, -(10**60)],
    ids=["half a character", "long", "nothing", "table", "lists", "infinity", "huge"],
)
def test_invalid_hello_is_answered_and_executor_continues(device, wis, field, value):
    other = device.open("other")
    device.admit("a")
    hello = {"session_id": "a", "token": "token of a", field: value}
    try:
        wis.client(device.endpoint, **hello).close()
        assert field in ("trace", "jit")
    except wis.error as refused:
        assert refused.code == ("executor.no_session" if field == "session_id" else "executor.turned_away")
    assert other.sync() == {}


def conversation(rng, wis):
    """Return the frames of a correct client, in a sensible order, as (kind, payload)."""
    v = wis.at(DType.F32, 4)
    make = wis.body().alloc("x", 16).alloc("y", 16)
    work = wis.body().call("aten.mul.Tensor", ("in", "x", v), ("inout", "y", v), args=(wis.ref(0), ParamRef(0)),
                           params=(ParamKind.F64,)).copy("x", v, "y", v)  # fmt: skip
    ask = wis.body().call("aten.sum.default", ("in", "x", v), ("out", "z", None))
    for body in (make, work, ask):
        yield Kind.DEFINE, body.raw
    yield Kind.RUN, pack_run(digest(make.raw), [1, 2], b"", [])
    yield Kind.WRITE, WRITE_HEAD.pack(1, 0) + BYTES
    yield Kind.RUN, pack_run(digest(work.raw), [1, 2], struct.pack("<d", 2.0), [], reply=rng.random() < 0.5)
    yield Kind.RUN, pack_run(digest(ask.raw), [1, 3], b"", [], reply=True)
    yield Kind.OFFER, CONTENT.pack(1, 16, rng.randrange(2), bytes(32))
    yield Kind.SEAL, CONTENT.pack(1, 16, 0, bytes(32))
    yield Kind.PIN, pack_json({"do": rng.choice(["add", "remove", "list"]), "name": "p"})
    yield Kind.SOURCE, b"wooly"
    yield Kind.READ, READ_HEAD.pack(1, 0, 16)
    yield Kind.STATS, b""
    yield Kind.SYNC, b""
    yield Kind.RUN, pack_run(digest(make.raw), [9, 10], b"", [1, 2, 3])


def corrupted(rng, data):
    """Return the bytes with a few of them changed, removed, or far too large."""
    data = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data))
        how = rng.randrange(5)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80"])
        elif how == 2 and len(data) > 1:
            del data[max(at, 1) :]
        elif how == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)


def send_all(device, name, frames, *, tail=None):
    """Send a hello and frames; `tail`: bytes that are no frame, after which the client sends nothing. Returns at the end."""
    device.admit(name, 1 << 20)
    hello = pack_json({"protocol": 1, "session_id": name, "token": f"token of {name}"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(30)
        s.connect(device.endpoint.path)
        whole = [(Kind.HELLO, hello), *frames, *([(Kind.CLOSE, b"")] if tail is None else [])]
        data = [HEADER.pack(len(p), k, 0, 0, seq) + p for seq, (k, p) in enumerate(whole, 1)]
        try:
            s.sendall(b"".join(data) + (tail or b""))
            if tail is not None:
                s.shutdown(socket.SHUT_WR)
            while s.recv(65536):
                continue
        except (BrokenPipeError, ConnectionResetError):
            pass  # the executor closed the connection at the first invalid frame
    device.wait_closed(name)


@pytest.mark.parametrize("seed", range(4))
def test_corrupted_frames_end_only_their_session(device, wis, seed):
    rng = random.Random(seed)
    other = device.open("other")
    other.make(1, *VALUES)
    for k in range(60):
        frames = list(conversation(rng, wis))
        for at in rng.sample(range(len(frames)), rng.randint(1, 3)):
            kind, payload = frames[at]
            frames[at] = (kind if rng.random() < 0.9 else rng.randrange(2, 30), corrupted(rng, payload))
        send_all(device, f"frames {k}", frames)
        send_all(
            device,
            f"bytes {k}",
            frames[: rng.randrange(len(frames))],
            tail=corrupted(rng, HEADER.pack(16, 6, 0, 0, 5) + BYTES),
        )
    assert other.floats(1, 4) == VALUES and other.sync() == {}
    device.check()
    assert set(device.held()) == {"other"}
