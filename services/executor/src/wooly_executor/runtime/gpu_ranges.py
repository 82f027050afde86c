"""What a GPU's library does not survive: indices and probabilities out of range.

The host's library looks at them and raises. On a GPU nobody looks before the kernel runs: it asserts, which ends the context and
with it all sessions, or it writes where the index points. So such an operand is put in range before the operator sees it, without
waiting for the device, and a word on the device remembers that it had to be. The run that finds its word set has failed there.
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
    """Where an instruction says that an operand was out of range.

    Args:
        why: what the library of a host raises then.

    Attributes:
        memory: one int32 on the device, 0 while nothing is wrong; given before the first run.
    """

    __slots__ = ("memory", "why")

    def __init__(self, why: Exception) -> None:
        self.why = why
        self.memory: Tensor | None = None

    def note(self, wrong: Tensor) -> None:
        """It was, if `wrong` (one bool) holds."""
        assert self.memory is not None
        self.memory.add_(wrong)


#: The arguments that a call must have instead of those it was given, by name.
Rule = Callable[[Arguments, Word], dict[str, Any]]


def in_range(op: OpOverload, do: Callable[..., Any]) -> Callable[..., Any] | None:
    """`do` with the operands of `op` put in range; None: no operand of its has a range."""
    found = _RULES.get(op.overloadpacket.__name__)
    if found is None:
        return None
    rule, why = found
    word = Word(why)
    names = [a.name for a in schema_of(op).arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        changed = rule(arguments_of(op, args, kwargs), word)
        return do(
            *[changed.get(name, a) for name, a in zip(names, args, strict=False)],
            **{name: changed.get(name, a) for name, a in kwargs.items()},
        )

    run.word = word  # type: ignore[attr-defined]
    return run


def word_of(call: LibraryCall) -> Word | None:
    """Where a call says that an operand was out of range; None: it never says so."""
    return getattr(call.instead, "word", None)


def _kept(t: Any, low: float, high: float, word: Word, exempt: int | None = None) -> Any:
    """A tensor with `low` for each element outside [low, high], but for those equal to `exempt`. A NaN is outside.

    Raises:
        IndexError: nothing is inside, and there are elements.
    """
    if not isinstance(t, Tensor) or not t.numel():
        return t  # a number is looked at by the library
    if high < low:
        raise IndexError(_INDEX)
    inside = (t >= low) & (t <= high)
    if exempt is not None:
        inside |= t == exempt
    word.note(~inside.all())
    return torch.where(inside, t, torch.full((), low, dtype=t.dtype, device=t.device))


def _indexed(given: Arguments, word: Word) -> dict[str, Any]:
    """A list of indices, one for a dimension; a mask is one for as many as it has."""
    sizes, kept, dim = given["self"].shape, [], 0
    for index in given["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            index = _kept(index, -sizes[dim], sizes[dim] - 1, word)
            dim += 1
        kept.append(index)
    return {"indices": kept}


def _along(name: str = "index", *, negative: bool = False) -> Rule:
    """Indices along `dim`."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        own = given["self"]
        n = own.shape[given["dim"]] if own.dim() else 1
        return {name: _kept(given[name], -n if negative else 0, n - 1, word)}

    return rule


def _flat(given: Arguments, word: Word) -> dict[str, Any]:
    """Indices of all elements, in order."""
    n = given["self"].numel()
    return {"index": _kept(given["index"], -n, n - 1, word)}


def _rows(table: str) -> Rule:
    """Indices of a table's rows."""
    return lambda given, word: {"indices": _kept(given["indices"], 0, given[table].shape[0] - 1, word)}


def _rows_of_gradient(given: Arguments, word: Word) -> dict[str, Any]:
    high, exempt = int(given["num_weights"]) - 1, int(given["padding_idx"])
    return {"indices": _kept(given["indices"], 0, high, word, exempt if exempt < 0 else None)}


def _classes(low: int = 0) -> Rule:
    """Numbers of classes. Targets of floats are probabilities, which may be any."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        own, target = given["self"], given["target"]
        if target.is_floating_point():
            return {}
        n = own.shape[1] if own.dim() > 1 else own.numel()
        return {"target": _kept(target, low, n - 1, word, given.get("ignore_index"))}

    return rule


def _labels(given: Arguments, word: Word) -> dict[str, Any]:
    """Numbers of classes, along the last dimension; -1 ends them."""
    own = given["self"]
    return {"target": _kept(given["target"], -1, (own.shape[-1] if own.dim() else 1) - 1, word)}


def _between(low: float, high: float, *names: str) -> Rule:
    return lambda given, word: {name: _kept(given[name], low, high, word) for name in names}


def _weights(given: Arguments, word: Word) -> dict[str, Any]:
    """Rows of numbers, none of them negative or without end, and not all 0."""
    own = given["self"]
    if not own.numel():
        return {}
    fine = ((own >= 0) & (own < math.inf)).all(-1, keepdim=True)
    fine &= own.sum(-1, keepdim=True) > 0
    word.note(~fine.all())
    return {"self": torch.where(fine, own, torch.ones((), dtype=own.dtype, device=own.device))}


def _places(dims: int) -> Rule:
    """Places in the last dimensions of the result."""

    def rule(given: Arguments, word: Word) -> dict[str, Any]:
        return {"indices": _kept(given["indices"], 0, math.prod(given["output_size"][-dims:]) - 1, word)}

    return rule


def _enough(given: Arguments, word: Word) -> dict[str, Any]:
    """As many elements as the mask asks for."""
    mask = given["mask"]
    short = mask.expand(torch.broadcast_shapes(mask.shape, given["self"].shape)).sum() > given["source"].numel()
    word.note(short)
    return {"mask": mask & ~short}


def _asserted(given: Arguments, word: Word) -> dict[str, Any]:
    own = given["self"]
    word.note(~own.to(torch.bool).all())
    return {"self": torch.ones_like(own)}


def _repeats(given: Arguments, word: Word) -> dict[str, Any]:
    """How often; their sum is asked of the device, whatever it was said to be."""
    return {"repeats": _kept(given["repeats"], 0, torch.iinfo(given["repeats"].dtype).max, word), "output_size": None}


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
        ("nll_loss_forward nll_loss2d_forward cross_entropy_loss", _classes(), IndexError("Target is out of bounds.")),
        ("multi_margin_loss", _classes(), RuntimeError("target out of range")),
        ("multilabel_margin_loss_forward", _labels, RuntimeError("target out of range")),
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
        ("masked_scatter_", _enough, RuntimeError("Number of elements of source < number of ones in mask")),
        ("_functional_assert_async", _asserted, RuntimeError("an assertion of the script does not hold")),
        ("repeat_interleave", _repeats, RuntimeError("repeats can not be negative")),
    )
    for name in names.split()
}
