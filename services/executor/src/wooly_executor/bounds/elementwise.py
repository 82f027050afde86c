"""Operators whose work is proportional to the size of their index space, whatever their arguments are.

Names have no trailing `_` and no prefix `_foreach_`.
"""

from __future__ import annotations

from wooly_executor.bounds.work import Given, Work, broadcast, log2, product, stored

#: Weights: cost of one element, in additions. SERIES is for functions that are computed as a series.
PLAIN, FUNCTION, ITERATED, SERIES = 1, 2, 16, 256
#: Weight of orthogonal polynomials. The library iterates up to the degree, which is a value that only a run has. The law in
#: `guards.polynomials` limits the degree.
DEGREES = 4096

_BY_WEIGHT = {
    PLAIN: """
        __ilshift__ __irshift__ __lshift__ __rshift__ _add_relu _functional_assert_async _foobar _prelu_kernel
        abs add addcdiv addcmul addr angle bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        ceil clamp clamp_max clamp_min clone complex conj_physical copy copysign div eq equal fill floor fmax fmin frac
        ge gt hardshrink hardsigmoid hardswish hardtanh heaviside isnan isneginf isposinf le leaky_relu lerp logical_and
        logical_not logical_or logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg nextafter reciprocal relu round
        rsqrt rsub sgn sign signbit softshrink sqrt sub threshold threshold_backward tril triu trunc where zero
        native_dropout_backward hardtanh_backward hardshrink_backward hardsigmoid_backward hardswish_backward
        leaky_relu_backward softshrink_backward
    """,
    FUNCTION: """
        acos acosh asin asinh atan atan2 atanh cos cosh elu elu_backward erf erfc exp exp2 expm1 floor_divide fmod frexp gelu
        gelu_backward glu hypot log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logit
        logit_backward mish mish_backward polar pow remainder sigmoid sigmoid_backward silu silu_backward sin sinc sinh softplus
        softplus_backward special_entr special_xlog1py tan tanh tanh_backward xlogy _dirichlet_grad _prelu_kernel_backward
        glu_backward glu_backward_jvp glu_jvp binary_cross_entropy binary_cross_entropy_backward huber_loss huber_loss_backward
        mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward
    """,
    ITERATED: """
        bernoulli cauchy digamma erfinv exponential gcd geometric i0 lcm lgamma log_normal native_dropout normal
        random rrelu_with_noise special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
        special_bessel_y1 special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 uniform
    """,
    SERIES: """
        _sample_dirichlet _standard_gamma _standard_gamma_grad binomial igamma igammac poisson polygamma special_zeta
    """,
    DEGREES: """
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    """,
}
#: Weight of each element-wise operator.
ELEMENTWISE: dict[str, int] = {name: weight for weight, names in _BY_WEIGHT.items() for name in names.split()}

#: Number of passes of an operator over all its operands: reductions, scans, copies, normalisations, optimisers.
_PASSES = {
    1: """
        all amax amin aminmax any cat _stack channel_shuffle count_nonzero dot flip hash_tensor max mean min
        native_channel_shuffle nansum narrow_copy nonzero pixel_shuffle pixel_unshuffle roll sum trace vdot
        _aminmax _fused_adagrad _fused_adam _fused_adamw _fused_sdp_choice _fused_sgd argmax argmin
        _foreach_max take put gather scatter scatter_add embedding_renorm
        lu_unpack adaptive_max_pool2d_backward adaptive_max_pool3d_backward
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward fractional_max_pool2d_backward
        fractional_max_pool3d_backward
    """,
    4: """
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale _cummax_helper _cummin_helper _log_softmax
        _log_softmax_backward_data _masked_softmax _masked_softmax_backward _softmax _softmax_backward_data
        cumprod cumsum linalg__powsum linalg_vector_norm norm prod renorm scatter_reduce std std_mean
        var var_mean _foreach_norm _foreach_powsum nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
        segment_reduce _segment_reduce_backward unfold_backward linalg_cross
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """,
    8: """
        _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine_backward
        _fused_moving_avg_obs_fq_helper _batch_norm_with_update _logcumsumexp _native_batch_norm_legit
        _weight_norm_interface _weight_norm_interface_backward batch_norm_backward batch_norm_update_stats cross_entropy_loss
        multi_margin_loss multi_margin_loss_backward native_batch_norm native_batch_norm_backward native_group_norm
        native_group_norm_backward native_layer_norm native_layer_norm_backward rms_norm
    """,
}
PASSES: dict[str, int] = {name: n for n, names in _PASSES.items() for name in names.split()}

#: Weight of an element that a stride of 0 repeats and that is not in the result. Scripts rarely need many such elements, but a
#: hostile program could use them to create unlimited work without using memory.
REPEATED = 16


def base_of(name: str) -> tuple[str, bool]:
    """Return an operator's name without its in-place suffix and list prefix, and whether the operator takes lists of tensors."""
    if name.startswith("__"):
        return name, False
    name = name.removesuffix("_")
    if name.startswith("_foreach_") and name not in PASSES:
        base = name.removeprefix("_foreach_")
        if base in ELEMENTWISE:
            return base, True
    return name, False


def over_space(given: Given, weight: int) -> Work:
    """Return `weight` times the elements of the index space."""
    return Work(weight * given.space())


def over_lists(given: Given, weight: int) -> Work:
    """Return `weight` times the elements of all index spaces, one for each position in the lists."""
    lists = [[v for v in value if hasattr(v, "sizes")] for value in given.values.values() if isinstance(value, tuple)]
    singles = [v.sizes for v in given.values.values() if hasattr(v, "sizes")]
    total = 0
    for k in range(max([len(found) for found in lists], default=0)):
        total += broadcast([*[found[k].sizes for found in lists if k < len(found)], *singles])
    return Work(weight * max(total, given.touched()))


def over_all(given: Given, passes: int) -> Work:
    """Return `passes` times the elements of all operands and results. Repeated elements that are not in the result count
    `REPEATED` times.
    """
    kept = max([v.numel for v in given.outs], default=0)
    repeated = sum([v.numel - stored(v) for v in given.views() if v.numel > kept])
    return Work(passes * (given.touched() + (REPEATED - 1) * repeated))


def sorted_along(given: Given) -> Work:
    """Return the work of sorting all elements."""
    n = max([v.numel for v in given.views()], default=0)
    return over_all(given, 2 * log2(max([max(v.sizes, default=1) for v in given.views()], default=1))) + Work(
        product([n])
    )
