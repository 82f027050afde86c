"""The compiler as a service, with a real NATS server and real workers: requests, equal requests, crashes, refusals,
explanations.
"""

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import signal
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
from nats import connect
from wooly_bus import contracts, subjects
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ARTIFACTS, ArtifactStore
from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import NoResponderError, RefusedError
from wooly_compiler import app as compiler_app
from wooly_compiler.actor import CompilerActor, is_complete
from wooly_compiler.build import pocl
from wooly_compiler.build.toolchains import BUILDERS, missing
from wooly_compiler.settings import CompilerSettings
from wooly_compiler.version import version
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_testkit.tape import Tape
from wooly_wis.artifact import decode_artifact, family, key_of
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import KernelKey, Source, decode_code, encode_source
from wooly_wis.messages import (
    CompileKernelRequest,
    CompileProgramRequest,
    ExplainProgramReply,
    ExplainProgramRequest,
)
from wooly_wis.plan import KernelStep
from wooly_wis.verifier import verify_program

pytestmark = pytest.mark.connected
#: Runs a test in the event loop of the fixture `shared`.
beside = pytest.mark.asyncio(loop_scope="module")
F32 = DType.F32


@pytest.fixture
def nats():
    with start_nats_server() as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory):
    """A service with a warm worker, and a client, for tests that ask for different programs."""
    with start_nats_server() as url:
        folder = tmp_path_factory.mktemp("compiler")
        async with service(url, folder, patience_s=50) as actor, client(url) as app:  # no reply says `building`
            yield actor, app


@contextlib.asynccontextmanager
async def service(url, folder, **settings):
    app = ServiceApp("compiler", url)
    actor = CompilerActor(CompilerSettings(nats_url=url, state_dir=folder, **settings), app)
    actor.serve(await actor.families())
    try:
        async with app.running():
            yield actor
    finally:
        await actor.stop()


@contextlib.asynccontextmanager
async def client(url):
    async with ServiceApp("test", url).running() as app:
        yield app


def program(n=1 << 17, exponent=2.0):
    t = Tape()
    x, w = t.input(F32, n), t.input(F32, n)
    t.op("pow", t.op("mul", x, w), exponent)
    return t.program()[0], t.params


def request(found, mode="exact", target=None, **more):
    made, params = found
    key = key_of(made, target or pocl.target(1), mode, params)
    raw = base64.b64encode(encode_program(made)).decode()
    decided = tuple([(k, w.hex()) for k, w in key.decided])
    return CompileProgramRequest(program=raw, target=key.target, mode=mode, decided=decided, **more), key


async def ask(app, message):
    rpc = contracts.COMPILER_PROGRAM_COMPILE.at(family(message.target))
    return await app.request(rpc, message, timeout=60)


@beside
async def test_compile_program_when_ready_has_stored_the_artifact(shared):
    _, app = shared
    found = program()
    message, key = request(found)
    reply = await ask(app, message)
    assert (reply.state, reply.compiler, reply.name) == ("ready", version(), key.name(version()))
    data = await ArtifactStore(app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0).get(reply.name)
    artifact = decode_artifact(data, key, version(), found[0], verify_program(found[0]))
    (step,) = [s for s in artifact.plan.steps if isinstance(s, KernelStep)]
    assert len(step.lines) == 2 and artifact.plan.assumed == {0: 2.0}


@beside
async def test_compile_program_of_equal_requests_builds_once(shared, monkeypatch):
    actor, app = shared
    message, _ = request(program(n=(1 << 17) + 1))
    asked = []
    real = actor._ask

    async def counted(*args):
        asked.append(args)
        return await real(*args)

    monkeypatch.setattr(actor, "_ask", counted)
    replies = await asyncio.gather(*[ask(app, message) for _ in range(8)])
    assert {r.name for r in replies} == {replies[0].name} and len(asked) == 1
    assert (await ask(app, message)).name == replies[0].name and len(asked) == 1
    rebuild = message.model_copy(update={"rejected": version()})
    assert (await ask(app, rebuild)).state == "ready" and len(asked) == 2  # the executor rejected the first artifact


@beside
async def test_compile_program_without_bucket_answers_from_disk(shared, monkeypatch):
    first, app = shared
    message, _ = request(program(n=(1 << 17) + 2))
    name = (await ask(app, message)).name
    monkeypatch.setattr(CompilerActor, "_ask", no_worker)
    with start_nats_server() as other:
        async with service(other, first._settings.state_dir), client(other) as app:
            assert (await ask(app, message)).name == name
            store = ArtifactStore(app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0)
            assert is_complete(await store.get(name))
            assert await store.get("nothing") is None


async def no_worker(self, request, target, what, workers=None):
    """Replace `CompilerActor._ask`: the targets are known, and nothing is built."""
    assert request["what"] == "targets", "a worker is asked"
    return json.dumps([family(pocl.target(1))]).encode()


