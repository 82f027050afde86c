"""Calls of operators with arguments that do not fit together, through both runtimes: `python found.py`.

They run in a separate process, because a call that is not refused may end it. Prints a JSON object: for each call, the answer of
each runtime. `fuzz.py` prints its findings as lines for this file.
"""

import json
from dataclasses import replace

import torch
from call import call_of
from trial import Trials
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.releases import lacks

#: An index far outside of all tensors.
FAR = 1 << 40
CALLS = []


def call(name, *args, ok=False, _unsaid=(), _late=False, _read=(), **kwargs):
    """Return a case: an operator, its arguments, whether it must succeed, and how the call is made (see `Call`)."""
    CALLS.append((replace(call_of(name, args, kwargs, most=1 << 24), unsaid=_unsaid, late=_late, read=_read), ok))


def f(*sizes):
    return torch.ones(sizes)


def i(*values):
    return torch.tensor(values)


def far(*sizes):
    return torch.full(sizes, FAR)


LOGITS = f(6, 2, 5)
for lengths, targets, labels in (
    ((6, 5), i([1, 2, 3], [2, 4, 1]), (3, FAR)),
    ((6, -FAR), i([1, 2, 3], [2, 4, 1]), (3, 2)),
    ((6, 5), i([1, 2, 3], [2, FAR, 1]), (3, 2)),
    ((6, 5), i(1, 2, 3, 2, 4), (3, 3)),
    ((6, 5), i(1, 2, 3, 2, 4), (-1, 6)),
    ((6,), i(1, 2, 3), (3,)),
):
    call("aten._ctc_loss.default", LOGITS, targets, lengths, labels)
    call("aten._ctc_loss.Tensor", LOGITS, targets, i(*lengths), i(*labels))
    call("aten._ctc_loss_backward.default", f(2), LOGITS, targets, lengths, labels, f(2), f(2, 6, 7), 0)
call(
    "aten._ctc_loss.default", LOGITS, i([1, 2, -7], [2, FAR, -7]), (6, 5), (2, 1), ok=True
)  # the operator ignores the padding
call("aten._ctc_loss_backward.default", f(2), LOGITS, i([1, 2], [2, 4]), (6, 5), (2, 2), f(2), f(2, 6, 4), 0)
for targets in (i(1).expand(6), i(1, 2, 3, 4, 1, 2)[::2]):
    call("aten._ctc_loss.default", LOGITS, targets, (6, 5), (2, 1))
    call("aten._ctc_loss_backward.default", f(2), LOGITS, targets, (6, 5), (2, 1), f(2), f(2, 6, 5), 0)
for kind in (0, 1, 2):
    call("aten._masked_softmax.default", f(2, 3, 4, 4), f(2, 3, 4, 4).bool(), 3, kind, ok=True)
    call("aten._masked_softmax.default", f(2, 3, 4, 4), f(2, 1, 1, 4).bool(), 3, kind)
    call("aten._masked_softmax.default", f(2, 3, 4, 4), f(3, 3, 4, 4).bool(), 3, kind)
SQUARE = torch.eye(4)
call("aten.linalg_lu_solve.default", SQUARE, i(1, 2, 3, 4).int(), f(4, 2), ok=True)
call("aten.linalg_ldl_solve.default", SQUARE, i(1, -3, -3, 4).int(), f(4, 2), ok=True)
for pivots in (i(1, 2, 3, 5), i(0, 2, 3, 4), i(1, -2, 3, 4), i(1, 2, 3, -(2**31)), i(2**31 - 1, 2, 3, 4)):
    for operator in ("linalg_lu_solve", "linalg_ldl_solve"):
        call(f"aten.{operator}.default", SQUARE, pivots.int(), f(4, 2))
    call("aten.lu_unpack.default", SQUARE, pivots.int())
call("aten.lu_unpack.default", SQUARE, i(1).int())
call("aten.linalg_ldl_solve.default", SQUARE[None], i([1, 2, 3, 4]).int(), f(2, 4, 2))
call("aten._cholesky_solve_helper.default", f(3, 2), SQUARE, False)
FACTORS = {"pivot": False, "LU": f(4, 4), "pivots": i(1, 1, 1, 1).int(), "info": i(0)[0].int()}
call("aten.linalg_lu.default", SQUARE, pivot=False, ok=True)
call("aten.linalg_lu_factor_ex.out", SQUARE, **FACTORS, ok=True)
for wrong in (
    {"LU": f(4, 3)},
    {"pivots": i(1, 1).int()},
    {"info": i(0).int()},
    {"LU": f(4).expand(4, 4)},
    {"pivots": FACTORS["LU"]},
):
    call("aten.linalg_lu_factor_ex.out", SQUARE, **(FACTORS | wrong))
