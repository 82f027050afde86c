"""Cases that must fail: error cases of PyTorch's operator database, and common mistakes.

Some errors CUDA only finds inside a kernel, for example an index out of range. They end in a device-side assert, after which
the program's CUDA context no longer works. These cases cannot be compared. On our device they raise an error that names the
problem, and the process continues.
"""

from itertools import islice

import torch
from cases import Case, Raises
from comparison import to
from opinfo import Sample, function_of, key
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db

_PER_OPERATOR = 6


def cases(selection):
    if selection.takes("mistakes"):
        for name, call in MISTAKES.items():
            yield Case(f"mistakes/{name}", call, exact_text=True)
        yield Case("mistakes/weight on the host", _weight_on_the_host, known=_ON_THE_HOST)
    for op in op_db:
        if op.error_inputs_func is None or not selection.takes(key(op)):
            continue
        torch.manual_seed(0)
        for n, given in enumerate(islice(op.error_inputs("cpu"), _PER_OPERATOR)):
            sample = Sample(op, given.sample_input)

            def run(device, op=op, sample=sample):
                first, args, kwargs = sample.on(device)
                return function_of(op)(first, *args, **kwargs)

            yield Case(f"{key(op)}/{n}", run)


#: CUDA's wording, with the argument's name, depends on the kernel that finds the error first.
_ON_THE_HOST = Raises("RuntimeError", "Expected all tensors to be on the same device, but got weight is on cpu")


def _weight_on_the_host(device):
    F.linear(torch.ones(2, 2, device=device), torch.ones(2, 2))


def _on(make):
    """A case that calls `make` with a function that moves tensors to the device."""
    return lambda device: make(lambda *shape, **kwargs: to(torch.ones(*shape, **kwargs), device))


MISTAKES = {
    "shapes of a sum": _on(lambda t: t(3) + t(4)),
    "shapes of a product": _on(lambda t: t(2, 3) @ t(2, 3)),
    "shapes of a batched product": _on(lambda t: torch.bmm(t(2, 3, 4), t(2, 3, 4))),
    "shapes of a layer": _on(lambda t: F.linear(t(2, 3), t(5, 4))),
    "channels of a convolution": _on(lambda t: F.conv2d(t(1, 3, 8, 8), t(4, 2, 3, 3))),
    "shapes joined": _on(lambda t: torch.cat([t(2, 3), t(2, 4)], 0)),
    "shapes stacked": _on(lambda t: torch.stack([t(2), t(3)])),
    "view of another size": _on(lambda t: t(2, 3).view(4)),
    "reshape to another size": _on(lambda t: t(2, 3).reshape(5, -1)),
    "view across gaps": _on(lambda t: t(4, 4).t().view(16)),
    "expand": _on(lambda t: t(2, 3).expand(4, 3)),
    "dimension that is not there": _on(lambda t: t(2, 3).sum(2)),
    "index that is not there": _on(lambda t: t(3)[5]),
    "mask of another shape": _on(lambda t: t(3)[t(4, dtype=torch.bool)]),
    "index of floats": _on(lambda t: t(3)[t(2)]),
    "dtypes of a product": _on(lambda t: t(2, 2) @ t(2, 2, dtype=torch.float64)),
    "dtypes of a layer": _on(lambda t: nn.functional.linear(t(2, 2, dtype=torch.float16), t(2, 2))),
    "result into integers": _on(lambda t: t(2, dtype=torch.int64).mul_(0.5)),
    "mean of integers": _on(lambda t: t(3, dtype=torch.int64).mean()),
    "softmax of integers": _on(lambda t: t(3, dtype=torch.int64).softmax(0)),
    "classes of floats": _on(lambda t: F.cross_entropy(t(2, 3), t(2))),
    "batch of the classes": _on(lambda t: F.cross_entropy(t(2, 3), t(3, dtype=torch.int64))),
    "embedding of floats": _on(lambda t: F.embedding(t(2), t(4, 3))),
    "truth of many": _on(lambda t: bool(t(3))),
    "number of many": _on(lambda t: t(3).item()),
    "gradient of integers": _on(lambda t: t(3, dtype=torch.int64).requires_grad_()),
    "backward of many": _on(lambda t: (t(3).requires_grad_() * 2).backward()),
    "backward twice": _on(lambda t: [(y := (t(3).requires_grad_() ** 2).sum()).backward(), y.backward()]),
    "backward without a graph": _on(lambda t: t(1).sum().backward()),
    "leaf in place": _on(lambda t: t(3).requires_grad_().add_(1)),
    "norm of another shape": _on(lambda t: F.layer_norm(t(2, 3), (4,))),
    "group norm of other channels": _on(lambda t: F.group_norm(t(2, 6), 4)),
    "batch norm of one": _on(lambda t: F.batch_norm(t(1, 3), None, None, training=True)),
    "pooling to nothing": _on(lambda t: F.max_pool2d(t(1, 1, 2, 2), 4)),
    "factor of what is singular": _on(lambda t: torch.linalg.cholesky(-t(2, 2))),
    "inverse of what is singular": _on(lambda t: torch.linalg.inv(t(2, 2))),
    "inverse of what is not square": _on(lambda t: torch.linalg.inv(t(2, 3))),
    "size below zero": lambda device: torch.zeros(-1, device=device),
    "probability": _on(lambda t: F.dropout(t(3), 1.5)),
    "state of another shape": lambda device: nn.Linear(2, 3).to(device).load_state_dict(nn.Linear(2, 4).state_dict()),
    "parameters that are missing": lambda device: nn.Linear(2, 3).to(device).load_state_dict({}),
}  # fmt: skip