@beside
async def test_compile_program_over_patience_replies_building(shared, monkeypatch):
    actor, app = shared
    message, _ = request(program(n=(1 << 17) + 3))
    monkeypatch.setattr(actor, "_settings", actor._settings.model_copy(update={"patience_s": 0.01}))
    worker = actor._workers.get_nowait()
    assert (await ask(app, message)).state == "building"
    actor._workers.put_nowait(worker)
    while (reply := await ask(app, message)).state == "building":
        pass
    assert reply.state == "ready"


@beside
async def test_compile_program_of_invalid_program_is_refused_each_time(shared):
    _, app = shared
    message, _ = request(program())
    bad = message.model_copy(update={"program": base64.b64encode(b"no program").decode()})
    other = message.model_copy(update={"decided": ((5, bytes(8).hex()),)})
    for wrong in (bad, bad, other):
        with pytest.raises(RefusedError) as caught:
            await ask(app, wrong)
        assert caught.value.code == "compiler.refused"
    assert (await ask(app, message)).state == "ready"


async def test_compile_program_without_storage_is_refused_for_now(tmp_path, monkeypatch):
    monkeypatch.setattr(CompilerActor, "_ask", built)
    config = tmp_path / "nats.conf"
    config.write_text("jetstream { max_file_store: 268435456 }\n")
    with start_nats_server("-c", str(config)) as url:
        async with service(url, tmp_path / "compiler") as actor, client(url) as app:
            js = app.jetstream()
            await js.add_stream(name="ALL", subjects=["all"], max_bytes=250 << 20)
            message, key = request(program())
            for _ in range(2):
                with pytest.raises(
                    RefusedError, match=r"cannot store .*too little free storage .*max_file_store"
                ) as caught:
                    await ask(app, message)
                assert caught.value.retryable
            assert not actor._refusals
            await js.delete_stream("ALL")
            assert (await ask(app, message)).name == key.name(version())


async def built(self, request, target, what, workers=None):
    """Replace `CompilerActor._ask`: every program has the same artifact."""
    if request["what"] == "targets":
        return json.dumps([family(pocl.target(1))]).encode()
    return b"artifact" + digest(b"artifact")


@beside
async def test_compile_program_for_unknown_family_has_no_responder(shared):
    _, app = shared
    message, _ = request(program(), target="opencl:000000000000-x1")
    with pytest.raises(NoResponderError):
        await ask(app, message)


@beside
async def test_compile_program_over_the_time_limit_fails_only_that_program(shared, monkeypatch):
    actor, app = shared
    worker = actor._workers._queue[0]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_limits", type(worker._limits)(0.01, 16 << 30))
        with pytest.raises(RefusedError, match=r"took more than 0\.01 s on program"):
            await ask(app, request(program(n=(1 << 17) + 4))[0])
    assert (await ask(app, request(program(n=(1 << 17) + 5))[0])).state == "ready"


@beside
async def test_compile_program_with_killed_worker_fails_only_that_program(shared):
    actor, app = shared
    worker = actor._workers._queue[0]
    os.kill(worker._process.pid, signal.SIGSTOP)  # the worker must not finish before it is killed
    asking = asyncio.create_task(ask(app, request(program(n=(1 << 17) + 6))[0]))
    while actor._workers.qsize():
        await asyncio.sleep(0.001)
    worker._process.kill()
    with pytest.raises(RefusedError, match=r"crashed \(exit -9\) on program"):
        await asking
    assert (await ask(app, request(program(n=(1 << 17) + 7))[0])).state == "ready"


COPY = "__global__ void copy(const float *x, float *y, int n) { int i = threadIdx.x; if (i < n) y[i] = x[i]; }"


def kernel_request(text=COPY, entry="copy"):
    raw = encode_source(Source("cuda-c", text))
    args, block, target = ("*u8", "*u8", "i64"), (64, 1, 1), pocl.target(1)
    name = KernelKey(digest(raw), entry, args, block, ()).name(target, version())
    source = base64.b64encode(raw).decode()
    return CompileKernelRequest(source=source, entry=entry, args=args, block=block, target=target), name


async def ask_for_kernel(app, message):
    rpc = contracts.COMPILER_KERNEL_COMPILE.at(family(message.target))
    return await app.request(rpc, message, timeout=60)


@beside
async def test_compile_kernel_of_equal_requests_builds_once_under_its_name(shared, monkeypatch):
    actor, app = shared
    message, name = kernel_request()
    replies = await asyncio.gather(*[ask_for_kernel(app, message) for _ in range(4)])
    assert {(r.state, r.compiler, r.name) for r in replies} == {("ready", version(), name)}
    monkeypatch.setattr(actor, "_ask", None)  # no worker is asked again
    assert (await ask_for_kernel(app, message)).name == name
    data = await ArtifactStore(app.jetstream(), ARTIFACTS, max_age_s=0, max_bytes=0).get(name)
    code = decode_code(data, name)
    assert [p.writes for p in code.parameters] == [False, True, False] and code.code


