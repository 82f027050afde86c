"""Reads: device data that the script wants on the host, as tensors and as numbers.

A read sends the open program and waits for its values, unless the values are known here (`host_values`), were read before, or are
on their way (`early_reads`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from wooly_bus.huge_pages import wish_for_huge_pages
from wooly_wis.frames import ANSWER_COPIED

from wooly.devices import Devices
from wooly.early_reads import MAX_EARLY_BYTES, EarlyValue
from wooly.kernels.device_copies import DeviceCopies
from wooly.kernels.device_numbers import number_for_call
from wooly.kernels.host_copies import (
    MAX_BYTES,
    REAL,
    bytes_of,
    host_memory,
    is_dense_tensor,
    nbytes_of,
    part_of,
    tensor_on,
    view_key,
)
from wooly.kernels.host_values import HostValues, Range, wait_as_cuda
from wooly.kernels.resolving import plain
from wooly.link import MIRROR_ITEM_LIMIT, Link, ViewKey
from wooly.origins import origin
from wooly.python_private import frame_at
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, OFFSET_MASK, address_of, pinned
from wooly.torch_private import raw_device

#: Maximum size, in bytes, of values that are read because they decide the shape of a result.
MAX_READ_FOR_SHAPE = 1024
#: Whether autograd may keep the numbers of calls.
_keeps_numbers = torch.is_grad_enabled


def _fetch_kept(kept: Tensor, buffer: int, into: memoryview, dst: Tensor, link: Link) -> None:
    """Fetch the content of the device tensor `kept`, which lives until then because the caller binds it to this call."""
    link.fetch(buffer, 0, into, dst)


def _same_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether two tensors have the same elements at the same places of memory without gaps."""
    return (
        dst.dtype is src.dtype
        and dst.shape == src.shape
        and dst.stride() == src.stride()
        and dst.layout is torch.strided
        and is_dense_tensor(src)
    )


class _Follower(NamedTuple):
    """A tensor that is read ahead.

    Attributes:
        place: what is read.
        host: the host copy, which is complete when a later read is answered.
        storage: keeps the buffer until then.
    """

    place: Range
    host: Tensor
    storage: torch.UntypedStorage


