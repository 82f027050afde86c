"""Writes the reference page of CUDA C: ``python -m wooly_cuda_c.page > docs/reference/cuda-c.md``."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_cuda_c.printing import arithmetic, builtins, translate
from wooly_cuda_c.printing.types import Scalar
from wooly_cuda_c.syntax import lexer, parser, preprocess, words


def _names(found: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in found)


def _says(scalar: str) -> str:
    return str(Scalar(scalar))


def page() -> str:
    """Return the page as Markdown."""
    out = [
        "# Supported CUDA C",
        "",
        "This page is generated from the tables of the front end by `make docs`; a test compares them. A",
        "script defines kernels with `wooly.cuda_kernel(source, name)` and `torch.cuda._compile_kernel`. Text",
        "that this page does not name is an error, and the error names its line.",
        "",
        *_language(),
        *_types(),
        *_functions(),
        *_atomics(),
        *_between_threads(),
        *_not_offered(),
        *_limits(),
    ]
    return "\n".join(out) + "\n"


def _language() -> list[str]:
    return [
        "## Language",
        "",
        "- `__global__` and `__device__` functions, overloads, references, templates of types and",
        '  integers (defaults, deduction, `if constexpr`); a kernel of a template by name: `"scale<float, 4>"`;',
        '  `extern "C"`, `using`, `typedef`, plain structs.',
        "- All operators and statements of C except `goto`; `auto`, `constexpr`, `static_cast`, `reinterpret_cast`, braces.",
        "- `__shared__` arrays and variables, `extern __shared__` arrays, `__constant__` arrays with values.",
        "- `#define` with and without arguments, conditionals, `#pragma unroll`; `#include` of headers",
        f"  that are built in: {_names(sorted(preprocess.HEADERS))}. The compiler reads no file.",
        f"- {_names(builtins.PLACES)}; `assert`, `__trap`; the constants",
        f"  {_names(builtins.NUMBERS)}.",
        "",
    ]


def _types() -> list[str]:
    aliases: dict[str, list[str]] = {}
    for name, scalar in words.TYPES.items():
        aliases.setdefault(scalar, []).append(name)
    for phrase, scalar in words.PHRASES.items():
        aliases.setdefault(scalar, []).append(" ".join(reversed(phrase)))
    return [
        "## Types",
        "",
        "| type | names |",
        "|---|---|",
        *[f"| {_says(s)} | {_names(dict.fromkeys(n))} |" for s, n in aliases.items()],
        f"| vectors | {_names(words.VECTOR_TYPES)}, `make_…` for each; arithmetic is written per component |",
        "",
        "A pointer has the bounds of its memory. It cannot be converted from or to a number, be stored in memory, or change",
        "between two memories.",
        "",
    ]


def _functions() -> list[str]:
    return [
        "## Functions",
        "",
        "| functions | types |",
        "|---|---|",
        f"| {_names(builtins.MATH)} | double; float with or without an `f` at the end |",
        f"| {_names(builtins.ALIASES)} | as the functions above, with the same accuracy |",
        f"| {_names(builtins.TESTS)} | float, double |",
        f"| {_names(builtins.EXTREMES)}, `abs` | all number types |",
        f"| {_names(builtins.OPERATORS)} | operators of CUDA by name |",
        f"| {_names(builtins.PLAIN)} | as in CUDA |",
        f"| {_names(builtins.LOADS)} | plain loads |",
        f"| {_names(builtins.HALVES)}, {_names(builtins.HALF_BITS)} | conversions from and to 16-bit floats |",
        f"| {_names(builtins.HALF_OPERATORS)}, {_names(builtins.HALF_MORE)}, {_names(builtins.HALF_MATH)} | `__half` and "
        "`__nv_bfloat16`; these types also have all operators. Each result is rounded once (functions round a float result) |",
        "",
        "Products and sums are not contracted; use `fmaf` for one rounding. Signed integers wrap. A division by 0 gives 0.",
        "Shifts use only the low bits of the distance. Conversions from floating point saturate, and NaN gives 0. Variables",
        "and shared memory are initialized to 0.",
        "",
    ]


def _atomics() -> list[str]:
    return [
        "## Atomics",
        "",
        "| function | types |",
        "|---|---|",
        *[f"| `{n}` | {', '.join(_says(k) for k in kinds)} |" for n, (_, kinds) in builtins.ATOMICS.items()],
        "",
    ]


def _between_threads() -> list[str]:
    return [
        "## Between threads",
        "",
        f"- {_names(builtins.BARRIERS)}: all threads of a block must reach them. A condition that may differ between threads",
        "  (because of `threadIdx`, or of a value loaded from different places) is an error that names its line.",
        f"- {_names(builtins.WARP)}: warps of 32 threads. On devices without subgroups (CPUs), values go through memory;",
        "  threads that do not take part must be excluded by `if`, not by a loop or a return.",
        f"- {_names(builtins.FENCES)}.",
        "",
    ]


def _not_offered() -> list[str]:
    return [
        "## Not supported",
        "",
        "| name | instead |",
        "|---|---|",
        *[f"| `{n}` | {why} |" for n, why in (builtins.UNSUPPORTED | words.REFUSED).items()],
        "",
    ]


def _limits() -> list[str]:
    return [
        "## Limits",
        "",
        "| what | at most |",
        "|---|---|",
        f"| characters of a source; tokens after macros are expanded | {lexer.MAX_SOURCE}, {lexer.MAX_TOKENS} |",
        f"| depth of nested blocks, parentheses and operators | {parser.MAX_DEPTH} |",
        f"| nodes of a kernel with its functions inlined; functions; depth of nested calls | {translate.MAX_WEIGHT}, "
        f"{translate.MAX_FUNCTIONS}, {translate.MAX_CALLS} |",
        f"| bytes of shared memory of a block | {translate.MAX_SHARED} |",
        f"| bytes of variables of all threads of a block together | {translate.MAX_PRIVATE} |",
        f"| bytes of variables of all threads of a block in functions with barriers, on CPUs | {translate.MAX_BARRIER_BYTES} |",
        f"| iterations of a loop that does not check whether the launch must end | {arithmetic.MAX_UNCHECKED_TURNS} |",
    ]


if __name__ == "__main__":
    print(page(), end="")
