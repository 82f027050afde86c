"""One session's data channel, seen from the client: runs, writes, reads, syncs, and what their failures mean.

Blocking and without asyncio. Called with the recorder's lock held. Turns wire errors into exceptions that name the Python line.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from wooly_bus.channel import ChannelClient, ChannelError, Expected, Frame
from wooly_wis.frames import CONTENT, MAX_CHUNK, PROTOCOL, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run, unpack_json

from wooly.errors import ExecutorLostError, ForkedProcessError, RemoteOperationError, WoolyError
from wooly.recorder import Origin, describe_origin

#: Executed runs whose origins are kept for the next answer: it, not their acknowledgement, says whether one of them failed.
RUNS_REMEMBERED = 1024
_POLL_EVERY = 64
_MIRROR_LIMIT = 64 << 20
#: Bytes up to which what was read is kept.
MIRROR_ITEM_LIMIT = 1 << 20

#: Reads that `Link.fetch` may have on their way.
COMING_LIMIT = 64

ViewKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Coming(NamedTuple):
    """A read whose answer nobody waits for yet.

    Attributes:
        seq: its frame's sequence number.
        nbytes: how much it reads.
        expected: the answer.
        owner: whose memory it goes to.
    """

    seq: int
    nbytes: int
    expected: Expected
    owner: Any


class Link:
    """The client end of a session's data channel.

    Attributes:
        bytes_sent: payload bytes sent.
        bytes_received: payload bytes received.
        syncs: answers waited for.
        device: facts of the device, as the executor told them.
        siblings: links of the session's other devices, which do not outlive this one.
        where: whom it leads to, for messages.
        sharing: equal contents are shared, so that uploads ask first.
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
    ) -> None:
        self._channel = channel
        self._last = 0
        self._pid = os.getpid()
        self.where = where
        self._inflight: deque[tuple[int, list[int], list[Origin]]] = deque()
        self._mirrors: OrderedDict[int, dict[ViewKey, torch.Tensor]] = OrderedDict()
        self._mirror_bytes = 0
        self._lost: WoolyError | None = None
        self._coming: deque[_Coming] = deque()
        self._failed: Exception | None = None
        #: Highest sequence number up to which it is known whether anything failed.
        self._answered = 0
        self.name_of: Callable[[list[int], int], str] = lambda words, instruction: ""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.syncs = 0
        self.siblings: list[Link] = []
        self._sources: set[bytes] = set()
        self.sharing = False
        hello = {"protocol": PROTOCOL, "session_id": session_id, "token": token, "jit": jit}
        self._send(Kind.HELLO, pack_json(hello | ({"trace": trace} if trace else {})))
        welcome = self._answer(Kind.WELCOME, timeout)
        self.device: dict[str, Any] = welcome.get("device", {})
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
            raise self._lose(e) from e

    def _lose(self, cause: Exception) -> WoolyError:
        for sibling in self.siblings:
            sibling.look()  # the router ends a session whose first link broke: that one is the cause to name
        return self._over(cause)

    def _over(self, cause: Exception) -> WoolyError:
        if self._lost is None:
            self._lost = ExecutorLostError(
                f"lost the executor {self.where}: {cause}. What was on its device is gone; start the program again "
                "(`wooly status` shows what is running, `wooly up` starts a local stack)."
            )
            for sibling in self.siblings:
                sibling.end(self._lost)
        return self._lost

    def look(self) -> None:
        """Notice that the executor is gone. Any thread may ask; nothing is taken in."""
        if self._lost is None and self._channel.broken():
            self._over(WoolyError("the other end closed the connection"))

    def lose(self, why: str) -> None:
        """The session is over, says the router. Any thread may tell; whoever waits on any of its links is woken."""
        error = ExecutorLostError(
            f"lost the executor: {why}. What was on its device is gone; start the program again "
            "(`wooly status` shows what is running, `wooly up` starts a local stack)."
        )
        for link in (self, *self.siblings):
            link.end(error)

    def end(self, error: WoolyError) -> None:
        """The session is over because of another device. Wakes whoever waits here."""
        if self._lost is None:
            self._lost = error
            self._channel.abort()

    def define(self, program: bytes) -> None:
        """Tell the executor a program; it checks it before the first run."""
        self._send(Kind.DEFINE, program)

    def source(self, name: bytes, raw: bytes) -> None:
        """Tell the executor the source of kernels, once, before a program names it.

        Args:
            name: its digest.
            raw: as `wooly_wis.foreign.encode_source` writes it.
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
        """Send one run. Returns its sequence number, under which a failure will be reported."""
        seq = self._send(Kind.RUN, pack_run(digest, bindings, params, frees, reply=reply))
        inflight = self._inflight
        inflight.append((seq, words, origins))
        if len(inflight) > RUNS_REMEMBERED + _POLL_EVERY:
            # A program that never waits for an answer would not see an acknowledgement otherwise.
            self.poll()
            acked = self._channel.acked
            while len(inflight) > RUNS_REMEMBERED and inflight[0][0] <= acked:
                inflight.popleft()
        return seq

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """Put `data` into a buffer at a byte offset. Returns when the bytes have left this process's memory."""
        for at in range(0, len(data), MAX_CHUNK):
            chunk = data[at : at + MAX_CHUNK]
            self._send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), chunk)

    def offer(self, buffer: int, nbytes: int, name: bytes, *, head: bool) -> bool:
        """Whether a content is on the device already; the buffer has it then. With `head`, whether one begins with that chunk."""
        self._send(Kind.OFFER, CONTENT.pack(buffer, nbytes, head, name))
        return bool(self._answer(Kind.RESULT).get("known"))

    def seal(self, buffer: int, nbytes: int, name: bytes) -> None:
        """All of a buffer is written, and this is its content: others may share it."""
        self._send(Kind.SEAL, CONTENT.pack(buffer, nbytes, 0, name))

    def pin(self, do: str, name: str = "") -> dict[str, Any]:
        """Keep what this session shares on the device under a name (`add`), let it go (`remove`), or `list` what is kept.

        Raises:
            WoolyError: it cannot be; the message says why.
        """
        self._send(Kind.PIN, pack_json({"do": do, "name": name}))
        answer = self._answer(Kind.RESULT)
        if "error" in answer:
            raise WoolyError(answer["error"])
        return answer

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, kind: Kind, timeout: float | None = None) -> dict[str, Any]:
        try:
            frame = self._channel.recv(timeout)
        except ChannelError as e:
            raise self._lose(e) from e
        self.syncs += 1
        self.bytes_received += len(frame.payload)
        self._take_in()
        if frame.kind == Kind.ERROR:
            error = self._remote_error(unpack_json(frame.payload))
            self._all_answered()
            raise error
        if frame.kind != kind:
            raise self._lose(WoolyError(f"expected a {kind.name} frame, got kind {frame.kind}"))
        return unpack_json(frame.payload)

    def result(self) -> dict[str, Any]:
        """The answer to a run that asked for one."""
        answer = self._answer(Kind.RESULT)
        self._all_answered()
        return answer

    def sync(self) -> None:
        """Wait until everything sent so far has been executed.

        Raises:
            RemoteOperationError: something since the last answer failed.
            ExecutorLostError: the executor is gone.
        """
        self._send(Kind.SYNC)
        self._answer(Kind.RESULT)
        self._all_answered()

    def stats(self) -> dict[str, Any]:
        """The executor's counters for this session."""
        self._send(Kind.STATS)
        return self._answer(Kind.RESULT)

    def read(self, buffer: int, offset: int, into: memoryview) -> None:
        """Fill `into` from a buffer at a byte offset, straight into its memory.

        Raises:
            RemoteOperationError: what was to be read, or something before it, failed.
        """
        self._send(Kind.READ, READ_HEAD.pack(buffer, offset, len(into)))
        try:
            other = self._channel.recv_data(into, Kind.DATA)
        except ChannelError as e:
            raise self._lose(e) from e
        self._take_in()
        failure = self._received(len(into), other)
        self._all_answered(failure)

    def fetch(self, buffer: int, offset: int, into: memoryview, owner: Any) -> None:
        """Begin to fill `into` from a buffer at a byte offset. It is there once anything that was sent later is answered.

        Whoever waits next is told if it could not be.

        Args:
            buffer: whose bytes.
            offset: where they begin.
            into: where they go, at most `ANSWER_COPIED` bytes: the executor does not wait until such an answer is taken, so that
                neither end ever waits for the other to receive.
            owner: is kept alive until they are there.
        """
        if len(self._coming) >= COMING_LIMIT:
            self.settle()
        seq = self._send(Kind.READ, READ_HEAD.pack(buffer, offset, len(into)))
        self._coming.append(_Coming(seq, len(into), self._channel.expect(into, Kind.DATA), owner))

    @property
    def fetching_many(self) -> bool:
        """Whether so many answers to `fetch` are to come that it may have to wait for them before long."""
        return len(self._coming) >= COMING_LIMIT // 2

    def settle(self, seq: int | None = None) -> None:
        """Wait for what `fetch` began, all of it or up to a frame.

        Raises:
            RemoteOperationError: what was to be read, or something before it, failed.
            ExecutorLostError: the executor is gone.
        """
        try:
            for coming in self._coming:
                if seq is not None and coming.seq > seq:
                    break
                self._channel.complete(coming.expected)
        except ChannelError as e:
            raise self._lose(e) from e
        self._take_in()
        self._raise_failed()

    @property
    def position(self) -> int:
        """Sequence number of the last frame that was sent."""
        return self._last

    def reach(self, position: int) -> bool:
        """Wait until everything up to a position has been executed, if an answer that is on its way says so; else False.

        Raises:
            RemoteOperationError: something failed.
            ExecutorLostError: the executor is gone.
        """
        if self._lost is not None:
            raise self._lost
        seq = next((c.seq for c in self._coming if c.seq >= position), None)
        if seq is not None:
            self.settle(seq)
        return self._answered >= position

    def _take_in(self) -> None:
        """Note the answers to `fetch` that have come; a failure is kept for who waits."""
        coming = self._coming
        while coming and coming[0].expected.done:
            seq, nbytes, expected, _ = coming.popleft()
            failure = self._received(nbytes, expected.other)
            self._failed = self._failed or failure
            self._answered = seq
            while self._inflight and self._inflight[0][0] <= seq:
                self._inflight.popleft()

    def _received(self, nbytes: int, other: Frame | None) -> Exception | None:
        """Note the answer to a READ: its data, or the frame that came instead. Returns what failed."""
        self.syncs += 1
        self.bytes_received += nbytes
        if other is None:
            return None
        if other.kind == Kind.ERROR:
            return self._remote_error(unpack_json(other.payload))
        raise self._lose(WoolyError(f"expected DATA, got frame kind {other.kind}"))

    def _all_answered(self, failure: Exception | None = None) -> None:
        """The last frame is answered, and all before it are.

        Raises:
            Exception: `failure`, or what failed before it and was kept.
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
        if code == "executor.out_of_memory":
            return torch.OutOfMemoryError(message + (f"\n  recorded at {recorded_at}" if recorded_at else ""))
        return RemoteOperationError(message, operation=operation, recorded_at=recorded_at)

    # -- what was read is kept until its buffer is written -----------------------------------------------------------

    recording = False

    @property
    def mirroring(self) -> bool:
        """Whether any buffer's content is kept here."""
        return bool(self._mirrors)

    def mirror(self, buffer: int, key: ViewKey) -> torch.Tensor | None:
        """The host copy of a view, if it was read before and its buffer has not been written since."""
        kept = self._mirrors.get(buffer)
        return None if kept is None else kept.get(key)

    def keep(self, buffer: int, key: ViewKey, host: torch.Tensor) -> None:
        """Remember what was read. Old entries go when the total passes 64 MiB."""
        if host.nbytes > MIRROR_ITEM_LIMIT:
            return
        self._mirrors.setdefault(buffer, {})[key] = host
        self._mirror_bytes += host.nbytes
        while self._mirror_bytes > _MIRROR_LIMIT:
            self.forget(next(iter(self._mirrors)))

    def forget(self, buffer: int) -> None:
        """The buffer is being written or has died."""
        kept = self._mirrors.pop(buffer, None)
        if kept is not None:
            self._mirror_bytes -= sum(host.nbytes for host in kept.values())

    # -- life --------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take in acknowledgements without waiting. True if the executor has caught up with everything sent."""
        if self._lost is not None:
            return False
        try:
            self._channel.poll_acks()
        except ChannelError as e:
            self._lose(e)
            return False
        return not self._inflight or self._channel.acked >= self._inflight[-1][0]

    def close(self) -> None:
        """End the session cleanly if it still lives."""
        if self._lost is None and os.getpid() == self._pid:
            try:
                self._channel.send(Kind.CLOSE)
            except ChannelError as e:
                self._lose(e)
        self._lost = self._lost or ExecutorLostError("this session is closed")
        self._channel.close()
