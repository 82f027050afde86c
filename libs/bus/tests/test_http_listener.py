"""Limits of strangers on an HTTP port. Clients with a token are served beside any number of strangers."""

import asyncio
import contextlib
import errno
import json
import select
import socket
import ssl

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from wooly_bus.channel.tls import server_context
from wooly_bus.errors import RefusedError
from wooly_bus.http_front import Front, Known, Rule
from wooly_bus.http_listener import HttpServer, HttpSettings
from wooly_testkit.certificates import make_certificates

TENANTS = {"alice": "alice", "bob": "bob", "root": None}
PATIENCE_S = 20
#: The clients' ends of connections. They are closed with the server.
WRITERS = []


def refuse(error):
    return JSONResponse({"code": error.code}, {"no.token": 401, "test.limit": 429, "test.too_large": 413}[error.code])


class Service:
    """An application behind the listener that records its calls."""

    def __init__(self):
        self.bodies, self.release = [], asyncio.Event()
        self.front = Front(self._app, "test", self._rule, self._admit, refuse)

    @staticmethod
    def _rule(method, path):
        return Rule(token=path != "/free", body=1024)

    @staticmethod
    async def _admit(request, nbytes, rule):
        if not rule.token:
            return None
        name = request.headers.get("authorization", "")
        if name not in TENANTS:
            raise RefusedError("no.token", "a token is needed")
        return Known(name, TENANTS[name])

    async def _app(self, scope, receive, send):
        request = Request(scope, receive)
        self.bodies.append(await request.body())
        response = Response(b"hello")
        if scope["path"] == "/wait":
            await self.release.wait()
        elif scope["path"] == "/large":

            async def parts():
                for _ in range(1000):
                    yield bytes(1 << 16)

            response = StreamingResponse(parts())
        await response(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(tls=None, **limits):
    """Yields the service, its server and its address."""
    service = Service()
    server = HttpServer(service.front, "test", tls=tls, settings=HttpSettings(**limits))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield service, server, listener.getsockname()
    finally:
        service.release.set()
        server.should_exit = True
        for connection in server.table:
            connection.close()
        await asyncio.wait_for(task, PATIENCE_S)
        while WRITERS:
            WRITERS.pop().close()
        await asyncio.sleep(0)


def head(path="/", token="", **headers):
    lines = [f"POST {path} HTTP/1.1", "host: h", *[f"{k.replace('_', '-')}: {v}" for k, v in headers.items()]]
    if token:
        lines.append(f"authorization: {token}")
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(reader):
    """Status and body of the next answer."""
    async with asyncio.timeout(PATIENCE_S):
        raw = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in raw.split(b"\r\n")[1:-2])
        return int(raw.split()[1]), await reader.readexactly(int(fields[b"content-length"]))


async def asked(address, data):
    """A connection on which `data` was sent."""
    reader, writer = await asyncio.open_connection(*address)
    WRITERS.append(writer)
    writer.write(data)
    return reader, writer


