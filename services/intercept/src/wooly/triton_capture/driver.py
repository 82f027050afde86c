"""A Triton driver that represents the remote device and records launches. Importing this module needs Triton."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from wooly_wis.dtypes import DType
from wooly_wis.errors import EncodeError
from wooly_wis.foreign import UNCHECKED, Source

from wooly.kernels.launch import ForeignKernel, Pointer
from wooly.triton_capture.compiler import NAME
from wooly.triton_capture.writes import written

if TYPE_CHECKING:
    from wooly.kernels.launch import Launches

_DTYPES = {
    "i1": DType.BOOL,
    "u1": DType.BOOL,
    "i8": DType.I8,
    "i16": DType.I16,
    "i32": DType.I32,
    "i64": DType.I64,
    "u8": DType.U8,
    "u16": DType.U16,
    "u32": DType.U32,
    "u64": DType.U64,
    "fp8e4nv": DType.F8E4M3FN,
    "fp8e5": DType.F8E5M2,
    "fp16": DType.F16,
    "bf16": DType.BF16,
    "fp32": DType.F32,
    "fp64": DType.F64,
}


class Launcher:
    """Records the launches of one compiled kernel."""

    def __init__(self, launches: Launches, source: Any, metadata: Any) -> None:
        self._launches = launches
        self._types = list(source.signature.items())
        self._metadata = metadata
        self._kernel: ForeignKernel | None = None
        self._pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: Any,
        function: str,
        metadata: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        if enter is not None:
            enter(launch_metadata)
        kernel = self._kernel
        if kernel is None:
            kernel = self._prepare(function)
        self._launches.launch(kernel, (x, y, z), self._pick(args))
        if leave is not None:
            leave(launch_metadata)

    def _prepare(self, text: str) -> ForeignKernel:
        given = [(k, name, t) for k, (name, t) in enumerate(self._types) if t != "constexpr"]
        at = [k for k, _, _ in given]
        self._pick = itemgetter(*at) if len(at) > 1 else lambda args: tuple([args[k] for k in at])
        name = self._metadata.name
        writes = written(text, name)
        parameters = tuple([_parameter(name, argument, t, k in writes) for k, (_, argument, t) in enumerate(given)])
        options: tuple[tuple[str, int | bool | str], ...] = (
            ("num_stages", self._metadata.num_stages),
            ("num_warps", self._metadata.num_warps),
        )
        if self._metadata.unchecked:
            options += ((UNCHECKED, True),)
        try:
            self._kernel = ForeignKernel(Source("ttir", text), name, parameters, (1, 1, 1), options)
        except EncodeError as e:
            raise NotImplementedError(f"Triton kernel {name}: {e}") from e
        return self._kernel


class _Utils:
    """The functions that Triton calls in a driver's library."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        facts = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": 1 << 20,
            "max_num_regs": facts.regs_per_multiprocessor,  # type: ignore[attr-defined] # its stub is not complete
            "multiprocessor_count": facts.multi_processor_count,
            "warpSize": 32,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 64,
        }

    @staticmethod
    def load_binary(name: str, kernel: Any, shared: int, device: int) -> tuple[Any, str, int, int, int]:
        text = kernel.decode() if isinstance(kernel, bytes) else kernel
        return text, text, 0, 0, 1024 * 32

    @staticmethod
    def unload_module(module: Any) -> None:
        """Do nothing: no binary was loaded."""


def _untimed(kernel_call: Any, quantiles: Sequence[float] = ()) -> list[float]:
    """Return the same time for each configuration, so that Triton takes the first."""
    warnings.warn(
        "autotune cannot measure a kernel during recording, so its first configuration is used",
        stacklevel=2,
    )
    return [1.0] * max(len(quantiles), 1)


class WoolyDriver(DriverBase):  # type: ignore[misc]
    """Triton driver for the remote device."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self.utils = _Utils()
        self.launcher_cls = functools.partial(Launcher, launches)
        self._target = GPUTarget(NAME, "any", 32)
        self.get_current_device = torch.cuda.current_device
        self.set_current_device = torch.cuda.set_device

    @classmethod
    def is_active(cls) -> bool:
        return False  # `activation` sets the driver; Triton must not find it by itself

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return self._target

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        if self._launches.recording():
            return _untimed
        return functools.partial(do_bench, warmup=5, rep=20)

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def _parameter(kernel: str, name: str, kind: Any, writes: bool) -> Pointer | DType:
    dtype = _DTYPES.get(kind.lstrip("*").removeprefix("k")) if isinstance(kind, str) else None
    if dtype is None:
        raise NotImplementedError(
            f"Triton kernel {kernel}: argument {name} has type {kind}, which is not supported; use numbers of, or pointers to: "
            f"{', '.join(_DTYPES)}"
        )
    return Pointer(dtype, writes) if kind.startswith("*") else dtype
