"""The control plane over a real nats-server: requests, errors, actors."""

import asyncio
import base64
import threading
import time
from dataclasses import replace

import pytest
from wooly_bus import blobs, contracts
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import Rpc
from wooly_bus.errors import NoResponderError, RefusedError
from wooly_bus.rpc import ControlClient
from wooly_wis.messages import CloseSessionReply, CloseSessionRequest, NodesRequest, PutBlobReply

pytestmark = pytest.mark.connected
CLOSE = Rpc("wooly.v1.rpc.test.session.close", CloseSessionRequest, CloseSessionReply)


class Counting(Actor):
    def __init__(self):
        super().__init__()
        self.inside = self.most = self.total = 0

    async def on_close_session(self, request):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.001)
        self.inside -= 1
        self.total += 1
        if request.reason == "refuse":
            raise RefusedError("test.no", "not today", retryable=True)
        if request.reason == "break":
            raise ZeroDivisionError("oops")
        return CloseSessionReply(closed=True)


@pytest.fixture
def service(nats_server):
    ready, stop = threading.Event(), []
    actor = []

    async def main():
        app = ServiceApp("test", nats_server)
        actor.append(Counting())
        app.serve(CLOSE, actor[0].alone(actor[0].on_close_session))
        stop.append((asyncio.get_running_loop(), done := asyncio.Event()))
        async with app.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield actor[0]
    loop, done = stop[0]
    loop.call_soon_threadsafe(done.set)
    thread.join(10)


def test_request_returns_reply(service, nats_server):
    client = ControlClient(nats_server)
    assert client.request(CLOSE, CloseSessionRequest(session_id="a")).closed
    client.close()


def test_request_errors_become_refused_error(service, nats_server, caplog):
    client = ControlClient(nats_server)
    with pytest.raises(RefusedError, match="not today") as refused:
        client.request(CLOSE, CloseSessionRequest(session_id="a", reason="refuse"))
    assert refused.value.code == "test.no" and refused.value.retryable
    with pytest.raises(RefusedError, match="ZeroDivisionError") as broken:
        client.request(CLOSE, CloseSessionRequest(session_id="a", reason="break"))
    assert broken.value.code == "internal"
    with pytest.raises(RefusedError) as malformed:
        client.request(Rpc(CLOSE.subject, NodesRequest, CloseSessionReply), NodesRequest())
    assert malformed.value.code == "bus.envelope"
    client.close()


def test_actor_handles_one_message_at_a_time(service, nats_server):
    clients = [ControlClient(nats_server) for _ in range(3)]

    def ask(client):
        for _ in range(10):
            client.request(CLOSE, CloseSessionRequest(session_id="a"))

    threads = [threading.Thread(target=ask, args=(c,)) for c in clients]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert service.total == 30 and service.most == 1
    for c in clients:
        c.close()


def test_request_without_responder_raises(nats_server):
    client = ControlClient(nats_server)
    with pytest.raises(NoResponderError, match="no service answers"):
        client.request(Rpc("wooly.v1.rpc.test.no.body", NodesRequest, CloseSessionReply), NodesRequest())
    client.close()


@pytest.mark.parametrize("lost", ["first", "last"])
def test_piece_of_a_blob_whose_answer_is_lost_is_sent_again(nats_server, monkeypatch, lost):
    """The router was killed, or NATS, while the client waited for an answer that may take minutes."""
    monkeypatch.setattr(blobs, "PIECE_S", 0.3)
    ready, ending, asked = threading.Event(), [], []

    async def on_put(request):
        asked.append(request.offset)
        reached = request.offset + len(base64.b64decode(request.data))
        if asked.count(request.offset) == 1 and (reached == request.nbytes) == (lost == "last"):
            await ending[0][1].wait()  # until the end of the test
        return PutBlobReply(kept=reached == request.nbytes, after=reached)

    async def main():
        app = ServiceApp("router", nats_server)
        app.serve(replace(contracts.ROUTER_BLOB_PUT, tenants_only=False), on_put)  # without credentials
        ending.append((asyncio.get_running_loop(), done := asyncio.Event()))
        async with app.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert ready.wait(10)
        data = bytes(blobs.PIECE_BYTES + 1)
        client = ControlClient(nats_server)
        begun = time.monotonic()
        assert blobs.AskedBlobs(client).put(data) == blobs.name_of(data)
        assert time.monotonic() - begun < 5
        client.close()
    finally:
        loop, done = ending[0]
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
