"""A Triton compiler backend that stops at TTIR, which does not depend on the target. Importing this module needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend

from wooly.triton_capture.libdevice import MODULES, libdevice

NAME = "wooly"


@dataclass(frozen=True)
class Options:
    """The compile options that Triton's front end needs. They do not depend on a vendor."""

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
    unchecked: bool = False  # run without bounds checks on a GPU; this needs the permission opaque_kernels
    backend_name: str = NAME

    def hash(self) -> str:
        """Part of Triton's cache key: different options give different keys."""
        return repr(self)


class WoolyBackend(BaseBackend):  # type: ignore[misc]
    """Compiler backend whose only stage is `ttir`."""

    binary_ext = "ttir"

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == NAME)

    def hash(self) -> str:
        return f"{NAME}-2"

    def parse_options(self, options: dict[str, Any]) -> Options:
        """The options of a script that `Options` has. Other options, such as hints for a vendor, are ignored."""
        known = Options.__dataclass_fields__.keys() - {"arch", "backend_name", "warp_size"}
        return Options(**{k: _frozen(v) for k, v in options.items() if k in known and v is not None})

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1), "convert_custom_types": None}

    def get_module_map(self) -> dict[str, ModuleType]:
        return dict.fromkeys(MODULES, libdevice())

    def load_dialects(self, context: Any) -> None:
        """Do nothing: the dialects of TTIR are always loaded."""

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        stages["ttir"] = _text_of


def _text_of(module: Any, metadata: dict[str, Any]) -> str:
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
