"""Where data of clients lands: straight in the buffer that it is meant for."""

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

#: Where bytes go that are taken off the wire and dropped, of all sessions: written, never read. No page of it is there before.
_DROPPED = memoryview(mmap.mmap(-1, MAX_FRAME))


class UploadTargets:
    """Names the memory for what clients upload.

    Args:
        device: where it goes.
        vram: whether it may be written now.
        runs: has the sessions' buffers.
    """

    def __init__(self, device: TorchDevice, vram: Vram, runs: Runs) -> None:
        self._device, self._vram, self._runs = device, vram, runs

    def sink(self, conn: Connection, prefix: bytes, nbytes: int) -> memoryview | None:
        """Where `nbytes` of a WRITE belong. None: not yet, as something before it is not done.

        Args:
            prefix: the frame's head.

        Raises:
            ProtocolError: the client has not said who it is.
        """
        session: Session | None = conn.owner
        if session is None:
            raise ProtocolError("data before the hello")
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
            into, session.finish_upload = self._device.landing(memory)
        except ContextLostError:
            raise
        except ExecutorError as e:
            session.fail(e.code, str(e), 0)
            return _DROPPED[:nbytes]  # the failure is kept
        except (RuntimeError, MemoryError) as e:
            session.fail(OutOfMemoryError.code, str(e), 0)
            return _DROPPED[:nbytes]
        session.counters.bytes_in += nbytes
        return into


def finish_upload(session: Session) -> None:
    """Bring what was received to the device."""
    bring, session.finish_upload = session.finish_upload, None
    if bring is not None:
        bring()
