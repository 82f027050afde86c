"""Kernels for operators that each backend must implement itself, and for cases that CUDA has and the CPU's kernel lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined] # public, but not in its __all__

from wooly import native
from wooly.devices import mixed_devices
from wooly.errors import RemoteOperationError
from wooly.kernels.overlap import overlaps, refuse_common_memory, without_overlap
from wooly.kernels.schema import Kernel
from wooly.kernels.sparse.compression import compressed_to_coordinates, rows_to_compressed
from wooly.kernels.trials import stand_in
from wooly.recorder import Recorder
from wooly.storage import span
from wooly.torch_private import (
    OpOverload,
    OpOverloadPacket,
    alert_not_deterministic,
    raw_device,
    redispatch_cpu,
    warn_of_resize,
)

aten = torch.ops.aten


def conj_physical_(t: Tensor) -> Tensor:
    """`aten.conj_physical_`, for which ATen has a CPU and a CUDA kernel but no generic kernel."""
    return t.copy_(torch.conj_physical(t)) if t.is_complex() else t


def _widened(op: OpOverloadPacket) -> Kernel:
    """A matrix product with an `out_dtype` that is wider than its factors. This kernel widens the factors first."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        *factors, dtype = args
        return op(*[t.to(dtype) for t in factors], **kwargs)  # type: ignore[no-any-return]

    return run


