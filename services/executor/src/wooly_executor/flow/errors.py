"""Errors of the fold."""

from __future__ import annotations


class FlowError(AssertionError):
    """An event is impossible in the state that the session is in: the executor is wrong, not the client."""
