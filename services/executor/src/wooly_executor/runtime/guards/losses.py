"""Laws for loss functions: each sample has a target, and the target is a valid class."""

from __future__ import annotations

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    numbers_of,
    require,
    require_contiguous,
    require_count,
    require_optional_count,
    require_range,
    require_shape,
)


def _reduced(given: Arguments, n: int) -> None:
    """Require that `grad_output` has `n` elements if the loss is not reduced, and 1 element otherwise."""
    require_count(given, "grad_output", n if given["reduction"] == 0 else 1)


def _samples(given: Arguments) -> int:
    t = given["self"]
    require(t.dim() <= 2, f"self must have at most 2 dimensions, but it has {t.dim()}")
    return int(t.shape[0]) if t.dim() == 2 else 1


def _class_count(given: Arguments) -> int:
    t = given["self"]
    return int(t.shape[-1]) if t.dim() else 1


def _margin_backward(given: Arguments) -> None:
    n = _samples(given)
    require_count(given, "target", n)
    require_optional_count(given, ("weight",), _class_count(given))
    _reduced(given, n)


def _multilabel_backward(given: Arguments) -> None:
    n = _samples(given)
    for name in ("target", "is_target"):
        require_count(given, name, given["self"].numel())
    _reduced(given, n)


def _nll_backward(given: Arguments) -> None:
    n = _samples(given)
    require_count(given, "target", n)
    require_optional_count(given, ("weight",), _class_count(given))
    require_count(given, "total_weight", 1)
    _reduced(given, n)


def _nll2d_backward(given: Arguments) -> None:
    t = given["self"]
    require(t.dim() == 4, f"self must have 4 dimensions, but it has {t.dim()}")
    require_shape(given, "target", [t.shape[0], *t.shape[2:]])
    require_optional_count(given, ("weight",), t.shape[1])
    require_count(given, "total_weight", 1)
    _reduced(given, given["target"].numel())


def _classes(given: Arguments) -> None:
    """Require that each target is a class number or `ignore_index`."""
    t, target = given["self"], given["target"]
    classes = _class_count(given) if t.dim() <= 2 else int(t.shape[1])
    require_range("target", target[target != given["ignore_index"]], 0, classes)


def _labels(given: Arguments) -> None:
    require_range("target", given["target"], -1, _class_count(given))


def _one_class_each(given: Arguments) -> None:
    require_range("target", given["target"], 0, _class_count(given))


def _ctc_shapes(given: Arguments) -> None:
    t = given["log_probs"]
    require(t.dim() == 3, f"log_probs must have 3 dimensions, but it has {t.dim()}")
    for name in ("input_lengths", "target_lengths"):
        n = given[name].numel() if isinstance(given[name], Tensor) else len(given[name])
        require(n == t.shape[1], f"{name} must have one number per sequence ({t.shape[1]}), but it has {n}")
    require(0 <= given["blank"] < t.shape[2], f"blank must be between 0 and {t.shape[2] - 1}")
    targets = given["targets"]
    require(targets.dim() in (1, 2), "targets must have 1 or 2 dimensions")
    require(
        targets.dim() == 1 or targets.shape[0] == t.shape[1],
        f"targets must have one row per sequence ({t.shape[1]})",
    )
    if targets.dim() == 1:  # the kernel finds the first target of a sequence as if they were contiguous
        require_contiguous("targets", targets)


def _ctc_values(given: Arguments) -> None:
    t, targets = given["log_probs"], given["targets"]
    inputs, lengths = numbers_of(given, "input_lengths"), numbers_of(given, "target_lengths")
    require(all(0 <= n <= t.shape[0] for n in inputs), f"input_lengths must be between 0 and {t.shape[0]}")
    most = int(targets.shape[-1])
    require(all(0 <= n <= most for n in lengths), f"target_lengths must be between 0 and {most}")
    if targets.dim() == 1:
        require(sum(lengths) <= most, f"target_lengths sum to {sum(lengths)}, but there are only {most} targets")
        used = targets[: sum(lengths)]
    else:
        places = torch.arange(most, device=targets.device)
        used = targets[places < torch.tensor(lengths, device=targets.device)[:, None]]
    require_range("targets", used, 0, int(t.shape[2]))


def _ctc_backward_values(given: Arguments) -> None:
    _ctc_values(given)
    length, batch, _ = given["log_probs"].shape
    for name in ("grad", "neg_log_likelihood"):
        require_count(given, name, batch)
    longest = max(numbers_of(given, "target_lengths"), default=0)
    require_shape(given, "log_alpha", [batch, length, 2 * longest + 1])


LAWS: dict[str, ArgumentLaw] = {
    "multi_margin_loss_backward": ArgumentLaw(_margin_backward, _one_class_each),
    "multilabel_margin_loss_backward": ArgumentLaw(_multilabel_backward, _labels),
    "nll_loss_backward": ArgumentLaw(_nll_backward, _classes),
    "nll_loss2d_backward": ArgumentLaw(_nll2d_backward, _classes),
    "_ctc_loss": ArgumentLaw(_ctc_shapes, _ctc_values),
    "_ctc_loss_backward": ArgumentLaw(_ctc_shapes, _ctc_backward_values),
}
