"""Copies between two devices of a session, from executor to executor: the data does not pass this process.

Each pair of devices is a group of two ranks, as in torch.distributed: the source sends, and the target receives.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from wooly_wis.collectives import GROUP_BYTES, Collective, Range, What, pack_collective

from wooly.devices import Devices
from wooly.distributed.peers import introduction, place
from wooly.origins import describe_origin, origin

#: Size, in bytes, of a piece. The executors hold the piece in host memory, on the session's account.
PIECE = 64 << 20
#: Maximum time, in ms, for which one executor waits for the other: a device may run one program for long.
TIMEOUT_MS = 24 * 3_600_000


class Hops:
    """The copies between the devices of one session.

    Args:
        devices: the process's devices.
        opened: the session, which a controller has opened (`wooly.control.OpenedSession`).
    """

    def __init__(self, devices: Devices, opened: Any) -> None:
        self._devices, self._opened = devices, opened
        self._groups: dict[tuple[int, int], bytes] = {}
        #: Without it, two threads that copy in opposite directions could send their frames in different orders to the executors.
        self._lock = threading.Lock()

    @property
    def usable(self) -> bool:
        """Whether the session ends with its executors. One that can go on elsewhere copies through this process: each of its
        devices goes on from its own checkpoint, and would wait for the part of the other one.
        """
        departures = self._opened.departures
        return departures is None or not departures.recovers

    def copy(self, source: int, at: tuple[int, int], target: int, to: tuple[int, int], nbytes: int) -> None:
        """Copy bytes of one buffer to another one.

        Args:
            source: index of the device that has the bytes.
            at: buffer and byte offset there.
            target: index of the device that gets them.
            to: buffer and byte offset there.
            nbytes: number of bytes.
        """
        pair = min(source, target), max(source, target)
        with self._lock:
            group = self._groups.get(pair)
            if group is None:
                group = self._groups[pair] = self._meet(*pair)
            ends = [(source, at, pair.index(source), True), (target, to, pair.index(target), False)]
            for begin in range(0, nbytes, PIECE):
                count = min(PIECE, nbytes - begin)
                for device, (buffer, offset), rank, sends in ends:
                    part = (Range(buffer, offset + begin, count, 1 - rank),)
                    self._send(device, group, rank, part if sends else (), () if sends else part, counts=not begin)

    def _send(
        self,
        device: int,
        group: bytes,
        rank: int,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
        *,
        counts: bool,
    ) -> None:
        recorder = self._devices.recorders[device]
        where = origin()
        call = Collective(
            group=group,
            sequence=0,
            rank=rank,
            size=2,
            timeout_ms=TIMEOUT_MS,
            what=What.EXCHANGE,
            reads=reads,
            writes=writes,
            origin=describe_origin(where)[-256:],
        )
        with recorder.lock:
            recorder.flush()
            link = recorder.require_link()
            for w in writes:
                link.forget(w.buffer)
            recorder.operations += counts and bool(writes)
            link.collective(pack_collective(call), "copy between devices", where)

    def _meet(self, first: int, second: int) -> bytes:
        """Let the executor of the second device work with that of the first one. Returns the id of their group."""
        group = secrets.token_bytes(GROUP_BYTES)
        links = [self._devices.recorders[index].require_link() for index in (first, second)]
        payload = introduction(self._opened, second, place(self._opened, first, links[0]), group)
        recorder = self._devices.recorders[second]
        with recorder.lock:
            links[1].introduce(payload, origin())
        return group
