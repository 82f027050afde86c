"""The bell that wakes a task of an event loop."""

import asyncio
import threading

import pytest
from wooly_executor.bell import Bell

WAIT_S = 30


async def test_bell_wakes_its_listener_from_another_thread():
    bell = Bell()
    listening = asyncio.create_task(bell.heard(WAIT_S))
    await asyncio.sleep(0.01)
    assert not listening.done()
    threading.Thread(target=bell.ring).start()
    async with asyncio.timeout(WAIT_S):
        await listening


async def test_bell_that_rang_before_anybody_listened_is_heard_once():
    bell = Bell()
    bell.ring()
    async with asyncio.timeout(WAIT_S):
        await bell.heard()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bell.heard(), 0.05)


async def test_bell_that_nobody_rings_is_waited_for_no_longer_than_asked():
    async with asyncio.timeout(WAIT_S):
        await Bell().heard(0.01)


def test_bell_may_ring_when_the_event_loop_is_over():
    bell = Bell()

    async def listen():
        waiting = asyncio.create_task(bell.heard())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(listen())
    bell.ring()


async def test_no_ring_is_lost_however_threads_and_listener_meet():
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
