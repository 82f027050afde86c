"""Host copies of views of device buffers: their keys, their memory, and parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import View

from wooly.dtypes import TORCH_DTYPES
from wooly.early_reads import MAX_EARLY_BYTES
from wooly.link import ViewKey
from wooly.storage import OFFSET_MASK, span

#: Maximum size, in bytes, of a host copy that is kept when it is uploaded, or computed here.
MAX_BYTES = 32 << 10
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
HALVES = frozenset((torch.float16, torch.bfloat16))
FLOATS = HALVES | {torch.float32, torch.float64}
#: Dtypes of such copies.
REAL = INTEGERS | FLOATS


def key_of(view: View) -> ViewKey:
    """The key under which a link keeps the host copy of a view."""
    return view.offset, TORCH_DTYPES[view.dtype], view.sizes, view.strides


def nbytes_of(key: ViewKey) -> int:
    """Size of the elements of a view, in bytes."""
    n = key[1].itemsize
    for size in key[2]:
        n *= size
    return n


def view_key(t: Tensor, at: int) -> ViewKey:
    """Key of a view among all views of its buffer."""
    return at & OFFSET_MASK, t.dtype, tuple(t.shape), t.stride()


def bytes_of(t: Tensor) -> memoryview:
    """The memory of a dense host tensor, as bytes."""
    n = t.numel() * t.element_size()
    if not n:
        return memoryview(b"")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        t.untyped_storage(), t.storage_offset() * t.element_size(), (n,), (1,)
    )
    return flat.numpy().data


def tensor_on(memory: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A dense tensor of at least one element on a buffer of Python. `dtype` must be one of `REAL`.

    It takes a third of the time of a tensor whose memory is PyTorch's.
    """
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def host_memory(
    dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], nbytes: int
) -> tuple[Tensor, memoryview]:
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


def is_dense_tensor(t: Tensor) -> bool:
    """Whether the elements of a tensor are in memory without gaps and without overlap."""
    n = t.numel()
    return t.is_contiguous() or (n == span(tuple(t.shape), t.stride()) and 0 not in t.stride())


def is_dense(key: ViewKey) -> bool:
    """Whether a view covers its memory without gaps, each address once."""
    expected = 1
    for stride, size in sorted(zip(key[3], key[2], strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def part_of(host: Tensor, whole: ViewKey, part: ViewKey) -> Tensor | None:
    """A part of a host copy, as a view with the sizes and strides of `part`; None if the copy does not cover it.

    Args:
        host: the copy, with the strides of `whole`.
        whole: what was copied.
        part: what is wanted of the same buffer.
    """
    if whole == part:
        return host
    begin, dtype, shape, stride = part
    if dtype is not whole[1] or 0 in shape or tuple(host.stride()) != tuple(whole[3]) or not is_dense(whole):
        return None
    distance, rest = divmod(begin - whole[0], dtype.itemsize)
    last = distance + sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)])
    if rest or distance < 0 or last >= host.numel():
        return None
    return host.as_strided(shape, stride, int(host.storage_offset()) + distance)
