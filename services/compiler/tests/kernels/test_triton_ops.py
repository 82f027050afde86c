"""Operations of Triton's language, one by one: lowered, run on PoCL, compared with torch on the CPU.

An unsupported operation is an error that names it.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda.libdevice import rsqrt as cuda_rsqrt  # noqa: E402
from wooly.errors import RemoteOperationError  # noqa: E402
from wooly_testkit.effort import sweep  # noqa: E402


@pytest.fixture(autouse=True)
def device(gpu):
    torch.manual_seed(0)
    return gpu


def on(*tensors):
    return [t.to("cuda") for t in tensors]


# -- small floats --------------------------------------------------------------------------------------------------------


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n).to(out_ptr.dtype.element_ty))


def cast(x, dtype):
    out = torch.empty(x.shape, dtype=dtype, device="cuda")
    cast_kernel[(1,)](x.to("cuda"), out, N=x.numel())
    return out.cpu()


@pytest.mark.parametrize("small", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)])
def test_small_floats_are_decoded_as_in_torch(small):
    x = torch.arange(256, dtype=torch.uint8).view(small)
    for wide in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(cast(x, wide).nan_to_num(1234.0), x.to(wide).nan_to_num(1234.0))


@pytest.mark.parametrize("small", [pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow), torch.float8_e5m2])
def test_small_floats_round_to_nearest_and_saturate(small):
    most = torch.finfo(small).max
    x = torch.cat(
        [torch.randn(400) * 10 ** torch.linspace(-8, 2, 400), torch.arange(256, dtype=torch.uint8).view(small).float()]
    )
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)), value=0.3).clamp(-most, most).nan_to_num(0.5)
    x[:4] = torch.tensor([0.0, -0.0, float("nan"), 2.0**-9 * 1.5])
    got, want = cast(x, small), x.to(small)
    assert torch.equal(got.view(torch.uint8)[3:], want.view(torch.uint8)[3:]) and got[2].float().isnan()
    assert torch.equal(got.view(torch.uint8)[:2], want.view(torch.uint8)[:2])
    far = torch.tensor([1e9, -1e9, most * 1.02, -most * 1.02])
    assert cast(far, small).float().tolist() == [most, -most, most, -most]


@triton.jit
def bits_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n).to(tl.float8e5, bitcast=True)
    y = x.to(tl.float32) * 2
    tl.store(out_ptr + n, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def test_small_floats_from_bytes():
    x = (torch.randn(64) * 3).to(torch.float8_e5m2)
    out = torch.empty(64, dtype=torch.uint8, device="cuda")
    bits_kernel[(1,)](x.view(torch.uint8).to("cuda"), out, N=64)
    assert torch.equal(out.cpu(), (x.float() * 2).to(torch.float8_e4m3fn).view(torch.uint8))


@triton.jit
def dot8_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_products_of_small_floats():
    a, b = [torch.randn(32, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    out = torch.empty(32, 32, device="cuda")
    dot8_kernel[(1,)](*on(a, b), out, N=32)
    torch.testing.assert_close(out.cpu(), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def half_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + n, (x + y) * x - y)
    tl.store(out_ptr + N + n, x * y)
    tl.store(out_ptr + 2 * N + n, tl.maximum(x, y) - tl.minimum(x, 1.5))
    tl.store(out_ptr + 3 * N + n, tl.abs(x) * 0.1)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
def test_halves_round_after_each_operation(dtype):
    x, y = torch.randn(256).to(dtype), torch.randn(256).to(dtype)
    out = torch.empty(4, 256, dtype=dtype, device="cuda")
    half_kernel[(1,)](*on(x, y), out, N=256)
    tenth = torch.tensor(0.1).to(dtype)
    want = torch.stack(
        [(x + y) * x - y, x * y, torch.maximum(x, y) - torch.minimum(x, torch.tensor(1.5).to(dtype)), x.abs() * tenth]
    )
    assert torch.equal(out.cpu(), want)


# -- pointers to blocks --------------------------------------------------------------------------------------------------


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, M, N, B: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, (M, N), (N, 1), (B, B))
    out = tl.make_tensor_descriptor(out_ptr, (M, N), (N, 1), (B, B))
    row, column = tl.program_id(0) * B, tl.program_id(1) * B
    out.store((row, column), x.load((row, column)) + 1)


def test_tensor_descriptors():
    x = torch.randn(40, 36)
    out = torch.zeros(40, 36, device="cuda")
    descriptor_kernel[(3, 3)](x.to("cuda"), out, 40, 36, B=16)
    assert torch.equal(out.cpu(), x + 1)


# -- orders, shapes, folds -----------------------------------------------------------------------------------------------


@triton.jit
def order_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, tl.sort(x))
    tl.store(out_ptr + N + n, tl.sort(x, descending=True))
    tl.store(out_ptr + 2 * N + tl.arange(0, 8), tl.topk(x, 8))
    tl.store(out_ptr + 3 * N + n, tl.flip(x))


@pytest.mark.parametrize(
    ("dtype", "n"),
    [
        (torch.float32, 16),
        *[pytest.param(dtype, 64, marks=pytest.mark.slow) for dtype in (torch.float32, torch.int32, torch.int16)],
    ],
)
def test_sort_topk_and_flip(dtype, n):
    x = (torch.randn(n) * 100).to(dtype)
    out = torch.zeros(4, n, dtype=dtype, device="cuda")
    order_kernel[(1,)](x.to("cuda"), out, N=n)
    up = x.sort().values
    got = out.cpu()
    assert torch.equal(got[0], up) and torch.equal(got[1], up.flip(0)) and torch.equal(got[3], x.flip(0))
    assert torch.equal(got[2, :8], up.flip(0)[:8])


@triton.jit
def join_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n, two = tl.arange(0, N), tl.arange(0, 2 * N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + two, tl.interleave(x, y))
    tl.store(out_ptr + 2 * N + two, tl.cat(x, y))
    a, b = tl.split(tl.join(x, y))
    tl.store(out_ptr + 4 * N + n, a - b)
    tl.store(out_ptr + 5 * N + n, tl.ravel(tl.trans(tl.reshape(x, (2, N // 2)))))


def test_joins_and_splits():
    x, y = torch.randn(32), torch.randn(32)
    out = torch.empty(6, 32, device="cuda")
    join_kernel[(1,)](*on(x, y), out, N=32)
    got = out.cpu().flatten()
    assert torch.equal(got[:64], torch.stack([x, y], 1).flatten()) and torch.equal(got[64:128], torch.cat([x, y]))
    assert torch.equal(got[128:160], x - y) and torch.equal(got[160:], x.view(2, 16).t().flatten())


@triton.jit
def histogram_kernel(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))
    tl.store(out_ptr + BINS + tl.arange(0, BINS), tl.histogram(x, BINS, mask=n < 100))


def test_histograms():
    x = torch.randint(0, 16, (256,), dtype=torch.int32)
    out = torch.empty(2, 16, dtype=torch.int32, device="cuda")
    histogram_kernel[(1,)](x.to("cuda"), out, N=256, BINS=16)
    assert torch.equal(out.cpu().long(), torch.stack([x.bincount(minlength=16), x[:100].bincount(minlength=16)]))


@triton.jit
def welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    part = tl.where(n == 0.0, 0.0, n_b / n)
    return mean_a + delta * part, m2_a + m2_b + delta * delta * n_a * part, n


@triton.jit
def linear(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def fold_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    ones, zeros = tl.full((M, N), 1.0, tl.float32), tl.zeros((M, N), tl.float32)
    mean, m2, count = tl.reduce((x, zeros, ones), 1, welford)
    tl.store(out_ptr + m, mean)
    tl.store(out_ptr + M + m, m2 / count)
    mean, m2, count = tl.reduce((x, zeros, ones), 0, welford)
    tl.store(out_ptr + 2 * M + n, mean)
    _, state = tl.associative_scan((x, y), 1, linear)
    tl.store(out_ptr + 2 * M + N + at, state)
    _, back = tl.associative_scan((x, y), 0, linear, reverse=True)
    tl.store(out_ptr + 2 * M + N + M * N + at, back)


def test_reductions_and_scans_of_tuples():
    x, y = torch.rand(8, 32), torch.randn(8, 32)
    out = torch.empty(2 * 8 + 32 + 2 * 256, device="cuda")
    fold_kernel[(1,)](*on(x, y), out, M=8, N=32)
    got = out.cpu()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got[:8], x.mean(1), **close)
    torch.testing.assert_close(got[8:16], x.var(1, correction=0), **close)
    torch.testing.assert_close(got[16:48], x.mean(0), **close)
    state, want = torch.zeros(8), []
    for k in range(32):
        state = state * x[:, k] + y[:, k] if k else y[:, 0]
        want.append(state)
    torch.testing.assert_close(got[48:304].view(8, 32), torch.stack(want, 1), **close)
    state, want = torch.zeros(32), []
    for k in reversed(range(8)):
        state = state * x[k] + y[k] if k < 7 else y[7]
        want.insert(0, state)
    torch.testing.assert_close(got[304:].view(8, 32), torch.stack(want), **close)


@triton.jit
def extremes_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    value, place = tl.max(x, 0, return_indices=True)
    tl.store(out_ptr, value)
    tl.store(out_ptr + 1, place.to(tl.float32))
    tl.store(out_ptr + 2, tl.argmin(x, 0).to(tl.float32))
    tl.store(out_ptr + 3, tl.xor_sum((n * 7) % 5, 0).to(tl.float32))
    tl.store(out_ptr + 4, tl.sum(tl.cumsum(x, 0, reverse=True), 0))
    tl.store(out_ptr + 5, tl.max(tl.cumprod(x, 0), 0))
    tl.store(out_ptr + 8 + n, tl.softmax(x))
    tl.store(out_ptr + 8 + N + n, tl.sigmoid(x))


def test_extremes_and_standard_library_functions():
    x = torch.rand(64) + 0.5
    x[[7, 40]] = 9.0  # the first of two equal values
    out = torch.empty(8 + 128, device="cuda")
    extremes_kernel[(1,)](x.to("cuda"), out, N=64)
    got, xor = out.cpu(), 0
    for k in range(64):
        xor ^= (k * 7) % 5
    assert got[:4].tolist() == [9.0, 7.0, float(x.argmin()), float(xor)]
    torch.testing.assert_close(got[4], x.flip(0).cumsum(0).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[5], x.cumprod(0).max(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[8:72], x.softmax(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[72:], x.sigmoid(), rtol=1e-5, atol=1e-6)


# -- atomics -------------------------------------------------------------------------------------------------------------


@triton.jit
def atomics_kernel(x_ptr, out_ptr, N: tl.constexpr, FLOATS: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + n)
    tl.atomic_add(out_ptr + n % 4, x)
    tl.atomic_max(out_ptr + 4 + n * 0, x)
    tl.atomic_min(out_ptr + 5 + n * 0, x)
    if not FLOATS:
        tl.atomic_and(out_ptr + 6 + n * 0, x)
        tl.atomic_or(out_ptr + 7 + n * 0, x)
        tl.atomic_xor(out_ptr + 8 + n * 0, x)
    tl.atomic_xchg(out_ptr + 9, tl.max(x, 0))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint32,
        torch.float64,
        *[pytest.param(d, marks=pytest.mark.slow) for d in (torch.int32, torch.int64, torch.float32)],
    ],
)
def test_atomics(dtype):
    floats = dtype.is_floating_point
    x = torch.randint(0 if dtype is torch.uint32 else -500, 500, (4, 64)).to(dtype)
    start = torch.zeros(10, dtype=torch.int64)
    start[6] = 0xFFFF
    out = start.to(dtype).to("cuda")
    atomics_kernel[(4,)](x.to("cuda"), out, N=64, FLOATS=floats)
    got, y = [t.to(torch.float64 if floats else torch.int64) for t in (out.cpu(), x)]
    assert got[:4].tolist() == y.view(-1, 4).sum(0).tolist()
    assert got[4] == max(y.max(), 0) and got[5] == min(y.min(), 0) and float(got[9]) in y.max(1).values.tolist()
    if not floats:
        both, any_, odd = 0xFFFF, 0, 0
        for v in y.flatten().tolist():
            both, any_, odd = both & v, any_ | v, odd ^ v
        assert [int(got[k]) for k in (6, 7, 8)] == [both, any_, odd]


@triton.jit
def half_atomics_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.atomic_add(out_ptr + n % 3, tl.load(x_ptr + n))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_atomic_sums_of_halves(dtype):
    x = torch.randint(-8, 8, (64,)).to(dtype)
    out = torch.zeros(3, dtype=dtype, device="cuda")
    half_atomics_kernel[(1,)](x.to("cuda"), out, N=64)
    assert out.tolist() == [x[k::3].float().sum().item() for k in range(3)]


@triton.jit
def ordered_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.atomic_store(out_ptr + n, tl.atomic_load(x_ptr + n, mask=n < 12), mask=n < 10)
    tl.atomic_store(out_ptr + N, tl.atomic_load(x_ptr + 3))


@pytest.mark.parametrize("dtype", [pytest.param(torch.int32, marks=pytest.mark.slow), torch.int64])
def test_ordered_loads_and_stores(dtype):
    x = torch.randint(-500, 500, (16,)).to(dtype)
    out = torch.full((17,), 7, dtype=dtype, device="cuda")
    ordered_kernel[(1,)](x.to("cuda"), out, N=16)
    assert out.tolist() == [*x[:10].tolist(), *[7] * 6, x[3].item()]
    ordered_kernel[(1,)](x[:8].clone().to("cuda"), out, N=16)
    with pytest.raises(RemoteOperationError, match=r"tt\.atomic_load in line \d+ of its text reads beyond the buffer"):
        torch.cuda.synchronize()


@triton.jit
def cas_kernel(out_ptr, seen_ptr):
    p = tl.program_id(0)
    zero = tl.zeros((), out_ptr.dtype.element_ty)
    tl.store(seen_ptr + p, tl.atomic_cas(out_ptr, zero, zero + p + 1))


@pytest.mark.parametrize("dtype", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.slow)])
def test_compare_and_swap_succeeds_in_one_program(dtype):
    out, seen = torch.zeros(1, dtype=dtype, device="cuda"), torch.zeros(8, dtype=dtype, device="cuda")
    cas_kernel[(8,)](out, seen)
    won = out.item()
    assert 1 <= won <= 8 and sorted(seen.tolist()) == [0, *[won] * 7]


# -- control -------------------------------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def halved(x, n):
    for _ in range(n):
        x = tl.where(x > 0, x / 2, x * n)
    return x, n + 1


@triton.jit
def control_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    p = tl.program_id(0)
    if p == 3:
        return
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    k, first = 0, tl.load(x_ptr)
    while k < n:
        first, k = halved(first, k)
        if tl.sum(x, 0) > 1e6:
            k = n
    x += first
    last = tl.cast(n, tl.uint32)
    total = tl.zeros((), tl.uint32)
    for i in range(tl.cast(0, tl.uint32), last):
        total += i
    tl.store(out_ptr + p * N + at, x + total.to(tl.float32))


def test_loops_calls_and_returns():
    x = torch.randn(16)
    out = torch.full((4, 16), -1.0, device="cuda")
    control_kernel[(4,)](x.to("cuda"), out, 5, N=16)
    first = x[0]
    for k in range(5):
        for _ in range(k):
            first = first / 2 if first > 0 else first * k
    got = out.cpu()
    assert torch.equal(got[:3], (x + first + 10).expand(3, 16)) and got[3].eq(-1).all()


@triton.jit
def stepped(table, x, n):
    if x < 0:
        return -x, x
    if x < n:
        if x == 2:
            return tl.load(table + x), n
        x = x * 2
    x += 1
    return x + tl.load(table), x - n


@triton.jit
def noted(out, x):
    if x == 1:
        return
    tl.store(out, x)


@triton.jit
def row(p, at, x):
    v = tl.load(p + at)
    if x > 3:
        return v * 2
    return v + x


@triton.jit
def early_kernel(table, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.int32)
    for i in range(-2, n):
        first, second = stepped(table, i, n - 2)
        tl.store(out + 2 * (i + 2), first)
        tl.store(out + 2 * (i + 2) + 1, second)
        noted(out + 32 + i + 2, i)
        total += row(table, at, i)
    tl.store(out + 64 + at, total)


def test_calls_in_loops_of_functions_that_return_early():
    table, n = [int(v) for v in torch.randint(100, 200, (16,))], 8
    want = [-1] * 80
    for i in range(-2, n):
        want[2 * (i + 2) : 2 * (i + 2) + 2] = stepped_on_host(table, i, n - 2)
        if i != 1:
            want[32 + i + 2] = i
    want[64:] = [sum([2 * v if i > 3 else v + i for i in range(-2, n)]) for v in table]
    out = torch.full((80,), -1, dtype=torch.int32, device="cuda")
    early_kernel[(1,)](torch.tensor(table, dtype=torch.int32, device="cuda"), out, n, N=16)
    assert out.tolist() == want


def stepped_on_host(table, x, n):
    if x < 0:
        return -x, x
    if x == 2 and x < n:
        return table[x], n
    x = (2 * x if x < n else x) + 1
    return x + table[0], x - n


@triton.jit
def carried_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x_ptr + at)
    b, c, s = a * 2 + 1, tl.zeros((N,), tl.float32), 1.0
    for _ in range(n):
        a, b = b, a + b
        c, s = tl.full((N,), 0.0, tl.float32) + s, s * 2
    tl.store(out_ptr + at, a)
    tl.store(out_ptr + N + at, b)
    tl.store(out_ptr + 2 * N + at, c)
    tl.store(out_ptr + 3 * N + at, c + s)


def test_loop_carried_values_update_together():
    x = torch.randn(64)
    out = torch.empty(4, 64, device="cuda")
    carried_kernel[(1,)](x.to("cuda"), out, 5, N=64)
    a, b, s = x, x * 2 + 1, 1.0
    for _ in range(5):
        a, b = b, a + b
        c, s = s, s * 2
    assert torch.equal(out.cpu(), torch.stack([a, b, torch.full((64,), c), torch.full((64,), c + s)]))


@triton.jit
def moved_kernel(x_ptr, by, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at + by, tl.load(x_ptr + at, mask=at < n, other=-1.0) * 2, mask=at < n)


@pytest.mark.parametrize(("by", "n"), [(0, 64), (1, 64), (64, 64), (3, 50), (0, 50)])
def test_block_is_loaded_completely_before_store(by, n):
    x = torch.randn(200)
    there = x.to("cuda")
    moved_kernel[(1,)](there[70:], by, n, N=64)
    want = x.clone()
    want[70 + by : 70 + by + n] = x[70 : 70 + n] * 2
    assert torch.equal(there.cpu(), want)


@triton.jit
def restored_kernel(x_ptr, kept, n, N: tl.constexpr, ALL: tl.constexpr):
    at = tl.arange(0, N)
    saved = tl.load(x_ptr + at, mask=at < kept)
    tl.debug_barrier()
    everything = tl.arange(0, ALL)
    tl.store(x_ptr + everything, -1.0, mask=everything < n)
    tl.debug_barrier()
    tl.store(x_ptr + at, saved, mask=at < kept)


@pytest.mark.parametrize("kept", [8, 5])
def test_block_is_loaded_before_barrier_and_store_of_other_values(kept):
    x = torch.randn(100)
    there = x.to("cuda")
    restored_kernel[(1,)](there, kept, 100, N=8, ALL=128)
    assert torch.equal(there.cpu(), torch.cat([x[:kept], torch.full((100 - kept,), -1.0)]))


@triton.jit
def print_kernel(x_ptr, n):
    tl.device_print("x", tl.load(x_ptr))
    tl.device_assert(tl.load(x_ptr) < n, "too large")
    tl.store(x_ptr, 7.0)


def test_prints_are_removed_and_assertions_name_their_place():
    x = torch.zeros(1, device="cuda")
    print_kernel[(1,)](x, 1, debug=True)
    assert x.item() == 7.0
    print_kernel[(1,)](x, 1, debug=True)
    with pytest.raises(
        RemoteOperationError, match='kernel print_kernel on a grid of 1, 1, 1: the assertion "too large"'
    ):
        torch.cuda.synchronize()


# -- functions -----------------------------------------------------------------------------------------------------------


@triton.jit
def library_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + n, tl.extra.libdevice.tanh(x))
    tl.store(out_ptr + N + n, tl.extra.libdevice.pow(tl.abs(x), y))
    tl.store(out_ptr + 2 * N + n, tl.extra.libdevice.atan2(x, y))
    tl.store(out_ptr + 3 * N + n, tl.extra.libdevice.log1p(tl.abs(x)))
    tl.store(out_ptr + 4 * N + n, tl.extra.libdevice.round(x * 4))
    tl.store(out_ptr + 5 * N + n, tl.extra.libdevice.isnan(x / 0 * 0).to(tl.float32))


def test_vendor_library_functions_have_neutral_names():
    x, y = torch.randn(128), torch.randn(128)
    out = torch.empty(6, 128, device="cuda")
    compiled = library_kernel[(1,)](*on(x, y), out, N=128)
    want = torch.stack(
        [
            x.tanh(),
            x.abs().pow(y),
            torch.atan2(x, y),
            x.abs().log1p(),
            torch.trunc(x * 4 + 0.5 * x.sign()),
            torch.ones(128),
        ]
    )
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-6)
    assert "__nv" not in compiled.asm["ttir"].decode()


@triton.jit
def rounded_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y, z = tl.load(x_ptr + n), tl.load(y_ptr + n), tl.load(z_ptr + n)
    tl.store(out_ptr + n, tl.extra.libdevice.mul_rn(x, y) + z)
    tl.store(out_ptr + N + n, tl.extra.libdevice.add_rn(x, y))
    tl.store(out_ptr + 2 * N + n, tl.extra.libdevice.sub_rn(x, y))
    tl.store(out_ptr + 3 * N + n, tl.extra.libdevice.div_rn(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounded_operations_of_the_vendor_library_are_not_contracted(dtype):
    x, y = torch.randn(2, 128, dtype=dtype)
    z = -(x * y)  # a contracted x * y + z is the error of the product, and not 0
    out = torch.empty(4, 128, device="cuda", dtype=dtype)
    rounded_kernel[(1,)](*on(x, y, z), out, N=128)
    assert torch.equal(out.cpu(), torch.stack([torch.zeros(128, dtype=dtype), x + y, x - y, x / y]))


@triton.jit
def tanh_kernel(x_ptr, single_ptr, double_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(single_ptr + n, tl.extra.libdevice.tanh(x))
    tl.store(double_ptr + n, tl.extra.libdevice.tanh(x.to(tl.float64)))


def test_tanh_of_large_numbers_is_one():
    x = torch.tensor([9.02, 10, 100, 1e30, torch.inf, -9.02, -50, torch.nan])
    single, double = torch.empty(8, device="cuda"), torch.empty(8, device="cuda", dtype=torch.float64)
    tanh_kernel[(1,)](*on(x), single, double, N=8)
    assert single.cpu()[:7].tolist() == [1, 1, 1, 1, 1, -1, -1] and single.cpu()[7].isnan()
    torch.testing.assert_close(double.cpu(), x.double().tanh(), rtol=1e-15, atol=0, equal_nan=True)


@triton.jit
def vendors_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, tl.extra.cuda.libdevice.round(x))
    tl.store(out_ptr + N + n, tl.extra.hip.libdevice.round(x))
    tl.store(out_ptr + 2 * N + n, cuda_rsqrt(tl.abs(x)))


def test_libdevice_of_each_vendor_is_the_neutral_one():
    x, out = torch.randn(128), torch.empty(3, 128, device="cuda")
    compiled = vendors_kernel[(1,)](*on(x), out, N=128)
    want = torch.stack([torch.trunc(x + 0.5 * x.sign())] * 2 + [x.abs().rsqrt()])
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-6)
    assert "__nv" not in compiled.asm["ttir"].decode() and "__ocml" not in compiled.asm["ttir"].decode()


@triton.jit
def unknown_function_kernel(x_ptr):
    tl.store(x_ptr, tl.extra.cuda.libdevice.j0(tl.load(x_ptr)))


def test_function_that_libdevice_has_not_is_named():
    with pytest.raises(triton.CompilationError, match="libdevice's function j0 is not supported; these are: abs, acos"):
        unknown_function_kernel[(1,)](torch.ones(1, device="cuda"))


@triton.jit
def scaled_kernel(a_ptr, s_ptr, out_ptr):
    i, k = tl.arange(0, 32), tl.arange(0, 32)
    a = tl.load(a_ptr + i[:, None] * 32 + k[None, :])
    s = tl.load(s_ptr + i)[:, None]
    tl.store(out_ptr + i[:, None] * 32 + k[None, :], tl.dot_scaled(a, s, "e4m3", a, s, "e4m3"))


def test_missing_operation_is_named():
    a = torch.zeros(32, 32, dtype=torch.uint8, device="cuda")
    out = torch.zeros(32, 32, device="cuda")
    scaled_kernel[(1,)](a, a, out)
    with pytest.raises(RemoteOperationError, match=r"tt\.dot_scaled .* is not supported: microscaled formats"):
        torch.cuda.synchronize()


@triton.jit
def hinted_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n, mask=n < N - 1, other=2.0, cache_modifier=".ca", eviction_policy="evict_last")
    tl.store(out_ptr + n, x * 2, cache_modifier=".cg", eviction_policy="evict_first")


def test_cache_hints_are_accepted():
    x, out = torch.randn(64), torch.empty(64, device="cuda")
    hinted_kernel[(1,)](*on(x), out, N=64)
    want = x * 2
    want[-1] = 4
    assert torch.equal(out.cpu(), want)


# -- vectors and leading masks -------------------------------------------------------------------------------------------


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rows_kernel(x_ptr, out_ptr, at_ptr, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    x = tl.load(x_ptr + m[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out_ptr + m, tl.sum(x, axis=1))
    tl.store(out_ptr + M + m, tl.max(x, axis=1))
    tl.store(out_ptr + 2 * M + m, tl.min(x, axis=1))
    tl.store(out_ptr + 3 * M + m, tl.reduce(x * 2, 1, _plus))
    tl.store(out_ptr + 4 * M + m, tl.reduce(x, 1, _larger))
    tl.store(at_ptr + m, tl.argmax(x, axis=1))
    tl.store(at_ptr + M + m, tl.argmin(x, axis=1))


#: Lengths of rows, and dtypes. The quick suite runs each length, each dtype, and each number of bytes, which decides how a row is
#: cut into vectors.
ROWS = {
    f"{n} of {dtype}": (n, dtype)
    for n in (4, 8, 16, 128)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)
}


@pytest.mark.parametrize("rows", sweep(ROWS, 16, lambda rows: (*ROWS[rows], ROWS[rows][0] * ROWS[rows][1].itemsize)))
def test_reductions_of_each_length_equal_torch(rows):
    n, dtype = ROWS[rows]
    x = torch.randint(-50, 50, (4, n)).to(dtype)
    out, at = torch.zeros(5, 4, dtype=dtype, device="cuda"), torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    rows_kernel[(1,)](*on(x), out, at, M=4, N=n)
    expected = [x.sum(1), x.amax(1), x.amin(1), (x * 2).sum(1), x.amax(1)]
    assert torch.equal(out.cpu(), torch.stack(expected).to(dtype))
    assert torch.equal(at.cpu(), torch.stack([x.argmax(1), x.argmin(1)]).int())


def test_sums_of_integers_wrap():
    x = torch.full((4, 64), 1 << 30, dtype=torch.int32)
    out, at = torch.zeros(5, 4, dtype=torch.int32, device="cuda"), torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    rows_kernel[(1,)](*on(x), out, at, M=4, N=64)
    assert out[0].tolist() == [0] * 4 and at[0].tolist() == [0] * 4


@pytest.mark.parametrize("place", [0, 7, 15, 16, 100, 127])
def test_extremes_of_rows_with_nan(place):
    x = torch.randn(4, 128)
    x[:, place] = float("nan")
    out, at = torch.zeros(5, 4, device="cuda"), torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    rows_kernel[(1,)](*on(x), out, at, M=4, N=128)
    numbers = x.nan_to_num(nan=float("-inf")), x.nan_to_num(nan=float("inf"))
    assert torch.equal(out[1].cpu(), numbers[0].amax(1)) and torch.equal(out[2].cpu(), numbers[1].amin(1))
    assert out[0].isnan().all() and out[4].isnan().all()


@triton.jit
def masked_kernel(x_ptr, out_ptr, first, n, other, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    if KIND == 0:
        mask = at < n
    elif KIND == 1:
        mask = at <= n
    elif KIND == 2:
        mask = n > at
    elif KIND == 3:
        mask = (at < n) & (first >= 0)
    elif KIND == 4:
        mask = (at < n) & (at >= 3)
    else:
        mask = at % 3 < n % 3
    x = tl.load(x_ptr + at, mask=mask, other=other)
    tl.store(out_ptr + at, x * 2, mask=mask)
    tl.store(out_ptr + 256 + at, x + tl.sum(x, axis=0), mask=mask)


@pytest.mark.parametrize("kind", range(6))
def test_masks_of_leading_elements_and_others_select_the_same_elements(kind):
    size = 256
    for first, n, other in (
        (0, 64, 1.0),
        (0, 40, 1.0),
        (0, 0, 1.0),
        (0, -5, 1.0),
        (192, 256, 2.0),
        (192, 250, 2.0),
        (100, 101, 0.5),
    ):
        x = torch.arange(size, dtype=torch.float32)
        out = torch.full((512,), -1.0)
        (a, b) = on(x, out)
        masked_kernel[(1,)](a, b, first, n, other, BLOCK=64, KIND=kind)
        at = torch.arange(first, first + 64)
        masks = [at < n, at <= n, at < n, (at < n) & (first >= 0), (at < n) & (at >= 3), at % 3 < n % 3]
        mask = masks[kind] if n >= 0 or kind != 5 else at % 3 < -((-n) % 3)
        if at[mask].numel() and at[mask].max() >= size:
            continue
        loaded = torch.full((64,), other)
        loaded[mask] = x[at[mask]]
        want = out.clone()
        want[at[mask]] = loaded[mask] * 2
        want[256 + at[mask]] = (loaded + loaded.sum())[mask]
        torch.testing.assert_close(b.cpu(), want)


def test_masked_access_whose_set_elements_are_out_of_bounds_fails():
    x, out = on(torch.ones(100), torch.zeros(512))
    masked_kernel[(1,)](x, out, 64, 100, 0.0, BLOCK=64, KIND=0)  # the elements from 100 on are masked off
    torch.cuda.synchronize()
    masked_kernel[(1,)](x, out, 64, 101, 0.0, BLOCK=64, KIND=0)
    with pytest.raises(RemoteOperationError, match="reads beyond the buffer"):
        torch.cuda.synchronize()


def test_mask_of_an_index_that_wraps_is_no_leading_mask():
    x, out = on(torch.ones(64), torch.zeros(512))
    masked_kernel[(1,)](x, out, (1 << 31) - 32, 0, 0.0, BLOCK=64, KIND=0)  # the last 32 indices are negative
    with pytest.raises(RemoteOperationError, match="beyond the buffer"):
        torch.cuda.synchronize()


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=out_ptr.dtype.element_ty))


#: Shapes and dtypes of products. The quick suite runs each shape and each dtype.
PRODUCTS = {
    f"{shape} of {dtype}": (shape, dtype)
    for shape in ((16, 16, 16), (32, 64, 16), (16, 32, 128))
    for dtype in (torch.float32, torch.float64, torch.float16)
}


@pytest.mark.parametrize("product", sweep(PRODUCTS, 16, PRODUCTS.__getitem__))
def test_products_of_each_shape_equal_torch(product):
    (m, n, k), dtype = PRODUCTS[product]
    a, b = torch.randint(-3, 4, (m, k)).to(dtype), torch.randint(-3, 4, (k, n)).to(dtype)
    out = torch.zeros(m, n, dtype=dtype, device="cuda")
    dot_kernel[(1,)](*on(a, b), out, M=m, N=n, K=k)
    assert torch.equal(out.cpu(), (a.double() @ b.double()).to(dtype))
