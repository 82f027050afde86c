"""Optimisers, scans, draws: states of the shapes of the parameters, numbers of trials that are numbers."""

from __future__ import annotations

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    require,
    same_shape,
    sized,
    spread,
)


def _fused(*states: str) -> Check:
    """Every parameter's gradient and state has its shape, and none overlaps itself."""

    def check(given: Arguments) -> None:
        shapes = [t.shape for t in given["self"]]
        for name in states:
            if name == "max_exp_avg_sqs" and not given["amsgrad"]:
                continue
            if name == "momentum_buffer_list" and not given[name]:
                continue
            require([t.shape for t in given[name]] == shapes, f"{name} must have the shapes of the parameters")
            for t in given[name]:
                spread(name, t)
        for t in given["self"]:
            spread("self", t)
        for t in given.get("state_steps", ()):
            require(t.numel() == 1, "state_steps must have one element each")
        require(len(given.get("state_steps", shapes)) == len(shapes), "state_steps must be of all parameters")

    return check


def _noisy(given: Arguments) -> None:
    sized(given, "noise", given["self"].shape)
    if given.get("out") is not None:
        sized(given, "out", given["self"].shape)


def _counted_trials(given: Arguments) -> None:
    """How often to try is a number: the library tries until it is reached."""
    require(not bool(given["count"].isnan().any()), "count must not be NaN")


LAWS: dict[str, ArgumentLaw] = {
    "binomial": ArgumentLaw(None, _counted_trials),
    "_fused_adam_": ArgumentLaw(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_adamw_": ArgumentLaw(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_sgd_": ArgumentLaw(_fused("grads", "momentum_buffer_list")),
    "_fused_adagrad_": ArgumentLaw(_fused("grads", "state_sums")),
    "_cummax_helper": ArgumentLaw(same_shape("self", "values", "indices")),
    "_cummin_helper": ArgumentLaw(same_shape("self", "values", "indices")),
    "rrelu_with_noise": ArgumentLaw(_noisy),
    "rrelu_with_noise_": ArgumentLaw(_noisy),
}
