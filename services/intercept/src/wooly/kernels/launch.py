"""Kernels in languages of others (Triton, CUDA C), recorded as `kernel.launch`: see ADR 22.

Who captures them makes a `ForeignKernel` per text and signature, and calls `Launches.launch` for each launch: about 5 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Argument, Launch, Source, encode_source
from wooly_wis.program import Form, Operand, ParamKind, ParamRef, Role, View

from wooly.devices import NAME, Devices
from wooly.recorder import Forms, Recorder, origin
from wooly.storage import DEVICE_MASK, ID_SHIFT, OFFSET_MASK, PLACE_MASK, address_of
from wooly.torch_private import raw_device

_MAX_FORMS = 65536


@dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter that is a buffer: the dtype of its elements, and whether the kernel may write it."""

    dtype: DType
    writes: bool = True


@dataclass(eq=False, slots=True)
class ForeignKernel:
    """A kernel of a source, for one signature.

    Attributes:
        source: its text.
        entry: the function.
        parameters: of the function: a pointer, or a scalar's dtype.
        block: threads of a group.
        options: hints and needs, sorted by name.
        raw: the source's bytes.
        name: their digest.
    """

    source: Source
    entry: str
    parameters: tuple[Pointer | DType, ...]
    block: tuple[int, int, int] = (1, 1, 1)
    options: tuple[tuple[str, int | bool | str], ...] = ()
    raw: bytes = field(init=False)
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.raw = encode_source(self.source)
        self.name = digest(self.raw)


class Launches:
    """Records launches for all devices. Forms are kept by kernel and by where the buffers begin and end."""

    def __init__(self, devices: Devices, forms: Forms) -> None:
        self._devices = devices
        self._forms = forms
        self._known: dict[tuple[Any, ...], int] = {}

    def recording(self) -> bool:
        """Whether launches are kept for a module, and nothing runs."""
        return self._devices.recorders[self._devices.current].require_link().recording

    def launch(self, kernel: ForeignKernel, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Record one launch.

        Args:
            kernel: what to run.
            grid: groups along each of three dimensions.
            args: per parameter a tensor on the device (for a pointer; None for a null pointer), or a number.

        Raises:
            ValueError: a pointer argument is no tensor on the device, or the tensors are on several.
        """
        key: list[Any] = [kernel]
        buffers: list[int] = []
        params: list[Any] = list(grid)
        for parameter, a in zip(kernel.parameters, args, strict=True):
            if parameter.__class__ is Pointer:
                if a is None:
                    key.append(None)
                    continue
                if not isinstance(a, torch.Tensor) or raw_device(a).type != NAME:
                    raise ValueError(_no_tensor(kernel, len(key) - 1, a))
                at = a.data_ptr() or address_of(a)
                buffers.append(at >> ID_SHIFT)
                key += (at & PLACE_MASK, a.untyped_storage().nbytes())
            elif parameter is DType.U64:
                params.append(a - (1 << 64) if a >> 63 else a)
            else:
                params.append(a)
        index = buffers[0] & DEVICE_MASK if buffers else self._devices.current
        if any(b & DEVICE_MASK != index for b in buffers):
            raise ValueError(f"kernel {kernel.entry}: its tensors are on several devices")
        recorder = self._devices.recorders[index]
        with recorder.lock:
            try:
                if recorder.heap.dead:
                    recorder.release_dead()
                known = self._known.get(tuple(key))
                if known is None:
                    known = self._form(kernel, tuple(key), args)
                self._record(recorder, kernel, known, buffers, params)
            except BaseException:
                recorder.mend()
                raise

    def _record(
        self, recorder: Recorder, kernel: ForeignKernel, form: int, buffers: list[int], params: list[Any]
    ) -> None:
        link = recorder.require_link()
        link.source(kernel.name, kernel.raw)
        recorder.operations += 1
        if link.mirroring:
            for w in self._forms.known[form].writes:
                link.forget(buffers[w])
        recorder.params += params
        recorder.emit(form, buffers, origin(3))
        if len(recorder.origins) >= recorder.room:
            recorder.crowded(form)

    def _form(self, kernel: ForeignKernel, key: tuple[Any, ...], args: Sequence[Any]) -> int:
        operands: list[Operand] = []
        kinds = [ParamKind.I64] * 3
        given: list[Argument] = []
        for parameter, a in zip(kernel.parameters, args, strict=True):
            if not isinstance(parameter, Pointer):
                floating, truth = parameter.kind == "float", parameter is DType.BOOL
                given.append((parameter, ParamRef(len(kinds))))
                kinds.append(ParamKind.F64 if floating else ParamKind.BOOL if truth else ParamKind.I64)
            elif a is None:
                given.append((DType.U64, 0))
            else:
                offset = address_of(a) & OFFSET_MASK
                dtype = parameter.dtype
                if offset % dtype.itemsize:
                    raise ValueError(f"kernel {kernel.entry}: a pointer to {dtype.label} lies at byte {offset}")
                count = (a.untyped_storage().nbytes() - offset) // dtype.itemsize
                given.append(len(operands))
                role = Role.INOUT if parameter.writes else Role.IN
                operands.append(Operand(role, View(dtype, (count,), (1,), offset)))
        launch = Launch(
            kernel.source.language,
            kernel.name,
            kernel.entry,
            (ParamRef(0), ParamRef(1), ParamRef(2)),
            kernel.block,
            tuple(given),
            kernel.options,
        )
        form = self._forms.intern(Form("kernel.launch", tuple(operands), tuple(kinds), launch.attrs()))
        if len(self._known) >= _MAX_FORMS:
            self._known.clear()
        self._known[key] = form
        return form


def _no_tensor(kernel: ForeignKernel, k: int, a: Any) -> str:
    if isinstance(a, torch.Tensor):
        return (
            f"kernel {kernel.entry}: pointer argument {k} cannot be accessed from the device (a tensor on {a.device})"
        )
    return f"kernel {kernel.entry}: pointer argument {k} is a {type(a).__name__}, not a tensor on the device"
