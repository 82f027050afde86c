"""The router's actor: receives heartbeats, opens, renews and closes sessions, and stores sessions as tasks.

Decisions are made in `Database.deciding`, so that several routers never promise the same memory twice. The actor waits for
executors outside of these transactions, so that a frozen executor delays only its own sessions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Any, Literal

from sqlalchemy.exc import SQLAlchemyError
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusTimeoutError, NoResponderError, RefusedError, shown
from wooly_bus.supervision import start_errand
from wooly_wis.messages import (
    CheckTokenReply,
    CheckTokenRequest,
    CloseSessionReply,
    CloseSessionRequest,
    ExecutorHeartbeat,
    HibernateSessionReply,
    HibernateSessionRequest,
    NodeInfo,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    PeerSessionReply,
    PeerSessionRequest,
    QueuePlace,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
    SetNodeStateReply,
    SetNodeStateRequest,
)

from wooly_router.advice import Advice
from wooly_router.blobs import TenantBlobs
from wooly_router.ceilings import CeilingActor
from wooly_router.core.ceilings import Wish
from wooly_router.core.cluster import overcommit_of
from wooly_router.core.placement import Room, room_on
from wooly_router.core.registry import Registry
from wooly_router.core.tasks import still_running
from wooly_router.executors import Executors
from wooly_router.gangs import RESERVED_S, Gangs, is_reserved
from wooly_router.gate import Caller, Gate
from wooly_router.limits import Limits
from wooly_router.moves import Moves, refuses
from wooly_router.opening import ABANDONED_S, Opening
from wooly_router.peers import Peers
from wooly_router.renewed import Renewed
from wooly_router.settings import RouterSettings
from wooly_router.state.config import AuditRecord
from wooly_router.state.database import UNREACHABLE, log_away
from wooly_router.state.tasks import Lease, TaskRecord
from wooly_router.state.world import World
from wooly_router.stops import Stops
from wooly_router.tenants import TenantActor

log = logging.getLogger("wooly.router")
#: Seconds in which a client whose connection broke may still report that it closed its session.
CLOSE_GRACE_S = 0.5
#: Maximum number of renewals at a time. Each may wait for a silent executor, and must not delay the renewals of other sessions.
MAX_RENEWALS = 4096
#: Seconds between two writes of renewed leases: far less than a third of a lease.
LEASES_EVERY_S = 0.5
#: Age in seconds up to which a session may be missing in a heartbeat: the heartbeat may have been sent before the session
#: opened.
NEW_SESSION_S = 5.0
#: Why a session ended whose client stopped renewing it, or stopped asking for its turn in the queue.
LAPSED = "the session's lease lapsed"
#: In the story of a session's task.
SILENT = "its client is silent, but connected: it may be stopped, or its machine sleeps; the session waits for it"
HEARD = "its client is heard again"
LEFT = "its client no longer asked for its turn in the queue"
#: Why the session of a rank ended that had a reserved device.
NOT_ASKED = "the rank never asked for the device that was reserved for it, and no other rank runs"
#: Why a session ended that lost its executor: why it was lost, and this.
NOT_BACK = "its client did not ask for another executor"
#: Seconds between two checks whether the last operator of a cancelled task has ended.
RELEASE_S = 1.0


class RouterActor:
    """Owns the registry of executors, and the sessions of the clients that ask this router.

    Args:
        settings: lease length.
        app: the connection to NATS.
        world: the state that all routers share.
        gate: authorizes callers.
        clock: returns seconds since the epoch, because leases outlive the process.
    """

    def __init__(
        self,
        settings: RouterSettings,
        app: ServiceApp,
        world: World,
        gate: Gate,
        clock: Callable[[], float],
    ) -> None:
        self.registry = Registry()
        self.world = world
        self.gate = gate
        self.clock = clock
        self.settings = settings
        self._app = app
        self.stops = Stops()
        #: The breaks after which leases were extended.
        self._resumed = (0, 0)
        #: Since when heartbeats have been heard without a break, and the breaks until then.
        self._heard_since, self._heard_breaks = clock(), (0, 0)
        self.issuer = settings.issuer()
        self.limits = Limits(settings)
        self.blobs = TenantBlobs(app, settings)
        self.advice = Advice(app)
        self.executors = Executors(app)
        self.ceilings = CeilingActor(app, world, gate, settings.ceilings())
        self.tenants = TenantActor(app, world, gate, self.ceilings)
        self._opening = Opening(
            settings, world, self.registry, self.executors, self.advice, self.issuer, clock, self.limits
        )
        self._gangs = Gangs(world)
        self._peers = Peers(self._opening.channel_key, world, self.executors, clock)
        self.moves = Moves(settings, app, world, self.registry, self.executors, clock)
        #: The cluster's setting, as `Duties` reads it from time to time: a renewal must be cheap.
        self.hibernate_after_s = 0.0
        self.credentials_s = settings.credentials_s
        #: Leases that were renewed but are not written yet, and sessions whose lease is being renewed.
        self._prolonged: dict[str, float] = {}
        self._renewing: set[str] = set()
        self._renewed = Renewed(2 * settings.lease_s, clock)
        #: Ranks of programs that their executor did not have in the last round of `reconcile`.
        self._absent: set[str] = set()
        #: Sessions whose clients are silent: since when their leases were extended for it, and when the last time.
        self._silent: dict[str, tuple[float, float]] = {}
        self.client_nats_url = settings.client_nats_url or shown(settings.nats_url)
        app.serve(contracts.ROUTER_SESSION_OPEN, self.on_open_session)
        app.serve(contracts.ROUTER_SESSION_RENEW, self.on_renew_session, concurrency=MAX_RENEWALS)
        app.serve(contracts.ROUTER_SESSION_HIBERNATE, self.on_hibernate_session)
        app.serve(contracts.ROUTER_SESSION_PEER, self.on_peer_session)
        app.serve(contracts.ROUTER_SESSION_CLOSE, self.on_close_session)
        app.serve(contracts.ROUTER_NODE_LIST, self.on_nodes)
        app.serve(contracts.ROUTER_NODE_SET, self.on_set_node_state)
        app.serve(contracts.ROUTER_TOKEN_CHECK, self.on_check_token)
        app.serve_tenants(contracts.ROUTER_SESSION_OPEN, self.on_open_tenants)
        app.serve_tenants(contracts.ROUTER_SESSION_RENEW, self.on_renew_tenants, concurrency=MAX_RENEWALS)
        app.serve_tenants(contracts.ROUTER_SESSION_HIBERNATE, self.on_hibernate_tenants)
        app.serve_tenants(contracts.ROUTER_SESSION_PEER, self.on_peer_tenants)
        app.serve_tenants(contracts.ROUTER_SESSION_CLOSE, self.on_close_tenants)
        app.serve_tenants(contracts.ROUTER_NODE_LIST, self.on_nodes_of)
        app.listen(contracts.EXECUTOR_NODE_HEARTBEAT, self.on_heartbeat)
        app.listen(contracts.EXECUTOR_SESSION_CLOSED, self.on_session_closed)

    @property
    def bus(self) -> ServiceApp:
        """The connection to NATS, for requests to other services."""
        return self._app

    async def on_check_token(self, request: CheckTokenRequest) -> CheckTokenReply:
        """Tell another service which caller a token belongs to."""
        caller = await self.gate.of_hash(request.secret_hash, "nats")
        return CheckTokenReply(
            actor=caller.actor,
            tenant=caller.tenant,
            may=tuple(sorted(caller.may)),
            until=caller.until,
            auth=self.gate.auth,
        )

    async def resume(self) -> None:
        """Extend all leases, because no client could renew its lease while no router ran, or while the database was away.

        Silent executors count as lost only some time after this: no router has heard them meanwhile.
        """
        breaks, self._heard_since = self._breaks(), self.clock()
        await self.world.tasks.prolong_all(self.clock() + self.settings.lease_s)
        self._resumed = breaks

    def _breaks(self) -> tuple[int, int]:
        """How often this process was stopped, and how often it lost NATS: it has not read what was said meanwhile."""
        return self.stops.count, self._app.reconnects

    def missed(self) -> str:
        """Why this process may have missed heartbeats and renewals since leases were last extended; empty: it has not."""
        stops, reconnects = self._breaks()
        if stops != self._resumed[0]:
            return f"this process was stopped for {self.stops.last_s:.0f} s"
        return "this process was not connected to NATS" if reconnects != self._resumed[1] else ""

    def _listens_since(self) -> float:
        """Since when heartbeats have been heard without a break. A break may have ended at this moment, or go on."""
        if (breaks := self._breaks()) != self._heard_breaks or not self._app.connected:
            self._heard_since, self._heard_breaks = self.clock(), breaks
        return self._heard_since

    # -- opening -----------------------------------------------------------------------------------------------------

    async def on_open_session(self, request: OpenSessionRequest) -> OpenSessionReply:
        """Open a session for the owner of the token in the request, or for anybody if no token is required."""
        caller = await self.gate.over_nats(request.credential, request.tenant, "tasks:write")
        return await self._open_for(caller, self.gate.makes_for(caller, request.tenant), request)

    async def on_open_tenants(self, request: OpenSessionRequest, tenant: str) -> OpenSessionReply:
        """Open a session for a tenant's NATS user."""
        caller = await self.gate.of_tenant(tenant, request.tenant)
        return await self._open_for(caller, caller.own, request)

    async def _open_for(self, caller: Caller, tenant: str, request: OpenSessionRequest) -> OpenSessionReply:
        wish = Wish.of_start(request.priority, request.weight, request.gpu_mode)
        granted = await self.ceilings.granted(tenant, wish, caller)
        terms = {"tenant": tenant, "credential": "", "priority": granted.priority, "weight": granted.weight}
        known = None
        if request.place is not None and request.lost:
            known = await self._requeue_for(request.place, tenant, request)
        return await self._opening.open(request.model_copy(update=terms), known)

    # -- living ------------------------------------------------------------------------------------------------------

    async def _open(self, session_id: str, token: str) -> TaskRecord | None:
        """Return an open session; None if it is not open.

        Raises:
            RefusedError: the token is not the session's.
        """
        lease, record = await self._leased(session_id, token)
        return None if lease is None else record

    async def _leased(self, session_id: str, token: str) -> tuple[Lease | None, TaskRecord | None]:
        """Return a session's lease and the session.

        Raises:
            RefusedError: the token is not the session's.
        """
        lease, record = await self.world.tasks.leased(session_id)
        if lease is not None and not _same(lease.token, token):
            raise RefusedError("router.no_session", f"session {session_id} belongs to another client")
        return lease, record

    async def _check_owner(self, session_id: str, tenant: str) -> None:
        """Check that a session, if it exists, belongs to this tenant: the session's token alone is not enough.

        Raises:
            RefusedError: the session belongs to another tenant.
        """
        record = await self.world.tasks.get(session_id)
        if record is not None and record.tenant != tenant:
            raise RefusedError("router.no_session", f"session {session_id} belongs to another client")

    async def on_renew_tenants(self, request: RenewSessionRequest, tenant: str) -> RenewSessionReply:
        """Renew the lease of a tenant's session."""
        try:
            await self.gate.of_tenant(tenant, None)
            await self._check_owner(request.session_id, tenant)
        except UNREACHABLE:
            if self._renewed.find(request.session_id, request.token, tenant) is None:
                raise
        return await self.on_renew_session(request)

    async def on_close_tenants(self, request: CloseSessionRequest, tenant: str) -> CloseSessionReply:
        """Close a tenant's session."""
        await self._check_owner(request.session_id, tenant)
        return await self.on_close_session(request)

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Renew a lease, on all executors of the session and in this router.

        While the database is away, the executors still get the renewals of the sessions that this router knows: ranks of programs
        would end there otherwise.

        Raises:
            RefusedError: the session does not exist, one of its executors is silent, or its lease is already being renewed. The
                last case keeps a client that asks often from using up the concurrent renewals.
        """
        try:
            record = await self._open(request.session_id, request.token)
            if record is not None and record.state == "pending" and record.wants.get("away"):
                await self.moves.is_alive(record)
            if record is None or record.state == "pending":
                raise RefusedError("router.no_session", await self._reason_of_end(request.session_id))
            await self.moves.hear(record, request)
        except UNREACHABLE:
            record = self._renewed.find(request.session_id, request.token)
            if record is None:
                raise
        self._renewed.add(record, request.token)
        if record.id in self._renewing:
            raise RefusedError(
                "router.renewing", f"the lease of session {record.id} is being renewed already", retryable=True
            )
        self._renewing.add(record.id)
        try:
            return await self._renew(record, request)
        finally:
            self._renewing.discard(record.id)

    async def _renew(self, record: TaskRecord, request: RenewSessionRequest) -> RenewSessionReply:
        names = [p.executor_id for p in record.parts]
        renewal = RenewSessionRequest(session_id=request.session_id, token=request.token)
        answers = await self.executors.renew(names, renewal)
        leases: list[float] = []
        problems: list[tuple[str, BaseException]] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, RefusedError) and answer.code == "executor.no_session":
                why = f"executor {name} no longer has it"
                # Its client may be closing it just now.
                start_errand(self._lose_after_grace(record, name, why, heard=True), f"end of session {record.id}")
                raise RefusedError("router.no_session", f"executor {name}: {answer}") from answer
            if isinstance(answer, BaseException):
                problems.append((name, answer))
            else:
                leases.append(answer.lease_s)
        for name, problem in problems:
            if isinstance(problem, (NoResponderError, BusTimeoutError)):
                raise RefusedError(
                    "router.executor_lost", f"executor {name} does not answer", retryable=True
                ) from problem
            raise problem
        if (silent := self._silent.pop(record.id, None)) is not None:
            text = f"{HEARD} after {self.clock() - silent[0]:.0f} s"
            await self.world.tasks.note(record.id, text, self.clock())
        lease_s = min(leases, default=self.settings.lease_s)  # a hibernated session has no executor
        self._prolonged[record.id] = self.clock() + lease_s
        reply = RenewSessionReply(lease_s=lease_s, hibernate_after_s=self.hibernate_after_s)
        if request.note:
            await self.world.tasks.note(record.id, f"its client says: {request.note}", self.clock())
        wish = record.wish
        if wish.do and not refuses(request, wish):
            reply = reply.model_copy(update={"wish": wish.do, "reason": wish.reason})
        return reply

    async def keep_leases(self) -> None:
        """Write renewed leases until cancelled.

        Renewals do not wait for this: other transactions may hold the database for long.
        """
        while True:
            await asyncio.sleep(LEASES_EVERY_S)
            self._renewed.forget()
            try:
                await self.write_leases()
            except UNREACHABLE as e:
                log_away("leases are written later", e)
            except SQLAlchemyError as e:
                log.warning("leases cannot be written: %s; trying again", e)

    async def write_leases(self) -> None:
        """Write the leases that were renewed so far."""
        if not self._prolonged:
            return
        leases = dict(self._prolonged)
        await self.world.tasks.prolong(leases)
        for session_id, until in leases.items():
            if self._prolonged.get(session_id) == until:
                del self._prolonged[session_id]

    async def _reason_of_end(self, session_id: str) -> str:
        task = await self.world.tasks.get(session_id)
        if task is None or task.kind != "session":
            return f"session {session_id} is not open"
        return f"session {session_id} is not open: it is {task.state}" + (f" ({task.reason})" if task.reason else "")

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """Close a session on request of its client. A second close is not an error. A reason is the failure of its script."""
        record = await self._open(request.session_id, request.token)
        if record is None:
            return CloseSessionReply(closed=False)
        if record.state == "pending":
            await self.end(record, "cancelled", request.reason or "its client left the queue")
        else:
            state = "failed" if request.reason else "completed"
            await self.end(record, state, request.reason or "closed by its client")
        return CloseSessionReply(closed=True)

    async def end(
        self,
        record: TaskRecord,
        state: str,
        reason: str,
        *,
        lapsed: float | None = None,
        only_from: Collection[str] = (),
    ) -> bool:
        """End a running session, here and on its executors, and the other ranks of its program with it. Returns False if it has
        ended already.

        Args:
            record: the session.
            state: the state in which it ends.
            reason: why.
            lapsed: end it only if its lease was over at this time; it may have been renewed since it was read.
            only_from: end it only in one of these states; empty: in any.
        """
        ended = await self._end_alone(record, state, reason, lapsed, only_from)
        if ended:
            await self._end_gang(record, state, reason)
        return ended

    async def _end_alone(
        self, record: TaskRecord, state: str, reason: str, lapsed: float | None = None, only_from: Collection[str] = ()
    ) -> bool:
        async with self.world.database.writing() as s:
            record = await self.world.tasks.locked(s, record.id) or record  # it may have moved since it was read
            ended = await self.world.tasks.move(
                s, record.id, state, reason, self.clock(), only_from=only_from, lapsed=lapsed
            )
        if ended:
            await self.close_on_executors(record, record.id, reason)
            await self._close_peers(record, reason)
            if not record.parts and record.wants.get("store"):
                start_errand(self.moves.drop_checkpoints(record), f"removal of the checkpoints of {record.id}")
        return ended

    async def _end_gang(self, record: TaskRecord, state: str, reason: str) -> None:
        """End the other ranks of a program one of whose ranks has failed or was cancelled.

        If it has completed, only ranks end that have not asked for a device, and only after the last of the others.
        """
        others = await self._gangs.others(record)
        if state == "completed" and not all(is_reserved(r) for r in others):
            return
        rank = f"rank {record.rank} of the program"
        unused = f"{rank} has ended, and this rank never asked for a device"
        await asyncio.gather(
            *[self._end_alone(r, "cancelled", unused) for r in others if is_reserved(r)],
            *[self._end_alone(r, state, f"{rank} ended: {reason}") for r in others if not is_reserved(r)],
        )

    async def _close_peers(self, record: TaskRecord, reason: str) -> None:
        known = await self.world.tasks.get(record.id)  # its client may have asked for a peer session since
        await self._peers.close(known or record, reason)

    async def close_on_executors(self, record: TaskRecord, session_id: str, reason: str) -> None:
        """Close a task's session on its executors.

        If operators still run there, the task's story says so until they have ended.
        """
        running = await self.executors.close([p.executor_id for p in record.parts], session_id, reason)
        if running:
            await self.world.tasks.amend(record.id, still_running(reason, running), self.clock())
            waiting = self._await_release(record, session_id, reason, running)
            start_errand(waiting, f"waiting for the last operator of {record.id}")

    async def _await_release(self, record: TaskRecord, session_id: str, reason: str, running: dict[str, float]) -> None:
        """Repeat the close until no operator of an ended task runs."""
        begun = self.clock()
        while running:
            await asyncio.sleep(RELEASE_S)
            running = await self.executors.close(list(running), session_id, reason)
        now = self.clock()
        await self.world.tasks.amend(record.id, reason, now, f"its last operator ended, {now - begun:.1f} s later")

    async def on_hibernate_session(self, request: HibernateSessionRequest) -> HibernateSessionReply:
        """Free the executor of a session whose client has a checkpoint of it.

        Raises:
            RefusedError: the session is not open, or cannot hibernate.
        """
        record = await self._open(request.session_id, request.token)
        if record is None:
            raise RefusedError("router.no_session", await self._reason_of_end(request.session_id))
        return HibernateSessionReply(lease_s=await self.moves.hibernates(record, request.reason))

    async def on_hibernate_tenants(self, request: HibernateSessionRequest, tenant: str) -> HibernateSessionReply:
        """Let a tenant's session hibernate."""
        await self._check_owner(request.session_id, tenant)
        return await self.on_hibernate_session(request)

    async def on_peer_session(self, request: PeerSessionRequest) -> PeerSessionReply:
        """Let the executor of a session work with the executor of another session of the same tenant.

        Raises:
            RefusedError: a session is not open there, or the other executor refuses.
        """
        record = await self._open(request.session_id, request.token)
        if record is None:
            raise RefusedError("router.no_session", await self._reason_of_end(request.session_id))
        return await self._peers.open(record, request)

    async def on_peer_tenants(self, request: PeerSessionRequest, tenant: str) -> PeerSessionReply:
        """Let the executors of a tenant's sessions work together."""
        await self.gate.of_tenant(tenant, None)
        await self._check_owner(request.session_id, tenant)
        return await self.on_peer_session(request)

    # -- losses ------------------------------------------------------------------------------------------------------

    async def _requeue_for(self, place: QueuePlace, tenant: str, request: OpenSessionRequest) -> TaskRecord | None:
        """Put a session back into the queue whose client says that it lost its executor, or leaves it.

        Returns it, unless it was there before.

        Raises:
            RefusedError: the session is not open, belongs to another client, or stays where it is.
        """
        lease, record = await self._leased(place.session_id, place.token)
        if lease is None or record is None or record.tenant != tenant:
            raise RefusedError("router.no_session", await self._reason_of_end(place.session_id))
        return await self.moves.comes_back(record, lease, request.lost, request.cut, leaves=request.leaves)

    async def lose_part(
        self,
        record: TaskRecord,
        executor_id: str,
        reason: str,
        state: str = "failed",
        *,
        passing: bool = False,
        hung_up: bool = False,
    ) -> None:
        """End a session that one executor has lost. The other executors are told in the background.

        With `passing`, a session whose client can go on in another executor goes back into the queue instead. `hung_up`: its
        client's process may have ended.
        """
        others = [p.executor_id for p in record.parts if p.executor_id != executor_id]
        if passing and record.wants.get("recovers"):
            now = await self.world.tasks.get(record.id)
            if now is not None and (now.state, now.attempt) == (record.state, record.attempt):
                silent = await self.executors.leave(others, record.id, f"it goes on without executor {executor_id}")
                await self.moves.requeue(record, reason, silent=silent, hung_up=hung_up)
                self._prolonged.pop(record.id, None)  # the last renewal was for the time before
            return
        async with self.world.database.writing() as s:
            lost = await self.world.tasks.move(
                s, record.id, state, reason, self.clock(), attempt=record.attempt, only_from=["started"]
            )
        if lost and others:
            closing = self.executors.close(others, record.id, f"it ended on executor {executor_id}")
            start_errand(closing, f"closing of session {record.id}")
        if lost:
            await self._close_peers(record, reason)
            await self._end_gang(record, state, reason)

    async def _lose_after_grace(
        self,
        record: TaskRecord,
        executor_id: str,
        reason: str,
        *,
        passing: bool = True,
        hung_up: bool = False,
        heard: bool = False,
    ) -> None:
        """End a lost session after a delay: a client that exits may still report its close, and that report comes first.

        Args:
            record: the session.
            executor_id: the executor that has lost it.
            reason: why.
            passing: it may go on elsewhere.
            hung_up: its client's process may have ended.
            heard: its client lives.
        """
        await asyncio.sleep(CLOSE_GRACE_S)
        await self.lose_part(record, executor_id, reason, passing=passing, hung_up=hung_up and not heard)
        if heard:
            await self.moves.is_alive(record)

    # -- nodes -------------------------------------------------------------------------------------------------------

    async def on_nodes(self, request: NodesRequest) -> NodesReply:
        """List all executors."""
        config, nodes = await self.world.settings()
        found: list[NodeInfo] = []
        for info in self.registry.nodes(self.clock()):
            node = nodes.get(info.node)
            more: dict[str, Any] = {"overcommit_vram_percent": overcommit_of(node, config)}
            if node is not None:
                more |= {"wish": node.wish, "groups": tuple(sorted(node.groups))}
            found.append(info.model_copy(update=more))
        return NodesReply(nodes=tuple(found))

    async def rooms(self) -> dict[str, Room]:
        """What one more task may ask for on each device now."""
        async with self.world.database.reading() as s:
            _, _, pool = await self.world.pool(s, self.registry, self.clock())
        return {g.executor_id: room_on(g, pool.load(g.executor_id)) for g in pool.gpus()}

    async def on_nodes_of(self, request: NodesRequest, tenant: str) -> NodesReply:
        """List all executors as a tenant may see them: without other tenants' sessions."""
        await self.gate.of_tenant(tenant, None)
        reply = await self.on_nodes(request)
        found = [n.model_copy(update={"memory": n.memory and n.memory.of_tenant(tenant)}) for n in reply.nodes]
        return NodesReply(nodes=tuple(found))

    async def on_set_node_state(self, request: SetNodeStateRequest) -> SetNodeStateReply:
        """Cordon or drain a node, or let it take tasks again.

        Raises:
            RefusedError: the caller may not, or the node does not exist.
        """
        caller = await self.gate.over_nats(request.credential, None, "nodes:write")
        await self.set_node_state(caller, request.node, request.state)
        tasks = [t for t in await self.world.tasks.in_states("started") if request.node in [p.node for p in t.parts]]
        return SetNodeStateReply(
            node=request.node,
            state=request.state,
            tasks=tuple([t.id for t in tasks]),
            moving=tuple([t.id for t in tasks if t.wish.do == "move"]),
        )

    async def set_node_state(self, caller: Caller, node: str, state: Literal["active", "cordoned", "draining"]) -> None:
        """Store an operator's wish for a node. A wish that is in force already changes nothing.

        Raises:
            RefusedError: the node does not exist.
        """
        _, nodes = await self.world.settings()
        if node in nodes and nodes[node].wish == state:
            return
        if not await self.world.nodes.set_wish(node, state):
            raise RefusedError("router.no_node", f"node {node} does not exist")
        audit = AuditRecord(self.clock(), caller.actor, caller.own, "node.state", node, {"state": state})
        await self.world.audit.add(audit)

    async def on_heartbeat(self, heartbeat: ExecutorHeartbeat) -> None:
        """Record a heartbeat."""
        if self.registry.hear(heartbeat, self.clock()):
            log.info("executor %s (%s) is alive", heartbeat.executor_id, heartbeat.device.name)
        elif heartbeat.ending:
            log.warning("executor %s is ending: %s", heartbeat.executor_id, heartbeat.ending)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """End a session, because an executor ended its part of it."""
        record = await self.world.tasks.of_session(event.session_id)
        brings = None if record is None else record.wants.get("brings")
        if record is not None and brings and event.contents:
            await self.world.brought.remember(
                record.tenant, brings["name"], brings["dedup"], event.contents, self.clock()
            )
        if record is not None and record.kind == "session" and record.state == "started":
            if event.epoch != record.attempt:
                return  # it goes on in another executor by now
            if event.executor_id not in [part.executor_id for part in record.parts]:
                return  # an executor that answered too late: the session was opened at another one
            if event.reason:
                why = f"it ended on executor {event.executor_id}: {event.reason}"
                hung_up = event.hung_up and bool(record.gang.task_id)  # the other ranks wait for it
                losing = self._lose_after_grace(record, event.executor_id, why, passing=event.passing, hung_up=hung_up)
                start_errand(losing, f"end of session {record.id}")
            else:
                await self.lose_part(record, event.executor_id, "closed by its client", "completed")

    # -- duties of the leader ----------------------------------------------------------------------------------------

    async def lapse(self) -> int:
        """End sessions whose lease is over, whose client left the queue, or that were never opened.

        Returns the number of ended sessions.
        """
        now = self.clock()
        self.registry.forget_old(now)
        # late heartbeats are waited for, without an extension
        known_s = 2 * self.settings.lease_s + self.settings.lost_after_s
        self._silent = {name: at for name, at in self._silent.items() if now - at[1] <= known_s}
        await self.write_leases()
        records = [await self.world.tasks.get(task_id) for task_id in await self.world.tasks.lapsed(now)]
        over = [
            r
            for r in records
            if r is not None and not await self._keeps_reserved(r, now) and not await self._keeps_silent(r, now)
        ]
        over = [r for r in over if not self._is_renewed(r.id)]  # while this round read the database
        if self.missed() or not self._app.connected:  # renewals of that time may not have been read yet
            return 0
        ended = await asyncio.gather(*[self.end(r, "failed", _why_over(r), lapsed=now) for r in over])
        for record in await self.world.tasks.in_states("pending", kind="session"):
            if now - record.created_at > ABANDONED_S and await self.world.tasks.lease(record.id) is None:
                why = "the router that was opening it has ended"
                ended.append(await self.end(record, "failed", why, only_from=("pending",)))
        return sum(ended)

    async def _keeps_reserved(self, record: TaskRecord, now: float) -> bool:
        """Keep the device of a rank that has not asked for it, if other ranks run."""
        if not is_reserved(record) or not any(r.state == "started" for r in await self._gangs.others(record)):
            return False
        async with self.world.database.writing() as s:
            await self.world.tasks.keep_lease(s, record.id, now + RESERVED_S)
        return True

    def _is_renewed(self, session_id: str) -> bool:
        """Whether this router is renewing a lease, or has renewed it but not written it yet."""
        return session_id in self._renewing or session_id in self._prolonged

    async def _keeps_silent(self, record: TaskRecord, now: float) -> bool:
        """Keep a session whose client is silent, as long as its connections to all executors are open. They say how long.

        Executors that have said nothing since the lease was over are waited for: their heartbeats may come late, and a router
        that has just started has heard none. An executor that has the session, and does not call its client silent, has just
        got a renewal that is not written yet (another router writes its own), or is about to end the session itself: it gets
        the length of a lease for that. A rank whose client is silent is not kept, because the other ranks wait for it.

        A session that can go on in another executor, and has lost its own, is left to `reconcile`: its client may have been
        asking for its lease all the time. So is a session that its executor no longer has: it may have ended in good order.
        """
        if record.state == "started" and self._why_missing(record, now):
            lives = any(self.registry.lacks(part.executor_id, record.id, now) for part in record.parts)
            if record.wants.get("recovers") or lives:
                return True
        if record.state != "started" or not record.parts:
            return False
        lease = await self.world.tasks.lease(record.id)
        if lease is None:
            return False
        executors = [part.executor_id for part in record.parts]
        if any(self._may_speak(name, lease.lease_until, now) for name in executors):
            return True
        if record.gang.task_id:
            return False
        if not all(self.registry.late(name, record.id, now) for name in executors):
            held = all(self.registry.holds(name, record.id, now) for name in executors)
            return held and now <= lease.lease_until + self.settings.lease_s
        async with self.world.database.writing() as s:
            await self.world.tasks.keep_lease(s, record.id, now + self.settings.lease_s)
        if record.id not in self._silent:
            await self.world.tasks.note(record.id, SILENT, now)
        self._silent[record.id] = self._silent.get(record.id, (now, now))[0], now
        return True

    def _may_speak(self, executor_id: str, since: float, now: float) -> bool:
        """Whether an executor has not been heard since a time, but is not lost."""
        heard = self.registry.heard(executor_id) or 0.0
        silent_s = now - max(heard, self._listens_since())
        return heard <= since and silent_s <= self.settings.lost_after_s and not self.registry.ended(executor_id)

    async def reconcile(self) -> int:
        """End sessions that one of their executors does not have (after a restart), or whose executor is lost.

        Returns the number of these.
        """
        now, lost = self.clock(), list[tuple[TaskRecord, str, str]]()
        absent, self._absent = self._absent, set()
        for record in await self.world.tasks.in_states("started", kind="session"):
            for part in record.parts:
                reason = self.missing(part.executor_id, record.id, record.started_at or now)
                if reason and record.gang.task_id and record.id not in absent:
                    # The end of a rank would end the others, and its executor may be about to report that it has completed.
                    self._absent.add(record.id)
                elif reason:
                    lost.append((record, part.executor_id, reason))
                    break
        await asyncio.gather(*[self._lose_missing(*each) for each in lost])
        return len(lost)

    async def _lose_missing(self, record: TaskRecord, executor_id: str, reason: str) -> None:
        """End a session that one executor does not have. An executor that lives may tell how the session ended there."""
        now = await self.world.tasks.get(record.id)
        if now is None or (now.state, now.attempt) != (record.state, record.attempt):
            return  # it has ended, or goes on: a question to its executor would end it there
        if self.registry.lacks(executor_id, record.id, self.clock()):
            ended = await self.executors.how_ended(executor_id, record.id)
            if ended is not None and ended.epoch == record.attempt:
                await self.on_session_closed(ended)
                return
        log.warning("session %s is over: %s", record.id, reason)
        await self.lose_part(record, executor_id, reason, passing=True)

    def _why_missing(self, record: TaskRecord, now: float) -> str:
        """Explain why one of a session's executors cannot have it; empty if all can."""
        found = [self.missing(part.executor_id, record.id, record.started_at or now) for part in record.parts]
        return next(filter(None, found), "")

    def missing(self, executor_id: str, session_id: str, since: float) -> str:
        """Explain why an executor cannot have a session that it took at time `since`; empty if it can.

        For `lost_after_s` after its own start, or after it was stopped or without NATS, a router does not count silent executors
        as lost.
        """
        now, last = self.clock(), self.registry.heard(executor_id)
        heard = max(last or 0.0, self._listens_since())
        if ended := self.registry.ended(executor_id):
            return f"executor {executor_id} is lost: {ended}"
        if now - heard > self.settings.lost_after_s:
            return f"executor {executor_id} is lost: no heartbeat for {now - heard:.0f} s"
        if last is None or last - since <= NEW_SESSION_S:  # a late heartbeat says nothing of a session that is younger
            return ""
        return "" if self.registry.has(executor_id, session_id) else f"executor {executor_id} does not have it"


def _why_over(record: TaskRecord) -> str:
    """Why a session ends whose lease is over."""
    if record.state != "pending":
        return LAPSED
    if is_reserved(record):
        return NOT_ASKED
    return f"{record.reason}; {NOT_BACK}" if record.wants.get("away") else LEFT


def _same(token: str, given: str) -> bool:
    return secrets.compare_digest(token.encode(), given.encode())