@beside
async def test_compile_kernel_of_unknown_entry_is_refused(shared, monkeypatch):
    actor, app = shared
    message, _ = kernel_request(entry="missing")
    for _ in range(2):
        with pytest.raises(RefusedError, match="the source has no kernel missing; it has copy") as caught:
            await ask_for_kernel(app, message)
        assert caught.value.code == "compiler.refused" and not caught.value.retryable
        monkeypatch.setattr(actor, "_ask", None)
    with pytest.raises(RefusedError, match="are not a kernel's source"):
        await ask_for_kernel(app, message.model_copy(update={"source": "AAAA"}))
    assert actor._kernel_workers is not actor._workers


async def test_serve_without_toolchains_logs_each_with_what_installs_it(nats, tmp_path, monkeypatch, caplog):
    async def at_once():
        pass

    monkeypatch.setattr(compiler_app, "until_signalled", at_once)
    monkeypatch.setenv("PATH", str(tmp_path))  # the worker finds no clang
    absent = {name: why for name in BUILDERS if (why := missing(name))}
    with caplog.at_level(logging.INFO):
        await compiler_app.serve(CompilerSettings(nats_url=nats, state_dir=tmp_path))
    said = dict(re.findall(rf"compiler {version()} does not build for (\w+): (.*)", caplog.text))
    assert said == absent and ("hip" in said or find_spec("hip"))
    assert all("pip install" in why for why in said.values())


@pytest.mark.slow
async def test_compile_kernel_in_missing_language_is_refused_as_retryable(nats, tmp_path, monkeypatch):
    hidden = tmp_path / "first" / "wooly_cuda_c-0.dist-info"  # hides the installed distribution and has no entry point
    hidden.mkdir(parents=True)
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: wooly-cuda-c\nVersion: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(hidden.parent))
    message, _ = kernel_request()
    async with service(nats, tmp_path / "compiler", patience_s=50) as actor, client(nats) as app:
        with pytest.raises(
            RefusedError, match=r"kernels in cuda-c need wooly-cuda-c, .* pip install wooly-cuda-c"
        ) as caught:
            await ask_for_kernel(app, message)
        assert caught.value.retryable
        monkeypatch.delenv("PYTHONPATH")  # the language is visible again, and the worker restarts
        actor._kernel_workers._queue[0].close()
        actor._kernel_workers._queue[1].close()
        assert (await ask_for_kernel(app, message)).state == "ready"


@beside
async def test_explain_program_returns_every_pass(shared):
    _, app = shared
    made, _ = program()
    raw = base64.b64encode(encode_program(made)).decode()
    reply = await app.request(
        contracts.COMPILER_PROGRAM_EXPLAIN,
        ExplainProgramRequest(program=raw, mode="exact"),
        timeout=60,
    )
    stages = json.loads(zlib.decompress(base64.b64decode(reply.stages)))
    names = [name for name, _ in stages]
    assert names == ["resolve-views", "expand", "remove-redundant", "remove-dead", "fuse", "weigh", "lower"]
    assert "may give other bits than the library for this exponent" in stages[-1][1]  # the request names no exponent


async def test_explain_program_for_tenants_runs_one_per_tenant(nats, tmp_path, monkeypatch):
    monkeypatch.setattr(ServiceApp, "knows_tenants", True, raising=False)
    monkeypatch.setattr(ServiceApp, "__setattr__", _but_not("knows_tenants"))
    asked, release = [], asyncio.Event()

    async def ask(self, request, target, what):
        if request["what"] == "targets":
            return await no_worker(self, request, target, what)
        asked.append(what)
        await release.wait()
        return b"[]"

    monkeypatch.setattr(CompilerActor, "_ask", ask)
    async with service(nats, tmp_path):
        raw = base64.b64encode(encode_program(program()[0])).decode()
        data, headers = encode(ExplainProgramRequest(program=raw, mode="exact"))
        clients = {t: await connect(nats, inbox_prefix=subjects.client_inbox(t, "u")) for t in ("bob", "alice")}

        def explain(tenant):
            subject = contracts.COMPILER_PROGRAM_EXPLAIN.for_tenant(tenant)
            return asyncio.create_task(clients[tenant].request(subject, data, timeout=30, headers=headers))

        flood = [explain("bob") for _ in range(8)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        hers = explain("alice")
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        done, _ = await asyncio.wait(flood, timeout=0.2)
        assert len(done) == 7 and len(asked) == 2, "one request of bob and one of alice are running"
        release.set()
        for answer in (await hers, *await asyncio.gather(*flood)):
            if b"compiler.limit" not in answer.data:
                assert decode_reply(answer.data, answer.headers, ExplainProgramReply).stages
        for each in clients.values():
            await each.close()


def _but_not(name):
    def change(self, key, value):
        if key != name:
            object.__setattr__(self, key, value)

    return change


def test_readme_lists_every_setting():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert {f"`WOOLY_COMPILER_{name.upper()}`" for name in CompilerSettings.model_fields} == set(
        re.findall(r"^\| (`WOOLY_COMPILER_\w+`)", readme, re.MULTILINE)
    )
