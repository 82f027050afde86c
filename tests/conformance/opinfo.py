"""Compares every operator of PyTorch's own operator database with the CPU: forward, and backward where there is one.

Run as a program it works through a range of operators and prints one JSON line per sample: a crash, here or of the executor, ends
only this process, and whoever started it knows at which operator.
"""

import argparse
import json
import os
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

MAX_SAMPLES = 16


def key(op):
    return f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"


def to(value, device, requires_grad=False):
    def move(t):
        if not isinstance(t, torch.Tensor):
            return device if isinstance(t, torch.device) else t
        if (
            t.layout is torch.strided
            and t.untyped_storage().nbytes() != t.numel() * t.element_size()
            and not t.is_conj()
        ):
            # A window on a larger storage: what lies around it belongs to the sample.
            whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).detach().to(device)
            moved = whole.as_strided(t.shape, t.stride(), t.storage_offset())
        else:
            moved = t.detach().to(device)
        return moved.requires_grad_() if t.requires_grad and requires_grad else moved

    return tree_map(move, value)


CLOSE = [False]


def same(ours, theirs):
    """Empty if equal. Bit for bit is `pass`; within PyTorch's own tolerance for float32 it is noted in `CLOSE`."""
    flat_a, _ = tree_flatten(ours)
    flat_b, _ = tree_flatten(theirs)
    if len(flat_a) != len(flat_b):
        return f"{len(flat_a)} results, {len(flat_b)} on the CPU"
    for a, b in zip(flat_a, flat_b, strict=True):
        if isinstance(b, torch.Tensor):
            if not isinstance(a, torch.Tensor):
                return f"a {type(a).__name__} where the CPU gives a tensor"
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{a.dtype}{tuple(a.shape)}, on the CPU {b.dtype}{tuple(b.shape)}"
            if b.layout is not torch.strided:
                a, b = a.to_dense(), b.to_dense()
            if b._is_zerotensor():
                b = torch.zeros(b.shape, dtype=b.dtype)
            x, y = a.detach().cpu(), b.detach().resolve_conj().resolve_neg()
            if x.dtype is torch.complex32:
                x, y = x.to(torch.complex64), y.to(torch.complex64)
            if not torch.equal(x, y) and not torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
                CLOSE[0] = True
                if not torch.allclose(x, y, rtol=1.3e-6, atol=1e-5, equal_nan=True):
                    d = (x.to(torch.complex128) - y.to(torch.complex128)).abs()
                    return f"values differ by up to {d[~d.isnan()].max().item() if d.numel() else 0:.3g}"
        elif isinstance(b, (int, float, bool, complex, str, torch.dtype)) and a != b and not (a != a and b != b):
            return f"{a!r}, on the CPU {b!r}"
    return ""


