"""Operators whose work depends on the number of indices, and operators that get the size of their result as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.program import View

from wooly_executor.bounds.elementwise import over_all, over_space, sorted_along
from wooly_executor.bounds.work import Given, Work, broadcast, log2, product

Rule = Callable[[Given], Work]


def _slices(given: Given) -> Work:
    """Count one slice of `self` per element of `index`, along `dim`."""
    sizes, dim = given.sizes("self"), given.values.get("dim")
    if isinstance(dim, int) and sizes and -len(sizes) <= dim < len(sizes):
        along = sizes[dim]
    else:
        along = min(sizes, default=1)
    return Work(given.numel("index") * (given.numel("self") // max(along, 1))) + over_all(given, 1)


def _indexed(given: Given) -> Work:
    """Count the elements of `self[indices]`: the broadcast shape of the indices, times the dimensions without an index."""
    sizes = given.sizes("self")
    indices: Any = given.values.get("indices")
    shapes: list[tuple[int, ...]] = []
    rest, at = 1, 0
    for index in indices if isinstance(indices, tuple) else ():
        if isinstance(index, View) and index.dtype in (DType.BOOL, DType.U8):
            shapes.append((index.numel,))
            at += len(index.sizes)
        elif isinstance(index, View):
            shapes.append(index.sizes)
            at += 1
        else:
            rest *= sizes[at] if at < len(sizes) else 1
            at += 1
    count = broadcast(shapes) * rest * product(sizes[at:])
    return Work(4 * count) + over_all(given, 1)


def _embedding(given: Given) -> Work:
    return Work(given.numel("indices") * product(given.sizes("weight")[1:])) + over_all(given, 1)


def _embedding_grad(given: Given) -> Work:
    width = given.sizes("grad_output")[-1:] or given.sizes("grad")[-1:] or (1,)
    return Work((given.number("num_weights") + given.numel("indices")) * width[0]) + over_all(given, 2)


def _bags(given: Given) -> Work:
    width = product(given.sizes("weight")[1:]) or (given.sizes("grad")[-1:] or (1,))[0]
    rows = given.numel("indices") + given.numel("offsets") + given.number("num_weights")
    return Work(2 * rows * width) + over_all(given, 2)


def _searched(given: Given) -> Work:
    """Count one binary search per value."""
    name = "sorted_sequence" if given.view("sorted_sequence") is not None else "boundaries"
    values = max(given.numel("self"), 1)
    return Work(2 * values * log2(max(given.sizes(name), default=1))) + over_all(given, 1)


def _isin(given: Given) -> Work:
    """Count the cheaper of two methods: compare each element with each test element, or sort all of them."""
    n, m = max(given.numel("elements"), 1), max(given.numel("test_elements"), 1)
    return Work(min(n * m, 4 * (n + m) * log2(n + m))) + over_all(given, 1)


def _histogram(given: Given) -> Work:
    bins: Any = given.values.get("bins")
    counts = [v for v in bins if isinstance(v, int)] if isinstance(bins, tuple) else []
    tensors = [v.numel for v in given.tensors("bins")]
    cells = product(counts or tensors) if counts or tensors else max(given.number("bins"), given.numel("bins"))
    return Work(cells + 64 * given.touched())


def _counted(given: Given) -> Work:
    """Count the operands four times. The result is as long as the largest value, and the memory limit bounds it."""
    return Work(4 * given.touched() + given.number("minlength"))


def _sampled(given: Given) -> Work:
    rows = product(given.sizes("self")[:-1])
    return Work(16 * given.touched() + 32 * rows * given.number("num_samples"))


def _sized(*names: str) -> Rule:
    """Count the product of the named numbers, which is the size of the result."""

    def rule(given: Given) -> Work:
        return Work(product([max(given.number(n, 1), 0) for n in names])) + Work(given.touched())

    return rule


def _ranged(given: Given) -> Work:
    """Count the elements from `start` to `end` by `step`. If these are params, only the memory limit bounds the result."""
    start, end = given.number("start"), given.number("end")
    step = given.values.get("step")
    width = abs(float(step)) if isinstance(step, (int, float)) and step else 1.0
    return Work(min(int(abs(end - start) / width), 1 << 62)) + Work(given.touched())


def _permuted(given: Given) -> Work:
    return Work(16 * max(given.number("n"), 0) + given.touched())


def _repeated(given: Given) -> Work:
    """Count the operands four times. The values determine the length of the result, and the memory limit bounds it."""
    return Work(4 * given.touched() + given.number("output_size"))


def _unique_rows(given: Given) -> Work:
    sizes = given.sizes("self")
    return Work(4 * given.numel("self") * log2(max(sizes, default=1))) + over_all(given, 4)


def _gammas(given: Given) -> Work:
    return Work(16 * given.space() * max(given.number("p", 1), 1))


def _labels(given: Given) -> Work:
    """Count each class once for each target of its row."""
    return Work(given.numel("self") * (given.sizes("self")[-1:] or (1,))[0]) + over_all(given, 2)


def _selected(given: Given) -> Work:
    return over_space(given, 4)


INDEXING: dict[str, Rule] = {
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_reduce", "index_fill"), _slices),
    **dict.fromkeys(("index", "_index_put_impl"), _indexed),
    **dict.fromkeys(("masked_select", "masked_scatter"), _selected),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_grad,
    **dict.fromkeys(
        (
            "_embedding_bag",
            "_embedding_bag_backward",
            "_embedding_bag_dense_backward",
            "_embedding_bag_forward_only",
            "_embedding_bag_per_sample_weights_backward",
        ),
        _bags,
    ),
    **dict.fromkeys(("searchsorted", "bucketize"), _searched),
    "isin": _isin,
    **dict.fromkeys(
        (
            "histc",
            "histogram",
            "_histogramdd_bin_edges",
            "_histogramdd_from_bin_cts",
            "_histogramdd_from_bin_tensors",
        ),
        _histogram,
    ),
    "bincount": _counted,
    "multinomial": _sampled,
    **dict.fromkeys(("linspace", "logspace"), _sized("steps")),
    **dict.fromkeys(("tril_indices", "triu_indices"), _sized("row", "col")),
    "eye": lambda given: Work(
        max(given.number("n"), 0) * max(given.number("m", given.number("n")), 0) + given.touched()
    ),
    "kaiser_window": lambda given: Work(16 * max(given.number("window_length"), 0) + given.touched()),
    **dict.fromkeys(("arange", "range"), _ranged),
    "randperm": _permuted,
    "repeat_interleave": _repeated,
    "nonzero_static": lambda given: Work(
        max(given.number("size"), 0) * max(len(given.sizes("self")), 1) + 2 * given.touched()
    ),
    **dict.fromkeys(("unique_dim", "unique_dim_consecutive"), _unique_rows),
    **dict.fromkeys(("_unique", "_unique2", "unique_consecutive"), sorted_along),
    **dict.fromkeys(("sort", "topk", "median", "nanmedian", "mode"), sorted_along),
    "mvlgamma": _gammas,
    **dict.fromkeys(("multilabel_margin_loss_forward", "multilabel_margin_loss_backward"), _labels),
}
