"""Protects a GPU from operands that are out of range: indices and probabilities.

The CPU's library checks these operands and raises. On a GPU, nothing checks them before the kernel runs. The kernel asserts,
which ends the context and all sessions, or it writes out of bounds. Therefore such an operand is clamped into its range before
the operator reads it, without waiting for the device, and a status word on the device records the violation. A run that finds its
word set has failed at that instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.guards.law import Arguments, arguments_of
from wooly_executor.runtime.torch_private import OpOverload, schema_of

_INDEX = "index out of range in self"
_PROBABILITY = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."


class Word:
    """The status word in which an instruction records that an operand was out of range.

    Args:
        why: the exception that the CPU's library raises in this case.

    Attributes:
        memory: one int32 on the device, 0 while nothing is wrong; set before the first run.
    """

    __slots__ = ("memory", "why")

    def __init__(self, why: Exception) -> None:
        self.why = why
        self.memory: Tensor | None = None

    def note(self, wrong: Tensor) -> None:
        """Record a violation if `wrong` (one bool) is true."""
        assert self.memory is not None
        self.memory.add_(wrong)


#: Returns the arguments that replace those of a call, by name.
Rule = Callable[[Arguments, Word], dict[str, Any]]


def in_range(op: OpOverload, do: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `do` with a range check of the operands of `op`; None if the operator needs no check."""
    found = _RULES.get(op.overloadpacket.__name__) if op.namespace == "aten" else None
    if found is None:
        return None
    rule, why = found
    word = Word(why)
    names = [a.name for a in schema_of(op).arguments]
    at, defaults = {name: k for k, name in enumerate(names)}, arguments_of(op, (), {})

    def run(*args: Any, **kwargs: Any) -> Any:
        changed = rule({**defaults, **dict(zip(names, args)), **kwargs}, word)  # noqa: B905 - the last ones have defaults
        values = list(args)
        for name, value in changed.items():
            if at[name] < len(values):
                values[at[name]] = value
            elif name in kwargs:
                kwargs[name] = value
        return do(*values, **kwargs)

    run.word = word  # type: ignore[attr-defined]
    run.checks_values = op.overloadpacket.__name__ not in _PARTLY  # type: ignore[attr-defined]
    return run


def word_of(call: LibraryCall) -> Word | None:
    """Return the status word of a call, or None."""
    return getattr(call.instead, "word", None)


def _clamped(t: Any, low: float, high: float, word: Word, exempt: int | None = None) -> Any:
    """Replace each element outside [low, high] by one inside, except for elements equal to `exempt`. A NaN is outside.

    Raises:
        IndexError: the range is empty, and there are elements.
    """
    if not isinstance(t, Tensor) or not t.numel():
        return t  # the library checks plain numbers itself
    if high < low:
        raise IndexError(_INDEX)
    if exempt is None and not t.is_floating_point():  # four launches instead of eight
        nearest = t.clamp(low, high)
        word.note((nearest != t).any())
        return nearest
    inside = (t >= low) & (t <= high)
    if exempt is not None:
        inside |= t == exempt
    word.note(~inside.all())
    return torch.where(inside, t, torch.full((), low, dtype=t.dtype, device=t.device))


