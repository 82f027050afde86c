"""Kernels that copy tensors between host and devices, and from device to device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from wooly_bus.contents import MIN_OFFER_BYTES
from wooly_wis.codec import MAX_DIMS
from wooly_wis.program import Form, Operand, ParamKind, ParamRef, Role

from wooly import native
from wooly.contents import upload
from wooly.devices import NAME, Devices
from wooly.interned_forms import Forms
from wooly.kernels.device_copies import DeviceCopies, expanded
from wooly.kernels.forms import Number, host_scalar, view_of
from wooly.kernels.host_copies import MAX_BYTES, REAL, bytes_of, is_dense_tensor, view_key
from wooly.kernels.reading import Reading
from wooly.kernels.resolving import plain
from wooly.link import MIRROR_ITEM_LIMIT, Link
from wooly.origins import origin
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, OFFSET_MASK, address_of
from wooly.torch_private import is_zero_tensor, neg_view, raw_device

#: The kind of param that can represent every number of a dtype exactly.
_FILLS = (
    dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), ParamKind.F64)
    | dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), ParamKind.I64)
    | {torch.bool: ParamKind.BOOL}
)
#: Name of the operator with a native kernel.
_COPY = "aten.copy_.default"
_learn = None if native.module is None else native.module.learn
#: Maximum number of bytes that a copy between devices keeps in the client's memory.
_HOP = 16 << 20


class Transfer:
    """The kernels of this file, for all devices."""

    def __init__(self, devices: Devices, forms: Forms, copies: DeviceCopies, reading: Reading) -> None:
        self._devices = devices
        self._forms = forms
        self._copies, self._reading = copies, reading
        self._fills: dict[tuple[Any, ...], int] = {}

    def copy_(self, dst: Tensor, src: Tensor | Number, non_blocking: bool = False) -> Tensor:
        """`aten.copy_` and, with swapped arguments, `aten._copy_from`."""
        if dst is src:
            return dst
        if not isinstance(src, Tensor):  # PyTorch passes a Python number as the number
            src = host_scalar(src)
        if is_lazy(dst) or is_lazy(src):  # parameters of lazy modules hide their shape before the first forward
            self.copy_(dst.data, src.data)
            return dst
        if dst.is_conj() or dst.is_neg():
            # PyTorch converts before it conjugates or negates: a real number gets the imaginary part -0.
            src = src if src.dtype is dst.dtype else src.to(dst.dtype)
            if dst.is_conj():
                self.copy_(dst.conj(), src.conj())
            else:
                self.copy_(neg_view(dst), torch.neg(src))
            return dst
        if is_zero_tensor(dst):
            raise RuntimeError(
                "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a mutable zero tensor."
            )
        if is_zero_tensor(src):
            return dst.zero_()
        to, at = raw_device(dst), raw_device(src)
        ours, theirs = to.type == NAME, at.type == NAME
        if ours and theirs:
            if to == at:
                form = self._copies.record(dst, plain(src))
                if _learn is not None:
                    buffers = [address_of(dst) >> ID_SHIFT, address_of(src) >> ID_SHIFT]
                    _learn(_COPY, self._devices.recorders[to.index], form, (), (0,), buffers, [], True)
            else:
                self._hop(dst, plain(src))
        elif ours:
            self._upload(dst, src)
        else:
            src = plain(src)
            if not (non_blocking and self._reading.fetch(dst, src)) and not self._reading.read_into(dst, src):
                dst.copy_(expanded(self._reading.to_host(src), dst))
        return dst

    def copy_from(self, src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
        """`aten._copy_from`."""
        return self.copy_(dst, src, non_blocking)

    def copy_from_and_resize(self, src: Tensor, dst: Tensor) -> Tensor:
        """`aten._copy_from_and_resize`."""
        if dst.shape != src.shape:
            dst.resize_(src.shape)
        return self.copy_(dst, src)

    def _hop(self, dst: Tensor, src: Tensor) -> None:
        """Copy from one device to another: from executor to executor, or through this process's memory in pieces of `_HOP` bytes.

        Few bytes go through this process, and so do all bytes of sessions without a controller and of those that are recorded.
        """
        if src.shape != dst.shape:
            src = expanded(src, dst)
        if not is_dense_tensor(dst):
            staging = torch.empty(dst.shape, dtype=dst.dtype, device=raw_device(dst))
            self._hop(staging, src)
            self._copies.record(dst, staging)
            return
        if src.dtype is not dst.dtype or src.stride() != dst.stride():
            laid = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device=raw_device(src))
            self._copies.record(laid, src)
            src = laid
        total = src.numel() * src.element_size()
        reader, writer = [self._devices.at(address_of(t)) for t in (src, dst)]
        links = [recorder.require_link() for recorder in (reader, writer)]
        if links[0] is links[1]:  # the devices of a rank are one device
            with writer.lock:
                reader.flush()
                self._copies.record(dst, src)
                writer.flush()
            return
        if total <= MIRROR_ITEM_LIMIT:
            self._upload(dst, self._reading.to_host(src))
            return
        at, to = address_of(src), address_of(dst)
        hops = self._devices.hops
        for recorder, place in ((reader, at), (writer, to)):
            with recorder.lock:
                recorder.separate([place >> ID_SHIFT])
        if hops is not None and hops.usable and all(link.log is None for link in links):
            there = (at >> ID_SHIFT, at & OFFSET_MASK), (to >> ID_SHIFT, to & OFFSET_MASK)
            hops.copy(raw_device(src).index, there[0], raw_device(dst).index, there[1], total)
            return
        piece = memoryview(bytearray(min(total, _HOP)))
        for start in range(0, total, _HOP):
            part = piece[: min(_HOP, total - start)]
            # Do not hold both locks at the same time: another thread may copy in the other direction.
            with reader.lock:
                reader.flush()
                reader.require_link().read(at >> ID_SHIFT, (at & OFFSET_MASK) + start, part)
            with writer.lock:
                writer.operations += not start
                writer.flush()
                link = writer.require_link()
                link.forget(to >> ID_SHIFT)
                link.write(to >> ID_SHIFT, (to & OFFSET_MASK) + start, part)

    def _upload(self, dst: Tensor, src: Tensor) -> None:
        host = src.detach()
        self._finish_reads(self._devices.at(address_of(dst)), host)
        if host.is_conj() or host.is_neg():
            host = host.resolve_conj().resolve_neg()
        if host.device.type != "cpu":
            raise NotImplementedError(
                f"copies from {host.device} to the wooly device are not supported; copy to the CPU first: x.cpu()"
            )
        if not is_dense_tensor(dst):
            staging = torch.empty(dst.shape, dtype=dst.dtype, device=raw_device(dst))
            self._upload(staging, src)
            self._copies.record(dst, staging)
            return
        if host.dtype is not dst.dtype or host.shape != dst.shape or host.stride() != dst.stride():
            laid = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device="cpu")
            host = laid.copy_(host)
        at = address_of(dst)
        recorder = self._devices.at(at)
        with recorder.lock:
            recorder.operations += 1
            link = recorder.require_link()
            buffer = at >> ID_SHIFT
            if recorder.replaced:
                recorder.separate([buffer])
            as_param = host.numel() == 1 and not (recorder.recording or link.recording or link.hides_data)
            if as_param and self._fill(dst, host, link):
                self._keep_uploaded(link, dst, host)
                return
            link.forget(buffer)
            data = bytes_of(host)
            if recorder.open and len(data) <= MAX_BYTES:
                link.hold()  # the program is sent together with the data
            recorder.flush()
            whole = len(data) >= MIN_OFFER_BYTES and dst.untyped_storage().nbytes() == len(data)
            if whole and link.offers is not None and link.offers.accepts(buffer, len(data), recorder.heap.reusable):
                upload(link, buffer, data)
            else:
                link.write(buffer, at & OFFSET_MASK, data)
            recorder.read_ahead.uploaded(dst, view_key(dst, at), len(data))
            self._keep_uploaded(link, dst, host)

    @staticmethod
    def _keep_uploaded(link: Link, dst: Tensor, host: Tensor) -> None:
        """Keep a small tensor that was uploaded, so that a script that reads it, or decides by it, need not wait."""
        if 0 < host.numel() * host.element_size() <= MAX_BYTES and host.dtype in REAL:
            at = address_of(dst)
            link.keep(at >> ID_SHIFT, view_key(dst, at), host.clone())

    @staticmethod
    def _finish_reads(recorder: Recorder, host: Tensor) -> None:
        """Wait for the reads that were started if one of them may still write to the memory of a host tensor."""
        with recorder.lock:
            if recorder.has_deferred:
                recorder.flush()
            link = recorder.require_link()
            if host.device.type == "cpu" and link.reads_into(host.untyped_storage()):
                link.finish_reads()

    def _fill(self, dst: Tensor, host: Tensor, link: Link) -> bool:
        """Record the upload of one element as a `fill` with this number, so that the open program does not end.

        Returns:
            False if no param can represent the number bit by bit, or if the tensor has too many dimensions. Then nothing is
            recorded.
        """
        kind, value = _FILLS.get(dst.dtype), host.item()
        if kind is None or value != value or dst.dim() > MAX_DIMS:  # a param does not keep the bits of a NaN
            return False
        at = address_of(dst)
        recorder = self._devices.at(at)
        key = (dst.dtype, tuple(dst.shape), at & OFFSET_MASK)
        form = self._fills.get(key)
        if form is None:
            if len(self._fills) > 65536:
                self._fills.clear()
            form = self._fills[key] = self._forms.intern(
                Form("fill", (Operand(Role.OUT, view_of(dst)),), (kind,), (("value", ParamRef(0)),))
            )
        if recorder.heap.dead:
            recorder.release_dead()
        link.overwrite(at >> ID_SHIFT, len(recorder.origins))
        recorder.params.append(value)
        recorder.emit(form, [at >> ID_SHIFT], origin())
        if len(recorder.origins) >= recorder.room:
            recorder.close_if_due(form)
        return True

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {
            "copy_": self.copy_,
            "_copy_from": self.copy_from,
            "_copy_from_and_resize": self.copy_from_and_resize,
        }