class Reading:
    """The reads of all devices.

    Attributes:
        reads: number of times that device data was read to the host, from the executor or from the cache of host copies. Values
            that decide the shape of a result are not counted.
    """

    def __init__(self, devices: Devices, host_values: HostValues, copies: DeviceCopies) -> None:
        self._devices = devices
        self._host_values = host_values
        self._copies = copies
        self.reads = 0
        for recorder in devices.recorders:
            recorder.read_early = self.read_early

    def to_host(self, t: Tensor) -> Tensor:
        """A host copy of a device tensor. If the buffer was read before and not written since, the copy comes from the cache."""
        self.reads += 1
        return self._host_copy(t)

    def _host_copy(self, t: Tensor) -> Tensor:
        at = address_of(t)
        recorder = self._devices.at(at)
        with recorder.lock:
            recorder.reads += 1
            if recorder.capture is not None:
                recorder.capture.refuse()
            buffer = at >> ID_SHIFT
            if recorder.replaced:
                buffer = recorder.lazy_clones.holder(buffer)
            key = view_key(t, at)
            link = recorder.require_link()
            early = link.is_early(buffer)
            if early:
                link.finish_early((buffer,), partial(self._send_before_early_value, recorder))
            kept = link.mirror(buffer, key)
            if kept is not None:
                if not early:
                    wait_as_cuda(recorder, link)
                return kept
            small = self._small_value(t, recorder, link, buffer, key)
            if small is not None:
                return small
            if not is_dense_tensor(t):
                dense = torch.empty(t.shape, dtype=t.dtype, device=raw_device(t))
                self._copies.record(dense, t)
                host = self._host_copy(dense)
            else:
                host = self._read_dense(recorder, link, buffer, key, t)
            link.keep(buffer, key, host)
            return host

    def _small_value(self, t: Tensor, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """A host copy of a small tensor without waiting for it, or with waiting for what tells more than itself.

        Returns:
            None if the tensor is large, or if it must be read itself.
        """
        if not 0 < t.numel() * t.element_size() <= MAX_BYTES or key[1] not in REAL:
            return None
        known = self._host_values.known(link, buffer, key)
        if known is not None:
            wait_as_cuda(recorder, link)
            return known
        value = self._host_values.find(recorder, link, buffer, key)
        if value is None:
            return self._part_of_whole(t, recorder, link, buffer, key)
        reads = value.reads
        if value.early:
            link.finish_early(value.early, partial(self._send_before_early_value, recorder))
        elif not reads:
            wait_as_cuda(recorder, link)
        computed = value.compute(self._read_all(recorder, link, reads))
        if computed is not None:
            link.keep(buffer, key, computed)
            if (whole := value.whole) is not None:
                link.keep(buffer, *whole)
            # Behind a wait, others may have the numbers of buffers that were freed since.
            if value.has_operands and not reads and not value.early:
                for place, host in value.operands():
                    link.keep(*place, host)
        return computed

    def _send_before_early_value(self, recorder: Recorder) -> None:
        """Send the open program, so that the device has work while the script uses a value that was read early.

        The programs of a loop stay equal, too. A few tiny instructions are not worth a program.
        """
        if not self._host_values.is_tiny(recorder):
            recorder.flush()
        recorder.note_early_read_used(origin())

    def known_value(self, t: Tensor) -> Tensor | None:
        """A host copy of a small device tensor, if there is one without waiting for the device."""
        at = address_of(t)
        recorder = self._devices.at(at)
        if not 0 < t.numel() * t.element_size() <= MAX_BYTES or t.dtype not in REAL or recorder.recording:
            return None  # what is recorded runs again with other values
        with recorder.lock:
            link = recorder.link
            if link is None:
                return None
            host = self._host_values.now(recorder, link, recorder.lazy_clones.holder(at >> ID_SHIFT), view_key(t, at))
            if host is not None:
                wait_as_cuda(recorder, link)
            return host

    def value_for_shape(self, t: Tensor) -> Tensor | None:
        """A host copy of a device tensor that decides the shape of a result: known, or read now if it is small.

        The wait is the same as for the shape. But the script often makes other decisions by the same values, and a loop may read
        them early (`early_reads`).
        """
        known = self.known_value(t)
        if known is not None or not 0 < t.numel() * t.element_size() <= MAX_READ_FOR_SHAPE or t.dtype not in REAL:
            return known
        recorder = self._devices.at(address_of(t))
        link = recorder.link
        if link is None or recorder.capture is not None or recorder.recording:
            return None
        if link.recording or link.log is not None or link.shares_now:
            return None
        return self._host_copy(t)

    def local_scalar_dense(self, t: Tensor) -> Any:
        """`aten._local_scalar_dense`, which `.item()` calls, and each call that takes a tensor as a number."""
        number = None if _keeps_numbers() else number_for_call(t, frame_at(0).f_back, self._number)
        if number is not None:
            at = address_of(t)
            recorder = self._devices.at(at)
            with recorder.lock:
                link = recorder.require_link()
                known = link.mirrors_of(recorder.lazy_clones.holder(at >> ID_SHIFT))
                if not known and recorder.capture is None:
                    wait_as_cuda(recorder, link)
                    return number
        return self._number(t)

    def _number(self, t: Tensor) -> Any:
        return self.to_host(plain(t)).item()

    def fetch(self, dst: Tensor, src: Tensor) -> bool:
        """Start to copy a device tensor to pinned memory without waiting, as CUDA does.

        The tensor must be small and have the same layout as the target. For a larger answer, the executor would have to wait
        until the client receives it.

        Returns:
            False if the copy must wait. Then nothing is started.
        """
        if dst.untyped_storage().data_ptr() not in pinned or not 0 < dst.numel() * dst.element_size() <= ANSWER_COPIED:
            return False
        if not _same_layout(dst, src):
            return False
        at = address_of(src)
        recorder = self._devices.at(at)
        with recorder.lock:
            link = recorder.require_link()
            holder = recorder.lazy_clones.holder(at >> ID_SHIFT)
            if link.mirror(holder, view_key(src, at)) is not None:
                return False
            self.reads += 1
            into = bytes_of(dst.detach())
            if (
                recorder.recording
                or link.recording
                or link.many_reads_started
                or not (recorder.open and recorder.after_replay)
            ):
                recorder.flush()  # it also makes the programs of a loop begin at the same point in each iteration
                link.fetch(holder, at & OFFSET_MASK, into, dst)
                return True
            # The open program stays open until the next replay. Read a copy, because it may change `src` until then.
            kept = torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=raw_device(src))
            self._copies.record(kept, src)
            buffer = address_of(kept) >> ID_SHIFT
            recorder.send_later(partial(_fetch_kept, kept, buffer, into, dst))
        return True

    def read_into(self, dst: Tensor, src: Tensor) -> bool:
        """Read a large device tensor straight into a host tensor of the same layout.

        Returns:
            False if the layouts differ, or if the cache of host copies may have the tensor. Then nothing is read.
        """
        if (
            dst.device.type != "cpu"
            or dst.numel() * dst.element_size() <= MIRROR_ITEM_LIMIT
            or not _same_layout(dst, src)
        ):
            return False
        at = address_of(src)
        recorder = self._devices.at(at)
        self.reads += 1
        wish_for_huge_pages(dst.data_ptr(), dst.numel() * dst.element_size())
        with recorder.lock:
            if recorder.capture is not None:
                recorder.capture.refuse()
            recorder.flush()
            holder, link = recorder.lazy_clones.holder(at >> ID_SHIFT), recorder.require_link()
            ahead = self._read_ahead(recorder, link, src)
            recorder.read_ahead.read(src, view_key(src, at), src.numel() * src.element_size())
            link.read(holder, at & OFFSET_MASK, bytes_of(dst.detach()))
            recorder.idle()
            self._keep_read_ahead(link, ahead)
        return True

    @staticmethod
    def read_early(recorder: Recorder, values: list[tuple[int, EarlyValue]]) -> bool:
        """Send the open program, and start to read values that the script will probably want (`early_reads`).

        Args:
            recorder: the recorder of the device.
            values: buffers, and what is read of them.

        Returns:
            False if no value can be read early, or if all predictions fail too often. Then nothing is sent.
        """
        link = recorder.require_link()
        # a bundle of `wooly record` names the line of each read
        recorded = recorder.recording or link.recording or link.log is not None or recorder.capture is not None
        if recorded or link.many_reads_started:
            return False
        begun = []
        for buffer, value in values:
            if link.is_shared(buffer):
                continue
            if value.begin():
                begun.append((buffer, value))
            else:
                recorder.early_reads.forget(value)
        if not begun:
            return False
        link.hold(len(begun))
        recorder.flush()
        for buffer, value in begun:
            _, dtype, shape, stride = key = cast(ViewKey, value.view)
            host, memory = host_memory(dtype, shape, stride, value.nbytes)
            link.read_early(buffer, key, memory, host, value)
        recorder.note_reads_sent(len(begun))
        return True

    def read_together(self, tensors: list[Tensor]) -> None:
        """Read small dense tensors with one wait per device. The link keeps the host copies, so that reading them needs no wait.

        Args:
            tensors: fewer than half of `link.MAX_STARTED_READS`.
        """
        by_recorder: dict[Recorder, list[tuple[int, Tensor]]] = {}
        for t in tensors:
            at = address_of(t)
            by_recorder.setdefault(self._devices.at(at), []).append((at, t))
        for recorder, found in by_recorder.items():
            with recorder.lock:
                link = recorder.require_link()
                if recorder.recording or recorder.capture is not None or link.recording or link.log is not None:
                    continue
                places = [Range(recorder.lazy_clones.holder(at >> ID_SHIFT), view_key(t, at)) for at, t in found]
                unknown = [
                    place
                    for place in places
                    if link.mirror(*place) is None
                    and not link.is_early(place.buffer)
                    and not link.is_shared(place.buffer)
                ]
                if len(unknown) > 1:
                    self._read_all(recorder, link, unknown)

    def _read_all(self, recorder: Recorder, link: Link, places: list[Range]) -> list[Tensor]:
        """Read small parts of buffers with one wait."""
        hosts: list[Tensor] = []
        for buffer, view in places[:-1]:
            host, memory = host_memory(view[1], view[2], view[3], nbytes_of(view))
            link.hold()
            recorder.flush()
            link.fetch(buffer, view[0], memory, host)
            hosts.append(host)
        if places:
            hosts.append(self._read_dense(recorder, link, *places[-1]))
        if len(places) > 1:
            link.finish_reads()
        for place, host in zip(places, hosts, strict=True):
            link.keep(*place, host)
        return hosts

    def _part_of_whole(self, t: Tensor, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """Read all of a small storage whose part is wanted, because a script often wants the other elements next."""
        nbytes = t.untyped_storage().nbytes()
        if not t.numel() * t.element_size() < nbytes <= MAX_BYTES or nbytes % t.element_size():
            return None
        whole = 0, t.dtype, (nbytes // t.element_size(),), (1,)
        host = self._read_dense(recorder, link, buffer, whole)
        link.keep(buffer, whole, host)
        return part_of(host, whole, key)

    def _read_dense(self, recorder: Recorder, link: Link, buffer: int, key: ViewKey, t: Tensor | None = None) -> Tensor:
        """Send the open program, and wait for the values of a dense view.

        Args:
            recorder: the recorder of the device.
            link: its link.
            buffer: the buffer.
            key: the view.
            t: the tensor that the script reads; None: the client reads for another purpose.
        """
        offset, dtype, shape, stride = key
        nbytes = prod(shape) * dtype.itemsize
        if nbytes and recorder.open:
            link.hold()
        recorder.flush()
        if not nbytes:
            recorder.idle()
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        ahead = [] if t is None else self._read_ahead(recorder, link, t)
        host: Tensor | None = None
        small = bytearray(nbytes) if nbytes <= MAX_EARLY_BYTES and dtype in REAL else None
        if small is None:
            host, memory = host_memory(dtype, shape, stride, nbytes)
        else:
            memory = memoryview(small)
        pending = link.ask(buffer, offset, memory)
        recorder.note_reads_sent(1 + len(ahead))
        try:  # what does not need the answer is done here, while the executor works
            if host is None:
                host = tensor_on(small, dtype, shape, stride)
            where = origin()
            if nbytes <= MAX_EARLY_BYTES:
                recorder.note_read(buffer, key, nbytes, offset + nbytes, where)
            if t is not None:
                recorder.read_ahead.read(t, key, nbytes)
            recorder.idle()
        except BaseException:
            link.abandon(pending)
            raise
        link.take(memory, pending, where)
        self._keep_read_ahead(link, ahead)
        return host

    @staticmethod
    def _read_ahead(recorder: Recorder, link: Link, t: Tensor) -> list[_Follower]:
        """Ask for the tensors that the script will probably read after `t`, in the same message as what is sent next."""
        if recorder.recording or link.recording or link.log is not None or link.many_reads_started:
            return []
        found: list[_Follower] = []
        for storage, view in recorder.read_ahead.followers(t):
            buffer = recorder.lazy_clones.holder(storage.data_ptr() >> ID_SHIFT)
            if link.mirrors_of(buffer) or link.is_shared(buffer):
                continue
            host, memory = host_memory(view[1], view[2], view[3], nbytes_of(view))
            link.hold()
            link.fetch(buffer, view[0], memory, host)
            found.append(_Follower(Range(buffer, view), host, storage))
        return found

    @staticmethod
    def _keep_read_ahead(link: Link, ahead: list[_Follower]) -> None:
        if ahead:
            link.finish_reads()
        for follower in ahead:
            link.keep(*follower.place, follower.host)

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {"_local_scalar_dense": self.local_scalar_dense}
