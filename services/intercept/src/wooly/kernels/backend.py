"""Kernels for operators that each backend must implement itself, and for cases that CUDA has and the CPU's kernel lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wooly.devices import mixed_devices
from wooly.kernels.schema import Kernel
from wooly.kernels.sparse.compression import compressed_to_coordinates, rows_to_compressed
from wooly.kernels.trials import stand_in
from wooly.storage import span
from wooly.torch_private import OpOverloadPacket, alert_not_deterministic, raw_device, warn_of_resize

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
    return torch.empty(0, dtype=t.dtype).type().removeprefix("torch.").removesuffix("Tensor")


def histc(record: Kernel) -> Kernel:
    """`aten.histc`. CUDA also supports integers, but the CPU kernel does not, so integers are converted to doubles."""

    def run(t: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
        if t.is_floating_point():
            alert_not_deterministic("_histc_cuda with floating point input")
            return record(t, bins, min, max)
        if t.is_complex() or t.dtype is torch.bool:
            return record(t, bins, min, max)
        return record(t.double(), bins, min, max).to(t.dtype)

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


def efficient_zero(size: Any, **options: Any) -> Tensor:
    """`aten._efficientzerotensor`, which derivatives use for zeros. Here it is an ordinary tensor of zeros."""
    return torch.zeros(size, **options)


#: Kernels for operators that each backend must implement itself.
KERNELS: dict[str, Kernel] = {
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "_convert_indices_from_coo_to_csr": rows_to_compressed,
    "_convert_indices_from_csr_to_coo": compressed_to_coordinates,
    "_efficientzerotensor": efficient_zero,
    "_lazy_clone": torch.clone,
    "conj_physical_": conj_physical_,
    "linalg_lstsq.out": lstsq_into,
    "masked_select.out": masked_select_into,
    "mode.values": mode_into,
    "nonzero.out": nonzero_into,
    **{f"{name}.dtype": _widened(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
    **{f"{name}.dtype_out": _widened_into(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
}
