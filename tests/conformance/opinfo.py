"""Compares every operator of PyTorch's own operator database with the CPU, in every way that it can be called.

As a program, it processes a range of operators and prints one JSON line per *unit* (operator, variant and dtype), with counts by
outcome (see `comparison`). A crash, of this process or of the executor, ends only this process; the parent process knows the
unit.

Variants:

function       the samples unchanged; gradients if the operator has them; views are views
noncontiguous  the same with gaps in memory
method         as a method of the tensor
inplace        the in-place method, on a copy of the input, with gradients
out            `out=` of the right size, empty, of another size, with gaps, of another dtype: values, warnings, errors
conj, neg      inputs with the conjugate or the negative bit
errors         error cases of the database: the same exception at the call
dtypes         dtypes that the operator does not support: the same exception at the call
"""

from itertools import islice

import torch
from comparison import (
    ORDER,
    by_either_policy,
    compare,
    compare_errors,
    failure,
    program,
    quietly,
    settle,
    tensors,
    to,
    views_of,
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_flatten, tree_map

# For each sample, the database looks through the whole stack for the test that asks. There is none, and it takes half the time.
for module in (common_utils, core):
    module.extract_test_fn = lambda: None
VARIANTS = ("function", "noncontiguous", "method", "inplace", "out", "conj", "neg", "errors", "dtypes")
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
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
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


#: Operators that are functions of `torch` with this name. The test looks the function up at the call, like a user.
NAMED = {id(op) for op in op_db if op.op is getattr(torch, op.name, None)}


#: Operators that CUDA computes in float32 if their arguments are narrower, so that results are rounded once.
ROUNDED_ONCE = {"grid_sampler_2d", "grid_sampler_3d", "nn.functional.grid_sample"}


def function_of(op):
    function = getattr(torch, op.name) if id(op) in NAMED else op.op
    return rounded_once(function) if op.name in ROUNDED_ONCE else function


def rounded_once(function):
    """A function that computes half precision on the CPU as CUDA does: in float32."""

    def run(first, *args, **kwargs):
        if first.device.type != "cpu" or first.dtype not in (torch.float16, torch.bfloat16):
            return function(first, *args, **kwargs)

        def wide(a):
            return a.float() if isinstance(a, torch.Tensor) and a.dtype is first.dtype else a

        found = function(wide(first), *tree_map(wide, args), **tree_map(wide, kwargs))
        return tree_map(lambda t: t.to(first.dtype) if isinstance(t, torch.Tensor) else t, found)

    return run


def key(op):
    return f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"


def units():
    """(index, operator, variant, dtype) of all units, in a fixed order."""
    found = []
    for op in op_db:
        for dtype in DTYPES:
            claimed = DTYPES[dtype] in op.dtypes
            for variant in VARIANTS:
                if variant == "errors":
                    applies = op.error_inputs_func is not None and dtype == "float32"
                elif variant == "dtypes":
                    applies = not claimed
                elif not claimed:
                    applies = False
                else:
                    applies = {
                        "function": True,
                        "noncontiguous": True,
                        "method": op.method_variant is not None,
                        "inplace": op.inplace_variant is not None,
                        "out": op.supports_out,
                        "conj": dtype == "complex64" and op.test_conjugated_samples,
                        "neg": dtype in ("float32", "complex64") and op.test_neg_view,
                    }[variant]
                if applies:
                    found.append((len(found), op, variant, dtype))
    return found


class Sample:
    """One call of the database, which can be made on either side."""

    def __init__(self, op, sample):
        self.op = op
        self.parts = (sample.input, tuple(sample.args), dict(sample.kwargs))
        self.random = key(op) in RANDOM | UNDEFINED or sample.kwargs.get("dropout_p", 0) > 0
        self.broadcasts_input = sample.broadcasts_input

    def on(self, device, requires=False):
        """Input, args and kwargs on `device`."""
        first, args, kwargs = to(self.parts, device, requires)
        if key(self.op) == "tensor_split":
            args = self.parts[1]  # CUDA requires the indices on the host, too
        if "device" in kwargs:
            kwargs["device"] = device
        return first, args, kwargs

    def changed(self, change):
        """The same sample, with `change` applied to the tensors of its input."""
        twin = Sample.__new__(Sample)
        twin.__dict__.update(self.__dict__)
        twin.parts = (tree_map(change, self.parts[0]), *self.parts[1:])
        return twin


def strided(t):
    return t.layout is torch.strided


def gradients(results, arguments, seeds):
    """Gradients of differentiable results with respect to all leaves."""
    leaves = [t for t in tensors(arguments) if t.requires_grad]
    outs = [t for t in tensors(results) if t.requires_grad]
    if not outs or not leaves:
        return []
    return list(torch.autograd.grad(outs, leaves, seeds[: len(outs)], allow_unused=True))


def seeds_for(results):
    torch.manual_seed(7)
    return [torch.randn_like(t.detach()) for t in tensors(results) if t.requires_grad]


def worse(a, b):
    return a if ORDER.index(a[0]) >= ORDER.index(b[0]) else b


def check(sample, device, function, requires, prepare=lambda first: first):
    """One call, forward and backward.

    Args:
        sample: the arguments.
        device: the device.
        function: the called function.
        requires: whether to compute gradients.
        prepare: applied to the input before the call, for example a copy.
    """

    def call(arguments):
        return function(prepare(arguments[0]), *arguments[1], **arguments[2])

    a = sample.on("cpu", requires)
    try:
        expected, _ = quietly(lambda: call(a))
    except Exception as theirs:
        b = sample.on(device, requires)
        return compare_errors(lambda: quietly(lambda: call(b)), theirs)
    b = sample.on(device, requires)
    try:
        got, _ = quietly(lambda: call(b))
        found = compare(got, expected, values=not sample.random)
        if found[0] == "pass" and views_of(got, b) != views_of(expected, a):
            found = ("layout", f"results lie in {views_of(got, b)}, on the CPU in {views_of(expected, a)}")
        if found[0] == "wrong" or not requires or sample.random:
            return found
        seeds = seeds_for(expected)
        try:
            grads_a = gradients(expected, a, seeds)
        except Exception:
            return found  # forward only: the CPU has no backward for this
        grads_b = gradients(got, b, to(seeds, device))
        if [g is None for g in grads_b] != [g is None for g in grads_a]:
            return "wrong", "a gradient is missing"
        back = compare(grads_b, grads_a)
        return worse(found, (back[0], f"backward: {back[1]}"))
    except Exception as e:
        return failure(e)


def check_inplace(sample, device, requires):
    op = sample.op
    if sample.broadcasts_input:
        return "skip", ""
    return check(
        sample, device, op.inplace_variant, requires and op.supports_inplace_autograd, lambda first: first.clone()
    )


def _outs(kind, expected):
    """Host `out=` tensors of one kind for these results, filled so that unwritten elements are visible."""

    def one(t):
        t = t.detach()
        fill = 1 if t.dtype is torch.bool else 5
        if kind == "right":
            return torch.full_like(t, fill)
        if kind == "empty":
            return torch.empty(0, dtype=t.dtype)
        if kind == "other size":
            return torch.full((*t.shape, 2), fill, dtype=t.dtype)
        if kind == "gaps":
            return noncontiguous_like(torch.full_like(t, fill))
        return torch.full(t.shape, fill, dtype=torch.uint8 if t.dtype is not torch.uint8 else torch.bool)

    return tree_map(lambda t: one(t) if isinstance(t, torch.Tensor) else t, expected)


OUT_KINDS = ("right", "empty", "other size", "gaps", "other dtype")


def check_out(sample, device):
    """Check all kinds of `out=`. The sample's outcome is the worst of them."""
    op = sample.op
    a = sample.on("cpu")
    try:
        expected, _ = quietly(lambda: function_of(op)(a[0], *a[1], **a[2]))
    except Exception:
        return [("skip", "")]
    if not all(isinstance(t, torch.Tensor) and strided(t) for t in tree_flatten(expected)[0]):
        return [("skip", "")]
    return [_check_out(sample, device, kind, _outs(kind, expected)) for kind in OUT_KINDS]


def _check_out(sample, device, kind, outs):
    op = sample.op

    def call(arguments, out):
        return quietly(lambda: function_of(op)(arguments[0], *arguments[1], **arguments[2], out=out))

    a, b = sample.on("cpu"), sample.on(device)
    out_a, out_b = to(outs, "cpu"), to(outs, device)
    try:
        result, said = call(a, out_a)
    except Exception as theirs:
        if "failed to match any schema" in str(theirs):
            return "skip", ""  # this out= variant does not exist
        found = compare_errors(lambda: call(b, out_b), theirs)
        return found[0], f"out= {kind}: {found[1]}"
    try:
        got, says = call(b, out_b)
        found = compare(out_b, out_a, values=not sample.random, strides=True)
        if found[0] == "pass":
            if [id(t) for t in tensors(got)] != [id(t) for t in tensors(out_b)] and [
                id(t) for t in tensors(result)
            ] == [id(t) for t in tensors(out_a)]:
                found = ("wrong", "does not return its out= tensors")
            elif [w for w in said if "resized" in w] != [w for w in says if "resized" in w]:
                found = ("message", f"warns {says}, on the CPU {said}")
        return found[0], f"out= {kind}: {found[1]}"
    except Exception as e:
        found = failure(e)
        return found[0], f"out= {kind}: {found[1]}"


def conjugated(t):
    if isinstance(t, torch.Tensor) and t.is_complex() and t.layout is torch.strided:
        return torch.conj_physical(t.detach()).conj().requires_grad_(t.requires_grad)
    return t


def negated(t):
    if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) and t.layout is torch.strided:
        return torch._neg_view(torch.neg(t.detach())).requires_grad_(t.requires_grad)
    return t


