"""Tests of requests for plans: a request ends when no session needs the plan any more."""

import asyncio
import re
from types import SimpleNamespace

import pytest
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.worker import WorkerError
from wooly_executor.plans import compilers
from wooly_executor.plans import tiers as tiers_module
from wooly_executor.plans.artifacts import ArtifactCache
from wooly_executor.plans.compilation import PlanSource
from wooly_executor.plans.compilers import CompilerServices, OwnCompiler, no_compiler
from wooly_executor.plans.tiers import OFTEN, Tiers
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.artifact import Key
from wooly_wis.dtypes import DType
from wooly_wis.messages import CompileProgramReply


@pytest.fixture
async def source(tmp_path, monkeypatch):
    """A plan source whose compilers never answer."""
    loop = SimpleNamespace(
        tiers=Tiers(),
        busy=SimpleNamespace(total_ns=0),
        dispatch=SimpleNamespace(state=SimpleNamespace(flights=())),
    )
    found = PlanSource(None, loop, None, tmp_path)

    async def never(entry):
        await asyncio.Event().wait()

    monkeypatch.setattr(found, "_get_plan", never)
    running = asyncio.create_task(found.run())
    yield found
    assert not running.done()
    running.cancel()


async def until(true):
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def wanted(tiers, wis, *counts):
    """Define programs and run them until plans are requested."""
    store = ProgramStore(TorchCpuRuntime())
    found = []
    for count in counts:
        view = wis.at(DType.F32, count)
        found.append(store.define(wis.body().call("aten.relu_.default", ("inout", "x", view)).raw))
        for _ in range(OFTEN):
            tiers.choose(found[-1], "exact", [])
    return found


async def test_plan_source_program_without_sessions_cancels_its_request(source, wis):
    tiers = source._tiers
    first, second = wanted(tiers, wis, 1, 2)
    await until(lambda: len(source._getting) == 2)
    tiers.forget(first.digest)
    await until(lambda: [entry.digest for entry in source._getting] == [second.digest])


async def test_plan_source_request_cancelled_before_it_starts_asks_no_compiler(source, wis):
    tiers = source._tiers
    first, second = wanted(tiers, wis, 1, 2)
    tiers.forget(first.digest)
    await until(lambda: [entry.digest for entry in source._getting] == [second.digest])


async def test_plan_source_requests_in_flight_never_exceed_the_remembered_ones(source, wis, monkeypatch):
    monkeypatch.setattr(tiers_module, "KEPT", 2)
    programs = wanted(source._tiers, wis, 1, 2, 3, 4)
    await until(lambda: {entry.digest for entry in source._getting} == {p.digest for p in programs[2:]})


class FullBucket:
    """An app whose compiler cannot store artifacts at first. `js` is its JetStream."""

    def __init__(self, refusals):
        self.refusals = refusals

    async def request(self, rpc, request, timeout):
        if self.refusals:
            raise self.refusals.pop()
        return CompileProgramReply(state="ready", compiler="c", name="a")


def full_bucket():
    return RefusedError("compiler.refused", "cannot store the artifact in the bucket", retryable=True)


async def test_compilers_that_may_succeed_later_are_asked_again(monkeypatch):
    monkeypatch.setattr(compilers, "PAUSES_S", (0.001, 0.001))
    services = CompilerServices(FullBucket([full_bucket(), full_bucket()]), "x")
    services._blobs = SimpleNamespace(get=stored)
    key = Key(bytes(16), "opencl:000000000000-x1", "exact")
    assert await services.compile(key, b"", "", patient=True) == ("c", b"a")
    services = CompilerServices(FullBucket([RefusedError("compiler.refused", "no kernel computes this")]), "x")
    assert await services.compile(key, b"", "", patient=True) is None


async def stored(name):
    return name.encode()


async def test_session_that_waits_for_a_plan_gets_the_compilers_error(tmp_path, wis, monkeypatch):
    monkeypatch.setattr(compilers, "PAUSES_S", (0.001, 0.001))
    services = CompilerServices(FullBucket([full_bucket() for _ in range(10**6)]), "x", timeout_s=0.01)
    runtime = SimpleNamespace(target=lambda: "opencl:000000000000-x1")
    loop = SimpleNamespace(tiers=Tiers(), busy=SimpleNamespace(total_ns=0))
    program = ProgramStore(TorchCpuRuntime()).define(
        wis.body().call("aten.relu_.default", ("inout", "x", wis.at(DType.F32, 4))).raw
    )
    entry = SimpleNamespace(digest=program.digest, mode="full", decided=(), program=program.prepared.program)
    found = await PlanSource(services, loop, runtime, tmp_path)._get_plan(entry)
    assert found == (None, "cannot store the artifact in the bucket", False)


class Builder:
    """The worker processes of a compiler on a machine without NVRTC."""

    def __init__(self):
        self.asked = []

    def version(self):
        return "0" * 12

    def ask(self, request, what):
        self.asked.append(request["what"])
        if request["what"] == "missing":
            return b"NVRTC is missing; install it" if request["target"].startswith("cuda") else b""
        return b"artifact"


@pytest.mark.parametrize("mode", ["exact", "full"])
async def test_own_compiler_without_tools_for_the_target_says_what_is_missing(mode):
    builder = Builder()
    compiler = OwnCompiler(builder)
    with pytest.raises(WorkerError, match=r"cannot compile for cuda:sm_90: NVRTC is missing; install it"):
        await compiler.compile(Key(bytes(16), "cuda:sm_90", mode), b"", "", patient=mode == "exact")
    assert builder.asked == ["missing"]


async def test_own_compiler_checks_its_tools_once(wis):
    builder = Builder()
    compiler = OwnCompiler(builder)
    for _ in range(2):
        key = Key(bytes(16), "opencl:000000000000-x1", "full")
        assert await compiler.compile(key, b"", "", patient=False) == ("0" * 12, b"artifact")
    assert builder.asked == ["missing", "artifact", "artifact"]


@pytest.mark.parametrize(
    ("target", "cure"),
    [
        ("cuda:sm_90", r"cuda:sm_90.*has NVRTC: the image wooly-compiler-cuda, .*'wooly-compiler\[cuda\]'"),
        ("hip:gfx942", r"hip:gfx942.*has hipRTC or clang: the image wooly-compiler-rocm, .*'wooly-compiler\[rocm\]'"),
        ("opencl:000000000000-x1", r"opencl:0.*start one with `wooly up`"),
    ],
)
def test_no_compiler_names_what_the_device_needs(target, cure):
    assert re.search(cure, no_compiler(target, BusError("no service answers")))


def test_artifacts_of_an_earlier_release_wait_for_a_compiler(tmp_path):
    """An upgraded compiler may have mended a fault of the code that is on the disk."""
    old = ArtifactCache(tmp_path, release="1")
    old.compiler = "c" * 8
    assert old.compiler == ArtifactCache(tmp_path, release="1").compiler == "c" * 8
    new = ArtifactCache(tmp_path, release="2")
    assert new.compiler == ""
    new.compiler = "d" * 8
    assert new.compiler == "d" * 8 and old.compiler == ""
