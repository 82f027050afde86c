"""Shared by the conformance programs: move samples to the device, compare results with the CPU, classify errors.

Two results are the same if dtype, shape, strides and every bit of every element are equal, NaNs included. Outcomes:

=============  =========================================================================================================
pass           the same; or the same exception, type and message, at the call
late           the CPU's message, raised at the next wait: the error depends on the contents of tensors
skip           nothing to compare (the sample does not apply to this variant)
varies         the CPU's own results differ from run to run
close          within PyTorch's tolerance for the dtype, but not equal in every bit
layout         the same values with other strides, or a copy where the CPU gives a view
wrong          other values, shape or dtype
unsupported    NotImplementedError where the CPU computes
error          another exception where the CPU computes
message        an exception where the CPU raises one, too, but of another type or wording
silent         a result where the CPU raises
crash          the process or the executor died
=============  =========================================================================================================
"""

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from collections import Counter

import torch
from torch.utils._pytree import tree_flatten, tree_map

FINE = ("pass", "skip", "varies")
#: Outcomes from best to worst. A sample with several outcomes counts as the worst of them.
ORDER = ("pass", "close", "layout", "wrong")


#: Operators that PyTorch computes differently per device type, because it picks an accumulation policy by type; with the
#: relative and absolute tolerance between these policies. With the CPU's policy (`cpus_policy`) the device must give the CPU's
#: bits.
BY_DEVICE_TYPE = {
    "nn.functional.linear_cross_entropy.chunked": (0.05, 0.02),
    "nn.functional.linear_cross_entropy.chunked_none": (0.05, 0.02),
    "nn.LinearCrossEntropyLoss": (0.05, 0.05),
}
#: Wider tolerances for `close`, relative and absolute, where PyTorch's usual ones for the dtype are too small.
WIDER = {"linalg.householder_product": (1e-3, 1e-3)}  # PyTorch's own tolerance for complex64
_unit = {"op": ""}


def to(value, device, requires_grad=False):
    """Copy `value` with every tensor moved to `device`:

    same strides, same storage around it, same conjugate and negative bits.
    """

    def move(t):
        if not isinstance(t, torch.Tensor):
            return torch.device(device) if isinstance(t, torch.device) else t
        moved = _move(t.detach(), device)
        return moved.requires_grad_() if t.requires_grad and requires_grad else moved

    return tree_map(move, value)


def _move(t, device):
    if t.is_conj():
        return _move(t.conj(), device).conj()
    if t.is_neg():
        return torch._neg_view(_move(torch._neg_view(t), device))
    if t.device.type != "cpu":
        return t  # the sample chose this device itself
    if t.layout is not torch.strided or t._is_zerotensor():
        return t.to(device, copy=True)
    if t.untyped_storage().nbytes() != t.numel() * t.element_size():
        # A view of a larger storage: the bytes around the view belong to the sample.
        whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device, copy=True)
        return whole.as_strided(t.shape, t.stride(), t.storage_offset())
    return t.to(device, copy=True)


def tensors(value):
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def _host(t):
    """The plain host values of a strided or sparse tensor."""
    t = t.detach()
    if t.layout is not torch.strided:
        t = t.to_dense()
    if t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype)
    return t.cpu().resolve_conj().resolve_neg()


def _tolerances(dtype):
    for known in (WIDER, BY_DEVICE_TYPE):
        if _unit["op"] in known:
            return known[_unit["op"]]
    return {
        torch.float16: (1e-3, 1e-5),
        torch.bfloat16: (1.6e-2, 1e-5),
        torch.float32: (1.3e-6, 1e-5),
        torch.complex64: (1.3e-6, 1e-5),
        torch.complex32: (1e-3, 1e-5),
        torch.float64: (1e-7, 1e-7),
        torch.complex128: (1e-7, 1e-7),
    }.get(dtype, (0, 0))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t):
    t = t.contiguous()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_BITS[t.element_size()])


