"""Runs every module of PyTorch's own module database on the device and on the CPU.

Like `opinfo`, it prints one JSON line with counts by outcome per unit (module, variant, dtype). Variants:

train, eval    forward and backward of all inputs: results, gradients of inputs and parameters, buffers afterwards
noncontiguous  the same in training, with gaps in the inputs' memory
state          created on the device, moved there and back, copied, pickled, saved and loaded: the same module
errors         error cases of the database: the same exception
"""

import copy
import io
import pickle

import torch
from comparison import by_either_policy, compare, compare_errors, failure, program, quietly, tensors, to
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_map

VARIANTS = ("train", "eval", "noncontiguous", "state", "errors")
DTYPES = ("float32", "float64", "float16", "bfloat16")
#: Modules that draw random numbers in training.
RANDOM = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def units():
    """(index, module, variant, dtype) of all units."""
    found = []
    for info in module_db:
        for dtype in DTYPES:
            if dtype in ("float16", "bfloat16"):
                variants = ("train", "eval")
            else:
                variants = VARIANTS
            for variant in variants:
                if variant == "errors" and (info.module_error_inputs_func is None or dtype != "float32"):
                    continue
                found.append((len(found), info, variant, dtype))
    return found


def inputs_of(info, dtype, training):
    torch.manual_seed(0)
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


def make(info, given, dtype, training):
    """Create the module on the CPU, with the same parameters every time."""
    torch.manual_seed(1)
    m = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).to(dtype)
    return m.train(training)


def is_random(m):
    """Whether the module's results are random numbers."""
    return any(
        (
            isinstance(part, RANDOM)
            and (part.training or not isinstance(part, (nn.RReLU, *RANDOM[:6])))
            and getattr(part, "p", 1)
        )
        or (part.training and isinstance(getattr(part, "dropout", 0), float) and part.dropout > 0)
        for part in m.modules()
    )


def step(m, arguments):
    """Forward and backward. Returns results, gradients of inputs and parameters, and the final state."""
    args, kwargs = arguments
    results, _ = quietly(lambda: m(*args, **kwargs))
    outs = [t for t in tensors(results) if t.requires_grad]
    torch.manual_seed(7)
    seeds = [torch.randn(t.shape, dtype=t.dtype).to(t.device) for t in outs]
    if outs:
        try:
            torch.autograd.backward(outs, seeds)
        except Exception as e:
            e.forward = results
            raise
    leaves = [t for t in tensors(arguments) if t.requires_grad] + list(m.parameters())
    return results, [t.grad for t in leaves], m.state_dict()


def check_step(info, given, dtype, training, device, change):
    m = make(info, given, dtype, training)
    arguments = tree_map(change, (given.forward_input.args, given.forward_input.kwargs))
    mine, theirs = to(arguments, device, True), to(arguments, "cpu", True)
    there = copy.deepcopy(m).to(device)
    if info.is_lazy:
        # The first call creates random parameters. From here on, both sides have the CPU's parameters.
        for module, (args, kwargs) in ((m, to(arguments, "cpu")), (there, to(arguments, device))):
            module(*args, **kwargs)
        there.load_state_dict(m.state_dict())
    try:
        expected = step(m, theirs)
    except Exception as e:
        outcome, detail = compare_errors(lambda: step(there, mine), e)
        if outcome == "silent" and isinstance(e, NotImplementedError) and "not implemented for" in str(e):
            return "skip", ""  # CUDA has kernels of this dtype; `test_dtypes` compares them with the wider dtype
        return outcome, detail
    try:
        got = step(there, mine)
        for what, a, b in zip(("", "gradients: ", "state: "), got, expected, strict=True):
            if what == "gradients: " and [g is None for g in a] != [g is None for g in b]:
                return "wrong", "a gradient is missing"
            outcome, detail = compare(a, b, values=not is_random(m), strides=what == "")
            if outcome != "pass":
                return outcome, what + detail
        return "pass", ""
    except Exception as e:
        return failure(e)


def check_state(info, given, dtype, device):
    """Check the module after creation on the device, moving, copying and storing."""
    if info.is_lazy:
        return "skip", ""  # no state exists yet
    m = make(info, given, dtype, True)
    state = m.state_dict()
    try:
        made = type(m)(*given.constructor_input.args, **given.constructor_input.kwargs)
        with torch.device(device):
            there = type(m)(*given.constructor_input.args, **given.constructor_input.kwargs)
        for (name, a), (_, b) in zip(there.named_parameters(), made.named_parameters(), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return "wrong", f"{name} is made as {a.dtype}{tuple(a.shape)}"
        moved = copy.deepcopy(m)
        before = dict(moved.named_parameters())
        moved.to(device)
        for key, p in moved.named_parameters():
            if p is not before[key]:
                return "wrong", f"{key} is another object once moved"
        file = io.BytesIO()
        torch.save(moved.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)
        again = make(info, given, dtype, True)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        again = again.to(device)
        again.load_state_dict(loaded)
        forms = {
            "moved": moved,
            "copied": copy.deepcopy(moved),
            "pickled": pickle.loads(pickle.dumps(moved)),  # noqa: S301  # scripts pickle modules
            "loaded": again,
            "back": copy.deepcopy(moved).cpu(),
        }
        if dtype is torch.float32:
            forms["double and back"] = copy.deepcopy(moved).double().float()
        for name, form in forms.items():
            if repr(form) != repr(m):
                return "wrong", f"{name}: another module"
            there = form.state_dict()
            if there.keys() != state.keys():
                return "wrong", f"{name}: other keys"
            for key, a in there.items():
                if (a.device.type == "cuda") == (name == "back"):
                    return "wrong", f"{name}: {key} is on {a.device}"
                outcome, detail = compare(a, state[key])
                if outcome != "pass":
                    return outcome, f"{name}: {key}: {detail}"
        return "pass", ""
    except Exception as e:
        return failure(e)


def check_error(info, given, device):
    """Check a constructor or a call that must fail."""
    sample = given.module_error_input
    arguments = (sample.forward_input.args, sample.forward_input.kwargs) if sample.forward_input else None

    def attempt(where):
        m = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        args, kwargs = to(arguments, where)
        return m.to(where)(*args, **kwargs)

    if arguments is None:
        return "skip", ""
    try:
        attempt("cpu")
    except Exception as e:
        return compare_errors(lambda: attempt(device), e)
    return "skip", ""


def run_unit(report, unit, device, limit):
    index, info, variant, name = unit
    dtype = getattr(torch, name)
    report.start(index, info.name, variant, name)
    if variant == "errors":
        torch.manual_seed(0)
        cases = info.module_error_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=True)
        for n, given in enumerate(cases):
            report.add(*check_error(info, given, device), n)
        return report.finish()
    training = variant != "eval"
    for n, given in enumerate(inputs_of(info, dtype, training)[:limit]):
        if variant == "state":
            report.add(*check_state(info, given, dtype, device), n)
            continue

        def change(t):
            if variant == "noncontiguous" and isinstance(t, torch.Tensor) and t.layout is torch.strided:
                return noncontiguous_like(t).requires_grad_(t.requires_grad)
            return t

        if given.forward_input is not None:
            arguments = (info, given, dtype, training, device, change)
            report.add(*by_either_policy(info.name, lambda a=arguments: check_step(*a)), n)
    return report.finish()


if __name__ == "__main__":
    program(units(), run_unit, lambda info: info.name)
