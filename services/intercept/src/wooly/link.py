"""The client's end of one data channel: sends runs, writes, reads and syncs, and translates their errors.

Calls block; there is no asyncio here. Callers hold the recorder's lock. An error frame becomes an exception that names the Python
line which recorded the failed operation.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from wooly_bus.channel import ChannelClient, ChannelError, Expected, Frame
from wooly_wis.frames import (
    BUFFERS_AT_ONCE,
    BUFFERS_HEAD,
    CONTENT,
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
from wooly_wis.releases import mismatch

from wooly.errors import (
    ExecutorLostError,
    ForkedProcessError,
    ReleaseError,
    RemoteNotImplementedError,
    RemoteOperationError,
    WoolyError,
)
from wooly.recorder import Origin, describe_origin

if TYPE_CHECKING:
    from wooly_wis.messages import DirectSession

    from wooly.contents import OfferPolicy

#: Number of failed operations that a link remembers.
_FAILURES_KEPT = 64
#: Highest number of bytes that a STATS frame can ask for.
_MOST_WANTED = (1 << 64) - 1
#: Number of acknowledged runs whose origins the link keeps. An acknowledgement does not say whether a run failed; only the next
#: answer does.
RUNS_REMEMBERED = 1024
#: Number of runs above `RUNS_REMEMBERED` after which the link polls for acknowledgements.
_POLL_EVERY = 64
#: Maximum total size, in bytes, of the cached host copies of a link.
_MIRROR_LIMIT = 64 << 20
#: Maximum size, in bytes, of one cached host copy. Larger reads are not cached.
MIRROR_ITEM_LIMIT = 1 << 20

#: Maximum time, in seconds, that closing a session waits until the executor has closed it, if no controller does that.
CLOSE_S = 1.0
#: Maximum number of reads that `Link.fetch` has started and that are not answered.
MAX_STARTED_READS = 64

ViewKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _StartedRead(NamedTuple):
    """A read that `Link.fetch` started and that is not answered.

    Attributes:
        seq: sequence number of the READ frame.
        nbytes: number of bytes to read.
        expected: the answer.
        owner: object that owns the target memory.
    """

    seq: int
    nbytes: int
    expected: Expected
    owner: Any


class SyncDebug:
    """What happens when an operation waits for the device, as `torch.cuda.set_sync_debug_mode` says.

    Attributes:
        mode: 0: nothing; 1: a warning; 2: an error.
    """

    mode = 0

    def note(self) -> None:
        """An operation is about to wait.

        Raises:
            RuntimeError: it must not.
        """
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)
        elif self.mode:
            raise RuntimeError("called a synchronizing CUDA operation")


sync_debug = SyncDebug()


class FrameObserver(Protocol):
    """Is told about the frames of a link that make the device work."""

    def will_run(self) -> None:
        """A program is about to be sent. The observer may ask the executor."""

    def ran(self, seq: int, words: list[int], origins: list[Origin]) -> None:
        """A program was sent as frame `seq`."""

    def copied(self, seq: int, nbytes: int, *, to_device: bool) -> None:
        """Bytes were sent to the device, or asked for, with frame `seq`."""


class Link:
    """The client end of a session's data channel.

    Attributes:
        bytes_sent: payload bytes sent.
        bytes_received: payload bytes received.
        syncs: number of answers for which the client waited.
        device: properties of the device, from the executor's WELCOME.
        siblings: links of the session's other devices. If this link fails, they end, too.
        where: name and endpoint of the executor, for messages.
        interrupted: set when an exception of a signal handler ended a wait before a frame was sent. The recorder clears it.
        offers: decides which uploads first ask whether the device has the content; None: the session shares no contents.
        observer: is told about frames; None in most sessions.
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
        self._channel = channel
        self._opened_here = opens is not None
        self._last = 0
        self._pid = os.getpid()
        self.where = where
        self._inflight: deque[tuple[int, list[int], list[Origin]]] = deque()
        self._mirrors: OrderedDict[int, dict[ViewKey, torch.Tensor]] = OrderedDict()
        self._mirror_bytes = 0
        self._lost: WoolyError | None = None
        self._started: deque[_StartedRead] = deque()
        #: Answers for which a caller stopped to wait, because a signal handler raised an exception.
        self._abandoned: deque[Expected] = deque()
        self._failed: Exception | None = None
        #: Code, operation and Python line of failures, by message. What needs a result of theirs fails with the same message.
        self._failures: dict[str, tuple[str, str | None, str | None]] = {}
        #: Sequence number of the last frame that is answered. It is known whether this frame or an earlier frame failed.
        self._answered = 0
        self.name_of: Callable[[list[int], int], str] = lambda words, instruction: ""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.syncs = 0
        self.siblings: list[Link] = []
        self._sources: set[bytes] = set()
        self.interrupted = False
        self.offers: OfferPolicy | None = None
        self.observer: FrameObserver | None = None
        hello: dict[str, Any] = {"protocol": PROTOCOL, "session_id": session_id, "token": token, "jit": jit}
        if trace:
            hello["trace"] = trace
        if opens is not None:
            hello["session"] = opens.model_dump()
        self._send(Kind.HELLO, pack_json(hello))
        welcome = self._answer(Kind.WELCOME, timeout)
        self.device: dict[str, Any] = welcome.get("device", {})
        if why := mismatch(torch.__version__, str(self.device.get("torch_version", ""))):
            raise ReleaseError(f"cannot use {where}: {why}.")
        channel.window = int(welcome.get("window", channel.window))

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send(self, kind: Kind, *buffers: Any) -> int:
        if self._lost is not None:
            raise self._lost
        if os.getpid() != self._pid:
            raise ForkedProcessError
        for b in buffers:
            self.bytes_sent += len(b)
        try:
            self._last = seq = self._channel.send(kind, *buffers)
            return seq
        except ChannelError as e:
            raise self._fail(e) from e
        except BaseException:
            self.interrupted = True
            raise

    def _fail(self, cause: Exception) -> WoolyError:
        for sibling in self.siblings:
            # If one link breaks, the router ends the session and the others break, too. Name the link that broke first.
            sibling.check_open()
        return self._set_lost(cause)

    def _set_lost(self, cause: Exception) -> WoolyError:
        if self._lost is None:
            self._lost = ExecutorLostError(
                f"lost the executor {self.where}: {cause}. All tensors on its device are lost; start the program again "
                "(`wooly status` shows what is running, `wooly up` starts a local stack)."
            )
            for sibling in self.siblings:
                sibling.end(self._lost)
        return self._lost

    def check_open(self) -> None:
        """Check whether the executor closed the connection. Any thread may call this; it receives no frames."""
        if self._lost is None and self._channel.broken():
            self._set_lost(WoolyError("the executor closed the connection"))

    def fail(self, why: str) -> None:
        """End all links of the session, because the router ended it. Any thread may call this; waiting threads wake up."""
        error = ExecutorLostError(
            f"lost the executor: {why}. All tensors on its device are lost; start the program again "
            "(`wooly status` shows what is running, `wooly up` starts a local stack)."
        )
        for link in (self, *self.siblings):
            link.end(error)

    def end(self, error: WoolyError) -> None:
        """End this link with an error, and wake the threads that wait for its answers."""
        if self._lost is None:
            self._lost = error
            self._channel.abort()

    def define(self, program: bytes) -> None:
        """Send a program to the executor, which verifies it before the first run."""
        self._send(Kind.DEFINE, program)

    def source(self, name: bytes, raw: bytes) -> None:
        """Send the source of foreign kernels to the executor, once per session, before a program refers to it.

        Args:
            name: digest of the source.
            raw: the source, encoded by `wooly_wis.foreign.encode_source`.
        """
        if name not in self._sources:
            self._send(Kind.SOURCE, raw)
            self._sources.add(name)

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
        if self.observer is not None:
            self.observer.will_run()
        inflight = self._inflight
        if len(inflight) > RUNS_REMEMBERED + _POLL_EVERY:
            # A program that never waits for an answer reads acknowledgements only here.
            self.poll()
            acked = self._channel.acked
            while len(inflight) > RUNS_REMEMBERED and inflight[0][0] <= acked:
                inflight.popleft()
        seq = self._send(Kind.RUN, pack_run(digest, bindings, params, frees, reply=reply))
        inflight.append((seq, words, origins))
        if self.observer is not None:
            self.observer.ran(seq, words, origins)
        return seq

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """Write `data` into a buffer at a byte offset. After the return, the caller may change `data`."""
        for at in range(0, len(data), MAX_CHUNK):
            chunk = data[at : at + MAX_CHUNK]
            seq = self._send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), chunk)
            if self.observer is not None:
                self.observer.copied(seq, len(chunk), to_device=True)

    def offer(self, buffer: int, nbytes: int, name: bytes, *, head: bool) -> bool:
        """Ask whether the device has a content.

        Args:
            buffer: the buffer to fill. If the device has the content, the buffer gets it.
            nbytes: size of the content.
            name: digest of the content, or with `head` digest of its first chunk.
            head: ask only whether a content with this first chunk exists. The buffer does not change.
        """
        self._send(Kind.OFFER, CONTENT.pack(buffer, nbytes, head, name))
        return bool(self._answer(Kind.RESULT).get("known"))

    def seal(self, buffer: int, nbytes: int, name: bytes) -> None:
        """Tell the executor that the buffer is complete, and the digest of its content. Other sessions may then share it."""
        self._send(Kind.SEAL, CONTENT.pack(buffer, nbytes, 0, name))

    def pin(self, do: str, name: str = "") -> dict[str, Any]:
        """Pin the session's shared contents on the device under a name (`add`), unpin them (`remove`), or `list` all pins.

        Raises:
            WoolyError: the executor refuses; the message says why.
        """
        self._send(Kind.PIN, pack_json({"do": do, "name": name}))
        answer = self._answer(Kind.RESULT)
        if "error" in answer:
            raise WoolyError(answer["error"])
        return answer

    # -- answers -----------------------------------------------------------------------------------------------------

    def _wait(self, expected: Expected, timeout: float | None = None) -> None:
        """Wait for an answer. If a signal handler raises an exception meanwhile, the answer is taken in when it arrives."""
        try:
            self._channel.complete(expected, timeout)
        except ChannelError as e:
            raise self._fail(e) from e
        except BaseException:
            if not expected.done:
                self._abandoned.append(expected)
            raise

    def _answer(self, kind: Kind, timeout: float | None = None) -> dict[str, Any]:
        return unpack_json(self._payload(kind, timeout))

    def _payload(self, kind: Kind, timeout: float | None = None) -> bytes:
        expected = self._channel.expect_frame()
        self._wait(expected, timeout)
        frame = expected.other
        assert frame is not None
        self.syncs += 1
        self.bytes_received += len(frame.payload)
        self._process_answers()
        if frame.kind == Kind.ERROR:
            error = self._remote_error(unpack_json(frame.payload))
            self._note_all_answered()
            raise error
        if frame.kind != kind:
            raise self._fail(WoolyError(f"the executor sent a frame of kind {frame.kind} instead of {kind.name}"))
        return bytes(frame.payload)

    def buffers(self) -> list[tuple[int, int]]:
        """Id and bytes of each buffer of the session on the executor, in the order of the ids. Waits for all work so far."""
        found: list[tuple[int, int]] = []
        while True:
            self._send(Kind.BUFFERS, BUFFERS_HEAD.pack(found[-1][0] if found else 0))
            listed = self._answer(Kind.RESULT)["buffers"]
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
        self._send(Kind.PROFILE, PROFILE_HEAD.pack(what))
        return unpack_records(self._payload(Kind.RECORDS))

    def result(self) -> dict[str, Any]:
        """Wait for the answer to a run that was sent with `reply`."""
        answer = self._answer(Kind.RESULT)
        self._note_all_answered()
        return answer

    def sync(self) -> None:
        """Wait until everything sent so far has been executed.

        Raises:
            RemoteOperationError: an operation since the last answer failed.
            ExecutorLostError: the connection to the executor ended.
        """
        self._send(Kind.SYNC)
        self._answer(Kind.RESULT)
        self._note_all_answered()

    def stats(self, wanted: int = 0) -> dict[str, Any]:
        """The executor's counters for this session.

        Args:
            wanted: bytes that the session wants to allocate. If they are not there, the key "shortage" has the error's text.
        """
        self._send(Kind.STATS, STATS_HEAD.pack(min(wanted, _MOST_WANTED)))
        return self._answer(Kind.RESULT)

    def read(self, buffer: int, offset: int, into: memoryview) -> None:
        """Fill `into` from a buffer at a byte offset, and wait for it. The data is received without a copy.

        Raises:
            RemoteOperationError: an operation that computed the buffer failed, or another operation before the read.
        """
        if sync_debug.mode:
            sync_debug.note()
        seq = self._send(Kind.READ, READ_HEAD.pack(buffer, offset, len(into)))
        if self.observer is not None:
            self.observer.copied(seq, len(into), to_device=False)
        expected = self._channel.expect(into, Kind.DATA)
        self._wait(expected)
        self._process_answers()
        failure = self._received(len(into), expected.other)
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
        seq = self._send(Kind.READ, READ_HEAD.pack(buffer, offset, len(into)))
        if self.observer is not None:
            self.observer.copied(seq, len(into), to_device=False)
        self._started.append(_StartedRead(seq, len(into), self._channel.expect(into, Kind.DATA), owner))

    @property
    def many_reads_started(self) -> bool:
        """Whether half of the `MAX_STARTED_READS` reads are unanswered, so that `fetch` may soon have to wait."""
        return len(self._started) >= MAX_STARTED_READS // 2

    def finish_reads(self, seq: int | None = None) -> None:
        """Wait for the reads that `fetch` started: all of them, or those up to the frame `seq`.

        Raises:
            RemoteOperationError: a read failed, or an operation before it.
            ExecutorLostError: the connection to the executor ended.
        """
        try:
            for coming in self._started:
                if seq is not None and coming.seq > seq:
                    break
                self._channel.complete(coming.expected)
        except ChannelError as e:
            raise self._fail(e) from e
        self._process_answers()
        self._raise_failed()

    @property
    def position(self) -> int:
        """Sequence number of the last sent frame."""
        return self._last

    def reach(self, position: int) -> bool:
        """Wait until all frames up to `position` have been executed, if a started read after `position` exists.

        Returns:
            False if no such read exists. Then it is unknown whether the frames have been executed.

        Raises:
            RemoteOperationError: an operation failed.
            ExecutorLostError: the connection to the executor ended.
        """
        if self._lost is not None:
            raise self._lost
        seq = next((c.seq for c in self._started if c.seq >= position), None)
        if seq is not None:
            self.finish_reads(seq)
        return self._answered >= position

    def _process_answers(self) -> None:
        """Process the answers to `fetch` that have arrived. The first error is kept for the next call that waits."""
        while self._abandoned and self._abandoned[0].done:
            late = self._abandoned.popleft().other
            if late is not None and late.kind == Kind.ERROR:
                self._failed = self._failed or self._remote_error(unpack_json(late.payload))
        coming = self._started
        while coming and coming[0].expected.done:
            seq, nbytes, expected, _ = coming.popleft()
            failure = self._received(nbytes, expected.other)
            self._failed = self._failed or failure
            self._answered = seq
            while self._inflight and self._inflight[0][0] <= seq:
                self._inflight.popleft()

    def _received(self, nbytes: int, other: Frame | None) -> Exception | None:
        """Process the answer to a READ: its data, or the frame `other` that came instead. Returns the error, if any."""
        self.syncs += 1
        self.bytes_received += nbytes
        if other is None:
            return None
        if other.kind == Kind.ERROR:
            return self._remote_error(unpack_json(other.payload))
        raise self._fail(WoolyError(f"the executor sent a frame of kind {other.kind} instead of DATA"))

    def _note_all_answered(self, failure: Exception | None = None) -> None:
        """Record that all frames so far are answered.

        Raises:
            Exception: an earlier error that was kept, or else `failure`.
        """
        self._answered = self._last
        self._inflight.clear()
        self._failed = self._failed or failure
        self._raise_failed()

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _remote_error(self, error: dict[str, Any]) -> Exception:
        message, code = str(error.get("message", "")), str(error.get("code", ""))
        operation = recorded_at = None
        for seq, words, origins in self._inflight:
            index = error.get("instruction")
            if seq == error.get("seq") and isinstance(index, int) and index < len(origins):
                operation, recorded_at = self.name_of(words, index), describe_origin(origins[index])
        if code == "executor.poisoned":
            failed = self._failures.get(message)
            if failed is not None:
                code, operation, failed_at = failed
                recorded_at = f"{failed_at}, needed at {recorded_at}" if recorded_at else failed_at
        elif operation is not None:
            self._failures[message] = code, operation, recorded_at
            if len(self._failures) > _FAILURES_KEPT:
                del self._failures[next(iter(self._failures))]
        if code == "executor.out_of_memory":
            return torch.OutOfMemoryError(message + (f"\n  recorded at {recorded_at}" if recorded_at else ""))
        kind = RemoteNotImplementedError if code == "executor.missing_kernel" else RemoteOperationError
        return kind(message, operation=operation, recorded_at=recorded_at)

    # -- host copies of read buffers, valid until the buffer is written ----------------------------------------------

    recording = False

    @property
    def mirroring(self) -> bool:
        """Whether the link caches a host copy of any buffer."""
        return bool(self._mirrors)

    def mirror(self, buffer: int, key: ViewKey) -> torch.Tensor | None:
        """The cached host copy of a view; None if the view was not read since the last write to its buffer."""
        kept = self._mirrors.get(buffer)
        return None if kept is None else kept.get(key)

    def keep(self, buffer: int, key: ViewKey, host: torch.Tensor) -> None:
        """Cache the host copy of a view. If the cache exceeds `_MIRROR_LIMIT`, the oldest buffers are evicted."""
        if host.nbytes > MIRROR_ITEM_LIMIT:
            return
        self._mirrors.setdefault(buffer, {})[key] = host
        self._mirror_bytes += host.nbytes
        while self._mirror_bytes > _MIRROR_LIMIT:
            self.forget(next(iter(self._mirrors)))

    def forget(self, buffer: int) -> None:
        """Drop the cached copies of a buffer, because the buffer is written or freed."""
        kept = self._mirrors.pop(buffer, None)
        if kept is not None:
            self._mirror_bytes -= sum(host.nbytes for host in kept.values())

    # -- life --------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Read acknowledgements without waiting. Returns True if the executor has processed all runs."""
        if self._lost is not None:
            return False
        try:
            self._channel.poll_acks()
        except ChannelError as e:
            self._fail(e)
            return False
        except BaseException:
            self.interrupted = True
            raise
        return not self._inflight or self._channel.acked >= self._inflight[-1][0]

    def close(self) -> None:
        """Tell the executor that the session ends, if the connection is open, and close the connection."""
        if self._lost is None and os.getpid() == self._pid:
            try:
                self._channel.send(Kind.CLOSE)
                if self._opened_here:
                    self._channel.await_end(CLOSE_S)
            except ChannelError as e:
                self._fail(e)
        self._lost = self._lost or ExecutorLostError("this session is closed; call wooly.enable() to open another one")
        self._channel.close()
