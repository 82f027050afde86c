"""What can go wrong around the core. `step` itself never raises on an event: it answers with a `RefuseDecision`."""

from __future__ import annotations


class DispatchError(Exception):
    """Root of this distribution's errors."""

    code = "dispatch.failed"
    retryable = False


class JournalError(DispatchError, ValueError):
    """Bytes that are no journal batch, or one of another journal."""

    code = "dispatch.journal"


class GapError(JournalError):
    """A batch came before the one that precedes it: fetch entry `expected` first, then feed this one again."""

    code = "dispatch.gap"
    retryable = True

    def __init__(self, expected: int, first: int) -> None:
        self.expected, self.first = expected, first
        super().__init__(f"the batch begins at entry {first}, entry {expected} is next")


class ReplayError(DispatchError):
    """The journal is not what the core would have written. `entry` is the first that cannot be trusted."""

    code = "dispatch.replay"

    def __init__(self, entry: int, reason: str) -> None:
        self.entry, self.reason = entry, reason
        super().__init__(f"entry {entry}: {reason}")


class InvariantError(DispatchError, AssertionError):
    """A law of the dispatch rule is broken; `law` names it."""

    code = "dispatch.invariant"

    def __init__(self, law: str, detail: str) -> None:
        self.law, self.detail = law, detail
        super().__init__(f"{law}: {detail}")
