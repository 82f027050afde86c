"""Laws for fake quantisation: scales, zero points and ranges have the sizes that the kernels read and write."""

from __future__ import annotations

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require, require_contiguous, require_count


def _single_parameters(given: Arguments) -> None:
    """Require one scale, one zero point and one flag. The kernel reads the first element of each."""
    for name in ("scale", "zero_point", "fake_quant_enabled"):
        require_count(given, name, 1)


def _observed(given: Arguments) -> None:
    """Require ranges and parameters of the right size: one per channel, or one.

    The library resizes an empty range, and reads and writes as many elements as the input has channels. A client gives tensors of
    the right size.
    """
    self, axis, channels = given["self"], given["ch_axis"], 1
    require(self.numel() > 0, "self must not be empty")
    if given["per_row_fake_quant"]:
        require(0 <= axis < self.dim(), f"ch_axis must be between 0 and {self.dim() - 1}, but it is {axis}")
        channels = int(self.shape[axis])
    for name in ("running_min", "running_max", "scale", "zero_point"):
        require_count(given, name, channels)
        require_contiguous(name, given[name])
    for name in ("observer_on", "fake_quant_on"):
        require_count(given, name, 1)


def _channel_parameters(given: Arguments) -> None:
    """Require one scale and one zero point per channel."""
    self, axis = given["self"], given["axis"]
    require(0 <= axis < self.dim(), f"axis must be between 0 and {self.dim() - 1}, but it is {axis}")
    for name in ("scale", "zero_point"):
        require_count(given, name, int(self.shape[axis]))


LAWS: dict[str, ArgumentLaw] = {
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": ArgumentLaw(_single_parameters),
    "_fused_moving_avg_obs_fq_helper": ArgumentLaw(_observed),
    **{
        name: ArgumentLaw(_channel_parameters)
        for name in (
            "fake_quantize_per_channel_affine_cachemask",
            "_fake_quantize_learnable_per_channel_affine",
            "_fake_quantize_learnable_per_channel_affine_backward",
        )
    },
}
