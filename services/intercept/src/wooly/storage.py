"""Device storages: plain `torch.Tensor` objects whose data pointer is a buffer id.

A storage is made from a DLPack capsule (device kDLExtDev, which PyTorch maps to PrivateUse1) with the fake data pointer
``number << 43 | device << 40``. PyTorch calls the capsule's deleter when it frees the storage. PyTorch may do so while an
exception propagates, and then a deleter in Python is not safe: a ctypes callback would replace the user's exception with a
SystemError. So this file uses NumPy's deleter. It is a C function that takes the interpreter lock, frees the struct and drops one
reference to an `Owner` object. Python then runs the finalizer of the `Owner` and preserves the exception.

A *buffer id* is ``number << 3 | device``. It is unique in the process and contains the index of the device. The number has 21
bits, so each of eight devices can have two million live storages. The byte offset inside a storage has 40 bits (1 TiB).

This file does not depend on programs or sessions. Each device has a `Heap`, which allocates ids and lists the ids of freed
storages in `dead`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from wooly.native import HeapFields
from wooly.torch_private import from_dlpack, redispatch_cpu, reinterpret

#: Position of the buffer id in an address; the bits below contain the byte offset.
ID_SHIFT = 40
#: Bits of an address that contain the byte offset inside the storage.
OFFSET_MASK = (1 << ID_SHIFT) - 1
#: Number of bits of a buffer id that contain the device.
DEVICE_BITS = 3
#: Maximum number of devices of a process.
MAX_DEVICES = 1 << DEVICE_BITS
#: Bits of a buffer id that contain the device.
DEVICE_MASK = MAX_DEVICES - 1
#: Bits of an address that are part of a call's signature: byte offset and device.
PLACE_MASK = (1 << ID_SHIFT + DEVICE_BITS) - 1
#: DLPack's number of the device type kDLExtDev.
_KDL_EXT_DEV = 12

#: Addresses of host storages for which `is_pinned` is true.
pinned: set[int] = set()

# DLPack type code and bits per dtype. A tensor of another dtype is made as bytes and then viewed as its dtype.
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

_MAX_DIM = 24  # a tensor with more dimensions is made flat and then viewed with its shape
# DLManagedTensor: data, device type, device id, ndim, dtype code, bits, lanes, shape*, strides*, byte_offset, context, deleter
_MANAGED = [struct.Struct(f"<QiiiBBHQQQQQ{n}q") for n in range(2 * _MAX_DIM + 1)]
_MANAGED_SIZE = _MANAGED[0].size
_CAPSULE_NAME = b"dltensor"

_view_dtype = redispatch_cpu(torch.ops.aten.view.dtype)

_ID_BITS = 64 - ID_SHIFT
#: Bits of an entry of `Heap.dead` that contain the buffer id; the bits above contain the bytes.
ID_MASK = (1 << _ID_BITS) - 1
#: Maximum number of live storages per device: the numbers that fit into a fake pointer.
MAX_STORAGES = (1 << _ID_BITS - DEVICE_BITS) - 1


#: `Heap.granted` of a session whose memory nobody limits.
NO_LIMIT = 1 << 62


def _make_no_room(nbytes: int) -> None:
    """`Heap.make_room` of a heap without a session: the first instruction that is sent raises the error."""


class HeapObserver(Protocol):
    """Is told about each storage that is made or freed. `freed` may be called at any time, in any thread."""

    def allocated(self, buffer: int, nbytes: int) -> None:
        """A storage was made."""

    def freed(self, buffer: int, nbytes: int) -> None:
        """A storage was freed."""


class Heap(HeapFields):
    """The storages of one device: allocates their ids and counts their bytes.

    Attributes:
        index: index of the device.
        dead: ``bytes << 24 | id`` of each storage that was freed since the recorder last emptied this list, and the complement
            of an id for each `Keeper` of it that was freed. `recycle` makes an id available again.
        kept: for each id that a `Keeper` keeps, the number of such objects.
        live: number of live storages.
        live_bytes: bytes of all live storages.
        peak_bytes: highest value of `live_bytes` since the last `reset_peak`.
        peak_live: number of live storages when `peak_bytes` was reached.
        freed: number of storages that were freed, and whose free was sent.
        freed_bytes: bytes of storages that were freed, up to the last `settle`.
        owner: class of the `Owner` objects. Each storage holds a reference to one `Owner`, whose value is ``bytes << 24 | id``.
        opener: called before the first storage is made, if it is not None. It opens the session.
        held_bytes: bytes that the executor holds for storages when it has run everything: `live_bytes`, and storages whose free
            is not sent.
        granted: limit of `held_bytes` up to which storages are made without asking the executor.
        fraction: part of the session's quota that this process may use.
        make_room: called with the bytes of a storage that exceeds `granted`. It raises an error if there is no memory.
        orphans: owners of kept buffers whose storages were freed, by id.
        observers: are told about storages; see `observe`.
        observed: whether there are observers.
        tell_free: finalizer of an owner while there are observers, or of an entry of `dead` that has no owner.
    """

    __slots__ = (
        "_owners",
        "fraction",
        "freed",
        "freed_bytes",
        "make_room",
        "observers",
        "opener",
        "orphans",
        "owner",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.dead: list[int] = []
        self.kept: dict[int, int] = {}
        self.orphans: dict[int, int] = {}
        self.live = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_live = 0
        self.freed = 0
        self.freed_bytes = 0
        self._owners = _owner_types(self)
        self.observers: tuple[HeapObserver, ...] = ()
        self.observed = False
        self.owner = self._owners.plain
        self.tell_free = self._owners.tell_free
        self.opener: Callable[[], None] | None = None
        self.held_bytes = 0
        self.granted = NO_LIMIT
        self.fraction = 1.0
        self.make_room: Callable[[int], None] = _make_no_room
        self._reusable: list[int] = []
        self._next = 0

    def reserve_id(self) -> int:
        """Allocate a buffer id.

        Raises:
            RuntimeError: the device has `MAX_STORAGES` live storages.
        """
        if self.opener is not None:
            self.opener()
        if self._reusable:
            return self._reusable.pop()
        if self._next == MAX_STORAGES:
            raise RuntimeError(
                f"CUDA error: out of memory (cuda:{self.index} has the maximum of {MAX_STORAGES} live storages; delete tensors)"
            )
        self._next += 1
        return self._next << DEVICE_BITS | self.index

    def recycle(self, ids: list[int]) -> None:
        """Make ids available again. Call this after the free of their buffers was sent to the executor.

        Without reuse, a long training would run out of ids within hours.
        """
        self.freed += len(ids)
        self._reusable.extend(ids)

    def unreserve(self, ids: list[int]) -> None:
        """Give back ids from `reserve_id` that no storage got."""
        self._reusable.extend(ids)

    def settle(self) -> None:
        """Note that the frees of all storages were sent, so the executor holds what is live."""
        self.freed_bytes += self.held_bytes - self.live_bytes
        self.held_bytes = self.live_bytes

    @property
    def reusable(self) -> Sequence[int]:
        """Ids whose buffers were freed, and that no storage has again."""
        return self._reusable

    def adopt(self, freed: int) -> int:
        """A new owner for a buffer whose storage was freed, and whose free is not sent. `freed` is its entry of `dead`."""
        self.live += 1
        self.live_bytes += freed >> _ID_BITS
        return self.owner(freed)

    def is_kept(self, freed: int) -> bool:
        """Process an entry of `dead` while `kept` has entries. Returns False if the buffer must be freed now.

        The caller holds the recorder's lock. So a `Keeper` may be freed at any time, in any thread.
        """
        kept = self.kept
        if freed < 0:
            buffer = ~freed
            kept[buffer] -= 1
            if not kept[buffer]:
                del kept[buffer]
                self.orphans.pop(buffer, None)
            return True
        buffer = freed & ID_MASK
        if buffer not in kept:
            return False
        self.orphans[buffer] = self.adopt(freed)
        return True

    def observe(self, observer: HeapObserver, *, on: bool = True) -> None:
        """Tell `observer` about storages from now on; `on` false: no longer. Without observers, a storage costs nothing more."""
        others = tuple([known for known in self.observers if known is not observer])
        self.observers = (*others, observer) if on else others
        self.observed = bool(self.observers)
        owners = self._owners
        self.owner = owners.observed if self.observers else owners.plain
        owners.plain.__del__ = owners.tell_free if self.observers else owners.free  # type: ignore[attr-defined]

    def reset_peak(self) -> None:
        """Set the peaks to what is live now."""
        self.peak_bytes, self.peak_live = self.live_bytes, self.live

    def note_peak(self) -> None:
        """Update the peaks after `live_bytes` has grown."""
        if self.live_bytes > self.peak_bytes:
            self.reset_peak()


class _Owners(NamedTuple):
    """The classes of a heap's owners, and their finalizers.

    Attributes:
        plain: the class of owners.
        observed: the class of owners whose storages are made while there are observers.
        free: finalizer of `plain` without observers.
        tell_free: its finalizer while there are observers.
    """

    plain: type[int]
    observed: type[int]
    free: Callable[[Any], None]
    tell_free: Callable[[Any], None]


def _owner_types(heap: Heap) -> _Owners:
    dead, bits, mask = (
        heap.dead,
        _ID_BITS,
        ID_MASK,
    )  # local names, because the interpreter clears this module at exit before it frees the last storages

    class Owner(int):
        """Reports that a storage was freed. It is a subclass of int, which the garbage collector does not track."""

        __slots__ = ()

        def __del__(self) -> None:
            heap.live -= 1
            heap.live_bytes -= self >> bits
            dead.append(+self)  # a plain int

    free = Owner.__del__

    class ObservedOwner(Owner):
        """An owner whose storage was announced to the observers."""

        __slots__ = ()

        def __new__(cls, value: int) -> ObservedOwner:
            made = super().__new__(cls, value)
            for observer in heap.observers:
                observer.allocated(value & mask, value >> bits)
            return made

    def tell_free(self: Any) -> None:
        free(self)
        for observer in heap.observers:
            observer.freed(self & mask, self >> bits)

    return _Owners(Owner, ObservedOwner, free, tell_free)


#: One heap per device, by index.
heaps = tuple([Heap(index) for index in range(MAX_DEVICES)])

_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("PyMem_Malloc", ctypes.pythonapi))
_hold = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
#: The address space of this process as one buffer, so that `pack_into` can write at any address.
_memory = (ctypes.c_char * (1 << 62)).from_address(0)


def _numpy_deleter() -> int:
    """Address of NumPy's deleter for DLPack structs. It takes the interpreter lock, then frees the struct and its context."""
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    capsule = np.empty(0).__dlpack__()
    return int(_MANAGED[0].unpack_from(_memory, pointer_of(capsule, _CAPSULE_NAME))[-1])


