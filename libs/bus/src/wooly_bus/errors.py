"""Errors of the control plane. Every error reply has the form of `ErrorReply`."""

from __future__ import annotations

from wooly_wis.messages import ErrorReply


class BusError(Exception):
    """Root of the errors of communication between services."""

    code = "bus.error"
    retryable = False

    def to_reply(self) -> ErrorReply:
        """The error as a reply."""
        return ErrorReply(code=self.code, message=str(self), retryable=self.retryable)


class EnvelopeError(BusError):
    """A message is too large, or does not match the model of its subject."""

    code = "bus.envelope"


class BusConnectError(BusError):
    """No NATS server answers."""

    code = "bus.connect"
    retryable = True


class BusTimeoutError(BusError):
    """No reply arrived within the timeout."""

    code = "bus.timeout"
    retryable = True


class NoResponderError(BusError):
    """No service subscribes to the subject."""

    code = "bus.no_responder"
    retryable = True


class RefusedError(BusError):
    """A service refused a request. The error has the code of the service."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable

    @classmethod
    def from_reply(cls, reply: ErrorReply) -> RefusedError:
        """The error that a reply contains."""
        return cls(reply.code, reply.message, retryable=reply.retryable)


def shown(url: str) -> str:
    """One or more URLs, separated by commas, without their credentials: for messages and logs."""
    return ",".join([_without_credentials(part) for part in url.split(",")])


def _without_credentials(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rsplit("@", 1)[-1]
