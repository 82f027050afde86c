"""Who is told about what a link sends: profilers (`wooly.profiling`) and recordings (`wooly.recording`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wooly.origins import Origin


class FrameObserver(Protocol):
    """Is told about the frames of a link that make the device work."""

    def will_run(self) -> None:
        """A program is about to be sent. The observer may ask the executor."""

    def ran(self, seq: int, words: list[int], origins: list[Origin]) -> None:
        """A program was sent as frame `seq`."""

    def copied(self, seq: int, nbytes: int, *, to_device: bool) -> None:
        """Bytes were sent to the device, or asked for, with frame `seq`."""


class SessionLog(Protocol):
    """Records what a link sends (`wooly.recording`).

    Attributes:
        frames: number of runs, writes and reads so far.
        data: whether it keeps contents. If not, the upload of one element is not recorded as a param.
    """

    frames: int
    data: bool

    def defined(self, program: bytes) -> None:
        """A program will be defined."""

    def source(self, raw: bytes) -> None:
        """The source of foreign kernels was sent."""

    def ran(self, payload: bytes, origins: list[Origin]) -> Callable[[bytes], None]:
        """A run was sent. Returns what is told its answer, if it has one."""

    def wrote(self, buffer: int, offset: int, data: memoryview) -> None:
        """A write was sent."""

    def asked(self, buffer: int, offset: int, nbytes: int) -> Callable[[bytes], None]:
        """A read was sent. Returns what is told its answer."""

    def failed(self, after: int) -> None:
        """An answer took the session's error, after so many frames."""
