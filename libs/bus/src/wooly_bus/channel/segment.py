"""Memory that the two ends of a data channel on one host share, so that large data does not pass through the socket.

The client creates the memory (a memfd) and sends its descriptor with the hello, so nothing needs a name in a file system. Frames
then say where in the memory their data is. The other end is not trusted: it may change the bytes at any time, so each end copies
them once and looks only at its copy. Seals keep the size, because an access behind the end of a file would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import sys
from collections import deque

from wooly_bus.channel.framing import ProtocolError
from wooly_bus.channel.sockets import Buffer

#: Where the data of a frame is: offset in the segment and number of bytes.
PLACE = struct.Struct("<QQ")
#: Bytes of a ring: through one ring, the data of the client's frames goes, and through another one, the server's. It fits into
#: the cache that the cores share, and it has room for many frames, so that both ends copy at the same time.
RING = 16 << 20
#: Bytes of data in one frame of the client, and of the server: so little that one end copies a frame while the other copies the
#: next one, and so much that the frames themselves take little time.
CLIENT_PIECE, SERVER_PIECE = 2 << 20, 1 << 20
#: Bytes of the smallest segment: the two rings.
LEAST = 2 * RING
#: Bytes of a segment. A page takes memory only when it is used, and the server says how much of the segment it accepts.
SEGMENT = 4 << 30
#: Data of fewer bytes passes through the socket, which takes less time or as much, and does not wait for the other end.
SHARED_FROM = 1 << 20
#: Alignment of data in a ring, in bytes: two cores do not write to one cache line.
_LINE = 64


class SegmentError(ProtocolError):
    """The memory that a client offers cannot be shared."""

    code = "channel.segment"


class Segment:
    """Shared memory of one connection.

    Args:
        descriptor: the memory, a memfd. The segment closes it.
        nbytes: bytes to use, from the beginning on.

    Attributes:
        nbytes: bytes that may be used.
        view: the memory.
        descriptor: the memory's descriptor.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor, self.nbytes = descriptor, nbytes
        self._memory = mmap.mmap(descriptor, nbytes)
        self.view = memoryview(self._memory)
        self._address = _address_of(self.view)

    def part(self, at: int, nbytes: int) -> memoryview:
        """The bytes of a place that the other end named.

        Raises:
            ProtocolError: the place is not in the segment.
        """
        if at > self.nbytes or nbytes > self.nbytes - at:
            raise ProtocolError(f"{nbytes} bytes at {at} are not in the shared memory, which has {self.nbytes} bytes")
        return self.view[at : at + nbytes]

    def place_of(self, data: Buffer, least: int = SHARED_FROM) -> int | None:
        """Where data is that is in the segment; None: it is not, or it has fewer than `least` (at least one) bytes."""
        if len(data) < least or not isinstance(data, memoryview) or data.readonly:
            return None
        at = _address_of(data) - self._address
        return at if 0 <= at <= self.nbytes - len(data) else None

    @property
    def resident(self) -> int:
        """Bytes of the segment that take memory now."""
        if sys.platform != "linux":
            return self.nbytes
        return min(os.fstat(self.descriptor).st_blocks * 512, self.nbytes)

    def close(self) -> None:
        """Give the memory back, as soon as nothing refers to it any more. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            with contextlib.suppress(BufferError):  # a tensor is in it; the memory ends with the tensor
                self.view.release()
                self._memory.close()


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _seals() -> int:
    """Seals of memory whose size never changes."""
    if sys.platform != "linux":
        return 0
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def offered_memory() -> int | None:
    """A descriptor of new memory that a client may offer; None: this system has no such memory."""
    if sys.platform != "linux":
        return None
    if not hasattr(os, "memfd_create"):
        return None
    import fcntl  # Python for Windows does not have it

    try:
        descriptor = os.memfd_create("wooly", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, SEGMENT)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def accepted(descriptor: int, most: int) -> Segment:
    """Map memory that a client offers.

    Args:
        descriptor: what the client sent. It is closed if the memory is refused.
        most: bytes to use at most.

    Raises:
        SegmentError: it is not a memfd of this host's normal pages that cannot shrink, is too small, or cannot be mapped.
    """
    try:
        if sys.platform != "linux":
            raise SegmentError("only an executor on Linux shares memory; do not send a descriptor")
        import fcntl

        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as e:
            raise SegmentError(
                "the descriptor that came with the hello is not one of shared memory; send a memfd"
            ) from e
        if seals & _seals() != _seals():
            raise SegmentError(
                "the shared memory may change its size; seal it with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL"
            )
        if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
            raise SegmentError("the shared memory consists of huge pages; use normal pages, which do not run out")
        nbytes = min(os.fstat(descriptor).st_size, most)
        if nbytes < LEAST:
            raise SegmentError(f"the shared memory has {nbytes} bytes; at least {LEAST} are needed")
        try:
            return Segment(descriptor, nbytes)
        except (OSError, ValueError) as e:
            raise SegmentError(f"the shared memory cannot be mapped: {e}") from e
    except BaseException:
        os.close(descriptor)
        raise


class Ring:
    """Hands out the bytes of a part of a segment in a circle. Frames give them back in order.

    Args:
        start: first byte of the part.
        nbytes: size of the part.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self._start, self._nbytes = start, nbytes
        #: Bytes handed out and bytes given back, so far.
        self._head = self._tail = 0
        #: By number of a frame: the head after its data.
        self._lent: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int, seq: int) -> int | None:
        """A place for the data of frame `seq`; None: there is no room until earlier frames give some back."""
        at = self._head % self._nbytes
        skipped = self._nbytes - at if at + nbytes > self._nbytes else 0
        if self._head + skipped + nbytes - self._tail > self._nbytes:
            return None
        at = self._head + skipped
        self._head = at + -(-nbytes // _LINE) * _LINE
        self._lent.append((seq, self._head))
        return self._start + at % self._nbytes

    def give_back(self, seq: int) -> None:
        """The other end has processed all frames up to `seq`."""
        lent = self._lent
        while lent and lent[0][0] <= seq:
            self._tail = lent.popleft()[1]
        if not lent:  # begin in front, where the bytes are in the cache
            self._head = self._tail = 0
