"""What executor tests share: programs by name, a device in this process, clients that speak the real channel."""

import contextlib
import json
import os
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from wooly_bus.channel import ChannelClient, Endpoint
from wooly_bus.channel.token import SharedPass
from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_dispatch.events import Policy
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.journal import Batch, Journal, Replayer
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.memory.book import Scope
from wooly_executor.runtime.flights import Flights
from wooly_executor.runtime.prepared import DeviceTimes
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.codec import digest, encode_program
from wooly_wis.collectives import Collective, Range, pack_collective
from wooly_wis.dtypes import DType
from wooly_wis.frames import (
    CONTENT,
    CUT_HEAD,
    IPC_EXPORT,
    IPC_HEAD,
    IPC_IMPORT,
    IPC_RELEASE,
    MAX_CHUNK,
    READ_HEAD,
    RESTORE_HEAD,
    WRITE_HEAD,
    Kind,
    pack_json,
    pack_run,
)
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

from services.executor.tests.fake_gpu import LAUNCH_NS, FakeDriver, gpu_runtime

WAIT_S = 30
#: Whether devices of tests are fake GPUs, on which each launch that may be in flight is in flight (`test_device_order`).
ON_FAKE_GPU = bool(os.environ.get("WOOLY_TEST_ON_FAKE_GPU"))
ROLES = {"in": Role.IN, "out": Role.OUT, "inout": Role.INOUT}


def view(dtype, *sizes, strides=None, offset=0):
    """A row-major view unless strides are given."""
    if strides is None:
        strides, n = [], 1
        for size in reversed(sizes):
            strides.insert(0, n)
            n *= max(size, 1)
    return View(dtype, tuple(sizes), tuple(strides), offset)


@dataclass
class Body:
    """A program under construction; slots have names and are numbered by first use."""

    forms: dict = field(default_factory=dict)
    body: list = field(default_factory=list)
    names: list = field(default_factory=list)

    def add(self, form, *names):
        self.forms.setdefault(form, len(self.forms))
        self.names += [n for n in dict.fromkeys(names) if n not in self.names]
        self.body.append(Instruction(self.forms[form], tuple(self.names.index(n) for n in names)))
        return self

    def alloc(self, name, nbytes):
        return self.add(Form("alloc", (Operand(Role.OUT, view(DType.U8, nbytes)),)), name)

    def free(self, name):
        return self.add(Form("free", (Operand(Role.IN, None),)), name)

    def fill(self, name, v, value, params=()):
        return self.add(Form("fill", (Operand(Role.OUT, v),), tuple(params), (("value", value),)), name)

    def copy(self, source, source_view, target, target_view):
        form = Form("copy", (Operand(Role.IN, source_view), Operand(Role.OUT, target_view)))
        return self.add(form, source, target)

    def call(self, operator, *operands, args=None, kwargs=(), params=(), rng=None, **more):
        """An extern. Operands are (role, name, view); without `args` all that are not "out" are passed in order."""
        if args is None:
            args = tuple(OperandRef(i) for i, (role, _, _) in enumerate(operands) if role != "out")
        attrs = {"args": args, "kwargs": tuple(kwargs), "name": operator}
        attrs |= {k: v for k, v in {"rng": rng, **more}.items() if v}
        form = Form(
            "extern",
            tuple(Operand(ROLES[role], v) for role, _, v in operands),
            tuple(params),
            tuple(sorted(attrs.items())),
        )
        return self.add(form, *(name for _, name, _ in operands))

    @property
    def program(self):
        return Program(tuple(self.forms), tuple(self.body))

    @property
    def raw(self):
        return encode_program(self.program)


def name_of(data):
    return content_id([chunk_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)], len(data))


class RemoteError(Exception):
    """An ERROR frame."""

    def __init__(self, payload):
        error = json.loads(bytes(payload))
        super().__init__(error["message"])
        self.code, self.message, self.instruction = error["code"], error["message"], error["instruction"]


