"""Kernels that scripts write in CUDA C: `wooly.cuda_kernel`, and `torch.cuda._compile_kernel` where "cuda" is live.

The source is parsed here for the kernel's parameters, so that what is no CUDA C fails where it is written: by the distribution
`wooly-cuda-c`, which scripts without such kernels do not need. It travels as text (ADR 22).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from wooly_wis import languages
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.foreign import MAX_BLOCK, Source
from wooly_wis.languages import Passed

from wooly.device import current
from wooly.kernels.launch import ForeignKernel, Pointer

_NAME = re.compile(r"\s*(?:::)?([A-Za-z_][A-Za-z0-9_]*)\s*(?:<(.*)>)?\s*", re.DOTALL)
#: Where a pointer points is the kernel's business, so its window is of bytes.
_POINTERS = {Passed.NUMBER: None, Passed.READ: Pointer(DType.U8, writes=False), Passed.WRITTEN: Pointer(DType.U8)}
_SCALARS = {int: DType.I64, float: DType.F64, bool: DType.BOOL}
#: Bytes of shared memory from which CUDA wants to be asked first, and those that there are.
_ASKED_SHARED, _MOST_SHARED = 48 << 10, 96 << 10


class CudaKernel:
    """A kernel of a source in CUDA C, ready to be launched. Made by `cuda_kernel`.

    Args:
        source: the text.
        name: of a ``__global__`` function, with template arguments if it has any (``scale<float, 4>``).

    Raises:
        RuntimeError: the source is not understood, or has no such kernel (the message names the line); or `wooly-cuda-c` is not
            installed here.
    """

    def __init__(self, source: str, name: str) -> None:
        found = _NAME.fullmatch(name)
        if found is None:
            raise RuntimeError(f"Kernel compilation failed:\n{name!r} is no name of a kernel")
        self._entry, self._template = found.group(1), (found.group(2) or "").strip()
        try:
            self._source = Source("cuda-c", source)
            passed = languages.read("cuda-c").parameters(source, self._entry, self._template)
            self._pointers = tuple([_POINTERS[p] for p in passed])
        except WisError as e:
            raise RuntimeError(f"Kernel compilation failed:\n{e}") from None
        self._known: dict[Any, ForeignKernel] = {}
        self._shared = 0

    def __call__(
        self,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch it.

        Args:
            grid: blocks along each dimension.
            block: threads of a block along each dimension, at most 1024 in all.
            args: per parameter a tensor on the device for a pointer (None for a null pointer), or an int, float or bool,
                which is converted to the parameter's type.
            shared_mem: bytes of ``extern __shared__`` arrays.
            stream: is of no consequence: one session's work is done in order.

        Raises:
            TypeError: an argument of another type.
            ValueError: a tensor that is not on the device, a number for a pointer or the other way round, too large a block.
        """
        values = args or ()
        key = (block, shared_mem, *[a.__class__ for a in values])
        kernel = self._known.get(key)
        if kernel is None:
            kernel = self._known[key] = self._signed(tuple(block), values, shared_mem)
        current().launches.launch(kernel, grid, values)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Allow launches with that much memory of a block.

        Raises:
            RuntimeError: there is not that much.
        """
        if shared_mem_bytes > _MOST_SHARED:
            raise RuntimeError(
                f"Requested shared memory ({shared_mem_bytes} bytes) exceeds device limit ({_MOST_SHARED} bytes). "
                "Consider reducing block size or shared memory usage."
            )
        self._shared = shared_mem_bytes

    def _signed(self, block: tuple[int, ...], values: Sequence[Any], shared: int) -> ForeignKernel:
        """The kernel for arguments of certain types."""
        if len(block) != 3 or min(block) < 1 or block[0] * block[1] * block[2] > MAX_BLOCK:
            raise ValueError(
                f"kernel {self._entry}: a block is three integers from 1, at most {MAX_BLOCK} threads; not {block}"
            )
        if len(values) != len(self._pointers):
            raise ValueError(f"kernel {self._entry} takes {len(self._pointers)} arguments, {len(values)} are given")
        if shared >= _ASKED_SHARED and shared > self._shared:
            asked = f"only {self._shared} bytes configured" if self._shared else "not configured"
            raise RuntimeError(
                f"Kernel requires {shared} bytes of shared memory (>= 48KB), but {asked}. "
                "Call kernel.set_shared_memory_config(shared_mem) after compilation and before launching the kernel."
            )
        parameters: list[Pointer | DType] = []
        for k, (value, pointer) in enumerate(zip(values, self._pointers, strict=True)):
            if pointer is not None:
                if value is not None and not isinstance(value, torch.Tensor):
                    raise ValueError(
                        f"kernel {self._entry}: argument {k} is a pointer, and a {type(value).__name__} is given"
                    )
                parameters.append(pointer)
                continue
            kind = next((d for t, d in reversed(_SCALARS.items()) if isinstance(value, t)), None)
            if kind is None:
                if isinstance(value, torch.Tensor):
                    raise ValueError(f"kernel {self._entry}: argument {k} is a number, and a tensor is given")
                raise TypeError(f"Unsupported argument type: {type(value)}")
            parameters.append(kind)
        options: list[tuple[str, int | bool | str]] = []
        if shared:
            options.append(("shared", shared))
        if self._template:
            options.append(("template", self._template))
        three = block[0], block[1], block[2]
        return ForeignKernel(self._source, self._entry, tuple(parameters), three, tuple(options))


def cuda_kernel(source: str, name: str) -> CudaKernel:
    """A kernel written in CUDA C.

    It runs on whatever the session has. Every load and store is checked against the tensors that a launch is given: one
    that is out of bounds makes the launch fail, and touches nothing.

    Args:
        source: CUDA C; what of it is understood is in docs/reference/cuda-c.md.
        name: of a ``__global__`` function, with template arguments if it has any (``scale<float, 4>``).

    Raises:
        RuntimeError: the source is not understood (the message names the line), or `wooly-cuda-c` is not installed here.

    Example:
        add = wooly.cuda_kernel(source, "add")
        add(grid=(4, 1, 1), block=(256, 1, 1), args=[a, b, c, a.numel()])
    """
    return CudaKernel(source, name)


def compile_kernel(
    kernel_source: str,
    kernel_name: str,
    compute_capability: str | None = None,
    cuda_include_dirs: list[str] | None = None,
    nvcc_options: list[str] | None = None,
) -> CudaKernel:
    """`torch.cuda._compile_kernel`: what the chip is, is the far side's business, and no file is read.

    Raises:
        NotImplementedError: headers of one's own, or a compiler's options.
        RuntimeError: the source is not understood, or `wooly-cuda-c` is not installed here.
    """
    if cuda_include_dirs or nvcc_options:
        raise NotImplementedError(
            "cuda_include_dirs and nvcc_options mean nothing to a device elsewhere: put what is needed into the source"
        )
    return CudaKernel(kernel_source, kernel_name)
