"""Finds the memory that receives a client's WRITE: usually the bytes of the buffer itself (zero-copy receive)."""

from __future__ import annotations

import mmap

from wooly_bus.channel import Connection, ProtocolError
from wooly_bus.channel.framing import MAX_FRAME
from wooly_wis.frames import WRITE_HEAD

from wooly_executor.errors import ContextLostError, ExecutorError, OutOfMemoryError
from wooly_executor.flow import Signal, note
from wooly_executor.runs import Runs
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.session import Session
from wooly_executor.vram import Vram

#: Receives the bytes of refused writes, of all sessions. It is written and never read. The system allocates its pages on first
#: use.
_DROPPED = memoryview(mmap.mmap(-1, MAX_FRAME))


class UploadTargets:
    """Finds the target of each upload.

    Args:
        device: the device that holds the buffers.
        vram: knows whether a buffer may be written now.
        runs: has the sessions' buffers.
    """

    def __init__(self, device: TorchDevice, vram: Vram, runs: Runs) -> None:
        self._device, self._vram, self._runs = device, vram, runs

    def sink(self, conn: Connection, prefix: bytes, nbytes: int) -> memoryview | None:
        """The memory that receives the `nbytes` of a WRITE. None: the client must wait until earlier frames are done.

        Args:
            conn: the client's connection.
            prefix: the head of the frame: buffer and offset.
            nbytes: number of data bytes.

        Raises:
            ProtocolError: the client has not sent a hello.
        """
        session: Session | None = conn.owner
        if session is None:
            raise ProtocolError("the client sent data before its hello")
        buffer, offset = WRITE_HEAD.unpack(prefix)
        if not session.flow.quiet:
            note(session.flow, Signal.UPLOAD_WAITS)
            return None
        if not self._vram.writable(session, buffer):
            note(session.flow, Signal.UPLOAD_LACKS_MEMORY)
            return None
        session.holdings.idle_since = None
        try:
            memory = self._runs.memory(session, buffer, offset, nbytes, writing=True)
            into, session.finish_upload = self._device.upload_target(memory)
        except ContextLostError:
            raise
        except ExecutorError as e:
            session.fail(e.code, str(e), 0)
            return _DROPPED[:nbytes]  # the session keeps the failure for its next answer
        except (RuntimeError, MemoryError) as e:
            session.fail(OutOfMemoryError.code, str(e), 0)
            return _DROPPED[:nbytes]
        session.counters.bytes_in += nbytes
        return into


def finish_upload(session: Session) -> None:
    """Copy received bytes from host memory to the device, if they were not received there directly."""
    bring, session.finish_upload = session.finish_upload, None
    if bring is not None:
        bring()
