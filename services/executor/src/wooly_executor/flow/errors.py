"""Errors of the fold."""

from __future__ import annotations


class FlowError(AssertionError):
    """An event is impossible in the current state of the session. The executor has a fault, not the client."""
