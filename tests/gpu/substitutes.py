"""Operators that a GPU's library lacks or does otherwise: programs as clients record them, compared with the CPU's library."""

import math

import torch
from wooly_executor.errors import ContextLostError
from wooly_executor.runtime.buffers import WIS_DTYPE, Buffer
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

aten = torch.ops.aten
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
#: Largest difference, relative and absolute, per least exact dtype of a call.
NEAR = {F16: 1e-2, BF16: 5e-2, F32: 2e-3, F64: 1e-9}
#: The cases that failed, with reasons.
FAILED = []
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def some(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


def program_of(op, args, kwargs, results, written=()):
    """Return a program with one call of `op`, which announces these results and writes tensors, and its tensors."""
    operands, tensors = [], []

    def given(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            dtype = WIS_DTYPE[value.dtype]
            offset = value.storage_offset() * dtype.itemsize
            role = Role.INOUT if any(value is w for w in written) else Role.IN
            operands.append(Operand(role, View(dtype, tuple(value.shape), tuple(value.stride()), offset)))
            return OperandRef(len(operands) - 1)
        return tuple([given(v) for v in value]) if isinstance(value, (list, tuple)) else value

    positional = given(list(args))
    named = tuple([(k, given(v)) for k, v in kwargs.items()])
    outs = [Operand(Role.OUT, View(WIS_DTYPE[r.dtype], tuple(r.shape), tuple(r.stride()), 0)) for r in results]
    memories = [Form("alloc", (Operand(Role.OUT, View(DType.U8, (max(o.view.end, 1),), (1,))),)) for o in outs]
    forms = list(dict.fromkeys(memories))
    body = [Instruction(forms.index(form), (k,)) for k, form in enumerate(memories)]
    forms.append(Form("extern", (*operands, *outs), (), (("args", positional), ("kwargs", named), ("name", str(op)))))
    slots = (*range(len(outs), len(outs) + len(tensors)), *range(len(outs)))  # numbered by their first use
    body.append(Instruction(len(forms) - 1, slots))
    return Program(tuple(forms), tuple(body)), tensors


def compare(gpu, title, op, *args, ignored=(), grad=False, written=(), allowed=None, **kwargs):
    """Run an operator on the CPU and on the GPU, and compare the results. Returns the CPU's results.

    Args:
        gpu: the runtime.
        title: name of the case.
        op: the operator.
        args: its positional arguments.
        ignored: numbers of results that have the announced layout, but other contents than the CPU's.
        grad: whether the CPU's library needs the grad mode.
        written: tensors that the CPU's operator writes although its schema does not declare it.
        allowed: further differences that are allowed, per element, by the number of the result.
        kwargs: its keyword arguments.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        results = op(*args, **kwargs)
    results = [r.detach() for r in (results if isinstance(results, (list, tuple)) else [results]) if r is not None]
    try:
        worst = _difference(gpu, title, program_of(op, args, kwargs, results, written), results, ignored, allowed or {})
        print(f"  {title}: {worst:.1e}", flush=True)
    except ContextLostError:
        raise
    except Exception as e:  # the other cases run
        FAILED.append(f"{title}: {e}")
        print(f"  {title} FAILED: {e}", flush=True)
    return results


def _difference(gpu, title, made, results, ignored, allowed):
    """Run a program and its tensors on the GPU. Returns the largest difference from the CPU's results."""
    program, tensors = made
    prepared = gpu.tier0(program)
    buffers = {}
    for k, t in enumerate(tensors):
        memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        buffers[len(results) + k] = Buffer(max(len(memory), 1), memory.to(gpu.device, copy=True))
    gpu.run(prepared, buffers)
    worst, near = 0.0, max([NEAR.get(t.dtype, 0) for t in (*tensors, *results)])
    for k, wanted in enumerate(results):
        if not wanted.numel():
            continue
        found = buffers[k].base.cpu()
        assert found.dtype is wanted.dtype, f"result {k} has dtype {found.dtype}, announced {wanted.dtype}"
        assert found.shape == wanted.shape, f"result {k} has shape {found.shape}, announced {wanted.shape}"
        assert found.stride() == wanted.stride(), f"result {k} has strides {found.stride()}"
        if k in ignored:
            continue
        wide, other = found.to(F64), wanted.to(F64)
        assert bool((wide.isnan() == other.isnan()).all()), f"result {k} has other NaNs"
        beyond = ((wide - other).abs() - allowed.get(k, 0)).clamp_min(0)
        off = (beyond / (1 + other.abs())).nan_to_num(0.0).max().item()
        worst = max(worst, off)
        assert off <= (near if wanted.is_floating_point() else 0), f"result {k} differs by {off:.2e}"
    return worst


def attention(gpu):
    """Attention in all dtypes, with masks, shared heads, odd sizes, scales and addresses."""
    for dtype in (F16, BF16, F32, F64):
        for name, batch, heads, shared, rows, columns, width, causal, mask, scale in (
            ("plain", 2, 4, 4, 64, 64, 64, False, None, None),
            ("causal", 2, 4, 4, 100, 100, 64, True, None, None),
            ("causal, more columns", 2, 4, 4, 33, 100, 64, True, None, None),
            ("causal, more rows", 2, 4, 4, 100, 33, 64, True, None, None),
            ("one row", 2, 4, 4, 1, 100, 64, False, None, None),
            ("shared heads", 2, 8, 2, 65, 65, 64, False, None, None),
            ("shared heads, one row", 2, 8, 2, 1, 65, 64, False, None, None),
            ("odd width", 2, 4, 4, 37, 41, 20, False, None, 0.3),
            ("width 200", 1, 2, 2, 37, 41, 200, False, None, None),
            ("width 256", 1, 2, 2, 64, 64, 256, True, None, None),
            ("width 300", 1, 2, 2, 37, 41, 300, False, None, None),
            ("mask", 2, 4, 4, 37, 41, 64, False, (37, 41), None),
            ("mask per batch", 2, 4, 4, 37, 41, 64, False, (2, 1, 1, 41), None),
            ("mask of one column", 2, 4, 4, 37, 41, 64, False, (2, 4, 37, 1), None),
            ("mask, shared heads", 2, 4, 2, 37, 48, 64, False, (37, 48), None),
            ("masked row", 2, 4, 4, 37, 41, 64, False, "masked", None),
            ("wide mask", 2, 4, 4, 37, 41, 64, False, "wide", None),
        ):
            q, k, v = (
                some(batch, h, n, width, dtype=dtype) for h, n in ((heads, rows), (shared, columns), (shared, columns))
            )
            bias = None
            if mask == "masked":
                bias = torch.zeros(rows, columns, dtype=dtype)
                bias[2] = -math.inf
            elif mask == "wide":
                bias = some(rows, columns, dtype=F64 if dtype is F64 else F32)
            elif mask is not None:
                bias = some(*mask, dtype=dtype)
            title, named = f"{name}, {str(dtype)[6:]}", {"attn_mask": bias, "scale": scale}
            out, logs = compare(gpu, title, FORWARD, q, k, v, 0.0, causal, **named)
            grad = some(*out.shape, dtype=dtype)
            compare(gpu, f"gradients of {title}", BACKWARD, grad, q, k, v, out, logs, 0.0, causal, **named)
    for dtype in (BF16, F32):  # views of one tensor, at addresses and with strides that the fused operators cannot read
        packed = some(2, 50, 3 * 4 * 33 + 1, dtype=dtype)
        q, k, v = [packed[..., 1 + 132 * n : 133 + 132 * n].unflatten(-1, (4, 33)).transpose(1, 2) for n in range(3)]
        out, logs = compare(gpu, f"views, {str(dtype)[6:]}", FORWARD, q, k, v, 0.0, True)
        grad = some(2, 50, 4, 33, dtype=dtype).transpose(1, 2)
        compare(gpu, f"gradients of views, {str(dtype)[6:]}", BACKWARD, grad, q, k, v, out, logs, 0.0, True)


def norms(gpu):
    """Layer, group and batch norms, also with weights of another dtype than the data."""
    for data, weights in ((F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F16, F32)):
        title = f"{str(data)[6:]} with weights of {str(weights)[6:]}"
        x, grad = some(6, 16, 12, dtype=data), some(6, 16, 12, dtype=data)
        w, b = some(12, dtype=weights), some(12, dtype=weights)
        _, mean, rstd = compare(gpu, f"layer norm, {title}", aten.native_layer_norm.default, x, [12], w, b, 1e-5)
        back = aten.native_layer_norm_backward.default
        compare(gpu, f"gradients of layer norm, {title}", back, grad, x, [12], mean, rstd, w, b, [True] * 3)
        w, b = some(16, dtype=weights), some(16, dtype=weights)
        group = aten.native_group_norm.default
        _, mean, rstd = compare(gpu, f"group norm, {title}", group, x, w, b, 6, 16, 12, 4, 1e-5)
        back = aten.native_group_norm_backward.default
        compare(gpu, f"gradients of group norm, {title}", back, grad, x, mean, rstd, w, 6, 16, 12, 4, [True] * 3)
        moving = some(16, dtype=weights), some(16, dtype=weights).abs()
        for train in (True, False):
            batch = aten.native_batch_norm.default
            given = (None, None) if train else moving
            _, *saved = compare(gpu, f"batch norm, {title}, {train}", batch, x, w, b, *given, train, 0.1, 1e-5)
            back = aten.native_batch_norm_backward.default
            mean, rstd = saved if train else (moving[0].to(F64), (moving[1].to(F64) + 1e-5).rsqrt())
            compare(
                gpu, f"gradients of batch norm, {title}, {train}", back, grad, x, w, *given, *saved, train, 1e-5,
                [True] * 3, allowed={1: rounded_products(grad, x, mean, rstd)},
            )  # fmt: skip


def rounded_products(grad, x, mean, rstd):
    """Return a bound, per channel, for the rounding in a weight's gradient of CUDA's batch norm.

    CUDA rounds each product in the sum of (x - mean) · grad to the dtype of x; the CPU does not.
    """
    products = (grad.to(F64) * (x.to(F64) - mean.to(F64)[:, None])).abs().sum((0, 2))
    return products * rstd.to(F64) * torch.finfo(x.dtype).eps / 2


def bags(gpu):
    """Bags of embeddings and their gradients."""
    indices = torch.randint(10, (12,))
    for dtype in (F32, BF16):
        weight = some(10, 8, dtype=dtype)
        for mode, name in enumerate(("sum", "mean", "max")):
            for last in (False, True):
                offsets = torch.tensor([0, 3, 3, 7, 12] if last else [0, 3, 3, 7])
                sample = some(12, dtype=dtype) if mode == 0 and last else None
                rest = (False, mode, False, sample, last, -1)
                title = f"{name}, {str(dtype)[6:]}{', last offset' if last else ''}"
                for forward in (aten._embedding_bag_forward_only.default, aten._embedding_bag.default):
                    # unused contents: sizes of the bags of a sum, and what stands in place of largest indices
                    skipped = (2, 3) if mode == 0 else (3,) if mode == 1 else ()
                    made = compare(
                        gpu, f"{forward.overloadpacket.__name__}, {title}", forward, weight, indices, offsets, *rest,
                        ignored=skipped,
                    )  # fmt: skip
                out, bag_of, sizes, largest = made
                grad = some(*out.shape, dtype=dtype)
                told = (indices, offsets, bag_of, sizes, largest, 10, False, mode, False, sample, -1)
                compare(gpu, f"gradient, {title}", aten._embedding_bag_backward.default, grad, *told)
                if sample is not None and dtype is F32:
                    back = aten._embedding_bag_per_sample_weights_backward.default
                    compare(gpu, f"weights' gradient, {title}", back, grad, weight, indices, offsets, bag_of, mode, -1)


def lstm(gpu):
    """oneDNN's LSTM layer and its gradients, in float32. The contents of the workspace belong to oneDNN.

    PyTorch lets cuDNN round the factors of a product to TF32, which has 10 bits, unless the script forbids it.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        _lstm(gpu)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _lstm(gpu):
    for reverse in (False, True):
        for biases in (True, False):
            bias = [some(64) if biases else torch.zeros(64) for _ in "io"]
            args = (some(9, 5, 12), some(64, 12), some(64, 16), *bias, some(5, 16), some(5, 16))
            numbers = (reverse, [], 2, 16, 1, biases, False, False)
            layer = aten.mkldnn_rnn_layer.default
            title = f"lstm{', reverse' if reverse else ''}{'' if biases else ', no biases'}"
            compare(gpu, f"{title}, inference", layer, *args, *numbers, False, ignored=(3,))
            made = compare(gpu, title, layer, *args, *numbers, True, ignored=(3,), grad=True)
            grads = (some(9, 5, 16), some(5, 16), some(5, 16))
            rest = (reverse, 2, 16, 1, biases, True, False, [], False)
            back = aten.mkldnn_rnn_layer_backward.default
            compare(
                gpu, f"gradients of {title}", back, *args, *made[:3], *grads, *rest, made[3],
                ignored=() if biases else (3, 4), written=made[3:],
            )  # fmt: skip


def absent(gpu):
    """Operators that the host computes."""
    compare(gpu, "histogram", aten.histogram.bin_ct, some(1000), 10)
    compare(gpu, "_add_relu", aten._add_relu.Tensor, some(5, 6), some(5, 6))


def memory(gpu):
    """The memory of attention grows with the length of the sequence, not with its square."""
    q = some(1, 8, 8192, 64, dtype=BF16)
    program, _ = program_of(FORWARD, (q, q, q, 0.0, True), {}, [q, torch.empty(1, 8192, 8).transpose(1, 2)])
    prepared = gpu.tier0(program)
    buffers = {2 + k: Buffer(q.nbytes, q.to(gpu.device, copy=True)) for k in range(3)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = [gpu.run(prepared, buffers) for _ in range(5)]
    peak = torch.cuda.max_memory_allocated() - before
    print(f"  8192 rows, 8 heads: {min(times) / 1e6:.2f} ms, {peak / 2**20:.0f} MiB")
    assert peak < 8 * q.nbytes


def check(gpu):
    """Run all groups. Returns what failed."""
    torch.manual_seed(0)
    FAILED.clear()
    for group in (attention, norms, bags, lstm, absent, memory):
        try:
            group(gpu)
        except ContextLostError:
            raise
        except Exception as e:
            FAILED.append(f"{group.__name__}: {type(e).__name__}: {e}")
    return FAILED
