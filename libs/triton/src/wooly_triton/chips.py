"""Compiles TTIR for NVIDIA and AMD: Triton makes cubins and hsacos of a text with guards.

This runs in the worker. Triton is imported only when a kernel is compiled.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wooly_wis.dtypes import BY_LABEL
from wooly_wis.foreign import UNCHECKED, Image, Parameter
from wooly_wis.languages import ForeignError, Request

from wooly_triton import guard as guards
from wooly_triton.errors import ChipError
from wooly_triton.ops import EXTERNS
from wooly_triton.returns import without_early_returns

#: Options of a launch that are passed to Triton.
_HINTS: Final = ("num_warps", "num_stages")
#: NVIDIA's names of functions that differ from the names in `EXTERNS`.
_NVIDIA: Final = {
    ("isfinite", "f32"): "finitef",
    ("isfinite", "f64"): "isfinited",
    **{(n, t): f"{n}{t[0] if t == 'f32' else 'd'}" for n in ("isnan", "isinf", "signbit") for t in ("f32", "f64")},
    **{(f"{n}_rn", t): f"{'f' if t == 'f32' else 'd'}{n}_rn" for n in ("add", "sub", "mul") for t in ("f32", "f64")},
}
_EXTERN: Final = re.compile(
    r'^(?P<head>\s*%[\w$.\-]+ = )tt\.extern_elementwise (?P<given>[^{]*)\{libname = "", libpath = "", pure = true, '
    r'symbol = "(?P<symbol>\w+)"\} : \((?P<types>[^)]*)\) -> (?P<type>[^\n]+)$',
    re.MULTILINE,
)
#: Operations that MLIR may leave out of the text.
_IMPLIED: Final = ("scf.yield", "tt.func", "builtin.module")


@dataclass(frozen=True, slots=True)
class Chip:
    """The chip for which a text is compiled.

    Attributes:
        vendor: Triton's name of the backend.
        arch: Triton's name of the architecture.
        width: number of threads of a warp.
        binary: name of the last stage.
        assembly: name of the stage whose text lists the function's parameters.
        function: returns the vendor's name of a function of `EXTERNS`, from its name and the type of elements.
        parameters: returns the number of the function's parameters, from the assembly.
    """

    vendor: str
    arch: int | str
    width: int
    binary: str
    assembly: str
    function: Callable[[str, str], str]
    parameters: Callable[[str], int]


def chip(target: str) -> Chip:
    """Return the chip with the name `target`.

    Raises:
        ChipError: Triton does not support it.
    """
    nvidia, amd = re.fullmatch(r"cuda:sm_(\d{2,3})", target), re.fullmatch(r"hip:(gfx[0-9a-f]{3,5})", target)
    if nvidia is not None:
        return Chip("cuda", int(nvidia[1]), 32, "cubin", "ptx", _libdevice, _of_ptx)
    if amd is not None:
        return Chip("hip", amd[1], 64 if amd[1].startswith("gfx9") else 32, "hsaco", "amdgcn", _ocml, _of_amdgcn)
    raise ChipError(f"Triton cannot compile for {target}; it supports cuda:sm_… and hip:gfx…")


def _libdevice(name: str, elem: str) -> str:
    return "__nv_" + _NVIDIA.get((name, elem), name + ("f" if elem == "f32" else ""))


def _ocml(name: str, elem: str) -> str:
    return f"__ocml_{re.sub('_rn$', '_rte', name)}_{elem}"  # the same rounding has another name: to nearest even


def _of_ptx(text: str) -> int:
    head = re.search(r"\.entry [\w$]+\((.*?)\)", text, re.DOTALL)
    return len(re.findall(r"\.param", head[1])) if head is not None else 0


def _of_amdgcn(text: str) -> int:
    found = re.search(r"\.args:(.*?)\n    \.[a-z]", text, re.DOTALL)
    kinds = re.findall(r"\.value_kind:\s+(\w+)", found[1]) if found is not None else []
    return sum(not kind.startswith("hidden") for kind in kinds)


def missing() -> str:
    """Return why this machine cannot compile TTIR for GPUs; empty if it can."""
    try:
        importlib.import_module("triton.compiler.compiler")
    except Exception as e:  # a broken installation may raise any error
        return f"Triton is missing ({type(e).__name__}: {str(e)[:200]}); install it with: pip install triton"
    return ""


class Compiler:
    """Triton's stages for one chip.

    Args:
        chip: the chip.
        options: options of a launch.

    Raises:
        ChipError: Triton is not installed, or rejects the options.
    """

    def __init__(self, chip: Chip, options: dict[str, Any]) -> None:
        why = missing()
        if why:
            raise ChipError(why)
        from triton._C.libtriton import ir, passes
        from triton.backends.compiler import GPUTarget, Language
        from triton.compiler.compiler import make_backend

        self.chip, self._ir, self._passes, self._language = chip, ir, passes, Language.TRITON
        given = {name: options[name] for name in _HINTS if name in options}
        if not all(type(v) is int and 0 < v <= 64 for v in given.values()):
            raise ChipError(f"{', '.join(_HINTS)} must be integers from 1 to 64")
        self._target = GPUTarget(chip.vendor, chip.arch, chip.width)
        try:
            self._backend = make_backend(self._target)
            # A launch by Triton itself has this default.
            self.options = self._backend.parse_options(given | {"enable_fp_fusion": True})
        except (AssertionError, RuntimeError, ValueError, TypeError) as e:
            raise ChipError(f"Triton cannot compile for {chip.arch}: {str(e)[:500]}") from e

    def read(self, text: str) -> Any:
        """Read a text as a module of MLIR.

        Raises:
            ForeignError: the text is not valid.
        """
        context = self._ir.context()
        self._ir.load_dialects(context)
        self._backend.load_dialects(context)
        with tempfile.TemporaryDirectory(prefix="wooly-ttir-") as folder:
            path = Path(folder) / "kernel.ttir"
            path.write_text(text)
            try:
                module = self._ir.parse_mlir_module(str(path), context)
            except Exception as e:
                raise ForeignError(f"Triton cannot read the text: {str(e)[:500]}") from e
        module.context = context
        return module

    def canonical(self, text: str) -> str:
        """Return the text as MLIR prints it, with functions inlined.

        Raises:
            ForeignError: the text is not valid.
        """
        module = self.read(text)
        manager = self._ir.pass_manager(module.context)
        self._passes.common.add_inliner(manager)
        self._passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
        self._passes.common.add_canonicalizer(manager)
        self._passes.common.add_cse(manager)
        self._passes.common.add_symbol_dce(manager)
        self._passes.ttir.add_triton_licm(manager)
        try:
            manager.run(module, "plain")
        except Exception as e:
            raise ForeignError(f"Triton rejects the text: {str(e)[:500]}") from e
        return str(module.str_nodebug())

    def check_same(self, text: str) -> None:
        """Check that Wooly's reader and MLIR find the same operations in a text.

        Raises:
            ForeignError: the operations differ.
        """
        theirs: list[str] = []
        self.read(text).walk(lambda op: theirs.append(op.get_name()))
        a, b = Counter(theirs), Counter(guards.names_of(text))
        if any(a[n] != b[n] for n in (a.keys() | b.keys()) - set(_IMPLIED)):
            raise ForeignError("Wooly and Triton read different operations in the text, so it cannot be checked")

    def image(self, text: str, declared: Sequence[str], claims: Sequence[int]) -> Image:
        """Compile a text.

        Args:
            text: a text with one public function.
            declared: meaning of each parameter, as in `Image.passed`.
            claims: see `Image`.

        Raises:
            ChipError: Triton cannot compile the text.
        """
        module, metadata = self.read(text), {"target": self._target, **self.options.__dict__}
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        assembly = ""
        try:
            self._backend.add_stages(stages, self.options, self._language)
            for name, stage in stages.items():
                module = stage(module, metadata)
                if name == self.chip.assembly:
                    assembly = str(module)
        except Exception as e:  # Triton may raise any error
            raise ChipError(
                f"Triton cannot compile the text for {self.chip.arch}: {type(e).__name__}: {str(e)[:1500]}"
            ) from e
        # Triton adds pointers to its own memory: none, one or two, depending on its version.
        own = self.chip.parameters(assembly) - len(declared)
        if not 0 <= own <= 2 or metadata.get("profile_scratch_size"):
            raise ChipError(
                f"Triton for {self.chip.arch}: the code has {own} additional parameters, which is not supported"
            )
        return Image(
            entry=str(metadata["name"]),
            passed=(*declared, *("scratch", "null")[:own]),
            threads=int(metadata["num_warps"]) * self.chip.width,
            shared=int(metadata["shared"]),
            scratch=int(metadata.get("global_scratch_size") or 0) * int(metadata.get("num_ctas") or 1),
            claims=tuple(claims),
            code=bytes(module),
        )


def with_vendor_names(text: str, chip: Chip) -> str:
    """Replace the client's neutral function names by the vendor's.

    Raises:
        ForeignError: a function is not known.
    """

    def other(found: re.Match[str]) -> str:
        symbol, elem = found["symbol"], re.sub(r"[^>]*x", "", found["types"].split(",")[0]).strip("> ")
        if symbol not in EXTERNS or elem not in ("f32", "f64"):
            raise ForeignError(f"the function {symbol} of {elem} is not supported")
        given = found["given"].strip()
        if symbol == "div_rn":
            what = "tt.precise_divf" if elem == "f32" else "arith.divf"
            return f"{found['head']}{what} {given} : {found['type']}"
        vendors = f'libname = "", libpath = "", pure = true, symbol = "{chip.function(symbol, elem)}"'
        return f"{found['head']}tt.extern_elementwise {given} {{{vendors}}} : ({found['types']}) -> {found['type']}"

    made = _EXTERN.sub(other, text)
    if made.count("tt.extern_elementwise") != len(_EXTERN.findall(text)) - len(re.findall(r'"div_rn"', text)):
        raise ForeignError("the text has a tt.extern_elementwise in another form than Triton prints")
    return made


def build(request: Request, target: str) -> tuple[tuple[Parameter, ...], tuple[str, ...], tuple[Image, ...]]:
    """Return parameters, places and code of a kernel.

    Args:
        request: the kernel to compile.
        target: name of the chip.

    Raises:
        ForeignError: the text cannot be checked, or is not valid.
        ChipError: Triton cannot compile it.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    found = chip(target)
    compiler = Compiler(found, request.options)
    plain = compiler.canonical(without_early_returns(request.text, request.entry))
    text = with_vendor_names(plain, found)
    buffers = [a.startswith("*") for a in request.args]
    dtypes = [BY_LABEL.get(a.removeprefix("*")) for a in request.args]
    passed = tuple([f"address {k}" if b else f"value {k}" for k, b in enumerate(buffers)])
    claims = guards.claims_of(text, len(buffers))
    if request.options.get(UNCHECKED):
        unchecked = tuple([Parameter(d, b, b) for d, b in zip(dtypes, buffers, strict=True)])
        return unchecked, (), (compiler.image(text, passed, claims),)
    compiler.check_same(text)
    threads = int(compiler.options.num_warps) * found.width
    images = []
    # The first image is for launches for which all claims of the text are true; the other is for all launches.
    for multiples in dict.fromkeys([claims, (1,) * len(claims)]):
        made = guards.guard(text, request.entry, request.args, multiples, threads)
        lengths = tuple([f"length {k} {unit}" for k, unit in made.extra])
        images.append(compiler.image(made.text, (*passed, *lengths, "status"), multiples))
    parameters = tuple([Parameter(d, b, w) for d, b, w in zip(dtypes, buffers, made.writes, strict=True)])
    return parameters, made.places, tuple(images)