for t in (f(4), f(4, 4).half(), i([1, 2], [3, 4]), f(4, 4).bool()):
    call("aten.linalg_lu_factor_ex.default", t, pivot=False)
WEIGHT, PICKED = f(10, 4), i(1, 2, 4, 5, 4, 3)
for picked, offsets in (
    (PICKED, i(0, -FAR)),
    (PICKED, i(0, 5, 3)),
    (PICKED, i(0, 7)),
    (i(1, FAR), i(0)),
    (PICKED, PICKED[:0]),
):
    call("aten._embedding_bag.default", WEIGHT, picked, offsets)
    call("aten._embedding_bag_forward_only.default", WEIGHT, picked, offsets)
call("aten._embedding_bag.default", WEIGHT, PICKED, PICKED[:0], False, 0, False, None, True)
BAG = i(0, 0, 0, 1, 1, 1)
for indices, bag, size in (
    (far(6), BAG, i(3, 3)),
    (PICKED, far(6), i(3, 3)),
    (PICKED, BAG[:2], i(3, 3)),
    (PICKED, BAG, i(3)),
):
    call("aten._embedding_bag_dense_backward.default", f(2, 4), indices, bag, size, i(), 10, False, 0, None)
call("aten._embedding_bag_per_sample_weights_backward.default", f(2, 4), WEIGHT, far(6), i(0, 3), BAG, 0)
for more in ({"lengths": i(FAR, 1)}, {"lengths": i(-1, 7)}, {"offsets": i(0, 9, 6)}, {"offsets": i()}):
    call("aten.segment_reduce.default", f(6, 2), "sum", unsafe=True, **more)
    call("aten._segment_reduce_backward.default", f(2, 2), f(2, 2), f(6, 2), "sum", **more)
