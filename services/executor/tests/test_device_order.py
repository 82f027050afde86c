"""The order of accesses to a GPU's memory: races are found, and the executor has none."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from wooly_executor.memory.swap import Place, Policy
from wooly_executor.mover import Loading, LoadJob, Mover
from wooly_executor.runtime.flights import Flights
from wooly_executor.runtime.page_locked import page_locked
from wooly_executor.swap_space import Copy, Pages
from wooly_executor.vram import SwapSettings
from wooly_wis.dtypes import DType

from services.executor.tests.conftest import known_times
from services.executor.tests.device_order import RaceError
from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime
from services.executor.tests.test_gpu_runtime import Side, gathering

HERE = Path(__file__).parent
#: Tests of the device loop, of swapping, dispatch, sharing, walls, recovery, collectives and flights.
SUITES = (
    *("test_session", "test_vram", "test_dispatch", "test_checkpoints", "test_limits", "test_hostile_sessions"),
    *("test_host_account", "test_collectives", "test_flights", "test_gpu_runtime", "test_gpu_kernels"),
    *("test_fresh_memory", "test_failing_device", "test_pinned_files", "test_decoding", "test_ipc", "test_spans"),
    *("test_remote_collectives", "test_tiers"),
)


@pytest.fixture
def ordered():
    """In place of the check after each test: races are expected here."""


@pytest.fixture
def gpu():
    """A driver whose order the test itself checks, and which is attached to the test's thread."""
    made = FakeDriver()
    with made.order.watched():
        made.attach()
        yield made


def copied(driver, source):
    with driver.copy_context():
        target = driver.copy_target(source.nbytes)
        target.copy_(source)
    return target


def test_order_of_one_stream_is_known(gpu):
    x = torch.ones(4)
    for _ in range(3):
        x.add_(1)
    del x
    gpu.order.check()
    assert gpu.order.accesses >= 4


def test_order_write_beside_a_copy_is_a_race_that_names_both(gpu):
    x = torch.ones(4, dtype=torch.uint8)
    with pytest.raises(RaceError) as found, gpu.copy_context():
        with gpu.torch_cuda.stream(gpu.stream):
            x.add_(1)
        x.clone()
        gpu.order.check()
    text = str(found.value)
    assert re.search(r"write by the stream of programs: aten::add_.* \(tests/test_device_order.py:\d+", text)
    assert re.search(r"read by the stream of copies: aten::clone .*\(tests/test_device_order.py:\d+", text)


def test_order_copy_waits_for_earlier_work_and_host_waits_for_the_copy(gpu):
    x = torch.ones(4, dtype=torch.uint8)
    x.add_(1)
    y = copied(gpu, x)
    x.add_(1)
    y.add_(1)
    del x, y
    gpu.order.check()


def test_order_reads_beside_each_other_and_other_bytes_are_no_race(gpu):
    x = torch.ones(8)
    with gpu.copy_context():
        with gpu.torch_cuda.stream(gpu.stream):
            x[:4].add_(1)
            x[6:].clone()
        x[4:].clone()
    gpu.order.check()


def test_order_memory_freed_while_another_stream_uses_it_is_a_race(gpu):
    with gpu.copy_context():
        x = torch.ones(4)
    x.add_(1)
    del x
    with pytest.raises(
        RaceError, match=r"(?s)programs: aten::add_.*write by the stream of copies: the memory is freed"
    ):
        gpu.order.check()


def test_order_memory_freed_after_a_wait_is_no_race(gpu):
    with gpu.copy_context():
        x = torch.ones(4)
    x.add_(1)
    gpu.elapsed_ns([gpu.record(), gpu.record()])
    del x
    gpu.order.check()


def test_order_mark_before_the_work_does_not_order_it(gpu):
    with gpu.copy_context():
        x = torch.ones(4)
    marks = [gpu.record(), gpu.record()]
    x.add_(1)
    gpu.elapsed_ns(marks)
    del x
    with pytest.raises(RaceError, match="the memory is freed"):
        gpu.order.check()


@pytest.mark.parametrize("waits", [False, True])
def test_order_host_reads_a_copy_before_it_is_complete(gpu, waits):
    x, host = torch.ones(4, dtype=torch.uint8), gpu.pinned(4)
    host.copy_(x, non_blocking=True)
    if waits:
        gpu.elapsed_ns([gpu.record(), gpu.record()])
    host.tolist()
    if waits:
        gpu.order.check()
    else:
        with pytest.raises(
            RaceError, match=r"(?s)write by the stream of programs: aten::copy_.*read by the host: tolist"
        ):
            gpu.order.check()


