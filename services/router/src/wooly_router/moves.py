"""Sessions that leave their executor: after its loss, on request, from a node that is being drained, and to hibernate.

After a loss, the router puts the session back into the queue, and its client asks for another executor. Everything else is a
wish: the answer to the next renewal tells it to the client, which takes a checkpoint and then leaves the executor by itself. Only
the client knows the place in the session at which it leaves, and whether it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, RefusedError
from wooly_wis.messages import KeepCheckpointsRequest, NamedSession, RenewSessionRequest

from wooly_router.core.placement import Claim, DeviceRequest, Pool, summary
from wooly_router.core.registry import Registry
from wooly_router.executors import Executors
from wooly_router.settings import RouterSettings
from wooly_router.state.tasks import NO_WISH, Lease, TaskRecord, TaskWish
from wooly_router.state.world import World

log = logging.getLogger("wooly.router")
#: Seconds, besides a lease, in which the client of a session that lost its executor must ask for another one.
RECOVERY_GRACE_S = 15.0
#: Part of a lease in which the client of a rank must be heard after its connection was closed by its end. Clients renew their
#: leases ten times per lease, also if their scripts do not notice the loss. Other ranks wait for this one meanwhile.
HUNG_UP_LEASE = 0.2
#: Maximum seconds to wait for an executor that removes or keeps checkpoints.
KEEP_TIMEOUT_S = 5.0
#: Maximum number of sessions in one request to keep checkpoints.
KEPT_AT_ONCE = 1000
#: Maximum number of sessions that one round asks to move: for each, the room on all devices is looked up.
MOVES_AT_ONCE = 16
#: Seconds after which a session that stayed is asked again to leave a node that is being drained.
ASK_AGAIN_S = 30.0
#: Maximum number of characters that are kept of the reason why a session cannot move.
REASON_KEPT = 1024
DRAINED = "node {} is being drained"


class Moves:
    """Decides and stores what becomes of sessions that leave their executors.

    Args:
        settings: lease length.
        app: the connection to NATS.
        world: the state that all routers share.
        registry: the known executors.
        executors: closes sessions on executors.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        settings: RouterSettings,
        app: ServiceApp,
        world: World,
        registry: Registry,
        executors: Executors,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._app, self._world, self._registry = settings, app, world, registry
        self._executors, self._clock = executors, clock
        #: When `drain` asked each session to move, by its id and attempt: after a move, it may have to leave the next executor.
        self._asked: dict[tuple[str, int], float] = {}

    # -- after a loss ------------------------------------------------------------------------------------------------

    async def requeue(
        self,
        record: TaskRecord,
        reason: str,
        wish: TaskWish = NO_WISH,
        *,
        silent: Collection[str] = (),
        lease: Lease | None = None,
        hung_up: bool = False,
        **wants: object,
    ) -> TaskRecord | None:
        """Put a session that leaves its executor back into the queue.

        Args:
            record: the session.
            reason: why it leaves, for its story.
            wish: what it was asked for, if it leaves because of that.
            silent: its executors that do not answer.
            lease: its lease, if it is known.
            hung_up: its client's process may have ended, so it must be heard soon.
            wants: further changes of its wants.

        Returns:
            The session as it is then; None if it has ended.
        """
        now = self._clock()
        alive = {e.executor_id for e in self._registry.alive(now)} - set(silent)
        # A client may say that it lost its executor when it did not. Its repeated work is free only if the cluster saw the loss.
        repeats = not wish.do and await self._repeats_lost_work(record, alive)
        lease = lease or await self._world.tasks.lease(record.id)
        if lease is None:
            return None
        lease_s = self._settings.lease_s
        waits_s = HUNG_UP_LEASE * lease_s if hung_up else lease_s + RECOVERY_GRACE_S
        waiting = Lease(record.id, lease.token, now + waits_s)
        async with self._world.database.writing() as s:
            left = await self._world.tasks.leave(
                s,
                record,
                "pending",
                reason,
                now,
                waiting,
                **{
                    "barred": wish.barred,
                    **({"node": wish.node} if wish.node else {}),
                    "store": self._store_of(record),
                    "repeats": repeats,
                    **wants,
                },
            )
            return await self._world.tasks.get(record.id, s) if left else None

    async def is_alive(self, record: TaskRecord) -> None:
        """The client of a session that has lost its executor lives, and will ask for another one."""
        async with self._world.database.writing() as s:
            await self._world.tasks.keep_lease(s, record.id, self._clock() + self._settings.lease_s + RECOVERY_GRACE_S)

    async def _repeats_lost_work(self, record: TaskRecord, alive: Collection[str]) -> bool:
        """Whether the cluster has lost an executor of a session. Ranks of one program repeat together."""

        def lost(task: TaskRecord) -> bool:
            return any(p.executor_id not in alive for p in task.parts)

        if lost(record) or not record.gang.task_id:
            return lost(record)
        gang = await self._world.tasks.gang(record.gang.task_id)
        # A rank that has gone back before this one is at a later attempt.
        return any(lost(r) or (r.attempt > record.attempt and bool(r.wants.get("repeats"))) for r in gang)

    async def comes_back(
        self, record: TaskRecord, lease: Lease, reason: str, cut: int, *, leaves: bool
    ) -> TaskRecord | None:
        """The client of a session asks for another executor, because it lost its own or because it was asked to leave it.

        Args:
            record: the session.
            lease: its lease.
            reason: why, as the client says.
            cut: number of the checkpoint that the next executor must have; 0: none.
            leaves: the session still has its executor, and leaves it because it was asked to.

        Returns:
            The session, if it has its place in the queue now; None: it left its executor before.

        Raises:
            RefusedError: the session cannot go on elsewhere; or it was asked to leave, and no other device has room any more
                (`router.stays`). Then it stays where it is.
        """
        # Without a checkpoint, any executor will do.
        changes: dict[str, Any] = {} if cut else {"store": ""}
        if record.state == "started":
            if not record.wants.get("recovers"):
                raise RefusedError("router.no_session", f"session {record.id} cannot go on in another executor")
            names = [p.executor_id for p in record.parts]
            # A rank that was asked to leave may leave because another rank has left.
            wish = record.wish if leaves or record.gang.task_id else NO_WISH
            if leaves:
                try:
                    await self._check_room(record, wish.node, wish.barred)
                except RefusedError as e:
                    await self.stays(record, str(e))
                    raise RefusedError("router.stays", str(e)) from e
            # Its executor may live and have the session, for example if only the connection broke.
            silent = await self._executors.leave(names, record.id, "it goes on in another executor")
            why = (wish.reason or reason) if leaves or wish.do else f"its client lost {', '.join(names)}: {reason}"
            # It has its place in the queue at once, because its client asks.
            waits = await self.requeue(record, why, wish, silent=silent, lease=lease, away=False, **changes)
            if waits is not None:
                return waits
        if changes:
            async with self._world.database.writing() as s:
                await self._world.tasks.change_wants(s, record.id, **changes)
        return None

    def _store_of(self, record: TaskRecord) -> str:
        """The identity of the place where the checkpoints of a session are; empty: there are none."""
        return next((self._registry.store(p.executor_id) for p in record.parts), "")

    # -- wishes ------------------------------------------------------------------------------------------------------

    async def move_to(self, record: TaskRecord, reason: str, to: str = "") -> None:
        """Ask the client of a running session to go on in another executor.

        Args:
            record: the session.
            reason: why, for its story.
            to: the node, executor, group of nodes, or vendor to use from now on; empty: as before.

        Raises:
            RefusedError: as `move`; or nothing has this name.
        """
        executors = self._registry.all()
        if not to or to in {e.executor_id for e in executors} | {e.node for e in executors}:
            await self.move(record, reason, to)
            return
        if to in {group.name for group in await self._world.nodes.groups()}:
            change: dict[str, Any] = {"groups": [to], "node": ""}
        elif to in {e.device.vendor for e in executors}:
            change = {"vendor": to, "arch": "", "node": ""}
        else:
            raise RefusedError("router.no_node", f"no node, executor, group or vendor is called {to}")
        wanted = replace(record, wants=record.wants | change)
        _check_movable(wanted)
        barred = [p.executor_id for p in record.parts]
        await self._check_room(wanted, "", barred)
        async with self._world.database.writing() as s:
            await self._world.tasks.change_wants(s, record.id, state=record.state, attempt=record.attempt, **change)
        await self._wish(wanted, "move", reason, barred=barred)

    async def move(self, record: TaskRecord, reason: str, node: str = "", leave: Collection[str] = ()) -> None:
        """Ask the client of a running session to go on in another executor.

        Args:
            record: the session.
            reason: why, for its story.
            node: the node or the executor to use from now on; empty: as before.
            leave: those of its executors that it must leave; empty: all.

        Raises:
            RefusedError: the session does not run, its client cannot go on elsewhere, or no other device has room.
        """
        _check_movable(record)
        barred = list(leave) or [p.executor_id for p in record.parts]
        await self._check_room(record, node, barred)
        await self._wish(record, "move", reason, node=node, barred=barred)

    async def _check_room(self, record: TaskRecord, node: str, barred: Collection[str]) -> None:
        """Check that other devices can take a session, besides the sessions that were asked to move before.

        Args:
            record: the session.
            node: the node or the executor to use; empty: as before.
            barred: executors that it must leave.

        Raises:
            RefusedError: no other device can.
        """
        async with self._world.database.reading() as s:
            _, _, pool = await self._world.pool(s, self._registry, self._clock(), without=record.id)
            asked = [
                t for t in await self._world.tasks.in_states("started", kind="session", s=s) if t.wish.do == "move"
            ]
        for other in asked:
            if other.id != record.id:
                self._claim(pool, other)
        placement = pool.place(self._elsewhere(record, node, barred))
        if not placement.gpus:
            others = {n: why for n, why in placement.waits.items() if n not in barred}
            raise RefusedError(
                "router.no_fit",
                f"no other device can take session {record.id} now: {summary(others) or 'there is no other device'}",
                retryable=True,
            )

    def _elsewhere(self, record: TaskRecord, node: str, barred: Collection[str]) -> DeviceRequest:
        want = record.want()
        return replace(want, barred=frozenset(barred), node=node or want.node, store=self._store_of(record))

    def _claim(self, pool: Pool, record: TaskRecord) -> None:
        """Claim the devices to which a session will move."""
        want = self._elsewhere(record, record.wish.node, record.wish.barred)
        for gpu in pool.place(want).gpus:
            pool.claim(Claim(gpu.executor_id, want.asked or None, want.exclusive, want.swappable))

    async def hibernate(self, record: TaskRecord, reason: str) -> None:
        """Ask the client of a running session to hibernate.

        Raises:
            RefusedError: the session does not run, or its client cannot go on in another executor.
        """
        if record.state == "hibernated":
            return
        _check_movable(record)
        if not self._store_of(record):
            raise RefusedError(
                "router.not_movable",
                f"the executor of session {record.id} stores no checkpoints (WOOLY_EXECUTOR_CHECKPOINTS=off)",
            )
        await self._wish(record, "hibernate", reason)

    async def wake(self, record: TaskRecord, reason: str) -> None:
        """Ask the client of a hibernated session to take a device again.

        Raises:
            RefusedError: the session does not hibernate.
        """
        if record.state == "started" and record.wish.do == "hibernate":
            await self._forget_wish(record, "it was woken before it hibernated")
        elif record.state == "hibernated":
            await self._wish(record, "wake", reason)
        elif record.state not in ("started", "pending"):
            raise RefusedError("router.not_hibernated", f"task {record.id} does not hibernate: it is {record.state}")

    async def _wish(
        self, record: TaskRecord, do: str, reason: str, *, node: str = "", barred: Sequence[str] = ()
    ) -> None:
        wish = {"do": do, "reason": reason, "node": node, "barred": list(barred)}
        told = {"move": "its client is asked to move it", "hibernate": "its client is asked to let it hibernate"}
        async with self._world.database.writing() as s:
            asked = await self._world.tasks.change_wants(
                s,
                record.id,
                state=record.state,
                attempt=record.attempt,
                tell=(self._clock(), f"{told.get(do, 'its client is asked to wake it')}: {reason}"),
                wish=wish,
            )
        if not asked:
            raise RefusedError(
                "router.not_movable",
                f"session {record.id} has just left its executor, or has ended; ask again",
                retryable=True,
            )

    async def _forget_wish(self, record: TaskRecord, why: str) -> None:
        """Remove the wish that `record` has from its session. A newer wish stays."""
        told = self._clock(), why
        async with self._world.database.writing() as s:
            await self._world.tasks.change_wants(
                s, record.id, state=record.state, attempt=record.attempt, wished=record.wish, tell=told, wish=None
            )

    async def stays(self, record: TaskRecord, why: str) -> None:
        """A session that was asked to leave its executor stays there."""
        await self._forget_wish(record, f"it stays: {why}")

    async def hear(self, record: TaskRecord, said: RenewSessionRequest) -> None:
        """Note what the client says in a renewal."""
        if not said.recovers and record.wants.get("recovers"):
            stays = said.stays or "its checkpoints are not stored"
            told = self._clock(), f"it cannot go on in another executor any more: {stays}"
            changes: dict[str, Any] = {"wish": None, "recovers": False, "stays": stays[:REASON_KEPT]}
            async with self._world.database.writing() as s:
                await self._world.tasks.change_wants(
                    s, record.id, state=record.state, attempt=record.attempt, tell=told, **changes
                )
        elif refuses(said, record.wish):
            await self.stays(record, said.stays)
        if said.resumed is not None:
            again = f", {said.resumed.frames} frames were sent again" if said.resumed.frames else ""
            async with self._world.database.writing() as s:
                told = self._clock(), f"its script goes on after a pause of {said.resumed.seconds:.1f} s{again}"
                await self._world.tasks.change_wants(
                    s, record.id, state=record.state, attempt=record.attempt, tell=told
                )

    # -- hibernation -------------------------------------------------------------------------------------------------

    async def hibernates(self, record: TaskRecord, reason: str) -> float:
        """The client of a session has a checkpoint of it, and leaves the executor. Returns the length of the lease.

        Raises:
            RefusedError: the session has no executor, or cannot go on elsewhere.
        """
        lease_s = self._settings.lease_s
        if record.state == "hibernated":
            return lease_s
        lease = await self._world.tasks.lease(record.id)
        if lease is None or not record.wants.get("recovers") or record.state not in ("started", "pending"):
            raise RefusedError("router.no_session", f"session {record.id} cannot hibernate: it is {record.state}")
        reason = record.wish.reason or reason
        names = [p.executor_id for p in record.parts]
        if names:
            await self._executors.close(names, record.id, f"it hibernates: {reason}", passing=True)
        now = self._clock()
        kept = Lease(record.id, lease.token, now + lease_s + RECOVERY_GRACE_S)
        changes = {"store": self._store_of(record)} if names else {}  # else it hibernated before
        async with self._world.database.writing() as s:
            left = await self._world.tasks.leave(s, record, "hibernated", reason, now, kept, **changes)
        if left:
            return lease_s
        # It has ended meanwhile, or has lost its executor.
        found = await self._world.tasks.get(record.id)
        if found is None or found.attempt == record.attempt:
            raise RefusedError("router.no_session", f"session {record.id} has ended")
        return await self.hibernates(found, reason)

    async def keep_checkpoints(self) -> None:
        """Let executors keep the checkpoints of hibernated sessions. Executors remove checkpoints of sessions that they do not
        know after some time.
        """
        by_store: dict[str, list[NamedSession]] = {}
        for record in await self._world.tasks.in_states("hibernated", kind="session"):
            named = _named(record)
            by_store.setdefault(str(record.wants.get("store", "")), []).append(named)
        for store, sessions in by_store.items():
            for at in range(0, len(sessions), KEPT_AT_ONCE):
                await self._tell_store(store, KeepCheckpointsRequest(keep=tuple(sessions[at : at + KEPT_AT_ONCE])))

    async def drop_checkpoints(self, record: TaskRecord) -> None:
        """Remove the checkpoints of a session that has ended without an executor."""
        await self._tell_store(str(record.wants.get("store", "")), KeepCheckpointsRequest(drop=(_named(record),)))

    async def _tell_store(self, store: str, request: KeepCheckpointsRequest) -> None:
        for heartbeat in self._registry.alive(self._clock()):
            if store and store in (heartbeat.checkpoints, *heartbeat.checkpoints_read):
                try:
                    await self._app.request(
                        contracts.EXECUTOR_CHECKPOINT_KEEP.at(heartbeat.executor_id), request, timeout=KEEP_TIMEOUT_S
                    )
                    return
                except BusError as e:
                    log.warning("executor %s could not be told about checkpoints: %s", heartbeat.executor_id, e)

    # -- draining ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Ask the sessions of nodes that are being drained, and of executors that will end, to move."""
        _, nodes = await self._world.settings()
        draining = {name: DRAINED.format(name) for name, node in nodes.items() if node.wish == "draining"}
        leaving = self._registry.leaving(self._clock())
        if not draining and not leaving:
            return
        now, count = self._clock(), 0
        for record in await self._world.tasks.in_states("started", kind="session"):
            reasons = _reasons_to_leave(record, draining, leaving)
            reason, key = next(iter(reasons.values()), ""), (record.id, record.attempt)
            if now - self._asked.get(key, float("-inf")) < ASK_AGAIN_S:
                continue
            if reason and record.wants.get("recovers") and not record.wish.do:
                if count == MOVES_AT_ONCE:
                    return
                count += 1
                self._asked = {k: at for k, at in self._asked.items() if now - at < ASK_AGAIN_S} | {key: now}
                try:
                    await self.move(record, reason, leave=reasons)
                except RefusedError as e:
                    log.info("session %s stays on a device that it should leave: %s", record.id, e)


