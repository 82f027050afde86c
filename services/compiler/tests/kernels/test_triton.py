"""Triton kernels through the whole stack: captured without a GPU, lowered, run on PoCL, compared with torch on the CPU.

Tolerances: kernels that move numbers or add once give equal results. Sums in another order, and functions, are within 1e-5 of
float32's largest value; products in half precision are within one unit in the last place of the result.
"""

import math
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton.language as tl  # noqa: E402
from wooly.errors import RemoteOperationError  # noqa: E402

from services.compiler.tests.kernels import triton_kernels as kernels  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def device(gpu):
    torch.manual_seed(0)
    return gpu


def on(*tensors):
    return [t.to("cuda") for t in tensors]


def test_vector_add_equals_torch():
    x, y = torch.randn(4999), torch.randn(4999)
    assert torch.equal(kernels.add(*on(x, y)).cpu(), x + y)


def test_launch_under_a_default_device():
    torch.set_default_device("cuda")
    try:
        x = torch.arange(40.0)
        assert x.is_cuda and kernels.add(x, x).tolist() == [2.0 * n for n in range(40)]
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.int64,
        *[pytest.param(d, marks=pytest.mark.slow) for d in (torch.bfloat16, torch.float64, torch.int8, torch.int16)],
    ],
)
def test_kernel_has_one_text_per_signature(dtype):
    x, y = [(torch.randn(1500) * 50).to(dtype) for _ in range(2)]
    assert torch.equal(kernels.add(*on(x, y)).cpu(), x + y)


def test_fused_softmax():
    x = torch.randn(33, 781)
    torch.testing.assert_close(kernels.softmax(*on(x)).cpu(), torch.softmax(x, -1), **CLOSE)


