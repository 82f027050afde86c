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
    """The page, Markdown."""
    out = [
        "# CUDA C that is understood",
        "",
        "This page is generated from the tables of the front end by `make docs`; a test compares them. A",
        "script brings kernels with `wooly.cuda_kernel(source, name)` and `torch.cuda._compile_kernel`. Text",
        "that this page does not name is an error, and the error has its line.",
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
        "- `__global__` and `__device__` functions, overloads, references, templates of types and whole",
        '  numbers (defaults, deduction, `if constexpr`); kernels of a template by name: `"scale<float, 4>"`;',
        '  `extern "C"`, `using`, `typedef`, plain structs.',
        "- All operators and statements of C but `goto`; `auto`, `constexpr`, `static_cast`, `reinterpret_cast`, braces.",
        "- `__shared__` arrays and variables, `extern __shared__` arrays, `__constant__` arrays with values.",
        "- `#define` with and without arguments, conditionals, `#pragma unroll`; `#include` of headers",
        f"  that are built in: {_names(sorted(preprocess.HEADERS))}. No file is read.",
        f"- {_names(builtins.PLACES)}; `assert`, `__trap`; by name",
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
        f"| vectors | {_names(words.VECTOR_TYPES)}, `make_…` of each; their parts are computed one by one |",
        "",
        "A pointer knows what it may reach. It cannot be made from a number nor become one, be kept in memory, or point now into",
        "one memory, now into another.",
        "",
    ]


def _functions() -> list[str]:
    return [
        "## Functions",
        "",
        "| functions | for |",
        "|---|---|",
        f"| {_names(builtins.MATH)} | double, and float with or without an `f` at the end |",
        f"| {_names(builtins.SAME)} | the same, as exact |",
        f"| {_names(builtins.ASKED)} | float, double |",
        f"| {_names(builtins.EXTREMES)}, `abs` | all numbers |",
        f"| {_names(builtins.OPERATORS)} | as their names say |",
        f"| {_names(builtins.PLAIN)} | as CUDA has them |",
        f"| {_names(builtins.LOADS)} | plain loads |",
        f"| {_names(builtins.HALVES)}, {_names(builtins.HALF_BITS)} | numbers of 16 bits from and to others |",
        f"| {_names(builtins.HALF_OPERATORS)}, {_names(builtins.HALF_MORE)}, {_names(builtins.HALF_MATH)} | `__half` and "
        "`__nv_bfloat16`, as are all operators: each result rounded once (of functions: the float's) |",
        "",
        "Products and sums are not contracted: `fmaf` is what rounds once. Signed numbers wrap; a quotient by 0 is 0; shifts",
        "keep to the width; conversions of real numbers saturate, and not-a-number becomes 0; variables and shared memory",
        "begin as 0.",
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
        f"- {_names(builtins.BARRIERS)}: where all threads of a block come by. A condition on which threads may disagree",
        "  (by `threadIdx`, by what is loaded from places that differ) is an error that names its line.",
        f"- {_names(builtins.WARP)}: warps of 32. On devices without subgroups (CPUs) values go through memory;",
        "  threads that do not take part must be told apart by `if`, not by a loop or a return.",
        f"- {_names(builtins.FENCES)}.",
        "",
    ]


def _not_offered() -> list[str]:
    return [
        "## Not offered",
        "",
        "| name | instead |",
        "|---|---|",
        *[f"| `{n}` | {why} |" for n, why in (builtins.ABSENT | words.REFUSED).items()],
        "",
    ]


def _limits() -> list[str]:
    return [
        "## Limits",
        "",
        "| what | at most |",
        "|---|---|",
        f"| characters, tokens of a source (macros put in place) | {lexer.MAX_SOURCE}, {lexer.MAX_TOKENS} |",
        f"| blocks, parentheses, operators in each other | {parser.MAX_DEPTH} |",
        f"| nodes of a kernel with its functions put in place; functions; calls in each other | {translate.MAX_WEIGHT}, "
        f"{translate.MAX_FUNCTIONS}, {translate.MAX_CALLS} |",
        f"| bytes of shared memory of a block | {translate.MAX_SHARED} |",
        f"| bytes of variables of all threads of a block | {translate.MAX_PRIVATE} |",
        f"| bytes of variables of all threads of a block that last over barriers, on CPUs | {translate.MAX_KEPT} |",
        f"| turns of a loop that does not look whether the launch is to end | {arithmetic.FREE_TURNS} |",
    ]


if __name__ == "__main__":
    print(page(), end="")
