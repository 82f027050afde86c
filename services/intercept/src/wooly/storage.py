"""Device storages: plain `torch.Tensor`s whose data pointer is a buffer id, and the news of their death.

A storage is born from a DLPack capsule (device kDLExtDev, which PyTorch maps to PrivateUse1) with the fake data pointer
``number << 43 | device << 40``; PyTorch calls the capsule's deleter exactly when the storage dies. That may be while an exception
unwinds, when no Python function may simply be called: a ctypes callback would replace the user's exception with a SystemError. So
the deleter is NumPy's, a C function that takes the interpreter's lock, frees the struct and drops one reference to an object of
ours, whose finalizer Python itself runs with the exception put aside.

A *buffer id* is ``number << 3 | device``: the device can be told from it, and it is unique in the process. That leaves 21 bits
for the number, so two million storages may live on each of eight devices, and 40 bits for the byte offset inside one (1 TiB).

This file knows nothing of programs or sessions: a `Heap` per device hands out ids and reports deaths in its `dead`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch

from wooly.torch_private import from_dlpack, redispatch_cpu, reinterpret

ID_SHIFT = 40
OFFSET_MASK = (1 << ID_SHIFT) - 1
DEVICE_BITS = 3
#: Devices that a process can have.
MAX_DEVICES = 1 << DEVICE_BITS
#: The device of a buffer id.
DEVICE_MASK = MAX_DEVICES - 1
#: What a call's signature keeps of an address: byte offset and device.
PLACE_MASK = (1 << ID_SHIFT + DEVICE_BITS) - 1
_KDL_EXT_DEV = 12

#: Addresses of the host storages that count as pinned.
pinned: set[int] = set()

# DLPack type codes. Types that DLPack cannot carry everywhere travel as bytes and are re-viewed.
_DL_TYPE: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}

_MAX_DIM = 24  # beyond it the tensor is made flat and re-viewed
# DLManagedTensor: data, device type, device id, ndim, dtype code, bits, lanes, shape*, strides*, byte_offset, context, deleter
_MANAGED = [struct.Struct(f"<QiiiBBHQQQQQ{n}q") for n in range(2 * _MAX_DIM + 1)]
_MANAGED_SIZE = _MANAGED[0].size
_CAPSULE_NAME = b"dltensor"

_view_dtype = redispatch_cpu(torch.ops.aten.view.dtype)

_ID_BITS = 64 - ID_SHIFT
_ID_MASK = (1 << _ID_BITS) - 1
#: Numbers that a fake pointer has room for, on each device.
MAX_STORAGES = (1 << _ID_BITS - DEVICE_BITS) - 1


class Heap:
    """The storages of one device: their ids, their deaths, their sizes.

    Attributes:
        index: the device.
        dead: ids of storages that died since the recorder last looked. An id is given out again only after `recycle`.
        live: storages alive.
        live_bytes: their bytes.
        peak_bytes: highest value of `live_bytes` since the last `reset_peak`.
        owner: what makes the object that a storage holds one reference to, from ``bytes << 24 | id``.
    """

    __slots__ = ("_next", "_reusable", "dead", "index", "live", "live_bytes", "owner", "peak_bytes")

    def __init__(self, index: int) -> None:
        self.index = index
        self.dead: list[int] = []
        self.live = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.owner = _owner_type(self)
        self._reusable: list[int] = []
        self._next = 0

    def reserve_id(self) -> int:
        """A fresh buffer id.

        Raises:
            RuntimeError: as many storages live as ids can tell apart.
        """
        if self._reusable:
            return self._reusable.pop()
        if self._next == MAX_STORAGES:
            raise RuntimeError(f"CUDA error: out of memory ({MAX_STORAGES} storages live on cuda:{self.index})")
        self._next += 1
        return self._next << DEVICE_BITS | self.index

    def recycle(self, ids: list[int]) -> None:
        """Give ids out again: the far side has been told, in order, that their buffers are gone.

        A long training would use up all numbers in hours otherwise.
        """
        self._reusable.extend(ids)

    def reset_peak(self) -> None:
        """Start the peak again from what is live now."""
        self.peak_bytes = self.live_bytes


def _owner_type(heap: Heap) -> type[int]:
    dead, bits, mask = (
        heap.dead,
        _ID_BITS,
        _ID_MASK,
    )  # the interpreter's end clears this module before the last storages die

    class Owner(int):
        """A number, so that the garbage collector need not track it."""

        __slots__ = ()

        def __del__(self) -> None:
            heap.live -= 1
            heap.live_bytes -= self >> bits
            dead.append(self & mask)

    return Owner


#: One heap for each device that a process can have.
heaps = tuple([Heap(index) for index in range(MAX_DEVICES)])

_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("PyMem_Malloc", ctypes.pythonapi))
_hold = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
#: This process's address space, for `pack_into` at an address.
_memory = (ctypes.c_char * (1 << 62)).from_address(0)


def _numpy_deleter() -> int:
    """Address of NumPy's deleter for DLPack structs: `PyMem_Free` of the struct, `Py_DECREF` of its context, under the lock."""
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    capsule = np.empty(0).__dlpack__()
    return int(_MANAGED[0].unpack_from(_memory, pointer_of(capsule, _CAPSULE_NAME))[-1])


