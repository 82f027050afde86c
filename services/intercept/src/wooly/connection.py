"""The connection of a link to the executor that has its session now: the channel, and the numbers of its frames.

A channel numbers its frames from 1. A session that goes on in another executor gets another channel, and its link goes on
counting: this module knows how the two relate. It does not know what frames mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from wooly_bus.channel import ChannelClient, ChannelClosedError
from wooly_bus.channel.busy_wait import LOOK_NS
from wooly_bus.channel.pinned_area import PinnedArea
from wooly_bus.channel.segment import SHARED_FROM
from wooly_wis.frames import READ_PLACE, Kind, pack_json, unpack_json
from wooly_wis.releases import mismatch

from wooly.errors import ReleaseError, WoolyError
from wooly.failures import error_of
from wooly.pinned_area import use

#: Looked up on its class, a member of an enumeration costs as much as a call.
_WRITE = Kind.WRITE


class Connection:
    """A channel to an executor, and the frames of all channels of this session, counted on.

    Args:
        channel: the channel.
        where: name and endpoint of the executor, for messages.

    Attributes:
        channel: the channel in use.
        where: see Args.
        last: number of the last sent frame.
        device: properties of the executor's device, from its WELCOME.
        kind: the kind of the executor, in words. Executors of one kind compute the same bits.
        look_ns: how long a wait for an answer looks for it before it blocks, in ns; of all connections.
    """

    look_ns: ClassVar[int] = LOOK_NS

    def __init__(self, channel: ChannelClient, where: str) -> None:
        self.channel, self.where = channel, where
        self.last = 0
        self.device: dict[str, Any] = {}
        self.kind = ""
        #: Numbers of frames minus numbers of the channel.
        self._shift = 0
        #: By number of the channel: the number of a frame that was sent again.
        self._again: dict[int, int] = {}
        #: Where pinned tensors are; None: in ordinary memory.
        self._pinned: PinnedArea | None = None

    def send(self, kind: Kind, *buffers: Any, into: memoryview | None = None) -> int:
        """Send a frame. Returns its number.

        Args:
            kind: kind of the frame.
            buffers: its payload.
            into: memory for the answer to a READ.

        Raises:
            ChannelError: the connection broke.
        """
        if kind is _WRITE and len(buffers) == 2:
            seq = self.channel.send_bulk(kind, *buffers)
        elif into is not None and len(into) >= SHARED_FROM and (place := self.channel.place_of(into)) is not None:
            seq = self.channel.send(kind, *buffers, READ_PLACE.pack(place))
        else:
            seq = self.channel.send(kind, *buffers)
        self.last = seq = seq + self._shift
        return seq

    @property
    def acked(self) -> int:
        """Number of the last frame that the executor has processed."""
        return self.channel.acked + self._shift

    @property
    def channel_last(self) -> int:
        """What the channel calls the last frame."""
        return self.last - self._shift

    def number_of(self, seq: int) -> int:
        """The number of a frame that the executor names by the number of its channel."""
        return self._again.get(seq, seq + self._shift)

    def replace(self, channel: ChannelClient, where: str) -> None:
        """Use another channel from now on. `resume` relates its numbers."""
        self.channel.close()
        self.channel, self.where = channel, where

    def resume(self, sent: int, again: dict[int, int]) -> None:
        """Count on in a channel that has sent all frames so far.

        Args:
            sent: number of the channel that belongs to the last frame.
            again: by number of the channel: the number of a frame that was sent again.
        """
        self._shift, self._again = self.last - sent, again

    def greet(self, hello: dict[str, Any], timeout: float) -> None:
        """Send the hello and wait for the answer.

        Raises:
            ReleaseError: the executor's PyTorch and this process's do not work together.
            WoolyError: the executor refuses the session.
            ChannelError: the connection broke, or the executor does not have the session (any more).
        """
        self.channel.look_before_blocking(self.look_ns)
        self.channel.send_hello(Kind.HELLO, pack_json(hello))
        answer = self.channel.recv(timeout)
        if answer.kind == Kind.ERROR:
            error = unpack_json(answer.payload)
            if error.get("code") == "executor.no_session":  # it was started again, or has just lost the session
                raise ChannelClosedError(str(error.get("message", "")))
            raise error_of(str(error.get("code", "")), str(error.get("message", "")))
        if answer.kind != Kind.WELCOME:
            raise WoolyError(f"the executor answered a hello with a frame of kind {answer.kind}")
        welcome = unpack_json(answer.payload)
        if why := mismatch(torch.__version__, str(welcome.get("device", {}).get("torch_version", ""))):
            raise ReleaseError(f"cannot use {self.where}: {why}.")
        self.channel.window = int(welcome.get("window", self.channel.window))
        self.channel.share(int(welcome.get("segment", 0)))
        if self.channel.segment is not None:
            self._pinned = PinnedArea(self.channel.segment)
            use(self._pinned)
        self.device = welcome.get("device", {})
        self.kind = kind_of(self.device)


def kind_of(device: Mapping[str, Any]) -> str:
    """The kind of an executor, in words. Executors of one kind compute the same bits.

    Args:
        device: properties of its device, from its WELCOME.
    """
    name, runtime, cores, release = (device.get(key, "") for key in ("name", "runtime", "cores", "torch_version"))
    return f"{name} ({runtime}, {cores} cores, PyTorch {release})"
