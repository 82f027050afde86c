"""Tests of the throttle for compilations, with a fake device and a fake clock."""

import asyncio

import pytest
from wooly_executor.plans.compile_throttle import (
    CHECK_S,
    COST_FACTOR,
    EXPECTED_S,
    IDLE_CHECKS,
    MAX_COST_S,
    CompileThrottle,
)

ENOUGH_NS = int(COST_FACTOR * EXPECTED_S * 1e9)


class Device:
    """A fake device whose load and clock the test sets."""

    def __init__(self):
        self.busy_ns, self.at, self.occupied = 0, 0.0, False
        self.throttle = CompileThrottle(lambda: self.busy_ns, lambda: self.occupied, lambda: self.at)
        self.done = []

    def look(self, share=0.0, times=1):
        """Advance the clock, with the device busy for a share of the time, and check the throttle."""
        for _ in range(times):
            self.at += CHECK_S
            self.busy_ns += int(share * CHECK_S * 1e9)
            self.throttle.check()

    async def compile(self, name, taken_ns=0):
        """Request a permit, and hold it until the test releases it."""
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


async def test_throttle_busy_device_gives_no_permit(device):
    task, _ = await device.compile("a")
    device.look(0.3, times=50)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_idle_device_gives_one_permit_after_some_checks(device):
    task, go_on = await device.compile("a")
    device.look(0.01, times=IDLE_CHECKS - 1)
    await settled()
    assert device.done == []
    device.look(0.01)
    await settled()
    assert device.done == ["a"]
    go_on.set()
    await task


async def test_throttle_work_between_checks_restarts_the_count(device):
    task, _ = await device.compile("a")
    for _ in range(5):
        device.look(0.0, times=IDLE_CHECKS - 1)
        device.look(0.5)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_one_long_operation_does_not_count_as_idle(device):
    task, _ = await device.compile("a")
    device.occupied = True
    device.look(0.0, times=50)
    await settled()
    assert device.done == []
    task.cancel()


async def test_throttle_busy_device_gives_a_permit_when_programs_have_used_enough_time(device):
    cold, _ = await device.compile("cold", ENOUGH_NS // 4)
    device.look(1.0, times=5)
    await settled()
    assert device.done == []
    hot, go_on = await device.compile("hot", ENOUGH_NS * 3 // 4)
    device.look(1.0)
    await settled()
    assert device.done == ["hot"]
    device.at += EXPECTED_S  # the credit of both programs is spent
    go_on.set()
    await hot
    device.look(1.0, times=5)
    await settled()
    assert device.done == ["hot"]
    cold.cancel()


async def test_throttle_permit_on_an_idle_device_spends_no_credit(device):
    idle, go_on = await device.compile("idle", 1)
    device.look(0.0, times=IDLE_CHECKS)
    await settled()
    device.at += EXPECTED_S
    go_on.set()
    await idle
    hot, _ = await device.compile("hot", ENOUGH_NS)
    device.look(1.0)
    await settled()
    assert device.done == ["idle", "hot"]
    hot.cancel()


async def test_throttle_measured_compilations_change_the_expected_cost(device):
    """A quick compilation lowers the expected cost, so the next permit comes sooner. A slow one raises it again."""
    first, go_on = await device.compile("first", ENOUGH_NS)
    device.look(1.0)
    await settled()
    go_on.set()
    await first
    expected = EXPECTED_S * 3 / 4
    second, go_on = await device.compile("second", int(COST_FACTOR * expected * 1e9))
    device.look(1.0)
    await settled()
    assert device.done == ["first", "second"]
    device.at += 100 * MAX_COST_S  # the compiler was away; this says little about the cost of compiling
    go_on.set()
    await second
    owed, expected = COST_FACTOR * (MAX_COST_S - expected), expected + (MAX_COST_S - expected) / 4
    enough = int((owed + COST_FACTOR * expected) * 1e9)
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


async def test_throttle_several_requests_get_one_permit_at_a_time_largest_first(device):
    made = {name: await device.compile(name, ns) for name, ns in (("a", 1), ("b", 3), ("c", 2))}
    for expected in (["b"], ["b", "c"], ["b", "c", "a"]):
        device.look(0.0, times=2 * IDLE_CHECKS)
        await settled()
        assert device.done == expected
        task, go_on = made[expected[-1]]
        go_on.set()
        await task


async def test_throttle_cancelled_request_releases_its_permit(device):
    waiting, _ = await device.compile("waiting", 2)
    inside, _ = await device.compile("inside", 3)
    device.look(0.0, times=IDLE_CHECKS)
    await settled()
    assert device.done == ["inside"]
    for task in (waiting, inside):
        task.cancel()
    await asyncio.gather(waiting, inside, return_exceptions=True)
    last, go_on = await device.compile("last")
    device.look(0.0, times=IDLE_CHECKS)
    await settled()
    assert device.done == ["inside", "last"]
    go_on.set()
    await last


async def test_throttle_run_checks_the_device_while_a_request_waits(device, monkeypatch):
    monkeypatch.setattr("wooly_executor.plans.compile_throttle.CHECK_S", 0.0)
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
