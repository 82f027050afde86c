"""One call per operator of CUDA's autocast lists, and the result dtypes of CUDA's autocast.

As a program, this file runs the calls with PyTorch's own AutocastCUDA kernels on fake tensors, which need no GPU, and prints the
result dtypes as JSON. Tests of the Wooly device compare with them.
"""

import json
import warnings

import torch
from wooly_testkit.effort import examples

#: Expressions with vectors u v, matrices m n, batches b c, images x y, volumes p q and indices i. In each pair of names, the
#: first tensor has one dtype and the second tensor another.
CALLS = {
    "conv1d": "A.conv1d(b, c)",
    "conv2d": "A.conv2d(x, y, v)",
    "conv3d": "A.conv3d(p, q)",
    "conv_tbc": "A.conv_tbc(b, c, v)",
    "conv_transpose1d": "A.conv_transpose1d(b, c)",
    "conv_transpose2d.input": "A.conv_transpose2d(x, y)",
    "conv_transpose3d.input": "A.conv_transpose3d(p, q)",
    "convolution": "A.convolution(x, y, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)",
    "prelu": "A.prelu(m, v)",
    "addmm": "A.addmm(m, n, m)",
    "addmv": "A.addmv(u, n, u)",
    "addr": "A.addr(m, v, v)",
    "matmul": "m @ n",
    "einsum": "torch.einsum('ij,jk->ik', m, n)",
    "mm": "torch.mm(m, n)",
    "mv": "torch.mv(m, v)",
    "linalg_vecdot": "torch.linalg.vecdot(u, v)",
    "linear": "F.linear(m, n, v)",
    "addbmm": "A.addbmm(m, c, c)",
    "baddbmm": "A.baddbmm(b, c, c)",
    "bmm": "torch.bmm(b, c)",
    "chain_matmul": "A.chain_matmul([m, n, m])",
    "linalg_multi_dot": "torch.linalg.multi_dot([m, n, m])",
    "lstm_cell": "torch.lstm_cell(m, (n, n), g, g, h, h)",
    "gru_cell": "torch.gru_cell(m, n, g3, g3, h3, h3)",
    "rnn_tanh_cell": "torch.rnn_tanh_cell(m, n, m, n, v, v)",
    "rnn_relu_cell": "torch.rnn_relu_cell(m, n, m, n, v, v)",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention(x, y, x)",
    **{name: f"torch.{name}(u)" for name in ("acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log2", "log1p")},
    **{name: f"torch.{name}(u)" for name in ("erfinv", "reciprocal", "rsqrt", "sinh", "tan")},
    "pow.Tensor_Scalar": "u ** 2",
    "pow.Tensor_Tensor": "u ** v",
    "pow.Scalar": "2 ** u",
    "softplus": "F.softplus(u)",
    "layer_norm": "F.layer_norm(m, [8], v, v)",
    "native_layer_norm": "A.native_layer_norm(m, [8], v, v, 1e-5)",
    "rms_norm": "F.rms_norm(m, [8], v)",
    "group_norm": "F.group_norm(x, 2, v, v)",
    "frobenius_norm.dim": "A.frobenius_norm(m, [1])",
    "nuclear_norm": "A.nuclear_norm(m)",
    "nuclear_norm.dim": "A.nuclear_norm(m, [0, 1])",
    "cosine_similarity": "F.cosine_similarity(m, n)",
    "poisson_nll_loss": "A.poisson_nll_loss(u, v, True, False, 1e-8, 1)",
    "cosine_embedding_loss": "F.cosine_embedding_loss(m, n, i)",
    "nll_loss": "A.nll_loss(m, i, v)",
    "nll_loss2d": "A.nll_loss2d(x, i[:, None, None].expand(8, 8, 8), v)",
    "hinge_embedding_loss": "F.hinge_embedding_loss(u, v)",
    "kl_div": "F.kl_div(m, n, reduction='batchmean')",
    "l1_loss": "F.l1_loss(u, v)",
    "smooth_l1_loss": "F.smooth_l1_loss(u, v)",
    "huber_loss": "F.huber_loss(u, v)",
    "mse_loss": "F.mse_loss(u, v)",
    "margin_ranking_loss": "F.margin_ranking_loss(u, v, v)",
    "multilabel_margin_loss": "F.multilabel_margin_loss(m, i.expand(8, 8))",
    "soft_margin_loss": "F.soft_margin_loss(u, v)",
    "triplet_margin_loss": "F.triplet_margin_loss(m, n, n)",
    "multi_margin_loss": "F.multi_margin_loss(m, i)",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits(u, v)",
    "binary_cross_entropy": "F.binary_cross_entropy(u, v)",
    "dist": "torch.dist(u, v)",
    "pdist": "torch.pdist(m)",
    "cdist": "torch.cdist(m, n)",
    "renorm": "torch.renorm(m, 1, 0, 5)",
    "logsumexp": "torch.logsumexp(m, 1)",
    **{name: f"A.{name}(b, [4])" for name in ("upsample_nearest1d", "_upsample_nearest_exact1d")},
    **{name: f"A.{name}(x, [4, 4])" for name in ("upsample_nearest2d", "_upsample_nearest_exact2d")},
    **{name: f"A.{name}(p, [4, 4, 4])" for name in ("upsample_nearest3d", "_upsample_nearest_exact3d")},
    "upsample_linear1d": "A.upsample_linear1d(b, [4], False)",
    **{name: f"A.{name}(x, [4, 4], False)" for name in ("upsample_bilinear2d", "_upsample_bilinear2d_aa")},
    **{name: f"A.{name}(x, [4, 4], False)" for name in ("upsample_bicubic2d", "_upsample_bicubic2d_aa")},
    "upsample_trilinear3d": "A.upsample_trilinear3d(p, [4, 4, 4], False)",
    "prod": "torch.prod(u)",
    "prod.dim_int": "torch.prod(m, 1)",
    "softmax.int": "torch.softmax(m, 1)",
    "log_softmax.int": "F.log_softmax(m, 1)",
    "cumprod": "torch.cumprod(m, 1)",
    "cumsum": "torch.cumsum(m, 1)",
    "linalg_vector_norm": "torch.linalg.vector_norm(m)",
    "linalg_matrix_norm": "torch.linalg.matrix_norm(m, 2)",
    "linalg_matrix_norm.str_ord": "torch.linalg.matrix_norm(m)",
    "sum": "u.sum()",
    "sum.dim_IntList": "m.sum(1)",
    "norm.Scalar": "A.norm(m, 2)",
    "norm.ScalarOpt_dim": "A.norm(m, 2, [1])",
    "addcdiv": "torch.addcdiv(u, v, v)",
    "addcmul": "torch.addcmul(u, v, v)",
    "atan2": "torch.atan2(u, v)",
    "bilinear": "F.bilinear(m, n, b, u)",
    "cross": "torch.cross(b[:, :3], c[:, :3], dim=1)",
    "dot": "torch.dot(u, v)",
    "vdot": "torch.vdot(u, v)",
    "grid_sampler": "A.grid_sampler(x, y[..., :2], 0, 0, False)",
    "index_put": "torch.index_put(u, (i,), v)",
    "tensordot": "torch.tensordot(m, n)",
    "scatter_add": "torch.scatter_add(u, 0, i, v)",
    # Autocast keeps a dtype that the call specifies. Operators in no list run without casts.
    "sum, float64 asked": "u.sum(dtype=torch.float64)",
    "softmax, float16 asked": "torch.softmax(m, 1, torch.float16)",
    "softmax, one type left open": "torch.softmax(m, 1, None)",
    "cumsum, bfloat16 asked": "torch.cumsum(m, 1, dtype=torch.bfloat16)",
    "add": "u + v",
    "relu": "torch.relu(u)",
    "gelu": "F.gelu(u)",
    "mean": "u.mean()",
    "cat": "torch.cat([u, v])",
    "stack": "torch.stack([u, v])",
    "cross_entropy": "F.cross_entropy(m, i)",
    "cross_entropy, smoothed labels": "F.cross_entropy(m, i, label_smoothing=0.1)",
    "cross_entropy, probabilities": "F.cross_entropy(m, n)",
    "sqrt": "u.sqrt()",
    "mul of integers": "torch.mul(i, i)",
}

