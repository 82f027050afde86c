"""The pieces of work whose instructions `test_costs` counts, each in its steady state."""

from __future__ import annotations

import contextlib
import random
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from wooly import api
from wooly_bus.channel import ChannelClient, Endpoint
from wooly_bus.channel.busy_wait import BusyWait
from wooly_bus.channel.token import SharedPass
from wooly_dispatch.core import step
from wooly_dispatch.events import LaunchDoneEvent, Policy, ProgramSubmittedEvent, SessionOpenedEvent
from wooly_dispatch.state import DispatchState
from wooly_executor import intake, launching
from wooly_executor.billing.core_speed import CoreSpeed
from wooly_executor.collector import Collector
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.runtime import execution, torch_cpu
from wooly_executor.runtime.protocol import Rates, Runtime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_router.core.placement import DeviceRequest, Gpu, Pool
from wooly_router.core.queue import claims_of
from wooly_wis.codec import decode_program, digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import PROTOCOL, READ_HEAD, Kind, pack_json, pack_run
from wooly_wis.program import Form, Instruction, Operand, ParamKind, Program, Role, View

TOKEN = "token"
GIB = 1 << 30
#: Number of runs after which a program's steps are combined, its edges are fixed and its mean price is used.
STEADY_RUNS = 128


class _SteadyPace(CoreSpeed):
    """A core at full speed. The real one measures the core from time to time."""

    def begin(self) -> None:
        return

    def worked(self, ns: int) -> None:
        return


class _SteadyTime:
    """In place of the module `time` where runs are measured and where the loop decides whether to look for frames: 20 us pass
    between two looks at the CPU's clock, 1 us between two looks at the other clock. Measured times decide where a program may
    stop, and thereby what its runs cost; on a busy machine, the loop looks for frames more often.
    """

    cpu = now = 0

    @classmethod
    def thread_time_ns(cls) -> int:
        cls.cpu += 20_000
        return cls.cpu

    @classmethod
    def perf_counter_ns(cls) -> int:
        cls.now += 1_000
        return cls.now


_TIMED = (execution, intake, launching)
#: In place of the measured speed of this machine, from which the executor computes where programs may stop at first.
_RATES = Rates(bytes_per_us=80_000, flops_per_us=70_000, launch_ns=1_000)


def _loop(runtime: Runtime | None = None) -> DeviceLoop:
    torch_cpu._rates = lambda threads: _RATES  # type: ignore[assignment]
    loop = DeviceLoop(runtime or TorchCpuRuntime(), memory=GIB, pace=_SteadyPace(), collector=Collector())
    loop.server.busy = BusyWait(0)
    return loop


# -- the client ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attached(loop: DeviceLoop, **how: Any) -> Iterator[None]:
    """Attach "cuda" to a device, whose loop runs in a thread of this process. No timer sends programs.

    `how`: further arguments of `api.attach`.
    """
    with tempfile.TemporaryDirectory(prefix="wooly-costs-") as folder:
        endpoint = loop.listen(Endpoint.parse(f"unix://{folder}/x.sock"))
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            loop.call(lambda: loop.sessions.open("client", SharedPass(TOKEN), None)).result()
            api.attach([str(endpoint)], "client", TOKEN, flush_interval_s=3600, **how)
            api.install_facade()
            try:
                yield
            finally:
                api.disable()
        finally:
            loop.stop()
            thread.join()


@contextlib.contextmanager
def client() -> Iterator[None]:
    """Attach "cuda" to an executor in this process, in such a way that each run costs the same."""
    with attached(_loop(), flush_instructions=1 << 12):
        api._attached.link.connection.channel._busy = None  # the number of looks for an answer depends on the time
        yield


