"""Tests of plans over NATS, with real processes: plans are used, stored, rejected and waited for."""

import asyncio
import contextlib
import os
import re
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ARTIFACTS, ArtifactStore
from wooly_bus.channel import Endpoint
from wooly_bus.errors import NoResponderError
from wooly_bus.rpc import ControlClient
from wooly_executor.plans.tiers import OFTEN
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_testkit.tape import Tape
from wooly_wis.artifact import family
from wooly_wis.codec import decode_program, digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Launch, Source, encode_source
from wooly_wis.frames import Kind
from wooly_wis.messages import (
    CompileProgramReply,
    HostSessionRequest,
)
from wooly_wis.program import Form, Instruction, Operand, Program, Role, View

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
#: Elements of a buffer: enough for kernels to pay off, and few enough for the device to be idle between runs.
N = 1 << 14
WAIT_S = 90


def clean(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WOOLY_EXECUTOR_", "WOOLY_COMPILER_"))}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def waited(condition, what):
    deadline = time.monotonic() + WAIT_S
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class World:
    """NATS, and processes that the test starts and ends."""

    def __init__(self, url, folder, kernels):
        self.url, self.folder, self.kernels = url, folder, kernels
        self.control = ControlClient(url)
        self.processes, self.clients, self.sessions = [], [], 0

    def start(self, module, log, **env):
        with (self.folder / log).open("ab") as out:
            process = Forked(module, env=clean(**env), stdout=out, stderr=out)
        self.processes.append(process)
        return process

    def executor(self, name="x", state="executor", timeout_s=120.0):
        process = self.start(
            "wooly_executor",
            f"{name}.log",
            WOOLY_EXECUTOR_NATS_URL=self.url,
            WOOLY_EXECUTOR_ID=name,
            WOOLY_EXECUTOR_STATE_DIR=str(self.folder / state),
            WOOLY_EXECUTOR_HEARTBEAT_S="0.1",
            WOOLY_EXECUTOR_COMPILER_TIMEOUT_S=str(timeout_s),
            WOOLY_EXECUTOR_PLAN_TRIALS="0",  # these tests want the plan, however fast it is
        )
        request = HostSessionRequest(session_id="probe", token="", tenant="t", priority=2, lease_s=60)

        def answers():
            with contextlib.suppress(NoResponderError):
                return self.control.request(contracts.EXECUTOR_SESSION_OPEN.at(name), request)

        waited(answers, "the executor does not answer")
        return process

    def compiler(self, state="compiler"):
        log = f"compiler-{len(self.processes)}.log"
        (self.folder / state).mkdir(exist_ok=True)
        if not (self.folder / state / "kernels").exists():
            (self.folder / state / "kernels").symlink_to(self.kernels)
        process = self.start(
            "wooly_compiler",
            log,
            WOOLY_COMPILER_NATS_URL=self.url,
            WOOLY_COMPILER_STATE_DIR=str(self.folder / state),
            WOOLY_COMPILER_PATIENCE_S="100",
        )
        waited(lambda: "builds for opencl" in (self.folder / log).read_text(), "the compiler does not come up")
        return process

    def log(self, name="x"):
        return (self.folder / f"{name}.log").read_text()

    def session(self, wis, jit, name="x"):
        self.sessions += 1
        session_id = f"s{self.sessions}"
        request = HostSessionRequest(session_id=session_id, token="t", tenant="t", priority=2, lease_s=600)
        opened = self.control.request(contracts.EXECUTOR_SESSION_OPEN.at(name), request)
        client = wis.client(Endpoint.parse(opened.endpoints[0]), session_id, "t", jit=jit)
        self.clients.append(client)
        return client

    def close(self):
        for client in self.clients:
            client.channel.close()
        self.control.close()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def kernels():
    """The folder in which all compilers of tests store kernel code, because each kernel takes a second. Artifacts are separate
    per test.
    """
    folder = Path(os.environ["WOOLY_COMPILER_STATE_DIR"]) / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def world(tmp_path, kernels):
    with start_nats_server() as url:
        made = World(url, tmp_path, kernels)
        yield made
        made.close()


ONE = """module {
  tt.func public @one(%x: !tt.ptr<f32>) attributes {noinline = false} {
    %v = tt.load %x : !tt.ptr<f32>
    %w = arith.addf %v, %v : f32
    tt.store %x, %w : !tt.ptr<f32>
    tt.return
  }
}
"""


def chain():
    """A program whose plan has kernels: y = relu((x * w + x) * 3), and an operator that no exact kernel computes."""
    t = Tape()
    x, w = t.input(DType.F32, N), t.input(DType.F32, N)
    a = t.op("mul", x, w)
    b = t.op("add", a, x)
    t.free(a)
    t.op("mul", b, 3.0, into=b)
    y = t.op("relu", b)
    t.free(b)
    e = t.op("exp", w)
    t.op("add", x, 1.0, into=x)
    program, slots = t.program()
    return encode_program(program), {k: slots[v.slot] for k, v in {"x": x, "w": w, "y": y, "e": e}.items()}, t.params


class Script:
    """Runs the chain repeatedly in one session, on its own results."""

    def __init__(self, client):
        self.client = client
        self.raw, self.slots, params = chain()
        self.params = struct.pack(f"<{len(params)}d", *params)
        self.n = decode_program(self.raw).n_slots
        self.made, self.ran, self.answers = 100, 0, []
        values = [((7 * k) % 1000) / 500 - 1 for k in range(N)]
        client.make(self.slots["x"], *values)
        client.make(self.slots["w"], *reversed(values))

    def step(self):
        names = {self.slots["x"]: self.slots["x"], self.slots["w"]: self.slots["w"]}
        n = self.n
        bindings = [names.get(s, self.made + s) for s in range(n)]
        y, e = bindings[self.slots["y"]], bindings[self.slots["e"]]
        self.client.run(self.raw, bindings, self.params)
        self.answers.append((self.client.read(y, 4 * N), self.client.read(e, 4 * N)))
        self.client.run(*self.frees(y, e))
        self.made += n
        self.ran += 1

    @staticmethod
    def frees(y, e):
        free = Form("free", (Operand(Role.IN, None),))
        return encode_program(Program((free,), (Instruction(0, (0,)), Instruction(0, (1,))))), [y, e]

    def work(self):
        return self.client.stats()["work"]

    def until(self, name, at_least=1):
        """Run until a counter reaches a value. Returns the number of runs."""
        for _ in range(OFTEN):
            self.step()

        def high():
            self.step()
            return self.work()[name] >= at_least

        waited(high, f"{name} stays below {at_least}: {self.work()}")
        return self.ran


def test_plan_exact_is_used_between_runs_with_the_same_bits(world, wis):
    world.executor()
    world.compiler()
    mine = Script(world.session(wis, "exact"))
    ran = mine.until("kernel_instructions")
    for _ in range(20):
        mine.step()
    work = mine.work()
    assert work["kernel_instructions"] % 5 == 0 and work["library_instructions"] == work["kernel_instructions"] // 5
    assert ran > 16 and work["tier0_instructions"] >= 16 * 6 and work["rejected"] == 0
    assert work["kernel_ns"] > 0 and work["library_ns"] > 0 and work["tier0_ns"] > 0
    plain = Script(world.session(wis, "0"))
    for _ in mine.answers:
        plain.step()
    assert plain.answers == mine.answers and plain.work()["kernel_instructions"] == 0


@pytest.mark.slow
def test_artifacts_survive_a_restart_of_all_processes(world, wis):
    executor, compiler = world.executor(), world.compiler()
    Script(world.session(wis, "exact")).until("kernel_instructions")
    for process in (executor, compiler):
        process.kill()
        process.wait()
    world.executor()  # from its own disk, because there is no compiler
    Script(world.session(wis, "exact")).until("kernel_instructions")
    world.executor("other", "empty")
    world.compiler()  # from the compiler's disk or the bucket: nothing is compiled
    Script(world.session(wis, "exact", "other")).until("kernel_instructions")
    logs = [p.read_text() for p in world.folder.glob("compiler-*.log")]
    assert sorted(log.count("(exact):") for log in logs) == [0, 1]


@pytest.mark.slow
def test_kernel_code_is_requested_shared_in_the_bucket_and_stored(world, wis):
    def launch(name):
        client = world.session(wis, "0", name)
        raw = encode_source(Source("ttir", ONE))
        client.channel.send(Kind.SOURCE, raw)
        client.make(1, 1.0)
        form = Launch("ttir", digest(raw), "one", (1, 1, 1), (1, 1, 1), (0,))
        view = View(DType.F32, (1,), (1,))
        client.run(wis.body().add(Form("kernel.launch", (Operand(Role.INOUT, view),), (), form.attrs()), "x"), [1])
        return client.floats(1, 1)

    executor, compiler = world.executor(), world.compiler()
    assert launch("x") == [2.0]
    world.executor("other", "empty")
    assert launch("other") == [2.0]
    for process in (executor, compiler):
        process.kill()
        process.wait()
    world.executor("x2", "executor")  # from disk, because there is no compiler
    assert launch("x2") == [2.0]
    world.executor("alone", "bare")  # no compiler, and nothing on disk
    assert launch("alone") == [2.0]
    log = next(world.folder.glob("compiler-*.log")).read_text()
    assert log.count("kernel one for") == 1  # the second executor got it from the bucket
    for name, where in (
        ("x", "received from a remote compiler"),
        ("other", "received from a remote compiler"),
        ("x2", "on disk"),
        ("alone", "compiled here"),
    ):
        assert re.search(f"kernel one: .*{where}", world.log(name)), name


@pytest.mark.slow
def test_compiler_killed_during_a_request_is_asked_again(world, wis):
    world.executor(timeout_s=1)
    compiler = world.compiler()
    compiler.send_signal(signal.SIGSTOP)
    mine = Script(world.session(wis, "exact"))
    for _ in range(40):
        mine.step()
    waited(lambda: "asking the compilers" in world.log(), "nobody asks for a plan")
    assert mine.work()["kernel_instructions"] == 0  # the request is in flight, and no run waits for it
    compiler.kill()
    compiler.wait()
    waited(lambda: "no compiler delivers plans" in world.log(), "the executor does not notice")
    assert mine.work()["kernel_instructions"] == 0
    world.compiler()
    mine.until("kernel_instructions")


class Liar:
    """A fake compiler that returns what the test gives it, on its own bus."""

    def __init__(self, world, make):
        self.events, self.asked, self.work = [], [], None
        self._ready, self._world, self._make = threading.Event(), world, make
        self._stop = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    async def _serve(self):
        app = ServiceApp("compiler", self._world.url)
        target = family(OpenClRuntime(sure=True).target())
        self._stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self.end = lambda: loop.call_soon_threadsafe(self._stop.set)

        async def compiled(request):
            self.asked.append(request)
            store = ArtifactStore(app.jetstream(), ARTIFACTS, max_age_s=60, max_bytes=1 << 26)
            await store.put("lie", self._make(request))
            return CompileProgramReply(state="ready", compiler="liar", name="lie")

        async def rejected(event):
            self.events.append(event)

        async def beat(event):
            self.work = event.work

        app.serve(contracts.COMPILER_PROGRAM_COMPILE.at(target), compiled)
        app.listen(contracts.EXECUTOR_ARTIFACT_REJECTED, rejected)
        app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, beat)
        async with app.running():
            self._ready.set()
            await self._stop.wait()

    def close(self):
        self.end()
        self._thread.join()


