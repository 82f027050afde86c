"""Sessions whose leases this router has renewed lately, so that renewals go on while the database is away.

The executors decide whether a session still exists, so this memory is used only to find them. It may not know the database.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from wooly_router.state.tasks import TaskRecord


class Renewed:
    """The sessions of the last renewals.

    Args:
        keep_s: seconds after its last renewal for which a session is remembered.
        clock: returns seconds since the epoch.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._known: dict[str, tuple[TaskRecord, str, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, record: TaskRecord, token: str) -> None:
        """A client with the session's token renews its lease."""
        self._known[record.id] = record, token, self._clock()

    def find(self, session_id: str, token: str, tenant: str = "") -> TaskRecord | None:
        """The session, without wishes, as it was when its lease was last renewed. None: it is not known, or the token is wrong.

        Args:
            session_id: its id.
            token: the client's token.
            tenant: tenant of the client; empty: any.
        """
        record, known, at = self._known.get(session_id, (None, "", 0.0))
        if record is None or self._clock() - at > self._keep_s or tenant not in ("", record.tenant):
            return None
        if not secrets.compare_digest(known.encode(), token.encode()):
            return None
        return replace(record, wants=record.wants | {"wish": None})

    def forget(self) -> None:
        """Forget the sessions that were not renewed for `keep_s`."""
        before = self._clock() - self._keep_s
        self._known = {name: known for name, known in self._known.items() if known[2] >= before}
