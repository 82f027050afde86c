"""The client's end of one data channel: sends runs, writes, reads and syncs, and translates their errors.

Calls block; there is no asyncio here. Callers hold the recorder's lock. An error frame becomes an exception that names the Python
line which recorded the failed operation.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from wooly_bus.channel import ChannelClient, ChannelClosedError, ChannelError
from wooly_bus.contents import chunk_digest
from wooly_wis.frames import (
    BUFFERS_AT_ONCE,
    BUFFERS_HEAD,
    CONTENT,
    CUT_HEAD,
    MAX_CHUNK,
    PROFILE_HEAD,
    PROTOCOL,
    READ_HEAD,
    RESTORE_HEAD,
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

from wooly.departures import STAYS, HibernatedChannel
from wooly.distributed.errors import RemoteCollectiveError
from wooly.errors import (
    ExecutorLostError,
    ForkedProcessError,
    ReleaseError,
    RemoteNotImplementedError,
    RemoteOperationError,
    WoolyError,
)
from wooly.recorder import Origin, describe_origin
from wooly.recovery import ERROR, KEPT, DifferentResultError, KeptFrame, Pending, Recovery, kind_of

if TYPE_CHECKING:
    from wooly_wis.messages import DirectSession

    from wooly.contents import OfferPolicy

#: Errors of operations by the executor's code.
_ERRORS: dict[str, type[RemoteOperationError]] = {
    "executor.missing_kernel": RemoteNotImplementedError,
    "executor.collective": RemoteCollectiveError,
}
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
#: Maximum time, in seconds, that another executor takes to answer the hello of a session that goes on there.
RESTORE_S = 30.0
#: Seconds after which a hibernated session that found no executor asks for one again. The timer that sends open programs would
#: otherwise ask all the time.
WAKE_AGAIN_S = 5.0
#: Maximum number of reads that `Link.fetch` has started and that are not answered.
MAX_STARTED_READS = 64

ViewKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


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
        recovery: keeps frames, so that the session can go on in another executor; None: it ends with its executor.
        log: records what the session sends; None: nobody records it.
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
        self._inflight: deque[tuple[int, list[int] | str, list[Origin]]] = deque()
        self._mirrors: OrderedDict[int, dict[ViewKey, torch.Tensor]] = OrderedDict()
        self._mirror_bytes = 0
        self._lost: WoolyError | None = None
        self._started: deque[_StartedRead] = deque()
        #: Answers for which a caller stopped to wait, because a signal handler raised an exception.
        self._abandoned: deque[Pending] = deque()
        #: The answer to the last run with `reply`.
        self._reply: Pending | None = None
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
        self.recovery: Recovery | None = None
        self.log: SessionLog | None = None
        #: Number of the log's frames when the last cut was asked for.
        self._cut_at = 0
        #: Numbers of frames, as this link counts, minus numbers of the channel; and the former of frames that were sent again.
        self._shift = 0
        self._replayed: dict[int, int] = {}
        #: Number of the last frame that was sent again at the last recovery.
        self._resumed_at = 0
        #: When a hibernated session may be woken again, and why the last attempt failed.
        self._not_woken: tuple[float, WoolyError] | None = None
        self._why = ""
        self._kept: KeptFrame | None = None
        self._hello = {"protocol": PROTOCOL, "jit": jit} | ({"trace": trace} if trace else {})
        hello: dict[str, Any] = self._hello | {"session_id": session_id, "token": token}
        if opens is not None:
            hello["session"] = opens.model_dump()
        try:
            welcome = self._greet(hello, timeout)
        except ChannelError as e:
            raise self._fail(e) from e
        self._last = 1
        self._meet(welcome)

    def _meet(self, welcome: dict[str, Any]) -> None:
        """Note what the executor is."""
        self.device: dict[str, Any] = welcome.get("device", {})
        self._executor_kind = kind_of(self.device)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _greet(self, hello: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send the hello and wait for the answer."""
        channel = self._channel
        channel.send(Kind.HELLO, pack_json(hello))
        answer = channel.recv(timeout)
        if answer.kind == Kind.ERROR:
            raise self._remote_error(unpack_json(answer.payload))
        if answer.kind != Kind.WELCOME:
            raise self._fail(WoolyError(f"the executor answered a hello with a frame of kind {answer.kind}"))
        welcome = unpack_json(answer.payload)
        if why := mismatch(torch.__version__, str(welcome.get("device", {}).get("torch_version", ""))):
            raise ReleaseError(f"cannot use {self.where}: {why}.")
        channel.window = int(welcome.get("window", channel.window))
        return welcome

    def _send(self, kind: Kind, *buffers: Any, into: memoryview | None = None, asks: bool = False) -> int:
        if self._lost is not None:
            raise self._lost
        if os.getpid() != self._pid:
            raise ForkedProcessError
        for b in buffers:
            self.bytes_sent += len(b)
        recovery = self.recovery
        frame = None
        if recovery is not None:
            frame = recovery.keep(kind, buffers, into, asks=asks) if kind in KEPT else None
            self._kept = frame
        try:
            self._last = seq = self._channel.send(kind, *buffers) + self._shift
        except ChannelError as e:
            try:
                self._recover(e)  # sends the frame, if it is kept
            except BaseException:
                if self._lost is None:  # the session still hibernates, or a signal handler ended the recovery
                    self._not_sent(frame)
                raise
            return self._send(kind, *buffers) if frame is None else frame.seq
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
        """End all links of the session, because the router ended it. Any thread may call this; waiting threads wake up.

        A session that can go on elsewhere loses its executor instead.
        """
        if self.recovery is not None and self._lost is None:
            self._why = why
            self._channel.abort()
            return
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
        if self.recovery is not None:
            self.recovery.define(program)
        if self.log is not None:
            self.log.defined(program)
        self._send(Kind.DEFINE, program)

    def source(self, name: bytes, raw: bytes) -> None:
        """Send the source of foreign kernels to the executor, once per session, before a program refers to it.

        Args:
            name: digest of the source.
            raw: the source, encoded by `wooly_wis.foreign.encode_source`.
        """
        if name not in self._sources:
            if self.recovery is not None:
                self.recovery.sources.append(raw)
            self._send(Kind.SOURCE, raw)
            self._sources.add(name)
            if self.log is not None:
                self.log.source(raw)

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
        if self.recovery is not None:
            self._cut_if_due(self.recovery)
        self._prune()
        payload = pack_run(digest, bindings, params, frees, reply=reply)
        seq = self._send(Kind.RUN, payload, asks=reply)
        tell = None if self.log is None else self.log.ran(payload, origins)
        if reply:
            kept = self._kept
            again = None if kept is None else kept.pending  # a recovery has sent the run again
            self._reply = again or Pending(self._channel.expect_frame(), kept)
            self._reply.tell = tell
        self._inflight.append((seq, words, origins))
        if self.observer is not None:
            self.observer.ran(seq, words, origins)
        return seq

    def _prune(self) -> None:
        """Forget the origins of old runs, if there are too many."""
        inflight = self._inflight
        if len(inflight) > RUNS_REMEMBERED + _POLL_EVERY:
            # A program that never waits for an answer reads acknowledgements only here.
            self.poll()
            acked = self._channel.acked + self._shift
            while len(inflight) > RUNS_REMEMBERED and inflight[0][0] <= acked:
                inflight.popleft()

    def collective(self, payload: bytes, name: str, where: Origin) -> None:
        """Send this rank's part in a collective.

        Args:
            payload: the content of the COLLECTIVE frame.
            name: what it is, for messages.
            where: the Python line that asks for it.

        Raises:
            WoolyError: the session is being recorded.
        """
        if self.log is not None:
            raise WoolyError("`wooly record` cannot record the collectives of torch.distributed")
        self._prune()
        seq = self._send(Kind.COLLECTIVE, payload)
        self._inflight.append((seq, name, [where]))

    def introduce(self, payload: bytes, where: Origin) -> None:
        """Tell the executor which other executor carries the collectives of a group: send a GROUP frame."""
        self._inflight.append((self._send(Kind.GROUP, payload), "torch.distributed.new_group", [where]))

    def stay(self, why: str) -> None:
        """From now on, the session ends with its executor and is not moved."""
        recovery, self.recovery = self.recovery, None
        if recovery is not None:
            recovery.tell_given_up(why)

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """Write `data` into a buffer at a byte offset. After the return, the caller may change `data`."""
        if self.recovery is not None:
            self._cut_if_due(self.recovery)
        for at in range(0, len(data), MAX_CHUNK):
            chunk = data[at : at + MAX_CHUNK]
            seq = self._send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), chunk)
            if self.log is not None:
                self.log.wrote(buffer, offset + at, chunk)
            if self.observer is not None:
                self.observer.copied(seq, len(chunk), to_device=True)

    def keep_content(self, buffer: int, data: memoryview) -> None:
        """Note the content of a buffer that the device had already, and that was therefore not sent."""
        if self.recovery is not None:
            self._cut_if_due(self.recovery)
            for at in range(0, len(data), MAX_CHUNK):
                kept = self.recovery.keep(Kind.WRITE, (WRITE_HEAD.pack(buffer, at), data[at : at + MAX_CHUNK]))
                kept.seq = self._last
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
        self._send(Kind.SEAL, CONTENT.pack(buffer, nbytes, 0, name))

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

    def _wait(self, pending: Pending) -> bool:
        """Wait for an answer. If a signal handler raises an exception meanwhile, the answer is taken in when it arrives.

        Returns:
            False if the session went on elsewhere and the question must be asked again, because its frame was not kept.
        """
        while True:
            try:
                self._channel.complete(pending.expected)
                return True
            except ChannelError as e:
                self._recover(e)
                if pending.frame is None:
                    return False
            except BaseException:
                if not pending.expected.done:
                    self._abandoned.append(pending)
                raise

    def _answer(self, ask: Kind, *payload: bytes) -> dict[str, Any]:
        return unpack_json(self._payload(ask, *payload))

    def _payload(self, ask: Kind, *payload: bytes, kind: Kind = Kind.RESULT) -> bytes:
        """Send a frame that does not change the session, and wait for the answer."""
        while True:
            self._send(ask, *payload)
            pending = Pending(self._channel.expect_frame())
            if self._wait(pending):
                break
        other = pending.expected.other
        if other is not None and other.kind == Kind.ERROR:  # the answer has taken the session's error
            if self.recovery is not None:
                kept = self.recovery.keep(ask, payload)
                kept.seq = self._last
                kept.answered(ERROR, self._executor_kind)
            if self.log is not None:
                self.log.failed(self.log.frames)
        return self._take_answer(pending, kind)

    def _take_answer(self, pending: Pending, kind: Kind) -> bytes:
        frame = pending.expected.other
        assert frame is not None
        self.syncs += 1
        self.bytes_received += len(frame.payload)
        self._process_answers()
        pending.answered(frame, by=self._executor_kind)
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
        if not self._wait(pending):
            raise self._fail(WoolyError("the answer to a run was lost"))
        answer = unpack_json(self._take_answer(pending, Kind.RESULT))
        self._note_all_answered()
        return answer

    def sync(self) -> None:
        """Wait until everything sent so far has been executed.

        Raises:
            RemoteOperationError: an operation since the last answer failed.
            ExecutorLostError: the connection to the executor ended.
        """
        self._answer(Kind.SYNC)
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
        if sync_debug.mode:
            sync_debug.note()
        _, pending = self._begin_read(buffer, offset, into)
        if not self._wait(pending):
            raise self._fail(WoolyError("the answer to a read was lost"))
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
        seq = self._send(Kind.READ, READ_HEAD.pack(buffer, offset, len(into)), into=into, asks=True)
        kept = self._kept
        again = None if kept is None else kept.pending  # a recovery has sent the frame again
        pending = again or Pending(self._channel.expect(into, Kind.DATA), kept)
        if self.log is not None:
            pending.tell = self.log.asked(buffer, offset, len(into))
        if self.observer is not None:
            self.observer.copied(seq, len(into), to_device=False)
        return seq, pending

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
        for coming in list(self._started):
            if seq is not None and coming.seq > seq:
                break
            if not coming.pending.expected.done:
                self._wait(coming.pending)
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
        while self._abandoned and self._abandoned[0].expected.done:
            pending = self._abandoned.popleft()
            late = pending.expected.other
            if late is not None:
                pending.answered(late, by=self._executor_kind)
            elif pending.frame is not None and pending.frame.into is not None:
                pending.answered(None, pending.frame.into, by=self._executor_kind)
            if late is not None and late.kind == Kind.ERROR:
                self._failed = self._failed or self._remote_error(unpack_json(late.payload))
        coming = self._started
        while coming and coming[0].pending.expected.done:
            seq, into, pending, _ = coming.popleft()
            failure = self._received(into, pending)
            self._failed = self._failed or failure
            self._answered = seq
            while self._inflight and self._inflight[0][0] <= seq:
                self._inflight.popleft()
        if self.recovery is not None:
            self._take_cut(self.recovery)

    def _received(self, into: memoryview, pending: Pending) -> Exception | None:
        """Process the answer to a READ: its data, or another frame that came instead. Returns the error, if any."""
        self.syncs += 1
        self.bytes_received += len(into)
        other = pending.expected.other
        pending.answered(other, into, by=self._executor_kind)
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
        at = int(error.get("seq", 0))
        at = self._replayed.get(at, at + self._shift)
        for seq, words, origins in self._inflight:
            index = error.get("instruction")
            if seq == at and isinstance(index, int) and index < len(origins):
                operation = words if isinstance(words, str) else self.name_of(words, index)
                recorded_at = describe_origin(origins[index])
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
        kind = _ERRORS.get(code, RemoteOperationError)
        return kind(message, operation=operation, recorded_at=recorded_at)

    # -- going on in another executor ----------------------------------------------------------------------------------

    def _cut_if_due(self, recovery: Recovery) -> None:
        """Ask for a cut if one is due. If too much is kept, wait until one is stored, or give recovery up."""
        if recovery.answer is not None:
            if not recovery.over and not recovery.answer.done:
                return
            if not self._wait(Pending(recovery.answer)):
                return
            self._take_cut(recovery)
        while recovery.over:
            self._ask_cut(recovery, wait=True)
            if recovery.answer is not None and self._wait(Pending(recovery.answer)):
                self._take_cut(recovery)
            if recovery.given_up:
                break
        if why := recovery.given_up:
            self.recovery = None
            recovery.tell_given_up(why)
        elif recovery.due:
            self._ask_cut(recovery, wait=False)

    def _ask_cut(self, recovery: Recovery, *, wait: bool) -> None:
        number = recovery.begin()
        self._send(Kind.CUT, CUT_HEAD.pack(number, recovery.stored, wait))
        self._cut_at = 0 if self.log is None else self.log.frames
        recovery.answer = self._channel.expect_frame()

    def _take_cut(self, recovery: Recovery) -> None:
        """Process the answer to the last CUT, if it has arrived."""
        answer = recovery.answer
        if answer is None or not answer.done or answer.other is None:
            return
        recovery.answer = None
        if answer.other.kind == Kind.ERROR:
            self._failed = self._failed or self._remote_error(unpack_json(answer.other.payload))
            recovery.failed()
            if self.log is not None:
                self.log.failed(self._cut_at)
        else:
            recovery.taken(unpack_json(answer.other.payload))

    # The callers of these functions hold the recorder's lock, too.

    @property
    def next_cut(self) -> int:
        """Number of the next cut."""
        return 0 if self.recovery is None else self.recovery.number + 1

    def advance_cut(self, number: int) -> bool:
        """Bring about, without waiting, that a cut with this number is stored. Returns False if that takes longer.

        Returns True, too, if there is nothing to store, the cut failed, or the session cannot go on elsewhere any more.
        """
        self.poll()
        recovery = self.recovery
        if recovery is None or self._lost is not None or recovery.complete or recovery.hibernates:
            return True
        self._take_cut(recovery)
        if recovery.stored >= number or (recovery.failure and recovery.number >= number):
            return True
        if recovery.answer is None:
            self._ask_cut(recovery, wait=False)
        return False

    def cut_here(self) -> str:
        """Wait until a cut of the session as it is now is stored. Returns why there is none; empty: it is stored."""
        for _ in range(3):  # the answer to an earlier CUT, its storing, and the cut itself
            recovery = self.recovery
            if recovery is None:
                return "it cannot go on in another executor any more"
            if recovery.answer is None and not recovery.complete:
                self._ask_cut(recovery, wait=True)
            if recovery.answer is not None and self._wait(Pending(recovery.answer)):
                self._take_cut(recovery)
            if recovery.complete:
                return ""
        return (recovery and recovery.failure) or "its checkpoint is not stored"

    def move(self, why: str, begun: float) -> None:
        """Go on in another executor.

        Args:
            why: the reason.
            begun: since when the script waits, on the monotonic clock.

        Raises:
            WoolyError: there is no room elsewhere any more; the session stays. Or the session has ended.
        """
        recovery = self.recovery
        if recovery is None or self._lost is not None or recovery.hibernates:
            return
        recovery.say(f"wooly: the session leaves the executor {self.where}: {why} ...")
        try:
            self._go_on(recovery, why, begun, leaves=True)
        except WoolyError as e:
            if e.code == STAYS:
                recovery.say(f"wooly: the session stays: {e}")
                raise
            raise self._fail(e) from e

    def hibernate(self, why: str) -> None:
        """Leave the executor until the next operation. The last cut has everything that the session did.

        Raises:
            WoolyError: the controller refuses.
        """
        recovery = self.recovery
        if recovery is None or self._lost is not None or recovery.hibernates:
            return
        recovery.hibernate(recovery.stored, why)
        self._channel.close()
        self._channel = HibernatedChannel(self._last - self._shift)
        recovery.hibernates = True
        recovery.say(f"wooly: the session hibernates: {why}. Its next operation wakes it")

    def wake(self, why: str) -> None:
        """End the hibernation.

        Raises:
            ExecutorLostError: the session cannot go on.
            WoolyError: no executor has room now, or the controller does not answer. The session still hibernates.
        """
        recovery = self.recovery
        if recovery is None or self._lost is not None or not recovery.hibernates:
            return
        begun = time.monotonic()
        if self._not_woken is not None and begun < self._not_woken[0]:
            raise self._not_woken[1]
        recovery.say(f"wooly: the session wakes up: {why} ...")
        try:
            self._go_on(recovery, why, begun)
        except WoolyError as e:
            if not recovery.hibernates:
                raise self._fail(e) from e
            recovery.say(f"wooly: the session still hibernates: {e}")
            self._not_woken = time.monotonic() + WAKE_AGAIN_S, e
            raise

    def go_on(self) -> None:
        """Go on in another executor now, if the connection is broken. The caller holds the recorder's lock."""
        if self._lost is None and self.recovery is not None and self._channel.broken():
            cause: ChannelError = ChannelClosedError("the connection broke")
            try:
                self._channel.poll_acks()  # the executor may have said why
            except ChannelError as e:
                cause = e
            self._recover(cause)

    def _recover(self, cause: ChannelError) -> None:
        """Go on in another executor after the loss of this one, or at the end of the hibernation.

        Raises:
            ExecutorLostError: the session cannot go on.
            WoolyError: a hibernated session does not find an executor now. It still hibernates.
        """
        recovery = self.recovery
        if recovery is None or self._lost is not None or not cause.passing:
            raise self._fail(cause) from cause
        begun = time.monotonic()
        if recovery.hibernates and not self._channel.broken():
            self.wake("its script goes on")
            return
        why, self._why = self._why or str(cause), ""
        recovery.say(f"wooly: lost the executor {self.where}: {why}. The session goes on in another executor ...")
        try:
            self._go_on(recovery, why, begun)
        except WoolyError as e:
            raise self._fail(e) from cause

    def _go_on(self, recovery: Recovery, why: str, begun: float, *, leaves: bool = False) -> None:
        """Open the session at another executor, and bring it there to where it was. `leaves`: it still has its executor.

        Raises:
            WoolyError: the session cannot go on.
        """
        with recovery.around(why):
            self._reopen(recovery, why, leaves)
        took = time.monotonic() - begun
        recovery.resumed = took, sum([frame.kind != Kind.CUT for frame in recovery.frames])
        recovery.say(f"wooly: the session goes on in the executor {self.where}, after {took:.1f} s")

    def _reopen(self, recovery: Recovery, why: str, leaves: bool) -> None:
        while True:
            reached = max(self._channel.acked + self._shift, self._answered)
            if not recovery.begun(progress=reached > self._resumed_at):
                raise WoolyError(f"{why}; the session has gone on elsewhere too often lately")
            try:
                there, leaves = recovery.reopen(why, recovery.stored, leaves), False
                self._channel.close()
                self._channel, self.where, recovery.hibernates = there.channel, there.where, False
                hello = self._hello | {"session_id": there.session_id, "token": there.token}
                self._meet(self._greet(hello, RESTORE_S))
                self._replay(recovery)
                return
            except ChannelError as e:
                why = str(e)
            except WoolyError:
                raise
            except BaseException:  # of a signal handler: the next use recovers again
                if not recovery.hibernates:
                    self._channel.abort()
                raise

    def _replay(self, recovery: Recovery) -> None:
        """Bring the session in the new executor to where it was: restore the last cut and send all kept frames again.

        Raises:
            WoolyError: the cut cannot be restored, or a result differs.
            ChannelError: this connection broke, too.
        """
        channel = self._channel
        self._abandoned = deque([p for p in self._abandoned if p.frame is not None])
        if recovery.stored:
            channel.send(Kind.RESTORE, RESTORE_HEAD.pack(recovery.stored))
            answer = channel.recv()
            if answer.kind == Kind.ERROR:
                raise WoolyError(str(unpack_json(answer.payload).get("message")))
        for raw in recovery.sources:
            channel.send(Kind.SOURCE, raw)
        defined = recovery.newest_programs()
        for raw in defined.values():
            channel.send(Kind.DEFINE, raw)
        numbers: dict[int, int] = {}
        other = ""
        for frame in recovery.frames:
            if frame.kind == Kind.CUT:
                continue
            if frame.kind == Kind.RUN and (missing := recovery.undefined(frame, defined)):
                channel.send(Kind.DEFINE, missing)
            sent = channel.send(frame.kind, frame.payload)
            if not frame.seq:
                self._last += 1
                frame.seq = self._last
            numbers[sent] = frame.seq
            if frame.answer:
                other = self._compare(channel, frame) or other
            elif frame.asks:
                into = frame.into
                expected = channel.expect_frame() if into is None else channel.expect(into, Kind.DATA)
                if frame.pending is None:
                    Pending(expected, frame)
                else:
                    frame.pending.expected = expected
        self._replayed = numbers
        self._resumed_at = self._last
        if other:
            told = f"results that the script has read differ on {self._executor_kind} from those of {other}"
            recovery.say(f"wooly: {told}; the session goes on")
            recovery.note(told)
        sent = channel.send(Kind.SYNC)
        self._shift = self._last - sent
        done = channel.expect_frame()
        channel.complete(done)
        assert done.other is not None
        if done.other.kind == Kind.ERROR:
            self._failed = self._failed or self._remote_error(unpack_json(done.other.payload))
            if self.log is not None:
                self.log.failed(self.log.frames)

    def _compare(self, channel: ChannelClient, frame: KeptFrame) -> str:
        """Receive an answer that the script has read before, and compare it.

        Returns:
            The kind of the executor that gave the earlier answer, if it is another kind and its answer differs; else nothing.

        Raises:
            DifferentResultError: it differs, and both executors are of one kind; or only one of the answers is an error.
        """
        if frame.kind == Kind.READ:
            into = memoryview(bytearray(READ_HEAD.unpack(frame.payload)[2]))
            other = channel.recv_data(into, Kind.DATA)
            answer = chunk_digest(into) if other is None else ERROR
        else:
            found = channel.recv()
            answer = ERROR if found.kind == Kind.ERROR else chunk_digest(memoryview(found.payload))
        if answer == frame.answer:
            return ""
        if ERROR in (answer, frame.answer):
            said = "fails" if answer == ERROR else "succeeds"
            raise DifferentResultError(
                f"after the recovery, an operation {said} on {self._executor_kind} whose earlier answer was another: the "
                f"script read it from {frame.by or self._executor_kind}"
            )
        if frame.by == self._executor_kind:
            raise DifferentResultError(
                "after the recovery, a result differs from the one that the script has read, and both executors are "
                f"{self._executor_kind}: the operation does not repeat"
            )
        return frame.by

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
            if self.recovery is None:
                self._fail(e)
            else:
                with contextlib.suppress(WoolyError):  # the next call raises it
                    self._recover(e)
            return False
        except BaseException:
            self.interrupted = True
            raise
        return not self._inflight or self._channel.acked + self._shift >= self._inflight[-1][0]

    def close(self) -> None:
        """Tell the executor that the session ends, if the connection is open, and close the connection."""
        if self._lost is None and os.getpid() == self._pid:
            try:
                self._channel.send(Kind.CLOSE)
                if self._opened_here or (self.recovery is not None and self.recovery.number):
                    self._channel.await_end(CLOSE_S)
            except ChannelError as e:
                self._fail(e)
        self._lost = self._lost or ExecutorLostError("this session is closed; call wooly.enable() to open another one")
        self._channel.close()
