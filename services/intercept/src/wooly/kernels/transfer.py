"""Kernels that create or resize storages, copy tensors between host and devices, and read numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from wooly_bus.contents import MIN_OFFER_BYTES
from wooly_bus.huge_pages import wish_for_huge_pages
from wooly_wis.codec import MAX_DIMS
from wooly_wis.frames import ANSWER_COPIED
from wooly_wis.program import Form, Operand, ParamKind, ParamRef, Role

from wooly import native
from wooly.contents import upload
from wooly.determinism import Determinism, Mode
from wooly.devices import NAME, Devices
from wooly.early_reads import MAX_EARLY_BYTES, EarlyRead
from wooly.interned_forms import Forms
from wooly.kernels.device_numbers import number_for_call
from wooly.kernels.forms import Number, host_scalar, view_of
from wooly.kernels.host_copies import MAX_BYTES, REAL, nbytes_of, part_of, tensor_on
from wooly.kernels.host_values import HostValues, Range, wait_as_cuda
from wooly.kernels.overlap import refuse_overlap, refuse_partial_overlap
from wooly.kernels.resolving import plain
from wooly.link import MIRROR_ITEM_LIMIT, Link, ViewKey
from wooly.origins import origin
from wooly.python_private import frame_at
from wooly.recorder import Recorder
from wooly.storage import (
    DEVICE_MASK,
    ID_SHIFT,
    OFFSET_MASK,
    Layout,
    address_of,
    contiguous_strides,
    pinned,
    reinterpret_bytes,
    span,
)
from wooly.torch_private import is_zero_tensor, neg_view, raw_device, raw_storage_device, redispatch_cpu, swap_memory

aten = torch.ops.aten
_set_cpu = redispatch_cpu(aten.set_.source_Storage_storage_offset)
#: Whether autograd may keep the numbers of calls.
_keeps_numbers = torch.is_grad_enabled


def bytes_of(t: Tensor) -> memoryview:
    """The memory of a dense host tensor, as bytes."""
    n = t.numel() * t.element_size()
    if not n:
        return memoryview(b"")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        t.untyped_storage(), t.storage_offset() * t.element_size(), (n,), (1,)
    )
    return flat.numpy().data


def _same_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether two tensors have the same elements at the same places of memory without gaps."""
    return (
        dst.dtype is src.dtype
        and dst.shape == src.shape
        and dst.stride() == src.stride()
        and dst.layout is torch.strided
        and is_dense(src)
    )


def is_dense(t: Tensor) -> bool:
    """Whether the elements of a tensor are in memory without gaps and without overlap."""
    n = t.numel()
    return t.is_contiguous() or (n == span(tuple(t.shape), t.stride()) and 0 not in t.stride())


def _host_memory(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], nbytes: int) -> _Memory:
    """A new dense tensor on the host, and its memory.

    Args:
        dtype: its dtype.
        shape: its shape.
        stride: its strides, in elements.
        nbytes: its size.
    """
    if 0 < nbytes <= MAX_EARLY_BYTES and dtype in REAL:
        memory = bytearray(nbytes)
        return tensor_on(memory, dtype, shape, stride), memoryview(memory)
    host = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return host, bytes_of(host)


def _view_key(t: Tensor, at: int) -> ViewKey:
    """Key of a view among all views of its buffer."""
    return at & OFFSET_MASK, t.dtype, tuple(t.shape), t.stride()


#: The kind of param that can represent every number of a dtype exactly.
_FILLS = (
    dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), ParamKind.F64)
    | dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), ParamKind.I64)
    | {torch.bool: ParamKind.BOOL}
)
#: A tensor on the host, and its memory.
_Memory = tuple[Tensor, memoryview]
#: Cached data to make a tensor: layout, form of the alloc, recorder of the device.
_New = tuple[Layout, int, Recorder]
#: Names of operators with native kernels.
_EMPTY, _EMPTY_STRIDED, _COPY = "aten.empty.memory_format", "aten.empty_strided.default", "aten.copy_.default"
_learn = None if native.module is None else native.module.learn
#: Maximum number of bytes that a copy between devices keeps in the client's memory.
_HOP = 16 << 20
#: Largest storage of PyTorch, in bytes.
_MAX_BYTES = (1 << 63) - 1