@pytest.mark.parametrize("waits", [False, True])
def test_order_pages_unlocked_during_a_copy_are_a_race(gpu, waits):
    x, host = torch.ones(64, dtype=torch.uint8), page_locked(64, gpu.lock, gpu.unlock)
    host.copy_(x, non_blocking=True)
    if waits:
        gpu.stream.synchronize()
    del host
    gc.collect()
    assert not gpu.locked
    if waits:
        gpu.order.check()
    else:
        with pytest.raises(RaceError, match="write by the host: the memory is freed"):
            gpu.order.check()


def test_order_graph_that_uses_freed_memory_is_found(gpu):
    x = torch.ones(4)
    graph = gpu.capture(lambda: x.add_(1))
    graph.replay()
    gpu.order.check()
    with gpu.order.by_address(), pytest.raises(RaceError, match="a graph uses memory that was freed"):
        torch.frombuffer(bytearray(16), dtype=torch.float32).add_(1)
        gpu.order.check()


class CopiesOwnMemory(FakeDriver):
    """The mend is taken out: memory for what comes back to the device belongs to the stream of copies."""

    def copy_target(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class NoWait(FakeDriver):
    """Another part of it is taken out: copies do not wait for programs that used the memory before."""

    def copy_target(self, nbytes):
        with self.torch_cuda.stream(self.stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (FakeDriver, ""),
        (
            CopiesOwnMemory,
            r"(?s)by the stream of programs: aten::\w+_.* \(.*runtime/.*by the stream of copies: the memory is freed",
        ),
        (
            NoWait,
            r"(?s)by the stream of programs: memory for aten::empty.*swap_space.*by the stream of copies: aten::copy_.*swap_spac",
        ),
    ],
)
def test_order_of_memory_that_is_swapped_in(make_device, wis, tmp_path, monkeypatch, kind, says):
    """Two sessions swap each other out, and free memory while their programs may still use it.

    The mover's thread is slow to go on after each job, and keeps no memory meanwhile that a session frees.
    """
    step = Mover._step
    monkeypatch.setattr(Flights, "known", known_times)
    monkeypatch.setattr(Mover, "_step", lambda mover, entry: (step(mover, entry), time.sleep(0.05)))
    driver = kind()
    swap = SwapSettings(Policy(0, 1 << 20, 0), 64 << 20, 0, tmp_path, 30_000_000_000)
    device = make_device(runtime=gpu_runtime(driver), memory=10 << 20, swap=swap)
    clients, v = [device.open(name) for name in "ab"], wis.at(DType.F32, 1 << 20)
    for client in clients:
        for buffer in (1, 2):
            client.run(wis.body().alloc("x", 3 << 20), {"x": buffer})
        client.sync()
    v = wis.at(DType.F32, 3 << 18)
    for round_, client in [(k, c) for k in range(2) for c in clients]:
        client.run(wis.body().fill("x", v, 1.0), {"x": 1})
        client.run(wis.body().fill("x", v, 2.0), {"x": 2}, frees=[2] if round_ else [])
        client.sync()
    device.check()
    assert device.call(lambda: device.loop.vram._swapping.swapped_in) >= 2
    if says:
        with pytest.raises(RaceError, match=says):
            driver.order.check()
    else:
        driver.order.check()
        assert driver.order.accesses > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES)
def test_order_of_the_suites_on_a_fake_gpu_is_known(suite):
    """Each launch that may be in flight is in flight, and no test of the suite finds a race."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", str(HERE / f"{suite}.py")]
    done = subprocess.run(
        command, env=os.environ | {"WOOLY_TEST_ON_FAKE_GPU": "1"}, capture_output=True, text=True, cwd=HERE.parents[2]
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_order_of_status_words_that_are_freed_after_a_violation_is_known(gpu):
    """Words are made beside the device's thread. When their program is dropped, programs may still use them."""
    side = Side(gpu_runtime(gpu))
    program, contents = gathering()
    bad = {s: torch.tensor([0, 5, 2, 1]) if t.dtype == torch.int64 else t for s, t in contents.items()}
    prepared = side.plan(program)
    words = weakref.ref(prepared.status._words.untyped_storage())
    assert side.run(prepared, bad)[1].failed_at is not None
    del prepared
    gc.collect()
    assert words() is None
    gpu.order.check()


def test_mover_keeps_no_memory_of_a_job_that_is_done():
    """A session may free memory that the last job brought: the mover's thread does not keep it until its next job."""
    mover, done = Mover(), threading.Event()
    job = LoadJob(0, lambda job, error: done.set(), pieces=[Loading(("own", 1), Copy(Place.HOST, 4, Pages(0)))])
    job.pieces[0].copy.save(torch.ones(4, dtype=torch.uint8), 0, 4)
    mover.submit(job)
    assert done.wait(30)
    memory = weakref.ref(job.pieces[0].target.untyped_storage())
    del job
    for _ in range(3000):
        if memory() is None:
            break
        time.sleep(0.01)
    assert memory() is None
    mover.stop()
