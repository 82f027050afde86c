"""Records launches of foreign kernels (Triton, CUDA C, PTX) as `kernel.launch`. See ADR 22.

The front end of each language makes one `ForeignKernel` per text and signature, and calls `Launches.launch` for each launch. Such
a call takes about 5 us.
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

from wooly import native
from wooly.devices import NAME, Devices
from wooly.interned_forms import Forms
from wooly.origins import origin
from wooly.recorder import Recorder
from wooly.storage import DEVICE_MASK, ID_SHIFT, OFFSET_MASK, PLACE_MASK, address_of
from wooly.torch_private import raw_device

_collect = None if native.module is None else native.module.collect_launch
#: Maximum number of cached forms; a full cache is cleared.
_MAX_FORMS = 65536


@dataclass(frozen=True, slots=True)
class Pointer:
    """A kernel parameter that is a pointer: the dtype of the elements, and whether the kernel may write to the buffer."""

    dtype: DType
    writes: bool = True


@dataclass(eq=False, slots=True)
class ForeignKernel:
    """One foreign kernel with one signature.

    Attributes:
        source: text of the kernel.
        entry: name of the function.
        parameters: parameters of the function: a pointer, or the dtype of a scalar.
        block: threads per block along each dimension.
        options: compile options, sorted by name.
        raw: the encoded source.
        name: digest of the encoded source.
        kinds: per parameter, 0 for a pointer, 1 for an unsigned number of 64 bits, 2 for another scalar.
    """

    source: Source
    entry: str
    parameters: tuple[Pointer | DType, ...]
    block: tuple[int, int, int] = (1, 1, 1)
    options: tuple[tuple[str, int | bool | str], ...] = ()
    raw: bytes = field(init=False)
    name: bytes = field(init=False)
    kinds: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.raw = encode_source(self.source)
        self.name = digest(self.raw)
        self.kinds = bytes([0 if isinstance(p, Pointer) else 1 if p is DType.U64 else 2 for p in self.parameters])


class Launches:
    """Records launches for all devices. Forms are cached by kernel, and by offset and size of the buffers."""

    def __init__(self, devices: Devices, forms: Forms) -> None:
        self._devices = devices
        self._forms = forms
        self._known: dict[tuple[Any, ...], int] = {}

    def recording(self) -> bool:
        """Whether launches are recorded for a module (`wooly export`) and do not run."""
        return self._devices.recorders[self._devices.current].require_link().recording

    def launch(self, kernel: ForeignKernel, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Record one launch.

        Args:
            kernel: kernel to run.
            grid: number of blocks along each of the three dimensions.
            args: one argument per parameter: for a pointer a tensor on the device (None: a null pointer), else a number.

        Raises:
            ValueError: a pointer argument is not a tensor on the device, or the tensors are on different devices.
        """
        key: list[Any] = [kernel]
        buffers: list[int] = []
        params: list[Any] = list(grid)
        if _collect is None or not _collect(kernel.kinds, tuple(args), key, buffers, params):
            self._collect(kernel, args, key, buffers, params)
        recorder = self._devices.recorders[buffers[0] & DEVICE_MASK if buffers else self._devices.current]
        with recorder.lock:
            try:
                if recorder.heap.dead:
                    recorder.release_dead()
                known = self._known.get(tuple(key))
                if known is None:
                    known = self._form(kernel, tuple(key), args)
                self._record(recorder, kernel, known, buffers, params)
            except BaseException:
                recorder.drop_incomplete()
                raise

    @staticmethod
    def _collect(
        kernel: ForeignKernel, args: Sequence[Any], key: list[Any], buffers: list[int], params: list[Any]
    ) -> None:
        """Add the arguments of a launch to its key, its buffers and its params.

        Raises:
            ValueError: see `launch`.
        """
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
        if any(b & DEVICE_MASK != buffers[0] & DEVICE_MASK for b in buffers):
            raise ValueError(f"kernel {kernel.entry}: its tensors are on different devices; move them to one device")

    def _record(
        self, recorder: Recorder, kernel: ForeignKernel, form: int, buffers: list[int], params: list[Any]
    ) -> None:
        link = recorder.require_link()
        if link.source(kernel.name, kernel.raw) and recorder.capture is None and not recorder.recording:
            # If the executor refuses the kernel, it refuses the program. Its tensors must not be lost, too.
            recorder.flush()
        recorder.operations += 1
        if link.mirroring:
            for w in self._forms.known[form].writes:
                link.forget(buffers[w])
        recorder.params += params
        recorder.emit(form, buffers, origin(3))
        if len(recorder.origins) >= recorder.room:
            recorder.close_if_due(form)

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
                    raise ValueError(
                        f"kernel {kernel.entry}: a pointer to {dtype.label} is not aligned: it starts at byte {offset} of its "
                        f"storage, which is not a multiple of {dtype.itemsize}"
                    )
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
            f"kernel {kernel.entry}: pointer argument {k} cannot be accessed from the device: it is a tensor on {a.device}; move "
            "it to the device"
        )
    return f"kernel {kernel.entry}: pointer argument {k} is a {type(a).__name__}, but must be a tensor on the device"
