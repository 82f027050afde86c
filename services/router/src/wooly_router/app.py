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
from wooly_bus.leadership import Leadership
from wooly_bus.private import keep_private
from wooly_bus.steady_clock import SteadyClock
from wooly_bus.supervision import Work, run, run_for_ever, supervised
from wooly_bus.tracing import handing_over, setup_tracing
from wooly_bus.web import refuse_open

from wooly_router.actor import RouterActor
from wooly_router.blobs import BlobActor
from wooly_router.core.ceilings import UNLIMITED
from wooly_router.duties import Duties
from wooly_router.gate import Gate
from wooly_router.jobs import JobActor
from wooly_router.settings import RouterSettings
from wooly_router.state.database import DATABASE_AWAY, DATABASE_AWAY_TEXT, UNREACHABLE, Database, migrate
from wooly_router.state.tenants import TenantRecord, new_token
from wooly_router.state.world import World
from wooly_router.tasks import TaskActor
from wooly_router.traces import TraceActor

log = logging.getLogger("wooly.router")
#: Seconds between two looks whether an executor has registered, by a router without REST.
READY_POLL_S = 0.02


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
    app.passing |= dict.fromkeys(UNREACHABLE, (DATABASE_AWAY, DATABASE_AWAY_TEXT))
    clock = SteadyClock()  # not the machine's: no session ends, and none stays, because that clock is set
    gate = Gate(world, settings.auth, clock, settings.owner(clock))
    actor = RouterActor(settings, app, world, gate, clock)
    leadership = Leadership(app, "router", f"{socket.gethostname()}-{os.getpid()}")
    jobs = JobActor(app, actor)
    desk = TaskActor(app, actor, jobs)
    BlobActor(app, gate, actor.blobs, settings.blob_bytes)
    world.traces.keeps = handing_over() is not None
    traces = TraceActor(app, world, gate)
    duties = Duties(app, actor, jobs, leadership)
    front = None
    if settings.rest:
        from wooly_router.front import Front  # not before: the stack of one run does not need it

        front = Front(settings, actor, desk, gate, traces)
    try:
        await actor.resume()
        await first_token(settings, world, actor.clock())
        async with app.running(), _without_rest(settings, actor) if front is None else front.serving() as shown:
            works: dict[str, Work] = shown | {
                "leadership": leadership.run,
                "duties": duties.run,
                "leases": actor.keep_leases,
                "stops": actor.stops.run,
                "job commands": jobs.take_commands,
                "job reports": jobs.take_reports,
                "traces": traces.run,
            }
            await run_for_ever(works, until_signalled)
    finally:
        jobs.modules.close()
        (settings.state_dir / "router.port").unlink(missing_ok=True)
        if front is not None:
            front.close()
        await world.close()


@contextlib.asynccontextmanager
async def _without_rest(settings: RouterSettings, actor: RouterActor) -> AsyncIterator[dict[str, Work]]:
    """Tell by files what REST would tell: that the router is up, and that it knows an executor.

    Yields:
        The work for it, by name.
    """
    ready = settings.state_dir / "router.ready"
    ready.unlink(missing_ok=True)
    (settings.state_dir / "router.port").write_text("")
    log.info("router: no REST, NATS at %s", shown(settings.nats_url))

    async def tell() -> None:
        while not actor.registry.alive(actor.clock()):
            await asyncio.sleep(READY_POLL_S)
        ready.touch()
        await asyncio.Event().wait()

    yield {"ready": tell}


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

    It is the configured token, or a random token in a file that only our user can read. Tenant, tokens and file are made in
    one transaction: if the router is killed meanwhile, its next start makes them.
    """
    if settings.auth != "tokens" or settings.owner_token is not None or await world.tenants.all():
        return
    tokens = []
    if settings.operator_token is not None:
        operator, _ = new_token("admin", "operator", "operator", now)
        tokens.append((operator, settings.operator_token.get_secret_value()))
    first, secret = new_token("admin", "first", "admin", now)
    given = settings.admin_token
    tokens.append((first, secret if given is None else given.get_secret_value()))
    path = settings.state_dir / "admin.token"

    def keep() -> None:
        if given is None:
            path.touch(mode=0o600)
            path.write_text(secret)

    if await world.tenants.add(_first_tenant(now), tokens, before=keep) and given is None:
        log.info("the first administrator's token is in %s", path)


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
