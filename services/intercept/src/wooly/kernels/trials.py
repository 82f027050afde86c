"""Errors that only kernels know of, found before the device is told: a call is tried on the host, on zeros."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.inference import INFERRED_ON_HOST, Inferences, call_operator, seen_as
from wooly.kernels.schema import Call, OpFacts, tensors_of
from wooly.recorder import Recorder
from wooly.torch_private import raw_device

#: Elements up to which a call of a new signature is tried on host tensors of its own sizes; of a new kind, up to the second.
_TRIAL_LIMIT = 1 << 12
_TRIAL_LIMIT_NEW = 1 << 16

#: Operators whose kernels run out of bounds on zeros (lengths, labels, paths; pivots, which LAPACK numbers from 1) instead of
#: refusing them: the device is asked.
_NEVER_TRIED = frozenset({"_ctc_loss", "_ctc_loss_backward", "linalg_ldl_solve", "linalg_lu_solve"})

#: What kernels say of dtypes that they do not take, whatever the values are.
_ABOUT_DTYPES = re.compile(
    r"(?i)not implemented for|not supported for|dtype|can't be cast|scalar type|does not support \w+ input"
)

#: Beside the elementwise operators, those that take shrunk arguments as well as whole ones.
_SHRINKABLE = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "addr", "mv", "dot", "vdot", "ger", "matmul"}
)


class Trials:
    """Tries calls, and remembers of which kinds it did.

    Args:
        counts: where trials are counted.
    """

    def __init__(self, counts: Inferences) -> None:
        self._counts = counts
        #: Operators with the dtypes that were tried.
        self._tried: set[tuple[Any, ...]] = set()

    def attempt(self, facts: OpFacts, call: Call, recorder: Recorder) -> Exception | None:
        """Find errors that meta kernels do not: of dtypes that a kernel does not take, of arguments that only it looks at.

        The call is made on host tensors of zeros: each small one, and of larger ones the first of every combination of operator
        and dtypes. The executor's library is this one; of any other, only the device knows.

        Returns:
            An error that the zeros may have caused: the caller must ask the device at once. None: there is no doubt.

        Raises:
            Exception: the kernel's own, about dtypes that it does not take.
        """
        link = recorder.link
        if link is None or link.device.get("vendor") != "cpu" or facts.name in INFERRED_ON_HOST:
            return None
        if facts.op.overloadpacket.__name__ in _NEVER_TRIED:
            return RuntimeError("not tried on the host")
        found = tensors_of(call)
        kind = (facts.op, *[t.dtype for t in found], *[a.__class__ for a in call.args], *call.kwargs)
        known = kind in self._tried
        elements = sum([t.numel() for t in found])
        limit = None
        if elements > (_TRIAL_LIMIT if known else _TRIAL_LIMIT_NEW):
            if known or not (torch.Tag.pointwise in facts.op.tags or facts.op.overloadpacket.__name__ in _SHRINKABLE):
                return None
            limit = 2
        error = self._error_of(facts, call, limit)
        if error is None and elements:
            self._tried.add(kind)
        return error if limit is None else None

    def _error_of(self, facts: OpFacts, call: Call, limit: int | None) -> Exception | None:
        """What the call fails with on zeros of at most `limit` elements per dimension; raises errors about dtypes."""
        args = [stand_in(a, limit) for a in call.args]
        kwargs = {k: stand_in(v, limit) for k, v in call.kwargs.items()}
        self._counts.trials += 1
        state = torch.get_rng_state() if facts.random else None
        try:
            call_operator(facts, args, kwargs, "cpu")
        except Exception as e:
            if _ABOUT_DTYPES.search(str(e)):
                raise
            return e
        finally:
            if state is not None:
                torch.set_rng_state(state)
        return None


def stand_in(a: Any, limit: int | None = None) -> Any:
    """A call's argument on the host: tensors become zeros of the same kind, with at most `limit` elements per dimension."""
    if isinstance(a, Tensor):
        if raw_device(a).type != "wooly":
            return a
        if limit is not None:
            return torch.zeros([min(n, limit) for n in a.shape], dtype=a.dtype)
        return seen_as(a, torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).zero_())
    if isinstance(a, (list, tuple)):
        return [stand_in(x, limit) for x in a]
    return torch.device("cpu") if isinstance(a, torch.device) else a


def refuse(facts: OpFacts, call: Call) -> None:
    """Raise what a kernel refuses and neither meta kernels nor a trial on few elements see."""
    check = _CHECKS.get(facts.op.overloadpacket.__name__)
    if check is not None:
        check(call)


def _check_multinomial(call: Call) -> None:
    if call.args[0].dim() and call.args[0].shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_normal(call: Call) -> None:
    out = call.kwargs.get("out")
    if out is not None:  # its size takes part, unless both are tensors
        given = [a for a in call.args[:2] if isinstance(a, Tensor)]
        for at in range(-1, -1 - min(given[0].dim(), out.dim()), -1) if len(given) == 1 else ():
            a, b = given[0].shape[at], out.shape[at]
            if a != b and 1 not in (a, b):
                raise RuntimeError(
                    f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension "
                    f"{max(given[0].dim(), out.dim()) + at}"
                )


#: What kernels refuse that neither meta kernels nor a trial on few elements see, by operator.
_CHECKS: dict[str, Callable[[Call], None]] = {"multinomial": _check_multinomial, "normal": _check_normal}
