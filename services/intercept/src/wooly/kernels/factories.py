"""Kernels that make tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly import native
from wooly.determinism import Determinism, Mode
from wooly.devices import Devices
from wooly.interned_forms import Forms
from wooly.origins import origin
from wooly.recorder import Recorder
from wooly.storage import Layout, contiguous_strides

#: Cached data to make a tensor: layout, form of the alloc, recorder of the device.
_New = tuple[Layout, int, Recorder]
#: Names of operators with native kernels.
_EMPTY, _EMPTY_STRIDED = "aten.empty.memory_format", "aten.empty_strided.default"
#: Largest storage of PyTorch, in bytes.
_MAX_BYTES = (1 << 63) - 1


def _teach_new(name: str, new: _New) -> None:
    """Teach the native kernel of a factory the plan of the call that runs now."""
    layout, alloc, recorder = new
    native.module.learn(name, recorder, None, ((layout, alloc),), (), [], [])


def visible_value(dtype: torch.dtype) -> float | int | bool:
    """The number with which PyTorch fills undefined memory while deterministic algorithms are on."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class Factories:
    """The kernels of this file, for all devices.

    Attributes:
        fills_memory: whether undefined memory is filled with `visible_value`, as `torch.utils.deterministic` asks.
    """

    def __init__(self, devices: Devices, forms: Forms, determinism: Determinism) -> None:
        self._devices = devices
        self._forms = forms
        self._layouts: dict[tuple[Any, ...], _New] = {}
        self._aranges: dict[tuple[Any, ...], Tensor] = {}
        self._new: Callable[[_New], Tensor] = self._new_zeroed
        self.fills_memory = False
        self._teach = None if native.module is None else _teach_new
        determinism.watch(self._switch)

    def forget_devices(self) -> None:
        """Clear the cache at the start of a session, because a device argument may mean another device than before."""
        self._layouts.clear()
        native.forget()

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
            return t.zero_() if self.fills_memory else t
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

    def bytes_of_new(self, nbytes: int, device: torch.device) -> Tensor:
        """A new storage as a tensor of bytes. It is filled with zeros."""
        recorder = self._devices.recorders[self._devices.index_of(device)]
        return self._new_zeroed((Layout(torch.uint8, (nbytes,), (1,)), self._forms.alloc(nbytes), recorder))

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
        self.fills_memory = mode.fills
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

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {
            "empty.memory_format": self.empty,
            "empty_strided": self.empty_strided,
            "_efficientzerotensor": self.zeros,
        }
