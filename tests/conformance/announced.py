"""Compares what clients announce of each operator's results with what CUDA's kernels make: dtype, shape and strides.

A client knows the results of a call before an executor computes them, with the layouts of the CPU. Where CUDA's kernel makes
other strides, an executor on a GPU copies the result; where it makes another dtype or shape, the executor converts it, or the
program fails there. CUDA's results come from fake tensors on the device "cuda" (`FakeTensorMode`), which need no GPU, in another
process, because here "cuda" is the Wooly device. Like `opinfo`, it prints one JSON line with counts by outcome per unit
(operator, variant, dtype).

pass     the same dtype, shape and strides, of all results (strides of dimensions with one element do not count)
dtype, shape, layout  another dtype, another shape, other strides
skip     fake tensors do not know the result without values, or one side refuses the call

What fake tensors say is a model of CUDA's kernels, not a measurement. Gradients are not compared.
"""

import contextlib
import json
import subprocess
import sys
import warnings
from itertools import islice

import torch
from comparison import program, tensors
from opinfo import DTYPES, Sample, function_of, key, strided
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

#: Maximum number of samples per unit.
SAMPLES = 8


def units():
    """(index, operator, variant, dtype) of all units."""
    pairs = [(op, name) for op in op_db for name, dtype in DTYPES.items() if dtype in op.dtypesIfCUDA & op.dtypes]
    return [(k, op, "function", name) for k, (op, name) in enumerate(pairs)]


def samples_of(op, name, limit):
    torch.manual_seed(0)
    found = op.sample_inputs("cpu", DTYPES[name], requires_grad=False)
    return [Sample(op, s) for s in islice(found, min(limit or SAMPLES, SAMPLES))]


def described(results):
    """Dtype, shape and strides of each tensor; None: one of them is not strided."""
    found = tensors(results)
    if not all(strided(t) for t in found):
        return None
    return [[str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())] for t in found]


def inputs_of(sample):
    """The inputs as text. A few samples of the database depend on the devices that there are, and are not compared.

    Others come from a set, so their order depends on the process: `meshgrid` with the indexing "ij" and "xy".
    """
    words = [leaf for leaf in tree_leaves(sample.parts) if isinstance(leaf, (str, int, float, bool))]
    return repr(([(str(t.dtype), list(t.shape)) for t in tensors(sample.parts)], words))


# -- CUDA ------------------------------------------------------------------------------------------------------------------


def on_cuda(t):
    """A fake tensor on the device "cuda" with the layout of `t`."""
    if not isinstance(t, torch.Tensor):
        return t
    if not strided(t):
        raise NotImplementedError("fake tensors of this layout need the library")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


def of_fakes(sample):
    """What CUDA makes of a sample; None if fake tensors do not tell."""
    try:
        with FakeTensorMode():
            first, args, kwargs = tree_map(on_cuda, sample.parts)
            if "device" in kwargs:
                kwargs["device"] = "cuda"
            return described(function_of(sample.op)(first, *args, **kwargs))
    except Exception:  # they know no result without values, have no rule for the operator, or refuse the call
        return None


def answers(op, name, limit):
    """The inputs of a unit's samples, and what CUDA makes of them."""
    return [(inputs_of(sample), of_fakes(sample)) for sample in samples_of(op, name, limit)]


def serve_fakes():
    """For each line `unit limit` of the standard input: print what CUDA makes of the unit's samples, as JSON."""
    known = units()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in sys.stdin:
            index, limit = map(int, line.split())
            _, op, _, name = known[index]
            print(json.dumps(answers(op, name, limit)), flush=True)


class Fakes:
    """Answers for CUDA, from another process, which starts with the first question, or from what this process knows."""

    def __init__(self):
        self._process, self._known = None, {}

    def know(self, chosen, limit):
        """Find the answers for some units in this process, while "cuda" is not the Wooly device."""
        for index, op, _, name in chosen:
            self._known[index] = answers(op, name, limit)

    def ask(self, index, limit):
        if index in self._known:
            return self._known[index]
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--fakes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self._process.stdin.write(f"{index} {limit or SAMPLES}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with fake tensors has ended with status {self._process.wait()}")
        return json.loads(line)


FAKES = Fakes()

# -- ours ------------------------------------------------------------------------------------------------------------------


def difference(ours, theirs):
    """The outcome and its detail."""
    if len(ours) != len(theirs):
        return "shape", f"{len(ours)} results, on CUDA {len(theirs)}"
    for what, k in (("dtype", 0), ("shape", 1)):
        for mine, other in zip(ours, theirs, strict=True):
            if mine[k] != other[k]:
                return what, f"{mine[k]}, on CUDA {other[k]}"
    for (_, shape, mine), (_, _, other) in zip(ours, theirs, strict=True):
        if 0 not in shape and [s for s, n in zip(mine, shape, strict=True) if n != 1] != [
            s for s, n in zip(other, shape, strict=True) if n != 1
        ]:
            return "layout", f"strides {mine} of {shape}, on CUDA {other}"
    return "pass", ""


def run_unit(report, unit, device, limit):
    index, op, variant, name = unit
    report.start(index, key(op), variant, name)
    expected = FAKES.ask(index, limit)
    for n, (sample, (inputs, theirs)) in enumerate(zip(samples_of(op, name, limit), expected, strict=False)):
        ours = None
        if theirs is not None and inputs == inputs_of(sample):
            first, args, kwargs = sample.on(device)
            with contextlib.suppress(Exception):  # `opinfo` compares errors
                ours = described(function_of(op)(first, *args, **kwargs))
        report.add(*(("skip", "") if theirs is None or ours is None else difference(ours, theirs)), n)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:] == ["--fakes"]:
        serve_fakes()
    else:
        program(units(), run_unit, key)
