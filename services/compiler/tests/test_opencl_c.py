"""The declarations of OpenCL C's functions with which texts are built instead of PoCL's header."""

import re

import pytest
from wooly_compiler.build.opencl_c import DECLARATIONS, WITHOUT_HEADER
from wooly_compiler.render import dialects as ours
from wooly_cuda_c.printing import dialects as cuda_c
from wooly_cuda_c.printing.builtins import MATH
from wooly_triton.ops import EXTERNS
from wooly_triton.prelude import PRELUDE

DECLARED = re.findall(r"^(\w+) W_OVERLOADED (?:W_\w+ )?(\w+)\((.*)\);$", DECLARATIONS, re.MULTILINE)
#: Words of C and of macros, macros of the base of OpenCL C, functions of clang, and functions that the texts define.
KNOWN = re.compile(r"(if|for|while|return|sizeof|defined|as_\w+|F32|F64|__\w+|w_\w+|W_\w+|name|i|_of|_bits)$")


def called(text):
    """The names of the functions that a text calls."""
    return {name for name in re.findall(r"\b([A-Za-z_]\w*)\(", text) if not KNOWN.match(name)}


def test_functions_that_languages_call_are_declared():
    """A text that calls another function is built with PoCL's header, which takes 0.1 s longer."""
    c = cuda_c.OPENCL
    texts = {
        "generated kernels": [*ours.OPENCL.builtins.values(), *ours.OPENCL.atomics.values(), ours.OPENCL.barrier],
        "their places": [ours.OPENCL.group, ours.OPENCL.thread, ours.OPENCL.prologue],
        "CUDA C": [*[f"{c.call(name, single)}(" for name in MATH for single in (True, False)], *c.atomics.values()],
        "its places": [*c.places.values(), c.barrier, c.fence, c.prologue],
        "Triton": [
            *EXTERNS.values(),
            PRELUDE,
            "get_group_id(",
            "get_num_groups(",
            "atomic_cmpxchg(",
            "min(",
            "mul_hi(",
        ],
    }
    declared = {name for _, name, _ in DECLARED}
    assert len(declared) > 60
    missing = {what: found for what, each in texts.items() if (found := called("\n".join(each)) - declared)}
    assert missing == {}


def test_declarations_agree_with_the_header_of_pocl():
    """A declaration of another type than the header's would be refused, or be another function."""
    pytest.importorskip("pyopencl", reason="declarations are PoCL's: pip install 'pyopencl[pocl]'")
    from wooly_compiler.build import opencl

    device = opencl.default_device()
    lines = []
    for _, name, parameters in DECLARED:
        arguments = []
        for kind in parameters.split(", "):
            space = "g" if "__global" in kind else "l"
            arguments.append(
                f"({kind}){space}" if "*" in kind else "CLK_LOCAL_MEM_FENCE" if "fence" in kind else f"({kind})n"
            )
        call = f"{name}({', '.join(arguments)})"
        lines.append(f"{call};" if "fence" in parameters else f"sum += (float){call};")
    body = "\n".join(lines)
    text = f"kernel void k(global float* g, local float* l, int n) {{ float sum = 0;\n{body}\ng[0] = sum; }}"
    assert opencl.program_with(device, DECLARATIONS + text, WITHOUT_HEADER)  # each function exists
    assert opencl.program_with(device, DECLARATIONS + text)  # after the header, each is a repetition