def _indexed(given: Arguments, word: Word) -> dict[str, Any]:
    """Check a list with one index per dimension. A mask stands for as many dimensions as it has."""
    sizes, kept, dim = given["self"].shape, [], 0
    for index in given["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            index = _clamped(index, -sizes[dim], sizes[dim] - 1, word)
            dim += 1
        kept.append(index)
    return {"indices": kept}


def _along(name: str = "index", *, negative: bool = False) -> Rule:
    """Check indices along `dim`."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        own = given["self"]
        n = own.shape[given["dim"]] if own.dim() else 1
        return {name: _clamped(given[name], -n if negative else 0, n - 1, word)}

    return rule


def _flat(given: Arguments, word: Word) -> dict[str, Any]:
    """Check indices into the flattened tensor."""
    n = given["self"].numel()
    return {"index": _clamped(given["index"], -n, n - 1, word)}


def _rows(table: str) -> Rule:
    """Check indices of a table's rows."""
    return lambda given, word: {"indices": _clamped(given["indices"], 0, given[table].shape[0] - 1, word)}


def _rows_of_gradient(given: Arguments, word: Word) -> dict[str, Any]:
    high, exempt = int(given["num_weights"]) - 1, int(given["padding_idx"])
    return {"indices": _clamped(given["indices"], 0, high, word, exempt if exempt < 0 else None)}


def _classes(low: int = 0) -> Rule:
    """Check class numbers. Floating-point targets are probabilities and are not checked."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        own, target = given["self"], given["target"]
        if target.is_floating_point():
            return {}
        n = own.shape[1] if own.dim() > 1 else own.numel()
        return {"target": _clamped(target, low, n - 1, word, given.get("ignore_index"))}

    return rule


def _labels(given: Arguments, word: Word) -> dict[str, Any]:
    """Check class numbers along the last dimension, in which -1 marks the end."""
    own = given["self"]
    return {"target": _clamped(given["target"], -1, (own.shape[-1] if own.dim() else 1) - 1, word)}


def _between(low: float, high: float, *names: str) -> Rule:
    return lambda given, word: {name: _clamped(given[name], low, high, word) for name in names}


def _weights(given: Arguments, word: Word) -> dict[str, Any]:
    """Check that each row has only finite, non-negative weights, and at least one positive weight."""
    own = given["self"]
    if not own.numel():
        return {}
    fine = ((own >= 0) & (own < math.inf)).all(-1, keepdim=True)
    fine &= own.sum(-1, keepdim=True) > 0
    word.note(~fine.all())
    return {"self": torch.where(fine, own, torch.ones((), dtype=own.dtype, device=own.device))}


def _places(dims: int) -> Rule:
    """Check positions in the last dimensions of the result."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        return {"indices": _clamped(given["indices"], 0, math.prod(given["output_size"][-dims:]) - 1, word)}

    return rule


def _pooled(dims: int) -> Rule:
    """Check positions in the pooled dimensions of the input."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        return {"indices": _clamped(given["indices"], 0, math.prod(given["self"].shape[-dims:]) - 1, word)}

    return rule


def _enough_source_elements(given: Arguments, word: Word) -> dict[str, Any]:
    """Check that there are as many source elements as the mask selects."""
    mask = given["mask"]
    short = mask.expand(torch.broadcast_shapes(mask.shape, given["self"].shape)).sum() > given["source"].numel()
    word.note(short)
    return {"mask": mask & ~short}


def _group_ends(given: Arguments, word: Word) -> dict[str, Any]:
    """Check that the ends of the groups do not decrease, and lie within what is grouped: rows, columns or inner elements."""
    left, right, ends = given["self"], given["mat2"], given["offs"]
    if not isinstance(ends, Tensor) or not ends.numel():
        return {}
    most = left.shape[-1] if left.dim() == right.dim() == 2 else left.shape[0] if left.dim() == 2 else right.shape[-1]
    nearest = ends.clamp(0, most).cummax(0).values.to(ends.dtype)
    word.note((nearest != ends).any())
    return {"offs": nearest}


def _asserted(given: Arguments, word: Word) -> dict[str, Any]:
    own = given["self"]
    word.note(~own.to(torch.bool).all())
    return {"self": torch.ones_like(own)}


def _repeats(given: Arguments, word: Word) -> dict[str, Any]:
    """Check numbers of repetitions. The output size is computed from them, and the given one is ignored. Their sum must not
    overflow.
    """
    repeats = given["repeats"]
    most = min(torch.iinfo(repeats.dtype).max, (1 << 62) // max(repeats.numel(), 1))
    return {
        "repeats": _clamped(repeats, 0, most, word),
        "output_size": None,
    }


#: Operators whose law (`guards`) also checks what no rule checks, on the host: the sum of repeats, and a negative index that a
#: negative `padding_idx` exempts.
_PARTLY = frozenset({"repeat_interleave", "embedding_dense_backward"})
_RULES: dict[str, tuple[Rule, Exception]] = {
    name: (rule, why)
    for names, rule, why in (
        ("index index_put index_put_ _index_put_impl_", _indexed, IndexError(_INDEX)),
        (
            "index_select index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ gather scatter scatter_ "
            "scatter_add scatter_add_ scatter_reduce scatter_reduce_",
            _along(),
            IndexError(_INDEX),
        ),
        ("index_fill index_fill_", _along(negative=True), IndexError(_INDEX)),
        ("take put_", _flat, IndexError(_INDEX)),
        ("embedding", _rows("weight"), IndexError(_INDEX)),
        ("embedding_renorm_", _rows("self"), IndexError(_INDEX)),
        ("embedding_dense_backward", _rows_of_gradient, IndexError(_INDEX)),
        (
            "nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward cross_entropy_loss",
            _classes(),
            IndexError("Target is out of bounds."),
        ),
        ("multi_margin_loss multi_margin_loss_backward", _classes(), RuntimeError("target out of range")),
        (
            "multilabel_margin_loss_forward multilabel_margin_loss_backward",
            _labels,
            RuntimeError("target out of range"),
        ),
        (
            "max_pool2d_with_indices_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward",
            _pooled(2),
            RuntimeError("found an invalid max index"),
        ),
        (
            "max_pool3d_with_indices_backward adaptive_max_pool3d_backward fractional_max_pool3d_backward",
            _pooled(3),
            RuntimeError("found an invalid max index"),
        ),
        (
            "binary_cross_entropy",
            _between(0, 1, "self", "target"),
            RuntimeError("all elements of input and target should be between 0 and 1"),
        ),
        ("bernoulli_", _between(0, 1, "p"), RuntimeError(_PROBABILITY)),
        ("bernoulli", _between(0, 1, "self"), RuntimeError(_PROBABILITY)),
        (
            "poisson",
            _between(0, math.inf, "self"),
            RuntimeError("invalid Poisson rate, expected rate to be non-negative"),
        ),
        (
            "multinomial",
            _weights,
            RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or a row of zeros"),
        ),
        ("max_unpool2d", _places(2), RuntimeError("found an invalid max index")),
        ("max_unpool3d", _places(3), RuntimeError("found an invalid max index")),
        (
            "masked_scatter_",
            _enough_source_elements,
            RuntimeError("Number of elements of source < number of ones in mask"),
        ),
        (
            "_grouped_mm",
            _group_ends,
            IndexError("the ends of the groups must not decrease, and must be within the matrix"),
        ),
        ("_functional_assert_async", _asserted, RuntimeError("an assertion of the script failed")),
        ("repeat_interleave", _repeats, RuntimeError("repeats can not be negative")),
    )
    for name in names.split()
}