@pytest.mark.parametrize("shape", [pytest.param((64, 64, 64), marks=pytest.mark.slow), (100, 70, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_matmul_with_autotune_and_heuristics(shape, dtype):
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    want = (a.double() @ b.double()).to(dtype)
    got = kernels.matmul(*on(a, b)).cpu()
    torch.testing.assert_close(got, want, **(CLOSE if dtype is torch.float32 else {"rtol": 1e-3, "atol": 1e-3}))
    chosen = kernels.matmul_kernel.best_config
    assert chosen in kernels.matmul_kernel.configs


@pytest.mark.slow
def test_matmul_of_a_transposed_view():
    a, b = torch.randn(40, 48), torch.randn(56, 48)
    x, y = on(a, b)
    torch.testing.assert_close(kernels.matmul(x, y.t()).cpu(), a @ b.t(), **CLOSE)


def test_layer_norm_with_backward_through_autograd():
    x, w, b, g = torch.randn(21, 150), torch.randn(150), torch.randn(150), torch.randn(21, 150)
    mine, theirs = [], []
    for place, out in (("cuda", mine), ("cpu", theirs)):
        x1, w1, b1 = [t.to(place).requires_grad_() for t in (x, w, b)]
        if place == "cuda":
            y = kernels.LayerNorm.apply(x1, w1, b1, 1e-5)
        else:
            y = torch.nn.functional.layer_norm(x1, (150,), w1, b1, 1e-5)
        y.backward(g.to(place))
        out += [t.detach().cpu() for t in (y, x1.grad, w1.grad, b1.grad)]
    for a, c in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, c, **CLOSE)


def philox_uniform(seed, n):
    """Triton's `tl.rand`: ten rounds of Philox-4x32 with the counter (i, 0, 0, 0); the first word, scaled to [0, 1)."""
    mask = (1 << 32) - 1
    found = []
    for i in range(n):
        c, k = [i, 0, 0, 0], [seed & mask, seed >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
            k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
        word = c[0] - (1 << 32) if c[0] >> 31 else c[0]
        found.append((-word - 1 if word < 0 else word) * 4.6566127342e-10)
    return torch.tensor(found, dtype=torch.float64)


def test_dropout_depends_on_seed():
    x = torch.randn(1000)
    got = kernels.dropout(*on(x), 0.4, 123).cpu()
    keep = philox_uniform(123, 1000) > 0.4
    assert torch.equal(got, torch.where(keep, x / 0.6, torch.zeros(()))) or torch.allclose(
        got, torch.where(keep, x / 0.6, 0.0)
    )
    assert torch.equal(kernels.dropout(*on(x), 0.4, 123).cpu(), got)
    assert not torch.equal(kernels.dropout(*on(x), 0.4, 124).cpu(), got)
    assert 0.3 < (got == 0).float().mean() < 0.5


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_flash_attention_forward(causal, dtype):
    q, k, v = [torch.randn(2, 3, 77, 32).to(dtype) for _ in range(3)]
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    got = kernels.attention(*on(q, k, v), causal).cpu().float()
    torch.testing.assert_close(got, want, **(CLOSE if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}))


def test_grouped_gemm():
    sizes = torch.tensor([5, 0, 40, 17])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()
    a, b = torch.randn(62, 50), torch.randn(4, 50, 45)
    want = torch.cat([a[offsets[g] : offsets[g + 1]] @ b[g] for g in range(4)])
    torch.testing.assert_close(kernels.grouped_gemm(*on(a, b, offsets)).cpu(), want, **CLOSE)


# -- single operations ---------------------------------------------------------------------------------------------------


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def folds_kernel(x_ptr, out_ptr, ints_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + n, tl.sum(x, 0))
    tl.store(out_ptr + N + m, tl.max(x, 1))
    tl.store(out_ptr + N + M + m, tl.reduce(x, 1, multiply))
    tl.store(ints_ptr + m, tl.argmax(x, 1))
    tl.store(ints_ptr + M + n, tl.argmin(x, 0))
    tl.store(ints_ptr + M + N, tl.sum(tl.sum((x > 0).to(tl.int32), 0), 0))


def test_reductions_along_each_dimension():
    x = torch.randn(8, 32)
    (d,) = on(x)
    out, ints = torch.empty(48, device="cuda"), torch.empty(41, dtype=torch.int32, device="cuda")
    folds_kernel[(1,)](d, out, ints, M=8, N=32)
    out, ints = out.cpu(), ints.cpu().long()
    torch.testing.assert_close(out, torch.cat([x.sum(0), x.amax(1), x.prod(1)]), **CLOSE)
    assert torch.equal(ints, torch.cat([x.argmax(1), x.argmin(0), (x > 0).sum()[None]]))


@triton.jit
def shapes_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    y = tl.trans(tl.reshape(x, (4, N // 4)))
    tl.store(out_ptr + n, tl.ravel(y))
    tl.store(out_ptr + N + n, tl.cumsum(x, 0))
    tl.store(out_ptr + 2 * N + n, tl.cumsum(x, 0, reverse=True))
    tl.store(out_ptr + 3 * N + n, tl.flip(x, 0))
    tl.store(out_ptr + 4 * N + n, tl.sort(x))
    low, high = tl.split(tl.reshape(x, (N // 2, 2)))
    tl.store(out_ptr + 5 * N + n, tl.ravel(tl.join(high, low)))
    tl.store(out_ptr + 6 * N + n, tl.gather(x, (n * 7) % N, 0))


@pytest.mark.parametrize("n", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_shape_scan_sort_and_gather_operations(n):
    x = torch.randn(n)
    (d,) = on(x)
    out = torch.empty(7, n, device="cuda")
    shapes_kernel[(1,)](d, out, N=n)
    want = [
        x.reshape(4, n // 4).t().reshape(-1),
        x.cumsum(0),
        x.flip(0).cumsum(0).flip(0),
        x.flip(0),
        x.sort().values,
        x.reshape(n // 2, 2).flip(1).reshape(-1),
        x[torch.arange(n) * 7 % n],
    ]
    torch.testing.assert_close(out.cpu(), torch.stack(want), **CLOSE)


@triton.jit
def numbers_kernel(x_ptr, i_ptr, out_ptr, ints_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, i = tl.load(x_ptr + n), tl.load(i_ptr + n)
    tl.store(out_ptr + n, tl.exp(x))
    tl.store(out_ptr + N + n, tl.log(tl.abs(x)))
    tl.store(out_ptr + 2 * N + n, tl.sin(x) + tl.cos(x))
    tl.store(out_ptr + 3 * N + n, tl.sqrt(tl.abs(x)) * tl.rsqrt(tl.abs(x) + 1))
    tl.store(out_ptr + 4 * N + n, tl.erf(x))
    tl.store(out_ptr + 5 * N + n, tl.floor(x) + tl.ceil(x))
    tl.store(out_ptr + 6 * N + n, tl.sigmoid(x))
    tl.store(out_ptr + 7 * N + n, tl.clamp(x, -0.5, 0.5))
    tl.store(out_ptr + 8 * N + n, x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + 9 * N + n, x.to(tl.bfloat16).to(tl.float32))
    tl.store(ints_ptr + n, i // 7)
    tl.store(ints_ptr + N + n, i % 7)
    tl.store(ints_ptr + 2 * N + n, i >> 3)
    tl.store(ints_ptr + 3 * N + n, (i ^ 0x55) | (i & 0xF0))
    tl.store(ints_ptr + 4 * N + n, x.to(tl.int32))
    tl.store(ints_ptr + 5 * N + n, x.to(tl.int32, bitcast=True))
    tl.store(ints_ptr + 6 * N + n, tl.where(i > 0, i, -i) + tl.minimum(i, 3))
    tl.store(ints_ptr + 7 * N + n, tl.umulhi(i.to(tl.uint32), 0x9E3779B9).to(tl.int32))


def test_arithmetic_functions_and_casts():
    x, i = torch.randn(256) * 8, torch.randint(-(1 << 31), 1 << 31, (256,)).int()
    x[:8] = torch.tensor([0.0, -0.0, 1e-40, 6e-8, 65519.0, 65520.0, -87.5, 88.5])
    d, e = on(x, i)
    out, ints = torch.empty(10, 256, device="cuda"), torch.empty(8, 256, dtype=torch.int32, device="cuda")
    numbers_kernel[(1,)](d, e, out, ints, N=256)
    a = x.abs()
    want = [
        x.exp(), a.log(), x.sin() + x.cos(), a.sqrt() / (a + 1).sqrt(), x.erf(), x.floor() + x.ceil(), x.sigmoid(),
        x.clamp(-0.5, 0.5),
    ]  # fmt: skip
    torch.testing.assert_close(out[:8].cpu(), torch.stack(want), rtol=2e-6, atol=1e-6)
    assert torch.equal(out[8].cpu(), x.half().float()) and torch.equal(out[9].cpu(), x.bfloat16().float())
    high = ((i.long() & 0xFFFFFFFF) * 0x9E3779B9 >> 32).int()
    whole = [
        torch.div(i, 7, rounding_mode="trunc"), torch.fmod(i, 7), i >> 3, (i ^ 0x55) | (i & 0xF0), x.trunc().int(),
        x.view(torch.int32), i.where(i > 0, -i) + i.clamp(max=3), high,
    ]  # fmt: skip
    assert torch.equal(ints.cpu(), torch.stack(whole))


@triton.jit
def atomics_kernel(x_ptr, out_ptr, floats_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.atomic_add(out_ptr + x, 1, mask=at < n)
    tl.atomic_max(out_ptr + 16, tl.max(x, 0))
    tl.atomic_xor(out_ptr + 17, tl.xor_sum(x, 0))
    tl.atomic_add(floats_ptr, tl.sum(x, 0).to(tl.float32))


def test_atomics_of_parallel_programs():
    x = torch.randint(0, 16, (5000,)).int()
    (d,) = on(x)
    out, total = torch.zeros(18, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
    atomics_kernel[(40,)](d, out, total, 5000, BLOCK=128)
    xor = 0
    for v in x.tolist():
        xor ^= v
    assert out.tolist() == [*torch.bincount(x, minlength=16).tolist(), int(x.max()), xor]
    assert total.item() == x.sum().item()


@triton.jit
def early_kernel(x_ptr, n, limit):
    i = tl.program_id(0)
    if i >= n:
        return
    steps = 0
    value = i + 1
    while (value != 1) & (steps < limit):
        if value % 2 == 0:
            value = value // 2
        else:
            value = 3 * value + 1
        steps += 1
    tl.store(x_ptr + i, steps)


def test_loops_conditions_and_early_return():
    def steps(value):
        count = 0
        while value != 1:
            value, count = (value // 2 if value % 2 == 0 else 3 * value + 1), count + 1
        return count

    out = torch.full((40,), -1, dtype=torch.int32, device="cuda")
    early_kernel[(40,)](out, 30, 1000)
    assert out.tolist() == [steps(i + 1) for i in range(30)] + [-1] * 10


@triton.jit
def shift_kernel(x_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(x_ptr + n + 1, tl.load(x_ptr + n))


@triton.jit
def _move_one_of_two(x_ptr, y_ptr, a_ptr, b_ptr, first_ptr, n, BLOCK: tl.constexpr):
    """Program k copies block k of `x` to `a`, or every second element of `y` to `b`."""
    k = tl.program_id(0)
    if tl.load(first_ptr + k) != 0:
        source, target, step = x_ptr + k * BLOCK, a_ptr + k * BLOCK, 1
    else:
        source, target, step = y_ptr + 2 * k * BLOCK, b_ptr + k * BLOCK, 2
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at * step, mask=at < n, other=0.0), mask=at < n)


def test_pointer_into_one_of_two_tensors():
    x, y, first = torch.randn(64), torch.randn(128), torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    a, b = on(torch.zeros(64), torch.zeros(64))
    _move_one_of_two[(4,)](*on(x, y), a, b, *on(first), 16, BLOCK=16)
    by_block = first.bool()[:, None]
    assert torch.equal(a.cpu(), torch.where(by_block, x.view(4, 16), 0.0).flatten())
    assert torch.equal(b.cpu(), torch.where(by_block, 0.0, y[::2].view(4, 16)).flatten())


@pytest.mark.parametrize(("first", "does"), [(1, "reads"), (0, "writes")])
def test_pointer_into_one_of_two_tensors_is_compared_with_its_own(first, does):
    """`x` is too short to be read in place of `y`, `b` too short to be written in place of `a`."""
    x, y, a, b = on(torch.zeros(8), torch.zeros(32), torch.zeros(16), torch.zeros(8))
    _move_one_of_two[(1,)](x, y, a, b, *on(torch.tensor([first], dtype=torch.int32)), 16, BLOCK=16)
    with pytest.raises(RemoteOperationError, match=f"{does} beyond the buffer"):
        torch.cuda.synchronize()


@triton.jit
def _move_one_of_three(x_ptr, y_ptr, z_ptr, a_ptr, b_ptr, c_ptr, which_ptr, BLOCK: tl.constexpr):
    """Program k copies block k of `x` to `a`, of `y` to `b`, or of `z` to `c`; two steps, in a loop."""
    k, at = tl.program_id(0), tl.arange(0, BLOCK)
    for step in range(2):
        which = tl.load(which_ptr + 2 * k + step)
        source = tl.where(which == 2, z_ptr, tl.where(which == 1, y_ptr, x_ptr + k * BLOCK))
        target = tl.where(which == 2, c_ptr + k * BLOCK, tl.where(which == 1, b_ptr + k * BLOCK, a_ptr + k * BLOCK))
        tl.store(target + at, tl.load(source + tl.where(which != 0, k * BLOCK, 0) + at))


def test_pointer_selected_from_three_tensors():
    x, y, z = torch.randn(3, 64).unbind()
    which = torch.tensor([[0, 1], [1, 1], [2, 0], [1, 2]], dtype=torch.int32)
    made = on(*[torch.zeros(64)] * 3)
    _move_one_of_three[(4,)](*on(x, y, z), *made, *on(which), BLOCK=16)
    for k, (source, target) in enumerate(zip((x, y, z), made, strict=True)):
        moved = (which == k).any(1)[:, None]
        assert torch.equal(target.cpu(), torch.where(moved, source.view(4, 16), 0.0).flatten())


@pytest.mark.parametrize("k", [1, 2])
def test_pointer_selected_from_three_tensors_is_compared_with_its_own(k):
    sources, targets = [torch.zeros(16)] * 3, [torch.zeros(16)] * 3
    targets[k] = torch.zeros(8)
    _move_one_of_three[(1,)](*on(*sources, *targets, torch.full((2,), k, dtype=torch.int32)), BLOCK=16)
    with pytest.raises(RemoteOperationError, match="writes beyond the buffer"):
        torch.cuda.synchronize()


def test_block_is_read_before_written():
    x = torch.arange(65.0)
    (d,) = on(x)
    shift_kernel[(1,)](d, N=64)
    assert torch.equal(d.cpu(), torch.cat([x[:1], x[:64]]))


@triton.jit
def sums_kernel(x_ptr, out_ptr, n, end, BLOCK: tl.constexpr, STORES: tl.constexpr):
    """Two sums over the blocks of `x` that need each other's last content. With STORES, a block is replaced once it is read."""
    at = tl.arange(0, BLOCK)
    a, b = tl.zeros([BLOCK], dtype=tl.float32), tl.full([BLOCK], 1.0, dtype=tl.float32)
    for begin in range(0, end, BLOCK):
        inside = begin + at < n
        x = tl.load(x_ptr + begin + at, mask=inside, other=0.5)
        if STORES:
            tl.store(x_ptr + begin + at, b, mask=inside)
        centred = tl.where(inside, x - 0.25, x)
        a, b = b + centred * centred, a * 0.5
    tl.store(out_ptr + at, a)
    tl.store(out_ptr + BLOCK + at, b)


@pytest.mark.parametrize("stores", [False, True])
def test_sums_over_blocks_read_memory_before_it_changes(stores):
    """Blocks that are in memory as a whole, in part, and not at all."""
    values, n, out = torch.randn(100), 100, torch.empty(64, device="cuda")
    (x,) = on(values)
    sums_kernel[(1,)](x, out, n, 192, BLOCK=32, STORES=stores)
    a, b, left = torch.zeros(32), torch.ones(32), values.clone()
    for block in range(0, 192, 32):
        inside = torch.arange(block, block + 32) < n
        read = torch.cat([values[block : block + 32], torch.zeros(32)])[:32]
        if stores:
            left[block : block + 32] = b[: max(n - block, 0)]
        centred = torch.where(inside, read - 0.25, 0.5)
        a, b = b + centred * centred, a * 0.5
    assert torch.equal(out.cpu(), torch.cat([a, b]))
    assert torch.equal(x.cpu(), left)


def test_sum_over_blocks_that_leaves_its_buffer_is_reported():
    x, out = on(torch.zeros(80), torch.zeros(64))
    sums_kernel[(1,)](x, out, 100, 128, BLOCK=32, STORES=False)
    with pytest.raises(RemoteOperationError, match="reads beyond the buffer"):
        torch.cuda.synchronize()


# -- capture -------------------------------------------------------------------------------------------------------------


def test_launches_with_other_numbers_share_one_program(device):
    from wooly import api

    x, y = on(torch.randn(2048), torch.randn(2048))
    recorder = api.attached_device().recorder

    def step(n):
        out = torch.empty_like(x)
        kernels.add_kernel[(2,)](x, y, out, n, BLOCK=1024)
        torch.cuda.synchronize()
        return out

    for _ in range(2):  # while Triton compiles the kernel, the timer may cut the first program
        step(1999)
    before = len(recorder._sent)
    outs = [step(n) for n in (1001, 333, 7)]
    assert len(recorder._sent) == before
    for n, out in zip((1001, 333, 7), outs, strict=True):
        assert torch.equal(out[:n].cpu(), (x + y)[:n].cpu())


def test_sent_text_names_no_vendor():
    import services.compiler.tests.kernels.triton_kernels as k

    x, y = on(torch.randn(100), torch.randn(100))
    out = torch.empty_like(x)
    compiled = k.add_kernel[(1,)](x, y, out, 100, BLOCK=128)
    text = compiled.asm["ttir"].decode()
    assert "tt.func public @add_kernel" in text and "loc(" not in text
    assert not re.search(r"cuda|nvidia|nvvm|amd|hip|rocm|sm_\d|gfx", text, re.IGNORECASE)


def test_read_only_arguments_survive_failed_launch():
    x = torch.randn(64, 64)
    a, b = on(x, x)
    kernels.matmul(a, b)
    kernels.softmax(a)
    kernels.add(a, b)
    w = torch.ones(64, device="cuda", requires_grad=True)
    kernels.LayerNorm.apply(a, w, w, 1e-5).sum().backward()
    found = dict(texts_written())
    assert found["matmul_kernel"] == {2} and found["softmax_kernel"] == {0} and found["add_kernel"] == {2}
    assert found["layer_norm_backward"] >= {0, 2, 3, 8} and not found["layer_norm_backward"] & {1, 4, 5, 6, 7}
    kernels.add_kernel[(9,)](a, b, torch.empty(8, device="cuda"), 4096, BLOCK=1024)
    with pytest.raises(RemoteOperationError, match="writes beyond"):
        torch.cuda.synchronize()
    assert torch.equal(a.cpu(), x)


def texts_written():
    """For kernels launched in this test: the parameters through which they write."""
    from wooly.triton_capture.writes import written

    for function in (
        kernels.matmul_kernel.fn.fn,
        *[getattr(kernels, n) for n in ("softmax_kernel", "add_kernel", "layer_norm_backward")],
    ):
        for kernel in function.device_caches[0][0].values():
            yield kernel.name, written(kernel.asm["ttir"].decode(), kernel.name)


def test_launch_with_host_tensor_is_refused():
    x = torch.randn(16)
    (d,) = on(x)
    with pytest.raises(ValueError, match="cannot be accessed"):
        kernels.add_kernel[(1,)](d, x, d, 16, BLOCK=16)


# -- walls ---------------------------------------------------------------------------------------------------------------


@triton.jit
def wild_kernel(x_ptr, offset, READ: tl.constexpr):
    if READ:
        tl.store(x_ptr, tl.load(x_ptr + offset))
    else:
        tl.store(x_ptr + offset, 1.0)


@pytest.mark.parametrize("offset", [64, -1, 1 << 40, -(1 << 62)])
@pytest.mark.parametrize("read", [True, False])
def test_access_out_of_bounds_fails_and_changes_nothing(offset, read):
    neighbours = [torch.zeros(64, device="cuda") for _ in range(3)]
    wild_kernel[(1,)](neighbours[1], offset, READ=read)
    with pytest.raises(
        RemoteOperationError, match=r"kernel wild_kernel on a grid of 1, 1, 1: tt\.(load|store) in line"
    ) as e:
        torch.cuda.synchronize()
    assert "test_triton.py" in str(e.value)
    assert all(not t.any() for t in (neighbours[0], neighbours[2]))


def test_masked_elements_are_not_accessed():
    x, out = on(torch.arange(10.0), torch.full((10,), 7.0))
    kernels.add_kernel[(1,)](x, x, out, 10, BLOCK=1024)
    torch.cuda.synchronize()
    assert out.tolist() == [2.0 * i for i in range(10)]


def test_view_argument_starts_at_its_offset():
    x = torch.zeros(64, device="cuda")
    wild_kernel[(1,)](x[32:], 31, READ=False)
    assert x.tolist() == [0.0] * 63 + [1.0]
    wild_kernel[(1,)](x[32:], 32, READ=False)
    with pytest.raises(RemoteOperationError, match="writes beyond the buffer"):
        torch.cuda.synchronize()


@triton.jit
def made_kernel(x_ptr, address):
    tl.store(address.to(tl.pointer_type(tl.float32)), tl.load(x_ptr))


@triton.jit
def assembly_kernel(x_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(x_ptr + n, y)


def test_unsupported_operation_is_named():
    x = torch.zeros(16, device="cuda")
    made_kernel[(1,)](x, 1 << 40)
    with pytest.raises(RemoteOperationError, match=r"tt\.int_to_ptr .* is not part of a buffer"):
        torch.cuda.synchronize()
    y = torch.zeros(16, device="cuda")
    assembly_kernel[(1,)](y, N=16)
    with pytest.raises(
        RemoteOperationError, match=r"tt\.elementwise_inline_asm .* is not supported: assembly of a vendor"
    ):
        torch.cuda.synchronize()


@triton.jit
def asserting_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")


def test_failed_device_assertion_fails_launch():
    x = torch.zeros(1, device="cuda")
    asserting_kernel[(1,)](x, debug=True)
    with pytest.raises(RemoteOperationError, match="not positive"):
        torch.cuda.synchronize()


def test_device_works_after_failed_launch():
    x, y = on(torch.ones(8), torch.ones(8))
    assert torch.equal(kernels.add(x, y).cpu(), torch.full((8,), 2.0))
    assert math.isclose(kernels.add(x, y).sum().item(), 16.0)
