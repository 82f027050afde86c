"""Leader election over a real nats-server: one leader at a time, release, take-over, and no JetStream."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nats.errors
import pytest
from nats.js.kv import KeyValue
from wooly_bus.app import ServiceApp
from wooly_bus.leadership import ABSENT_AFTER, Leadership
from wooly_testkit.nats import nats_server as start_nats_server

pytestmark = pytest.mark.connected
TTL_S = 1.0


@contextlib.asynccontextmanager
async def candidates(url, *names, role="r"):
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name in names:
            app = ServiceApp(name, url)
            await stack.enter_async_context(app.running())
            found.append(Leadership(app, role, name, TTL_S))
        yield found


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


async def test_leadership_of_three_one_leads_and_releases():
    with start_nats_server() as url:
        async with candidates(url, "a", "b", "c") as three:
            tasks = [asyncio.create_task(x.run()) for x in three]
            await until(lambda: any(x.held for x in three))
            for _ in range(3):  # together longer than the lease
                await asyncio.sleep(TTL_S / 2)
                assert sum(x.held for x in three) == 1
            (first,) = [i for i, x in enumerate(three) if x.held]
            await stop(tasks[first])
            assert not three[first].held
            await until(lambda: any(x.held for x in three))
            assert sum(x.held for x in three) == 1
            await stop(*tasks)


async def test_leadership_dead_leader_is_replaced_after_lease():
    with start_nats_server() as url:
        async with candidates(url, "a", "b") as (a, b):
            await a.step()
            await b.step()
            assert a.held and not b.held
            await until_steps(b)  # `a` makes no further steps
            await a.step()
            assert b.held and not a.held


async def stop(*tasks):
    """Cancel the tasks until they end: Python 3.11 loses a cancellation that coincides with an answer."""
    while not all(t.done() for t in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=2)


async def until_steps(leadership):
    for _ in range(100):
        await leadership.step()
        if leadership.held:
            return
        await asyncio.sleep(0.05)
    raise AssertionError


async def test_leadership_without_renewal_ends_in_time(monkeypatch):
    with start_nats_server() as url:
        now = [0.0]
        async with candidates(url, "a") as (a,):
            a._clock = lambda: now[0]
            await a.step()
            assert a.held
            now[0] = TTL_S - 0.01
            assert a.held
            now[0] = TTL_S
            assert not a.held


async def test_leadership_without_jetstream_all_lead(tmp_path):
    ports = tmp_path / "ports"
    ports.mkdir()
    binary = Path(sys.prefix) / "bin" / "nats-server"
    process = subprocess.Popen(
        [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", ports], stderr=subprocess.DEVNULL, env=os.environ
    )
    try:
        await until(lambda: any(p.read_text() for p in ports.glob("*.ports")))
        url = json.loads(next(ports.glob("*.ports")).read_text())["nats"][0]
        async with candidates(url, "a", "b") as (a, b):
            await a.step()
            await b.step()
            assert a.held and b.held
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("answers", [True, False])
async def test_leadership_of_a_jetstream_that_takes_no_lease_for_long_all_lead_if_it_answers(
    monkeypatch, caplog, answers
):
    """Its disk was full: without a leader, nothing is placed and nothing is cleaned up. Behind a cut, there may be a leader."""
    with start_nats_server() as url:
        now = [0.0]
        async with candidates(url, "a", "b") as both:
            for each in both:
                each._clock, each._taken = (lambda: now[0]), 0.0
                await each.step()
            assert [each.held for each in both] == [True, False]

            async def fails(*_, **__):
                raise nats.errors.TimeoutError

            if answers:
                for do in ("update", "create"):
                    monkeypatch.setattr(KeyValue, do, fails)
            else:
                monkeypatch.setattr(Leadership, "_open", fails)
            now[0] = ABSENT_AFTER * TTL_S
            for each in both:
                await each.step()
                assert not each.held
            now[0] += 0.01
            for _ in range(2):
                for each in both:
                    await each.step()
                    assert each.held == each.alone == answers
            assert (
                caplog.text.count("leads without a lease, because JetStream takes none: nats: timeout") == 2 * answers
            )
            monkeypatch.undo()
            while sum([each.held for each in both]) != 1:
                for each in both:
                    await each.step()
                await asyncio.sleep(0.05)
            assert not any(each.alone for each in both)
