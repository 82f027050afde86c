"""Errors that a user of Wooly sees. Messages name the cause and what to do about it."""

from __future__ import annotations


class WoolyError(RuntimeError):
    """Root of Wooly's own errors. A RuntimeError, because that is what PyTorch users catch."""

    code = "wooly.error"
    retryable = False


class NotConnectedError(WoolyError):
    """The device was used before a session exists, or after it ended."""

    code = "wooly.not_connected"


class ExecutorLostError(WoolyError):
    """The executor went away while this program was using it."""

    code = "wooly.executor_lost"
    retryable = True


class RemoteOperationError(WoolyError):
    """An operation failed on the executor. Raised at the next synchronisation, as CUDA does.

    Attributes:
        message: what the executor's library said.
        operation: name of the operation, for example ``aten.index_select.default``.
        recorded_at: ``file:line`` of the Python line that recorded it, or None where it is not known.
    """

    code = "wooly.remote_operation"

    def __init__(self, message: str, *, operation: str | None = None, recorded_at: str | None = None) -> None:
        text = message
        if operation:
            text = f"{operation} failed on the remote device: {message}"
        if recorded_at:
            text += f"\n  recorded at {recorded_at}"
        super().__init__(text)
        self.message = message
        self.operation = operation
        self.recorded_at = recorded_at


class ForkedProcessError(WoolyError):
    """The device was used in a process forked after it was initialised."""

    code = "wooly.forked"

    def __init__(self) -> None:
        super().__init__(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
            "start method"
        )
