"""Errors of the control plane, and the one shape in which they travel."""

from __future__ import annotations

from wooly_wis.messages import ErrorReply


class BusError(Exception):
    """Root of what can go wrong between services."""

    code = "bus.error"
    retryable = False

    def to_reply(self) -> ErrorReply:
        """The error as it travels."""
        return ErrorReply(code=self.code, message=str(self), retryable=self.retryable)


class EnvelopeError(BusError):
    """A message is not what its subject carries."""

    code = "bus.envelope"


class BusConnectError(BusError):
    """No NATS server answers."""

    code = "bus.connect"
    retryable = True


class BusTimeoutError(BusError):
    """No reply came in time."""

    code = "bus.timeout"
    retryable = True


class NoResponderError(BusError):
    """Nobody serves the subject."""

    code = "bus.no_responder"
    retryable = True


class RefusedError(BusError):
    """A service says no; carries the service's own code."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable

    @classmethod
    def from_reply(cls, reply: ErrorReply) -> RefusedError:
        """The error that a reply carries."""
        return cls(reply.code, reply.message, retryable=reply.retryable)


def shown(url: str) -> str:
    """A URL for messages and logs: without credentials, in each of several separated by commas."""
    return ",".join([_without_credentials(part) for part in url.split(",")])


def _without_credentials(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rsplit("@", 1)[-1]
