"""PyTorch's operator database: the first samples of every operator in every dtype, results and gradients."""

from itertools import islice

import torch
from cases import Case
from comparison import to
from opinfo import DTYPES, RANDOM, UNDEFINED, Sample, function_of, gradients, key
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import DecorateInfo
from verdicts import TOLERANCES


def cases(selection):
    for op in op_db:
        if not selection.takes(key(op)):
            continue
        tolerances, alike = expectations(op)
        for name, dtype in DTYPES.items():
            for n, sample in enumerate(samples(op, dtype, selection.samples)):
                yield Case(
                    f"{key(op)}/{name}/{n}",
                    lambda device, op=op, dtype=dtype, sample=sample: call(op, dtype, sample, device),
                    inputs=sample.parts,
                    tolerances=tolerances,
                    kind_only=not alike or key(op) in RANDOM | UNDEFINED or sample.random,
                )


def samples(op, dtype, limit):
    """The database's first samples; for an unsupported dtype one sample, if the database can make one."""
    torch.manual_seed(0)
    claimed = dtype in op.dtypes
    try:
        found = list(
            islice(op.sample_inputs("cpu", dtype, requires_grad=claimed and grows(op, dtype)), limit if claimed else 1)
        )
    except Exception:
        return []  # the database has no sample for this dtype
    made = []
    for sample in found:
        one = Sample(op, sample)
        one.comparable = sample.output_process_fn_grad
        made.append(one)
    return made


def grows(op, dtype):
    """Whether to compute gradients. Both sides use the CPU's claims, because CUDA's depend on the GPU."""
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def call(op, dtype, sample, device):
    first, args, kwargs = sample.on(device, True)
    result = function_of(op)(first, *args, **kwargs)
    # The database hides results that a library may choose freely, such as signs of singular vectors.
    comparable = sample.comparable(result)
    if sample.random or key(op) in RANDOM | UNDEFINED or not grows(op, dtype):
        return {"result": comparable}
    outs = [t for t in torch.utils._pytree.tree_leaves(comparable) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(7)
    seeds = to([torch.randn(t.shape, dtype=t.dtype) for t in outs], device)
    try:
        back = gradients(comparable, (first, args, kwargs), seeds)
    except RuntimeError as e:
        if "not implemented" not in str(e):
            raise
        back = type(e).__name__  # forward only
    return {"result": comparable, "gradients": back}


def expectations(op):
    """PyTorch's own expectations for CUDA and the CPU: tolerances, and whether the values are comparable at all."""
    tolerances, alike = {}, True
    for decorator in op.decorators:
        inside = [decorator]
        if isinstance(decorator, DecorateInfo):
            compares = decorator.test_name == "test_compare_cpu"
            if decorator.cls_name not in (None, "TestCommon") or decorator.device_type not in (None, "cuda"):
                continue
            if decorator.test_name is not None and not compares:
                continue
            inside = decorator.decorators
            alike = alike and not (compares and not any(isinstance(d, toleranceOverride) for d in inside))
        for one in inside:
            if isinstance(one, toleranceOverride):
                for dtype, allowed in one.d.items():
                    relative, absolute = TOLERANCES.get(dtype, (0.0, 0.0))
                    tolerances[dtype] = (max(relative, allowed.rtol), max(absolute, allowed.atol))
    return tolerances, alike
