"""Checks of modules: in separate processes, with turns of tenants and limits."""

import asyncio
import fcntl
import signal
import struct
import termios
import threading

import pytest
from wooly_bus.blobs import BlobStore
from wooly_router.limits import LimitError
from wooly_router.modules import ModuleCheckError, ModuleChecks
from wooly_router.settings import RouterSettings
from wooly_wis.codec import encode_program
from wooly_wis.errors import DecodeError
from wooly_wis.limits import MAX_MODULE_PROGRAMS, MAX_MODULE_STEPS
from wooly_wis.module import MAX_MODULE_BYTES, MAX_NODES, Load, Module, decode_module, encode_module, module_digest
from wooly_wis.program import Program

pytestmark = pytest.mark.connected
PATIENCE_S = 30


class Held:
    """A fake process that answers when the test lets it."""

    def __init__(self):
        self.asked, self.release = [], threading.Semaphore(0)

    def ask(self, request, target, what):
        self.asked.append(what)
        assert self.release.acquire(timeout=PATIENCE_S)
        return b'{"peak": 5, "cpu_ns": 7}'

    def close(self):
        pass


class Store:
    """A fake bucket in which every blob exists."""

    def __init__(self):
        self.read = 0

    async def size(self, name):
        return 3

    async def chunks(self, name):
        self.read += 1
        yield b"abc"


@pytest.fixture
def held(tmp_path):
    """Checks with one fake process that waits, and a queue of two modules per tenant."""
    checks = ModuleChecks(RouterSettings(state_dir=tmp_path, module_workers=1, module_queue=2))
    process = Held()
    checks._idle = checks._all = [process]
    yield checks, process
    checks.close()


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_check_of_several_tenants_takes_turns(held):
    checks, process = held
    asking = [asyncio.create_task(checks.check(Store(), "bob", f"bob-{i}")) for i in range(3)]
    await until(lambda: process.asked)
    asking.append(asyncio.create_task(checks.check(Store(), "alice", "alice-0")))
    await asyncio.sleep(0)
    for _ in asking:
        process.release.release()
    found = await asyncio.wait_for(asyncio.gather(*asking), PATIENCE_S)
    assert [what[:-1] for what in process.asked] in (
        ["bob-0", "bob-1", "alice-0", "bob-2"],
        ["bob-0", "alice-0", "bob-1", "bob-2"],
    )
    assert {f.peak for f in found} == {5} and checks.spent_ns == {"bob": 21, "alice": 7}


async def test_check_beyond_tenant_queue_is_refused(held):
    checks, process = held
    asking = [asyncio.create_task(checks.check(Store(), "bob", f"{i}")) for i in range(3)]
    await until(lambda: process.asked and len(checks._waiting["bob"]) == 2)
    with pytest.raises(LimitError, match=r"2 modules that wait .* the limit is 2 \(WOOLY_ROUTER_MODULE_QUEUE\)"):
        await checks.check(Store(), "bob", "3")
    for _ in range(4):
        process.release.release()
    assert (await checks.check(Store(), "alice", "0")).peak == 5
    await asyncio.gather(*asking)


async def test_check_of_known_or_running_module_is_not_repeated(held):
    checks, process = held
    store = Store()
    twice = [asyncio.create_task(checks.check(store, "bob", "m")) for _ in range(2)]
    await until(lambda: process.asked)
    twice[0].cancel()  # the first client has disconnected; the second one still waits
    process.release.release()
    assert (await twice[1]).peak == 5
    assert (await checks.check(store, "bob", "m")).peak == 5
    assert store.read == len(process.asked) == 1
    # So that a tenant cannot learn what another tenant submitted.
    other = asyncio.create_task(checks.check(store, "alice", "m"))
    await until(lambda: len(process.asked) == 2)
    process.release.release()
    await other


async def test_check_beyond_time_or_memory_is_refused_and_next_succeeds(rig, settings):
    settings.module_s = 3.0
    slow = encode_module(Module((), (), (), (), (Load(0, 0),) * MAX_MODULE_STEPS))
    async with rig() as r:
        store, checks = BlobStore(r.app.jetstream(), "bob"), r.jobs.modules
        small = await store.put(encode_module(Module((), (), (), (), ())))
        assert (await checks.check(store, "bob", small)).refusal == ""
        for process in checks._all:
            process._limits = type(process._limits)(seconds=0.05)
        found = await checks.check(store, "bob", await store.put(slow))
        assert found.refusal.startswith(ModuleCheckError.code) and "took more than 0.05 s" in found.refusal
        assert checks.spent_ns["bob"] >= 0.05e9
        for process in checks._all:
            process._limits = type(process._limits)(seconds=PATIENCE_S)
        again = await checks.check(store, "bob", module_digest(slow).hex())  # the overload of the machine has ended
        assert "loads source 0, but the module has 0" in again.refusal
        other = await store.put(encode_module(Module((), (), (), (), (Load(1, 1),))))
        assert "loads source 1, but the module has 0" in (await checks.check(store, "bob", other)).refusal


async def test_check_whose_process_is_killed_is_repeated_once(rig, settings):
    settings.module_workers = 1
    async with rig() as r:
        store, checks = BlobStore(r.app.jetstream(), "bob"), r.jobs.modules
        names = [await store.put(encode_module(Module((), (), (), (), (Load(i, i),)))) for i in range(3)]
        await checks.check(store, "bob", names[0])
        (worker,) = checks._all

        async def kill_at_request():
            process = worker._process
            process.send_signal(signal.SIGSTOP)
            await until(lambda: struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)))[0])
            process.kill()
            await until(lambda: worker._process is not process)

        killing = asyncio.create_task(kill_at_request())
        assert "loads source 1, but the module has 0" in (await checks.check(store, "bob", names[1])).refusal
        await killing

        worker._module = "wooly_router.no_such_module"  # its process ends at every start
        worker.close()
        found = await checks.check(store, "bob", names[2])
        assert found.refusal.startswith(ModuleCheckError.code) and "crashed (exit 1)" in found.refusal


def test_module_beyond_size_limits_is_refused_before_decoding():
    empty = encode_program(Program((), ()))
    with pytest.raises(DecodeError, match=f"{MAX_NODES + 1} nodes .* the limit is {MAX_NODES}; record fewer steps"):
        decode_module(encode_module(Module((empty,) * (MAX_NODES + 1), (), (), (), ())))
    with pytest.raises(
        DecodeError, match=f"{MAX_MODULE_PROGRAMS + 1} programs .* the limits are {MAX_MODULE_PROGRAMS} and"
    ):
        decode_module(encode_module(Module((empty,) * (MAX_MODULE_PROGRAMS + 1), (), (), (), ())))
    with pytest.raises(DecodeError, match=f"{MAX_MODULE_STEPS + 1} steps; the limits are .* and {MAX_MODULE_STEPS}"):
        decode_module(encode_module(Module((), (), (), (), (Load(0, 0),) * (MAX_MODULE_STEPS + 1))))
    assert decode_module(encode_module(Module((), (), (), (), (Load(0, 0),) * MAX_MODULE_STEPS))).steps
    with pytest.raises(DecodeError, match=str(MAX_MODULE_BYTES)):
        decode_module(bytes(MAX_MODULE_BYTES + 1))