IMAGE, SMALL = f(1, 2, 4, 4), f(1, 2, 2, 2)
PLACES = torch.arange(4).reshape(1, 1, 2, 2).expand(1, 2, 2, 2).contiguous()
POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)
call("aten.max_pool2d_with_indices_backward.default", SMALL, IMAGE, *POOL, PLACES, ok=True)
call("aten.max_pool2d_with_indices_backward.default", SMALL, IMAGE, *POOL, far(1, 2, 2, 2))
call("aten.max_pool2d_with_indices_backward.default", f(9, 2, 2, 2), IMAGE, *POOL, torch.zeros(9, 2, 2, 2).long())
call("aten.adaptive_max_pool2d_backward.default", SMALL, IMAGE, -far(1, 2, 2, 2))
call("aten.fractional_max_pool2d_backward.default", SMALL, IMAGE, [2, 2], [], PLACES)
call("aten.avg_pool2d_backward.default", f(99, 2, 2, 2), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None)
call("aten._adaptive_avg_pool2d_backward.default", f(99, 2, 2, 2), IMAGE)
call("aten._adaptive_avg_pool2d_backward.default", SMALL, f(1, 2, 0, 4))
call("aten.grid_sampler_2d_backward.default", f(1, 2, 1, 1), IMAGE, f(1, 3, 3, 2), 0, 0, False, [True, True])
call("aten.reflection_pad1d_backward.default", f(2, 6), f(2, 4), [])
call("aten.replication_pad2d_backward.default", f(1, 0, 6, 6), IMAGE, [1, 1, 1, 1])
call("aten.unfold_backward.default", f(2, 1), [9], 0, 3, 1)
call("aten._log_softmax_backward_data.default", f(300, 400), f(3, 4), 1, torch.float32)
call("aten._pdist_backward.default", f(3), f(300, 2), 2.0, f(3))
call("aten._pdist_backward.default", f(0), f(0, 2), 2.0, f(0))
STATS = (f(2), f(2), f(2), f(2))
call("aten.native_batch_norm.default", IMAGE, f(2), f(2), f(0), f(0), True, 0.1, 1e-5)
call("aten._native_batch_norm_legit.no_stats", IMAGE, f(2), f(2), False, 0.1, 1e-5)
MASK = [True, True, True]
call("aten.native_batch_norm_backward.default", f(1, 2, 0, 0), IMAGE, f(2), *STATS, True, 1e-5, MASK)
call("aten.native_batch_norm_backward.default", IMAGE, IMAGE, f(2), f(2), None, f(2), f(2), False, 1e-5, MASK)
call("aten.native_layer_norm_backward.default", f(3, 4), f(3, 4), [4], f(0), f(0), f(4), f(4), MASK)
call("aten._weight_norm_interface.default", f(4, 3), f(0, 1), 0)
QUERY = f(1, 2, 3, 4)
call("aten._scaled_dot_product_flash_attention_for_cpu.default", QUERY, f(1, 1, 3, 4), QUERY)
call("aten._scaled_dot_product_flash_attention_for_cpu.default", QUERY, f(1, 2, 0, 4), f(1, 2, 0, 4))
call("aten._scaled_dot_product_flash_attention_for_cpu.default", f(1, 4, 3, 4), f(1, 3, 3, 4), f(1, 3, 3, 4))
call("aten._scaled_dot_product_flash_attention_for_cpu.default", QUERY, f(1, 8, 3, 4), f(1, 8, 3, 4))
call(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    *(QUERY, QUERY, QUERY, QUERY, QUERY, f(1, 2, 0), 0.0, False),
)
call("aten._native_multi_head_attention.default", *[f(1, 2, 4)] * 3, 4, 0, f(12, 4), f(12), f(4, 4), f(4))
CELL = (f(16, 3), f(16, 4), f(16), f(16))
call(
    "aten.mkldnn_rnn_layer.default", f(5, 2, 3), *CELL, f(1, 4), f(2, 4), False, [], 2, 4, 1, True, False, False, False
)
call("aten.lstm.input", f(5, 2, 3), [f(1, 2, 4), f(1, 9, 4)], CELL, True, 1, 0.0, False, False, False)
call("aten.gru.data", f(8, 3), i(), f(1, 2, 4), (f(12, 3), f(12, 4), f(12), f(12)), True, 1, 0.0, False, False)
call("aten.nll_loss_backward.default", f(2), f(2, 5), i(1, FAR), None, 0, -100, f())
call("aten.nll_loss_backward.default", f(2), f(2, 5), i(1, -100), None, 0, -100, f(), ok=True)
call("aten.multi_margin_loss_backward.default", f(0), f(2, 5), i(1, 2), 1, 1, None, 0)
call("aten.multilabel_margin_loss_backward.default", f(0), f(2, 5), i([1] * 5, [2] * 5), 1, f(2, 5))
call("aten._fft_c2c.default", f(4).to(torch.complex64), [FAR], 0, True)
call("aten._fft_c2r.default", f(40).to(torch.complex64), [0], 0, 6)
call(
    "aten.convolution_backward.default",
    f(1, 1, 3, 3),
    IMAGE,
    f(1, 2, 2, 2),
    [],
    [],
    [0, 0],
    [1, 1],
    False,
    [0, 0],
    1,
    MASK,
)
call("aten.lcm.default", i(-(2**63), 3), i(7, -1))
call("aten._fused_sgd_.default", [f(100)], [f(0)], [f(100)], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0,
     nesterov=False, maximize=False, is_first_step=False)  # fmt: skip
call("aten._cummax_helper.default", f(100, 100), f(2), i(0, 0), 0)
call("aten.rrelu_with_noise.default", f(1000), f(0), 0.1, 0.3, True)

# Found by `fuzz.py`.
call("aten.div.Tensor_mode", i(-(2**63)), i(-1), rounding_mode="trunc")
call("aten.div.Tensor_mode", i(-(2**31)).int(), -1, rounding_mode="trunc", _late=True)
call("aten.div_.Tensor_mode", i(-(2**31)).int(), i(-1).int(), rounding_mode="trunc")
call("aten.div.Tensor_mode", i(-(2**63), 7), i(1, -1), rounding_mode="floor", ok=True)
call("aten.div.Tensor_mode", i(7, 8), i(-1, 2), rounding_mode="trunc", ok=True)
call("aten.special_laguerre_polynomial_l.default", f(1), torch.full((1,), 1e18))
call("aten.special_legendre_polynomial_p.default", f(1), torch.full((1,), float("inf")))
# Next to 1, the values grow so slowly that one element took an hour.
for _kind in ("chebyshev_polynomial_t", "shifted_chebyshev_polynomial_w"):
    call(
        f"aten.special_{_kind}.default",
        torch.full((1,), 1 + 2.3e-16, dtype=torch.float64),
        torch.full((1,), 1e12, dtype=torch.float64),
    )
