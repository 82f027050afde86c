"""What compilers and clients ask of CUDA C: code for a GPU by the vendor's compiler, and what a kernel's parameters are."""

import re
from dataclasses import replace

import pytest
from wooly_cuda_c import signatures
from wooly_cuda_c.language import for_cpu, for_gpu
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Parameter
from wooly_wis.languages import ForeignError, Passed, Request

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
def test_code_for_a_gpu_is_what_the_vendors_compiler_makes_of_the_printed_text(target):
    given = []
    code = for_gpu(REQUEST, target, lambda text: given.append(text) or b"its code")
    (image,), (text,) = code.images, given
    assert (code.parameters, code.code, image.code) == (PARAMETERS, b"", b"its code")
    assert image.entry == code.entry and re.search(rf"__global__ [^{{]*\b{image.entry}\(", text)
    assert image.passed == ("status", "address 0", "length 0 1", "address 1", "length 1 1", "value 2", "value 3")
    assert (image.threads, image.shared, image.scratch, image.claims) == (0, 0, 0, (1, 1, 1, 1))
    assert len(code.places) >= 2


def test_code_for_a_cpu_is_the_printed_text():
    made = for_cpu(REQUEST)
    assert made.parameters == PARAMETERS and f"{made.entry}(" in made.text and "__global__" not in made.text


def test_source_that_is_not_understood_reaches_no_vendors_compiler():
    request = replace(REQUEST, text=TEXT.replace("x[i]", 'x[i]; asm("trap;")'))
    with pytest.raises(ForeignError, match="CUDA C, line 3: asm"):
        for_gpu(request, "cuda:sm_90", pytest.fail)


def test_client_is_told_what_the_parameters_are():
    found = signatures.parameters(TEXT, "scale", "float")
    assert found == (Passed.READ, Passed.WRITTEN, Passed.NUMBER, Passed.NUMBER)


@pytest.mark.parametrize(
    ("entry", "template", "says"),
    [
        ("scale", "", "line 1: scale is a template of T: name it scale<…>"),
        ("shift", "", "line 1: there is no kernel shift; there is scale"),
    ],
)
def test_kernel_that_a_client_cannot_name_is_an_error_with_its_line(entry, template, says):
    with pytest.raises(CudaSourceError, match=says):
        signatures.parameters(TEXT, entry, template)
