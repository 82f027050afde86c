"""Laws for normalisation, softmax and distances: statistics must have one element per channel or row."""

from __future__ import annotations

import math

import torch

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    all_of,
    backward_of,
    require,
    require_contiguous,
    require_count,
    require_no_overlap,
    require_optional_count,
    require_shape,
    same_shape,
)
from wooly_executor.runtime.torch_private import OpOverload, schema_of

aten = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels(given: Arguments) -> int:
    t = given["input"]
    require(t.dim() >= 2, f"input must have at least 2 dimensions, but it has {t.dim()}")
    return int(t.shape[1])


def _batch_norm(given: Arguments) -> None:
    n = _channels(given)
    require_optional_count(given, ("weight", "bias", "running_mean", "running_var"), n)
    if not given.get("training", True):
        for name in ("running_mean", "running_var"):
            require(given.get(name) is not None, f"{name} must be given if training is false")


def _batch_norm_backward(given: Arguments) -> None:
    n = _channels(given)
    require_shape(given, "grad_out", given["input"].shape)
    require(given["input"].numel() > 0, "input must not be empty")
    require_optional_count(given, ("weight", "running_mean", "running_var"), n)
    training = given["train"] if "train" in given else given["update"]
    saved = ("save_mean", "save_invstd" if "save_invstd" in given else "save_var")
    for name in saved if training else ("running_mean", "running_var"):
        require_count(given, name, n)


def _layer_norm_backward(given: Arguments) -> None:
    # PyTorch's own shape function would do, but its first call imports Dynamo, which stops the executor for two seconds.
    whole, last = given["input"].shape, list(given["normalized_shape"])
    rows = len(whole) - len(last)
    require(
        bool(last) and rows >= 0 and list(whole[rows:]) == last,
        f"normalized_shape must be the last dimensions of input ({list(whole)}), but it is {last}",
    )
    require_shape(given, "grad_out", whole)
    for name in ("weight", "bias"):
        if given[name] is not None:
            require_shape(given, name, last)
    for name in ("mean", "rstd"):
        require_count(given, name, math.prod(whole[:rows]))
        require_no_overlap(name, given[name])


def _group_norm(given: Arguments) -> None:
    """Require that weight and bias are contiguous, unless the library refuses the input first, or has nothing to compute.

    It checks all shapes. Since 2.14, it takes such an input, and reads weights with their strides.
    """
    layouts = (torch.contiguous_format, _CHANNELS_LAST.get(given["input"].dim(), torch.contiguous_format))
    if not given["input"].numel() or not any(given["input"].is_contiguous(memory_format=m) for m in layouts):
        return
    for name in ("weight", "bias"):
        if given[name] is not None:
            require_contiguous(name, given[name])


def _group_norm_backward(given: Arguments) -> None:
    whole, n, groups = given["input"], given["N"], given["group"]
    require_shape(given, "grad_out", whole.shape)
    for name in ("grad_out", "input"):
        require_no_overlap(name, given[name])
    require(
        min(n, given["C"], given["HxW"]) >= 0 and n * given["C"] * given["HxW"] == whole.numel(),
        f"N * C * HxW must be the number of elements of input ({whole.numel()})",
    )
    require(groups > 0 and given["C"] % groups == 0, "group must divide C")
    require_optional_count(given, ("weight",), given["C"])
    if given["weight"] is not None:
        require_contiguous("weight", given["weight"])
    for name in ("mean", "rstd"):
        require_count(given, name, n * groups)
        require_no_overlap(name, given[name])


def _weight_norm(v: str, *norms: str) -> Check:
    def check(given: Arguments) -> None:
        t, dim = given[v], given["dim"]
        require(
            t.numel() > 0 and dim in (0, t.dim() - 1),
            f"{v} must not be empty, and dim must be its first or last dimension",
        )
        for name in norms:
            require_count(given, name, t.shape[dim])
        for name in (v, *norms):
            require_no_overlap(name, given[name])

    return check


def _some_rows(given: Arguments) -> None:
    require(given["self"].shape[0] > 0, "self must have at least 1 row")


def _gradient_of(op: OpOverload) -> str:
    """Name of the first argument, which is the gradient: `grad`, and `grad_output` since torch 2.14."""
    return schema_of(op).arguments[0].name


def _masked(given: Arguments) -> None:
    t, kind = given["self"], given["mask_type"]
    require(kind not in (0, 1) or t.dim() >= 2, "self must have at least 2 dimensions")
    if given["mask"].shape == t.shape:  # ATen takes such a mask for one of kind 2
        return
    require_shape(
        given, "mask", {0: t.shape[-2:], 1: [t.shape[0], t.shape[-1]]}.get(kind, t.shape) if t.dim() else t.shape
    )


LAWS: dict[str, ArgumentLaw] = {
    "gelu_backward": ArgumentLaw(same_shape("self", "grad_output")),
    "_softmax_backward_data": ArgumentLaw(same_shape("grad_output", "output")),
    "_log_softmax_backward_data": ArgumentLaw(same_shape("grad_output", "output")),
    "_masked_softmax": ArgumentLaw(_masked),
    "_masked_softmax_backward": ArgumentLaw(same_shape("grad_output", "output", "mask")),
    "_cdist_backward": ArgumentLaw(
        backward_of(aten._cdist_forward.default, cdist=0, **{_gradient_of(aten._cdist_backward.default): 0})
    ),
    "_pdist_backward": ArgumentLaw(
        all_of(
            backward_of(aten._pdist_forward.default, pdist=0, **{_gradient_of(aten._pdist_backward.default): 0}),
            _some_rows,
        )
    ),
    "native_batch_norm": ArgumentLaw(_batch_norm),
    "_native_batch_norm_legit": ArgumentLaw(_batch_norm),
    "_batch_norm_with_update": ArgumentLaw(_batch_norm),
    "batch_norm_update_stats": ArgumentLaw(_batch_norm),
    "native_batch_norm_backward": ArgumentLaw(_batch_norm_backward),
    "batch_norm_backward": ArgumentLaw(_batch_norm_backward),
    "native_layer_norm_backward": ArgumentLaw(_layer_norm_backward),
    "native_group_norm": ArgumentLaw(_group_norm),
    "native_group_norm_backward": ArgumentLaw(_group_norm_backward),
    "_weight_norm_interface": ArgumentLaw(_weight_norm("v", "g")),
    "_weight_norm_interface_backward": ArgumentLaw(
        all_of(_weight_norm("saved_v", "saved_g", "saved_norms"), same_shape("saved_v", "grad_w"))
    ),
}