def test_bad_artifact_is_reported_and_the_program_stays_at_tier_0(world, wis):
    world.executor()
    liar = Liar(world, lambda request: b"WOOLYART" + bytes(500))
    try:
        mine = Script(world.session(wis, "exact"))
        for _ in range(20):
            mine.step()
        waited(lambda: len(liar.events) == 2, "it is not reported")
        waited(lambda: liar.work.rejected == 2, "it is not counted")
        event = liar.events[0]
        assert event.executor_id == "x" and event.mode == "exact" and event.compiler == "liar"
        assert "artifact" in event.reason
        assert [r.rejected for r in liar.asked] == ["", "liar"]  # it was asked a second time
        for _ in range(20):
            mine.step()
        assert mine.work()["kernel_instructions"] == 0 and mine.work()["tier0_instructions"] == 40 * 6
        assert len(liar.asked) == 2
    finally:
        liar.close()


@pytest.mark.slow
def test_artifact_corrupt_on_disk_is_requested_again(world, wis):
    executor = world.executor()
    world.compiler()
    first = Script(world.session(wis, "exact"))
    first.until("kernel_instructions")
    executor.kill()
    executor.wait()
    kept = [p for p in (world.folder / "executor" / "artifacts").iterdir() if p.name != "compiler"]
    assert kept
    for path in kept:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    world.executor()
    again = Script(world.session(wis, "exact"))
    again.until("kernel_instructions")
    assert "from the disk: the artifact's digest does not match: the artifact was changed or truncated" in world.log()


