"""Triton's kernels, launched in this process without a GPU: captured as TTIR and recorded as `kernel.launch`.

Triton's own runtime does all the rest: signatures, specialisation, constexprs, heuristics, autotuning, its cache. Here it finds
a driver that answers for the remote device, and a compiler whose only stage is `ttir`: a text in which no vendor appears. Nothing
of Triton is imported before the script does.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.errors import EncodeError
from wooly_wis.foreign import MAX_ARGUMENTS, UNCHECKED, Source

from wooly.kernels.launch import ForeignKernel, Pointer
from wooly.recorder import add_library_root

if TYPE_CHECKING:
    from wooly.kernels.launch import Launches

NAME = "wooly"
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


@dataclass(frozen=True)
class Options:
    """What Triton's front end asks of a compiler's options: those of any target, and none of one vendor's."""

    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1
    warp_size: int = 32
    arch: str = "any"
    debug: bool = False
    sanitize_overflow: bool = False
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "tf32"
    allowed_dot_input_precisions: tuple[str, ...] = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    extern_libs: tuple[tuple[str, str], ...] = ()
    unchecked: bool = False  # run it as it is where the device is a GPU, which needs the permission opaque_kernels
    backend_name: str = NAME

    def hash(self) -> str:
        """What tells texts apart that were made with other options."""
        return repr(self)


def activate(launches: Launches) -> None:
    """Make Triton launch through `launches`, now or as soon as it is imported."""
    if "triton" in sys.modules:
        _install(launches)
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(launches))


def deactivate() -> None:
    """Give Triton back to whatever drivers it finds."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
    runtime = sys.modules.get("triton.runtime.driver")
    if runtime is not None and getattr(runtime.driver, "_wooly", False):
        runtime.driver._active = None
        runtime.driver._wooly = False


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for Triton to be imported."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Triton's own, whose end of loading is heard of."""
        if name != "triton":
            return None
        sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader, launches = spec.loader, self._launches
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _install(launches)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(launches: Launches) -> None:
    import triton
    from triton.backends import backends

    add_library_root(str(Path(triton.__file__).parent))
    backend, driver = _classes(launches)
    backends[NAME] = _backend_entry(backend, driver)
    triton.runtime.driver.set_active(driver())
    triton.runtime.driver._wooly = True


def _backend_entry(backend: Any, driver: Any) -> Any:
    from triton.backends import Backend

    return Backend(compiler=backend, driver=driver)


