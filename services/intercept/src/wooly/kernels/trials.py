"""Tries calls on host tensors of zeros, to find errors that only kernels raise, before the call is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.inference import INFERRED_ON_HOST, Inferences, call_operator, may_end_process, seen_as
from wooly.kernels.limits import UNFIT
from wooly.kernels.schema import Call, OpFacts, tensors_of
from wooly.recorder import Recorder
from wooly.torch_private import raw_device

#: Maximum number of elements of a call that is tried with its real sizes. The second limit is for the first call of each
#: combination of operator and dtypes.
_TRIAL_LIMIT = 1 << 12
_TRIAL_LIMIT_NEW = 1 << 16

#: Operators that are not tried, because their kernels access memory out of bounds if lengths, labels, paths or pivots are zero
#: (LAPACK numbers pivots from 1). For them, the client asks the device.
_NEVER_TRIED = frozenset({"_ctc_loss", "_ctc_loss_backward", "linalg_ldl_solve", "linalg_lu_solve"})

#: Operators that are not tried because zeros always fail: the condition of an assertion, repetitions with a given sum. The
#: executor finds their errors.
_FAIL_ON_ZEROS = frozenset({"_functional_assert_async", "repeat_interleave"})

#: Factorisations that are tried with pivoting, because PyTorch has those without pivoting for CUDA only.
_PIVOTED = frozenset({"linalg_lu", "linalg_lu_factor_ex"})

#: Maximum number of bytes of the storages of a call that is tried because its operands share memory.
_SHARED_LIMIT = 64 << 20

#: Matches error messages about unsupported dtypes. Such an error does not depend on the values.
_ABOUT_DTYPES = re.compile(
    r"(?i)not implemented for|not supported for|dtype|can't be cast|scalar type|does not support \w+ input|with a bool tensor"
)

#: Operators that can be tried with smaller tensors, in addition to elementwise operators.
_SHRINKABLE = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "addr", "mv", "dot", "vdot", "ger", "matmul"}
)


class Trials:
    """Tries calls, and remembers the combinations of operator and dtypes that it has tried.

    Args:
        counts: counters of trials.
    """

    def __init__(self, counts: Inferences) -> None:
        self._counts = counts
        #: Combinations of operator and dtypes that were tried without an error.
        self._tried: set[tuple[Any, ...]] = set()

    def attempt(self, facts: OpFacts, call: Call, recorder: Recorder, doubtful: tuple[int, ...]) -> Exception | None:
        """Find errors that meta kernels do not raise: unsupported dtypes, and invalid arguments that only the kernel checks.

        This method runs the call on host tensors of zeros: always if the call is small, otherwise only for the first call of each
        combination of operator and dtypes. It tries calls only if the device is a CPU, because then the executor uses the same
        library. On other devices, a call with a number that does not fit is left to the device.

        Args:
            facts: the operator.
            call: the arguments.
            recorder: recorder of the device.
            doubtful: what `limits.unusual` says of the numbers.

        Returns:
            An error that the zeros may have caused, so that the caller must ask the device at once; None if there is no error.

        Raises:
            Exception: the kernel's error about an unsupported dtype.
        """
        if not recorder.on_cpu() or facts.name in INFERRED_ON_HOST:
            return RuntimeError("not tried on the host") if UNFIT in doubtful else None
        if facts.extension:  # native code of others may end this process if values do not fit together
            return None
        if facts.op.overloadpacket.__name__ in _FAIL_ON_ZEROS:
            return None
        if facts.op.overloadpacket.__name__ in _NEVER_TRIED:
            return RuntimeError("not tried on the host")
        found = tensors_of(call)
        if facts.op.overloadpacket.__name__.endswith("_backward") and not all(t.numel() for t in found):
            return None  # some of these kernels divide by the size, and end the process
        if may_end_process(facts, call):
            return None
        kind = (facts.op, *[t.dtype for t in found], *map(_classes, call.args), *call.kwargs, doubtful)
        known = kind in self._tried
        elements = sum([t.numel() for t in found])
        limit = None
        if elements > (_TRIAL_LIMIT if known else _TRIAL_LIMIT_NEW):
            shrinkable = torch.Tag.pointwise in facts.op.tags or facts.each_alone
            shrinkable = shrinkable or facts.op.overloadpacket.__name__ in _SHRINKABLE
            if not doubtful and (
                known or not shrinkable
            ):  # smaller tensors find whether a number fits, or the device does
                return None
            limit = 2
        error = self._error_of(facts, call, limit)
        if error is None and elements:
            self._tried.add(kind)
        return error if limit is None or doubtful else None

    def refuse_shared_memory(self, facts: OpFacts, call: Call) -> None:
        """Check a call whose operands share memory, by running it on host tensors of zeros that share memory in the same way.

        Calls on large storages are not tried. The executor then finds the error.

        Raises:
            RuntimeError: the operator writes to memory that it also reads. It is ATen's error.
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(call)}
        if sum(storages.values()) > _SHARED_LIMIT:
            return
        host = {at: torch.zeros(n, dtype=torch.uint8, device="cpu").untyped_storage() for at, n in storages.items()}

        def twin(a: Any) -> Any:
            if isinstance(a, Tensor):
                if raw_device(a).type != "wooly":
                    return a
                there = host[a.untyped_storage().data_ptr()]
                return torch.empty(0, dtype=a.dtype, device="cpu").set_(there, a.storage_offset(), a.shape, a.stride())
            return [twin(x) for x in a] if isinstance(a, (list, tuple)) else a

        self._counts.trials += 1
        state = torch.get_rng_state() if facts.random else None
        try:
            call_operator(facts, twin(call.args), {k: twin(v) for k, v in call.kwargs.items()}, "cpu")
        except Exception as e:
            if "single memory location" in str(e):  # other errors may be due to the zeros
                raise
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def _error_of(self, facts: OpFacts, call: Call, limit: int | None) -> Exception | None:
        """Run the call on zeros of at most `limit` elements per dimension. Returns its error, but raises errors about dtypes."""
        args = [stand_in(a, limit) for a in call.args]
        kwargs = {k: stand_in(v, limit) for k, v in call.kwargs.items()}
        if facts.op.overloadpacket.__name__ in _PIVOTED:
            kwargs["pivot"] = True
        self._counts.trials += 1
        state = torch.get_rng_state() if facts.random else None
        try:
            call_operator(facts, args, kwargs, "cpu")
        except Exception as e:
            if _ABOUT_DTYPES.search(str(e)):
                raise
            # The frames have the operands, and the caller's frame the error: a cycle would keep the operands' memory.
            return e.with_traceback(None)
        finally:
            if state is not None:
                torch.set_rng_state(state)
        return None


