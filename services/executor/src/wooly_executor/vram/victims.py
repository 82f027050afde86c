"""Evicts sessions when others need memory: asks the policy for victims and swaps them out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from wooly_executor.flow import Residence, Signal
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.swap import (
    PREEMPTING,
    Content,
    Place,
    Policy,
    Resident,
    Room,
    SwapPlan,
    choose,
    may_preempt,
)
from wooly_executor.session import Session
from wooly_executor.swap_space import SwapSpace
from wooly_executor.vram.residents import Residents
from wooly_executor.vram.swapping import Swapping
from wooly_executor.weights.contents import flat

log = logging.getLogger("wooly.executor")
#: Keys of contents from here downwards stand for reservations of queued runs. Own buffers have keys between this and 0.
_RESERVATIONS = -1 << 62


class _Choice(NamedTuple):
    """The policy's answer.

    Attributes:
        plan: the victims, and where their contents go.
        owners: session and buffer of each own buffer; its key is negative.
        eligible: sessions that have been idle for long enough.
    """

    plan: SwapPlan
    owners: dict[int, tuple[Session, int]]
    eligible: list[str]


class Victims:
    """Makes room by evicting sessions.

    Args:
        residents: the sessions.
        swapping: swaps victims out.
        swap_space: knows the free budgets.
        settle: waits until the device has done all work of finished runs.
    """

    def __init__(
        self, residents: Residents, swapping: Swapping, swap_space: SwapSpace, settle: Callable[[], None]
    ) -> None:
        self._here, self._swapping, self._swap_space, self._settle = residents, swapping, swap_space, settle
        self._ledger, self._contents = residents.ledger, residents.contents
        self._choices = 0

    @property
    def again(self) -> int | None:
        """When victims may leave for a place that had no room, monotonic ns; None: all may be used now."""
        return self._swap_space.again

    def make_room(self, need: int, requester: Session, now: int) -> bool:
        """Evict sessions so that `need` bytes become free for a session. Returns False if no eviction can achieve this now."""
        policy = self._here.policy
        if self._carry_out(self._choose(need, requester, now, policy), requester):
            return True
        if not policy.preempt or self._here.priority(requester) > PREEMPTING:
            return False
        return self._carry_out(self._choose(need, requester, now, policy, preempting=True), requester, Signal.PREEMPTED)

    def restore_reserve(self, requester: Session, now: int) -> bool:
        """Evict sessions to restore the reserve that a large allocation used. Returns False if no eviction can achieve this."""
        policy = self._here.policy
        return self._carry_out(self._choose(0, requester, now, Policy(policy.reserve, 0, policy.idle_ns)), requester)

    def _choose(self, need: int, requester: Session, now: int, policy: Policy, *, preempting: bool = False) -> _Choice:
        asking = self._here.priority(requester)
        ledger, owners, may = self._ledger, {}, []
        residents: list[Resident] = []
        contents: dict[int, Content] = {}
        for session in self._here.sessions.values():
            if session.flow.residence is not Residence.HERE:
                continue
            account = session.holdings.account
            busy = session is requester or bool(session.holdings.jobs) or session.flow.lent
            idle = None if busy else self._here.idle_since(session)
            keys = self._shared(account, contents)
            priority = self._here.priority(session)
            between = (
                preempting
                and session is not requester
                and may_preempt(asking, priority)
                and self._here.between_programs(session)
            )
            eligible = between or (idle is not None and now - idle >= policy.idle_ns)
            if eligible and session.holdings.swappable and not session.holdings.sealing:
                may.append(session.id)
                for buffer, offset in account.own.items():
                    key = -1 - offset
                    owners[key] = (session, buffer)
                    contents[key] = Content(ledger.pool.size(offset))
                    keys.append(key)
                if between and account.reserved:  # its queued runs give this back
                    contents[_RESERVATIONS - len(residents)] = Content(account.reserved, clean=True)
                    keys.append(_RESERVATIONS - len(residents))
            swappable = session.holdings.swappable and not session.holdings.sealing
            residents.append(
                Resident(session.id, priority, idle, tuple(keys), swappable, session.holdings.chosen, between)
            )
        for pin in self._here.pins.accounts.values():
            residents.append(Resident(pin.name, 4, None, tuple(self._shared(pin, contents)), False))
        free = self._swap_space.free
        room = Room(ledger.spare + self._here.coming_free, free(Place.HOST), free(Place.DISK))
        plan = choose(need, now, room, residents, contents, policy, priority=asking, preempting=preempting)
        return _Choice(plan, owners, may)

    def _shared(self, account: Account, contents: dict[int, Content]) -> list[int]:
        """The contents that an account shares, each once. Adds them to `contents`."""
        stores = [*dict.fromkeys(account.shared.values())]
        for store in stores:
            contents[store] = Content(self._ledger.store_bytes(store), store in self._contents.copies)
        return stores

    def _carry_out(self, choice: _Choice, requester: Session, how: Signal = Signal.LEAVING) -> bool:
        plan, owners, eligible = choice
        if plan.short or not plan.victims:
            return False
        rest = [name for name in eligible if name not in plan.victims]
        log.info(
            "session %s needs memory; %s: %s; also eligible: %s",
            requester.id,
            "victims" if how is Signal.LEAVING else "preempted between two programs",
            self._named(plan.victims),
            self._named(rest),
        )
        self._settle()  # if a run in flight fails, its results have no bytes that could be moved
        sessions, urgency = self._here.sessions, self._here.priority(requester)
        left: dict[str, list[tuple[tuple[str, int], Tensor, Place, int]]] = {name: [] for name in plan.victims}
        for move in plan.moves:
            if move.content <= _RESERVATIONS:
                continue  # no bytes
            if move.content < 0:
                session, buffer = owners[move.content]
                base = session.buffers[buffer].base
                if base is not None:  # a poisoned buffer has no bytes
                    nbytes = session.buffers[buffer].nbytes
                    left[session.id].append((("own", buffer), flat(base, nbytes), move.to, nbytes))
            elif move.to is not Place.NOWHERE:
                last = [n for n in plan.victims if move.content in sessions[n].holdings.account.shared.values()][-1]
                source = self._contents.here[move.content]
                left[last].append((("store", move.content), source, move.to, len(source)))
        for name, blocks in left.items():
            self._choices += 1
            sessions[name].holdings.chosen = self._choices
            self._swapping.leave(sessions[name], blocks, urgency, how)
        return True

    def _named(self, names: Iterable[str]) -> str:
        here = self._here
        return ", ".join([f"{name} (P{here.priority(here.sessions[name])})" for name in names]) or "none"