def _widened_into(op: OpOverloadPacket) -> Kernel:
    run = _widened(op)

    def into(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = run(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return into


def nonzero_into(t: Tensor, *, out: Tensor) -> Tensor:
    """`aten.nonzero.out`. Only the device knows the size of the result, so `out` is resized after the result is there."""
    _require_one_device(t, out)
    if out.dtype is not torch.int64:
        raise RuntimeError(
            f"nonzero: Expected out tensor to have scalar type Long but got scalar type{_scalar_type(out)}"
        )
    return _resized(out, aten.nonzero(t), laid_out=True)


def masked_select_into(t: Tensor, mask: Tensor, *, out: Tensor) -> Tensor:
    """`aten.masked_select.out`. Only the device knows the size of the result, so `out` is resized after the result is there."""
    _require_one_device(t, out)
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    if out.dtype is not t.dtype:
        raise RuntimeError("masked_select(): self and result must have the same scalar type")
    for read in (t, mask):
        refuse_common_memory(out, read)
    return _resized(out, aten.masked_select(t, mask))


def assert_async(condition: Tensor, message: str = "an assertion of the script failed") -> None:
    """`aten._assert_async`. If the condition is false, a later operation raises the error, as on CUDA."""
    if condition.numel() != 1:
        raise RuntimeError(
            "Boolean value of Tensor with "
            + ("no values" if not condition.numel() else "more than one value")
            + " is ambiguous"
        )
    aten._functional_assert_async.msg(condition, message, condition.new_empty(0))


def mode_into(
    t: Tensor, dim: int = -1, keepdim: bool = False, *, values: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """`aten.mode.values`. ATen's own code refuses tensors that are not on the CPU or on CUDA."""
    _require_one_device(t, values, indices)
    if values.dtype is not t.dtype:
        raise RuntimeError(
            f"expected scalar type '{_scalar_type(t)}' but got '{_scalar_type(values)}' for values output"
        )
    if indices.dtype is not torch.int64:
        raise RuntimeError(f"expected scalar type 'Long' but got '{_scalar_type(indices)}' for indices output")
    found = aten.mode(t, dim, keepdim)
    if values.shape != found[0].shape or indices.shape != found[1].shape:
        # The CPU kernel's warnings contain shapes that only the CPU kernel knows, so let it warn.
        outs = {"values": stand_in(values), "indices": stand_in(indices)}
        aten.mode.values(stand_in(t), dim, keepdim, **outs)
    return _resized(values, found[0], warn=False), _resized(indices, found[1], warn=False)


def lstsq_into(
    t: Tensor,
    b: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    solution: Tensor,
    residuals: Tensor,
    rank: Tensor,
    singular_values: Tensor,
) -> tuple[Tensor, ...]:
    """`aten.linalg_lstsq.out`. Only the device knows the number of residuals, so the outputs are resized afterwards."""
    outs = {"solution": solution, "residuals": residuals, "rank": rank, "singular_values": singular_values}
    if any(o.dtype != (torch.int64 if k == "rank" else t.dtype) for k, o in outs.items()):
        # The CPU kernel raises its error for wrong dtypes before it reads values.
        stand_ins = [torch.eye(*a.shape[-2:], dtype=a.dtype).expand(a.shape).clone() for a in (t,) if a.dim() > 1]
        aten.linalg_lstsq.out(
            *(stand_ins or [stand_in(t)]),
            stand_in(b),
            rcond,
            driver=driver,
            **{k: stand_in(o) for k, o in outs.items()},
        )
    found = aten.linalg_lstsq(t, b, rcond, driver=driver)
    return tuple([_resized(o, r) for o, r in zip(outs.values(), found, strict=True)])


def _require_one_device(*tensors: Tensor) -> None:
    """Check that results go to the device of the operand.

    Raises:
        RuntimeError: they do not; the message is PyTorch's.
    """
    if len({raw_device(t) for t in tensors}) > 1:
        raise mixed_devices(tensors)


def _resized(out: Tensor, result: Tensor, *, warn: bool = True, laid_out: bool = False) -> Tensor:
    if out.shape != result.shape:
        if warn:
            warn_of_resize(out, result.shape)
        laid_out = laid_out or out.numel() == 0
        if laid_out:
            out.resize_([span(tuple(result.shape), result.stride())]).as_strided_(result.shape, result.stride())
        else:
            out.resize_(result.shape)
    return out.copy_(result)


def _scalar_type(t: Tensor) -> str:
    """ATen's name of a tensor's dtype, such as ``Float``."""
    return torch.empty(0, dtype=t.dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")


def histc(record: Kernel) -> Kernel:
    """`aten.histc` and `aten.histc.out`. CUDA also counts integers, in the arithmetic of integers. The CPU kernel does not."""

    def run(t: Tensor, bins: int = 100, min: Any = 0, max: Any = 0, **out: Tensor) -> Any:
        if t.is_floating_point():
            alert_not_deterministic("_histc_cuda with floating point input")
        if t.is_floating_point() or t.is_complex() or t.dtype is torch.bool or bins <= 0 or min > max:
            return record(t, bins, min, max, **out)
        found = _count_integers(t, bins, int(min), int(max))
        if not out:
            return found
        _require_one_device(t, out["out"])
        if out["out"].dtype is not t.dtype:
            raise RuntimeError("torch.histogram: input tensor and hist tensor should have the same dtype")
        return _resized(out["out"], found)

    return run


def _count_integers(t: Tensor, bins: int, low: int, high: int) -> Tensor:
    """The numbers of elements of `bins` equal parts of a range, as CUDA's kernel counts integers.

    If the limits are equal, the range is that of the elements; if these are equal, too, it begins one below and ends one above.
    """
    values = t.reshape(-1).long()
    least, most = torch.tensor(low, device=t.device), torch.tensor(high, device=t.device)
    if low == high:
        if values.numel():
            least, most = values.aminmax()
        same = (least == most).long()
        least, most = least - same, most + same
    inside = (values >= least) & (values <= most)
    part = ((values - least) * bins).div(most - least, rounding_mode="floor").clamp(0, bins - 1)
    return torch.zeros(bins, dtype=torch.int64, device=t.device).scatter_add_(0, part, inside.long()).to(t.dtype)


#: Factorisations with an argument `check_errors`, and their names in errors.
CHECKED = {
    "linalg_cholesky_ex": "linalg.cholesky_ex",
    "linalg_inv_ex": "linalg.inv_ex",
    "linalg_ldl_factor_ex": "torch.linalg.ldl_factor_ex",
    "linalg_lu_factor_ex": "torch.linalg.lu_factor_ex",
    "_linalg_solve_ex": "torch.linalg.solve_ex",
}


def checked(record: Kernel, name: str) -> Kernel:
    """Wrap a factorisation of `CHECKED`, so that `torch.linalg.LinAlgError` comes at the call, as on CUDA.

    Args:
        record: the kernel of the overload.
        name: the operator's name in errors.
    """

    def run(t: Tensor, *args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
        found = record(t, *args, **kwargs)
        if check_errors:
            aten._linalg_check_errors(found[-1], name, is_matrix=t.dim() == 2)
        return found

    return run


#: Decompositions whose kernels raise errors that depend on values. CUDA waits for the device in them, and raises at the call.
DECOMPOSITIONS = frozenset({"_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "linalg_eig", "linalg_eigvals"})


def at_call(record: Kernel, recorder_of: Callable[[Tensor], Recorder]) -> Kernel:
    """Wrap a decomposition of `DECOMPOSITIONS`, so that its error comes at the call, with PyTorch's type.

    Args:
        record: the kernel of the overload.
        recorder_of: returns the recorder of a tensor's device.
    """

    def run(t: Tensor, *args: Any, driver: str | None = None, **kwargs: Any) -> Any:
        if driver not in (None, "gesvd", "gesvdj", "gesvda"):
            raise RuntimeError(f"torch.linalg.svd: unknown svd driver {driver}: use gesvd, gesvdj or gesvda")
        found = record(t, *args, **kwargs)  # the executor's library chooses its driver itself
        _raise_error_of(DECOMPOSITIONS, recorder_of(t))
        return found

    return run


#: Operators with errors that depend on values, and when CUDA's kernels wait for the device and raise them at the call.
CHECKED_VALUES: dict[str, Callable[..., bool]] = {
    "histc": lambda t, bins=100, min=0, max=0, **out: min == max and t.is_floating_point() and t.numel() > 0,
    "searchsorted": lambda *args, sorter=None, **named: sorter is not None,
}


def checked_at_call(
    record: Kernel, name: str, waits: Callable[..., bool], recorder_of: Callable[[Tensor], Recorder]
) -> Kernel:
    """Wrap an operator of `CHECKED_VALUES`.

    Args:
        record: the kernel of the overload.
        name: the operator's name.
        waits: whether CUDA's kernel waits in a call.
        recorder_of: returns the recorder of a tensor's device.
    """

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = record(t, *args, **kwargs)
        if waits(t, *args, **kwargs):
            _raise_error_of({name}, recorder_of(t))
        return found

    return run


def _raise_error_of(names: Set[str], recorder: Recorder) -> None:
    """Wait for the device, and raise the error of one of these operators with PyTorch's type."""
    with recorder.lock:
        if recorder.capture is not None or recorder.recording or recorder.require_link().recording:
            return
        try:
            recorder.sync()
        except RemoteOperationError as e:
            if e.operation is None or not e.operation.startswith("aten.") or type(e) is not RemoteOperationError:
                raise
            if e.operation.split(".")[1] not in names:
                raise
            kind = LinAlgError if "failed to converge" in e.message else RuntimeError
            raise kind(e.message) from None


def vector_norm(record: Kernel) -> Kernel:
    """`aten.linalg_vector_norm`. Whether an empty tensor has a norm depends on the order, which is no part of a signature."""

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not t.numel():
            order = args[0] if args else 2
            if not isinstance(order, complex) and (order < 0 or order == torch.inf):
                given = {name: value for name, value in kwargs.items() if name != "out"}
                aten.linalg_vector_norm(torch.empty(t.shape, dtype=t.dtype, device="meta"), *args, **given)
            if native.module is not None:
                native.module.disarm()  # calls of this signature with other orders must come here, too
        return record(t, *args, **kwargs)

    return run


def solve_triangular_into(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False, out: Tensor
) -> Tensor:
    """`aten.linalg_solve_triangular.out`. `out` may be an argument, which the executor refuses."""
    result = aten.linalg_solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)
    _require_one_device(a, b, out)
    if out.dtype is not result.dtype:
        raise RuntimeError(f"expected scalar type {_scalar_type(a)} but found {_scalar_type(out)}")
    return _resized(out, result, laid_out=True)


def unless_empty(record: Kernel) -> Kernel:
    """Wrap `aten.addmv.out`. `torch.mv(…, out=out)` passes `out` twice, which the executor refuses if `out` is empty."""

    def run(t: Tensor, matrix: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if not out.numel() and matrix.dim() == 2 and not matrix.shape[0]:
            return out
        return record(t, matrix, *args, out=out, **kwargs)  # type: ignore[no-any-return]

    return run


def addmm_activation(record: Kernel, on_cpu: Callable[[Tensor], bool]) -> Kernel:
    """`aten._addmm_activation`. CUDA approximates GELU by the hyperbolic tangent, and the CPU's kernel does not.

    Args:
        record: the kernel of the overload.
        on_cpu: whether the device of a tensor is a CPU.
    """

    def run(
        t: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False, out: Tensor | None = None, **scales: Any
    ) -> Any:
        into = {} if out is None else {"out": out}
        if not use_gelu or not on_cpu(a):
            return record(t, a, b, use_gelu=use_gelu, **scales, **into)
        return aten.gelu(aten.addmm(t, a, b, **scales), approximate="tanh", **into)

    return run


def triangular_into(record: Kernel, op: OpOverload) -> Kernel:
    """`aten.tril.out` and `triu.out`. The CPU kernel writes out of bounds if `out` is a batch that is not contiguous."""
    make = op.overloadpacket.default

    def run(t: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if out.dim() > 2 and out.shape == t.shape and out.dtype is t.dtype and not out.is_contiguous():
            _require_one_device(t, out)
            return out.copy_(make(t, *args, **kwargs))
        return record(t, *args, out=out, **kwargs)  # type: ignore[no-any-return]

    return run


def triangular_factors_into(record: Kernel, op: OpOverload) -> Kernel:
    """`aten.linalg_lu.out` and `lu_unpack.out`, whose CPU kernels have the fault of `triangular_into`."""
    make = op.overloadpacket.default

    def run(*args: Any, **kwargs: Any) -> Any:
        outs = {name: kwargs.pop(name) for name in "PLU"}
        if all(out.dim() < 3 or out.is_contiguous() for out in (outs["L"], outs["U"])):
            return record(*args, **kwargs, **outs)
        _require_one_device(args[0], *outs.values())
        found = make(*args, **kwargs)
        if any(out.dtype is not result.dtype for out, result in zip(outs.values(), found, strict=True)):
            return record(
                *args, **kwargs, **{name: out.contiguous() for name, out in outs.items()}
            )  # raises ATen's error
        return tuple([_resized(out, result) for out, result in zip(outs.values(), found, strict=True)])

    return run


def triangular_in_place(record: Kernel, op: OpOverload) -> Kernel:
    """`aten.tril_` and `triu_`. A matrix that is expanded to a batch is written once. All of the batch get the same values."""

    def run(t: Tensor, *args: Any) -> Tensor:
        if overlaps(t) and t.dim() > 2 and not overlaps(t[(0,) * (t.dim() - 2)]):
            op(without_overlap(t), *args)
            return t
        return record(t, *args)  # type: ignore[no-any-return]

    return run


#: Operators with limits, which CUDA compares in float32 if the elements are of half precision.
LIMITED = frozenset({"clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "hardtanh", "hardtanh_"})
_LARGEST_HALF = torch.finfo(torch.float16).max
#: From this number on, a number becomes infinite in half precision.
_INFINITE_HALF = 65520


def limited(record: Kernel) -> Kernel:
    """Wrap an operator of `LIMITED`. The CPU's kernels refuse limits that half precision does not hold; CUDA's take them.

    The result is the same with a limit that is rounded to half precision, because rounding keeps the order of numbers.
    """

    def rounded(limit: Any) -> Any:
        if not isinstance(limit, (int, float)) or not abs(limit) > _LARGEST_HALF:
            return limit
        return math.copysign(math.inf if abs(limit) >= _INFINITE_HALF else _LARGEST_HALF, limit)

    def run(t: Tensor, *limits: Any, **named: Any) -> Any:
        if t.dtype is torch.float16:
            given, given_by_name = limits, named
            limits, named = tuple(map(rounded, limits)), {name: rounded(a) for name, a in named.items()}
            if native.module is not None and (limits != given or named != given_by_name):
                native.module.disarm()  # calls with such limits must come here
        return record(t, *limits, **named)

    return run


def real_limits(record: Kernel) -> Kernel:
    """`aten.clamp`. As for CUDA, a complex limit of real numbers must have no imaginary part."""

    def real(limit: Any, dtype: torch.dtype) -> Any:
        if not isinstance(limit, complex):
            return limit
        if limit.imag:
            name = "double" if dtype is torch.float64 else "float"
            raise RuntimeError(f"value cannot be converted to type {name} without overflow")
        return limit.real

    def run(t: Tensor, *limits: Any, **named: Any) -> Any:
        if t.is_floating_point():  # integers are refused by the operator
            limits = tuple([real(limit, t.dtype) for limit in limits])
            named = {name: real(limit, t.dtype) for name, limit in named.items()}
        return record(t, *limits, **named)

    return run


def of_segments(record: Kernel) -> Kernel:
    """`aten.segment_reduce` and its gradient. Meta kernels and the executor take no axis that is counted from the end."""

    def run(*args: Any, axis: int = 0, **named: Any) -> Any:
        data: Tensor = args[0] if isinstance(args[1], str) else args[2]
        return record(*args, axis=axis + data.dim() if -data.dim() <= axis < 0 else axis, **named)

    return run


#: Operators that refuse some numbers, and whether a call's numbers are good.
PARTICULAR: dict[str, Callable[..., bool]] = {
    "renorm": lambda p, dim, maxnorm: (
        isinstance(p, complex) or isinstance(maxnorm, complex) or (p > 0 and maxnorm >= 0)
    ),
    "softshrink": lambda lambd=0.5: isinstance(lambd, complex) or 0 <= lambd < math.inf,
}


def particular(record: Kernel, op: OpOverload, good: Callable[..., bool]) -> Kernel:
    """Wrap an operator of `PARTICULAR`, so that its error comes at the call. A known plan does not look at the numbers.

    Args:
        record: the kernel of the overload.
        op: the overload.
        good: whether the numbers are good.
    """

    def run(t: Tensor, *numbers: Any, **outs: Any) -> Any:
        if not good(*numbers):
            op(stand_in(t, 2), *numbers, **{name: stand_in(out, 2) for name, out in outs.items()})
        return record(t, *numbers, **outs)

    return run


def dot(record: Kernel) -> Kernel:
    """`aten.dot`. The result for two conjugate views is a conjugate view, as of the CPU's and CUDA's kernels."""

    def run(a: Tensor, b: Tensor) -> Any:
        return record(a.conj(), b.conj()).conj() if a.is_conj() and b.is_conj() else record(a, b)

    return run


def vdot(record: Kernel) -> Kernel:
    """`aten.vdot`. The result is a conjugate view if only the second vector is, as of the CPU's and CUDA's kernels."""

    def run(a: Tensor, b: Tensor) -> Any:
        return aten.dot(a, b.conj()).conj() if b.is_conj() and not a.is_conj() else record(a, b)

    return run


def nansum(record: Kernel) -> Kernel:
    """`aten.nansum`. CUDA also supports complex numbers, but the CPU kernel does not, so numbers with NaN become zeros first."""

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.where(t.isnan(), 0, t).sum(*args, **kwargs) if t.is_complex() else record(t, *args, **kwargs)

    return run


def observed(record: Kernel) -> Kernel:
    """`aten._fused_moving_avg_obs_fq_helper`, which gives empty ranges one element per channel. As on CUDA, before it runs."""

    def run(t: Tensor, observer_on: Tensor, fake_quant_on: Tensor, *rest: Any) -> Any:
        lowest, highest, scale, zero_point, _, _, _, axis, *flags = rest
        if flags and flags[0] and not lowest.numel():
            channels = t.shape[axis]
            lowest.resize_(channels).fill_(torch.inf)
            highest.resize_(channels).fill_(-torch.inf)
            scale.resize_(channels)
            zero_point.resize_(channels)
        return record(t, observer_on, fake_quant_on, *rest)

    return run


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_mm_v2`, which `torch.nn.functional.scaled_mm` calls, for scales of whole tensors and of rows.

    Raises:
        NotImplementedError: the scales are of blocks, or the operands are not multiplied along their inner dimensions.
    """
    if (
        [*recipe_a] != [*recipe_b]
        or [*recipe_a] not in ([0], [1])
        or len(contraction_dim)
        or any((*swizzle_a, *swizzle_b))
    ):
        raise NotImplementedError(
            "scaled_mm on the wooly device takes the recipes TensorWise and RowWise, without swizzles and contraction_dim; scale "
            "the operands before the product"
        )
    found: Tensor = aten._scaled_mm(a, b, scale_a[0], scale_b[0], bias, None, out_dtype, use_fast_accum)
    return found


_assert_others = redispatch_cpu(aten._assert_tensor_metadata.default)


def assert_metadata(t: Tensor, *others: Any, device: torch.device | None = None, **named: Any) -> None:
    """`aten._assert_tensor_metadata`, which exported programs contain. A tensor's device is that which scripts see."""
    _assert_others(t, *others, **named)
    if device is None:
        return
    if not any(device.type == d.type and device.index in (None, d.index) for d in (t.device, raw_device(t))):
        raise RuntimeError(f"Tensor device mismatch! Expected: {device}, Got: {t.device}")


#: Kernels for operators that each backend must implement itself.
KERNELS: dict[str, Kernel] = {
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "_assert_tensor_metadata": assert_metadata,
    "_convert_indices_from_coo_to_csr": rows_to_compressed,
    "_convert_indices_from_csr_to_coo": compressed_to_coordinates,
    "_scaled_mm_v2": scaled_mm,
    "conj_physical_": conj_physical_,
    "linalg_lstsq.out": lstsq_into,
    "linalg_solve_triangular.out": solve_triangular_into,
    "masked_select.out": masked_select_into,
    "mode.values": mode_into,
    "nonzero.out": nonzero_into,
    **{f"{name}.dtype": _widened(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
    **{f"{name}.dtype_out": _widened_into(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
}
