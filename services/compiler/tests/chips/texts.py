"""Collects the texts that compilers for GPUs get: generated kernels, translated CUDA C, TTIR of scripts.

`texts` yields the same texts in the same order in every process, so that a table of them can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wooly_compiler.artifacts import compiled
from wooly_compiler.build.targets import target
from wooly_compiler.render.printer import render
from wooly_cuda_c.printing.dialects import DIALECTS
from wooly_cuda_c.printing.translate import translate
from wooly_testkit.tape import Tape
from wooly_wis.kernel.ir import Kernel

from libs.triton.tests.texts import signature
from services.compiler.tests.chips import programs
from services.compiler.tests.kernels import cuda_kernels

#: Groups of texts, in the order of `texts`.
GROUPS = ("programs", "rows", "cuda-c", "triton")

#: Kernels that a dialect cannot express: HIP's has no atomic maximum, which no kernel of a program needs.
NOT_PRINTED = {("atomics", "hip")}


@dataclass(frozen=True, slots=True)
class Text:
    """A text for a compiler.

    Attributes:
        group: one of `GROUPS`.
        name: name in the table.
        dialect: `cuda`, `hip` or `ttir`.
        text: the text. TTIR has no guards yet, because guards depend on the chip.
        options: options of a launch, for TTIR.
    """

    group: str
    name: str
    dialect: str
    text: str
    options: tuple[tuple[str, Any], ...] = ()


def texts(toolchain: str) -> Iterator[Text]:
    """The texts for `cuda` or `hip`. No two of a group have the same text."""
    for kernels, group in ((_of_programs, "programs"), (_of_rows, "rows")):
        known: set[str] = set()
        for name, kernel in kernels():
            if (name, toolchain) in NOT_PRINTED:
                continue
            text = printed(kernel, toolchain)
            if text not in known:
                known.add(text)
                yield Text(group, name, toolchain, text)
    yield from _cuda_c(toolchain)
    yield from ttir()


def printed(kernel: Kernel, toolchain: str) -> str:
    """A kernel in the C of a toolchain."""
    where = target({"cuda": "cuda:sm_90", "hip": "hip:gfx942"}[toolchain])  # the text is the same for every chip
    return render(kernel, where.dialect, where.form).text


def kernels_of(tape: Tape) -> tuple[Kernel, ...]:
    """The kernels of a tape as an executor on a GPU asks for them."""
    return compiled(tape.program()[0], trace=None, params=tape.params, checks=True, biases=True).kernels


def _numbered(name: str, kernels: tuple[Kernel, ...]) -> Iterator[tuple[str, Kernel]]:
    for n, kernel in enumerate(kernels, 1):
        yield f"{name} {n}" if len(kernels) > 1 else name, kernel


def _of_programs() -> Iterator[tuple[str, Kernel]]:
    from services.compiler.tests import test_rendering

    for part in (*programs.PARTS, programs.every_kind, programs.vendors_functions):
        yield from _numbered(part.__name__, kernels_of(part()))
    for make in (test_rendering.pointwise, test_rendering.channels, test_rendering.padded):
        yield from _numbered(make.__name__, kernels_of(make()))
    yield "atomics", test_rendering.histogram()


def _of_rows() -> Iterator[tuple[str, Kernel]]:
    """A kernel of every row of the op table, for every dtype that it supports."""
    from services.compiler.tests.compiled import test_rows

    for n, (row, dtype, constants, sizes) in enumerate(test_rows.CASES):
        found = test_rows.planned(n)
        if not isinstance(found, str):
            name = f"{row.opcode} {dtype.label}"
            if constants:
                name += f", dims {constants['dims']} of {'x'.join(map(str, sizes))}".replace(",)", ")")
            yield from _numbered(name, found[-1].kernels)


B = "buffer"
#: Kernels of scripts in CUDA C: text, entry, arguments, threads, template arguments.
CUDA_C = (
    (cuda_kernels.ADD, "add", (B, B, B, "i64"), (256, 1, 1), ""),
    (cuda_kernels.HISTOGRAM, "histogram", (B, B, "i64"), (96, 1, 1), ""),
    (cuda_kernels.REDUCE, "reduce", (B, B, "i64"), (128, 1, 1), ""),
    (cuda_kernels.WARPS, "row_sums", (B, B, "i64"), (256, 1, 1), ""),
    (cuda_kernels.WARPS, "votes", (B, B, B), (64, 1, 1), ""),
    (cuda_kernels.TEMPLATE, "scale", (B, B, "i64"), (128, 1, 1), "double, 3, true"),
    (cuda_kernels.STENCIL, "stencil", (B, B, "i64", "i64"), (16, 8, 1), ""),
    (cuda_kernels.MATMUL, "matmul", (B, B, B, "i64", "i64", "i64"), (16, 16, 1), ""),
    (cuda_kernels.MANY, "many", (B, B, "f64", "b1", "i64"), (1, 1, 1), ""),
)


def _cuda_c(toolchain: str) -> Iterator[Text]:
    # AMD's functions are in a library that only the device's machine has.
    everything = cuda_kernels.every_function(vendors=toolchain == "cuda")
    for text, entry, arguments, block, template in (*CUDA_C, (everything, "everything", (B,) * 6, (64, 1, 1), "")):
        made = translate(text, entry, arguments, block, template=template, shared=512, dialect=DIALECTS[toolchain])
        yield Text("cuda-c", entry, toolchain, made.text)


@functools.cache
def ttir() -> tuple[Text, ...]:
    """Kernels of scripts in TTIR, as the client's front end makes them. Empty if Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return ()
    from services.compiler.tests.kernels import triton_kernels as k

    matmul, f32, f16 = k.matmul_kernel.fn.fn, "*fp32", "*fp16"
    strides = ["i32"] * 3 + ["i32", "constexpr"] * 3
    big, small = {"BM": 128, "BN": 128, "BK": 32, "EVEN": True}, {"BM": 32, "BN": 64, "BK": 32, "EVEN": False}
    found = [
        ("add", k.add_kernel, [f32] * 3 + ["i32"], {"BLOCK": 1024}, {}),
        ("softmax", k.softmax_kernel, [f32, f32, "i32", "i32"], {"BLOCK": 1024}, {}),
        ("softmax, 8192 columns", k.softmax_kernel, [f16, f16, "i32", "i32"], {"BLOCK": 8192}, {"num_warps": 8}),
        ("matmul f32", matmul, [f32] * 3 + strides, small, {}),
        ("matmul f16", matmul, [f16] * 3 + strides, small, {"num_stages": 4}),
        ("matmul f16, 128x128", matmul, [f16] * 3 + strides, big, {"num_warps": 8, "num_stages": 3}),
        ("layer norm", k.layer_norm_forward, [f32] * 6 + ["i32", "i32", "fp32"], {"BLOCK": 1024}, {}),
        ("gradient of layer norm", k.layer_norm_backward, [f32] * 8 + ["*i32", "i32", "i32"],
            {"GROUPS": 4, "BLOCK": 1024}, {}),
        ("dropout", k.dropout_kernel, [f32, f32, "i32", "fp32", "i32"], {"BLOCK": 512}, {}),
        ("attention f32", k.attention_kernel, [f32] * 4 + ["fp32", "i32", "i32", "i32"],
            {"D": 64, "BM": 32, "BN": 32, "CAUSAL": True}, {}),
        ("attention f16", k.attention_kernel, [f16] * 4 + ["fp32", "i32", "i32", "i32"],
            {"D": 64, "BM": 64, "BN": 64, "CAUSAL": True}, {}),
        ("grouped gemm", k.grouped_gemm_kernel, [f32] * 3 + ["*i32", "i32", "i32", "i32"],
            {"BM": 16, "BN": 32, "BK": 16}, {}),
    ]  # fmt: skip
    made = []
    for name, kernel, types, constants, options in found:
        made.append(Text("triton", name, "ttir", _ttir(kernel, types, constants), tuple(options.items())))
    return tuple(made)


def _ttir(kernel: Any, types: list[str], constants: dict[str, Any]) -> str:
    """The text of a kernel. An argument of type `constexpr` is 1, and all addresses are multiples of 16 bytes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource
    from wooly.triton_capture.compiler import WoolyBackend

    names = [p.name for p in kernel.params]
    arguments = dict(zip([n for n in names if n not in constants], types, strict=True))
    known = constants | {n: 1 for n, t in arguments.items() if t == "constexpr"}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in arguments.items() if t.startswith("*")}
    where = GPUTarget("wooly", "any", 32)
    backend, stages = WoolyBackend(where), {}
    options = backend.parse_options({})
    types_of = {n: arguments.get(n, "constexpr") for n in names}
    source = ASTSource(kernel, types_of, {(names.index(n),): v for n, v in known.items()}, aligned)
    context = ir.context()
    ir.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(where, options, implementation, backend.get_module_map(), context)
    module.context = context
    backend.add_stages(stages, options)
    text: str = stages["ttir"](module, {})
    assert signature(text)[0] == kernel.__name__
    return text