def _classes(launches: Launches) -> tuple[Any, Any]:
    """Triton's two interfaces, which can only be named once it is imported."""
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class WoolyBackend(BaseBackend):  # type: ignore[misc]
        """Stops at TTIR."""

        binary_ext = "ttir"

        @staticmethod
        def supports_target(target: Any) -> bool:
            return bool(target.backend == NAME)

        def hash(self) -> str:
            return f"{NAME}-1"

        def parse_options(self, options: dict[str, Any]) -> Options:
            """Of all that scripts give (vendors' hints among it), what any target knows."""
            known = Options.__dataclass_fields__.keys() - {"arch", "backend_name", "warp_size"}
            return Options(**{k: _frozen(v) for k, v in options.items() if k in known and v is not None})

        def pack_metadata(self, metadata: Any) -> Any:
            return metadata

        def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
            return {"min_dot_size": lambda lhs, rhs: (1, 1, 1), "convert_custom_types": None}

        def get_module_map(self) -> dict[str, ModuleType]:
            return {"triton.language.extra.libdevice": libdevice()}

        def load_dialects(self, context: Any) -> None:
            """TTIR's are there."""

        def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
            stages["ttir"] = text_of

    def text_of(module: Any, metadata: dict[str, Any]) -> str:
        manager = ir.pass_manager(module.context)
        passes.common.add_inliner(manager)
        passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
        for group, name in (
            (passes.common, "canonicalizer"),
            (passes.ttir, "combine"),
            (passes.ttir, "reorder_broadcast"),
            (passes.common, "cse"),
            (passes.ttir, "triton_licm"),
            (passes.common, "symbol_dce"),
            (passes.ttir, "loop_unroll"),
        ):
            getattr(group, f"add_{name}")(manager)
        manager.run(module, "make_ttir")
        metadata["name"] = module.get_entry_func_name()
        metadata["shared"] = 0
        return str(module.str_nodebug())

    class Launcher:
        """Launches one compiled kernel."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._types = list(source.signature.items())
            self._metadata = metadata
            self._kernel: ForeignKernel | None = None
            self._given: tuple[int, ...] = ()

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
            launches.launch(kernel, (x, y, z), [args[k] for k in self._given])
            if leave is not None:
                leave(launch_metadata)

        def _prepare(self, text: str) -> ForeignKernel:
            given = [(k, name, t) for k, (name, t) in enumerate(self._types) if t != "constexpr"]
            self._given = tuple([k for k, _, _ in given])
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

    class Utils:
        """What Triton asks a driver's library."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            facts = torch.cuda.get_device_properties(device)
            return {
                "max_shared_mem": 1 << 20,
                "max_num_regs": facts.regs_per_multiprocessor,
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
            """Nothing was loaded."""

    def untimed(kernel_call: Any, quantiles: Sequence[float] = ()) -> list[float]:
        """No configuration is faster than another: Triton takes the first."""
        warnings.warn(
            "a kernel with autotune is recorded, where nothing can be timed: its first configuration is taken",
            stacklevel=2,
        )
        return [1.0] * max(len(quantiles), 1)

    class WoolyDriver(DriverBase):  # type: ignore[misc]
        """Answers for the remote device."""

        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = Launcher
            self._target = GPUTarget(NAME, "any", 32)
            self.get_current_device = torch.cuda.current_device
            self.set_current_device = torch.cuda.set_device

        @classmethod
        def is_active(cls) -> bool:
            return False  # it is set, not found

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

            if launches.recording():
                return untimed
            return functools.partial(do_bench, warmup=5, rep=20)

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(1, dtype=torch.int, device="cuda")

        def clear_cache(self, cache: torch.Tensor) -> None:
            cache.zero_()

    return WoolyBackend, WoolyDriver


#: Functions of `triton.language.extra.libdevice` by how many operands they have; of numbers that are asked about, the answer is
#: 0 or 1. They go into the text under these names, which no vendor uses.
_LIBDEVICE = {
    1: "acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi erf erfc exp exp10 exp2 expm1 floor lgamma log log10 log1p "
    "log2 rint round rsqrt sin sinh sinpi sqrt tan tanh tgamma trunc isnan isinf isfinite signbit",
    2: "atan2 copysign fdim fmod hypot nextafter pow remainder div_rn",
    3: "fma",
}
#: Those that go by other names there, or have faster kin.
_OTHER_NAMES = {
    "abs": "fabs",
    "nearbyint": "rint",
    "finitef": "isfinite",
    "isfinited": "isfinite",
    "fast_dividef": "div_rn",
    **{f"fast_{n}f": n for n in ("sin", "cos", "tan", "exp", "exp10", "log", "log2", "log10", "pow", "tanh")},
}
_QUESTIONS = ("isnan", "isinf", "isfinite", "signbit")


@functools.cache
def libdevice() -> ModuleType:
    """What stands in for `triton.language.extra.libdevice` while a kernel is captured."""
    from triton.language import core

    made = ModuleType("wooly.libdevice")
    arity = {name: n for n, names in _LIBDEVICE.items() for name in names.split()} | {"fabs": 1}

    def function(symbol: str) -> Any:
        n, floats = arity[symbol], (core.dtype("fp32"), core.dtype("fp64"))
        known = {(t,) * n: (symbol, core.dtype("int32") if symbol in _QUESTIONS else t) for t in floats}

        def one(a: Any, _semantic: Any = None) -> Any:
            found = core.extern_elementwise("", "", [a], known, is_pure=True, _semantic=_semantic)
            return found.to(core.int1, _semantic=_semantic) if symbol in _QUESTIONS else found

        def two(a: Any, b: Any, _semantic: Any = None) -> Any:
            return core.extern_elementwise("", "", [a, b], known, is_pure=True, _semantic=_semantic)

        def three(a: Any, b: Any, c: Any, _semantic: Any = None) -> Any:
            return core.extern_elementwise("", "", [a, b, c], known, is_pure=True, _semantic=_semantic)

        return core.extern({1: one, 2: two, 3: three}[n])

    for name in (*arity, *_OTHER_NAMES):
        setattr(made, name, function(_OTHER_NAMES.get(name, name)))
    return made


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def written(text: str, entry: str) -> frozenset[int]:
    """Parameters of a function through which it may write, found by following pointers through the text.

    What cannot be told apart counts as written; the executor holds the kernel to it.
    """
    head = re.search(rf"tt\.func public @{re.escape(entry)}\((.*)\) attributes", text)
    names = re.findall(r"(%[\w$.-]+):", head[1]) if head is not None else []
    if head is None or re.search(r"tt\.(call|descriptor|make_tensor|elementwise_inline_asm)", text):
        return frozenset(range(MAX_ARGUMENTS))
    group: dict[str, str] = {}

    def of(name: str) -> str:
        while name in group:
            name = group[name]
        return name

    found: list[str] = []
    for line in text[head.end() :].splitlines():
        if "!tt.ptr" not in line:
            continue
        defined, _, rest = line.rpartition(" = ") if "scf." not in line else ("", "", line)
        operands = re.findall(r"%[\w$.-]+", rest)
        if "tt.store" in line or "tt.atomic" in line:
            found.append(operands[0])
        elif "tt.load" not in line:
            together = operands[:1] if "tt.addptr" in line else operands
            together += re.findall(r"%[\w$.-]+", defined)
            if re.search(r"scf\.|cf\.|\^bb", line):  # passed on, here or there
                together.append("passed")
            for name in together[1:]:
                if of(name) != of(together[0]):
                    group[of(name)] = of(together[0])
    groups = {of(name) for name in found}
    return frozenset([k for k, name in enumerate(names) if of(name) in groups])


def _parameter(kernel: str, name: str, kind: Any, writes: bool) -> Pointer | DType:
    dtype = _DTYPES.get(kind.lstrip("*").removeprefix("k")) if isinstance(kind, str) else None
    if dtype is None:
        raise NotImplementedError(
            f"Triton kernel {kernel}: an argument of type {kind} ({name}) is not supported; pointers to, and numbers of, "
            f"{', '.join(_DTYPES)} are"
        )
    return Pointer(dtype, writes) if kind.startswith("*") else dtype
