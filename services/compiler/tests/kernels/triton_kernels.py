"""Triton kernels for the tests and the benchmark: our own versions of common kernels."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
    return out


@triton.jit
def softmax_kernel(out_ptr, x_ptr, stride, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * stride + at, e / tl.sum(e, axis=0), mask=at < n)


def softmax(x):
    out = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


@triton.autotune(
    [triton.Config({"BM": 32, "BN": 64, "BK": 32}), triton.Config({"BM": 64, "BN": 64, "BK": 32}, num_warps=8)],
    key=["M", "N", "K"],
)
@triton.heuristics({"EVEN": lambda args: args["K"] % args["BK"] == 0})
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, cm, cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_ptr + (m % M)[:, None] * am + k[None, :] * ak
    b_at = b_ptr + k[:, None] * bk + (n % N)[None, :] * bn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for done in range(0, K, BK):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=k[None, :] < K - done, other=0.0)
            b = tl.load(b_at, mask=k[:, None] < K - done, other=0.0)
        total = tl.dot(a, b, total)
        a_at += BK * ak
        b_at += BK * bk
    c_at = c_ptr + m[:, None] * cm + n[None, :] * cn
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    grid = lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)  # noqa: E731
    matmul_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())
    return c


@triton.jit
def layer_norm_forward(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        d = tl.where(at < n, tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32) - mean, 0.0)
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(w_ptr + at, mask=inside) + tl.load(b_ptr + at, mask=inside)
        tl.store(y_ptr + row * stride + at, y, mask=inside)


@triton.jit
def layer_norm_backward(
    dx_ptr, dy_ptr, dw_ptr, db_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, lock_ptr, stride, n,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    hat = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    wdy = tl.where(inside, w * dy, 0.0)
    c1 = tl.sum(hat * wdy, axis=0) / n
    c2 = tl.sum(wdy, axis=0) / n
    tl.store(dx_ptr + row * stride + at, (wdy - (hat * c1 + c2)) * rstd, mask=inside)
    group = row % GROUPS  # rows of a group take turns
    lock_ptr += group
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    at += group * n
    first = tl.load(lock_ptr + GROUPS)
    dw, db = dy * hat, dy
    if first == 0:
        tl.atomic_xchg(lock_ptr + GROUPS, 1)
    else:
        dw += tl.load(dw_ptr + at, mask=inside)
        db += tl.load(db_ptr + at, mask=inside)
    tl.store(dw_ptr + at, dw, mask=inside)
    tl.store(db_ptr + at, db, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y = torch.empty_like(x)
        mean, rstd = [torch.empty(x.shape[0], device=x.device) for _ in range(2)]
        layer_norm_forward[(x.shape[0],)](x, weight, bias, y, mean, rstd, x.stride(0), x.shape[1], eps, BLOCK=64)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        x, weight, mean, rstd = ctx.saved_tensors
        (rows, n), groups = x.shape, 4
        dx, locks = torch.empty_like(dy), torch.zeros(2 * groups, dtype=torch.int32, device=x.device)
        dw, db = [torch.zeros((groups, n), device=x.device) for _ in range(2)]
        layer_norm_backward[(rows,)](
            dx, dy, dw, db, x, weight, mean, rstd, locks, x.stride(0), n, GROUPS=groups, BLOCK=triton.next_power_of_2(n)
        )
        return dx, dw.sum(0), db.sum(0), None


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, tl.where(keep, x / (1 - p), 0.0), mask=at < n)


def dropout(x, p, seed):
    out = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 512),)](x, out, x.numel(), p, seed, BLOCK=512)
    return out


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, head, row, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    start, base = tl.program_id(0) * BM, tl.program_id(1) * head
    m, d, j = start + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    q = tl.load(q_ptr + base + m[:, None] * row + d[None, :], mask=m[:, None] < n, other=0.0)
    best = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    out = tl.zeros([BM, D], dtype=tl.float32)
    end = tl.minimum(start + BM, n) if CAUSAL else n
    for begin in range(0, end, BN):
        at = begin + j
        k = tl.load(k_ptr + base + at[None, :] * row + d[:, None], mask=at[None, :] < n, other=0.0)
        scores = tl.dot(q, k) * scale
        seen = at[None, :] < n
        if CAUSAL:
            seen = seen & (at[None, :] <= m[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        alpha = tl.exp2(best - now)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + base + at[:, None] * row + d[None, :], mask=at[:, None] < n, other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * alpha[:, None])
        best = now
    out = out / total[:, None]
    tl.store(out_ptr + base + m[:, None] * row + d[None, :], out.to(out_ptr.dtype.element_ty), mask=m[:, None] < n)


def attention(q, k, v, causal):
    b, h, n, d = q.shape
    out = torch.empty_like(q)
    scale = d**-0.5 * 1.4426950408889634
    attention_kernel[(triton.cdiv(n, 32), b * h)](
        q, k, v, out, scale, q.stride(1), q.stride(2), n, D=d, BM=32, BN=32, CAUSAL=causal
    )
    return out


@triton.jit
def grouped_gemm_kernel(
    a_ptr, b_ptr, c_ptr, offsets_ptr, groups, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A fixed number of programs takes turns at all tiles of all groups."""
    tile, last = tl.program_id(0), 0
    for g in range(groups):
        first, end = tl.load(offsets_ptr + g), tl.load(offsets_ptr + g + 1)
        across = tl.cdiv(N, BN)
        tiles = tl.cdiv(end - first, BM) * across
        while (tile >= last) & (tile < last + tiles):
            m = first + (tile - last) // across * BM + tl.arange(0, BM)
            n = (tile - last) % across * BN + tl.arange(0, BN)
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for begin in range(0, K, BK):
                k = begin + tl.arange(0, BK)
                a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < end) & (k[None, :] < K), other=0.0)
                b = tl.load(
                    b_ptr + g * K * N + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0
                )
                total = tl.dot(a, b, total)
            tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < end) & (n[None, :] < N))
            tile += tl.num_programs(0)
        last += tiles


def grouped_gemm(a, b, offsets):
    """Rows `offsets[g]` to `offsets[g + 1]` of `a` times `b[g]`."""
    out = torch.empty((a.shape[0], b.shape[2]), device=a.device)
    grouped_gemm_kernel[(3,)](a, b, out, offsets, b.shape[0], b.shape[2], b.shape[1], BM=16, BN=32, BK=16)
    return out