call("aten.special_legendre_polynomial_p.default", f(2), torch.tensor([float("nan"), 3.0]), ok=True)
call("aten.binomial.default", torch.tensor([float("nan")]), torch.tensor([0.5]))
call("aten._cdist_backward.default", f(1, 1), f(30, 2), f(40, 2), 2.0, f(30, 40))
call("aten._cdist_backward.default", f(3, 4), f(3, 2), f(4, 2), 1.0, f())
for scale in (1e-30, 1e-300):
    call("aten.upsample_bicubic2d.default", f(1, 1, 4, 4), [8, 8], False, scale, scale)
    call("aten.upsample_bicubic2d.default", f(1, 1, 4, 4), [8, 8], False, scale, scale, _late=True)
    call("aten.upsample_bicubic2d_backward.default", f(1, 1, 8, 8), [8, 8], [1, 1, 4, 4], False, 2.0, scale)
call("aten.upsample_bicubic2d.default", f(1, 1, 4, 4), [8, 8], False, 2.0, None, ok=True)
call("aten.upsample_linear1d.default", f(1, 1, 4), [8], False, 2.0, ok=True)
call("aten._stack.default", [])
call("aten._foreach_copy.default", [], [f(2, 3)])
call("aten._foreach_copy.default", [f(2), f(2)], [f(2), f(2), f(2)])
call("aten._foreach_add.ScalarList", [f(2), f(2)], [1.0, 2.0], ok=True)
call("aten.embedding_dense_backward.default", f(2, 3), i(-9, 5), 9, 0, True)
call("aten.embedding_dense_backward.default", f(2, 3), i(1, 5), 9, 0, True, ok=True)
call(
    "aten.adaptive_avg_pool3d_backward.grad_input",
    f(1, 1, 1, 1),
    f(1, 2, 4, 4),
    grad_input=f(32).as_strided((1, 2, 4, 4), (1, 1, 1, 1), 16),
)
ADAGRAD = {"lr": 1.0, "lr_decay": 1.0, "weight_decay": 0.0, "eps": 1.0, "maximize": False}
call("aten._fused_adagrad_.default", [f(2, 2)], [f(19).as_strided((2, 2), (1, 1), 16)], [f(2, 2)], [f()], **ADAGRAD)
call("aten._fused_adagrad_.default", [f(2, 2)], [f(2, 2).t()], [f(2, 2)], [f()], ok=True, **ADAGRAD)
call("aten.neg.out", f(2), out=f(2), _unsaid=("out",))
for dtype in (-1, 2**31 - 1):
    call("aten.sum.dim_IntList", f(1, 1), [], dtype=dtype)
    call("aten.sum.dim_IntList", f(1, 1), [], dtype=dtype, _late=True)
    call("aten.nansum.default", f(1, 1), dtype=dtype)
    call("aten._softmax_backward_data.default", f(2, 2), f(2, 2), 0, dtype)