def samples_of(op, variant, dtype, requires, limit):
    """The samples of a unit."""
    if variant == "errors":
        return [Sample(op, e.sample_input) for e in op.error_inputs("cpu")]
    if variant == "dtypes":
        try:
            return [Sample(op, s) for s in islice(op.sample_inputs("cpu", dtype), 2)]
        except Exception:
            return []
    found = islice(op.sample_inputs("cpu", dtype, requires_grad=requires), limit)
    if variant == "noncontiguous":
        return (Sample(op, s.noncontiguous()) for s in found if all(strided(t) for t in tensors(s.input)))
    if variant == "conj":
        return (Sample(op, s).changed(conjugated) for s in found)
    if variant == "neg":
        return (Sample(op, s).changed(negated) for s in found)
    return (Sample(op, s) for s in found)


def results_of(sample, variant, device, requires):
    """The outcomes of one sample in one variant."""
    op = sample.op
    if variant == "out":
        return check_out(sample, device)
    if variant == "method":
        return [check(sample, device, getattr(torch.Tensor, op.name, op.method_variant), False)]
    if variant == "inplace":
        return [check_inplace(sample, device, requires)]
    return [by_either_policy(key(op), lambda: check(sample, device, function_of(op), requires))]


def repeats(sample, requires):
    """Whether the CPU itself gives the same bits every time (LAPACK's least squares does not)."""

    def once():
        arguments = sample.on("cpu", requires)
        results, _ = quietly(lambda: sample.op(arguments[0], *arguments[1], **arguments[2]))
        try:
            back = gradients(results, arguments, seeds_for(results)) if requires else []
        except Exception:
            back = []
        return [t.detach() for t in tensors(results)] + [g for g in back if g is not None]

    first, kept = once(), []
    for n in range(100):
        kept.append(torch.empty(1 + 7 * n))  # so that addresses differ each time
        again = once()
        if compare(again, first)[0] != "pass":
            return False
        kept.append(again)
    return True


def run_unit(report, unit, device, limit):
    index, op, variant, name = unit
    dtype = DTYPES[name]
    report.start(index, key(op), variant, name)
    torch.manual_seed(0)
    requires = (
        variant in ("function", "noncontiguous", "inplace", "conj", "neg")
        and op.supports_autograd
        and dtype in op.supported_backward_dtypes("cpu")
    )
    for n, sample in enumerate(samples_of(op, variant, dtype, requires, limit)):
        for outcome, detail in results_of(sample, variant, device, requires):
            if outcome in ("close", "wrong") and not repeats(sample, requires):
                outcome, detail = "varies", ""
            if outcome == "silent" and dtype in op.dtypesIfCUDA - op.dtypes:
                outcome, detail = "pass", ""  # the device has CUDA's dtypes, also where the CPU raises an error
            report.add(outcome, detail, n)
    late = settle()
    if late is not None:
        report.add("error", f"left behind: {late}", "last")
    report.finish()


if __name__ == "__main__":
    program(units(), run_unit, key)
