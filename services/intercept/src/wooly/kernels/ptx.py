"""Kernels in PTX: `wooly.ptx_kernel`.

Wooly cannot check the loads and stores of PTX. So an executor accepts PTX only from tenants with the permission `opaque_kernels`,
and only an executor with an NVIDIA GPU can run it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.foreign import MAX_BLOCK, Source

from wooly.device import current
from wooly.kernels.launch import ForeignKernel, Pointer

_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)\b")
_SCALARS = {
    **{f"{kind}{bits}": DType[f"I{bits}"] for kind in "bs" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": DType[f"U{bits}"] for bits in (8, 16, 32, 64)},
    "f16": DType.F16,
    "f32": DType.F32,
    "f64": DType.F64,
}
_WRITTEN = Pointer(DType.U8)


class PtxKernel:
    """A kernel in PTX that can be launched. `ptx_kernel` makes it."""

    def __init__(self, text: str, name: str) -> None:
        found = re.search(rf"\.entry\s+{re.escape(name)}\s*(?:\(([^()]*)\))?", text)
        if found is None:
            raise RuntimeError(f"the PTX text does not contain .entry {name}")
        kinds = _PARAM.findall(found[1] or "")
        unknown = [k for k in kinds if k not in _SCALARS]
        if unknown or len(kinds) != len([p for p in (found[1] or "").split(",") if p.strip()]):
            raise RuntimeError(
                f"kernel {name} has parameters that are not numbers or pointers: {found[1]}; use only numbers and pointers"
            )
        try:
            self._source = Source("ptx", text)
            ForeignKernel(self._source, name, ())
        except WisError as e:
            raise RuntimeError(f"kernel {name}: {e}") from None
        self._entry, self._kinds = name, [_SCALARS[k] for k in kinds]
        self._known: dict[Any, ForeignKernel] = {}

    def __call__(
        self,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of blocks along each dimension.
            block: threads of a block along each dimension, at most 1024 in all.
            args: one argument per parameter: for a pointer a tensor on the device (None: a null pointer), else a number.
            shared_mem: bytes of shared memory of a block, in addition to the shared memory that the text declares.

        Raises:
            ValueError: a tensor is not on the device, a tensor is given for a parameter of less than 64 bits, the number of
                arguments is wrong, or the block is too large.
        """
        values = args or ()
        key = (block, shared_mem, *[a is None or isinstance(a, torch.Tensor) for a in values])
        kernel = self._known.get(key)
        if kernel is None:
            kernel = self._known[key] = self._signed(tuple(block), values, shared_mem)
        current().launches.launch(kernel, grid, values)

    def _signed(self, block: tuple[int, ...], values: Sequence[Any], shared: int) -> ForeignKernel:
        if len(block) != 3 or min(block) < 1 or block[0] * block[1] * block[2] > MAX_BLOCK:
            raise ValueError(
                f"kernel {self._entry}: block is {block}, but it must be three positive integers whose product is at most "
                f"{MAX_BLOCK}"
            )
        if len(values) != len(self._kinds):
            raise ValueError(f"kernel {self._entry} takes {len(self._kinds)} arguments, but {len(values)} are given")
        parameters: list[Pointer | DType] = []
        for k, (value, kind) in enumerate(zip(values, self._kinds, strict=True)):
            pointer = value is None or isinstance(value, torch.Tensor)
            if pointer and kind.itemsize != 8:
                raise ValueError(f"kernel {self._entry}: parameter {k} is a {kind.label}, but argument {k} is a tensor")
            parameters.append(_WRITTEN if pointer else kind)
        options = (("shared", shared),) if shared else ()
        return ForeignKernel(self._source, self._entry, tuple(parameters), (block[0], block[1], block[2]), options)


def ptx_kernel(text: str, name: str) -> PtxKernel:
    """Make a kernel from PTX.

    Wooly cannot check the loads and stores of this kernel. A launch fails if the tenant lacks the permission `opaque_kernels` (an
    administrator grants it), or if the device is not an NVIDIA GPU.

    Args:
        text: PTX.
        name: name of an ``.entry`` in the text.

    Raises:
        RuntimeError: the text does not contain this entry, or its parameters are not supported.
    """
    return PtxKernel(text, name)