#: Operators of the lists that have no case, because the operators above call them, or because their library is not available.
NOT_CALLED = {
    "_convolution", "_convolution.deprecated",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention", "cudnn_convolution",
    "cudnn_convolution_transpose", "linalg_matrix_sqrth",
}  # fmt: skip

#: Operators that need a GPU even for fake tensors. Their expected dtypes are those of another operator of the same list.
LIKE = {"gru_cell": "rnn_relu_cell", "nll_loss2d": "nll_loss", "cross": "atan2", "grid_sampler": "atan2"}

PAIRS = [(torch.float32,) * 2, (torch.float16,) * 2, (torch.float16, torch.float32), (torch.float32, torch.float16),
         (torch.bfloat16,) * 2, (torch.float64,) * 2]  # fmt: skip
#: Autocast's dtype, and the dtypes of the arguments. The quick run tests bfloat16 with the first pair, and float16 with all but
#: equal halves, which are cast to themselves. The slow run tests all.
LOWER = [
    *[(torch.float16, pair) for pair in PAIRS if pair != (torch.float16,) * 2 or examples(0, 1)],
    *[(torch.bfloat16, pair) for pair in PAIRS[: examples(1, 6)]],
]


def operands(first, second, device):
    """The tensors for the names in the expressions, on `device`."""
    shapes = {"uv": (8,), "mn": (8, 8), "bc": (8, 8, 8), "xy": (8, 8, 8, 8), "pq": (8, 8, 8, 8, 8)}
    made = {}
    for names, shape in shapes.items():
        for name, dtype in zip(names, (first, second), strict=True):
            made[name] = torch.full(shape, 0.25, dtype=dtype, device=device)
    for name, rows in (("g", 32), ("g3", 24)):
        made[name] = torch.full((rows, 8), 0.25, dtype=first, device=device)
        made[name.replace("g", "h")] = torch.full((rows,), 0.25, dtype=first, device=device)
    made["i"] = torch.zeros(8, dtype=torch.int64, device=device)
    return {**made, "torch": torch, "A": torch.ops.aten, "F": torch.nn.functional}


def dtypes(device):
    """Result dtypes by (call, pair, autocast's dtype); None if the call fails."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lower, pair in LOWER:
            names = operands(*pair, device)
            for name, call in CALLS.items():
                try:
                    torch.set_autocast_dtype("cuda", lower)
                    torch.set_autocast_enabled("cuda", True)
                    result = eval(call, names)  # noqa: S307  # calls that stand in this file
                except (RuntimeError, NotImplementedError, ValueError, AssertionError):
                    result = None
                finally:
                    torch.set_autocast_enabled("cuda", False)
                    torch.set_autocast_dtype("cuda", torch.float16)
                    torch.clear_autocast_cache()
                results = result if isinstance(result, (tuple, list)) else [result]
                kinds = None if result is None else [str(t.dtype) for t in results]
                found[f"{name} of {pair[0]}, {pair[1]} in {lower}"] = kinds
    return found


if __name__ == "__main__":
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        print(json.dumps(dtypes("cuda")))
