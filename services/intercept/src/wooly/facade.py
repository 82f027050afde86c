"""Makes "cuda" mean the Wooly device: `torch.cuda` answers with the remote device's facts, and a tensor there says `cuda:0`.

Creation needs no patch: kernels under the CUDA dispatch key make Wooly tensors (see `device`). What is replaced here is only what
asks for CUDA before the dispatcher is reached: the conversions (`.to`, `.cuda`), constructors from Python data, device contexts,
generators, and the questions of `torch.cuda`. Undone by `uninstall`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import DeviceContext

from wooly import storage
from wooly.device import NAME, Device
from wooly.torch_private import raw_device, raw_is_cuda

_CUDA = "cuda"


def to_wooly(device: Any) -> Any:
    """A device argument with "cuda" read as the Wooly device; anything else unchanged.

    Raises:
        RuntimeError: CUDA's own error for an index that does not exist.
    """
    if isinstance(device, str):
        if not device.startswith(_CUDA):
            return device
        device = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool):
        device = torch.device(_CUDA, device)
    if isinstance(device, torch.device) and device.type == _CUDA:
        if device.index not in (None, 0):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device(NAME, 0)
    return device


class Facade:
    """The patches, so that they can be taken back.

    Args:
        device: the process's device.
        facts: answers the executor's facts of the device.
    """

    def __init__(self, device: Device, facts: Callable[[], dict[str, Any]]) -> None:
        self._device = device
        self._facts = facts
        self._undo: list[tuple[Any, str, Any]] = []

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def install(self) -> None:
        """Make "cuda" live."""
        if self._undo:
            return
        self._patch_tensor()
        self._patch_constructors()
        self._patch_cuda()

    def uninstall(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _patch_tensor(self) -> None:
        tensor = torch.Tensor
        shown = torch.device(_CUDA, 0)

        def device(t: torch.Tensor) -> torch.device:
            """Device of the tensor; the Wooly device says cuda:0."""
            real = raw_device(t)
            return shown if real.type == NAME else real

        def is_cuda(t: torch.Tensor) -> bool:
            """Whether the tensor lives on the (Wooly) CUDA device."""
            return raw_device(t).type == NAME or raw_is_cuda(t)

        self._set(tensor, "device", property(device))
        self._set(tensor, "is_cuda", property(is_cuda))
        real_to, real_type = tensor.to, tensor.type

        @functools.wraps(real_to)
        def to(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], (str, torch.device, int)):
                args = (to_wooly(args[0]), *args[1:])
            elif "device" in kwargs:
                kwargs["device"] = to_wooly(kwargs["device"])
            return real_to(t, *args, **kwargs)

        @functools.wraps(tensor.cuda)
        def cuda(
            t: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
        ) -> torch.Tensor:
            target = to_wooly(_CUDA if device is None else device)
            return real_to(t, target, non_blocking=non_blocking, memory_format=memory_format)

        @functools.wraps(real_type)
        def type_(t: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            name = dtype if isinstance(dtype, str) else ""
            if dtype is None:
                said = real_type(t)
                return said.replace("torch.wooly.", "torch.cuda.") if isinstance(said, str) else said
            if name.startswith("torch.cuda."):
                plain = real_type(torch.empty(0), name.replace("torch.cuda.", "torch.")).dtype
                return real_to(t, to_wooly(_CUDA), plain, non_blocking=non_blocking)
            return real_type(t, dtype, non_blocking, **kwargs)

        self._set(tensor, "to", to)
        self._set(tensor, "cuda", cuda)
        self._set(tensor, "type", type_)
        self._set(tensor, "pin_memory", lambda t, device=None: t)
        self._set(tensor, "get_device", lambda t: 0 if raw_device(t).type == NAME else -1)
        for name in ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
            self._set(tensor, name, _with_device(getattr(tensor, name)))

    def _patch_constructors(self) -> None:
        for name in ("tensor", "as_tensor", "asarray", "scalar_tensor", "tril_indices", "triu_indices"):
            self._set(torch, name, _with_device(getattr(torch, name)))
        real_generator = torch.Generator

        class Generator(metaclass=_GeneratorMeta):
            """A generator; for "cuda", one whose seed drives the remote device."""

        _GeneratorMeta.real = real_generator
        self._set(torch, "Generator", Generator)
        context = DeviceContext
        real_init = context.__init__

        def init(self: Any, device: Any) -> None:
            real_init(self, to_wooly(torch.device(device)))

        self._set(context, "__init__", init)
        real_load = torch.load

        @functools.wraps(real_load)
        def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
            where = torch.device(map_location).type if isinstance(map_location, (str, torch.device)) else ""
            if where not in (_CUDA, NAME):
                return real_load(f, map_location="cpu" if map_location is None else map_location, **kwargs)
            return _move(real_load(f, map_location="cpu", **kwargs))

        self._set(torch, "load", load)

    # -- torch.cuda --------------------------------------------------------------------------------------------------

    def _patch_cuda(self) -> None:
        device, module = self._device, torch.wooly  # type: ignore[attr-defined]
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "_lazy_call": lambda callable, **kwargs: callable(),
            "_is_in_bad_fork": lambda: False,
            "device_count": lambda: 1,
            "_device_count_nvml": lambda: 1,
            "current_device": lambda: 0,
            "set_device": module.set_device,
            "get_device_name": lambda d=None: self._name(),
            "get_device_properties": lambda d=None: self._properties(),
            "get_device_capability": lambda d=None: (8, 0),
            "get_arch_list": lambda: ["sm_80"],
            "is_bf16_supported": lambda including_emulation=True: True,
            "can_device_access_peer": lambda a, b: False,
            "synchronize": module.synchronize,
            "ipc_collect": lambda: None,
            "empty_cache": lambda: None,
            "manual_seed": module.manual_seed,
            "manual_seed_all": module.manual_seed,
            "seed": lambda: _nothing(module.seed()),
            "seed_all": lambda: _nothing(module.seed()),
            "initial_seed": module.initial_seed,
            "get_rng_state": module.get_rng_state,
            "set_rng_state": lambda state, device=None: module.set_rng_state(state),
            "get_rng_state_all": lambda: [module.get_rng_state()],
            "set_rng_state_all": lambda states: module.set_rng_state(states[0]),
            "memory_allocated": lambda d=None: storage.live_bytes(),
            "max_memory_allocated": lambda d=None: storage.peak_bytes(),
            "memory_reserved": lambda d=None: storage.live_bytes(),
            "max_memory_reserved": lambda d=None: storage.peak_bytes(),
            "reset_peak_memory_stats": lambda d=None: storage.reset_peak(),
            "reset_max_memory_allocated": lambda d=None: storage.reset_peak(),
            "memory_stats": lambda d=None: self._memory_stats(),
            "mem_get_info": lambda d=None: self._mem_get_info(),
            "memory_summary": lambda d=None, abbreviated=False: self._memory_summary(),
            "utilization": lambda d=None: 0,
            "Stream": _Stream,
            "Event": lambda *a, **k: _Event(module.synchronize, *a, **k),
            "current_stream": lambda d=None: _DEFAULT_STREAM,
            "default_stream": lambda d=None: _DEFAULT_STREAM,
            "set_stream": lambda s: None,
            "stream": _stream_context,
            "device": _device_context,
            "device_of": _device_context,
        }.items():
            self._set(torch.cuda, name, value)
        self._set(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        self._set(torch.cuda.memory, "memory_allocated", torch.cuda.memory_allocated)
        self._set(torch.cuda.memory, "mem_get_info", torch.cuda.mem_get_info)
        self._set(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
        self._set(torch.cuda.random, "manual_seed_all", torch.cuda.manual_seed_all)
        self._device = device

    def _name(self) -> str:
        return f"{self._facts().get('name', 'unknown device')} (WOOLY)"

    def _properties(self) -> SimpleNamespace:
        facts = self._facts()
        return SimpleNamespace(
            name=self._name(),
            major=8,
            minor=0,
            total_memory=int(facts.get("total_memory", 0)),
            multi_processor_count=int(facts.get("cores", 1)),
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            gcnArchName="",
            uuid="wooly",
            L2_cache_size=0,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
        )

    def _memory_stats(self) -> dict[str, int]:
        live, peak = storage.live_bytes(), storage.peak_bytes()
        return {
            "allocated_bytes.all.current": live,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": live,
            "reserved_bytes.all.peak": peak,
            "active_bytes.all.current": live,
            "active_bytes.all.peak": peak,
            "allocation.all.current": storage.live_count(),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def _mem_get_info(self) -> tuple[int, int]:
        total = int(self._facts().get("total_memory", 0))
        return total - storage.live_bytes(), total

    def _memory_summary(self) -> str:
        mib = 1 << 20
        return (
            f"{self._name()}: {storage.live_bytes() / mib:.1f} MiB in {storage.live_count()} tensors, "
            f"peak {storage.peak_bytes() / mib:.1f} MiB, total {self._mem_get_info()[1] / mib:.0f} MiB"
        )


class _Missing:
    """Marks an attribute that was inherited, not set on the patched object itself."""


_MISSING = _Missing()


class _GeneratorMeta(type):
    """Lets `torch.Generator("cuda")` answer a host generator, and keeps `isinstance` true for the real class."""

    real: Any = None

    def __call__(cls, device: Any = "cpu") -> Any:
        target = to_wooly(device)
        if isinstance(target, torch.device) and target.type == NAME:
            raise NotImplementedError(
                "torch.Generator('cuda') is not supported yet; seed the device with torch.cuda.manual_seed(…)"
            )
        return cls.real(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)


def _nothing(_: Any) -> None:
    return None


def _with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _move(value: Any) -> Any:
    """Loaded objects, every tensor on the device; shared storages stay shared."""
    from torch.utils._pytree import tree_map

    moved: dict[int, torch.Tensor] = {}

    def one(t: Any) -> Any:
        if isinstance(t, torch.nn.Module):
            return t.to(torch.device(NAME, 0))
        if not isinstance(t, torch.Tensor):
            return t
        key = t.untyped_storage().data_ptr()
        whole = moved.get(key)
        if whole is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes(),), (1,))
            whole = moved[key] = flat.to(torch.device(NAME, 0))
        with torch.no_grad():
            out = torch.empty(0, dtype=t.dtype, device=torch.device(NAME, 0)).set_(
                whole.untyped_storage(), t.storage_offset(), t.shape, t.stride()
            )
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(out, t.requires_grad)
        return out.requires_grad_(t.requires_grad)

    return tree_map(one, value)


class _Stream:
    """A stream. Work of a session runs in the order of its recording, so every stream is in order with every other."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device(_CUDA, 0)
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """In order already."""

    def wait_event(self, event: Any) -> None:
        """In order already."""

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        torch.cuda.synchronize()
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


_DEFAULT_STREAM = _Stream()


class _Event:
    """An event: recording waits for the work before it, so that the times between events are those of the device's work."""

    def __init__(
        self,
        synchronize: Callable[[], None],
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._synchronize = synchronize
        self._timing = enable_timing
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        if self._timing:
            self._synchronize()
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """In order already."""

    def synchronize(self) -> None:
        self._synchronize()

    def query(self) -> bool:
        self._synchronize()
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: an event has not been recorded, or was made without `enable_timing`.
        """
        if not self._timing or not end._timing:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[Any]:
    yield stream


class _device_context(contextlib.AbstractContextManager[Any]):
    """`torch.cuda.device(…)`: there is one device."""

    def __init__(self, device: Any) -> None:
        self.idx = 0
        to_wooly(device if isinstance(device, (int, str, torch.device)) else _CUDA)

    def __exit__(self, *exc: Any) -> None:
        return None