def compare_values(x, y):
    """Outcome and detail for two host tensors of the same dtype and shape."""
    if torch.equal(_bits(x), _bits(y)):
        return "pass", ""
    rtol, atol = _tolerances(y.dtype)
    if y.dtype is torch.complex32:
        x, y = x.to(torch.complex64), y.to(torch.complex64)
    if x.element_size() == 1 and y.is_floating_point():
        x, y = x.float(), y.float()
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if torch.equal(x.isnan(), y.isnan()):
        a, b = x.nan_to_num(), y.nan_to_num()
        if torch.equal(a, b):
            number = ~x.isnan()
            if not x.is_floating_point() or torch.equal(x[number].signbit(), y[number].signbit()):
                return "pass", ""
            return "close", "the sign of a zero"
    if torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True):
        return "close", f"within {rtol:g}"
    d = (x.to(torch.float64) - y.to(torch.float64)).abs()
    return "wrong", f"values differ by up to {d[~d.isnan()].max().item() if (~d.isnan()).any() else float('nan'):.3g}"


def compare(ours, theirs, *, values=True, strides=True):
    """Outcome and detail for two results of any structure. With `values` off (random numbers) only dtypes and shapes count."""
    flat_a, flat_b = tree_flatten(ours)[0], tree_flatten(theirs)[0]
    if len(flat_a) != len(flat_b):
        return "wrong", f"{len(flat_a)} results, {len(flat_b)} on the CPU"
    found = ("pass", "")
    for a, b in zip(flat_a, flat_b, strict=True):
        one = _compare_one(a, b, values, strides)
        if ORDER.index(one[0]) > ORDER.index(found[0]):
            found = one
    return found


def _compare_one(a, b, values, strides):
    if not isinstance(b, torch.Tensor):
        if isinstance(b, (int, float, bool, complex, str, torch.dtype)) and a != b and not (a != a and b != b):
            return ("wrong", f"{a!r}, on the CPU {b!r}") if values else ("pass", "")
        return "pass", ""
    if not isinstance(a, torch.Tensor):
        return "wrong", f"a {type(a).__name__} where the CPU gives a tensor"
    if a.dtype != b.dtype or a.shape != b.shape:
        return "wrong", f"{a.dtype}{tuple(a.shape)}, on the CPU {b.dtype}{tuple(b.shape)}"
    found = compare_values(_host(a), _host(b)) if values else ("pass", "")
    if strides and found[0] in ("pass", "close") and b.layout is torch.strided and not _same_strides(a, b):
        return "layout", f"strides {a.stride()}, on the CPU {b.stride()} for {tuple(b.shape)}"
    return found


def _same_strides(a, b):
    """Strides of dimensions with one element, and of empty tensors, are ignored."""
    return b.numel() == 0 or all(x == y or n <= 1 for x, y, n in zip(a.stride(), b.stride(), b.shape, strict=True))


def views_of(results, arguments):
    """For every result, the argument whose storage it shares, and its offset."""
    storages = [t.untyped_storage().data_ptr() if t.layout is torch.strided else None for t in tensors(arguments)]
    found = []
    for t in tensors(results):
        if t.layout is not torch.strided or t._is_zerotensor() or t.numel() == 0:
            found.append(None)
            continue
        at = t.untyped_storage().data_ptr()
        found.append((storages.index(at), t.storage_offset()) if at and at in storages else None)
    return found


def same_error(ours, theirs):
    """Whether an exception on the device equals the CPU's exception."""
    if not isinstance(ours, type(theirs)) and type(ours).__name__ != type(theirs).__name__:
        return False
    return wording(ours) == wording(theirs)


def wording(error):
    """An exception's message without the names of devices."""
    text = str(error).split("\nException raised from")[0]
    text = text.replace("torch.cuda.", "torch.")
    text = re.sub(r"\bwooly(\w+)Type\b", r"torch.\1Tensor", text)
    return re.sub(r"\b(cuda|wooly|privateuseone|cpu|meta)(:0)?\b", "DEVICE", text, flags=re.IGNORECASE).strip()


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def compare_errors(call, theirs, results=None):
    """Outcome and detail of `call` on the device, where the CPU raised `theirs`."""
    try:
        call()
    except Exception as ours:
        settle()
        if same_error(ours, theirs):
            return "pass", ""
        if isinstance(ours, NotImplementedError):
            if isinstance(theirs, NotImplementedError) and "Could not run" in str(theirs):
                return "pass", ""  # neither side has such a kernel
            return "unsupported", one_line(ours)
        if wording(theirs) and wording(theirs) in wording(ours) and "failed on the remote device" in str(ours):
            return "late", one_line(ours)
        return "message", f"{one_line(ours)} / on the CPU {one_line(theirs)}"
    late = settle()
    if late is None:
        return "silent", f"on the CPU {one_line(theirs)}"
    if wording(theirs) in wording(late):
        if "not implemented for" in str(theirs):
            return "message", f"only at the next wait: {one_line(late)}"
        return "late", one_line(late)
    return "message", f"at the next wait {one_line(late)} / on the CPU {one_line(theirs)}"


