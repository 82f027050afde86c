"""The names that `extern` may have: the allow-list of the device library's own operators, and names of extension operators.

An *extension operator* is registered with PyTorch by another library (`torchvision.nms.default`) or by a script. A program may
name any extension operator. Whether an executor runs it is decided there: it runs only operators of the libraries that it offers
(`wooly_executor.runtime.extensions`).
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from wooly_wis.codec import decode_form, split_program

#: Namespaces of PyTorch itself. Of these, only operators of the allow-list may be named.
LIBRARY_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "rngprims", "debugprims", "quantized", "_quantized", "quantized_decomposed"),
        *(
            "quantization",
            "sparse",
            "mkl",
            "mkldnn",
            "mkldnn_prepacked",
            "onednn",
            "xnnpack",
            "prepacked",
            "metal_prepack",
            "vulkan",
        ),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem", "dist"),
        *(
            "inductor",
            "inductor_prims",
            "_inductor_test",
            "_native",
            "debug_mode_ops",
            "higher_order",
            "profiler",
            "cuda",
            "streams",
            "fsdp",
            "nccl",
            "rpc",
        ),
        *("static_runtime", "torchscript", "export", "_export", "onnx", "onnx_symbolic", "flex_lib", "_test", "bc"),
        *("autograd_function", "dynamo", "torch", "fb", "internal", "tensorexpr", "cudnn", "miopen", "mps", "xpu"),
    )
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*")
#: Maximum length of the name of an extension operator, in characters.
MAX_NAME = 256


@cache
def allowed() -> frozenset[str]:
    """All operator names of the allow-list, such as ``aten.add.Tensor``."""
    text = files("wooly_wis").joinpath("data/extern_ops.txt").read_text("ascii")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def is_allowed(name: str) -> bool:
    """Whether the allow-list has this operator overload."""
    return name in allowed()


def is_extension(name: str) -> bool:
    """Whether this is the name of an extension operator: namespace, operator and overload, in no namespace of PyTorch's own."""
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        return False
    return name.partition(".")[0] not in LIBRARY_NAMESPACES


def names_in(program: bytes) -> list[str]:
    """The names of the operators of the device library, and of extension operators, that a program calls, in its order.

    Args:
        program: the canonical bytes of a program.

    Raises:
        DecodeError: these bytes are not a program.
    """
    forms = [decode_form(raw) for raw in split_program(program)[0]]
    return [str(form.attr("name")) for form in forms if form.opcode == "extern"]
