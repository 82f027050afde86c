"""Calls whose results have the default dtype, because all operands are integers.

The default dtype (`torch.set_default_dtype`) belongs to this process; the executor's library has its own, which is float32. If
the default dtype is another one, the integers are converted to it before the call, as ATen's kernels do internally. Then the call
does not depend on a default dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.forms import is_python_number
from wooly.kernels.inference import Inferences, NoMetaKernelError, infer
from wooly.kernels.outs import ResizeOutError
from wooly.kernels.schema import Call, OpFacts, unsupported
from wooly.torch_private import schema_of, tree_leaves, tree_map

#: The default dtype of the executor's library.
OF_EXECUTOR = torch.float32


def without_default_dtype(facts: OpFacts, call: Call, results: Sequence[torch.dtype]) -> Call | None:
    """The same call with converted integers, or with the argument `dtype`, so that it does not depend on the default dtype.

    Args:
        facts: the operator.
        call: the arguments.
        results: dtypes of the results that are new tensors.

    Returns:
        None if `call` does not depend on the default dtype, or if the executor has the same default dtype.

    Raises:
        NotImplementedError: the call depends on the default dtype, and no conversion of its integers gives the same results.
    """
    default = torch.get_default_dtype()
    if default is OF_EXECUTOR or len(facts.written) > len(
        facts.out_args
    ):  # an operator in place keeps the dtype of its argument
        return None
    outs = [call.kwargs[name] for name in facts.out_args if name in call.kwargs]
    read = [a for a in tree_leaves((call.args, call.kwargs)) if not any(a is out for out in outs)]
    tensors = [a for a in read if isinstance(a, Tensor) and not _is_number(a)]
    if any(isinstance(a, torch.dtype) for a in read) or any(_is_inexact(t.dtype) for t in tensors):
        return None
    inexact = any(_is_inexact(dtype) for dtype in (*results, *[t.dtype for t in tree_leaves(outs)]))
    if not tensors:
        takes = any(a.name == "dtype" for a in schema_of(facts.op).arguments)
        return Call(call.args, call.kwargs | {"dtype": default}) if results and inexact and takes else None
    if not (inexact or (torch.Tag.pointwise in facts.op.tags and any(_is_fraction(a) for a in read))):
        return None
    # With a complex number, the result may be one of float32, also if the default dtype is shorter.
    for dtype in (default, OF_EXECUTOR):
        for converts in (_is_integral, _is_integer):
            like = _converted(facts, call, converts, partial(torch.empty_like, dtype=dtype, device="meta"))
            if _gives(facts, like, results):
                return _converted(facts, call, converts, partial(Tensor.to, dtype=dtype))
    if not inexact:
        return None
    raise unsupported(
        facts.name,
        f"the default dtype is {default}, and the executor, which computes with integers in its own, is not told; convert the "
        "integers first (x.to(torch.get_default_dtype()))",
    )


def _converted(facts: OpFacts, call: Call, converts: Callable[[Any], bool], to: Callable[[Tensor], Tensor]) -> Call:
    def each(a: Any) -> Any:
        return to(a) if converts(a) else a

    kwargs = {k: v if k in facts.out_args else tree_map(each, v) for k, v in call.kwargs.items()}
    return Call(tuple([tree_map(each, a) for a in call.args]), kwargs)


def _gives(facts: OpFacts, call: Call, results: Sequence[torch.dtype]) -> bool:
    """Whether the results of a call have these dtypes."""
    try:
        found = infer(facts, call, Inferences())
    except (RuntimeError, TypeError, ValueError, IndexError, NoMetaKernelError, ResizeOutError):
        return False
    return [t.dtype for t in found if t is not None] == list(results)


def _is_number(t: Tensor) -> bool:
    return t.is_cpu and t.dim() == 0 and is_python_number(t)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_fraction(a: Any) -> bool:
    """Whether an argument is a number whose class is float or complex."""
    return _is_inexact(a.dtype) and _is_number(a) if isinstance(a, Tensor) else isinstance(a, (float, complex))


def _is_integral(a: Any) -> bool:
    return isinstance(a, Tensor) and not _is_number(a) and not _is_inexact(a.dtype)


def _is_integer(a: Any) -> bool:
    """Whether an argument is a tensor of integers, and not a mask."""
    return _is_integral(a) and a.dtype is not torch.bool
