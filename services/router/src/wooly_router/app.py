"""Connects the parts of the router's process: settings, database, NATS, REST."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.channel import ChannelError
from wooly_bus.errors import BusError, shown
from wooly_bus.http_listener import HttpServer
from wooly_bus.leadership import Leadership
from wooly_bus.private import keep_private
from wooly_bus.steady_clock import SteadyClock
from wooly_bus.supervision import Work, run, run_for_ever, supervised
from wooly_bus.tracing import handing_over, setup_tracing
from wooly_bus.web import Buckets, refuse_open

from wooly_router.actor import RouterActor
from wooly_router.blobs import BlobActor
from wooly_router.core.ceilings import UNLIMITED
from wooly_router.duties import Duties
from wooly_router.gate import Gate
from wooly_router.jobs import JobActor
from wooly_router.rest.access import Access
from wooly_router.rest.api import create_api
from wooly_router.settings import RouterSettings
from wooly_router.state.database import Database, migrate
from wooly_router.state.tenants import TenantRecord
from wooly_router.state.world import World
from wooly_router.tasks import TaskActor
from wooly_router.traces import TraceActor

log = logging.getLogger("wooly.router")
#: Seconds for which the router finishes REST answers when it ends.
LAST_ANSWERS_S = 3.0


async def serve(settings: RouterSettings) -> None:
    """Serve until a signal comes.

    Raises:
        BusConnectError: NATS does not answer.
        OSError: the REST port is in use.
        SQLAlchemyError: the database does not answer.
    """
    world = World(Database(settings.database(), durable=settings.durable), settings.cluster())
    app = ServiceApp("router", settings.nats_url)
    app.tenant_requests = settings.tenant_requests
    clock = SteadyClock()  # not the machine's: no session ends, and none stays, because that clock is set
    gate = Gate(world, settings.auth, clock, settings.owner(clock))
    actor = RouterActor(settings, app, world, gate, clock)
    leadership = Leadership(app, "router", f"{socket.gethostname()}-{os.getpid()}")
    jobs = JobActor(app, actor)
    desk = TaskActor(app, actor, jobs)
    BlobActor(app, gate, actor.blobs, settings.blob_bytes)
    world.traces.keeps = handing_over() is not None
    traces = TraceActor(app, world, gate)
    access = Access(gate, Buckets(settings.rate_limit, 4 * settings.rate_limit))
    duties = Duties(app, actor, jobs, leadership)
    listener = socket.create_server((settings.http_host, settings.http_port))
    port_file = settings.state_dir / "router.port"
    api = create_api(actor, desk, access, traces)
    tls = settings.tls()
    server = HttpServer(api, "router", tls=tls)
    server.closing = api.state.hub.close
    try:
        await actor.resume()
        await first_token(settings, world, actor.clock())
        async with app.running():
            port = listener.getsockname()[1]
            port_file.write_text(str(port))
            scheme = "http" if tls is None else "https"
            log.info(
                "router: REST on %s://%s:%d, NATS at %s", scheme, settings.http_host, port, shown(settings.nats_url)
            )
            async with _rest(server, listener) as http:
                works: dict[str, Work] = {
                    "REST": http,
                    "leadership": leadership.run,
                    "duties": duties.run,
                    "leases": actor.keep_leases,
                    "job commands": jobs.take_commands,
                    "job reports": jobs.take_reports,
                    "traces": traces.run,
                }
                await run_for_ever(works, until_signalled)
    finally:
        jobs.modules.close()
        port_file.unlink(missing_ok=True)
        listener.close()
        await world.close()


def _first_tenant(now: float) -> TenantRecord:
    """Make the administrators' own tenant: no ceiling limits it."""
    most = UNLIMITED
    return TenantRecord(
        "admin",
        now,
        "made at the first start",
        class_ceiling=most.priority,
        weight_ceiling=most.weight,
        exclusive=most.exclusive,
    )


async def first_token(settings: RouterSettings, world: World, now: float) -> None:
    """Make the first administrator's token, if tokens are required and no tenant exists.

    It is the configured token, or a random token in a file that only our user can read.
    """
    if settings.auth != "tokens" or settings.owner_token is not None or await world.tenants.all():
        return
    if not await world.tenants.add(_first_tenant(now)):
        return  # another router made the tenant
    if settings.operator_token is not None:
        given = settings.operator_token.get_secret_value()
        await world.tenants.add_token("admin", "operator", "operator", now, secret=given)
    if settings.admin_token is not None:
        await world.tenants.add_token("admin", "first", "admin", now, secret=settings.admin_token.get_secret_value())
        return
    _, secret = await world.tenants.add_token("admin", "first", "admin", now)
    path = settings.state_dir / "admin.token"
    path.touch(mode=0o600)
    path.write_text(secret)
    log.info("the first administrator's token is in %s", path)


@contextlib.asynccontextmanager
async def _rest(server: HttpServer, listener: socket.socket) -> AsyncIterator[Work]:
    """Serve REST inside the block. Yields the server's work; at the end of the block, pending answers are finished."""
    http = asyncio.create_task(server.serve(sockets=[listener]))

    async def served() -> None:
        await asyncio.shield(http)

    try:
        yield served
    finally:
        server.should_exit = True
        await asyncio.wait((http,), timeout=LAST_ANSWERS_S)


@supervised("router", (BusError, ChannelError, ValidationError, SQLAlchemyError, OSError))
def main() -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = RouterSettings()
    why = refuse_open("ROUTER", settings.http_host, settings.open_to_network) if settings.auth == "open" else ""
    if why:
        log.error("the router does not start: %s, or set WOOLY_ROUTER_AUTH=tokens", why)
        return 2
    setup_tracing("router")
    keep_private(settings.state_dir, "router.sqlite*", "admin.token")
    migrate(settings.database())
    run(serve(settings))
    return 0
