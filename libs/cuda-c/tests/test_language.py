"""The entry points of CUDA C: code for compilers, and the parameters of a kernel for clients."""

import re
from dataclasses import replace

import pytest
from wooly_cuda_c import signatures
from wooly_cuda_c.language import for_cpu, for_gpu
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Parameter
from wooly_wis.languages import ForeignError, ParameterKind, Request

TEXT = """template <typename T> __global__ void scale(const T *x, T *y, int n, float by) {
  int i = threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}"""
REQUEST = Request(TEXT, "scale", ("*u8", "*u8", "i64", "f64"), (64, 1, 1), {"template": "float"})
PARAMETERS = (
    Parameter(None, True),
    Parameter(None, True, True),
    Parameter(DType.I64, False),
    Parameter(DType.F64, False),
)


@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_for_gpu_returns_the_vendors_code_of_the_printed_text(target):
    given = []
    code = for_gpu(REQUEST, target, lambda text: given.append(text) or b"its code")
    (image,), (text,) = code.images, given
    assert (code.parameters, code.code, image.code) == (PARAMETERS, b"", b"its code")
    assert image.entry == code.entry and re.search(rf"__global__ [^{{]*\b{image.entry}\(", text)
    assert image.passed == ("status", "address 0", "length 0 1", "address 1", "length 1 1", "value 2", "value 3")
    assert (image.threads, image.shared, image.scratch, image.claims) == (0, 0, 0, (1, 1, 1, 1))
    assert len(code.places) >= 2


def test_for_cpu_returns_the_printed_text():
    made = for_cpu(REQUEST)
    assert made.parameters == PARAMETERS and f"{made.entry}(" in made.text and "__global__" not in made.text


def test_for_gpu_of_refused_source_does_not_call_the_vendors_compiler():
    request = replace(REQUEST, text=TEXT.replace("x[i]", 'x[i]; asm("trap;")'))
    with pytest.raises(ForeignError, match="CUDA C, line 3: asm"):
        for_gpu(request, "cuda:sm_90", pytest.fail)


def test_parameters_of_a_kernel_returns_their_kinds():
    found = signatures.parameters(TEXT, "scale", "float")
    assert found == (ParameterKind.READ, ParameterKind.WRITTEN, ParameterKind.NUMBER, ParameterKind.NUMBER)


@pytest.mark.parametrize(
    ("entry", "template", "says"),
    [
        ("scale", "", "line 1: scale is a template of T: name it scale<…>"),
        ("shift", "", "line 1: the source has no kernel shift; it has scale"),
    ],
)
def test_parameters_of_unknown_or_unnamed_template_kernel_raises(entry, template, says):
    with pytest.raises(CudaSourceError, match=says):
        signatures.parameters(TEXT, entry, template)


def test_for_cpu_after_a_crash_of_the_compiler_returns_the_simpler_text():
    usual, careful = for_cpu(REQUEST), for_cpu(replace(REQUEST, careful=True))
    assert "_together" in usual.text and "_together" not in careful.text
    assert (usual.parameters, usual.places) == (careful.parameters, careful.places)
