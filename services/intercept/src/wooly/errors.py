"""Errors that users of Wooly see. Each message names the cause and says what to do."""

from __future__ import annotations


class WoolyError(RuntimeError):
    """Base class of Wooly's errors. It is a RuntimeError because PyTorch programs catch RuntimeError."""

    code = "wooly.error"
    retryable = False


class NotConnectedError(WoolyError):
    """The program used the device before a session was open, or after the session ended."""

    code = "wooly.not_connected"


class ReleaseError(NotConnectedError):
    """The client's PyTorch and the executor's do not work together."""

    code = "wooly.release"


class ExecutorLostError(WoolyError):
    """The connection to the executor ended while the session was open."""

    code = "wooly.executor_lost"
    retryable = True


class RemoteOperationError(WoolyError):
    """An operation failed on the executor. As in CUDA, the next synchronisation raises the error.

    Attributes:
        message: error message of the executor's library.
        operation: name of the operation, for example ``aten.index_select.default``.
        recorded_at: ``file:line`` of the Python line that recorded the operation; None if the line is unknown.
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


class RemoteNotImplementedError(RemoteOperationError, NotImplementedError):
    """The executor's library has no kernel for an operation. It is a NotImplementedError, as in CUDA."""

    code = "wooly.remote_not_implemented"


class IpcError(RemoteOperationError):
    """The executor does not share a tensor with another process, or a handle is not valid any more."""

    code = "wooly.ipc"


class ForkedProcessError(WoolyError):
    """A forked process used the device of its parent's session."""

    code = "wooly.forked"

    def __init__(self, *text: str) -> None:  # a pickle has the text
        super().__init__(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
            "start method"
        )