call("aten.sum.dim_IntList", f(1, 1), [], dtype=torch.float64, ok=True)
# A bag that the offsets begin has no row in grad; a dimension below zero; results of other types, shapes and places.
call("aten._embedding_bag_per_sample_weights_backward.default", f(1, 4), WEIGHT, PICKED, i(0, 3), PICKED[:0], 0)
call(
    "aten._embedding_bag_per_sample_weights_backward.default",
    f(2, 4),
    WEIGHT,
    PICKED,
    i(0, 3, 6),
    PICKED[:0],
    0,
    ok=True,
)
call("aten._cummin_helper.default", i([0, 0, 0]), i([1, 0, 1]), i([1, 0, 1]), -1)
call("aten._cummax_helper.default", i([0, 0, 0]), i([1, 0, 1]), i([1, 0, 1]), 1, ok=True)
call("aten._fft_r2c.default", f(1, 1, 1), [-2], 0, True)
call("aten._logcumsumexp.out", f(2, 2), 1, out=torch.zeros(2, 2, dtype=torch.uint8))
call("aten._logcumsumexp.out", f(2, 2), 1, out=f(2, 2), ok=True)
call(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    *(QUERY, QUERY, QUERY, QUERY, QUERY, f(1, 3, 2), 0.0, False),
)
SPREAD = f(1, 2, 4, 3).transpose(2, 3)
call("aten._scaled_dot_product_flash_attention_for_cpu.default", SPREAD, QUERY, QUERY)
call(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    *(QUERY, QUERY, QUERY, QUERY, SPREAD, f(1, 2, 3), 0.0, False),
)
call("aten.native_group_norm.default", f(1, 6, 3), f(4).as_strided((6,), (0,), 3), f(6), 1, 6, 3, 1, 1.0)
for n, scale in ((34, 1.7), (32768, 1.0)):
    call("aten._upsample_bilinear2d_aa.default", f(1, 1, 1, 1), [n, 3], False, scale, None)
    call("aten._upsample_bicubic2d_aa_backward.default", f(1, 1, n, 3), [n, 3], [1, 1, 1, 1], False, scale, None)
call("aten._upsample_bilinear2d_aa.default", f(1, 1, 10, 10), [17, 12], False, 1.7, 1.2, ok=True)
call("aten._weight_norm_interface.default", f(3, 1), f(1).as_strided((3, 1), (0, 1), 0))
call("aten.addbmm_.default", f(1), f(2, 3, 4), f(2, 4, 5))
call("aten.addbmm_.default", f(3, 5), f(2, 3, 4), f(2, 4, 5), ok=True)
call("aten.gelu_backward.default", f(1).as_strided((10, 10), (0, 0), 0), f(10, 1))
call("aten.linalg_lstsq.default", f(2, 1), f(2, 0), driver="gelss")
for name in ("linalg_eigvals", "linalg_eig"):  # the library itself checks linalg_eig
    call(f"aten.{name}.default", f(4, 4).fill_(float("inf")))
for name in ("median", "nanmedian"):
    call(f"aten.{name}.dim_values", i(9, 5).as_strided((1, 3), (0, 0), 1), 1, values=i(0), indices=i(0), ok=True)
call("aten.native_layer_norm_backward.default", f(2, 2, 3), f(2, 2, 3), [2, 3], f(2, 1, 1),
     f(17).as_strided((2, 1, 1), (0, 0, 0), 16), None, f(2, 3), [True, False, True])  # fmt: skip
STEPS, RECURRENT = f(5, 2, 3), (False, [], 2, 4, 1, True, False, False, True)
call("aten.mkldnn_rnn_layer.default", STEPS, *CELL, f(17).as_strided((2, 4), (0, 0), 16), f(2, 4), *RECURRENT)
call("aten.mkldnn_rnn_layer.default", f(3).as_strided((5, 2, 3), (0, 0, 0), 0), *CELL, f(2, 4), f(2, 4), *RECURRENT)
call("aten.mkldnn_rnn_layer.default", STEPS, *CELL, f(2, 4), f(2, 4), *RECURRENT, ok=True)
call("aten._embedding_bag.default", f(1, 1), torch.zeros(5, dtype=torch.int64).as_strided((5,), (0,), 1), i(0))
call(
    "aten._embedding_bag_dense_backward.default",
    *(f(2, 0), i(0, 0, 0, 0, 0, 0), i(0, 0, 0, 1, 1, 1), i(3, 3).as_strided((2,), (0,), 1), i([0]), 1, False, 1, None),
)
ON, POINTS = i(1), torch.zeros(3, dtype=torch.int32)
for channels, scales in ((3, 1), (0, 0), (1, 3)):  # the library reads and writes as many as the input has channels
    call(
        "aten._fused_moving_avg_obs_fq_helper.default",
        *(f(3, 4), ON, ON, f(channels), f(channels), f(scales), POINTS[:scales], 0.01, -128, 127, 0, True, True),
    )
call("aten._fused_moving_avg_obs_fq_helper.default",
     f(3, 4), ON, ON, f(3), f(3), f(3), POINTS, 0.01, -128, 127, 0, True, True, ok=True)  # fmt: skip
