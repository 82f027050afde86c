"""Errors of the executor that concern one session. Each one travels as a code and a message."""

from __future__ import annotations


def forget_frames(error: BaseException | None) -> None:
    """Drop the traceback of an error that was handled or logged.

    The frames of a traceback refer to sessions and to the error itself. This cycle would keep all of them alive until the next
    garbage collection (`collector`).
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class ExecutorError(Exception):
    """Root of the executor's errors. The client gets `code` and the message; other sessions are not affected."""

    code = "executor.error"
    retryable = False


class OutOfMemoryError(ExecutorError):
    """An allocation exceeds the session's quota or the free memory of the device."""

    code = "executor.out_of_memory"


class BindingError(ExecutorError):
    """The buffers or params of a run do not fit its program."""

    code = "executor.binding"


class UnknownProgramError(ExecutorError):
    """A run names a program that its session has not defined."""

    code = "executor.unknown_program"


class RefusedProgramError(ExecutorError):
    """A run names a program whose definition was refused. Code and message are those of the refusal.

    Attributes:
        instruction: index in the body of the program of the instruction that was refused; None: the whole program.
    """

    def __init__(self, message: str, code: str, instruction: int | None) -> None:
        super().__init__(message)
        self.code, self.instruction = code, instruction


class UnknownSourceError(ExecutorError):
    """A program names a kernel source that its session has not sent, or a session has sent too many."""

    code = "executor.unknown_source"


class DecodingTooLongError(ExecutorError):
    """Decoding an input exceeds the limit of core time."""

    code = "executor.decoding_too_long"


class DecodingCancelledError(ExecutorError):
    """The session of a decoding has ended."""

    code = "executor.decoding_cancelled"


class OpaqueKernelError(ExecutorError):
    """A tenant without the permission `opaque_kernels` sent a kernel that cannot be checked."""

    code = "executor.opaque_kernel"


class OperationError(ExecutorError):
    """An operator failed.

    Attributes:
        instruction: index in the body of the program.
    """

    code = "executor.operation"

    def __init__(self, message: str, instruction: int | None = None) -> None:
        super().__init__(message)
        self.instruction = instruction


class MissingKernelError(OperationError):
    """The device's library has no kernel for an operator's dtype or layout. PyTorch raises NotImplementedError."""

    code = "executor.missing_kernel"


class TooMuchWorkError(OperationError):
    """An instruction exceeds the work that the device allows in one call, and cannot be split."""

    code = "executor.too_much_work"


class PoisonedError(ExecutorError):
    """A value is needed that a failed operation should have written. The message is that operation's."""

    code = "executor.poisoned"


class InternalError(ExecutorError):
    """The executor itself has a fault. Only the affected session gets this error."""

    code = "executor.internal"


class HostMemoryError(ExecutorError):
    """The executor has no host memory for a session's request. The session ends."""

    code = "executor.host_memory"


class AdmissionError(ExecutorError):
    """A session cannot be opened."""

    code = "executor.admission"


class UnknownSessionError(ExecutorError):
    """No session has this id."""

    code = "executor.no_session"


class SteeringError(ExecutorError):
    """A session's scheduling cannot be changed as requested."""

    code = "executor.steering"


class LostCopyError(ExecutorError):
    """A swapped-out copy cannot be read back. Only its session gets this error."""

    code = "executor.swap"


class CheckpointError(ExecutorError):
    """A checkpoint cannot be taken or restored. Only its session gets this error."""

    code = "executor.checkpoint"


class CollectiveError(ExecutorError):
    """A collective of a group of sessions failed. All sessions that take part get the error.

    Attributes:
        instruction: 0: a COLLECTIVE frame is one instruction.
    """

    code = "executor.collective"
    instruction = 0


class IpcError(ExecutorError):
    """A buffer cannot be exported to another session, or imported from one."""

    code = "executor.ipc"


class FullDiskError(ExecutorError):
    """The disk of the executor's files has no room for a kernel's code. The code itself is fine."""

    code = "executor.full_disk"
    retryable = True


class MissingDriverError(ExecutorError):
    """A runtime cannot run on this machine. The message says what is missing."""

    code = "executor.missing_driver"


class ContextLostError(ExecutorError):
    """The device's context is lost. This process cannot compute for any session any more."""

    code = "executor.context_lost"
    retryable = True


class LoopEndedError(ExecutorError):
    """The device loop has ended, and this process ends."""

    code = "executor.ended"
    retryable = True


class NoCompilerError(ExecutorError):
    """A session of mode `full` needs a compiler, and none is available."""

    code = "executor.no_compiler"
    retryable = True