RANDOM = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "normal.in_place",
    "normal.number_mean",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "uniform",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.rrelu",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward",
    "svd_lowrank",
    "pca_lowrank",
    "rand",
    "randperm",
}
PASSED = {False: "pass", True: "close"}
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def shapes_only(ours, theirs):
    flat_a, flat_b = tree_flatten(ours)[0], tree_flatten(theirs)[0]
    for a, b in zip(flat_a, flat_b, strict=True):
        if isinstance(b, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            return f"{a.dtype}{tuple(a.shape)}, on the CPU {b.dtype}{tuple(b.shape)}"
    return ""


def repeats(op, sample, requires):
    """Whether the CPU itself gives the same bits every time (LAPACK's least squares do not)."""

    def once():
        args = to((sample.input, tuple(sample.args), dict(sample.kwargs)), "cpu", requires)
        results = [t for t in tree_flatten(op(args[0], *args[1], **args[2]))[0] if isinstance(t, torch.Tensor)]
        leaves = [t for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        outs = [t for t in results if t.requires_grad]
        grads = []
        if outs and leaves:
            torch.manual_seed(7)
            seeds = [torch.randn_like(t.detach()) for t in outs]
            grads = [g for g in torch.autograd.grad(outs, leaves, seeds, allow_unused=True) if g is not None]
        return [t.detach() for t in results + grads]

    first, kept = once(), []
    for n in range(100):
        kept.append(torch.empty(1 + 7 * n))  # so that memory lies elsewhere each time
        again = once()
        if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(first, again, strict=True)):
            return False
        kept.append(again)
    return True


def check(op, sample, dtype, device, backward):
    """One sample. Returns (outcome, detail): pass, skip, varies, close, unsupported, wrong, error."""
    outcome, detail = compare_once(op, sample, dtype, device, backward)
    if outcome == "close" and not repeats(op, sample, backward and op.supports_autograd):
        return "varies", "the CPU's own results differ from run to run"
    return outcome, detail


def compare_once(op, sample, dtype, device, backward):
    requires = backward and op.supports_autograd
    local = (sample.input, tuple(sample.args), dict(sample.kwargs))
    a = to(local, "cpu", requires)
    random = key(op) in RANDOM | UNDEFINED or sample.kwargs.get("dropout_p", 0) > 0
    compare = shapes_only if random else same
    CLOSE[0] = False
    if "device" in a[2]:
        a[2]["device"] = "cpu"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = op(a[0], *a[1], **a[2])
    except Exception as e:
        return "skip", f"the CPU raises {type(e).__name__}"
    b = to(local, device, requires)
    if key(op) == "tensor_split":
        b = (b[0], *local[1:])  # CUDA, too, wants the indices on the host
    if "device" in b[2]:
        b[2]["device"] = device
    try:
        got = op(b[0], *b[1], **b[2])
        wrong = compare(got, expected)
        if wrong:
            return "wrong", wrong
        if not requires or random:
            return PASSED[CLOSE[0]], ""
        leaves_a = [t for t in tree_flatten(a)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves_b = [t for t in tree_flatten(b)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        outs_a = [t for t in tree_flatten(expected)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        outs_b = [t for t in tree_flatten(got)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outs_a or not leaves_a:
            return "pass", ""
        torch.manual_seed(7)
        seeds = [torch.randn_like(t.detach()) for t in outs_a]
        try:
            grads_a = torch.autograd.grad(outs_a, leaves_a, seeds, allow_unused=True)
        except Exception as e:
            return "pass", f"forward only: the CPU's backward raises {type(e).__name__}"
        grads_b = torch.autograd.grad(outs_b, leaves_b, [s.to(device) for s in seeds], allow_unused=True)
        for x, y in zip(grads_b, grads_a, strict=True):
            if (x is None) != (y is None):
                return "wrong", "a gradient is missing"
        wrong = same([g for g in grads_b if g is not None], [g for g in grads_a if g is not None])
        return ("wrong", f"backward: {wrong}") if wrong else (PASSED[CLOSE[0]], "")
    except NotImplementedError as e:
        return "unsupported", str(e).split("\n")[0][:160]
    except Exception as e:
        return "error", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--stop", type=int, default=len(op_db))
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--samples", type=int, default=MAX_SAMPLES)
    args = parser.parse_args()
    from wooly import api
    from wooly_testkit.executor import executor_process

    torch.set_num_threads(1)
    dtype = torch.float32
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        for index in range(args.start, args.stop, args.step):
            op = op_db[index]
            if (args.only and key(op) not in args.only) or dtype not in op.dtypes:
                continue
            print(json.dumps({"op": key(op), "index": index, "outcome": "start"}), flush=True)
            torch.manual_seed(0)
            backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for n, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=backward)):
                    if n >= args.samples:
                        break
                    outcome, detail = check(op, sample, dtype, "cuda", backward)
                    if outcome == "error" and running.process.poll() is not None:
                        sys.stdout.flush()
                        os._exit(1)
                    print(json.dumps({"op": key(op), "sample": n, "outcome": outcome, "detail": detail}), flush=True)
        sys.stdout.flush()
        running.process.kill()
        os._exit(0)


if __name__ == "__main__":
    main()
