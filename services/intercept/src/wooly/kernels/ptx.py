"""Kernels that scripts bring as PTX: `wooly.ptx_kernel`.

Nobody but NVIDIA's compiler can tell what PTX loads and stores, so an executor takes it only of tenants who have the permission
`opaque_kernels`, and only one with such a chip can run it.
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
    """A kernel of a PTX text, ready to be launched. Made by `ptx_kernel`."""

    def __init__(self, text: str, name: str) -> None:
        found = re.search(rf"\.entry\s+{re.escape(name)}\s*(?:\(([^()]*)\))?", text)
        if found is None:
            raise RuntimeError(f"there is no .entry {name} in this PTX")
        kinds = _PARAM.findall(found[1] or "")
        unknown = [k for k in kinds if k not in _SCALARS]
        if unknown or len(kinds) != len([p for p in (found[1] or "").split(",") if p.strip()]):
            raise RuntimeError(f"kernel {name}: its parameters are not all numbers or pointers: {found[1]}")
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
        """Launch it.

        Args:
            grid: blocks along each dimension.
            block: threads of a block along each dimension, at most 1024 in all.
            args: per parameter a tensor on the device for a pointer (None for a null pointer), or a number.
            shared_mem: bytes of memory of a block, beside what the text declares.

        Raises:
            ValueError: a tensor that is not on the device or for a parameter of less than 64 bits, another number of
                arguments, too large a block.
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
                f"kernel {self._entry}: a block is three integers from 1, at most {MAX_BLOCK} threads; not {block}"
            )
        if len(values) != len(self._kinds):
            raise ValueError(f"kernel {self._entry} takes {len(self._kinds)} arguments, {len(values)} are given")
        parameters: list[Pointer | DType] = []
        for k, (value, kind) in enumerate(zip(values, self._kinds, strict=True)):
            pointer = value is None or isinstance(value, torch.Tensor)
            if pointer and kind.itemsize != 8:
                raise ValueError(f"kernel {self._entry}: argument {k} is a {kind.label}, and a tensor is given")
            parameters.append(_WRITTEN if pointer else kind)
        options = (("shared", shared),) if shared else ()
        return ForeignKernel(self._source, self._entry, tuple(parameters), (block[0], block[1], block[2]), options)


def ptx_kernel(text: str, name: str) -> PtxKernel:
    """A kernel in PTX.

    What it loads and stores cannot be checked. A launch fails for tenants who lack the permission `opaque_kernels` (an
    administrator gives it), and on devices that are not NVIDIA's.

    Args:
        text: PTX.
        name: of an ``.entry`` in it.

    Raises:
        RuntimeError: there is none, or its parameters are not understood.
    """
    return PtxKernel(text, name)