class Client:
    """One session's end of a real channel."""

    def __init__(self, endpoint, session_id, token, **more):
        self.channel = ChannelClient.connect(endpoint)
        hello = {"protocol": 1, "session_id": session_id, "token": token, **more}
        try:
            self.channel.send(Kind.HELLO, pack_json(hello))
            self.welcome = self.answer(Kind.WELCOME)
        except BaseException:
            self.channel.close()
            raise

    def answer(self, kind=Kind.RESULT):
        frame = self.channel.recv(WAIT_S)
        if frame.kind == Kind.ERROR:
            raise RemoteError(frame.payload)
        assert frame.kind == kind
        return json.loads(bytes(frame.payload))

    def define(self, body):
        raw = body if isinstance(body, bytes) else body.raw
        self.channel.send(Kind.DEFINE, raw)
        return digest(raw)

    def start(self, name, bindings, params=b"", frees=(), *, reply=False):
        self.channel.send(Kind.RUN, pack_run(name, list(bindings), params, list(frees), reply=reply))

    def run(self, body, bindings, params=b"", frees=(), *, reply=False):
        """Define and run. Bindings: a buffer id per name."""
        name = self.define(body)
        ids = [bindings[n] for n in body.names] if isinstance(bindings, dict) else bindings
        self.start(name, ids, params, frees, reply=reply)
        return self.answer() if reply else None

    def write(self, buffer, data, offset=0):
        for at in range(0, max(len(data), 1), MAX_CHUNK):
            self.channel.send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), data[at : at + MAX_CHUNK])

    def ask(self, buffer, nbytes, offset=0):
        self.channel.send(Kind.READ, READ_HEAD.pack(buffer, offset, nbytes))

    def take(self, nbytes):
        into = bytearray(nbytes)
        other = self.channel.recv_data(memoryview(into), Kind.DATA)
        if other is not None:
            raise RemoteError(other.payload)
        return bytes(into)

    def read(self, buffer, nbytes, offset=0):
        self.ask(buffer, nbytes, offset)
        return self.take(nbytes)

    def floats(self, buffer, n):
        return list(struct.unpack(f"<{n}f", self.read(buffer, 4 * n)))

    def collective(self, what, **how):
        """Send a rank's part in a collective. Ranges are (buffer, byte offset, elements[, peer])."""
        how |= {name: tuple(Range(*r) for r in how.get(name, ())) for name in ("reads", "writes")}
        self.channel.send(Kind.COLLECTIVE, pack_collective(Collective(what=what, **how)))

    def sync(self):
        self.channel.send(Kind.SYNC)
        return self.answer()

    def stats(self):
        self.channel.send(Kind.STATS)
        return self.answer()

    def offer(self, buffer, data):
        self.channel.send(Kind.OFFER, CONTENT.pack(buffer, len(data), 0, name_of(data)))
        return self.answer()["known"]

    def offer_head(self, buffer, data):
        self.channel.send(Kind.OFFER, CONTENT.pack(buffer, len(data), 1, chunk_digest(data[:CHUNK])))
        return self.answer()["known"]

    def seal(self, buffer, data):
        self.channel.send(Kind.SEAL, CONTENT.pack(buffer, len(data), 0, name_of(data)))

    def load(self, buffer, data):
        """What a client does that loads a file. Whether the content was there."""
        self.run(Body().alloc("x", len(data)), {"x": buffer})
        known = self.offer(buffer, data)
        if not known:
            self.write(buffer, data)
            self.seal(buffer, data)
        return known

    def sealed(self):
        """Wait until everything of this session is hashed."""
        while self.stats()["sealing"]:
            time.sleep(0.001)

    def cut(self, number=0, known=0, *, stored=True):
        """Take a cut, and wait until it is stored."""
        self.channel.send(Kind.CUT, CUT_HEAD.pack(number, known, stored))
        return self.answer()

    def restore(self, number):
        self.channel.send(Kind.RESTORE, RESTORE_HEAD.pack(number))
        return self.answer()

    def pin(self, do, name=""):
        self.channel.send(Kind.PIN, pack_json({"do": do, "name": name}))
        return self.answer()

    def ipc(self, what, buffer=0, nbytes=0, name=b""):
        self.channel.send(Kind.IPC, IPC_HEAD.pack(what, buffer, nbytes, name))
        return self.answer()

    def export_buffer(self, buffer):
        """The name by which other sessions can import a buffer."""
        return bytes.fromhex(self.ipc(IPC_EXPORT, buffer)["name"])

    def import_buffer(self, buffer, nbytes, name):
        self.ipc(IPC_IMPORT, buffer, nbytes, name)

    def release_export(self, name):
        return self.ipc(IPC_RELEASE, name=name)["known"]

    def make(self, buffer, *values):
        """A new buffer of f32 values."""
        self.run(Body().alloc("x", 4 * len(values)), {"x": buffer})
        self.write(buffer, struct.pack(f"<{len(values)}f", *values))

    def close(self):
        self.channel.send(Kind.CLOSE)
        self.channel.close()