def failure(error):
    """Outcome and detail of an exception that the CPU does not raise."""
    settle()
    if isinstance(error, NotImplementedError):
        return "unsupported", one_line(error)
    return "error", one_line(error)


@contextlib.contextmanager
def cpus_policy():
    """Let `linear_cross_entropy` accumulate on the device with the CPU's policy."""
    try:
        from torch.nn.modules import linear_cross_entropy_options
    except ImportError:  # it came with torch 2.13
        yield
        return
    if not hasattr(linear_cross_entropy_options, "_AUTO_DEFAULTS"):  # from torch 2.14 on
        choose = linear_cross_entropy_options._auto_acc_policy
        linear_cross_entropy_options._auto_acc_policy = lambda kind, dtype: choose("cpu", dtype)
        try:
            yield
        finally:
            linear_cross_entropy_options._auto_acc_policy = choose
        return
    kept = dict(linear_cross_entropy_options._AUTO_DEFAULTS)
    chosen = {("cuda", dtype): policy for (kind, dtype), policy in kept.items() if kind == "cpu"}
    linear_cross_entropy_options._AUTO_DEFAULTS.update(chosen)
    try:
        yield
    finally:
        linear_cross_entropy_options._AUTO_DEFAULTS.update(kept)


def by_either_policy(name, check):
    """Outcome and detail of `check()`.

    An operator with a policy per device type must be within tolerance, and with the CPU's policy equal in every bit.
    """
    own = check()
    if name not in BY_DEVICE_TYPE or own[0] != "close":
        return own
    with cpus_policy():
        return check()


def settle():
    """Wait for the device; returns a deferred error, if one was pending."""
    try:
        torch.cuda.synchronize()
    except Exception as e:
        return e
    return None


def quietly(call):
    """Run `call()`. Returns its result and the first lines of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, sorted({str(w.message).splitlines()[0][:200] for w in caught})


class Report:
    """Prints one JSON line with counts per unit (item, variant, dtype).

    Args:
        executor: the executor's process; if it dies, this process ends, too.
    """

    def __init__(self, executor=None):
        self._executor = executor

    def start(self, index, name, variant, dtype):
        self._unit = {"unit": index, "op": name, "variant": variant, "dtype": dtype}
        _unit.update(self._unit)
        self._counts, self._details = Counter(), {}
        print(json.dumps(self._unit | {"start": True}), flush=True)

    def add(self, outcome, detail, sample):
        if outcome not in FINE and self._executor is not None and self._executor.poll() is not None:
            sys.stdout.flush()
            os._exit(1)  # the executor died: the parent process counts a crash of this unit
        self._counts[outcome] += 1
        if outcome not in FINE:
            self._details.setdefault(outcome, f"sample {sample}: {detail}")

    def finish(self):
        if self._counts:
            print(json.dumps(self._unit | {"counts": self._counts, "details": self._details}), flush=True)


def program(units, run_unit, name_of):
    """Process units: start a fresh executor, and accept the options of `sweep` in the conftest.

    Args:
        units: (index, thing, variant, dtype) in a fixed order.
        run_unit: called with the report, a unit, the device and the maximum number of samples.
        name_of: returns the name of a thing.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="this process takes every PARTS-th thing")
    parser.add_argument("--first", type=int, default=0, help="the unit to start at")
    parser.add_argument("--only", action="append", default=[], help="names")
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--samples", type=int, default=None, help="maximum number of samples per unit")
    options = parser.parse_args()
    from wooly import api
    from wooly_testkit.executor import executor_process

    torch.set_num_threads(1)
    place = {}
    for _, thing, _, _ in units:
        place.setdefault(id(thing), len(place))
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        report = Report(running.process)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for unit in units:
                index, thing, variant, dtype = unit
                if (
                    index >= options.first
                    and place[id(thing)] % options.parts == options.part
                    and (not options.only or name_of(thing) in options.only)
                    and (not options.variant or variant in options.variant)
                    and (not options.dtype or dtype in options.dtype)
                ):
                    run_unit(report, unit, "cuda", options.samples)
        sys.stdout.flush()
        running.process.kill()
        os._exit(0)
