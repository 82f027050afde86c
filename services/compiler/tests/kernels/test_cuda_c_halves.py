# ruff: noqa: E501 (sources in one line)
"""Half precision, bfloat16 and warp reductions in CUDA C on PoCL, compared with torch on the CPU."""

import pytest
import torch
import wooly

ARITHMETIC = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename T> __global__ void work(const T *x, const T *y, T *out, float *wide, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    T a = x[i], b = y[i];
    out[i] = (a + b) * a - b;
    out[n + i] = __hmul(a, b);
    out[2 * n + i] = __hfma(a, b, a);
    T c = a; c += b; c = -c;
    out[3 * n + i] = c;
    out[4 * n + i] = __hmax(a, b);
    out[5 * n + i] = hsqrt(__habs(a));
    out[6 * n + i] = (T)(1.0 / 3.0);
    out[7 * n + i] = a < b ? (T)i : __hdiv(a, b);
    wide[i] = (float)a + (a > b ? 1.0f : 0.0f) + (__hisnan(a) ? 100.0f : 0.0f);
}
"""
CONVERT = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__global__ void to_half(const float *x, __half *out, int n) { int i = threadIdx.x; if (i < n) out[i] = __float2half(x[i]); }
__global__ void to_bfloat(const float *x, __nv_bfloat16 *out, int n) { int i = threadIdx.x; if (i < n) out[i] = __float2bfloat16(x[i]); }
__global__ void from_double(const double *x, __half *out, int n) { int i = threadIdx.x; if (i < n) out[i] = x[i]; }
__global__ void pairs(const half2 *x, half2 *out, int n) {
    int i = threadIdx.x;
    if (i < n) { half2 v = x[i]; out[i] = make_half2(v.y, __float2half(__half2float(v.x) * 2.0f)); }
}
"""
FOLDS = """
#include <cuda_fp16.h>
__global__ void folds(const int *x, int *out, const __half *h, __half *moved) {
    int t = threadIdx.x, v = x[t];
    unsigned u = (unsigned)v;
    out[t] = __reduce_add_sync(0xffffffff, v);
    out[64 + t] = __reduce_min_sync(0xffffffff, v);
    out[128 + t] = __reduce_max_sync(0xffffffff, v);
    out[192 + t] = (int)__reduce_and_sync(0xffffffff, u);
    out[256 + t] = (int)__reduce_or_sync(0xffffffff, u);
    out[320 + t] = (int)__reduce_xor_sync(0xffffffff, u);
    out[384 + t] = (int)__match_any_sync(0xffffffff, v % 4);
    out[448 + t] = __reduce_add_sync(0x0000ffff, v);
    moved[t] = __shfl_xor_sync(0xffffffff, h[t], 1);
}
"""


@pytest.fixture(autouse=True)
def device(gpu):
    torch.manual_seed(0)
    return gpu


def on(*tensors):
    return [t.to("cuda") for t in tensors]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")])
def test_16_bit_numbers_are_rounded_as_in_torch(dtype, name):
    n = 300
    x, y = torch.randn(n).to(dtype), (torch.randn(n) * 3).to(dtype)
    out, wide = torch.zeros(8, n, dtype=dtype, device="cuda"), torch.zeros(n, device="cuda")
    wooly.cuda_kernel(ARITHMETIC, f"work<{name}>")((3, 1, 1), (128, 1, 1), [*on(x, y), out, wide, n])
    fused = (x.double() * y.double() + x.double()).to(dtype)
    want = [(x + y) * x - y, x * y, fused, -(x + y), torch.maximum(x, y), x.abs().float().sqrt().to(dtype)]
    want += [torch.full((n,), 1 / 3).to(dtype), torch.where(x < y, torch.arange(n).to(dtype), x / y)]
    for got, expected in zip(out.cpu(), want, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(wide.cpu(), x.float() + (x > y))


def test_conversions_equal_torch_bitwise():
    x = torch.cat(
        [
            torch.randn(400) * 10 ** torch.linspace(-9, 6, 400),
            torch.tensor([0.0, -0.0, 65519.9, 65520.0, 1e9, -1e9, float("inf"), 5.96e-8, 2.98e-8]),
        ]
    )
    n = len(x)
    half, wide = torch.zeros(n, dtype=torch.float16, device="cuda"), torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    wooly.cuda_kernel(CONVERT, "to_half")((1, 1, 1), (512, 1, 1), [*on(x), half, n])
    wooly.cuda_kernel(CONVERT, "to_bfloat")((1, 1, 1), (512, 1, 1), [*on(x), wide, n])
    assert torch.equal(half.cpu().view(torch.int16), x.half().view(torch.int16))
    assert torch.equal(wide.cpu().view(torch.int16), x.bfloat16().view(torch.int16))
    d = torch.tensor(
        [1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11 - 2.0**-40, -(1 + 2.0**-11 + 2.0**-40), 3.0], dtype=torch.float64
    )
    once = torch.zeros(4, dtype=torch.float16, device="cuda")
    wooly.cuda_kernel(CONVERT, "from_double")((1, 1, 1), (32, 1, 1), [*on(d), once, 4])
    assert once.tolist() == [1 + 2.0**-10, 1.0, -1 - 2.0**-10, 3.0]


def test_half2_operations():
    x = torch.randn(64).half()
    out = torch.zeros(64, dtype=torch.float16, device="cuda")
    wooly.cuda_kernel(CONVERT, "pairs")((1, 1, 1), (32, 1, 1), [*on(x), out, 32])
    want = torch.stack([x[1::2], x[::2] * 2], 1).flatten()
    assert torch.equal(out.cpu(), want)


def test_warp_reductions():
    x = torch.randint(-1000, 1000, (64,), dtype=torch.int32)
    h = torch.randn(64).half()
    out, moved = (
        torch.zeros(8, 64, dtype=torch.int32, device="cuda"),
        torch.zeros(64, dtype=torch.float16, device="cuda"),
    )
    wooly.cuda_kernel(FOLDS, "folds")((1, 1, 1), (64, 1, 1), [*on(x), out, *on(h), moved])
    got = out.cpu()
    for w in (x[:32], x[32:]):
        part = got[:, :32] if w is not x[32:] and torch.equal(w, x[:32]) else got[:, 32:]
        values = w.tolist()
        both, any_, odd = -1, 0, 0
        for v in values:
            both, any_, odd = both & v, any_ | v, odd ^ v
        wanted = [sum(values), min(values), max(values), both, any_, odd]
        assert [row.unique().tolist() for row in part[:6]] == [[v] for v in wanted]
        rest = [v - 4 * int(v / 4) for v in values]  # with the truncation of C
        masks = [sum((rest[k] == r) << k for k in range(32)) for r in rest]
        assert [m & 0xFFFFFFFF for m in part[6].tolist()] == masks
        assert part[7].unique().tolist() == [sum(values[:16])]
    assert torch.equal(moved.cpu(), h.view(-1, 2).flip(1).flatten())
