"""Laws for optimisers, scans and random draws.

States must have the shapes of their parameters. Numbers of trials must not be NaN.
"""

from __future__ import annotations

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    all_of,
    require,
    require_no_overlap,
    require_shape,
    same_shape,
)


def _fused(*states: str) -> Check:
    """Require that each gradient and state has the shape of its parameter, and that no tensor overlaps itself."""

    def check(given: Arguments) -> None:
        shapes = [t.shape for t in given["self"]]
        for name in states:
            if name == "max_exp_avg_sqs" and not given["amsgrad"]:
                continue
            if name == "momentum_buffer_list" and not given[name]:
                continue
            require([t.shape for t in given[name]] == shapes, f"{name} must have the same shapes as the parameters")
            for t in given[name]:
                require_no_overlap(name, t)
        for t in given["self"]:
            require_no_overlap("self", t)
        for t in given.get("state_steps", ()):
            require(t.numel() == 1, "each tensor of state_steps must have 1 element")
        require(len(given.get("state_steps", shapes)) == len(shapes), "state_steps must have one tensor per parameter")

    return check


def _noisy(given: Arguments) -> None:
    require_shape(given, "noise", given["self"].shape)
    if given.get("out") is not None:
        require_shape(given, "out", given["self"].shape)


def _has_successor(given: Arguments) -> None:
    """Require that the least number to draw is not the largest integer, whose successor the library would search forever."""
    if given.get("from") is not None:
        require(given["from"] < 2**63 - 1, "from must be less than 2**63 - 1")


def _counted_trials(given: Arguments) -> None:
    """Require that no number of trials is NaN. The library would try forever."""
    require(not bool(given["count"].isnan().any()), "count must not be NaN")


def _running_extreme(given: Arguments) -> None:
    t = given["self"]
    require(0 <= given["dim"] < max(t.dim(), 1), f"dim must be between 0 and {max(t.dim() - 1, 0)}")


def _running_sum(given: Arguments) -> None:
    """Check `out`, if it is given. The kernel writes numbers of the type of `self`."""
    t, out = given["self"], given.get("out")
    if out is not None:
        require_shape(given, "out", t.shape)
        require(out.dtype == t.dtype, f"out must have the dtype of self ({t.dtype}), but it has {out.dtype}")


LAWS: dict[str, ArgumentLaw] = {
    "random_": ArgumentLaw(_has_successor),
    "binomial": ArgumentLaw(None, _counted_trials),
    "_fused_adam_": ArgumentLaw(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_adamw_": ArgumentLaw(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_sgd_": ArgumentLaw(_fused("grads", "momentum_buffer_list")),
    "_fused_adagrad_": ArgumentLaw(_fused("grads", "state_sums")),
    "_cummax_helper": ArgumentLaw(all_of(same_shape("self", "values", "indices"), _running_extreme)),
    "_cummin_helper": ArgumentLaw(all_of(same_shape("self", "values", "indices"), _running_extreme)),
    "_logcumsumexp": ArgumentLaw(_running_sum),
    "rrelu_with_noise": ArgumentLaw(_noisy),
    "rrelu_with_noise_": ArgumentLaw(_noisy),
}
