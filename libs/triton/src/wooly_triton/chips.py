"""TTIR for NVIDIA and AMD: Triton's own compilers make cubins and hsacos of a text into which guards were written.

Runs in the worker. Nothing of Triton is imported before a kernel is asked for.
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

#: Hints that are handed on.
_HINTS: Final = ("num_warps", "num_stages")
#: Names of functions that are not those of `EXTERNS`.
_NVIDIA: Final = {
    ("isfinite", "f32"): "finitef",
    ("isfinite", "f64"): "isfinited",
    **{(n, t): f"{n}{t[0] if t == 'f32' else 'd'}" for n in ("isnan", "isinf", "signbit") for t in ("f32", "f64")},
}
_EXTERN: Final = re.compile(
    r'^(?P<head>\s*%[\w$.\-]+ = )tt\.extern_elementwise (?P<given>[^{]*)\{libname = "", libpath = "", pure = true, '
    r'symbol = "(?P<symbol>\w+)"\} : \((?P<types>[^)]*)\) -> (?P<type>[^\n]+)$',
    re.MULTILINE,
)
#: Operations that are not always written out.
_IMPLIED: Final = ("scf.yield", "tt.func", "builtin.module")


@dataclass(frozen=True, slots=True)
class Chip:
    """What a text is compiled for.

    Attributes:
        vendor: as Triton calls its backend.
        arch: as Triton does.
        width: threads of a warp.
        binary: the last stage.
        assembly: the stage that has the function's parameters as text.
        function: what the vendor calls a function of `EXTERNS`, by its name and the elements' type.
        parameters: how many parameters the assembly says that the function has.
    """

    vendor: str
    arch: int | str
    width: int
    binary: str
    assembly: str
    function: Callable[[str, str], str]
    parameters: Callable[[str], int]


def chip(target: str) -> Chip:
    """The chip of a target's name.

    Raises:
        ChipError: Triton has none.
    """
    nvidia, amd = re.fullmatch(r"cuda:sm_(\d{2,3})", target), re.fullmatch(r"hip:(gfx[0-9a-f]{3,5})", target)
    if nvidia is not None:
        return Chip("cuda", int(nvidia[1]), 32, "cubin", "ptx", _libdevice, _of_ptx)
    if amd is not None:
        return Chip("hip", amd[1], 64 if amd[1].startswith("gfx9") else 32, "hsaco", "amdgcn", _ocml, _of_amdgcn)
    raise ChipError(f"Triton has no code for {target}")


def _libdevice(name: str, elem: str) -> str:
    return "__nv_" + _NVIDIA.get((name, elem), name + ("f" if elem == "f32" else ""))


def _ocml(name: str, elem: str) -> str:
    return f"__ocml_{name}_{elem}"


def _of_ptx(text: str) -> int:
    head = re.search(r"\.entry [\w$]+\((.*?)\)", text, re.DOTALL)
    return len(re.findall(r"\.param", head[1])) if head is not None else 0


def _of_amdgcn(text: str) -> int:
    found = re.search(r"\.args:(.*?)\n    \.[a-z]", text, re.DOTALL)
    kinds = re.findall(r"\.value_kind:\s+(\w+)", found[1]) if found is not None else []
    return sum(not kind.startswith("hidden") for kind in kinds)


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        importlib.import_module("triton.compiler.compiler")
    except Exception as e:  # whatever a broken installation raises
        return f"Triton is missing ({type(e).__name__}: {str(e)[:200]}): pip install triton"
    return ""


class Compiler:
    """Triton's stages for one chip.

    Args:
        chip: which.
        options: of a launch.

    Raises:
        ChipError: Triton is not there, or does not take the options.
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
            raise ChipError(f"{', '.join(_HINTS)} are numbers from 1 to 64")
        self._target = GPUTarget(chip.vendor, chip.arch, chip.width)
        try:
            self._backend = make_backend(self._target)
            # what a launch by Triton itself would do, were it not told otherwise
            self.options = self._backend.parse_options(given | {"enable_fp_fusion": True})
        except (AssertionError, RuntimeError, ValueError, TypeError) as e:
            raise ChipError(f"Triton does not compile for {chip.arch}: {str(e)[:500]}") from e

    def read(self, text: str) -> Any:
        """A text as a module of MLIR's.

        Raises:
            ForeignError: it is none.
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

    def plain(self, text: str) -> str:
        """A text as MLIR prints it, with functions where they are called.

        Raises:
            ForeignError: it is none.
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
            raise ForeignError(f"Triton does not take the text: {str(e)[:500]}") from e
        return str(module.str_nodebug())

    def check_same(self, text: str) -> None:
        """Make sure that our reading of a text has the operations that MLIR's has.

        Raises:
            ForeignError: it does not.
        """
        theirs: list[str] = []
        self.read(text).walk(lambda op: theirs.append(op.get_name()))
        a, b = Counter(theirs), Counter(guards.names_of(text))
        if any(a[n] != b[n] for n in (a.keys() | b.keys()) - set(_IMPLIED)):
            raise ForeignError("the text is read in two ways")

    def image(self, text: str, declared: Sequence[str], claims: Sequence[int]) -> Image:
        """The code of a text.

        Args:
            text: of one public function.
            declared: what its parameters are given, as `Image.passed` has it.
            claims: see `Image`.

        Raises:
            ChipError: Triton refuses it.
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
        except Exception as e:  # Triton's are of any kind
            raise ChipError(f"Triton for {self.chip.arch}: {type(e).__name__}: {str(e)[:1500]}") from e
        # Triton adds pointers to memory of its own, by its version none, one, or two
        own = self.chip.parameters(assembly) - len(declared)
        if not 0 <= own <= 2 or metadata.get("profile_scratch_size"):
            raise ChipError(f"Triton for {self.chip.arch}: code with {own} parameters of its own")
        return Image(
            entry=str(metadata["name"]),
            passed=(*declared, *("scratch", "null")[:own]),
            threads=int(metadata["num_warps"]) * self.chip.width,
            shared=int(metadata["shared"]),
            scratch=int(metadata.get("global_scratch_size") or 0) * int(metadata.get("num_ctas") or 1),
            claims=tuple(claims),
            code=bytes(module),
        )


def named(text: str, chip: Chip) -> str:
    """A text with the vendor's names of the functions that the client writes under neutral ones.

    Raises:
        ForeignError: one is not known.
    """

    def other(found: re.Match[str]) -> str:
        symbol, elem = found["symbol"], re.sub(r"[^>]*x", "", found["types"].split(",")[0]).strip("> ")
        if symbol not in EXTERNS or elem not in ("f32", "f64"):
            raise ForeignError(f"there is no function {symbol} of {elem}")
        given = found["given"].strip()
        if symbol == "div_rn":
            what = "tt.precise_divf" if elem == "f32" else "arith.divf"
            return f"{found['head']}{what} {given} : {found['type']}"
        vendors = f'libname = "", libpath = "", pure = true, symbol = "{chip.function(symbol, elem)}"'
        return f"{found['head']}tt.extern_elementwise {given} {{{vendors}}} : ({found['types']}) -> {found['type']}"

    made = _EXTERN.sub(other, text)
    if made.count("tt.extern_elementwise") != len(_EXTERN.findall(text)) - len(re.findall(r'"div_rn"', text)):
        raise ForeignError("tt.extern_elementwise is not written as it should be")
    return made


def build(request: Request, target: str) -> tuple[tuple[Parameter, ...], tuple[str, ...], tuple[Image, ...]]:
    """Parameters, places and code of a kernel.

    Args:
        request: what is to be compiled.
        target: for what.

    Raises:
        ForeignError: it cannot be checked, or is no text.
        ChipError: Triton does not compile it.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    found = chip(target)
    compiler = Compiler(found, request.options)
    text = named(compiler.plain(request.text), found)
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
    # the first is for launches of which all that the text claims is true, the other for any
    for multiples in dict.fromkeys([claims, (1,) * len(claims)]):
        made = guards.guard(text, request.entry, request.args, multiples, threads)
        lengths = tuple([f"length {k} {unit}" for k, unit in made.extra])
        images.append(compiler.image(made.text, (*passed, *lengths, "status"), multiples))
    parameters = tuple([Parameter(d, b, w) for d, b, w in zip(dtypes, buffers, made.writes, strict=True)])
    return parameters, made.places, tuple(images)
