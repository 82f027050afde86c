"""Kernels in CUDA C: `wooly.cuda_kernel`, and `torch.cuda._compile_kernel` while "cuda" is the Wooly device.

The client parses the source to find the kernel's parameters. So errors in the source are raised at the line of the script that
contains it. The distribution `wooly-cuda-c` has the parser; scripts without CUDA C do not need it. The source is sent as text
(ADR 22).
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
from wooly_wis.languages import ParameterKind

from wooly.device import current
from wooly.kernels.launch import ForeignKernel, Pointer

_NAME = re.compile(r"\s*(?:::)?([A-Za-z_][A-Za-z0-9_]*)\s*(?:<(.*)>)?\s*", re.DOTALL)
#: Pointers are passed as pointers to bytes: the client does not know the element type in the kernel.
_POINTERS = {
    ParameterKind.NUMBER: None,
    ParameterKind.READ: Pointer(DType.U8, writes=False),
    ParameterKind.WRITTEN: Pointer(DType.U8),
}
_SCALARS = {int: DType.I64, float: DType.F64, bool: DType.BOOL}
#: Bytes of shared memory per block: from the first number on, a kernel must call `set_shared_memory_config`, as in CUDA; the
#: second number is the maximum.
_ASKED_SHARED, _MOST_SHARED = 48 << 10, 96 << 10


class CudaKernel:
    """A kernel in CUDA C that can be launched. `cuda_kernel` makes it.

    Args:
        source: text in CUDA C.
        name: name of a ``__global__`` function, with its template arguments, if any (``scale<float, 4>``).

    Raises:
        RuntimeError: the source is not supported (the message names the line), it does not contain the kernel, or `wooly-cuda-c`
            is not installed.
    """

    def __init__(self, source: str, name: str) -> None:
        found = _NAME.fullmatch(name)
        if found is None:
            raise RuntimeError(f"Kernel compilation failed:\n{name!r} is not a valid name of a kernel")
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
        """Launch the kernel.

        Args:
            grid: number of blocks along each dimension.
            block: threads of a block along each dimension, at most 1024 in all.
            args: one argument per parameter: for a pointer a tensor on the device (None: a null pointer), else an int, float or
                bool, which is converted to the type of the parameter.
            shared_mem: bytes of ``extern __shared__`` arrays.
            stream: ignored, because all work of a session runs in order.

        Raises:
            TypeError: an argument has an unsupported type.
            ValueError: a tensor is not on the device, a number is given for a pointer or a tensor for a number, the number of
                arguments is wrong, or the block is too large.
        """
        values = args or ()
        key = (block, shared_mem, *[a.__class__ for a in values])
        kernel = self._known.get(key)
        if kernel is None:
            kernel = self._known[key] = self._signed(tuple(block), values, shared_mem)
        current().launches.launch(kernel, grid, values)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Allow launches with this much shared memory per block.

        Raises:
            RuntimeError: the device does not have this much shared memory.
        """
        if shared_mem_bytes > _MOST_SHARED:
            raise RuntimeError(
                f"Requested shared memory ({shared_mem_bytes} bytes) exceeds device limit ({_MOST_SHARED} bytes). "
                "Consider reducing block size or shared memory usage."
            )
        self._shared = shared_mem_bytes

    def _signed(self, block: tuple[int, ...], values: Sequence[Any], shared: int) -> ForeignKernel:
        """Make the `ForeignKernel` for the types of `values`."""
        if len(block) != 3 or min(block) < 1 or block[0] * block[1] * block[2] > MAX_BLOCK:
            raise ValueError(
                f"kernel {self._entry}: block is {block}, but it must be three positive integers whose product is at most "
                f"{MAX_BLOCK}"
            )
        if len(values) != len(self._pointers):
            raise ValueError(f"kernel {self._entry} takes {len(self._pointers)} arguments, but {len(values)} are given")
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
                        f"kernel {self._entry}: parameter {k} is a pointer, but argument {k} is a {type(value).__name__}"
                    )
                parameters.append(pointer)
                continue
            kind = next((d for t, d in reversed(_SCALARS.items()) if isinstance(value, t)), None)
            if kind is None:
                if isinstance(value, torch.Tensor):
                    raise ValueError(f"kernel {self._entry}: parameter {k} is a number, but argument {k} is a tensor")
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
    """Make a kernel from CUDA C.

    The kernel runs on any device, also on a CPU. Every load and store is checked against the tensors of the launch. An access out
    of bounds does not touch memory, and the launch fails.

    Args:
        source: text in CUDA C; docs/reference/cuda-c.md lists what is supported.
        name: name of a ``__global__`` function, with its template arguments, if any (``scale<float, 4>``).

    Raises:
        RuntimeError: the source is not supported (the message names the line), or `wooly-cuda-c` is not installed.

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
    """`torch.cuda._compile_kernel`. The executor compiles for its own device, so `compute_capability` is ignored.

    Raises:
        NotImplementedError: the call has include directories or compiler options.
        RuntimeError: the source is not supported, or `wooly-cuda-c` is not installed.
    """
    if cuda_include_dirs or nvcc_options:
        raise NotImplementedError(
            "cuda_include_dirs and nvcc_options are not supported, because the executor compiles the kernel; put all definitions "
            "into the source"
        )
    return CudaKernel(kernel_source, kernel_name)