def _classes(a: Any) -> Any:
    """The class of an argument; of a list, those of its elements: operators on lists take lists of numbers."""
    return frozenset([x.__class__ for x in a]) if isinstance(a, (list, tuple)) else a.__class__


def stand_in(a: Any, limit: int | None = None) -> Any:
    """Replace device tensors in an argument by host tensors of zeros, with at most `limit` elements per dimension."""
    if isinstance(a, Tensor):
        if raw_device(a).type != "wooly":
            return a
        if limit is not None:
            return torch.zeros([min(n, limit) for n in a.shape], dtype=a.dtype, device="cpu")
        return seen_as(a, torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cpu").zero_())
    if isinstance(a, (list, tuple)):
        return [stand_in(x, limit) for x in a]
    return torch.device("cpu") if isinstance(a, torch.device) else a


def raise_kernel_errors(facts: OpFacts, call: Call) -> None:
    """Raise the errors of kernels that neither meta kernels nor trials with few elements find."""
    check = _CHECKS.get(facts.op.overloadpacket.__name__)
    if check is not None:
        check(call)


def _check_multinomial(call: Call) -> None:
    if call.args[0].dim() and call.args[0].shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_normal(call: Call) -> None:
    out = call.kwargs.get("out")
    mean, std = call.args[0], call.args[1] if len(call.args) > 1 else None
    if out is not None and isinstance(mean, Tensor) and not isinstance(std, Tensor):  # broadcasts the mean with `out`
        for at in range(-1, -1 - min(mean.dim(), out.dim()), -1):
            a, b = mean.shape[at], out.shape[at]
            if a != b and 1 not in (a, b):
                raise RuntimeError(
                    f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension "
                    f"{max(mean.dim(), out.dim()) + at}"
                )


def _check_fractional_max_pool3d(call: Call) -> None:
    x, samples = call.args[0], call.args[3]
    if samples.dim() != 3:
        raise RuntimeError(f"Expect _random_samples to have 3 dimensions, got {samples.dim()}")
    if x.dim() not in (4, 5):
        return  # the meta kernel says so
    batch, channels, dims = samples.shape
    if batch < (x.shape[0] if x.dim() == 5 else 1):
        raise RuntimeError("Expect _random_samples.size(0) no less then input batch size.")
    if channels != x.shape[-4]:
        raise RuntimeError("Expect _random_samples.size(1) equals to input channel size.")
    if dims != 3:
        raise RuntimeError(f"Expect _random_samples.size(2) equals to 3; got {dims}.")


#: The checks of `raise_kernel_errors`, by operator.
_CHECKS: dict[str, Callable[[Call], None]] = {
    "fractional_max_pool3d": _check_fractional_max_pool3d,
    "multinomial": _check_multinomial,
    "normal": _check_normal,
}