_deleter = _numpy_deleter()


class Layout:
    """Precomputed data by which `new` makes tensors of one dtype, shape and strides.

    Attributes:
        dtype: element type.
        sizes: shape.
        strides: strides in elements.
        nbytes: bytes of the storage; by default the bytes that sizes and strides span.
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
        """Make a tensor of this layout on a new storage, without sending anything. Returns the tensor and its buffer id.

        Args:
            heap: heap of the device.
            buffer: an id from `reserve_id`, or 0 to allocate an id.

        Raises:
            torch.OutOfMemoryError: the executor has no memory for the storage.
        """
        nbytes = self.nbytes
        if not buffer:
            if heap.held_bytes + nbytes > heap.granted:
                heap.make_room(nbytes)
            reusable = heap._reusable
            buffer = reusable.pop() if reusable else heap.reserve_id()
        heap.held_bytes += nbytes
        owner = heap.owner(nbytes << _ID_BITS | buffer)
        heap.live += 1
        heap.live_bytes = live = heap.live_bytes + nbytes
        if live > heap.peak_bytes:
            heap.peak_bytes, heap.peak_live = live, heap.live
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
            t = self._as_layout(t)
        return t, buffer

    def _as_layout(self, t: torch.Tensor) -> torch.Tensor:
        return reinterpret_bytes(t, self.dtype, self.sizes, self.strides)


def reinterpret_bytes(
    flat: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    """View the bytes of a whole storage with another dtype, shape and strides. `offset` is in elements of `dtype`."""
    if dtype is not torch.uint8:
        usable = flat.shape[0] - flat.shape[0] % dtype.itemsize
        if usable != flat.shape[0]:
            flat = reinterpret(flat, (usable,), (1,), 0)
        flat = _view_dtype(flat, dtype)
    return reinterpret(flat, sizes, strides, offset)


class Lease:
    """Buffers without tensors. They are freed when this object is freed."""

    __slots__ = ("__weakref__", "_owners", "ids")

    def __init__(self, heap: Heap, sizes: Sequence[int]) -> None:
        #: One buffer id per entry of `sizes` (bytes).
        self.ids = [heap.reserve_id() for _ in sizes]
        self._owners = [heap.owner(n << _ID_BITS | i) for n, i in zip(sizes, self.ids, strict=True)]
        heap.live += len(self.ids)
        heap.live_bytes += sum(sizes)
        heap.held_bytes += sum(sizes)
        heap.note_peak()


class Keeper:
    """Keeps buffers: they are freed when their tensors and this object are freed. The maker holds the recorder's lock."""

    __slots__ = ("_dead", "ids")

    def __init__(self, heap: Heap, ids: Iterable[int]) -> None:
        self._dead = heap.dead
        #: The buffer ids.
        self.ids = list(ids)
        for i in self.ids:
            heap.kept[i] = heap.kept.get(i, 0) + 1

    def __del__(self) -> None:
        self._dead.extend([~i for i in self.ids])


def span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements from the first to the last element of a view, both included."""
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
    """Strides without gaps or overlap that keep the order of the dimensions, as `preserve_format` does on the CPU."""
    n = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride != n:
            return torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()
        n *= size
    return tuple(strides)  # keeps the strides of dimensions of size 1; a meta tensor would change them


def address_of(t: torch.Tensor) -> int:
    """``buffer id << 40 | byte offset`` of a device tensor. Also works for an empty tensor, whose `data_ptr` is 0."""
    return t.data_ptr() or (t.untyped_storage().data_ptr() + int(t.storage_offset()) * t.element_size())


def live_bytes(device: int = 0) -> int:
    """Bytes of all live storages of a device."""
    return heaps[device].live_bytes


def live_count(device: int = 0) -> int:
    """Number of live storages of a device."""
    return heaps[device].live
