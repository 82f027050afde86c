"""Tests of the usage publisher: every count once, in numbered batches, also when NATS is killed meanwhile."""

import asyncio
import contextlib
import socket
import subprocess
import sysconfig
from pathlib import Path

import nats
import pytest
from wooly_bus import contracts
from wooly_bus.stream_reader import read_stream
from wooly_executor.billing import usage_publisher
from wooly_executor.billing.usage_publisher import UsagePublisher
from wooly_wis.credits import UsageRecorded
from wooly_wis.dtypes import DType

pytestmark = [pytest.mark.connected, pytest.mark.timeout(150)]


class Nats:
    """A nats-server that can be killed and restarted on the same port with its streams."""

    def __init__(self, directory):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        binary = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        self._argv = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()


async def connected(url):
    async def quiet(_):
        pass

    for _ in range(200):
        with contextlib.suppress(OSError, nats.errors.Error):
            return await nats.connect(
                url, error_cb=quiet, max_reconnect_attempts=-1, reconnect_time_wait=0.1, allow_reconnect=True
            )
        await asyncio.sleep(0.05)
    raise AssertionError("no NATS")


async def test_usage_publisher_with_nats_killed_publishes_every_count_once(device, wis, tmp_path, monkeypatch):
    monkeypatch.setattr(usage_publisher, "PERIOD_S", 0.02)
    monkeypatch.setattr(usage_publisher, "RETRY_S", 0.05)
    server = Nats(tmp_path)
    client = await connected(server.url)
    try:
        publisher = UsagePublisher(client.jetstream(), device.loop, "gpu-0", "gpu-0/1")
        publishing = asyncio.create_task(publisher.run())
        session = device.open("s")
        v = wis.at(DType.F32, 64)
        session.run(wis.body().alloc("x", 256).fill("x", v, 1.0), {"x": 1})
        name = session.define(wis.body().call("aten.add_.Tensor", ("inout", "x", v), ("in", "x", v)))
        for n in range(60):
            session.start(name, [1])
            await asyncio.to_thread(session.sync)
            if n == 20:
                server.kill()
            if n == 40:
                server.start()
            await asyncio.sleep(0.02)
        session.close()
        device.wait_closed("s")
        busy = device.call(lambda: device.loop.busy.total_ns)
        batches = []
        async with asyncio.timeout(100):
            reader = read_stream(client.jetstream(), contracts.EXECUTOR_USAGE_RECORDED)
            async for kept in reader:
                if kept is not None:
                    batches.append(UsageRecorded.model_validate_json(kept.data))
                    if batches[-1].records[-1].ended:
                        break
            await reader.aclose()
        publishing.cancel()
        await asyncio.wait((publishing,))
        records = [r for b in batches for r in b.records]
        assert [b.batch for b in batches] == list(range(1, len(batches) + 1)) and {b.source for b in batches} == {
            publisher.source
        }
        assert sum(r.gpu_ns for r in records) == busy and sum(r.runs for r in records) == 61
        assert sum(r.flops for r in records) == 0 and sum(r.moved_bytes for r in records) == 256 + 60 * 3 * 256
        assert [r.ended for r in records] == [False] * (len(records) - 1) + [True]
        assert all(r.span_us > 0 and r.gpu_ns <= r.span_us * 1000 for r in records)
    finally:
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
            await client.close()
        server.kill()
