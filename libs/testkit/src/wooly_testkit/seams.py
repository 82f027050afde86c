"""Calls over contracts for mypy: correct calls, which mypy must accept, and wrong calls, which mypy must reject. No code runs
them.

`make lint` is the test: if mypy accepts a wrong call, the `type: ignore` of that call is unused, which is an error under
`strict`.
"""

from __future__ import annotations

from typing import assert_type

from nats.js import JetStreamContext
from wooly_bus import contracts, streams
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.queue_reader import take
from wooly_bus.rpc import ControlClient
from wooly_bus.stream_reader import read_stream
from wooly_wis.credits import UsageRecorded
from wooly_wis.messages import (
    CloseSessionReply,
    CloseSessionRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    JobEnded,
    NodesReply,
    NodesRequest,
    TaskChanged,
)


async def _nodes(request: NodesRequest) -> NodesReply:
    raise NotImplementedError


async def _nodes_of(request: NodesRequest, tenant: str) -> NodesReply:
    raise NotImplementedError


async def _closed_for_nodes(request: NodesRequest) -> CloseSessionReply:
    raise NotImplementedError


async def _heard(heartbeat: ExecutorHeartbeat) -> None:
    raise NotImplementedError


async def _heard_bytes(data: bytes) -> None:
    raise NotImplementedError


def serves(app: ServiceApp, actor: Actor) -> None:
    """Calls with which a service serves requests and subscribes to events."""
    app.serve(contracts.ROUTER_NODE_LIST, _nodes)
    app.serve(contracts.ROUTER_NODE_LIST, actor.alone(_nodes))
    app.serve_tenants(contracts.ROUTER_NODE_LIST, _nodes_of)
    app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, _heard)

    app.serve(contracts.ROUTER_SESSION_CLOSE, _nodes)  # type: ignore[arg-type]  # another request, another reply
    app.serve(contracts.ROUTER_NODE_LIST, _closed_for_nodes)  # type: ignore[arg-type]  # another reply
    app.serve(contracts.ROUTER_SESSION_CLOSE, actor.alone(_nodes))  # type: ignore[arg-type]  # the same, in an actor
    app.serve(contracts.EXECUTOR_SESSION_OPEN, _nodes)  # type: ignore[arg-type]  # no address
    app.serve_tenants(contracts.ROUTER_NODE_LIST, _nodes)  # type: ignore[arg-type]  # the tenant is not taken
    app.listen(contracts.EXECUTOR_SESSION_CLOSED, _heard)  # type: ignore[arg-type]  # another event
    app.listen(contracts.EXECUTOR_DISPATCH_JOURNALED, _heard_bytes)  # type: ignore[type-var]  # bytes are no message


async def asks(app: ServiceApp, client: ControlClient, open: HostSessionRequest) -> None:
    """Calls with which a process sends requests."""
    close = CloseSessionRequest(session_id="a")
    assert_type(await app.request(contracts.ROUTER_NODE_LIST, NodesRequest(), timeout=1), NodesReply)
    assert_type(await app.request(contracts.EXECUTOR_SESSION_OPEN.at("x"), open, timeout=1), HostSessionReply)
    assert_type(client.request(contracts.ROUTER_SESSION_CLOSE, close), CloseSessionReply)
    with client.subscription(contracts.ROUTER_TASK_CHANGED.at("acme")) as heard:
        assert_type(heard.get(timeout=1), TaskChanged)

    await app.request(contracts.ROUTER_SESSION_CLOSE, NodesRequest(), timeout=1)  # type: ignore[misc]  # another request
    await app.request(contracts.EXECUTOR_SESSION_OPEN, open, timeout=1)  # type: ignore[arg-type]  # no address
    client.request(contracts.ROUTER_NODE_LIST, close)  # type: ignore[misc]  # another request
    client.request_until_answered(contracts.ROUTER_NODE_LIST, close)  # type: ignore[misc]  # another request
    nodes: NodesReply = client.request(contracts.ROUTER_SESSION_CLOSE, close)  # type: ignore[assignment]  # another reply
    del nodes


async def publishes(app: ServiceApp, js: JetStreamContext, beat: ExecutorHeartbeat, ended: JobEnded) -> None:
    """Calls with which a process publishes and reads events."""
    await app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, beat)
    await streams.publish(js, contracts.EXECUTOR_JOB_ENDED.at("x"), ended, id="1")
    await streams.publish(js, contracts.EXECUTOR_DISPATCH_JOURNALED.at("x"), b"", id="1")
    async for taken in take(js, contracts.EXECUTOR_JOB_ENDED, "router"):
        assert_type(taken.payload(), JobEnded)
    async for kept in read_stream(js, contracts.EXECUTOR_USAGE_RECORDED):
        if kept is not None:
            assert_type(kept.payload(), UsageRecorded)
    async for journaled in read_stream(js, contracts.EXECUTOR_DISPATCH_JOURNALED):
        if journaled is not None:
            assert_type(journaled.payload(), bytes)

    await app.publish(contracts.EXECUTOR_SESSION_CLOSED, beat)  # type: ignore[misc]  # another event
    await app.publish(contracts.EXECUTOR_JOB_ENDED, ended)  # type: ignore[arg-type]  # no address
    await app.publish(contracts.EXECUTOR_DISPATCH_JOURNALED.at("x"), b"")  # type: ignore[type-var]  # bytes are no message
    await streams.publish(js, contracts.EXECUTOR_JOB_ENDED.at("x"), beat, id="1")  # type: ignore[misc]  # another event
    await streams.publish(js, contracts.EXECUTOR_JOB_ENDED.at("x"), b"", id="1")  # type: ignore[misc]  # bytes
    await streams.submit(js, contracts.ROUTER_JOB_COMMAND, ended, timeout=1)  # type: ignore[misc]  # another command
