"""Laws for embedding bags and segments: indices lie within the table, and offsets are in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    require,
    require_contiguous,
    require_count,
    require_optional_count,
    require_range,
    require_shape,
)


def _in_order(name: str, t: Tensor, most: int) -> None:
    """Require that the values are between 0 and `most` and do not decrease."""
    require_range(name, t, 0, most + 1)
    require(t.shape[-1] < 2 or not bool((t[..., 1:] < t[..., :-1]).any()), f"{name} must not decrease")


#: No result has more elements: more would not fit into any memory.
_MOST_REPEATED = 1 << 48


def _bag_shapes(given: Arguments) -> None:
    indices, offsets = given["indices"], given["offsets"]
    for name, t, dims in (("weight", given["weight"], 2), ("indices", indices, 1), ("offsets", offsets, 1)):
        require(t.dim() == dims, f"{name} must have {dims} dimensions, but it has {t.dim()}")
    for name in ("indices", "offsets"):
        require_contiguous(name, given[name])
    require(
        not given["include_last_offset"] or offsets.numel() > 0,
        "offsets must not be empty if include_last_offset is true",
    )
    require_optional_count(given, ("per_sample_weights",), indices.numel())


def _bag_offsets(given: Arguments) -> None:
    """Require that the first bag begins at index 0, that offsets do not decrease, and that every index belongs to a bag."""
    offsets, n = given["offsets"], given["indices"].numel()
    _in_order("offsets", offsets, n)
    require(not n or (offsets.numel() > 0 and int(offsets[0]) == 0), "the first element of offsets must be 0")


def _bag_values(given: Arguments) -> None:
    _bag_offsets(given)
    require_range("indices", given["indices"], 0, int(given["weight"].shape[0]))


def _bag_backward_shapes(given: Arguments) -> None:
    grad, indices, bags = given["grad"], given["indices"], given["offset2bag"]
    require(grad.dim() == 2 and indices.dim() == 1, "grad must have 2 dimensions, and indices must have 1")
    require(bags.numel() in (0, indices.numel()), f"offset2bag must have one element per index ({indices.numel()})")
    require(
        "offsets" in given or bags.numel() == indices.numel(),
        f"offset2bag must have one element per index ({indices.numel()})",
    )
    if "weight" in given:
        require(given["weight"].dim() == 2, "weight must have 2 dimensions")
        require_shape(given, "grad", [grad.shape[0], given["weight"].shape[1]])
    require_optional_count(given, ("per_sample_weights",), indices.numel())
    if given["mode"] == 2 and "maximum_indices" in given:
        require_shape(given, "maximum_indices", grad.shape)
    if "bag_size" in given:
        require_count(given, "bag_size", grad.shape[0])
    for name in ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices"):
        if name in given:
            require_contiguous(name, given[name])


def _bag_backward_values(given: Arguments) -> None:
    bags = int(given["grad"].shape[0])
    rows = int(given["weight"].shape[0]) if "weight" in given else given["num_weights"]
    require_range("indices", given["indices"], 0, rows)
    require_range("offset2bag", given["offset2bag"], 0, bags)
    if "offsets" in given and not given["offset2bag"].numel():
        _bag_offsets(given)
        # The library counts the bag of an index from the offsets. An offset at the end of the indices begins no bag.
        begun = int((given["offsets"] < given["indices"].numel()).sum())
        require(begun <= bags, f"offsets must begin at most {bags} bags, the rows of grad, but they begin {begun}")
    if given["mode"] == 2 and "maximum_indices" in given:
        require_range("maximum_indices", given["maximum_indices"], -1, rows)


def _segments(given: Arguments) -> int:
    """Check the shapes, and return the number of segments."""
    data, lengths, offsets = given["data"], given["lengths"], given["offsets"]
    require((lengths is None) is not (offsets is None), "exactly one of lengths and offsets must be given")
    axis = given["axis"]
    require(0 <= axis < data.dim(), f"axis must be between 0 and {data.dim() - 1}")
    name, t = ("lengths", lengths) if offsets is None else ("offsets", offsets)
    require(t.dim() == axis + 1, f"{name} must have {axis + 1} dimensions")
    require_shape(given, name, [*data.shape[:axis], t.shape[-1]])
    n = int(t.shape[-1]) - (offsets is not None)
    require(n >= 0, "offsets must not be empty")
    return n


def _reduced_segments(given: Arguments) -> None:
    _segments(given)


def _segments_backward(given: Arguments) -> None:
    n, axis, data = _segments(given), given["axis"], given["data"]
    for name in ("grad", "output"):
        require_shape(given, name, [*data.shape[:axis], n, *data.shape[axis + 1 :]])


def _segment_values(given: Arguments) -> None:
    most = int(given["data"].shape[given["axis"]])
    if given["offsets"] is not None:
        _in_order("offsets", given["offsets"], most)
        return
    lengths = given["lengths"]
    require_range("lengths", lengths, 0, most + 1)
    require(not lengths.numel() or int(lengths.sum(-1).max()) <= most, f"the sum of lengths must be at most {most}")


def _repeated(given: Arguments) -> None:
    """Require numbers of repetitions whose sum does not overflow. The kernel writes as many elements as each says."""
    repeats = given["repeats"]
    if repeats.numel() and not repeats.is_floating_point():
        require(int(repeats.min()) >= 0, "repeats can not be negative")
        total = float(repeats.sum(dtype=torch.float64))
        require(total < _MOST_REPEATED, f"the sum of repeats is {total:.3g}, but at most {_MOST_REPEATED} elements fit")


def _by_frequency(given: Arguments, form: Form) -> bool:
    return given["scale_grad_by_freq"] is not False


def _repeats_indices(given: Arguments, form: Form) -> bool:
    """Whether the call is the overload that makes indices. The other overloads call it."""
    return "self" not in given


def _rows(given: Arguments) -> None:
    require_range("indices", given["indices"], 0, given["num_weights"])


LAWS: dict[str, ArgumentLaw] = {
    "embedding_dense_backward": ArgumentLaw(None, _rows, applies=_by_frequency),
    "_embedding_bag": ArgumentLaw(_bag_shapes, _bag_values),
    "_embedding_bag_forward_only": ArgumentLaw(_bag_shapes, _bag_values),
    "_embedding_bag_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_dense_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_per_sample_weights_backward": ArgumentLaw(_bag_backward_shapes, _bag_backward_values),
    "repeat_interleave": ArgumentLaw(None, _repeated, applies=_repeats_indices),
    "segment_reduce": ArgumentLaw(_reduced_segments, _segment_values),
    "_segment_reduce_backward": ArgumentLaw(_segments_backward, _segment_values),
}
