"""Reports where every byte of a device is and which session has it, for sessions and for the cluster, and checks the sums."""

from __future__ import annotations

from typing import Any, Literal

from wooly_dispatch.overcommit import promises
from wooly_wis.messages import MemoryState, SessionMemory

from wooly_executor.flow import Residence
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.swap import Place
from wooly_executor.session import Session
from wooly_executor.swap_space import SwapSpace
from wooly_executor.vram.residents import Residents
from wooly_executor.vram.swapping import Swapping

#: Where memory is, as heartbeats say it. Routers of earlier versions do not know that memory can be preempted.
_RESIDENCES: dict[Residence, Literal["here", "leaving", "away", "coming"]] = {
    Residence.HERE: "here",
    Residence.LEAVING: "leaving",
    Residence.PREEMPTED: "leaving",
    Residence.AWAY: "away",
    Residence.COMING: "coming",
}


def stats_of(session: Session, residents: Residents, wanted: int) -> dict[str, Any]:
    """The figures that a session may know of its memory, in bytes.

    Args:
        session: the session.
        residents: the sessions on the device.
        wanted: bytes that it wants to allocate. If they are not there, the key "shortage" has the error's text.
    """
    ledger, account = residents.ledger, session.holdings.account
    held, part = ledger.pool.held(session.id), ledger.book.bears(session.id)
    room, below = residents.room_without_others(session), session.quota - session.held_bytes
    if session.flow.residence in (Residence.AWAY, Residence.COMING):
        room -= sum(residents.swapped_bytes(session))  # its own memory comes back first
    found: dict[str, Any] = {}
    if wanted > min(room, below):
        account.ooms += 1
        quota = session.quota if wanted > below else None
        found["shortage"] = ledger.out_of_memory(account, wanted, quota, session.held_bytes)
    return found | {
        "reserved_bytes": held + ledger.book.has(session.id),
        "reserved_peak_bytes": account.peak + ledger.book.has(session.id),
        "own_bytes": held,
        "shared_bytes": part,
        "workspace_bytes": account.workspace,
        "available_bytes": max(0, min(below, room)),
        "quota_bytes": session.quota,
        "out_of_memory": account.ooms,
        "sealing": len(session.holdings.sealing),
    }


def check(residents: Residents, swap_space: SwapSpace) -> None:
    """Check that the accounts, the bytes on the device and the copies elsewhere agree.

    Raises:
        AssertionError: they disagree.
    """
    ledger, contents, sessions = residents.ledger, residents.contents, list(residents.sessions.values())
    ledger.check()
    for store in ledger.stores():
        assert (store in contents.here) != (store in ledger.coming), (
            f"store {store} has a block but no bytes, or bytes that should be coming"
        )
    assert set(contents.here) <= set(ledger.stores()), "the device has bytes of stores that have no block"
    if not any(s.holdings.jobs for s in sessions):
        copies = [*contents.copies.values(), *[c for s in sessions for c in s.holdings.copies.values()]]
        for place, used in swap_space.used.items():
            assert used >= sum(c.nbytes for c in copies if c.place is place), (
                f"{place} has copies that are on no budget"
            )
    for session in sessions:
        away = session.flow.residence in (Residence.AWAY, Residence.COMING)
        assert away or not session.holdings.copies, f"{session.id} is on the device but has copies elsewhere"
        if session.flow.residence is Residence.HERE:
            for buffer, store in session.holdings.account.shared.items():
                if buffer < 0:  # freed, but exported
                    continue
                base = session.buffers[buffer].base
                known = contents.here.get(store)
                assert base is None or (
                    known is not None and base.untyped_storage().data_ptr() == known.untyped_storage().data_ptr()
                )


def state_of(residents: Residents, swap_space: SwapSpace, swapping: Swapping, overcommit_percent: int) -> MemoryState:
    """Where every byte of the device is, and which session has it."""
    facts, promised = residents.ledger.facts(), promises(residents.commitments())
    sessions = [_memory_of(s, residents) for s in residents.sessions.values()]
    pins = [_pinned(pin, residents) for pin in residents.pins.accounts.values()]
    return MemoryState(
        capacity=facts.capacity,
        own=facts.own,
        contents=facts.contents,
        slots=facts.slots,
        reserve=facts.reserve,
        free=facts.free,
        host=swap_space.used[Place.HOST],
        host_budget=swap_space.used[Place.HOST] + swap_space.free(Place.HOST),
        disk=swap_space.used[Place.DISK],
        disk_budget=swap_space.used[Place.DISK] + swap_space.free(Place.DISK),
        overcommit_percent=overcommit_percent,
        fixed=promised.fixed,
        movable=promised.movable,
        swapped_out=swapping.swapped_out,
        swapped_in=swapping.swapped_in,
        sessions=tuple([*sessions, *pins][:1000]),
    )


def _memory_of(session: Session, residents: Residents) -> SessionMemory:
    host, disk = residents.swapped_bytes(session)
    return SessionMemory(
        session_id=session.id,
        tenant=session.holdings.account.tenant,
        own=residents.ledger.pool.held(session.id),
        shared=residents.ledger.book.bears(session.id),
        host=host,
        disk=disk,
        promised=residents.counted(session),
        swappable=session.holdings.swappable,
        residence=_RESIDENCES[session.flow.residence],
        swaps=session.holdings.swaps,
        checkpoint=None if session.cuts is None else session.cuts.stored,
    )


def _pinned(pin: Account, residents: Residents) -> SessionMemory:
    book = residents.ledger.book
    return SessionMemory(
        session_id=pin.name,
        tenant=pin.tenant,
        shared=book.bears(pin.name),
        promised=book.has(pin.name),
        swappable=False,
    )
