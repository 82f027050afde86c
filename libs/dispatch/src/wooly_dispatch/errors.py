"""Errors around the dispatch core. `step` itself does not raise an error for an invalid event: it returns a `RefuseDecision`."""

from __future__ import annotations


class DispatchError(Exception):
    """Root of this distribution's errors."""

    code = "dispatch.failed"
    retryable = False


class JournalError(DispatchError, ValueError):
    """Bytes are not a journal batch, or they are a batch of another journal."""

    code = "dispatch.journal"


class GapError(JournalError):
    """A batch arrived too early: entries before it are missing. Feed the batch with entry `expected` first, then this batch
    again.
    """

    code = "dispatch.gap"
    retryable = True

    def __init__(self, expected: int, first: int) -> None:
        self.expected, self.first = expected, first
        super().__init__(
            f"the batch begins at entry {first}, but entry {expected} is next; feed the missing batches first"
        )


class ReplayError(DispatchError):
    """The journal differs from the dispatch rule. `entry` is the first entry that cannot be trusted."""

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