_deleter = _numpy_deleter()


class Layout:
    """What `new` needs to make one kind of tensor again and again.

    Attributes:
        dtype: element type.
        sizes: shape.
        strides: strides in elements.
        nbytes: bytes of the storage, exactly what sizes and strides span.
    """

    __slots__ = (
        "_pack",
        "_tail",
        "bits",
        "code",
        "dtype",
        "flat",
        "nbytes",
        "ndim",
        "shape_at",
        "size",
        "sizes",
        "strides",
    )

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], nbytes: int = -1) -> None:
        self.dtype = dtype
        self.sizes = tuple(sizes)
        self.strides = tuple(strides)
        exact = span(self.sizes, self.strides) * dtype.itemsize
        self.nbytes = exact if nbytes < 0 else nbytes
        ndim = len(self.sizes)
        self.flat = dtype not in _DL_TYPE or ndim > _MAX_DIM or ndim == 0 or self.nbytes != exact or exact == 0
        if self.flat:
            self.ndim, (self.code, self.bits) = 1, _DL_TYPE[torch.uint8]
            self._tail: tuple[int, ...] = (self.nbytes, 1)
        else:
            self.ndim, (self.code, self.bits) = ndim, _DL_TYPE[dtype]
            self._tail = self.sizes + self.strides
        layout = _MANAGED[2 * self.ndim]
        self._pack = layout.pack_into
        self.size = layout.size
        self.shape_at = _MANAGED_SIZE + 8 * self.ndim

    def new(self, heap: Heap, buffer: int = 0) -> tuple[torch.Tensor, int]:
        """A tensor of this layout on a new storage, and the storage's buffer id. Nothing is sent anywhere.

        Args:
            heap: that of the device.
            buffer: an id from `reserve_id`, or 0 for a fresh one.
        """
        if not buffer:
            reusable = heap._reusable
            buffer = reusable.pop() if reusable else heap.reserve_id()
        nbytes = self.nbytes
        owner = heap.owner(nbytes << _ID_BITS | buffer)
        heap.live += 1
        heap.live_bytes = live = heap.live_bytes + nbytes
        if live > heap.peak_bytes:
            heap.peak_bytes = live
        _hold(owner)
        address = _allocate(self.size)
        self._pack(
            _memory,
            address,
            buffer << ID_SHIFT,
            _KDL_EXT_DEV,
            heap.index,
            self.ndim,
            self.code,
            self.bits,
            1,
            address + _MANAGED_SIZE,
            address + self.shape_at,
            0,
            id(owner),
            _deleter,
            *self._tail,
        )
        t = from_dlpack(_capsule_new(address, _CAPSULE_NAME, None))
        if self.flat:
            t = self._review(t)
        return t, buffer

    def _review(self, t: torch.Tensor) -> torch.Tensor:
        return review(t, self.dtype, self.sizes, self.strides)


def review(
    flat: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    """Bytes of a storage, all of it, seen as something else; `offset` in elements of `dtype`."""
    if dtype is not torch.uint8:
        usable = flat.shape[0] - flat.shape[0] % dtype.itemsize
        if usable != flat.shape[0]:
            flat = reinterpret(flat, (usable,), (1,), 0)
        flat = _view_dtype(flat, dtype)
    return reinterpret(flat, sizes, strides, offset)


class Lease:
    """Buffers without tensors: they live as long as this does."""

    __slots__ = ("_owners", "ids")

    def __init__(self, heap: Heap, sizes: Sequence[int]) -> None:
        #: One id per size in bytes.
        self.ids = [heap.reserve_id() for _ in sizes]
        self._owners = [heap.owner(n << _ID_BITS | i) for n, i in zip(sizes, self.ids, strict=True)]
        heap.live += len(self.ids)
        heap.live_bytes += sum(sizes)
        heap.peak_bytes = max(heap.peak_bytes, heap.live_bytes)


def span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to one past the last that sizes and strides reach."""
    last = 0
    for size, stride in zip(sizes, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, n = [], 1
    for size in reversed(sizes):
        strides.append(n)
        n *= size if size > 1 else 1
    return tuple(reversed(strides))


def dense_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps or overlap that keep the order of the dimensions, as the CPU's `preserve_format` has it."""
    n = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride != n:
            return torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()
        n *= size
    return tuple(strides)  # of dimensions of one element, too, where a meta tensor would have others


def address_of(t: torch.Tensor) -> int:
    """``buffer id << 40 | byte offset`` of a device tensor, also of an empty one (whose `data_ptr` is 0)."""
    return t.data_ptr() or (t.untyped_storage().data_ptr() + int(t.storage_offset()) * t.element_size())


def live_bytes(device: int = 0) -> int:
    """Bytes of all live storages of a device."""
    return heaps[device].live_bytes


def live_count(device: int = 0) -> int:
    """Number of live storages of a device."""
    return heaps[device].live