def _teach_new(name: str, new: _New) -> None:
    """Teach the native kernel of a factory the plan of the call that runs now."""
    layout, alloc, recorder = new
    native.module.learn(name, recorder, None, ((layout, alloc),), (), [], [])


def _fetch_kept(kept: Tensor, buffer: int, into: memoryview, dst: Tensor, link: Link) -> None:
    """Fetch the content of the device tensor `kept`, which lives until then because the caller binds it to this call."""
    link.fetch(buffer, 0, into, dst)


def _send_before_early_value(recorder: Recorder) -> None:
    """Send the open program, so that the device has work while the script uses a value that was read early.

    The programs of a loop stay equal, too.
    """
    recorder.flush()
    recorder.note_early_read_used(origin())


def visible_value(dtype: torch.dtype) -> float | int | bool:
    """The number with which PyTorch fills undefined memory while deterministic algorithms are on."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _expanded(src: Tensor, dst: Tensor) -> Tensor:
    """`src` in the shape of `dst`, into which it is copied.

    Raises:
        RuntimeError: the shapes do not fit. It is the error of ATen's iterator.
    """
    try:
        return src.expand(dst.shape)
    except RuntimeError:
        to, given = list(dst.shape), list(src.shape)
    shape: list[int] = []
    n = max(len(to), len(given))
    a, b = [1] * (n - len(to)) + to, [1] * (n - len(given)) + given
    for at in reversed(range(n)):
        if a[at] != b[at] and 1 not in (a[at], b[at]):
            raise RuntimeError(
                f"The size of tensor a ({a[at]}) must match the size of tensor b ({b[at]}) at non-singleton dimension {at}"
            )
        shape.insert(0, b[at] if a[at] == 1 else a[at])
    raise RuntimeError(f"output with shape {to} doesn't match the broadcast shape {shape}")


class Transfer:
    """The kernels of this file, for all devices.

    Attributes:
        reads: number of times that device data was read to the host, from the executor or from the cache of host copies.
    """

    def __init__(self, devices: Devices, forms: Forms, determinism: Determinism, host_values: HostValues) -> None:
        self._devices = devices
        self._forms = forms
        self._host_values = host_values
        self._layouts: dict[tuple[Any, ...], _New] = {}
        self._copies: dict[tuple[Any, ...], int] = {}
        self._fills: dict[tuple[Any, ...], int] = {}
        self._aranges: dict[tuple[Any, ...], Tensor] = {}
        self.reads = 0
        self._new: Callable[[_New], Tensor] = self._new_zeroed
        self._fills_memory = False
        self._teach = None if native.module is None else _teach_new
        determinism.watch(self._switch)
        for recorder in devices.recorders:
            recorder.read_early = self.read_early

    def forget_devices(self) -> None:
        """Clear the cache at the start of a session, because a device argument may mean another device than before."""
        self._layouts.clear()
        native.forget()

    def _recorder_at(self, address: int) -> Recorder:
        return self._devices.recorders[address >> ID_SHIFT & DEVICE_MASK]

    # -- creation ----------------------------------------------------------------------------------------------------

    def empty(
        self,
        size: list[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """`aten.empty.memory_format`."""
        dtype = dtype or torch.get_default_dtype()
        key = (dtype, tuple(size), memory_format, device)
        known = self._layouts.get(key)
        if known is None:
            self._check(layout, pin_memory)
            sizes = tuple(size)
            if any(s < 0 for s in sizes):
                bad = next(s for s in sizes if s < 0)
                raise RuntimeError(f"Trying to create tensor with negative dimension {bad}: {list(sizes)}")
            strides = contiguous_strides(sizes)
            if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
                strides = torch.empty(sizes, dtype=dtype, device="meta", memory_format=memory_format).stride()
            known = self._remember(key, device, Layout(dtype, sizes, strides))
        elif self._teach is not None:
            self._teach(_EMPTY, known)
        return self._new(known)

    def zeros(
        self,
        size: list[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        """`aten._efficientzerotensor`: zeros without memory, with which derivatives are 0 also times an infinite number.

        Only native code can make such a tensor. Without it, the tensor has memory. New buffers are filled with zeros, unless the
        script asks for another value.
        """
        if native.module is None:
            t = self.empty(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)
            return t.zero_() if self._fills_memory else t
        self._check(layout, pin_memory)
        at = self._devices.index_of(device)
        return native.module.zero_tensor(tuple(size), dtype or torch.get_default_dtype(), at)  # type: ignore[no-any-return]

    def empty_strided(
        self,
        size: list[int],
        stride: list[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        """`aten.empty_strided`."""
        dtype = dtype or torch.get_default_dtype()
        key = (dtype, tuple(size), tuple(stride), device, None)
        known = self._layouts.get(key)
        if known is None:
            self._check(layout, pin_memory)
            known = self._remember(key, device, Layout(dtype, tuple(size), tuple(stride)))
        elif self._teach is not None:
            self._teach(_EMPTY_STRIDED, known)
        return self._new(known)

    def arange(
        self,
        record: Callable[..., Any],
        start: Any,
        end: Any,
        step: Any = 1,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        """`aten.arange.start_step` as one instruction. ATen would make an empty tensor and then resize it.

        Args:
            record: kernel of `aten.arange.start_out`.
            start: first value.
            end: upper bound; not included.
            step: difference of two values.
            dtype: dtype of the result.
            layout: must be strided.
            device: device of the result.
            pin_memory: must not be true.
        """
        key = (start, end, step, start.__class__, end.__class__, step.__class__, dtype, torch.get_default_dtype())
        like = self._aranges.get(key)
        if like is None:
            self._check(layout, pin_memory)
            like = torch.arange(start, end, step, dtype=dtype, device="meta")
            if len(self._aranges) > 65536:
                self._aranges.clear()
            self._aranges[key] = like
        steps = () if step.__class__ is int and step == 1 else (step,)  # PyTorch passes no default to a kernel
        return record(start, end, *steps, out=self.empty(list(like.shape), dtype=like.dtype, device=device))  # type: ignore[no-any-return]

    def _check(self, layout: torch.layout | None, pin_memory: bool | None) -> None:
        if layout not in (None, torch.strided):
            raise NotImplementedError(
                f"tensors of layout {layout} are not supported on the wooly device; use the layout torch.strided"
            )
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")

    def _remember(self, key: tuple[Any, ...], device: torch.device | None, layout: Layout) -> _New:
        recorder = self._devices.recorders[self._devices.index_of(device)]
        if layout.nbytes > _MAX_BYTES:
            raise RuntimeError(f"Storage size calculation overflowed with sizes={list(layout.sizes)}")
        entry = (layout, self._forms.alloc(layout.nbytes), recorder)
        # With several devices, "cuda" without an index may mean another device at the next call.
        if self._devices.count == 1 or (device is not None and device.index is not None):
            if len(self._layouts) > 65536:
                self._layouts.clear()
            self._layouts[key] = entry
        return entry

    def _switch(self, mode: Mode) -> None:
        self._fills_memory = mode.fills
        self._new = self._new_filled if mode.fills else self._new_zeroed
        self._teach = None if native.module is None or mode.fills else _teach_new
        native.forget()

    def _new_filled(self, entry: _New) -> Tensor:
        """A new tensor in which undefined memory is visible, as `torch.utils.deterministic` asks."""
        t = self._new_zeroed(entry)
        if t.numel():
            t.fill_(visible_value(t.dtype))
        return t

    def _new_zeroed(self, entry: _New) -> Tensor:
        layout, alloc, recorder = entry
        with recorder.lock:
            heap = recorder.heap
            if heap.dead:
                recorder.release_dead()
            t, buffer = layout.new(heap)
            recorder.emit_new(alloc, buffer, origin())
            if len(recorder.origins) >= recorder.room:
                recorder.close_if_due(alloc)
        return t

    # -- copies ------------------------------------------------------------------------------------------------------

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
                form = self._copy(dst, plain(src))
                if _learn is not None:
                    buffers = [address_of(dst) >> ID_SHIFT, address_of(src) >> ID_SHIFT]
                    _learn(_COPY, self._devices.recorders[to.index], form, (), (0,), buffers, [], True)
            else:
                self._hop(dst, plain(src))
        elif ours:
            self._upload(dst, src)
        else:
            src = plain(src)
            if not (non_blocking and self._fetch(dst, src)) and not self._read_into(dst, src):
                dst.copy_(_expanded(self.to_host(src), dst))
        return dst

    def copy_from(self, src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
        """`aten._copy_from`."""
        return self.copy_(dst, src, non_blocking)

    def copy_from_and_resize(self, src: Tensor, dst: Tensor) -> Tensor:
        """`aten._copy_from_and_resize`."""
        if dst.shape != src.shape:
            dst.resize_(src.shape)
        return self.copy_(dst, src)

    def _copy(self, dst: Tensor, src: Tensor) -> int:
        """Record the copy of a tensor of the same device. Returns the number of its form."""
        given = src
        if src.shape != dst.shape:
            src = _expanded(src, dst)
        at, to = address_of(src), address_of(dst)
        recorder = self._recorder_at(to)
        key = (
            src.dtype,
            src.shape,
            src.stride(),
            at & OFFSET_MASK,
            dst.dtype,
            dst.stride(),
            to & OFFSET_MASK,
        )
        with recorder.lock:
            form = self._copies.get(key)
            if form is None:
                refuse_overlap(dst)
                if len(self._copies) > 65536:
                    self._copies.clear()
                operands = (Operand(Role.IN, view_of(src)), Operand(Role.OUT, view_of(dst)))
                form = self._copies[key] = self._forms.intern(Form("copy", operands))
            if recorder.heap.dead:
                recorder.release_dead()
            recorder.operations += 1
            source, buffer = at >> ID_SHIFT, to >> ID_SHIFT
            if source == buffer:
                refuse_partial_overlap(dst, given)
            link = recorder.link
            if link is not None and link.mirroring:
                link.overwrite(buffer, len(recorder.origins))
            recorder.emit(form, [source, buffer], origin())
            if len(recorder.origins) >= recorder.room:
                recorder.close_if_due(form)
        return form

    def lazy_clone(self, src: Tensor) -> Tensor:
        """`aten._lazy_clone`: a tensor with a storage of its own, which reads the memory of `src` until one of both is written.

        The copy is made at once if a graph is being captured or recorded, and if another process shares the memory.
        """
        if src.is_conj():
            return self.lazy_clone(src.conj()).conj()
        if src.is_neg():
            return neg_view(self.lazy_clone(neg_view(src)))
        if is_zero_tensor(src):
            return src.clone()
        recorder = self._recorder_at(address_of(src))
        with recorder.lock:
            buffer, link = address_of(src) >> ID_SHIFT, recorder.require_link()
            if recorder.capture is not None or recorder.recording or link.is_shared(buffer):
                return src.clone()
            if recorder.heap.dead:
                recorder.release_dead()
            flat = recorder.lazy_clones.clone(buffer, src.untyped_storage().nbytes())
            recorder.watch_lazy_clones()
        return reinterpret_bytes(flat, src.dtype, tuple(src.shape), src.stride(), int(src.storage_offset()))

    def _hop(self, dst: Tensor, src: Tensor) -> None:
        """Copy from one device to another: from executor to executor, or through this process's memory in pieces of `_HOP` bytes.

        Few bytes go through this process, and so do all bytes of sessions without a controller and of those that are recorded.
        """
        if src.shape != dst.shape:
            src = _expanded(src, dst)
        if not is_dense(dst):
            staging = torch.empty(dst.shape, dtype=dst.dtype, device=raw_device(dst))
            self._hop(staging, src)
            self._copy(dst, staging)
            return
        if src.dtype is not dst.dtype or src.stride() != dst.stride():
            laid = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device=raw_device(src))
            self._copy(laid, src)
            src = laid
        total = src.numel() * src.element_size()
        reader, writer = [self._recorder_at(address_of(t)) for t in (src, dst)]
        links = [recorder.require_link() for recorder in (reader, writer)]
        if links[0] is links[1]:  # the devices of a rank are one device
            with writer.lock:
                reader.flush()
                self._copy(dst, src)
                writer.flush()
            return
        if total <= MIRROR_ITEM_LIMIT:
            self._upload(dst, self.to_host(src))
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
        self._finish_reads(self._recorder_at(address_of(dst)), host)
        if host.is_conj() or host.is_neg():
            host = host.resolve_conj().resolve_neg()
        if host.device.type != "cpu":
            raise NotImplementedError(
                f"copies from {host.device} to the wooly device are not supported; copy to the CPU first: x.cpu()"
            )
        if not is_dense(dst):
            staging = torch.empty(dst.shape, dtype=dst.dtype, device=raw_device(dst))
            self._upload(staging, src)
            self._copy(dst, staging)
            return
        if host.dtype is not dst.dtype or host.shape != dst.shape or host.stride() != dst.stride():
            laid = torch.empty_strided(dst.shape, dst.stride(), dtype=dst.dtype, device="cpu")
            host = laid.copy_(host)
        at = address_of(dst)
        recorder = self._recorder_at(at)
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
            recorder.flush()
            data = bytes_of(host)
            whole = len(data) >= MIN_OFFER_BYTES and dst.untyped_storage().nbytes() == len(data)
            if whole and link.offers is not None and link.offers.accepts(buffer, len(data), recorder.heap.reusable):
                upload(link, buffer, data)
            else:
                link.write(buffer, at & OFFSET_MASK, data)
            self._keep_uploaded(link, dst, host)

    @staticmethod
    def _keep_uploaded(link: Link, dst: Tensor, host: Tensor) -> None:
        """Keep a small tensor that was uploaded, so that a script that reads it, or decides by it, need not wait."""
        if 0 < host.numel() * host.element_size() <= MAX_BYTES and host.dtype in REAL:
            at = address_of(dst)
            link.keep(at >> ID_SHIFT, _view_key(dst, at), host.clone())

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
        recorder = self._recorder_at(at)
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

    def _fetch(self, dst: Tensor, src: Tensor) -> bool:
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
        recorder = self._recorder_at(at)
        with recorder.lock:
            link = recorder.require_link()
            holder = recorder.lazy_clones.holder(at >> ID_SHIFT)
            if link.mirror(holder, _view_key(src, at)) is not None:
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
            self._copy(kept, src)
            buffer = address_of(kept) >> ID_SHIFT
            recorder.send_later(partial(_fetch_kept, kept, buffer, into, dst))
        return True

    def _read_into(self, dst: Tensor, src: Tensor) -> bool:
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
        recorder = self._recorder_at(at)
        self.reads += 1
        wish_for_huge_pages(dst.data_ptr(), dst.numel() * dst.element_size())
        with recorder.lock:
            if recorder.capture is not None:
                recorder.capture.refuse()
            recorder.flush()
            holder = recorder.lazy_clones.holder(at >> ID_SHIFT)
            recorder.require_link().read(holder, at & OFFSET_MASK, bytes_of(dst.detach()))
            recorder.idle()
        return True

    def to_host(self, t: Tensor) -> Tensor:
        """A host copy of a device tensor. If the buffer was read before and not written since, the copy comes from the cache."""
        at = address_of(t)
        recorder = self._recorder_at(at)
        self.reads += 1
        with recorder.lock:
            recorder.reads += 1
            if recorder.capture is not None:
                recorder.capture.refuse()
            buffer = at >> ID_SHIFT
            if recorder.replaced:
                buffer = recorder.lazy_clones.holder(buffer)
            key = _view_key(t, at)
            link = recorder.require_link()
            early = link.is_early(buffer)
            if early:
                link.finish_early((buffer,), partial(_send_before_early_value, recorder))
            kept = link.mirror(buffer, key)
            if kept is not None:
                if not early:
                    wait_as_cuda(recorder, link)
                return kept
            small = self._small_value(t, recorder, link, buffer, key)
            if small is not None:
                return small
            if not is_dense(t):
                dense = torch.empty(t.shape, dtype=t.dtype, device=raw_device(t))
                self._copy(dense, t)
                host = self.to_host(dense)
            else:
                host = self._read_dense(recorder, link, buffer, key)
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
        if value.early:
            link.finish_early(value.early, partial(_send_before_early_value, recorder))
        elif not value.reads:
            wait_as_cuda(recorder, link)
        computed = value.compute(self._read_all(recorder, link, value.reads))
        if computed is not None:
            link.keep(buffer, key, computed)
        return computed

    def known_value(self, t: Tensor) -> Tensor | None:
        """A host copy of a small device tensor, if there is one without waiting for the device."""
        at = address_of(t)
        recorder = self._recorder_at(at)
        if not 0 < t.numel() * t.element_size() <= MAX_BYTES or t.dtype not in REAL or recorder.recording:
            return None  # what is recorded runs again with other values
        with recorder.lock:
            link = recorder.link
            if link is None:
                return None
            host = self._host_values.now(recorder, link, recorder.lazy_clones.holder(at >> ID_SHIFT), _view_key(t, at))
            if host is not None:
                wait_as_cuda(recorder, link)
            return host

    def _read_all(self, recorder: Recorder, link: Link, places: list[Range]) -> list[Tensor]:
        """Read small parts of buffers with one wait."""
        hosts: list[Tensor] = []
        for buffer, view in places[:-1]:
            host, memory = _host_memory(view[1], view[2], view[3], nbytes_of(view))
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

    @staticmethod
    def _read_dense(recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Tensor:
        """Send the open program, and wait for the values of a dense view."""
        offset, dtype, shape, stride = key
        nbytes = prod(shape) * dtype.itemsize
        if nbytes and recorder.open:
            link.hold()
        recorder.flush()
        if not nbytes:
            recorder.idle()
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        host: Tensor | None = None
        small = bytearray(nbytes) if nbytes <= MAX_EARLY_BYTES and dtype in REAL else None
        if small is None:
            host, memory = _host_memory(dtype, shape, stride, nbytes)
        else:
            memory = memoryview(small)
        pending = link.ask(buffer, offset, memory)
        try:  # what does not need the answer is done here, while the executor works
            if host is None:
                host = tensor_on(small, dtype, shape, stride)
            where = origin()
            if nbytes <= MAX_EARLY_BYTES:
                recorder.note_read(buffer, key, nbytes, offset + nbytes, where)
            recorder.idle()
        except BaseException:
            link.abandon(pending)
            raise
        link.take(memory, pending, where)
        return host

    @staticmethod
    def read_early(recorder: Recorder, buffer: int, prediction: EarlyRead) -> bool:
        """Send the open program, and start to read a value that the script will probably want (`early_reads`).

        Returns:
            False if the prediction fails too often, or if the value cannot be read early. Then nothing is sent.
        """
        link = recorder.require_link()
        # a bundle of `wooly record` names the line of each read
        recorded = recorder.recording or link.recording or link.log is not None or recorder.capture is not None
        if recorded or link.many_reads_started or link.is_shared(buffer):
            return False
        if not prediction.begin():
            recorder.early_reads.forget(prediction)
            return False
        _, dtype, shape, stride = key = cast(ViewKey, prediction.view)
        host, memory = _host_memory(dtype, shape, stride, prediction.nbytes)
        link.hold()
        recorder.flush()
        link.read_early(buffer, key, memory, host, prediction)
        return True

    def local_scalar_dense(self, t: Tensor) -> Any:
        """`aten._local_scalar_dense`, which `.item()` calls, and each call that takes a tensor as a number."""
        number = None if _keeps_numbers() else number_for_call(t, frame_at(0).f_back, self._number)
        if number is not None:
            at = address_of(t)
            recorder = self._recorder_at(at)
            with recorder.lock:
                link = recorder.require_link()
                known = link.mirrors_of(recorder.lazy_clones.holder(at >> ID_SHIFT))
                if not known and recorder.capture is None:
                    wait_as_cuda(recorder, link)
                    return number
        return self.to_host(plain(t)).item()

    def _number(self, t: Tensor) -> Any:
        return self.to_host(plain(t)).item()

    # -- storages ----------------------------------------------------------------------------------------------------

    def resize(self, t: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Resize `t` and keep its leading bytes, as `resize_` does. If its storage grows, it does so for all its tensors.

        Before torch 2.13, which cannot exchange the memory of storages, `t` gets a storage of its own.
        """
        need = span(sizes, strides) * t.element_size()
        here = int(t.storage_offset()) * t.element_size()
        held = t.untyped_storage()
        have = held.nbytes()
        if not need or here + need <= have:
            _set_cpu(t, held, t.storage_offset(), sizes, strides)
            return
        if swap_memory is not None:
            self.resize_storage(held, here + need)
        else:
            grown = self.empty([here + need], dtype=torch.uint8, device=raw_device(t))
            if have:
                old = torch.empty(0, dtype=torch.uint8, device=raw_device(t))
                _set_cpu(old, held, 0, (have,), (1,))
                self._copy(grown[:have], old)
            held = grown.untyped_storage()
        _set_cpu(t, held, t.storage_offset(), sizes, strides)
        if self._fills_memory:
            first, end = have // t.element_size(), (here + need) // t.element_size()
            rest = torch.empty(0, dtype=t.dtype, device=raw_device(t))
            _set_cpu(rest, held, first, (end - first,), (1,))
            rest.fill_(visible_value(t.dtype))

    def resize_(self, t: Tensor, size: list[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
        """`aten.resize_`."""
        sizes = tuple(size)
        strides = contiguous_strides(sizes)
        if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
            strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
        if tuple(t.shape) != sizes or memory_format is not None:
            self.resize(t, sizes, strides)
        return t

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Change the size of a device storage in place. All its tensors see the new memory and keep their shapes.

        The leading bytes stay. Memory that is not used any more is freed with the next program.

        Raises:
            NotImplementedError: this release of PyTorch cannot exchange the memory of storages.
            torch.OutOfMemoryError: the executor has no memory for the storage.
        """
        have = storage.nbytes()
        if nbytes == have:
            return
        if nbytes < 0:  # CUDA takes it for a size without sign
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")
        if swap_memory is None:
            raise NotImplementedError(
                f"resizing a storage (as fully sharded training does) is not supported on the wooly device with torch "
                f"{torch.__version__}; install torch 2.13, resize the tensor with t.resize_(...), or make a new one"
            )
        device = raw_storage_device(storage)
        grown = self._bytes_of_new(nbytes, device)
        kept = min(have, nbytes)
        if kept:
            old = torch.empty(0, dtype=torch.uint8, device=device)
            _set_cpu(old, storage, 0, (kept,), (1,))
            self._copy(grown[:kept], old)
        if have:
            swap_memory(storage, self._bytes_of_new(0, device).untyped_storage())
        if nbytes:
            swap_memory(storage, grown.untyped_storage())

    def _bytes_of_new(self, nbytes: int, device: torch.device) -> Tensor:
        """A new storage as a tensor of bytes. It is filled with zeros."""
        recorder = self._devices.recorders[self._devices.index_of(device)]
        return self._new_zeroed((Layout(torch.uint8, (nbytes,), (1,)), self._forms.alloc(nbytes), recorder))

    def set_storage(self, t: Tensor, source: Any) -> Tensor:
        """`aten.set_.source_Storage`."""
        n = source.nbytes() // t.element_size()
        return _set_cpu(t, source, 0, (n,), (1,))  # type: ignore[no-any-return]

    def set_within(
        self, t: Tensor, source: Any, offset: int, size: list[int], stride: list[int] | None = None
    ) -> Tensor:
        """`aten.set_.source_Storage_storage_offset`. A storage that is too small grows, as CUDA's does."""
        sizes = tuple(size)
        strides = tuple(stride) if stride else contiguous_strides(sizes)
        elements = span(sizes, strides)
        need = (offset + elements) * t.element_size()
        if elements and need > source.nbytes() and swap_memory is not None:
            self.resize_storage(source, need)
        return _set_cpu(t, source, offset, sizes, strides)  # type: ignore[no-any-return]

    def set_tensor(self, t: Tensor, source: Tensor) -> Tensor:
        """`aten.set_.source_Tensor`."""
        return _set_cpu(  # type: ignore[no-any-return]
            t, source.untyped_storage(), source.storage_offset(), tuple(source.shape), source.stride()
        )

    def set_none(self, t: Tensor) -> Tensor:
        """`aten.set_` without arguments: set an empty storage."""
        return self.set_tensor(t, self.empty([0], dtype=t.dtype, device=raw_device(t)))

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {
            "empty.memory_format": self.empty,
            "empty_strided": self.empty_strided,
            "_efficientzerotensor": self.zeros,
            "copy_": self.copy_,
            "_lazy_clone": self.lazy_clone,
            "_copy_from": self.copy_from,
            "_copy_from_and_resize": self.copy_from_and_resize,
            "_local_scalar_dense": self.local_scalar_dense,
            "resize_": self.resize_,
            "set_.source_Storage": self.set_storage,
            "set_.source_Storage_storage_offset": self.set_within,
            "set_.source_Tensor": self.set_tensor,
            "set_": self.set_none,
        }
