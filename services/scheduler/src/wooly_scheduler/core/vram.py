"""The book of reserved and overcommitted memory of one GPU: what its executor says, and what was admitted a moment ago."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_dispatch.overcommit import Commitment, headroom, promises, refusal

from wooly_scheduler.core.book import PENDING_S


class VramBook:
    """Memory in bytes, times in seconds of the caller's clock. Before the executor has spoken, nothing is refused."""

    def __init__(self) -> None:
        self.capacity = 0
        self.percent = 0
        self._known: dict[str, Commitment] = {}
        self._pending: dict[str, tuple[float, Commitment]] = {}

    def hear(self, capacity: int, percent: int, known: Iterable[Commitment]) -> None:
        """What the executor has promised."""
        self.capacity, self.percent = capacity, percent
        self._known = {c.session: c for c in known}
        for name in self._known:
            self._pending.pop(name, None)

    def forget(self, session: str) -> None:
        """A session ended."""
        self._known.pop(session, None)
        self._pending.pop(session, None)

    def promise(self, commitment: Commitment, now: float) -> None:
        """A session was admitted: it counts until its executor says so, or until it is taken to have gone elsewhere."""
        if commitment.session not in self._known:
            self._pending[commitment.session] = (now + PENDING_S, commitment)

    def commitments(self, now: float) -> list[Commitment]:
        """All sessions, in order of their names."""
        for name, (until, _) in list(self._pending.items()):
            if now > until:
                del self._pending[name]
        found = self._known | {name: commitment for name, (_, commitment) in self._pending.items()}
        return [found[name] for name in sorted(found)]

    def refusal(self, asked: Commitment, percent: int | None, now: float) -> str:
        """Why a session may not come, with the numbers; "" if it may. `percent`: the overcommit that is about to be in force."""
        if not self.capacity:
            return ""
        others = [c for c in self.commitments(now) if c.session != asked.session]
        return refusal(
            asked.nbytes,
            asked.swappable,
            promises(others),
            self.capacity,
            self.percent if percent is None else percent,
        )

    def headroom(self, swappable: bool, now: float) -> int:
        """The most that one more session may ask for."""
        return max(0, headroom(promises(self.commitments(now)), self.capacity, self.percent, swappable))
