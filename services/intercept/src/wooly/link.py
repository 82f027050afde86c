"""The client's end of one data channel: sends runs, writes, reads and syncs, and translates their errors.

Calls block; there is no asyncio here. Callers hold the recorder's lock. An error frame becomes an exception that names the Python
line which recorded the failed operation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from wooly_bus.channel import ChannelClient, ChannelError
from wooly_wis.foreign import decode_source, hidden_state
from wooly_wis.frames import (
    BUFFERS_AT_ONCE,
    BUFFERS_HEAD,
    CONTENT,
    IPC_HEAD,
    MAX_CHUNK,
    PROFILE_HEAD,
    PROTOCOL,
    READ_HEAD,
    STATS_HEAD,
    WRITE_HEAD,
    Kind,
    Record,
    pack_json,
    pack_run,
    unpack_json,
    unpack_records,
)

from wooly.connection import Connection
from wooly.continuation import Continuation
from wooly.errors import ExecutorLostError, ForkedProcessError, WoolyError
from wooly.failures import RUNS_INFLIGHT, Failures
from wooly.observers import FrameObserver, SessionLog
from wooly.origins import Origin, origin
from wooly.recovery import ERROR, KEPT, KeptFrame, Pending, Recovery, stateful_operator
from wooly.sync_debug import sync_debug
from wooly.waits import LARGE, Waits

if TYPE_CHECKING:
    from wooly_wis.messages import DirectSession

    from wooly.contents import OfferPolicy
    from wooly.early_reads import EarlyValue

#: Highest number of bytes that a STATS frame can ask for.
_MOST_WANTED = (1 << 64) - 1
#: Maximum total size, in bytes, of the cached host copies of a link.
_MIRROR_LIMIT = 64 << 20
#: Maximum size, in bytes, of one cached host copy. Larger reads are not cached.
MIRROR_ITEM_LIMIT = 1 << 20
#: What a cached host copy takes besides its data, in bytes.
_MIRROR_OVERHEAD = 512

#: Maximum time, in seconds, that closing a session waits until the executor has closed it, if no controller does that.
CLOSE_S = 1.0
#: Maximum size, in bytes, of the reason with which a session ends.
MAX_CLOSE_REASON = 1024
#: Maximum time, in seconds, that a session waits for its collectives before it ends.
COLLECTIVES_S = 30.0
#: Time, in seconds, between two looks whether they are done.
_POLL_S = 0.002
#: Maximum number of reads that `Link.fetch` has started and that are not answered.
MAX_STARTED_READS = 64

#: Members of an enumeration on the way of every read: looked up on its class, a member costs as much as a call.
_RUN, _READ, _DATA = Kind.RUN, Kind.READ, Kind.DATA

ViewKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
#: Per buffer: host copies that were valid before an instruction wrote it, and the number of instructions in front of that one.
Overwritten = dict[int, tuple[Mapping[ViewKey, torch.Tensor], int]]


class _StartedRead(NamedTuple):
    """A read that `Link.fetch` started and that is not answered.

    Attributes:
        seq: sequence number of the READ frame.
        into: target memory.
        pending: the answer.
        owner: object that owns the target memory.
    """

    seq: int
    into: memoryview
    pending: Pending
    owner: Any


class SharedStorage(NamedTuple):
    """A storage that other processes can write.

    Attributes:
        storage: a weak reference to the storage, which expires when the storage is freed.
        received: whether it came from another process.
    """

    storage: Any
    received: bool


#: Number of forks that led from the first process to this one. A process asks its number at less cost than its id.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_count_fork)


class Link:
    """The client end of a session's data channel.

    Attributes:
        bytes_sent: payload bytes sent.
        bytes_received: payload bytes received.
        syncs: number of answers for which the client waited.
        connection: the connection to the executor.
        continuation: how the session goes on in another executor.
        answered: number of the last frame that is answered. It is known whether this frame or an earlier frame failed.
        lost: why the link has ended; None: it is open.
        siblings: links of the session's other devices. If this link fails, they end, too.
        interrupted: set when an exception, such as that of a signal handler, ended a call before its frame was sent, and the link
            is still open. The recorder clears it.
        offers: decides which uploads first ask whether the device has the content; None: the session shares no contents.
        observer: is told about frames; None in most sessions.
        recovery: keeps frames, so that the session can go on in another executor; None: it ends with its executor.
        stays: why the session cannot go on in another executor any more; empty: it can, or never could.
        log: records what the session sends; None: nobody records it.
        waits: counts the waits for answers.
        shares: whether the session shares memory with other processes.
        shared: storages that other processes can write, by buffer. An entry stays when its storage is freed.
    """

    def __init__(
        self,
        channel: ChannelClient,
        session_id: str,
        token: str,
        where: str,
        timeout: float = 5.0,
        jit: str = "exact",
        trace: str = "",
        opens: DirectSession | None = None,
    ) -> None:
        """Say hello, and wait for the answer.

        Raises:
            ReleaseError: the executor's PyTorch and this process's do not work together.
            WoolyError: the executor refuses the session.
        """
        self.connection = Connection(channel, where)
        self._opened_here = opens is not None
        self._pid, self._forks = os.getpid(), _forks
        self._mirrors: OrderedDict[int, dict[ViewKey, torch.Tensor]] = OrderedDict()
        self._mirror_bytes = 0
        #: What the open program has overwritten.
        self.overwritten: Overwritten = {}
        self.lost: WoolyError | None = None
        self._started: deque[_StartedRead] = deque()
        #: Values that were read early and are not used yet, by buffer: the number of the READ, and what was predicted.
        self._early: dict[int, tuple[int, EarlyValue]] = {}
        #: Answers for which a caller stopped to wait, because a signal handler raised an exception.
        self._abandoned: deque[Pending] = deque()
        self._interrupted_at = -1  # number of the last frame when a signal handler ended that ran inside a wait
        #: The answer to the last run with `reply`.
        self._reply: Pending | None = None
        self._failed: Exception | None = None
        self.answered = 0
        self.name_of: Callable[[list[int], int], str] = lambda words, instruction: ""
        self._failures = Failures(lambda words, instruction: self.name_of(words, instruction))
        self.bytes_sent = 0
        self.bytes_received = 0
        self.syncs = 0
        self.siblings: list[Link] = []
        self._sources: set[bytes] = set()
        self.interrupted = False
        self.offers: OfferPolicy | None = None
        self.observer: FrameObserver | None = None
        self.recovery: Recovery | None = None
        self.stays = ""
        self.log: SessionLog | None = None
        self.waits = Waits()
        #: When `ask` sent its question, by the clock of `waits`.
        self._asked_at = 0.0
        self.shares = False
        self.shared: dict[int, SharedStorage] = {}
        self._kept: KeptFrame | None = None
        self._last_collective = 0
        asked: dict[str, Any] = {"protocol": PROTOCOL, "jit": jit} | ({"trace": trace} if trace else {})
        if opens is not None:
            asked["session"] = opens.model_dump()
        self.continuation = Continuation(self, asked | ({} if opens is None else {"returns": True}))
        hello = asked | {"session_id": session_id, "token": token}
        began = self.waits.clock()
        try:
            self.connection.greet(hello, timeout)
        except ChannelError as e:
            raise self.lose(e) from e
        self.connection.last = 1
        self.waits.trip_s = self.waits.clock() - began

    @property
    def device(self) -> dict[str, Any]:
        """Properties of the device, from the executor's WELCOME."""
        return self.connection.device

    @property
    def where(self) -> str:
        """Name and endpoint of the executor, for messages."""
        return self.connection.where

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, kind: Kind, *buffers: Any, into: memoryview | None = None, asks: bool = False, once: bool = False
    ) -> int:
        """Send a frame. If the connection is broken, the session goes on elsewhere first, if it can. Returns the frame's number.

        Args:
            kind: kind of the frame.
            buffers: its payload.
            into: memory for the answer to a READ.
            asks: the executor answers it.
            once: send it to this executor only: it is not kept.

        Raises:
            WoolyError: the session has ended.
        """
        if self.lost is not None:
            raise self.lost
        if self._forks != _forks:
            raise ForkedProcessError
        for b in buffers:
            self.bytes_sent += len(b)
        recovery = self.recovery
        frame = None
        if recovery is not None:
            frame = recovery.keep(kind, buffers, into, asks=asks) if kind in KEPT and not once else None
        self._kept = frame
        try:
            sent = buffers if recovery is None else recovery.on_wire(kind, buffers)
            seq = self.connection.send(kind, *sent, into=into)
        except ChannelError as e:
            try:
                self.continuation.recover(e)  # sends the frame, if it is kept
            except BaseException:
                if self.lost is None:  # the session still hibernates, or a signal handler ended the recovery
                    self._not_sent(frame)
                raise
            if frame is not None:
                return frame.seq
            return self.position if once else self.send(kind, *buffers)
        except BaseException:
            self._not_sent(frame)
            raise
        if frame is not None:
            frame.seq = seq
        return seq

    def _not_sent(self, frame: KeptFrame | None) -> None:
        self.interrupted = True
        if frame is not None and self.recovery is not None:
            self.recovery.drop(frame)

    def lose(self, cause: Exception) -> WoolyError:
        """End this link and its siblings, because the executor is lost. Returns the error to raise."""
        for sibling in self.siblings:
            # If one link breaks, the router ends the session and the others break, too. Name the link that broke first.
            sibling.check_open()
        return self._set_lost(cause)

    def _set_lost(self, cause: Exception) -> WoolyError:
        if self.lost is None:
            self.lost = ExecutorLostError(
                f"lost the executor {self.where}: {cause}. All tensors on its device are lost; start the program again "
                "(`wooly status` shows what is running, `wooly up` starts a local stack)."
            )
            for sibling in self.siblings:
                sibling.end(self.lost)
            if self.recovery is not None and self.recovery.together is not None:
                self.recovery.together.end(f"it has lost its session: {cause}")
        return self.lost

    def check_open(self) -> None:
        """Check whether the executor closed the connection. Any thread may call this; it receives no frames.

        A link that can go on elsewhere does so at its next use.
        """
        if self.lost is None and self.recovery is None and self.connection.channel.broken():
            self._set_lost(WoolyError("the executor closed the connection"))

    def fail(self, why: str) -> None:
        """End all links of the session, because the router ended it. Any thread may call this; waiting threads wake up.

        A session that can go on elsewhere loses its executor instead.
        """
        if self.recovery is not None and self.lost is None:
            self.continuation.why = why
            self.connection.channel.abort()
            return
        error = ExecutorLostError(
            f"lost the executor: {why}. All tensors on its device are lost; start the program again "
            "(`wooly status` shows what is running, `wooly up` starts a local stack)."
        )
        for link in (self, *self.siblings):
            link.end(error)

    def end(self, error: WoolyError) -> None:
        """End this link with an error, and wake the threads that wait for its answers."""
        if self.lost is None:
            self.lost = error
            self.connection.channel.abort()

    def define(self, program: bytes) -> None:
        """Send a program to the executor, which verifies it before the first run."""
        if self.recovery is not None and (why := stateful_operator(program, self.device.get("libraries", {}))):
            self.stay(why)
        if self.recovery is not None:
            self.recovery.define(program)
        if self.log is not None:
            self.log.defined(program)
        self._failures.defined(self.send(Kind.DEFINE, program))

    def source(self, name: bytes, raw: bytes) -> bool:
        """Send the source of foreign kernels to the executor, once per session, before a program refers to it.

        Returns whether the source is sent now.

        Args:
            name: digest of the source.
            raw: the source, encoded by `wooly_wis.foreign.encode_source`.
        """
        new = name not in self._sources
        if new:
            if self.recovery is not None and (why := hidden_state(decode_source(raw))):
                self.stay(why)
            if self.recovery is not None:
                self.recovery.sources.append(raw)
            self.send(Kind.SOURCE, raw)
            self._sources.add(name)
            if self.log is not None:
                self.log.source(raw)
        return new

    def run(
        self,
        digest: bytes,
        bindings: list[int],
        params: bytes,
        frees: list[int],
        words: list[int],
        origins: list[Origin],
        reply: bool = False,
    ) -> int:
        """Send one run. Returns its sequence number; an error report for this run contains the same number."""
        try:
            if self.observer is not None:
                self.observer.will_run()
            if self.recovery is not None:
                self.continuation.cut_if_due(self.recovery)
            if len(self._failures.inflight) > RUNS_INFLIGHT:
                self._prune()
        except BaseException:
            self.interrupted = self.lost is None
            raise
        payload = pack_run(digest, bindings, params, frees, reply=reply)
        seq = self.send(_RUN, payload, asks=reply)
        tell = None if self.log is None else self.log.ran(payload, origins)
        if reply:
            kept = self._kept
            again = None if kept is None else kept.pending  # a recovery has sent the run again
            self._reply = again or Pending(self.connection.channel.expect_frame(), kept)
            self._reply.tell = tell
        self._failures.sent(seq, words, origins)
        if self.observer is not None:
            self.observer.ran(seq, words, origins)
        return seq

    def _prune(self) -> None:
        """Forget the origins of old runs, of which there are too many."""
        # A program that never waits for an answer reads acknowledgements only here.
        self.poll()
        self._failures.prune(self.connection.acked)

    def collective(self, payload: bytes, name: str, where: Origin, *, once: bool = False) -> None:
        """Send this rank's part in a collective.

        Args:
            payload: the content of the COLLECTIVE frame.
            name: what it is, for messages.
            where: the Python line that asks for it.
            once: do not send it again if the session goes on elsewhere.

        Raises:
            WoolyError: the session is being recorded.
        """
        if self.log is not None:
            raise WoolyError("`wooly record` cannot record the collectives of torch.distributed")
        if self.recovery is not None:
            self.continuation.cut_if_due(self.recovery)
        if len(self._failures.inflight) > RUNS_INFLIGHT:
            self._prune()
        seq = self.send(Kind.COLLECTIVE, payload, once=once)
        self._failures.sent(seq, name, [where])
        self._last_collective = seq

    def await_collectives(self) -> None:
        """Wait until the executor has done the collectives so far, for `COLLECTIVES_S` at most: other ranks need this one's part.

        A session that ends earlier takes it back, although its script has no use for the results.
        """
        deadline = self.waits.clock() + COLLECTIVES_S
        with contextlib.suppress(WoolyError):  # the executor is lost, or a recovery has failed
            while not self.passed(self._last_collective) and self.waits.clock() < deadline:
                time.sleep(_POLL_S)

    def ipc(self, what: int, buffer: int = 0, nbytes: int = 0, name: bytes = b"") -> dict[str, Any]:
        """Share a buffer with other processes: export, import or release it (`wooly_wis.frames`). Waits for all work so far.

        From the first time on, the session ends with its executor and is not moved.

        Args:
            what: `IPC_EXPORT`, `IPC_IMPORT` or `IPC_RELEASE`.
            buffer: the buffer to export, or the id of the imported buffer.
            nbytes: size of the imported buffer.
            name: name of the buffer that is imported or released.

        Raises:
            IpcError: the executor refuses.
            WoolyError: the executor cannot share memory, or the session is being recorded.
        """
        if self.log is not None:
            raise WoolyError("`wooly record` cannot record tensors that are shared with another process")
        if not self.device.get("ipc"):
            raise WoolyError(f"the executor {self.where} cannot share memory between processes; update it")
        self.stay("it shares memory with another process")
        answer = self._answer(Kind.IPC, IPC_HEAD.pack(what, buffer, nbytes, name))
        self._note_all_answered()
        self.forget(buffer)
        self.shares = True
        return answer

    def is_shared(self, buffer: int) -> bool:
        """Whether other processes can write the buffer, so that a host copy of it may be outdated at any time."""
        known = self.shared.get(buffer)
        return known is not None and not known.storage.expired()

    @property
    def shares_now(self) -> bool:
        """Whether this process has a storage that it shares with another process."""
        return self.shares and any(not known.storage.expired() for known in self.shared.values())

    def introduce(self, payload: bytes, where: Origin) -> None:
        """Tell the executor which other executor carries the collectives of a group: send a GROUP frame."""
        self._failures.sent(self.send(Kind.GROUP, payload), "torch.distributed.new_group", [where])

    def stay(self, why: str) -> None:
        """From now on, the session ends with its executor and is not moved. A session without an executor takes one first.

        Raises:
            WoolyError: it has no executor now, and gets none.
        """
        self.continuation.wake(why)
        self.continuation.go_on()
        recovery, self.recovery = self.recovery, None
        if recovery is not None:
            self.stays = why
            if recovery.together is not None:
                recovery.together.end(why)
            recovery.tell_given_up(why)

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """Write `data` into a buffer at a byte offset. After the return, the caller may change `data`.

        The executor copies pinned data itself, so this waits for it.
        """
        if self.recovery is not None:
            self.continuation.cut_if_due(self.recovery)
        began = self.waits.clock() if len(data) >= LARGE else 0.0
        size = self.connection.channel.bulk_bytes
        for at in range(0, len(data), size):
            chunk = data[at : at + size]
            seq = self.send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), chunk)
            if self.log is not None:
                self.log.wrote(buffer, offset + at, chunk)
            if self.observer is not None:
                self.observer.copied(seq, len(chunk), to_device=True)
        try:
            self.connection.channel.await_placed()
        except ChannelError as e:
            self.continuation.recover(e)  # sends copies of the data
        if began:
            self.waits.sent(self.waits.clock() - began)

    def keep_content(self, buffer: int, data: memoryview) -> None:
        """Note the content of a buffer that the device had already, and that was therefore not sent."""
        if self.recovery is not None:
            self.continuation.cut_if_due(self.recovery)
            for at in range(0, len(data), MAX_CHUNK):
                kept = self.recovery.keep(Kind.WRITE, (WRITE_HEAD.pack(buffer, at), data[at : at + MAX_CHUNK]))
                kept.seq = self.connection.last
        if self.log is not None:
            for at in range(0, len(data), MAX_CHUNK):
                self.log.wrote(buffer, at, data[at : at + MAX_CHUNK])

    def offer(self, buffer: int, nbytes: int, name: bytes, *, head: bool) -> bool:
        """Ask whether the device has a content.

        Args:
            buffer: the buffer to fill. If the device has the content, the buffer gets it.
            nbytes: size of the content.
            name: digest of the content, or with `head` digest of its first chunk.
            head: ask only whether a content with this first chunk exists. The buffer does not change.
        """
        return bool(self._answer(Kind.OFFER, CONTENT.pack(buffer, nbytes, head, name)).get("known"))

    def seal(self, buffer: int, nbytes: int, name: bytes) -> None:
        """Tell the executor that the buffer is complete, and the digest of its content. Other sessions may then share it."""
        self.send(Kind.SEAL, CONTENT.pack(buffer, nbytes, 0, name))

    def pin(self, do: str, name: str = "") -> dict[str, Any]:
        """Pin the session's shared contents on the device under a name (`add`), unpin them (`remove`), or `list` all pins.

        Raises:
            WoolyError: the executor refuses; the message says why.
        """
        answer = self._answer(Kind.PIN, pack_json({"do": do, "name": name}))
        if "error" in answer:
            raise WoolyError(answer["error"])
        return answer

    # -- answers -----------------------------------------------------------------------------------------------------

    def wait(
        self, pending: Pending, *, asked: bool = False, where: Origin | None = None, began: float | None = None
    ) -> bool:
        """Wait for an answer. If a signal handler raises an exception meanwhile, the answer is taken in when it arrives.

        Args:
            pending: the answer.
            asked: the question was sent at `began`, so the wait bounds the round trip.
            where: Python line that waits; None: the line that calls now.
            began: when the wait began, by the clock of `waits`; None: now.

        Returns:
            False if the session went on elsewhere and the question must be asked again, because its frame was not kept.
        """
        waits = self.waits
        while True:
            channel = self.connection.channel
            received_s = channel.receiving_s
            if began is None:
                began = waits.clock()
            if where is None:
                where = origin()  # here, while the executor works
            try:
                channel.complete(pending.expected)
                waits.answered(waits.clock() - began, channel.receiving_s - received_s, asked=asked, where=where)
                return True
            except ChannelError as e:
                self.continuation.recover(e)
                if pending.frame is None:
                    return False
                began, asked = None, False  # the question was sent again, and its answer may be here already
            except BaseException:
                self._abandoned.append(pending)
                raise

    def call_inside_wait(self, handler: Callable[[], Any]) -> Any:
        """Call a signal handler, which may use the device, while `wait` waits. What the handler has sent is answered afterwards.

        Raises:
            InputTakenError: the handler has used the link, so the wait must look again.
        """

        def call() -> Any:
            found = handler()
            if self.unanswered and self.connection.last != last:
                self.sync()
            self._interrupted_at = self.connection.last
            return found

        last = self.connection.last
        return self.connection.channel.call_inside_wait(call)

    def _answer(self, ask: Kind, *payload: bytes) -> dict[str, Any]:
        return unpack_json(self._payload(ask, *payload))

    def _payload(self, ask: Kind, *payload: bytes, kind: Kind = Kind.RESULT) -> bytes:
        """Send a frame that does not change the session, and wait for the answer."""
        while True:
            self.send(ask, *payload)
            pending = Pending(self.connection.channel.expect_frame())
            if self.wait(pending, asked=True):
                break
        other = pending.expected.other
        if other is not None and other.kind == Kind.ERROR:  # the answer has taken the session's error
            if self.recovery is not None:
                kept = self.recovery.keep(ask, payload)
                kept.seq = self.connection.last
                kept.answered(ERROR, self.connection.kind)
            if self.log is not None:
                self.log.failed(self.log.frames)
        return self._take_answer(pending, kind)

    def _take_answer(self, pending: Pending, kind: Kind) -> bytes:
        frame = pending.expected.other
        assert frame is not None
        self.syncs += 1
        self.bytes_received += len(frame.payload)
        self._process_answers()
        pending.answered(frame, by=self.connection.kind)
        if frame.kind == Kind.ERROR:
            error = self._error_of(unpack_json(frame.payload))
            self._note_all_answered()
            raise error
        if frame.kind != kind:
            raise self.lose(WoolyError(f"the executor sent a frame of kind {frame.kind} instead of {kind.name}"))
        return bytes(frame.payload)

    def buffers(self) -> list[tuple[int, int]]:
        """Id and bytes of each buffer of the session on the executor, in the order of the ids. Waits for all work so far."""
        found: list[tuple[int, int]] = []
        while True:
            listed = self._answer(Kind.BUFFERS, BUFFERS_HEAD.pack(found[-1][0] if found else 0))["buffers"]
            found += [(buffer, nbytes) for buffer, nbytes in listed]
            if len(listed) < BUFFERS_AT_ONCE:
                return found

    def profile(self, what: int) -> tuple[int, int, int, list[Record]]:
        """Begin or end to measure the session's work on the executor, or only take records. Waits for all work so far.

        Args:
            what: `PROFILE_BEGIN`, `PROFILE_TAKE` or `PROFILE_END`.

        Returns:
            The executor's clock in ns, the number of records that it dropped, the number of records for later calls, and the next
            records.
        """
        return unpack_records(self._payload(Kind.PROFILE, PROFILE_HEAD.pack(what), kind=Kind.RECORDS))

    def result(self) -> dict[str, Any]:
        """Wait for the answer to a run that was sent with `reply`."""
        pending, self._reply = self._reply, None
        assert pending is not None, "no run was sent with `reply`"
        if not self.wait(pending):
            raise self.lose(WoolyError("the answer to a run was lost"))
        answer = unpack_json(self._take_answer(pending, Kind.RESULT))
        self._note_all_answered()
        return answer

    def sync(self) -> None:
        """Wait until everything sent so far has been executed.

        Raises:
            RemoteOperationError: an operation since the last answer failed.
            ExecutorLostError: the connection to the executor ended.
        """
        self._payload(Kind.SYNC)
        self._note_all_answered()

    def stats(self, wanted: int = 0) -> dict[str, Any]:
        """The executor's counters for this session.

        Args:
            wanted: bytes that the session wants to allocate. If they are not there, the key "shortage" has the error's text.
        """
        return self._answer(Kind.STATS, STATS_HEAD.pack(min(wanted, _MOST_WANTED)))

    def read(self, buffer: int, offset: int, into: memoryview) -> None:
        """Fill `into` from a buffer at a byte offset, and wait for it. The data is received without a copy.

        Raises:
            RemoteOperationError: an operation that computed the buffer failed, or another operation before the read.
        """
        pending = self.ask(buffer, offset, into)
        self.take(into, pending, origin())

    def ask(self, buffer: int, offset: int, into: memoryview) -> Pending:
        """The first half of `read`: ask for the data. The caller must `take` it or `abandon` it before the link is used again."""
        if sync_debug.mode:
            sync_debug.note()
        _, pending = self._begin_read(buffer, offset, into)
        self._asked_at = self.waits.clock()
        return pending

    def take(self, into: memoryview, pending: Pending, where: Origin) -> None:
        """The second half of `read`: wait for the data that `ask` has asked for.

        Args:
            into: memory that was given to `ask`.
            pending: the result of `ask`.
            where: Python line that reads.

        Raises:
            RemoteOperationError: an operation that computed the buffer failed, or another operation before the read.
        """
        if not self.wait(pending, asked=True, where=where, began=self._asked_at):
            raise self.lose(WoolyError("the answer to a read was lost"))
        self._process_answers()
        failure = self._received(into, pending)
        self._note_all_answered(failure)

    def fetch(self, buffer: int, offset: int, into: memoryview, owner: Any) -> None:
        """Start to fill `into` from a buffer at a byte offset, and do not wait.

        The data has arrived when a frame that was sent later is answered. If the read fails, the next call that waits raises the
        error.

        Args:
            buffer: buffer to read.
            offset: first byte to read.
            into: target memory, at most `ANSWER_COPIED` bytes. The executor sends answers up to this size without waiting until
                the client receives them. So client and executor never wait for each other at the same time.
            owner: object that owns the target memory; the link keeps it alive until the data has arrived.
        """
        if len(self._started) >= MAX_STARTED_READS:
            self.finish_reads()
        seq, pending = self._begin_read(buffer, offset, into)
        self._started.append(_StartedRead(seq, into, pending, owner))

    def _begin_read(self, buffer: int, offset: int, into: memoryview) -> tuple[int, Pending]:
        seq = self.send(_READ, READ_HEAD.pack(buffer, offset, len(into)), into=into, asks=True)
        kept = self._kept
        again = None if kept is None else kept.pending  # a recovery has sent the frame again
        pending = again or Pending(self.connection.channel.expect(into, _DATA), kept)
        if self.log is not None:
            pending.tell = self.log.asked(buffer, offset, len(into))
        if self.observer is not None:
            self.observer.copied(seq, len(into), to_device=False)
        return seq, pending

    def hold(self, frames: int = 1) -> None:
        """Send the next frames together with the frame after them (`ChannelClient.hold`)."""
        self.connection.channel.hold(frames)

    def read_early(
        self, buffer: int, key: ViewKey, into: memoryview, host: torch.Tensor, predicted: EarlyValue
    ) -> None:
        """Start to read a value that the script will probably want, into `host`, which becomes the cached host copy.

        If the read fails, the next call that waits raises the error.
        """
        self.fetch(buffer, key[0], into, host)
        self.keep(buffer, key, host)
        self._early[buffer] = self._started[-1].seq, predicted

    def is_early(self, buffer: int) -> bool:
        """Whether a value of the buffer was read early, and is not used yet."""
        return buffer in self._early

    def finish_early(self, buffers: Iterable[int], send: Callable[[], None]) -> None:
        """Send the open program, and wait for values that were read early.

        Args:
            buffers: their buffers. The program may free them; then the link forgets their host copies, but still waits.
            send: sends the program.

        Raises:
            RemoteOperationError: a read failed, or an operation before it.
            ExecutorLostError: the connection to the executor ended.
        """
        used = {buffer: self._early.pop(buffer) for buffer in buffers}
        try:
            send()
            if sync_debug.mode:
                sync_debug.note()
            for _, predicted in used.values():
                predicted.use()
            self.finish_reads(max(seq for seq, _ in used.values()))
        except BaseException:
            for buffer in used:
                self.forget(buffer)
            raise

    @property
    def many_reads_started(self) -> bool:
        """Whether half of the `MAX_STARTED_READS` reads are unanswered, so that `fetch` may soon have to wait."""
        return len(self._started) >= MAX_STARTED_READS // 2

    @property
    def has_fetches(self) -> bool:
        """Whether reads that the script has started, and not `read_early`, may be unanswered."""
        if not self._started:
            return False
        early = {seq for seq, _ in self._early.values()}
        return any(read.seq not in early for read in self._started)

    def reads_into(self, memory: torch.UntypedStorage) -> bool:
        """Whether a started read may still write to host memory."""
        begin = memory.data_ptr()
        end = begin + memory.nbytes()
        return any(c.owner.data_ptr() < end and begin < c.owner.data_ptr() + len(c.into) for c in self._started)

    def finish_reads(self, seq: int | None = None) -> None:
        """Wait for the reads that `fetch` started: all of them, or those up to the frame `seq`.

        Raises:
            RemoteOperationError: a read failed, or an operation before it.
            ExecutorLostError: the connection to the executor ended.
        """
        for coming in list(self._started):
            if seq is not None and coming.seq > seq:
                break
            if not coming.pending.expected.done:
                self.wait(coming.pending)
        self._process_answers()
        self._raise_failed()

    @property
    def position(self) -> int:
        """Sequence number of the last sent frame."""
        return self.connection.last

    def passed(self, position: int) -> bool:
        """Whether the executor is known to have processed all frames up to `position`. Does not wait.

        Raises:
            ExecutorLostError: the connection to the executor ended.
        """
        if self.answered < position and self.connection.acked < position:
            self.poll()
            self._process_answers()  # an answer to a frame arrives before the frame's acknowledgement
        if self.lost is not None:
            raise self.lost
        return max(self.answered, self.connection.acked) >= position

    def reach(self, position: int) -> bool:
        """Wait until all frames up to `position` have been executed, if a started read after `position` exists.

        Returns:
            False if no such read exists. Then it is unknown whether the frames have been executed.

        Raises:
            RemoteOperationError: an operation failed.
            ExecutorLostError: the connection to the executor ended.
        """
        if self.lost is not None:
            raise self.lost
        if self.answered >= position:  # a later read would be waited for in vain
            self._raise_failed()
            return True
        seq = next((c.seq for c in self._started if c.seq >= position), None)
        if seq is not None:
            self.finish_reads(seq)
        return self.answered >= position

    def _process_answers(self) -> None:
        """Process the answers to `fetch` that have arrived. The first error is kept for the next call that waits."""
        while self._abandoned and self._abandoned[0].expected.done:
            pending = self._abandoned.popleft()
            late = pending.expected.other
            if late is not None:
                pending.answered(late, by=self.connection.kind)
            elif pending.frame is not None and pending.frame.into is not None:
                pending.answered(None, pending.frame.into, by=self.connection.kind)
            if late is not None and late.kind == Kind.ERROR:
                self.note_error(late.payload)
        coming = self._started
        while coming and coming[0].pending.expected.done:
            seq, into, pending, _ = coming.popleft()
            failure = self._received(into, pending)
            if failure is not None:
                for buffer in [b for b, (early, _) in self._early.items() if early == seq]:
                    self.forget(buffer)
            self._failed = self._failed or failure
            self.answered = seq
            self._failures.answered(seq)
        if self.recovery is not None:
            self.continuation.take_cut(self.recovery)

    def _received(self, into: memoryview, pending: Pending) -> Exception | None:
        """Process the answer to a READ: its data, or another frame that came instead. Returns the error, if any."""
        self.syncs += 1
        self.bytes_received += len(into)
        other = pending.expected.other
        pending.answered(other, into, by=self.connection.kind)
        if other is None:
            return None
        if other.kind == Kind.ERROR:
            return self._error_of(unpack_json(other.payload))
        raise self.lose(WoolyError(f"the executor sent a frame of kind {other.kind} instead of DATA"))

    def _note_all_answered(self, failure: Exception | None = None) -> None:
        """Record that all frames so far are answered.

        Raises:
            Exception: an earlier error that was kept, or else `failure`.
        """
        self.answered = self.connection.last
        self._failures.inflight.clear()
        self._failed = self._failed or failure
        self._raise_failed()

    @property
    def unanswered(self) -> bool:
        """Whether it is unknown if all frames so far have been processed."""
        return self.answered < self.connection.last

    def keep_error(self, error: Exception) -> None:
        """Raise an error of an operation at the next call that waits."""
        if self.lost is None:
            self._failed = self._failed or error

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def abandon(self, pending: Pending) -> None:
        """Process an answer when it arrives, and do not wait for it."""
        self._abandoned.append(pending)

    def forget_unkept_answers(self) -> None:
        """Forget answers for which nobody waits, and which another executor does not give."""
        self._abandoned = deque([p for p in self._abandoned if p.frame is not None])

    def note_error(self, payload: bytes | bytearray | memoryview) -> None:
        """Keep an error that an answer has taken, for the next call that waits."""
        self._failed = self._failed or self._error_of(unpack_json(payload))

    def _error_of(self, error: dict[str, Any]) -> Exception:
        return self._failures.error(error, self.connection.number_of(int(error.get("seq", 0))))

    # -- host copies of read buffers, valid until the buffer is written ----------------------------------------------

    recording = False

    @property
    def hides_data(self) -> bool:
        """Whether the session is recorded without its contents, so that no upload may become a param."""
        return self.log is not None and not self.log.data

    @property
    def mirroring(self) -> bool:
        """Whether the link caches a host copy of any buffer."""
        return bool(self._mirrors)

    def mirror(self, buffer: int, key: ViewKey) -> torch.Tensor | None:
        """The cached host copy of a view; None if the view was not read since the last write to its buffer."""
        kept = self._mirrors.get(buffer)
        return None if kept is None else kept.get(key)

    def mirrors_of(self, buffer: int) -> Mapping[ViewKey, torch.Tensor]:
        """All cached host copies of views of a buffer."""
        return self._mirrors.get(buffer, {})

    def keep(self, buffer: int, key: ViewKey, host: torch.Tensor) -> None:
        """Cache the host copy of a view. If the cache exceeds `_MIRROR_LIMIT`, the oldest buffers are evicted."""
        if host.nbytes > MIRROR_ITEM_LIMIT or (self.shared and self.is_shared(buffer)):
            return
        if self._interrupted_at == self.connection.last:
            return  # the signal handler may have written the buffer since it was read
        kept = self._mirrors.setdefault(buffer, {})
        if key not in kept:
            self._mirror_bytes += host.nbytes + _MIRROR_OVERHEAD
        kept[key] = host
        while self._mirror_bytes > _MIRROR_LIMIT:
            self.forget(next(iter(self._mirrors)))

    def forget(self, buffer: int) -> None:
        """Drop the cached copies of a buffer, because the buffer is written or freed."""
        kept = self._mirrors.pop(buffer, None)
        if kept is not None:
            self._early.pop(buffer, None)
            self._mirror_bytes -= sum(host.nbytes + _MIRROR_OVERHEAD for host in kept.values())

    def overwrite(self, buffer: int, instructions: int) -> None:
        """Drop the cached copies of a buffer, because an instruction of the open program will write it.

        Values that were computed before can still be computed from them (`overwritten`), until the program is sent.

        Args:
            buffer: the buffer.
            instructions: number of instructions of the open program so far.
        """
        kept = self._mirrors.get(buffer)
        if kept is None:
            return
        arrived = buffer not in self._early
        self.forget(buffer)
        if arrived:
            self.overwritten[buffer] = kept, instructions

    def end_program(self, freed: list[int]) -> None:
        """Drop the cached copies that only the open program needed, because it was sent or dropped.

        Args:
            freed: the buffers that it freed.
        """
        if self.overwritten:
            self.overwritten = {}
        for buffer in self._mirrors.keys() & freed:
            self.forget(buffer)

    # -- life --------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Read acknowledgements without waiting. Returns True if the executor has processed all runs."""
        if self.lost is not None:
            return False
        try:
            self.connection.channel.poll_acks()
        except ChannelError as e:
            if self.recovery is None:
                self.lose(e)
            else:
                with contextlib.suppress(WoolyError):  # the next call raises it
                    self.continuation.recover(e)
            return False
        except BaseException:
            self.interrupted = True
            raise
        inflight = self._failures.inflight
        return not inflight or self.connection.acked >= inflight[-1][0]

    def close(self, why: str = "") -> None:
        """Tell the executor that the session ends, if the connection is open, and close the connection.

        Args:
            why: the failure that ends it; empty: it ends normally.
        """
        self.say_end(why)
        self.hang_up(known=True)

    def say_end(self, why: str = "") -> None:
        """Tell the executor that the session ends, if the connection is open. `hang_up` must follow.

        Args:
            why: as for `close`.
        """
        if self.recovery is not None and self.recovery.together is not None and os.getpid() == self._pid:
            self.recovery.together.end(why or "it has closed its session")
        if self.lost is None and os.getpid() == self._pid:
            try:
                self.connection.channel.send(Kind.CLOSE, why.encode(errors="replace")[:MAX_CLOSE_REASON])
                recovery = self.recovery
                if self._opened_here or (recovery and (recovery.number or recovery.together)):
                    self.connection.channel.await_end(CLOSE_S)
            except ChannelError as e:
                self.lose(e)
        self.lost = self.lost or ExecutorLostError("this session is closed; call wooly.enable() to open another one")

    def hang_up(self, *, known: bool) -> None:
        """Close the connection.

        Args:
            known: the router knows the end of the session. Otherwise, the executor must read it before the connection breaks.
        """
        if not known and os.getpid() == self._pid:
            self.connection.channel.await_end(CLOSE_S)
        self.connection.channel.close()
