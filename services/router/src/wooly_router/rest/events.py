"""Server-sent events: the router tells pages what changed, and looks for changes only while a page is open.

Every router polls the shared database, so any router may make a change. An event names what to read again; only metrics events
contain data.

    metrics  every second (more often than samples): {"at", "gpus": [LiveGpu …]}
    tasks    {"changed": [{"task_id", "state"}…]}: created, moved, or in another class; the state null: ended
    nodes    {"changed": [node ids]}
    groups, config  {}
    resync   the client was too slow: it must read everything again
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from wooly_bus.errors import RefusedError
from wooly_bus.supervision import start_task

from wooly_router.actor import RouterActor
from wooly_router.core.cluster import ClusterConfig
from wooly_router.core.tasks import ENDED
from wooly_router.gate import Caller
from wooly_router.limits import LimitError
from wooly_router.rest.access import Access, admitted, secret_of
from wooly_router.rest.held import HeldStream
from wooly_router.rest.metrics import live
from wooly_router.state.database import UNREACHABLE, log_away
from wooly_router.state.nodes import GroupRecord
from wooly_router.state.tasks import TaskGlance

log = logging.getLogger("wooly.router")
router = APIRouter()
#: Seconds between two polls of the database.
POLL_S = 1.0
#: Each further group of this many devices adds one second to the interval between metrics events.
GPUS_PER_SECOND = 100
#: Seconds between two checks of a follower's token; also the interval of keep-alive comments.
RECHECK_S = 15.0
#: Maximum number of events that wait for one follower.
MAX_QUEUED_EVENTS = 64
#: Reciprocal of the share of streams that is reserved: one eighth of a router's streams is reserved for operators and
#: administrators.
RESERVED_SHARE = 8
#: Maximum number of changed tasks or nodes in one event.
MAX_NAMED_CHANGES = 200


@dataclass(eq=False, slots=True)
class Follower:
    """A client that follows events."""

    caller: Caller
    queue: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_EVENTS))

    def tell(self, event: str, data: Any) -> None:
        """Queue an event for this client. If the queue is full, it is emptied, and the client gets `resync`."""
        try:
            self.queue.put_nowait(_framed(event, data))
        except asyncio.QueueFull:
            while not self.queue.empty():
                self.queue.get_nowait()
            self.queue.put_nowait(_framed("resync", {}))


@dataclass(slots=True)
class _Seen:
    """The state of the last poll."""

    tasks: dict[str, TaskGlance]
    nodes: dict[str, Any]
    groups: list[GroupRecord]
    config: ClusterConfig


class Hub:
    """Polls for changes while clients follow, and sends events."""

    def __init__(self, actor: RouterActor, every_s: float = POLL_S) -> None:
        self._actor, self._every_s = actor, every_s
        self._limits = actor.limits
        self._followers: set[Follower] = set()
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    def join(self, caller: Caller) -> Follower:
        """Add a client that follows events.

        Raises:
            RefusedError: too many clients follow.
        """
        if self._closed:
            raise RefusedError("router.too_many", "this router is shutting down; connect again", retryable=True)
        most, held = self._limits.streams, len(self._followers)
        if caller.tenant is not None:
            mine = len([f for f in self._followers if f.caller.tenant == caller.tenant])
            self._limits.check(caller.tenant, "event streams on this router", mine, "tenant_streams", "close one")
            most -= max(most // RESERVED_SHARE, 1)
            held = len([f for f in self._followers if f.caller.tenant is not None])
        if held >= most or len(self._followers) >= self._limits.streams:
            whose = "all tenants together" if caller.tenant is not None else "all callers together"
            raise LimitError(
                f"{whose} follow this router's events {held} times, and the limit is {most} (WOOLY_ROUTER_STREAMS); "
                "try again later, or connect to another router",
                retry_s=15.0,
            )
        follower = Follower(caller)
        self._followers.add(follower)
        if self._watching is None:
            self._watching = start_task(self._watch(), "events")
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a client."""
        self._followers.discard(follower)
        if not self._followers and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def close(self) -> None:
        """End all streams, because the router ends."""
        self._closed = True
        for follower in list(self._followers):
            with contextlib.suppress(asyncio.QueueFull):
                follower.queue.put_nowait(None)

    async def _watch(self) -> None:
        before: _Seen | None = None
        looked, due = self._actor.clock(), 0.0
        while True:
            try:
                gpus = live(self._actor)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._every_s * (len(gpus) // GPUS_PER_SECOND)
                    self._send(
                        "metrics", {"at": self._actor.clock(), "gpus": [g.model_dump() for g in gpus]}, "metrics:read"
                    )
                since, looked = looked - 5 * self._every_s, self._actor.clock()
                seen = await self._poll(since)
                if before is not None:
                    self._compare(before, seen)
                before = seen
            except UNREACHABLE as e:
                log_away("events are sent later", e)
            except Exception:
                log.exception("events cannot be sent; trying again")
            await asyncio.sleep(self._every_s)

    async def _poll(self, since: float) -> _Seen:
        world = self._actor.world
        config, records = await world.settings()
        devices: dict[str, list[tuple[str, str]]] = {}
        for info in self._actor.registry.nodes(self._actor.clock()):
            devices.setdefault(info.node, []).append((info.executor_id, info.state))
        nodes = {n: (records.get(n), devices.get(n)) for n in sorted(records.keys() | devices.keys())}
        return _Seen(await world.tasks.glance(since), nodes, await world.nodes.groups(), config)

    def _compare(self, before: _Seen, seen: _Seen) -> None:
        moved = {i: t for i, t in seen.tasks.items() if before.tasks.get(i) != t}
        ended = {i: t for i, t in before.tasks.items() if i not in seen.tasks and t.state not in ENDED}
        changed: list[tuple[str, dict[str, str | None]]]
        changed = [(t.tenant, {"task_id": i, "state": t.state}) for i, t in moved.items()]
        changed += [(t.tenant, {"task_id": i, "state": None}) for i, t in ended.items()]
        for follower in self._followers if changed else ():
            if "tasks:read" in follower.caller.may:
                mine = [c for tenant, c in changed if follower.caller.tenant in (None, tenant)]
                if mine:
                    follower.tell("tasks", {"changed": mine[:MAX_NAMED_CHANGES]})
        if before.nodes != seen.nodes:
            names = [
                n for n in sorted(before.nodes.keys() | seen.nodes.keys()) if before.nodes.get(n) != seen.nodes.get(n)
            ]
            self._send("nodes", {"changed": names[:MAX_NAMED_CHANGES]}, "nodes:read")
        if before.groups != seen.groups:
            self._send("groups", {}, "groups:read")
        if before.config != seen.config:
            self._send("config", {}, "config:read")

    def _send(self, event: str, data: Any, scope: str) -> None:
        for follower in self._followers:
            if scope in follower.caller.may:
                follower.tell(event, data)


def _framed(event: str, data: Any) -> str:
    return f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


@router.get("/events", include_in_schema=False)  # a stream has no end, so schema-based clients cannot read it
async def events(
    request: Request,
    caller: Annotated[Caller, Depends(admitted)],
) -> Response:
    """Send events about changes."""
    hub: Hub = request.app.state.hub
    access: Access = request.app.state.access
    secret, address = secret_of(request), request.client.host if request.client else ""
    follower = hub.join(caller)

    async def stream() -> AsyncIterator[str]:
        try:
            yield "retry: 2000\n\n"
            asked = time.monotonic()
            while True:
                try:
                    item = await asyncio.wait_for(follower.queue.get(), RECHECK_S)
                except TimeoutError:
                    item = ": still there\n\n"
                if item is None:
                    return
                if time.monotonic() - asked >= RECHECK_S:
                    asked = time.monotonic()
                    follower.caller = await access.still(secret, address)
                yield item
        except RefusedError:  # the token has ended
            return

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return HeldStream(stream(), lambda: hub.leave(follower), "text/event-stream", headers)
