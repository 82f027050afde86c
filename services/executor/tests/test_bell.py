"""Tests of the bell that wakes a task of an event loop."""

import asyncio
import threading

import pytest
from wooly_executor.bell import Bell

WAIT_S = 30


async def test_bell_rung_in_another_thread_wakes_the_waiting_task():
    bell = Bell()
    listening = asyncio.create_task(bell.heard(WAIT_S))
    await asyncio.sleep(0.01)
    assert not listening.done()
    threading.Thread(target=bell.ring).start()
    async with asyncio.timeout(WAIT_S):
        await listening


async def test_bell_rung_before_a_wait_ends_one_wait():
    bell = Bell()
    bell.ring()
    async with asyncio.timeout(WAIT_S):
        await bell.heard()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bell.heard(), 0.05)


async def test_bell_never_rung_times_out():
    async with asyncio.timeout(WAIT_S):
        await Bell().heard(0.01)


def test_bell_rung_after_the_event_loop_has_ended_does_not_raise():
    bell = Bell()

    async def listen():
        waiting = asyncio.create_task(bell.heard())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(listen())
    bell.ring()


async def test_bell_rung_while_a_wait_begins_is_not_lost():
    bell, rings, taken = Bell(), [], 0

    def ring():
        for number in range(500):
            rings.append(number)
            bell.ring()

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(WAIT_S):
        while taken < 2000:
            await bell.heard()
            taken = len(rings)
    for thread in threads:
        thread.join()
