"""What can go wrong in the executor on behalf of one session. Each travels as code + message."""

from __future__ import annotations


def forget_frames(error: BaseException | None) -> None:
    """Let go of the calls that an error went through, once it was dealt with or logged.

    Their variables are sessions and frames, and one of them is the error: what keeps itself alive so is not found until nobody
    has been here for long (`collector`).
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class ExecutorError(Exception):
    """Root. `code` and the message go to the client; no other session notices."""

    code = "executor.error"
    retryable = False


class OutOfMemoryError(ExecutorError):
    """The session's quota, or the device, has no room."""

    code = "executor.out_of_memory"


class BindingError(ExecutorError):
    """A run names buffers or params that do not fit its program."""

    code = "executor.binding"


class UnknownProgramError(ExecutorError):
    """A run names a program that this session has not defined."""

    code = "executor.unknown_program"


class UnknownSourceError(ExecutorError):
    """A program names a kernel's source that this session has not sent, or a session sends too many."""

    code = "executor.unknown_source"


class DecodingTooLongError(ExecutorError):
    """Taking in what a session sent needs more time of a core than it may."""

    code = "executor.decoding_too_long"


class DecodingCancelledError(ExecutorError):
    """The session for which something was decoded is gone."""

    code = "executor.decoding_cancelled"


class OpaqueKernelError(ExecutorError):
    """A kernel that cannot be checked, of a tenant who lacks the permission `opaque_kernels`."""

    code = "executor.opaque_kernel"


class OperationError(ExecutorError):
    """An operator raised.

    Attributes:
        instruction: index in the program's body.
    """

    code = "executor.operation"

    def __init__(self, message: str, instruction: int | None = None) -> None:
        super().__init__(message)
        self.instruction = instruction


class TooMuchWorkError(OperationError):
    """An instruction is more work than the device allows in one call, and cannot be split."""

    code = "executor.too_much_work"


class PoisonedError(ExecutorError):
    """A value is needed that an earlier, failed operation should have written."""

    code = "executor.operation"


class InternalError(ExecutorError):
    """The executor itself is at fault; only the session that met the fault hears of it."""

    code = "executor.internal"


class HostMemoryError(ExecutorError):
    """The executor has no host memory left for what a session asks; the session ends."""

    code = "executor.host_memory"


class AdmissionError(ExecutorError):
    """A session cannot be opened."""

    code = "executor.admission"


class UnknownSessionError(ExecutorError):
    """There is no session of that id."""

    code = "executor.no_session"


class SteeringError(ExecutorError):
    """A session cannot be treated as asked for."""

    code = "executor.steering"


class LostCopyError(ExecutorError):
    """What was swapped out cannot be brought back. Only the session whose it was hears of it."""

    code = "executor.swap"


class MissingDriverError(ExecutorError):
    """A runtime cannot run here; the message says what is missing."""

    code = "executor.missing_driver"


class ContextLostError(ExecutorError):
    """The device's context is beyond use: nothing more can be computed by this process, for nobody."""

    code = "executor.context_lost"
    retryable = True


class LoopEndedError(ExecutorError):
    """The thread that owns the device has ended, and this process ends."""

    code = "executor.ended"
    retryable = True


class NoCompilerError(ExecutorError):
    """A session wants all its programs compiled, and that cannot be."""

    code = "executor.no_compiler"
    retryable = True
