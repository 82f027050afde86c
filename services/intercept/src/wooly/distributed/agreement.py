"""What the ranks of a program agree on, so that their sessions can go on elsewhere together: in the store of torch.distributed.

All ranks take a cut behind the same collective of the group of all ranks: a *common cut*. Every collective waits for all of its
ranks, so no rank has then done a collective that another rank has not. If a rank loses its executor, an *epoch* begins: all ranks
go back to the newest common cut, and send their frames again.

One key of the store has the epoch and the newest common cut, and it changes only by compare-and-set. So all ranks of an epoch go
back to the same cut, and a cut becomes common only if no epoch begins meanwhile. This module knows no sessions and no sockets; it
never waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

_STANDING = "standing"


class KeyStore(Protocol):
    """What is used of `torch.distributed.Store`. `get` is called only for keys that exist."""

    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> Any: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Standing(NamedTuple):
    """What holds for all ranks now.

    Attributes:
        epoch: how often the ranks have gone back.
        cut: the newest common cut; 0: none, each rank goes back to where it entered the group.
    """

    epoch: int
    cut: int


class Turn(NamedTuple):
    """What the first rank has decided at a collective of the group of all ranks.

    Attributes:
        cut: the common cut that all ranks take behind it; 0: none.
        common: the newest common cut.
        following: number of the collective at which the first rank decides next.
    """

    cut: int
    common: int
    following: int


class Agreement:
    """The ranks' agreement, as one rank sees it.

    Args:
        store: the store; no other program uses its keys.
        size: number of ranks.
    """

    def __init__(self, store: KeyStore, size: int) -> None:
        self._store, self.size = store, size

    # -- epochs ------------------------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """What holds now."""
        return _standing(self._store.compare_set(_STANDING, "", _text(Standing(0, 0))))

    def go_back(self, epoch: int) -> Standing:
        """Begin the epoch after `epoch`, unless a rank has begun it already. Returns what holds then."""
        now = self.standing()
        while now.epoch <= epoch:
            wanted = Standing(now.epoch + 1, now.cut)
            now = _standing(self._store.compare_set(_STANDING, _text(now), _text(wanted)))
        return now

    def tell_place(self, epoch: int, rank: int, place: dict[str, Any]) -> None:
        """Tell where a rank's session is in an epoch. The rank has gone back."""
        self._store.set(f"place/{epoch}/{rank}", json.dumps(place))

    def places(self, epoch: int) -> list[dict[str, Any]] | None:
        """Where the sessions of all ranks are in an epoch, by rank; None: not all ranks have told it."""
        keys = [f"place/{epoch}/{rank}" for rank in range(self.size)]
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else None

    def end(self, why: str) -> None:
        """From now on, the ranks cannot go back any more."""
        self._store.set("ended", why)

    def ended(self) -> str:
        """Why the ranks cannot go back any more; empty: they can."""
        return self._store.get("ended").decode() if self._store.check(["ended"]) else ""

    # -- common cuts -------------------------------------------------------------------------------------------------

    def want_cut(self, after: int) -> None:
        """Ask the first rank for another common cut than `after`."""
        self._store.set(f"want/{after}", "1")

    def cut_wanted(self, after: int) -> bool:
        """Whether a rank asks for another common cut than `after`."""
        return self._store.check([f"want/{after}"])

    def stored(self, cut: int) -> None:
        """One rank's part of a cut is stored. A rank says so once."""
        self._store.add(f"stored/{cut}", 1)

    def failed(self, cut: int) -> None:
        """One rank's part of a cut will not be stored."""
        self._store.set(f"failed/{cut}", "1")

    def has_failed(self, cut: int) -> bool:
        """Whether a cut will never be common."""
        return self._store.check([f"failed/{cut}"])

    def make_common(self, cut: int, epoch: int) -> bool:
        """Make a cut the newest common one, if all ranks have stored it and `epoch` lasts. Returns whether it is."""
        if self._store.add(f"stored/{cut}", 0) < self.size:
            return False
        now = self.standing()
        if now.epoch != epoch or now.cut >= cut:
            return now.cut >= cut
        wanted = Standing(epoch, cut)
        return _standing(self._store.compare_set(_STANDING, _text(now), _text(wanted))) == wanted

    def tell_turn(self, number: int, turn: Turn) -> None:
        """Tell the other ranks what the first rank decides at a collective."""
        self._store.set(f"turn/{number}", json.dumps(turn))

    def turn(self, number: int) -> Turn | None:
        """What the first rank has decided at a collective; None: nothing yet."""
        key = f"turn/{number}"
        return Turn(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def forget(self, turns: Sequence[int], cuts: Sequence[int]) -> None:
        """Remove what no rank needs any more: decisions that all ranks have read, and cuts that are over."""
        for key in (
            *[f"turn/{n}" for n in turns],
            *[f"{what}/{c}" for c in cuts for what in ("stored", "failed", "want")],
        ):
            self._store.delete_key(key)


def _text(standing: Standing) -> str:
    return f"{standing.epoch} {standing.cut}"


def _standing(text: bytes) -> Standing:
    epoch, cut = text.decode().split()
    return Standing(int(epoch), int(cut))
