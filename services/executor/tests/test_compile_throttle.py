"""When compiling is let in: looks at a device that a test says is busy, at times that a test says."""

import asyncio

import pytest
from wooly_executor.compile_throttle import EXPECTED_S, LOOK_S, MOST_S, QUIET_LOOKS, WORTH, CompileThrottle

ENOUGH_NS = int(WORTH * EXPECTED_S * 1e9)


class Device:
    """What the looks see."""

    def __init__(self):
        self.busy_ns, self.at, self.occupied = 0, 0.0, False
        self.throttle = CompileThrottle(lambda: self.busy_ns, lambda: self.occupied, lambda: self.at)
        self.done = []

    def look(self, share=0.0, times=1):
        """Time passes, of which the device is busy for a share, and it is looked at."""
        for _ in range(times):
            self.at += LOOK_S
            self.busy_ns += int(share * LOOK_S * 1e9)
            self.throttle.look()

    async def compile(self, name, taken_ns=0):
        """Somebody who waits for his turn, and keeps it until the test says."""
        go_on = asyncio.Event()

        async def work():
            async with self.throttle.permit(lambda: taken_ns):
                self.done.append(name)
                await go_on.wait()

        task = asyncio.create_task(work())
        await settled()
        return task, go_on


async def settled():
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def device():
    return Device()


async def test_throttle_busy_device_lets_nobody_in(device):
    task, _ = await device.compile("a")
    device.look(0.3, times=50)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_idle_device_lets_one_in_after_some_looks(device):
    task, go_on = await device.compile("a")
    device.look(0.01, times=QUIET_LOOKS - 1)
    await settled()
    assert device.done == []
    device.look(0.01)
    await settled()
    assert device.done == ["a"]
    go_on.set()
    await task


async def test_throttle_work_in_between_begins_the_looks_anew(device):
    task, _ = await device.compile("a")
    for _ in range(5):
        device.look(0.0, times=QUIET_LOOKS - 1)
        device.look(0.5)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_one_long_operation_is_no_idleness(device):
    task, _ = await device.compile("a")
    device.occupied = True
    device.look(0.0, times=50)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_programs_that_took_enough_are_let_in_beside_a_busy_device(device):
    cold, _ = await device.compile("cold", ENOUGH_NS // 4)
    device.look(1.0, times=5)
    await settled()
    assert device.done == []
    hot, go_on = await device.compile("hot", ENOUGH_NS * 3 // 4)
    device.look(1.0)
    await settled()
    assert device.done == ["hot"]
    device.at += EXPECTED_S  # all that both took is spent
    go_on.set()
    await hot
    device.look(1.0, times=5)
    await settled()
    assert device.done == ["hot"]
    cold.cancel()


async def test_throttle_what_is_compiled_while_the_device_idles_costs_nobody_anything(device):
    idle, go_on = await device.compile("idle", 1)
    device.look(0.0, times=QUIET_LOOKS)
    await settled()
    device.at += EXPECTED_S
    go_on.set()
    await idle
    hot, _ = await device.compile("hot", ENOUGH_NS)
    device.look(1.0)
    await settled()
    assert device.done == ["idle", "hot"]
    hot.cancel()


async def test_throttle_learns_what_compiling_takes(device):
    """One took nearly no time, so the next is let in sooner; what one takes beyond that, the next ones must have taken more."""
    first, go_on = await device.compile("first", ENOUGH_NS)
    device.look(1.0)
    await settled()
    go_on.set()
    await first
    expected = EXPECTED_S * 3 / 4
    second, go_on = await device.compile("second", int(WORTH * expected * 1e9))
    device.look(1.0)
    await settled()
    assert device.done == ["first", "second"]
    device.at += 100 * MOST_S  # nobody answered for long, which says little of compiling
    go_on.set()
    await second
    owed, expected = WORTH * (MOST_S - expected), expected + (MOST_S - expected) / 4
    enough = int((owed + WORTH * expected) * 1e9)
    third, _ = await device.compile("third", enough - 10)
    device.look(1.0, times=5)
    await settled()
    assert device.done == ["first", "second"]
    fourth, _ = await device.compile("fourth", 20)
    device.look(1.0)
    await settled()
    assert device.done == ["first", "second", "third"]
    third.cancel()
    fourth.cancel()


async def test_throttle_lets_in_one_at_a_time_that_which_took_most_first(device):
    made = {name: await device.compile(name, ns) for name, ns in (("a", 1), ("b", 3), ("c", 2))}
    for expected in (["b"], ["b", "c"], ["b", "c", "a"]):
        device.look(0.0, times=2 * QUIET_LOOKS)
        await settled()
        assert device.done == expected
        task, go_on = made[expected[-1]]
        go_on.set()
        await task


async def test_throttle_who_gives_up_holds_nobody_up(device):
    waiting, _ = await device.compile("waiting", 2)
    inside, _ = await device.compile("inside", 3)
    device.look(0.0, times=QUIET_LOOKS)
    await settled()
    assert device.done == ["inside"]
    for task in (waiting, inside):
        task.cancel()
    await asyncio.gather(waiting, inside, return_exceptions=True)
    last, go_on = await device.compile("last")
    device.look(0.0, times=QUIET_LOOKS)
    await settled()
    assert device.done == ["inside", "last"]
    go_on.set()
    await last


async def test_throttle_looks_by_itself_while_somebody_waits(device, monkeypatch):
    monkeypatch.setattr("wooly_executor.compile_throttle.LOOK_S", 0.0)
    looking = asyncio.create_task(device.throttle.run())
    device.at = 1.0
    task, go_on = await device.compile("a")
    for _ in range(100):
        await asyncio.sleep(0)
        device.at += 1.0
    assert device.done == ["a"]
    go_on.set()
    await task
    looking.cancel()