def refuses(said: RenewSessionRequest, wish: TaskWish) -> bool:
    """Whether a client refuses the current wish. Its refusal may belong to an earlier wish, which it names by the reason."""
    return bool(wish.do and said.stays) and said.refused in (None, wish.reason)


def _named(record: TaskRecord) -> NamedSession:
    return NamedSession(tenant=record.tenant, session_id=record.id, devices=record.want().gpu_count)


def _reasons_to_leave(record: TaskRecord, draining: dict[str, str], leaving: dict[str, str]) -> dict[str, str]:
    """Why a session should leave its executors, by executor."""
    found = {p.executor_id: draining.get(p.node) or leaving.get(p.executor_id, "") for p in record.parts}
    return {name: reason for name, reason in found.items() if reason}


def _check_movable(record: TaskRecord) -> None:
    """Check that a session runs, and that its client can go on in another executor.

    Raises:
        RefusedError: it does not, or the client cannot.
    """
    if record.kind != "session" or record.state != "started":
        raise RefusedError("router.not_movable", f"task {record.id} is not a running session: it is {record.state}")
    if stays := record.wants.get("stays"):
        raise RefusedError("router.not_movable", f"session {record.id} cannot go on in another executor: {stays}")
    if not record.wants.get("recovers"):
        raise RefusedError(
            "router.not_movable",
            f"the client of session {record.id} cannot go on in another executor (WOOLYAI_RECOVERY=off, a session above "
            "2 GiB without WOOLYAI_RECOVERY=on, or an older client)",
        )