call("aten._fft_c2r.default", f(1, 6, 1).to(torch.complex64), [-2], 0, 10)
call("aten._stack.default", [f(21).as_strided((2, 3), (12, 4), 0)])
call("aten._stack.default", [f(2, 3), f(2, 3)], ok=True)
call("aten._scaled_dot_product_attention_math.default", f(1, 1, 1, 1), f(1, 0, 1, 1), f(1, 1, 1, 1), enable_gqa=True)
for format in (-1, 127, 2**63 - 1):
    call("aten.clone.out", f(1), memory_format=format, out=f(1))
    call("aten._foreach_clone.out", [f(1)], memory_format=format, out=[])
call("aten._foreach_copy.out", [], [f(1)], out=[])
for wrong in (float("nan"), float("inf"), 3e38):
    for padding in (1, 2):
        call("aten.grid_sampler_2d_backward.default", f(2, 3, 5, 5), f(2, 3, 4, 4),
             torch.full((2, 5, 5, 2), wrong), 0, padding, False, [True, True], ok=True)  # fmt: skip
call("aten.triu.out", f(3, 3, 3, 3), out=f(81).as_strided((3, 3, 3, 3), (1, 3, 9, 27), 0))
call("aten.round.decimals_out", f(1), decimals=2**31 - 1, out=f(1), ok=True)
call("aten._transformer_encoder_layer_fwd.default", f(1, 1, 4), 4, 2, f(12, 4), f(12).half(), f(4, 4), f(4), True, False,
     1e-5, f(4), f(4), f(4), f(4), f(8, 4), f(8), f(4, 8), f(4))  # fmt: skip
call("aten.linalg_lu.out", f(3, 3, 3, 3), P=f(3, 3, 3, 3), L=f(81).as_strided((3, 3, 3, 3), (1, 3, 9, 27), 0),
     U=f(3, 3, 3, 3))  # fmt: skip
call("aten.native_group_norm_backward.default", f(37).as_strided((2, 6, 3), (18, 3, 0), 3), f(2, 6, 3), f(2, 2), f(2, 2),
     f(6), 2, 6, 3, 2, MASK)  # fmt: skip
call("aten.repeat_interleave.Tensor", i(2**63 - 1, 2**63 - 1, 5))
call("aten.repeat_interleave.Tensor", i(2, 0, 5), ok=True)
EMPTY = torch.zeros(0, dtype=torch.complex64)
call("aten.linalg_eig.out", f(1, 5, 5), eigenvalues=EMPTY.as_strided((0,), (1,), 0),
     eigenvectors=EMPTY.as_strided((0,), (1,), 0))  # fmt: skip
call("aten.random_.from", f(1), 2**63 - 1, None)
COMPLEX = torch.zeros(60, dtype=torch.complex64)
call("aten.linalg_eig.out", f(2, 5, 5), eigenvalues=COMPLEX[:10].view(2, 5), eigenvectors=COMPLEX[:50].view(2, 5, 5))
call("aten.linalg_eig.out", f(2, 5, 5), eigenvalues=COMPLEX[:10].view(2, 5), eigenvectors=COMPLEX[10:].view(2, 5, 5),
     ok=True)  # fmt: skip
SHARED = torch.ones(25, dtype=torch.int64)
call("aten.nll_loss2d_backward.grad_input", f(8, 1, 3), f(8, 1, 1, 3), SHARED.as_strided((8, 1, 3), (3, 3, 1), 0), None, 0, 1,
     f(), grad_input=SHARED.view(torch.float32).as_strided((8, 1, 1, 3), (3, 3, 3, 1), 0), ok=True)  # fmt: skip
CUBE = f(225).view(3, 3, 5, 5)
call("aten.reflection_pad3d.out", CUBE, [1] * 6, out=CUBE)
call("aten.replication_pad3d.out", CUBE, [1] * 6, out=f(2000))
call("aten.cumsum.out", CUBE, 1, out=CUBE, ok=True)
call("aten.add.out", CUBE, CUBE, out=CUBE, ok=True)


def main():
    torch.set_num_threads(1)
    found = []
    runtimes = [Trials(make()) for make in (TorchCpuRuntime, ReferenceRuntime)]
    for each, ok in CALLS:
        if lacks(torch.__version__, each.name):
            continue
        print(each.name, flush=True)  # if the process ends, the last printed name is the cause
        found.append((each.name, ok, [trials.said(each) for trials in runtimes]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
