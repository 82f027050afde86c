"""Replaces Triton's modules of libdevice while a kernel is captured. Importing this module needs Triton."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from triton.language import core

#: Functions of `triton.language.extra.libdevice`, by number of operands. They appear in TTIR under these names, which do not
#: depend on a vendor.
_LIBDEVICE = {
    1: "acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi erf erfc exp exp10 exp2 expm1 floor lgamma log log10 log1p "
    "log2 rint round rsqrt sin sinh sinpi sqrt tan tanh tgamma trunc isnan isinf isfinite signbit",
    2: "atan2 copysign fdim fmod hypot nextafter pow remainder add_rn sub_rn mul_rn div_rn",
    3: "fma",
}
#: Other names of these functions in libdevice, and faster variants, which become the normal functions.
_OTHER_NAMES = {
    "abs": "fabs",
    "nearbyint": "rint",
    "finitef": "isfinite",
    "isfinited": "isfinite",
    "fast_dividef": "div_rn",
    **{f"fast_{n}f": n for n in ("sin", "cos", "tan", "exp", "exp10", "log", "log2", "log10", "pow", "tanh")},
}
#: Triton's modules with these functions: the one for all vendors, and the vendors' own.
MODULES = tuple(f"triton.language.extra.{vendor}libdevice" for vendor in ("", "cuda.", "hip."))
_QUESTIONS = ("isnan", "isinf", "isfinite", "signbit")


@functools.cache
def libdevice() -> ModuleType:
    """Make the module that replaces each of `MODULES` while a kernel is captured.

    A function that it does not have raises an error when a kernel calls it, and not before: a kernel's file may import more.
    """
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

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*operands: Any, _semantic: Any = None) -> Any:
            raise NotImplementedError(
                f"libdevice's function {name} is not supported; these are: {', '.join(sorted((*arity, *_OTHER_NAMES)))}"
            )

        refuse.__name__ = name
        return core.extern(refuse)

    made.__getattr__ = missing  # type: ignore[method-assign] # PEP 562
    for name in (*arity, *_OTHER_NAMES):
        setattr(made, name, function(_OTHER_NAMES.get(name, name)))
    return made
