"""Jobs on a device in this process, with blobs and reports in a real nats-server: sources, constants, results, cancelling."""

import asyncio
import contextlib
import logging
import secrets
import threading
import tracemalloc

import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import BlobStore
from wooly_bus.queue_reader import take
from wooly_executor.jobs.runner import Jobs
from wooly_executor.memory.book import Scope
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType
from wooly_wis.messages import Blob, RunJobRequest, SessionPolicy
from wooly_wis.module import Constant, Load, Module, Output, Run, Tensor, encode_module, module_digest

pytestmark = pytest.mark.connected
TENANT = "acme"


@pytest.fixture(scope="module")
def own_nats():
    """Reports are one work queue of a whole server, so other tests must not use it."""
    with start_nats_server() as url:
        yield url


class Rig:
    """The jobs of a device, and the store of their tenant's blobs."""

    def __init__(self, device, js, reports):
        self.device, self.jobs, self.store, self._reports = (
            device,
            Jobs(device.loop, "x"),
            BlobStore(js, TENANT),
            reports,
        )
        self.jobs.start(js)

    async def start(self, module, **inputs):
        """Start a job. Returns its session."""
        given = [Blob(name=n, digest=await self.store.put(data)) for n, data in inputs.items()]
        session = secrets.token_hex(8)  # JetStream drops a second report with the same id
        request = RunJobRequest(
            task_id=session,
            attempt=1,
            session_id=session,
            tenant=TENANT,
            module=await self.store.put(encode_module(module)),
            inputs=tuple(given),
            policy=SessionPolicy(priority=2),
        )
        await self.jobs.on_run_job(request)
        return session

    async def ended(self):
        """The next report."""
        async with asyncio.timeout(30):
            taken = await anext(self._reports)
            await taken.done()
            return taken.payload()

    async def run(self, module, **inputs):
        """Run a job. Returns its report, and its results by name."""
        self.session = await self.start(module, **inputs)
        report = await self.ended()
        return report, {o.name: await self.store.get(o.digest, o.nbytes) for o in report.outputs}


@pytest.fixture
def rig(own_nats, device):
    @contextlib.asynccontextmanager
    async def make():
        app = ServiceApp("executor", own_nats)
        async with app.running():
            yield Rig(device, app.jetstream(), take(app.jetstream(), contracts.EXECUTOR_JOB_ENDED, "router"))

    return make


def floats(nbytes):
    return Tensor("x", DType.F32, (nbytes // 4,))


def adding(wis, constant, nbytes, *, loads=1, outputs=1, out_bytes=None):
    """y = constant + x. The input is loaded `loads` times; the result has several names."""
    make = wis.body().alloc("c", nbytes).alloc("x", nbytes)
    v = wis.at(DType.F32, nbytes // 4)
    add = wis.body().alloc("y", nbytes).call("aten.add.Tensor", ("in", "c", v), ("in", "x", v), ("out", "y", v))
    bindings = {"y": 3, "c": 1, "x": 2}
    return Module(
        programs=(encode_program(make.program), encode_program(add.program)),
        constants=(Constant(module_digest(constant), nbytes),),
        inputs=(floats(nbytes),),
        outputs=tuple([Output(Tensor(f"y{k}", DType.F32, (nbytes // 4,)), 3) for k in range(outputs)]),
        steps=(
            Run(0, (1, 2)),
            Load(0, 1),
            *[Load(1, 2)] * loads,
            Run(1, tuple([bindings[n] for n in add.names])),
        ),
    )


ONES, TWOS = [memoryview(bytes(b"\0\0\x80\x3f" if k == 1 else b"\0\0\0\x40") * (1 << 14)).tobytes() for k in (1, 2)]
THREES = b"\0\0\x40\x40" * (1 << 14)


async def test_job_result_is_computed_from_constant_and_input_of_several_loads(rig, wis):
    async with rig() as r:
        await r.store.put(ONES)
        report, results = await r.run(adding(wis, ONES, len(ONES), loads=3), x=TWOS)
        assert report.state == "completed" and results == {"y0": THREES}
        assert f"{4 * len(ONES)} bytes fetched, 0 bytes shared" in report.reason


async def test_session_of_a_completed_job_ends_in_the_usual_way(rig, wis, caplog):
    """An operator sees no warning for it."""
    async with rig() as r:
        await r.store.put(ONES)
        for _ in range(3):
            report, _ = await r.run(adding(wis, ONES, len(ONES)), x=TWOS)
            assert report.state == "completed"
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_constants_of_jobs_are_shared_with_sessions_of_the_tenant(rig, wis, device):
    module, n = adding(wis, ONES, len(ONES)), len(ONES)
    async with rig() as r:
        await r.store.put(ONES)
        for tenant, moved in ((TENANT, [(2 * n, 0), (n, n)]), ("other", [(2 * n, 0)])):
            device.admit(tenant, tenant=tenant, scope=Scope.TENANT)
            client = wis.client(device.endpoint, tenant, f"token of {tenant}")
            client.load(7, ONES)
            client.sealed()
            for fetched, shared in moved:
                report, results = await r.run(module, x=TWOS)
                assert results == {"y0": THREES}
                assert f"{fetched} bytes fetched, {shared} bytes shared" in report.reason
                # The names by which the router finds the device for the next such job. A content that is not shared yet gets its
                # name when it is hashed, which a short job does not wait for.
                assert device.brought[r.session] or not shared
            client.close()
            device.wait_closed(tenant)


async def test_results_of_job_pass_through_the_executor_in_pieces(rig, wis):
    constant = ONES * 64  # 4 MiB
    async with rig() as r:
        await r.store.put(constant)
        module = adding(wis, constant, len(constant), outputs=16)
        tracemalloc.start()
        try:
            await r.start(module, x=TWOS * 64)
            report = await r.ended()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert report.state == "completed" and len(report.outputs) == 16
        assert {o.digest for o in report.outputs} == {module_digest(THREES * 64).hex()}
        assert peak < 8 * len(constant)  # the results together are twice as large


async def test_job_cancelled_while_source_does_not_come_ends_and_frees_its_session(rig, wis, device, monkeypatch):
    waits, chunks = asyncio.Event(), BlobStore.chunks

    async def silent(store, name):
        if name == module_digest(TWOS).hex():
            yield TWOS[:100]
            waits.set()
            await asyncio.Event().wait()
        async for piece in chunks(store, name):
            yield piece

    monkeypatch.setattr(BlobStore, "chunks", silent)
    async with rig() as r:
        await r.store.put(ONES)
        session = await r.start(adding(wis, ONES, len(ONES)), x=TWOS)
        await waits.wait()
        held = device.call(lambda: device.loop.sessions[session].host_use().job)
        assert held > len(TWOS)
        assert r.jobs.cancel(session)
        report = await r.ended()
        assert report.state == "lost" and "stopped" in report.reason
        device.wait_closed(session)
        assert not [t for t in threading.enumerate() if t.name == "job"]


@pytest.mark.parametrize(
    ("forged", "short", "reason"),
    [(True, False, "do not match its digest"), (False, True, "input x has 65535 bytes, the module needs 65536")],
)
async def test_job_with_wrong_source_fails_with_reason(rig, wis, forged, short, reason):
    async with rig() as r:
        await r.store.put(ONES)
        x = TWOS[:-1] if short else TWOS[::-1]
        if forged:
            await r.store._store.put(module_digest(x).hex(), TWOS)
        report, _ = await r.run(adding(wis, ONES, len(ONES)), x=x)
        assert report.state == "failed" and reason in report.reason