def test_full_mode_waits_for_plans_and_repeats_its_bits(world, wis):
    world.executor()
    world.compiler()
    runs = []
    for _ in range(2):
        mine = Script(world.session(wis, "full"))
        for _ in range(6):
            mine.step()
        work = mine.work()
        assert work["tier0_instructions"] == 0 and work["kernel_instructions"] == 6 * 6
        runs.append(mine.answers)
    assert runs[0] == runs[1]
    plain = Script(world.session(wis, "0"))
    plain.step()
    y, e = plain.answers[0]
    assert y == runs[0][0][0] and e != runs[0][0][1]  # the bits of exp differ


def test_full_mode_without_a_compiler_fails_with_the_cure(world, wis):
    world.executor(timeout_s=0.3)
    client = world.session(wis, "full")
    other = Script(world.session(wis, "exact"))
    with pytest.raises(
        wis.error,
        match=r"WOOLYAI_JIT=full needs a compiler for opencl:\S*, and none answers .*start one with `wooly up`",
    ) as caught:
        Script(client).step()
    assert caught.value.code == "executor.no_compiler"
    other.step()  # the other session did not wait


def test_missing_driver_keeps_exact_at_tier_0_and_fails_full(world, wis, monkeypatch):
    (world.folder / "pyopencl.py").write_text(
        "def get_platforms():\n    raise RuntimeError('PLATFORM_NOT_FOUND_KHR')\n"
    )
    path = os.pathsep.join([str(world.folder), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    world.executor()
    mine = Script(world.session(wis, "exact"))
    for _ in range(20):
        mine.step()
    waited(lambda: "OpenCL does not start" in world.log(), "nobody is told")
    mine.step()
    assert mine.work()["tier0_instructions"] == 21 * 6
    with pytest.raises(wis.error, match=r"OpenCL does not start: .* pip install 'pyopencl\[pocl\]'"):
        Script(world.session(wis, "full")).step()


@pytest.mark.parametrize("jit", ["0", "exact", "full"])
def test_standalone_executor_refuses_full_mode(executor, wis, jit):
    endpoint = Endpoint.parse(executor.endpoints[0])
    client = wis.client(endpoint, executor.session_id, executor.token, jit=jit)
    if jit == "full":
        with pytest.raises(wis.error, match="WOOLYAI_JIT=full needs a runtime that runs kernels, and compilers"):
            client.make(1, 1, 2)
            client.sync()
    else:
        client.make(1, 1, 2)
        assert client.floats(1, 2) == [1, 2]
    client.close()


@pytest.mark.parametrize("jit", ["yes", "", 1, None, ["exact"]])
def test_unknown_jit_mode_is_refused(executor, wis, jit):
    with pytest.raises(wis.error, match="is unknown; use 0, exact or full"):
        wis.client(Endpoint.parse(executor.endpoints[0]), executor.session_id, executor.token, jit=jit)
