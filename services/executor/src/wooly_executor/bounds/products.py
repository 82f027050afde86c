"""Estimates for operators that multiply matrices: products, convolutions, attention, recurrent layers, decompositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wooly_wis.program import View

from wooly_executor.bounds.elementwise import over_all
from wooly_executor.bounds.work import Given, Work, broadcast, product

Rule = Callable[[Given], Work]
#: Cost of one step of a recurrent layer besides its products, in elements: a dozen calls of small operators.
STEP = 5_000
#: Cost of the product of one group besides its numbers, in elements.
GROUP = 500
#: Cost of one head of an attention besides its scores, in elements.
HEAD = 64


def _flops(given: Given, flops: int) -> Work:
    return Work(given.touched(), flops * given.factor())


def _product(a: str, b: str) -> Rule:
    """Count [..., m, k] times [..., k, n]. A vector is a matrix with one row or one column."""

    def rule(given: Given) -> Work:
        left, right = given.sizes(a), given.sizes(b)
        batch = broadcast([left[:-2], right[:-2]])
        rows, k = (left[-2] if len(left) > 1 else 1), (left[-1] if left else 1)
        columns = right[-1] if len(right) > 1 else 1
        return _flops(given, 2 * batch * rows * k * columns)

    return rule


def _grouped(given: Given) -> Work:
    """Count a product of each group of rows, columns or inner elements. All groups together are as large as the whole matrix."""
    left, right = given.sizes("self"), given.sizes("mat2")
    if min(len(left), len(right)) < 2:
        return _flops(given, given.touched())
    groups = max([*given.sizes("offs")[:1], *[sizes[0] for sizes in (left, right) if len(sizes) > 2], 1])
    batch = left[0] if len(left) == len(right) == 3 else 1
    flops = 2 * batch * left[-2] * left[-1] * right[-1]
    return Work(given.touched() + groups * GROUP, flops * given.factor())


def _linear(given: Given) -> Work:
    return _flops(given, 2 * given.numel("input") * (given.sizes("weight") or (1,))[0])


def _product_lists(given: Given) -> Work:
    pairs = zip(given.tensors("self"), given.tensors("mat2"), strict=False)
    return _flops(given, sum([2 * a.numel * (b.sizes[-1:] or (1,))[0] for a, b in pairs]))


# -- convolutions --------------------------------------------------------------------------------------------------------


def _convolved(given: Given, input_name: str) -> tuple[int, int]:
    """Return the number of elements of a convolution's result, and the multiplications per element."""
    sizes, weight = given.sizes(input_name), given.sizes("weight")
    n = max(len(weight) - 2, 0)
    if len(weight) < 2 or len(sizes) < n + 1:
        return given.touched(), max(product(weight), 1)
    batch = sizes[0] if len(sizes) > n + 1 else 1
    stride, padding = given.numbers("stride", n, 1), given.numbers("padding", n, 0)
    dilation, extra = given.numbers("dilation", n, 1), given.numbers("output_padding", n, 0)
    groups = max(given.number("groups", 1), 1)
    if given.values.get("transposed") is True:
        # Each element of the input is multiplied by the weights of its group.
        spatial = product(
            max((size - 1) * s - 2 * p + d * (k - 1) + e + 1, 0)
            for size, s, p, d, k, e in zip(sizes[-n:], stride, padding, dilation, weight[2:], extra, strict=False)
        )
        out = batch * weight[1] * groups * spatial
        muls = product(sizes) * weight[1] * product(weight[2:])
        return max(out, 1), -(-muls // max(out, 1))
    spatial = product(
        max((size + 2 * p - d * (k - 1) - 1) // max(s, 1) + 1, 0)
        for size, s, p, d, k in zip(sizes[-n:] if n else (), stride, padding, dilation, weight[2:], strict=False)
    )
    return batch * weight[0] * spatial, product(weight[1:])


def _convolution(times: int) -> Rule:
    """Count one multiplication per input in an element's window. `times`: 1 for the forward, 3 for the backward (two
    gradients).
    """

    def rule(given: Given) -> Work:
        out, window = _convolved(given, "input")
        # Some devices copy all windows into one matrix (im2col).
        columns = out // max((given.sizes("weight") or (1,))[0], 1) * window
        return Work(given.touched() + out + columns, times * 2 * out * window * given.factor())

    return rule


# -- attention -----------------------------------------------------------------------------------------------------------


def _attention(times: int, passes: int) -> Rule:
    """Count `times` two matrix products of each head, `passes` elements of work per score, and the call of each head."""

    def rule(given: Given) -> Work:
        q, k, v = given.sizes("query"), given.sizes("key"), given.sizes("value")
        batch = broadcast([q[:-2], k[:-2], v[:-2]]) if q and k else 1
        rows, columns = (q[-2] if len(q) > 1 else 1), (k[-2] if len(k) > 1 else 1)
        width = (q[-1] if q else 1) + (v[-1] if v else 1)
        points = batch * rows * columns
        return Work(passes * points + HEAD * batch + given.touched(), times * 2 * points * width * given.factor())

    return rule


def _heads(sizes: Sequence[int], embed: int, heads: int, more: int) -> tuple[int, int]:
    """Return the scores and flops of an attention layer with its projections. `more`: further weights that each token is
    multiplied by.
    """
    batch, length = (sizes[0], sizes[1]) if len(sizes) > 2 else (1, sizes[0] if sizes else 1)
    tokens = batch * length
    return batch * heads * length * length, 2 * tokens * (4 * embed * embed + more) + 4 * tokens * length * embed


def _multi_head(given: Given) -> Work:
    embed, heads = (
        max(given.number("embed_dim", 1), (given.sizes("query") or (1,))[-1]),
        max(given.number("num_head"), 1),
    )
    lengths = max([given.sizes(n) for n in ("query", "key", "value")], key=product)
    scores, flops = _heads(lengths, embed, heads, 0)
    return Work(16 * scores + given.touched(), flops * given.factor())


def _encoder(given: Given) -> Work:
    embed, heads = (
        max(given.number("embed_dim", 1), (given.sizes("src") or (1,))[-1]),
        max(given.number("num_heads"), 1),
    )
    more = given.numel("ffn_weight_1") + given.numel("ffn_weight_2")
    scores, flops = _heads(given.sizes("src"), embed, heads, more)
    return Work(16 * scores + 32 * given.touched(), flops * given.factor())


# -- recurrent layers ----------------------------------------------------------------------------------------------------


def _weights(views: Sequence[View]) -> int:
    return sum([v.numel for v in views if len(v.sizes) > 1])


def _recurrent(given: Given) -> Work:
    """Count each row of the input times all weights, and the steps, which run one after the other."""
    name = "data" if given.view("data") is not None else "input"
    sizes = given.sizes(name)
    rows = product(sizes[:-1])
    steps = max(sizes[:2], default=1) * max(given.number("num_layers", 1), 1) * 2
    return Work(given.touched() + STEP * steps, 2 * rows * _weights(given.tensors("params")) * given.factor())


def _layer(times: int) -> Rule:
    """Count one layer whose weights are separate arguments."""

    def rule(given: Given) -> Work:
        sizes, hidden = given.sizes("input"), max(given.number("hidden_size", 1), 1)
        weights = _weights([v for name, v in given.values.items() if name.startswith("weight") and isinstance(v, View)])
        rows, layers = product(sizes[:-1]), max(given.number("num_layers", 1), 1)
        steps = max(sizes[:2], default=1) * layers
        flops = times * 2 * rows * layers * max(weights, 4 * hidden * hidden)
        return Work(given.touched() + times * (STEP * steps + 16 * rows * hidden), flops * given.factor())

    return rule


def _cell(given: Given) -> Work:
    rows = product(given.sizes("input")[:-1])
    weights = [v for n in ("w_ih", "w_hh") if (v := given.view(n)) is not None]
    return Work(8 * given.touched(), 2 * rows * _weights(weights) * given.factor())


# -- decompositions ------------------------------------------------------------------------------------------------------


def _decomposition(name: str, factor: int, right: str = "") -> Rule:
    """Count `factor` * m * n * min(m, n) per matrix, and a product with the right-hand side."""

    def rule(given: Given) -> Work:
        sizes = given.sizes(name)
        m, n = (sizes[-2], sizes[-1]) if len(sizes) > 1 else (1, sizes[-1] if sizes else 1)
        batch, least = product(sizes[:-2]), min(m, n)
        if given.values.get("full_matrices") is True or given.values.get("mode") == "complete":
            least, m, n = min(m, n), max(m, n), max(m, n)
        flops = factor * m * n * least
        if right:
            other = given.sizes(right)
            batch = broadcast([sizes[:-2], other[:-2]])
            flops += 4 * max(m, n) ** 2 * (other[-1] if len(other) > 1 else 1)
        calls = batch * (m + n) * 64  # LAPACK is called once per matrix
        return Work(given.touched() + calls, 2 * batch * flops * given.factor())

    return rule


def _factorisation(given: Given) -> Work:
    """Count an LU factorisation. Without pivoting, small operators eliminate one column after the other."""
    work, sizes = _decomposition("A", 2)(given), given.sizes("A")
    if given.values.get("pivot", True) is True or len(sizes) < 2:
        return work
    return work + Work(min(sizes[-2:]) * STEP, 0)


PRODUCTS: dict[str, Rule] = {
    **dict.fromkeys(("mm", "_int_mm", "_scaled_mm"), _product("self", "mat2")),
    "bmm": _product("self", "mat2"),
    "_grouped_mm": _grouped,
    **dict.fromkeys(("addmm", "_addmm_activation"), _product("mat1", "mat2")),
    **dict.fromkeys(("addbmm", "baddbmm"), _product("batch1", "batch2")),
    "addmv": _product("mat", "vec"),
    "_foreach_mm": _product_lists,
    "linear": _linear,
    "convolution": _convolution(1),
    "convolution_backward": _convolution(3),
    "_scaled_dot_product_attention_math": _attention(1, 8),
    # measured: 0.2 and 0.5 elements per score in float32, 0.6 and 2.2 in float64
    "_scaled_dot_product_flash_attention_for_cpu": _attention(1, 1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(3, 3),
    "_native_multi_head_attention": _multi_head,
    "_transformer_encoder_layer_fwd": _encoder,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "mkldnn_rnn_layer": _layer(1),
    "mkldnn_rnn_layer_backward": _layer(3),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    **dict.fromkeys(("cholesky", "cholesky_inverse"), _decomposition("self", 2)),
    "_cholesky_solve_helper": _decomposition("A", 2, "self"),
    "linalg_cholesky_ex": _decomposition("self", 2),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), _decomposition("A", 2)),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), _factorisation),
    "linalg_inv_ex": _decomposition("A", 4),
    "_linalg_solve_ex": _decomposition("A", 2, "B"),
    "linalg_lu_solve": _decomposition("LU", 2, "B"),
    "linalg_ldl_factor_ex": _decomposition("self", 4),
    "linalg_ldl_solve": _decomposition("LD", 4, "B"),
    "linalg_solve_triangular": _decomposition("self", 1, "B"),
    "triangular_solve": _decomposition("A", 1, "self"),
    "linalg_qr": _decomposition("A", 8),
    "geqrf": _decomposition("self", 8),
    "linalg_householder_product": _decomposition("input", 8),
    "ormqr": _decomposition("self", 4, "input2"),
    "linalg_lstsq": _decomposition("self", 32, "b"),
    "linalg_matrix_exp": _decomposition("self", 64),
    "_linalg_eigh": _decomposition("A", 32),
    "_linalg_svd": _decomposition("A", 64),
    "_linalg_eigvals": _decomposition("self", 64),
    **dict.fromkeys(("linalg_eigvals", "linalg_eig"), _decomposition("self", 128)),
}


def over_pairs(given: Given) -> Work:
    """Count the distances between all rows of two lists of points."""
    a, b = given.sizes("x1"), given.sizes("x2")
    batch, width = broadcast([a[:-2], b[:-2]]), (a[-1] if a else 1)
    points = batch * (a[-2] if len(a) > 1 else 1) * (b[-2] if len(b) > 1 else 1)
    return Work(4 * points * max(width, 1)) + over_all(given, 1)


def over_own_pairs(given: Given) -> Work:
    """Count the distances between all rows of one list of points."""
    sizes = given.sizes("self")
    rows = sizes[0] if sizes else 1
    return Work(2 * rows * rows * max((sizes or (1,))[-1], 1)) + over_all(given, 1)