async def ended(reader):
    """Whether the connection ends, after any further bytes."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
    except ConnectionError:
        pass
    return True


async def test_request_without_token_is_refused_before_body():
    async with serving() as (service, _, address):
        reader, _ = await asked(address, head(content_length=200 << 20))
        assert (await answer(reader))[0] == 401
        reader, _ = await asked(address, head(transfer_encoding="chunked"))
        assert (await answer(reader))[0] == 401
        assert service.bodies == []


async def test_refused_request_body_is_read_briefly_then_closed():
    async with serving() as (_, _, address):
        reader, writer = await asked(address, head(content_length=200 << 20))
        for _ in range(64):
            writer.write(bytes(1 << 20))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(writer.drain(), PATIENCE_S)
        assert await ended(reader)


async def test_body_too_large_is_refused_by_header_and_by_bytes():
    async with serving() as (service, _, address):
        reader, _ = await asked(address, head(token="alice", content_length=1025))
        assert await answer(reader) == (413, b'{"code":"test.too_large"}')
        chunks = b"".join(b"200\r\n" + bytes(512) + b"\r\n" for _ in range(3))
        reader, _ = await asked(address, head(token="alice", transfer_encoding="chunked") + chunks)
        assert (await answer(reader))[0] == 413
        assert service.bodies == []
        reader, _ = await asked(address, head(token="alice", content_length=1024) + bytes(1024))
        assert (await answer(reader))[0] == 200 and service.bodies == [bytes(1024)]


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nhost:", head(token="alice", content_length=9) + b"123"])
async def test_request_incomplete_at_deadline_is_closed(sent):
    async with serving(header_s=0.2, body_s=0.2) as (_, server, address):
        reader, _ = await asked(address, sent)
        assert await ended(reader) and len(server.table) == 0


async def test_answer_not_read_at_deadline_is_closed():
    async with serving(body_s=0.3) as (_, server, address):
        await asked(address, head("/large", token="alice", content_length=0))
        while not len(server.table):
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            while len(server.table):
                await asyncio.sleep(0.05)


async def test_flood_of_idle_connections_does_not_block_token_holder():
    async with serving(peer_connections=4) as (_, server, address):
        inside = await asked(address, head(token="alice", content_length=0))
        assert (await answer(inside[0]))[0] == 200
        flood = [await asked(address, b"") for _ in range(30)]
        late = await asked(address, head(token="root", content_length=0))
        assert (await answer(late[0]))[0] == 200
        inside[1].write(head(token="alice", content_length=0))
        assert (await answer(inside[0]))[0] == 200
        for reader, _ in flood[:25]:
            assert await ended(reader)
        assert len(server.table) <= 2 + 4


async def test_full_table_closes_strangers_first_then_refuses():
    async with serving(connections=128, peer_connections=500, tenant_connections=500) as (service, server, address):
        strangers = [await asked(address, b"") for _ in range(128)]
        busy = [await asked(address, head("/wait", token="root", content_length=0)) for _ in range(128)]
        for reader, _ in strangers:
            assert await ended(reader)
        async with asyncio.timeout(PATIENCE_S):
            while len(service.bodies) < 128:
                await asyncio.sleep(0.01)
        one_more, _ = await asked(address, head(token="root", content_length=0))
        assert await ended(one_more) and len(server.table) == 128
        service.release.set()
        assert (await answer(busy[0][0]))[0] == 200


async def test_tenant_at_connection_limit_does_not_affect_others():
    async with serving(tenant_connections=2) as (service, _, address):
        held = [await asked(address, head("/wait", token="bob", content_length=0)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(service.bodies) < 2:
                await asyncio.sleep(0.01)
        reader, _ = await asked(address, head(token="bob", content_length=0))
        status, body = await answer(reader)
        assert status == 429 and json.loads(body)["code"] == "test.limit"
        for name in ("alice", "root"):
            reader, _ = await asked(address, head(token=name, content_length=0))
            assert (await answer(reader))[0] == 200
        held[0][1].close()
        async with asyncio.timeout(PATIENCE_S):
            status = 0
            while status != 200:  # closed connections do not count
                reader, _ = await asked(address, head(token="bob", content_length=0))
                status, _ = await answer(reader)


async def test_tenants_leave_reserved_connections_to_operators():
    async with serving(connections=128, tenant_connections=500) as (service, _, address):
        [await asked(address, head("/wait", token=("alice", "bob")[i % 2], content_length=0)) for i in range(64)]
        async with asyncio.timeout(PATIENCE_S):
            while len(service.bodies) < 64:
                await asyncio.sleep(0.01)
        reader, _ = await asked(address, head(token="alice", content_length=0))
        assert (await answer(reader))[0] == 429
        reader, _ = await asked(address, head(token="root", content_length=0))
        assert (await answer(reader))[0] == 200


async def test_accept_is_called_only_if_connection_waits(monkeypatch):
    """Without a free descriptor, accept fails even if no connection waits, and the listener would close a victim needlessly."""
    loop = asyncio.get_running_loop()
    accept, waited = loop.sock_accept, []

    async def sock_accept(listener):
        waited.append(bool(select.select([listener], [], [], 0)[0]))
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    async with serving() as (_, _, address):
        for _ in range(3):
            reader, _ = await asked(address, head(token="root", content_length=0))
            assert (await answer(reader))[0] == 200
    assert waited == [True] * 3


async def test_no_free_descriptor_closes_stranger_and_continues(monkeypatch, caplog):
    loop = asyncio.get_running_loop()
    accept, full = loop.sock_accept, [2]

    async def sock_accept(listener):
        if full[0] and listener.getsockname()[1]:
            full[0] -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return await accept(listener)

    async with serving() as (_, server, address):
        first = await asked(address, b"")
        while not len(server.table):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        third = await asked(address, head(token="root", content_length=0))
        assert (await answer(third[0]))[0] == 200
        assert await ended(first[0]) and full == [0]
    assert caplog.text.count("cannot accept connections") == 1


async def test_tls_handshake_missing_at_deadline_is_closed(tmp_path):
    made = make_certificates(tmp_path, "127.0.0.1")
    tls = server_context(made.certificate, made.key)
    async with serving(tls, header_s=0.2) as (_, _server, address):
        for sent in (b"", b"\x16\x03\x01"):
            reader, _ = await asked(address, sent)
            assert await ended(reader)
    async with serving(tls, peer_connections=8) as (_, _server, address):
        flood = [await asked(address, b"\x16\x03\x01") for _ in range(20)]
        trusting = ssl.create_default_context(cafile=str(made.authority))
        reader, writer = await asyncio.open_connection(*address, ssl=trusting)
        WRITERS.append(writer)
        writer.write(head(token="root", content_length=0))
        assert (await answer(reader))[0] == 200
        for other, _ in flood[:12]:
            assert await ended(other)


def test_server_that_is_cancelled_ends_without_an_error_in_the_log():
    """As the scheduler's `/metrics`: the listener is closed before the accept loop ends, and its number is used again."""
    errors, others = [], []

    async def serve():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        server = HttpServer(Service().front, "test")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            number = listener.fileno()
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait((task,))
        others.extend(socket.socketpair())
        assert number in [other.fileno() for other in others]
        for other in others:
            loop.add_reader(other, print)
            loop.remove_reader(other)

    asyncio.run(serve())
    for other in others:
        other.close()
    assert errors == []
