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
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError
from nats.js.kv import KeyValue
from wooly_bus import leadership
from wooly_bus.app import ServiceApp
from wooly_bus.leadership import ABSENT_AFTER, Leadership
from wooly_testkit.nats import NatsCluster
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


async def no(*_):
    return False


async def test_leadership_in_a_cluster_no_process_leads_without_a_lease(monkeypatch, caplog):
    with start_nats_server() as url:
        now = [0.0]
        async with candidates(url, "a", "b") as both:
            assert not any(each._app.jetstream_votes for each in both)
            monkeypatch.setattr(ServiceApp, "jetstream_votes", True)
            monkeypatch.setattr(Leadership, "_has_majority", no)
            for each in both:
                each._clock, each._taken = (lambda: now[0]), 0.0
                await each.step()
            assert [each.held for each in both] == [True, False]
            for error in (ServiceUnavailableError(), NoStreamResponseError(), nats.errors.TimeoutError()):

                async def fails(*_, error=error, **__):
                    raise error

                for do in ("update", "create"):
                    monkeypatch.setattr(KeyValue, do, fails)
                now[0] += leadership.MAJORITY_S
                for each in both:
                    await each.step()
                    assert not each.held
            assert caplog.text.count("does not lead, because JetStream takes no lease") == 2


@pytest.mark.slow
async def test_leadership_without_the_majority_of_a_cluster_nobody_leads(tmp_path, monkeypatch):
    """A process on the smaller side of a cut cannot hear the others, and would take them for lost."""
    monkeypatch.setenv("WOOLY_NATS_REPLICAS", "3")
    with contextlib.ExitStack() as stack:
        cluster = NatsCluster(tmp_path, stack)
        async with candidates(cluster.url, "a", "b") as both, asyncio.timeout(120):
            tasks = [asyncio.create_task(x.run()) for x in both]

            async def one_leads():
                while sum(x.held for x in both) != 1:
                    await asyncio.sleep(0.05)

            await one_leads()
            assert all(x._app.jetstream_votes for x in both)
            cluster.kill(0)
            cluster.kill(1)
            while any(x.held for x in both):
                await asyncio.sleep(0.05)
            for _ in range(int((ABSENT_AFTER + 10) * TTL_S / 0.1)):  # JetStream says after 10 s that it has no leader
                await asyncio.sleep(0.1)
                assert not any(x.held or x.alone for x in both)
            cluster.start(0)
            cluster.start(1)
            await one_leads()
            await stop(*tasks)


@pytest.mark.slow
async def test_leadership_if_a_cluster_loses_the_only_copy_of_the_leases_all_lead(tmp_path, monkeypatch):
    """As with the default of WOOLY_NATS_REPLICAS. The other servers are the majority, so nobody leads elsewhere."""
    monkeypatch.setattr(leadership, "MAJORITY_S", 2 * TTL_S)
    with contextlib.ExitStack() as stack:
        cluster = NatsCluster(tmp_path, stack)
        async with candidates(cluster.url, "a", "b") as both, asyncio.timeout(120):
            tasks = [asyncio.create_task(x.run()) for x in both]
            while sum(x.held for x in both) != 1:
                await asyncio.sleep(0.05)
            info = await both[0]._app.jetstream().stream_info(f"KV_{leadership.BUCKET}")
            cluster.kill(int(info.cluster.leader[1:]))
            while not all(x.alone for x in both):
                await asyncio.sleep(0.05)
            cluster.start(int(info.cluster.leader[1:]))
            while sum(x.held for x in both) != 1:
                await asyncio.sleep(0.05)
            await stop(*tasks)
