"""The carrier of ranks whose sessions are on one executor: a COLLECTIVE frame per collective. The data stays on the device.

The frame travels in the order of the rank's work, so nothing waits in the script. The executor brings the ranks together. Errors
come at the next wait, like those of other operations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.collectives import Collective, Range, What, pack_collective, with_sequence

from wooly.devices import Devices, shown
from wooly.distributed.carrier import Work
from wooly.distributed.rounds import rounds
from wooly.distributed.together import Together
from wooly.dtypes import DTYPES
from wooly.errors import WoolyError
from wooly.link import Link
from wooly.origins import Origin, describe_origin, origin
from wooly.recorder import Capture, Recorder
from wooly.recovery import Recovery
from wooly.storage import DEVICE_MASK, ID_SHIFT, OFFSET_MASK, address_of
from wooly.torch_private import raw_device

#: Frames that were sent, by all that they contain but their number, each with the collective's name and origin. The origin keeps
#: the script's code alive: its id is in the key, and must not be reused.
Repeated = dict[tuple[Any, ...], tuple[bytes, str, Origin]]
_described = functools.lru_cache(maxsize=1024)(describe_origin)
#: Number of frames that a carrier remembers, and the maximum size of one, in bytes.
_MOST_REPEATED, _REPEATED_BYTES = 256, 1024


class Part(NamedTuple):
    """One rank's part in a collective, with ranges of buffers in place of tensors.

    Attributes:
        work: the part. Its tensors are not used.
        ranges: the ranges that it reads, and behind them those that it writes.
        n_reads: number of ranges that it reads.
        dtype: type of the elements.
        where: the Python line that asks for it.
    """

    work: Work
    ranges: list[Range]
    n_reads: int
    dtype: torch.dtype
    where: Origin


class CapturedPart:
    """One rank's part in a collective that a CUDA graph sends at each replay: see `wooly.recorder.CapturedCollective`.

    Args:
        carrier: the carrier of its group.
        recorder: the recorder that captures it.
        part: the part. Its tensors are not kept.
    """

    def __init__(self, carrier: FrameCarrier, recorder: Recorder, part: Part) -> None:
        self._carrier, self.recorder = carrier, recorder
        self.part = part._replace(work=replace(part.work, reads=(), writes=()))
        self.where = part.where
        self.name = f"torch.distributed {_name_of(part)}"
        self.repeated: Repeated = {}

    @property
    def reads(self) -> list[tuple[int, int, int]]:
        return self._spans(self.part.ranges[: self.part.n_reads])

    @property
    def writes(self) -> list[tuple[int, int, int]]:
        return self._spans(self.part.ranges[self.part.n_reads :])

    def _spans(self, ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
        size = self.part.dtype.itemsize
        return [(r.buffer, r.offset, r.offset + r.elements * size) for r in ranges]

    def bind(self, buffers: dict[int, int]) -> None:
        self.part = self.part._replace(
            ranges=[r._replace(buffer=buffers.get(r.buffer, r.buffer)) for r in self.part.ranges]
        )

    def send(self) -> None:
        self._carrier.resend(self)


class FrameCarrier:
    """Sends COLLECTIVE frames.

    Args:
        devices: the process's devices.
        link: the session's link.
        name: random id of the group.
        rank: this rank.
        size: number of ranks.
        timeout_s: maximum seconds to wait for other ranks.
        together: lets the sessions of all ranks of the program go on elsewhere together; None: they do not.
        turns_from: of the group of all ranks at whose collectives the ranks take cuts together: what is added to the numbers of
            its collectives, so that they are larger than those of former groups. None: it is another group.
        most: bytes of host memory that a collective may need, because several executors work on it, or may do so after a loss.
            Larger ones are done in rounds. None: any.
    """

    def __init__(
        self,
        devices: Devices,
        link: Link,
        name: bytes,
        rank: int,
        size: int,
        timeout_s: float,
        together: Together | None = None,
        *,
        turns_from: int | None = None,
        most: int | None = None,
    ) -> None:
        self._most = most
        self._together, self._turns_from = together, turns_from
        self._devices, self._link, self._name = devices, link, name
        self._rank, self._size, self.timeout_s = rank, size, timeout_s
        self._sequence = 0
        self._repeated: Repeated = {}  # a script sends most frames again
        self._left = False

    def carry(self, work: Work) -> None:
        """Send this rank's part."""
        for part in (work,) if self._most is None else rounds(work, self._most, self._rank, self._size):
            self._carry(part)

    def resend(self, captured: CapturedPart) -> None:
        """Send a collective that a CUDA graph has captured.

        Raises:
            RuntimeError: this rank has left the group.
            WoolyError: the session has ended.
        """
        if self._left:
            raise RuntimeError(
                f"this CUDA graph contains {captured.name}, but its process group was destroyed; capture the graph in a group "
                "that still exists"
            )
        recorder = captured.recorder
        if (capture := recorder.own_capture) is not None:  # a graph is replayed in the capture of another one
            self._capture(capture, recorder, [recorder], captured.part)
        else:
            self._go([recorder], captured.part, captured.repeated)

    def form(self) -> None:
        """Let the executors know all ranks, so that they notice if one ends: send the first BARRIER.

        After the ranks have gone back, it is not sent again, by no rank.
        """
        self._carry(Work(What.BARRIER), forming=self._together is not None)

    def _carry(self, work: Work, *, forming: bool = False) -> None:
        tensors = [*work.reads, *work.writes]
        found = {raw_device(t).index: t for t in tensors}
        recorders = [self._recorder_of(t) for t in found.values()] or self._recorders()
        where = origin()
        peers = work.peers or [0] * len(tensors)
        ranges = [_range(t, peer) for t, peer in zip(tensors, peers, strict=True)]
        part = Part(work, ranges, len(work.reads), tensors[0].dtype if tensors else torch.uint8, where)
        for recorder in recorders:
            if (capture := recorder.own_capture) is not None:
                self._capture(capture, recorder, recorders, part)
                return
        self._go(recorders, part, self._repeated, forming=forming)

    def _capture(self, capture: Capture, recorder: Recorder, recorders: Sequence[Recorder], part: Part) -> None:
        """Make a collective a part of the CUDA graph that is being captured.

        Raises:
            torch.AcceleratorError: it cannot be a part of a graph. It is CUDA's own error.
        """
        work = part.work
        if work.awaited or work.what is What.LEAVE:
            call = "barrier" if work.what is What.BARRIER else "destroy_process_group"
            capture.refuse(
                f"torch.distributed.{call} waits for the other ranks, so it cannot be a part of a CUDA graph. Move it out of the "
                "capture."
            )
        if part.ranges and len(recorders) > 1:
            capture.refuse(
                f"A collective of tensors on several devices ({', '.join([f'cuda:{r.heap.index}' for r in recorders])}) cannot "
                "be a part of a CUDA graph, which contains the work of one device. Use tensors of that device."
            )
        recorder.separate([r.buffer for r in part.ranges])
        capture.collective(CapturedPart(self, recorder, part))

    def _go(self, recorders: Sequence[Recorder], part: Part, repeated: Repeated, *, forming: bool = False) -> None:
        """Send a part under the group's next number."""
        single = part.work.what in (What.EXCHANGE, What.LEAVE)
        together, base = self._together, None if single or forming else self._turns_from
        while True:
            number = self._sequence + 1
            if base is not None and together is not None and self._recovery is not None:
                together.turn(base + number, self._recovery)  # may wait for the first rank, so without the lock
            with recorders[0].lock:
                if single or number == self._sequence + 1:
                    self._send(part, recorders, repeated, number, single=single, forming=forming)
                    if base is not None and together is not None and (cut := together.cut_behind(base + number)):
                        self._link.continuation.take_common_cut(cut)
                    return

    @property
    def _recovery(self) -> Recovery | None:
        return self._link.recovery

    def _send(
        self,
        part: Part,
        recorders: Sequence[Recorder],
        repeated: Repeated,
        number: int,
        *,
        single: bool,
        forming: bool,
    ) -> None:
        work, ranges, n_reads, dtype, where = part
        for recorder in recorders:
            recorder.separate([r.buffer for r in ranges if r.buffer & DEVICE_MASK == recorder.heap.index])
            recorder.flush()
        together = self._together
        if forming and together is not None and together.epoch:
            self._sequence += 1
            return
        writes = ranges[n_reads:]
        recovers = together is not None and self._recovery is not None and not together.over
        timeout_s = work.timeout_s or self.timeout_s
        code, at = where
        how = work.what, dtype, work.reduction, work.root, work.factor, timeout_s, recovers
        key = id(code), at, how, len(writes), *ranges
        known = repeated.get(key)
        if known is None:
            call = Collective(
                group=self._name,
                sequence=0 if single else number,
                rank=self._rank,
                size=self._size,
                timeout_ms=max(int(1e3 * timeout_s), 1),
                what=work.what,
                reads=tuple(ranges[:n_reads]),
                writes=tuple(writes),
                reduction=work.reduction,
                root=work.root,
                factor=work.factor,
                origin=_short(where),
                dtype=DTYPES[dtype],
                recovers=recovers,
            )
            known = pack_collective(call), f"torch.distributed {call.name}", where
            if len(repeated) == _MOST_REPEATED:
                repeated.clear()
            if len(known[0]) <= _REPEATED_BYTES and work.factor:  # 0.0 equals -0.0
                repeated[key] = known
        payload, name, _ = known
        for w in writes:
            self._link.forget(w.buffer)
        if work.awaited:
            self._link.hold()
        self._link.collective(payload if single else with_sequence(payload, number), name, where, once=forming)
        recorders[0].operations += 1
        self._sequence += not single

    def wait(self) -> None:
        """Wait for all work of the session."""
        for recorder in self._recorders():
            with recorder.lock:
                recorder.sync()

    def leave(self) -> None:
        """Leave the group, if the session is still open. Wait until its collectives are done, as NCCL does."""
        if any(r.own_capture is not None for r in self._devices.active() if r.link is self._link):
            self.carry(Work(What.LEAVE))  # raises CUDA's error
        self._left = True
        if self._turns_from is not None and self._together is not None:
            self._together.follow()
        with contextlib.suppress(WoolyError):
            self.carry(Work(What.LEAVE))
            with self._recorders()[0].lock:
                self._link.await_collectives()

    def _recorder_of(self, t: Tensor) -> Recorder:
        """The recorder of a tensor's device.

        Raises:
            RuntimeError: the device is not the group's.
        """
        recorder = self._devices.recorders[raw_device(t).index]
        if recorder.link is not self._link:
            raise RuntimeError(
                f"a tensor is on {shown(raw_device(t))}, which is not the device that this process group uses: its device was "
                "current when the group was made (torch.cuda.set_device)"
            )
        return recorder

    def _recorders(self) -> list[Recorder]:
        """The recorders of the group's device. A rank of torchrun has several, which share their lock."""
        found = [r for r in self._devices.active() if r.link is self._link]
        if not found:
            raise WoolyError("the session in which the process group was made has ended")
        return found


def _name_of(part: Part) -> str:
    if part.work.what is not What.EXCHANGE:
        return part.work.what.name.lower()
    return "send" if len(part.ranges) == part.n_reads else "batch_isend_irecv" if part.n_reads else "recv"


def _range(t: Tensor, peer: int) -> Range:
    at = address_of(t)
    return Range(at >> ID_SHIFT, at & OFFSET_MASK, t.numel(), peer)


def _short(where: Origin) -> str:
    return _described(where)[-256:]