def _warm(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run the work until every call is known, and buffer ids of freed tensors can be used again."""
    for _ in range(64):
        work()
    torch.cuda.synchronize()
    return work


def eager_add() -> Callable[[], Any]:
    """An addition of two tensors, whose result is a new tensor that replaces the last one."""
    kept = [torch.ones(64, device="cuda"), torch.ones(64, device="cuda")]

    def work() -> None:
        kept[0] = kept[0] + kept[1]

    return _warm(work)


def add_and_read() -> Callable[[], Any]:
    """An addition in place, and the read of its value."""
    x = torch.ones(4, device="cuda")

    def work() -> None:
        x.add_(1)
        x[0].item()

    return _warm(work)


def perceptron() -> Callable[[], Any]:
    """Forward and backward of two layers, without a read."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).to("cuda")
    x, parameters = torch.ones(4, 8, device="cuda"), list(layers.parameters())

    def work() -> None:
        layers(x).sum().backward()
        for p in parameters:
            p.grad = None

    return _warm(work)


def recorded(operations: int, folder: Path) -> bytes:
    """The definition of the program that adds to a tensor in place so many times. A client must be attached."""
    x = torch.ones(4, device="cuda")
    recorder = api._attached.device.devices.recorders[0]
    recorder.flush()
    found = folder / str(operations)
    found.mkdir()
    recorder.programs_dir = found
    for _ in range(operations):
        x.add_(1)
    recorder.flush()
    recorder.programs_dir = None
    (path,) = found.iterdir()
    return path.read_bytes()


# -- the executor ----------------------------------------------------------------------------------------------------


class Device:
    """An executor whose loop runs step by step in this thread, and a client that speaks the channel.

    Args:
        folder: folder for the socket.
        programs: definitions of programs on one buffer of 16 bytes, by name.
        runtime: the runtime; None: the CPU's.
    """

    def __init__(self, folder: Path, programs: dict[str, bytes], runtime: Runtime | None = None) -> None:
        for module in _TIMED:
            module.time = _SteadyTime
        self.loop = loop = _loop(runtime)
        endpoint = loop.listen(Endpoint.parse(f"unix://{folder}/y.sock"))
        loop.begin()
        loop.sessions.open("device", SharedPass(TOKEN), None)
        self.channel = channel = ChannelClient.connect(endpoint)
        hello = {"protocol": PROTOCOL, "jit": "exact", "session_id": "device", "token": TOKEN}
        channel.send(Kind.HELLO, pack_json(hello))
        welcome = channel.expect_frame()
        while not welcome.done:
            self.turn()
            channel.poll_acks()
        assert welcome.other is not None
        assert welcome.other.kind == Kind.WELCOME, bytes(welcome.other.payload)
        view = View(DType.U8, (16,), (1,), 0)
        alloc = Program((Form("alloc", (Operand(Role.OUT, view),)),), (Instruction(0, (0,)),))
        self._runs = {name: self._run_of(raw) for name, raw in ({"alloc": encode_program(alloc)} | programs).items()}
        self._into = memoryview(bytearray(4))
        self.run("alloc")

    def _run_of(self, raw: bytes) -> bytes:
        """Define a program. Returns the payload of its RUN frame, which adds 1."""
        self.channel.send(Kind.DEFINE, raw)
        self.turn()
        kinds = decode_program(raw).param_kinds
        params = struct.pack(
            "<" + "".join(["d" if kind is ParamKind.F64 else "q" for kind in kinds]), *[1 for _ in kinds]
        )
        return pack_run(digest(raw), [1], params, [])

    def turn(self) -> None:
        """Do one turn of the loop, with the launches that the dispatch core decides in it."""
        with torch.inference_mode():
            self.loop.turn()

    def settle(self) -> None:
        """Wait until no thread combines the steps of a program. The next turn of the loop uses the combined steps."""
        decoders = self.loop.decoders
        with decoders._changed:
            decoders._changed.wait_for(lambda: not decoders._waiting and not decoders._running)

    def run(self, name: str) -> None:
        """Run a program, and do not wait for it."""
        self.channel.send(Kind.RUN, self._runs[name])
        self.turn()

    def run_and_read(self, name: str) -> float:
        """Run a program, and read the first number of the buffer."""
        channel = self.channel
        channel.hold()
        channel.send(Kind.RUN, self._runs[name])
        channel.send(Kind.READ, READ_HEAD.pack(1, 0, 4))
        answer = channel.expect(self._into, Kind.DATA)
        self.turn()
        channel.complete(answer)
        return float(struct.unpack("<f", self._into)[0])

    def close(self) -> None:
        """End the loop."""
        self.channel.close()
        self.loop.stop()
        self.loop.begin = lambda: None  # type: ignore[method-assign] # it has begun, and has its threads
        self.loop.run()
        for module in _TIMED:
            module.time = time


def running(device: Device, name: str) -> Callable[[], Any]:
    """A program of the device, without an answer."""
    for _ in range(STEADY_RUNS):
        device.run(name)
        device.settle()
    return lambda: device.run(name)


def running_and_reading(device: Device, name: str) -> Callable[[], Any]:
    """A program of the device, and the read of its result."""
    before = device.run_and_read(name)
    assert device.run_and_read(name) > before, "the program does not add"
    for _ in range(STEADY_RUNS):
        device.run_and_read(name)
        device.settle()
    return lambda: device.run_and_read(name)


# -- decisions -------------------------------------------------------------------------------------------------------


def dispatch_decisions() -> Callable[[], Any]:
    """Sixteen launches of ten sessions: their ends, and a new program at every fourth."""
    state, queue, programs, now = DispatchState(), deque[Any](), dict[str, int](), [0]

    def feed(event: Any) -> None:
        _, decisions = step(state, event)
        queue.extend(decisions)

    for n in range(10):
        feed(SessionOpenedEvent(0, f"s{n}", Policy(priority=2 + n % 3, weight=1 + n % 4)))
    for n in range(10):
        programs[f"s{n}"] = 1
        feed(ProgramSubmittedEvent(0, f"s{n}", 1, (100_000,) * 4))

    def work() -> None:
        for _ in range(16):
            launch = queue.popleft()
            now[0] += 90_000
            feed(LaunchDoneEvent(now[0], launch.launch, launch.estimate_ns * 9 // 10))
            if launch.last == 4:
                programs[launch.session] += 1
                feed(ProgramSubmittedEvent(now[0], launch.session, programs[launch.session], (100_000,) * 4))

    for _ in range(16):
        work()
    return work


def placement_decisions() -> Callable[[], Any]:
    """Sixteen tasks that end and sixteen that come, on sixty-four devices."""
    rng = random.Random(7)
    gpus = [Gpu(f"n{n // 8}-{n % 8}", f"n{n // 8}", 80 * GIB, "nvidia", "sm_90", frozenset(), 20, "active", 0, 0, frozenset())
            for n in range(64)]  # fmt: skip
    pool, placed = Pool(gpus), deque[Any]()

    def come() -> None:
        want = DeviceRequest(gpu_count=1, required_vram=rng.choice([2, 5, 10, 20]) * GIB, swappable=rng.random() < 0.7)
        claims = claims_of(want, [gpu.executor_id for gpu in pool.place(want).gpus])
        for claim in claims:
            pool.claim(claim)
        placed.append(claims)

    for _ in range(96):
        come()

    def work() -> None:
        for _ in range(16):
            for claim in placed.popleft():
                pool.release(claim)
            come()

    return work
