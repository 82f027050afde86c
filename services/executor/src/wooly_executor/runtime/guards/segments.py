"""Embedding bags and segments: indices within the table, bags and segments in order."""

from __future__ import annotations

from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    counted,
    optional,
    require,
    sized,
    within,
)


def _in_order(name: str, t: Tensor, most: int) -> None:
    """Values begin at 0 or later, do not fall, and end at `most` or earlier."""
    within(name, t, 0, most + 1)
    require(t.shape[-1] < 2 or not bool((t[..., 1:] < t[..., :-1]).any()), f"{name} must not fall")


def _bag_shapes(given: Arguments) -> None:
    indices, offsets = given["indices"], given["offsets"]
    for name, t, dims in (("weight", given["weight"], 2), ("indices", indices, 1), ("offsets", offsets, 1)):
        require(t.dim() == dims, f"{name} must have {dims} dimensions, it has {t.dim()}")
    require(not given["include_last_offset"] or offsets.numel() > 0, "include_last_offset: there must be an offset")
    optional(given, ("per_sample_weights",), indices.numel())


def _bag_offsets(given: Arguments) -> None:
    """Bags begin at the first index, in order, and there is one for every index."""
    offsets, n = given["offsets"], given["indices"].numel()
    _in_order("offsets", offsets, n)
    require(not n or (offsets.numel() > 0 and int(offsets[0]) == 0), "offsets must begin with 0")


def _bag_values(given: Arguments) -> None:
    _bag_offsets(given)
    within("indices", given["indices"], 0, int(given["weight"].shape[0]))


def _bag_backward_shapes(given: Arguments) -> None:
    grad, indices, bags = given["grad"], given["indices"], given["offset2bag"]
    require(grad.dim() == 2 and indices.dim() == 1, "grad must have 2 dimensions, indices 1")
    require(bags.numel() in (0, indices.numel()), f"offset2bag must be of {indices.numel()} indices")
    require("offsets" in given or bags.numel() == indices.numel(), f"offset2bag must be of {indices.numel()} indices")
    if "weight" in given:
        require(given["weight"].dim() == 2, "weight must have 2 dimensions")
        sized(given, "grad", [grad.shape[0], given["weight"].shape[1]])
    optional(given, ("per_sample_weights",), indices.numel())
    if given["mode"] == 2 and "maximum_indices" in given:
        sized(given, "maximum_indices", grad.shape)
    if "bag_size" in given:
        counted(given, "bag_size", grad.shape[0])


def _bag_backward_values(given: Arguments) -> None:
    bags = int(given["grad"].shape[0])
    rows = int(given["weight"].shape[0]) if "weight" in given else given["num_weights"]
    within("indices", given["indices"], 0, rows)
    within("offset2bag", given["offset2bag"], 0, bags)
    if "offsets" in given and not given["offset2bag"].numel():
        _bag_offsets(given)
        require(given["offsets"].numel() <= bags + 1, f"offsets must be of {bags} bags")
    if given["mode"] == 2 and "maximum_indices" in given:
        within("maximum_indices", given["maximum_indices"], -1, rows)


def _segments(given: Arguments) -> int:
    """How many, where the shapes go together."""
    data, lengths, offsets = given["data"], given["lengths"], given["offsets"]
    require((lengths is None) is not (offsets is None), "either lengths or offsets must be given")
    axis = given["axis"]
    require(0 <= axis < data.dim(), f"axis must lie between 0 and {data.dim() - 1}")
    name, t = ("lengths", lengths) if offsets is None else ("offsets", offsets)
    require(t.dim() == axis + 1, f"{name} must have {axis + 1} dimensions")
    sized(given, name, [*data.shape[:axis], t.shape[-1]])
    n = int(t.shape[-1]) - (offsets is not None)
    require(n >= 0, "offsets must have an element")
    return n


def _reduced_segments(given: Arguments) -> None:
    _segments(given)


def _segments_backward(given: Arguments) -> None:
    n, axis, data = _segments(given), given["axis"], given["data"]
    for name in ("grad", "output"):
        sized(given, name, [*data.shape[:axis], n, *data.shape[axis + 1 :]])


def _segment_values(given: Arguments) -> None:
    most = int(given["data"].shape[given["axis"]])
    if given["offsets"] is not None:
        _in_order("offsets", given["offsets"], most)
        return
    lengths = given["lengths"]
    within("lengths", lengths, 0, most + 1)
    require(not lengths.numel() or int(lengths.sum(-1).max()) <= most, f"lengths must sum to {most}")


def _by_frequency(given: Arguments, form: Form) -> bool:
    return given["scale_grad_by_freq"] is not False


def _rows(given: Arguments) -> None:
    within("indices", given["indices"], 0, given["num_weights"])


LAWS: dict[str, ArgumentLaw] = {
    "embedding_dense_backward": ArgumentLaw(None, _rows, applies=_by_frequency),
    "_embedding_bag": ArgumentLaw(_bag_shapes, _bag_values),
    "_embedding_bag_forward_only": ArgumentLaw(_bag_shapes, _bag_values),
    "_embedding_bag_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_dense_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_per_sample_weights_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "segment_reduce": ArgumentLaw(_reduced_segments, _segment_values),
    "_segment_reduce_backward": ArgumentLaw(_segments_backward, _segment_values),
}
