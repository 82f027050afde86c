"""Buffers that several sessions share for reading and writing, as CUDA's processes share memory by IPC handles.

A session exports a buffer and gets a name, which its process sends to another process. The session of that process imports the
buffer by the name. Both use the same memory from then on, and it is freed with the last session that holds it. The device loop's
thread owns this module.

A name is 128 random bits, and only sessions of the exporter's tenant can use it. It is valid while the exporter's session is
open, and as long as there is an export that was not imported, or two sessions hold the buffer.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable

from torch import Tensor
from wooly_wis.frames import IPC_NAME_BYTES

from wooly_executor.errors import AdmissionError, BindingError, IpcError, PoisonedError
from wooly_executor.holdings import IpcBuffer
from wooly_executor.memory.ledger import Ledger
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.session import Session
from wooly_executor.weights.contents import Contents, flat

#: Maximum number of buffers that one session shares in this way. It bounds the work at the end of a session.
IPC_BUFFERS_AT_MOST = 1 << 14


class IpcBuffers:
    """The buffers of one device that sessions share for writing.

    Args:
        ledger: has their stores.
        contents: has their bytes.
        clock: returns monotonic ns.
        require_room_to_stay: raises AdmissionError if a session may not stay on the device from now on.
    """

    def __init__(
        self,
        ledger: Ledger,
        contents: Contents,
        clock: Callable[[], int],
        require_room_to_stay: Callable[[Session], None],
    ) -> None:
        self._ledger, self._contents, self._clock = ledger, contents, clock
        self._require_room_to_stay = require_room_to_stay
        self._named: dict[tuple[str, bytes], IpcBuffer] = {}
        #: The sessions that hold such buffers, until their accounts are closed.
        self._sessions: dict[str, Session] = {}
        self._freed = itertools.count(1)

    def export_buffer(self, session: Session, buffer: int) -> bytes:
        """Export a buffer once more. Returns its name, which is the same as long as it is shared.

        Raises:
            BindingError: the buffer does not exist, or is empty.
            PoisonedError: its content is missing.
            IpcError: the session has imported the buffer, or may not share more.
            OutOfMemoryError: the buffer shares equal content with other sessions, and there is no room for a copy of its own.
        """
        known = session.buffers.get(buffer)
        if known is None or not known.nbytes:
            raise BindingError(f"buffer {buffer} {'does not exist' if known is None else 'has no bytes to share'}")
        if known.base is None:
            raise PoisonedError(known.poison)
        shared = session.holdings.ipc.get(buffer)
        if shared is None:
            self._require_may_share(session)
            self._contents.unshare(session, [buffer])
            shared = self._expose(session, buffer, known)
        elif shared.exporter != session.id:
            raise IpcError(
                "Attempted to send CUDA tensor received from another process; this is not currently supported. Consider cloning "
                "before sending."
            )
        shared.exports += 1
        return shared.name

    def _require_may_share(self, session: Session) -> None:
        holdings = session.holdings
        if len(holdings.ipc) >= IPC_BUFFERS_AT_MOST:
            raise IpcError(
                f"the session shares {IPC_BUFFERS_AT_MOST} buffers with other processes, which is the limit; free some, or send "
                "one larger tensor"
            )
        if holdings.swappable:
            try:
                self._require_room_to_stay(session)
            except AdmissionError as e:
                raise IpcError(
                    "memory that processes share stays on the device, but the device's memory is promised to other sessions, "
                    f"too: {e}; declare less with WOOLYAI_REQUIRED_VRAM, or use a device with less overcommit"
                ) from e

    def _expose(self, session: Session, buffer: int, known: Buffer) -> IpcBuffer:
        assert known.base is not None
        store = self._ledger.expose(session.holdings.account, buffer, known.nbytes, self._clock())
        self._contents.here[store] = flat(known.base, known.nbytes)
        shared = IpcBuffer(secrets.token_bytes(IPC_NAME_BYTES), session.tenant, store, known.nbytes, session.id)
        self._hold(shared, session, buffer)
        self._named[shared.tenant, shared.name] = shared
        return shared

    def import_buffer(self, session: Session, buffer: int, nbytes: int, name: bytes) -> None:
        """Give a session a buffer that another session has exported.

        Args:
            session: the session.
            buffer: id of its new buffer.
            nbytes: size of the buffer.
            name: the name.

        Raises:
            BindingError: the id is in use.
            IpcError: the session may not import a buffer by this name.
        """
        shared = self._named.get((session.tenant, name))
        if shared is None or shared.nbytes != nbytes:
            raise IpcError(
                "no buffer of this size is shared under this name: the process that sent it has ended, has not kept the tensor "
                "until it was received, or belongs to another tenant"
            )
        if session.id in shared.holders:
            raise IpcError(
                "the session has this buffer already: a process cannot receive what it has sent, and receives a buffer once"
            )
        if buffer in session.buffers:
            raise BindingError(f"buffer {buffer} already exists, and the import would make it again")
        self._require_may_share(session)
        self._ledger.adopt(session.holdings.account, buffer, shared.store, self._clock())
        session.buffers[buffer] = Buffer(nbytes, self._contents.here[shared.store])
        session.held_bytes += nbytes
        self._hold(shared, session, buffer)
        self._received(shared)

    def release_export(self, session: Session, name: bytes) -> bool:
        """Take one export back, because it will not be imported. Returns False if the name is not valid."""
        shared = self._named.get((session.tenant, name))
        if shared is not None:
            self._received(shared)
        return shared is not None

    def memory(self, session: Session, buffer: int) -> Tensor | None:
        """The bytes of a buffer that is shared for writing; None: the buffer is not."""
        shared = session.holdings.ipc.get(buffer)
        return None if shared is None else self._contents.here[shared.store]

    def free(self, session: Session, buffer: int) -> None:
        """A session frees a shared buffer. If an export was not imported, the buffer stays on the session's account for it."""
        shared, account = session.holdings.ipc[buffer], session.holdings.account
        if shared.exporter == session.id and shared.exports:
            key = -next(self._freed)
            self._ledger.adopt(account, key, shared.store, self._clock())
            session.held_bytes += shared.nbytes
            self._hold(shared, session, key)
            del session.holdings.ipc[buffer]
            self._contents.drop_released(self._ledger.free(account, buffer, self._clock()))
            return
        self._drop(shared, session)
        self._settle(shared)

    def closed(self, session: Session) -> None:
        """The account of a session is closed."""
        left = list(session.holdings.ipc.values())
        session.holdings.ipc.clear()
        self._sessions.pop(session.id, None)
        for shared in left:
            del shared.holders[session.id]
            if shared.exporter == session.id:
                shared.exporter, shared.exports = "", 0
                self._named.pop((shared.tenant, shared.name), None)
            self._settle(shared)

    def check(self, sessions: Iterable[Session]) -> None:
        """Check that the tables agree.

        Raises:
            AssertionError: they disagree.
        """
        for session in sessions:
            for key, shared in session.holdings.ipc.items():
                assert shared.holders[session.id] == key, "a session's buffer has another key at the sharing"
                assert session.holdings.account.shared[key] == shared.store, (
                    "a buffer has another store than its sharing"
                )
                assert len(shared.holders) > 1 or shared.exports, (
                    "a buffer is shared by one session, and no export waits"
                )
                assert key > 0 or shared.exports, "a freed buffer is kept, but no export waits"
                assert key not in session.holdings.guarded, "a buffer that is shared for writing is copied on a write"
                known = self._named.get((shared.tenant, shared.name))
                assert known is (shared if shared.exporter else None), "a name is valid without its exporter"
        assert all(shared.holders for shared in self._named.values()), (
            "a name is valid, but no session holds its buffer"
        )

    def _hold(self, shared: IpcBuffer, session: Session, key: int) -> None:
        self._sessions[session.id] = session
        shared.holders[session.id] = key
        session.holdings.ipc[key] = shared

    def _drop(self, shared: IpcBuffer, session: Session) -> None:
        key = shared.holders.pop(session.id)
        del session.holdings.ipc[key]
        self._contents.drop_released(self._ledger.free(session.holdings.account, key, self._clock()))

    def _received(self, shared: IpcBuffer) -> None:
        """Note that one export was imported or taken back."""
        shared.exports = max(shared.exports - 1, 0)
        if shared.exporter and not shared.exports and shared.holders[shared.exporter] < 0:
            exporter = self._sessions[shared.exporter]
            exporter.held_bytes -= shared.nbytes
            self._drop(shared, exporter)
        self._settle(shared)

    def _settle(self, shared: IpcBuffer) -> None:
        """End the sharing if only one session holds the buffer and no export waits: then it is that session's own again."""
        if shared.exports or len(shared.holders) > 1:
            return
        self._named.pop((shared.tenant, shared.name), None)
        for session_id, key in shared.holders.items():
            session = self._sessions[session_id]
            del session.holdings.ipc[key]
            self._contents.own(session, key)
        shared.holders.clear()
