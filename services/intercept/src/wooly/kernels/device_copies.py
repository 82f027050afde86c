"""Copies within one device: what records them, and clones that copy when somebody writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from wooly_wis.program import Form, Operand, Role

from wooly.devices import Devices
from wooly.interned_forms import Forms
from wooly.kernels.forms import view_of
from wooly.kernels.overlap import refuse_overlap, refuse_partial_overlap
from wooly.origins import origin
from wooly.storage import ID_SHIFT, OFFSET_MASK, address_of, reinterpret_bytes
from wooly.torch_private import is_zero_tensor, neg_view


def expanded(src: Tensor, dst: Tensor) -> Tensor:
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


class DeviceCopies:
    """Copies within each device."""

    def __init__(self, devices: Devices, forms: Forms) -> None:
        self._devices = devices
        self._forms = forms
        self._copies: dict[tuple[Any, ...], int] = {}

    def record(self, dst: Tensor, src: Tensor) -> int:
        """Record the copy of a tensor of the same device. Returns the number of its form."""
        given = src
        if src.shape != dst.shape:
            src = expanded(src, dst)
        at, to = address_of(src), address_of(dst)
        recorder = self._devices.at(to)
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
        recorder = self._devices.at(address_of(src))
        with recorder.lock:
            buffer, link = address_of(src) >> ID_SHIFT, recorder.require_link()
            if recorder.capture is not None or recorder.recording or link.is_shared(buffer):
                return src.clone()
            if recorder.heap.dead:
                recorder.release_dead()
            flat = recorder.lazy_clones.clone(buffer, src.untyped_storage().nbytes())
            recorder.watch_lazy_clones()
        return reinterpret_bytes(flat, src.dtype, tuple(src.shape), src.stride(), int(src.storage_offset()))

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {"_lazy_clone": self.lazy_clone}