class Device:
    """A device loop in a thread of this process, reached over its unix socket. `told`: what ended it, and that it has ended."""

    def __init__(
        self,
        path,
        runtime,
        memory,
        dispatch,
        swap=None,
        limits=None,
        pace=None,
        pinned=None,
        checkpoints=None,
        tiers=None,
    ):
        self.told = []
        self.loop = DeviceLoop(
            runtime,
            memory,
            dispatch,
            swap,
            tiers,
            pace=pace,
            limits=limits,
            pinned=pinned,
            checkpoints=checkpoints,
            failed=self.told.append,
            ended=lambda: self.told.append(f"ended: {self.loop.lost}"),
        )
        self.endpoint = self.loop.listen(Endpoint.parse(f"unix://{path}"))
        self.closed, self.clients, self.brought = [], [], {}
        self.may_end = False
        self.changed = threading.Condition()
        self.loop.sessions.follow(self.on_closed)
        self.entries = self.loop.dispatch.begin_journal()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def on_closed(self, ended):
        with self.changed:
            self.closed.append(ended.session_id)
            self.brought[ended.session_id] = ended.contents
            self.changed.notify_all()

    def call(self, function):
        return self.loop.call(function).result(WAIT_S)

    def admit(
        self,
        session_id,
        quota=None,
        *,
        tenant="",
        scope=Scope.OFF,
        swappable=True,
        opaque=False,
        claim=0,
        part=0,
        repeats=False,
        **policy,
    ):
        entry, found = SharedPass(f"token of {session_id}"), Policy(**policy)
        how = {
            "scope": scope,
            "swappable": swappable,
            "opaque": opaque,
            "claim": claim,
            "part": part,
            "repeats": repeats,
        }
        self.call(lambda: self.loop.sessions.open(session_id, entry, quota, found, tenant, **how))

    def open(self, session_id, quota=None, **policy):
        self.admit(session_id, quota, **policy)
        self.clients.append(Client(self.endpoint, session_id, f"token of {session_id}"))
        return self.clients[-1]

    def steer(self, session_id, *, suspended=False, exclusive=False):
        def steer():
            policy = self.loop.dispatch.treatment(session_id)[0]
            self.loop.dispatch.steer(session_id, policy, suspended, exclusive)

        self.call(steer)

    def held(self):
        return self.call(lambda: {s.id: (s.held_bytes, len(s.buffers)) for s in self.loop.sessions.all()})

    def check(self):
        """Every byte is on an account."""
        self.call(self.loop.vram.check)

    def residence(self):
        return self.call(lambda: {s.id: s.flow.residence.value for s in self.loop.sessions.all()})

    def wait_closed(self, session_id):
        with self.changed:
            assert self.changed.wait_for(lambda: session_id in self.closed, WAIT_S)

    def stop(self):
        for client in self.clients:
            client.channel.close()
        assert self.thread.is_alive() or self.may_end, "the device loop ended before its time"
        self.loop.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.loop.vram.ledger.check()
        replay(self.entries)


def replay(entries):
    """The rule decides on these events as the loop's did, and breaks none of its laws. Returns what was recorded."""
    journal, replayer, auditor = Journal("x/1"), Replayer("x/1"), Auditor()
    for entry in entries:
        journal.record(*entry)
    batch = journal.cut()
    for event, decisions in replayer.replay(Batch.decode(batch.encode())):
        auditor.audit(event, decisions, replayer.state.windows)
    return list(entries)


@pytest.fixture(autouse=True)
def ordered(monkeypatch, request):
    """No test leaves accesses to the memory of a fake GPU whose order nothing determines."""
    if ON_FAKE_GPU and not request.module.__name__.endswith("test_flights"):
        monkeypatch.setattr(Flights, "known", known_times)
    before = list(FakeDriver.drivers)
    yield
    for driver in set(FakeDriver.drivers).difference(before):
        driver.order.check()


@pytest.fixture
def driver():
    """A fake GPU. In a run of `test_device_order`, the operators of the test's own thread are watched, too."""
    made = FakeDriver()
    with made.order.watched() if ON_FAKE_GPU else contextlib.nullcontext():
        yield made
    made.survives()


def known_times(flights, prepared, span):
    """In place of `Flights.known`: all launches may be in flight, also those that were never measured."""
    return DeviceTimes([LAUNCH_NS] * len(span.edges), [0] * (len(span.edges) + 1))


def default_runtime():
    return gpu_runtime(FakeDriver()) if ON_FAKE_GPU else TorchCpuRuntime()


@pytest.fixture
def make_device():
    devices = []
    with tempfile.TemporaryDirectory(prefix="wooly-") as directory:

        def make(
            *,
            runtime=None,
            memory=1 << 30,
            dispatch=None,
            swap=None,
            limits=None,
            pace=None,
            checkpoints=None,
            tiers=None,
        ):
            path = Path(directory) / f"{len(devices)}.sock"
            devices.append(
                Device(
                    path, runtime or default_runtime(), memory, dispatch, swap, limits, pace, None, checkpoints, tiers
                )
            )
            return devices[-1]

        yield make
        for device in devices:
            device.stop()


@pytest.fixture
def device(make_device):
    return make_device()


@pytest.fixture(scope="session")
def wis():
    """The tools with which tests write programs and meet errors."""

    class Tools:
        body, at, error, client, ref, device = Body, staticmethod(view), RemoteError, Client, OperandRef, Device
        replay = staticmethod(replay)

    return Tools


@pytest.fixture
def two_threads():
    """Let the library use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
