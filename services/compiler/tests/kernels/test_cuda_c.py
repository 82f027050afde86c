# ruff: noqa: E501 (sources in one line)
"""Kernels in CUDA C through the whole stack: parsed without a GPU, run on PoCL, compared with torch on the CPU.

Kernels that move or count numbers, or add once, give equal results. Sums in another order are within 1e-5.
"""

import re

import pytest
import torch
import wooly
from wooly.errors import RemoteOperationError

from services.compiler.tests.kernels.cuda_kernels import ADD, HISTOGRAM, MANY, MATMUL, REDUCE, STENCIL, TEMPLATE, WARPS


@pytest.fixture(autouse=True)
def device(gpu):
    torch.manual_seed(0)
    return gpu


def on(*tensors):
    return [t.to("cuda") for t in tensors]


def groups(n, threads):
    return (-(-n // threads), 1, 1)


@pytest.mark.parametrize("compile_kernel", [wooly.cuda_kernel, lambda *a: torch.cuda._compile_kernel(*a)])
def test_vector_add_equals_torch(compile_kernel):
    add = compile_kernel(ADD, "add")
    x, y = torch.randn(4999), torch.randn(4999)
    a, b = on(x, y)
    c = torch.empty_like(a)
    add(grid=groups(4999, 256), block=(256, 1, 1), args=[a, b, c, c.numel()])
    assert torch.equal(c.cpu(), x + y)


def test_histogram_with_shared_atomics():
    values = torch.randint(0, 64, (20000,), dtype=torch.int32)
    (v,) = on(values)
    bins = torch.zeros(64, dtype=torch.int32, device="cuda")
    wooly.cuda_kernel(HISTOGRAM, "histogram")((8, 1, 1), (96, 1, 1), [v, bins, len(values)])
    assert torch.equal(bins.cpu(), torch.bincount(values, minlength=64).int())


def test_tree_reduction_with_dynamic_shared_memory():
    x = torch.randn(10000)
    out = torch.zeros(4, device="cuda")
    wooly.cuda_kernel(REDUCE, "reduce")((4, 1, 1), (128, 1, 1), [*on(x), out, len(x)], shared_mem=128 * 4)
    torch.testing.assert_close(out.cpu().sum(), x.sum(), rtol=1e-5, atol=1e-4)


def test_warp_shuffles():
    x = torch.randn(5, 1000)
    out = torch.zeros(5, device="cuda")
    wooly.cuda_kernel(WARPS, "row_sums")((5, 1, 1), (256, 1, 1), [*on(x), out, 1000])
    torch.testing.assert_close(out.cpu(), x.sum(1), rtol=1e-5, atol=1e-4)


def test_warp_and_block_votes():
    x = torch.randint(-9, 9, (64,), dtype=torch.int32)
    bits, counts = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    wooly.cuda_kernel(WARPS, "votes")((1, 1, 1), (64, 1, 1), [*on(x), bits, counts])
    expected = [int(sum((int(v) > 0) << k for k, v in enumerate(half))) for half in (x[:32], x[32:])]
    assert [b % (1 << 32) for b in bits.tolist()] == expected
    assert counts.tolist() == [int((x > 0).sum()), int((x[:32] > 0).sum()), 1, 0]


@pytest.mark.parametrize(
    ("name", "dtype", "by"),
    [
        ("scale<float, 4>", torch.float32, 4),
        ("scale<double>", torch.float64, 2),
        ("scale<long long, 3, true>", torch.int64, -3),
    ],
)
def test_template_is_instantiated_by_name(name, dtype, by):
    x = (torch.randn(1000) * 10).to(dtype)
    (a,) = on(x)
    y = torch.empty_like(a)
    wooly.cuda_kernel(TEMPLATE, name)(groups(1000, 128), (128, 1, 1), [a, y, 1000])
    whole = x.clone()
    for _ in range(abs(by) - 1):
        whole += x
    assert torch.equal(y.cpu(), whole if by > 0 else -whole)


def test_stencil_in_two_dimensions():
    x = torch.randn(37, 53)
    (a,) = on(x)
    y = torch.empty_like(a)
    wooly.cuda_kernel(STENCIL, "stencil")((4, 5, 1), (16, 8, 1), [a, y, 37, 53])
    w = torch.tensor([[0, 0.25, 0], [0.25, -1, 0.25], [0, 0.25, 0]]).reshape(1, 1, 3, 3)
    padded = torch.nn.functional.pad(x[None, None], (1, 1, 1, 1), mode="replicate")
    torch.testing.assert_close(y.cpu(), torch.nn.functional.conv2d(padded, w)[0, 0], rtol=1e-5, atol=1e-6)


def test_matmul_with_shared_tiles():
    a, b = torch.randn(70, 50), torch.randn(50, 90)
    c = torch.zeros(70, 90, device="cuda")
    wooly.cuda_kernel(MATMUL, "matmul")((6, 5, 1), (16, 16, 1), [*on(a, b), c, 70, 90, 50])
    torch.testing.assert_close(c.cpu(), a @ b, rtol=1e-5, atol=1e-5)


def test_kernel_with_many_language_features():
    v, out = torch.arange(4.0), torch.zeros(20)
    out[:2] = torch.tensor([1.0, 2.0])
    v, out = on(v, out)
    wooly.cuda_kernel(MANY, "many")((1, 1, 1), (1, 1, 1), [v, out, 2.5, True, 5 << 40])
    assert v.tolist() == [0, 1, 1, 1]
    expected = [2, 1, 0, 0, 0, 3, 2, 1, 2.5, -5, 2**0.5, 2, 8, float("inf"), 1, 5.5, 63, 3, 38, 48]
    torch.testing.assert_close(out.cpu(), torch.tensor(expected))


def test_views_and_null_pointers():
    source = (
        """__global__ void f(const float* a, float* b) { b[threadIdx.x] = a == nullptr ? -1.f : a[threadIdx.x]; }"""
    )
    f = wooly.cuda_kernel(source, "f")
    (a,) = on(torch.arange(10.0))
    b = torch.zeros(10, device="cuda")
    f((1, 1, 1), (4, 1, 1), [a[5:], b[2:]])
    f((1, 1, 1), (2, 1, 1), [None, b])
    assert b.tolist() == [-1, -1, 5, 6, 7, 8, 0, 0, 0, 0]


def test_autograd_function_with_kernels():
    source = "__global__ void mul(const float* a, const float* b, float* c, int n) { int i = threadIdx.x; if (i < n) c[i] = a[i] * b[i]; }"
    mul = wooly.cuda_kernel(source, "mul")

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            mul((1, 1, 1), (32, 1, 1), [x, x, y, x.numel()])
            return y

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            out = torch.empty_like(x)
            mul((1, 1, 1), (32, 1, 1), [x * 2, grad.contiguous(), out, x.numel()])
            return out

    x = torch.randn(20)
    (a,) = on(x)
    a.requires_grad_()
    Square.apply(a).sum().backward()
    assert torch.equal(a.grad.cpu(), 2 * x)


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_index_out_of_range_names_kernel_line_and_argument():
    (a,) = on(torch.ones(8))
    neighbour = torch.ones(8, device="cuda")
    wild = wooly.cuda_kernel("__global__ void wild(float* a, int n) {\n  a[threadIdx.x + n] = 7.f;\n}", "wild")
    wild((1, 1, 1), (4, 1, 1), [a, 6])
    with pytest.raises(RemoteOperationError, match=r"kernel wild .*line 2, argument 0 \(a\), writes beyond") as caught:
        a.cpu()
    assert "test_cuda_c.py" in str(caught.value)
    assert torch.equal(neighbour.cpu(), torch.ones(8))


def test_source_with_error_fails_at_compile_call():
    with pytest.raises(RuntimeError, match=r"Kernel compilation failed:\nline 2: expected '\)', found"):
        torch.cuda._compile_kernel("__global__ void f(float* a) {\n a[0] = (1;\n}", "f")
    with pytest.raises(RuntimeError, match="the source has no kernel g; it has f"):
        wooly.cuda_kernel("__global__ void f(float* a) { }", "g")
    with pytest.raises(RuntimeError, match=re.escape("scale is a template of T, TIMES, MINUS: name it scale<…>")):
        wooly.cuda_kernel(TEMPLATE, "scale")
    with pytest.raises(NotImplementedError, match="put all definitions into the source"):
        torch.cuda._compile_kernel(ADD, "add", nvcc_options=["-O3"])


def test_source_refused_by_compiler_names_line():
    (a,) = on(torch.ones(8))
    f = wooly.cuda_kernel("__global__ void f(float* a) {\n  float* p = (float*)12345;\n  *p = 1;\n}", "f")
    f((1, 1, 1), (1, 1, 1), [a])
    with pytest.raises(RemoteOperationError, match=r"line 2: .* cannot be cast to a pointer: its bounds are not known"):
        a.cpu()


def test_arguments_that_do_not_match_signature_are_refused():
    add = wooly.cuda_kernel(ADD, "add")
    a, b, c = on(torch.ones(8), torch.ones(8), torch.zeros(8))
    one = (1, 1, 1)
    with pytest.raises(ValueError, match="takes 4 arguments, but 3 are given"):
        add(one, one, [a, b, c])
    with pytest.raises(ValueError, match="parameter 1 is a pointer, but argument 1 is a int"):
        add(one, one, [a, 3, c, 8])
    with pytest.raises(ValueError, match="parameter 3 is a number, but argument 3 is a tensor"):
        add(one, one, [a, b, c, a])
    with pytest.raises(ValueError, match="cannot be accessed from the device"):
        add(one, one, [a, torch.ones(8), c, 8])
    with pytest.raises(TypeError, match="Unsupported argument type: <class 'str'>"):
        add(one, one, [a, b, c, "8"])
    with pytest.raises(ValueError, match="whose product is at most 1024"):
        add(one, (32, 64, 1), [a, b, c, 8])
    with pytest.raises(RuntimeError, match=r"set_shared_memory_config\(shared_mem\)"):
        add(one, one, [a, b, c, 8], shared_mem=64 << 10)
    add(one, (8, 1, 1), [a, b, c, 8])
    assert c.tolist() == [2.0] * 8
