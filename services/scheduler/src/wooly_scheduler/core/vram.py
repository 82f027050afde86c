"""The promised memory of one GPU: the executor's report, and the sessions that this scheduler admitted a moment ago."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_dispatch.overcommit import Commitment, headroom, promises, refusal

from wooly_scheduler.core.book import PENDING_S


class VramBook:
    """Memory is in bytes, times are in seconds of the caller's clock. Before the executor's first report, nothing is refused."""

    def __init__(self) -> None:
        self.capacity = 0
        self.percent = 0
        self._known: dict[str, Commitment] = {}
        self._pending: dict[str, tuple[float, Commitment]] = {}

    def hear(self, capacity: int, percent: int, known: Iterable[Commitment]) -> None:
        """Take in the executor's report of its promises."""
        self.capacity, self.percent = capacity, percent
        self._known = {c.session: c for c in known}
        for name in self._known:
            self._pending.pop(name, None)

    def forget(self, session: str) -> None:
        """Remove a session that has ended."""
        self._known.pop(session, None)
        self._pending.pop(session, None)

    def promise(self, commitment: Commitment, now: float) -> None:
        """Count an admitted session until the executor reports it, or until `PENDING_S` have passed."""
        if commitment.session not in self._known:
            self._pending[commitment.session] = (now + PENDING_S, commitment)

    def commitments(self, now: float) -> list[Commitment]:
        """All sessions, ordered by name."""
        for name, (until, _) in list(self._pending.items()):
            if now > until:
                del self._pending[name]
        found = self._known | {name: commitment for name, (_, commitment) in self._pending.items()}
        return [found[name] for name in sorted(found)]

    def refusal(self, asked: Commitment, percent: int | None, now: float) -> str:
        """Why a session does not fit, with the numbers; "" if the session fits. `percent`: the overcommit from now on; None:
        no change.
        """
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
        """Maximum memory, in bytes, that one more session may ask for."""
        return max(0, headroom(promises(self.commitments(now)), self.capacity, self.percent, swappable))
