"""Laws for linear algebra: factors must fit the right-hand side, and pivots must be valid row numbers."""

from __future__ import annotations

import torch

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    require,
    require_contiguous,
    require_range,
    require_shape,
)


def _lu_pivots(given: Arguments) -> None:
    """Require that pivots are row numbers, counted from 1 (LAPACK's getrs, laswp)."""
    name = "pivots" if "pivots" in given else "LU_pivots"
    rows = int(given["LU" if "LU" in given else "LU_data"].shape[-2])
    require_range(name, given[name], 1, rows + 1)


def _unpacked(given: Arguments) -> None:
    t = given["LU_data"]
    require(t.dim() >= 2, "LU_data must have at least 2 dimensions")
    if given["unpack_pivots"]:
        require_shape(given, "LU_pivots", [*t.shape[:-2], min(t.shape[-2:])])
    _factors(given)


def _unpacked_values(given: Arguments) -> None:
    if given["unpack_pivots"]:
        _lu_pivots(given)


def _ldl_shapes(given: Arguments) -> None:
    """Require that the pivots have the broadcast batch shape. The kernel broadcasts all other arguments itself."""
    batch = torch.broadcast_shapes(given["LD"].shape[:-2], given["B"].shape[:-2])
    require(given["pivots"].shape[:-1] == batch, f"the batch dimensions of pivots must be {list(batch)}")


def _ldl_pivots(given: Arguments) -> None:
    """Require row numbers, counted from 1. Two consecutive negative ones stand for a 2 x 2 block (LAPACK's sytrs, hetrs)."""
    pivots, rows = given["pivots"], int(given["LD"].shape[-1])
    require_range("pivots", pivots.abs(), 1, rows + 1)
    require_range(
        "pivots", pivots, -rows, rows + 1
    )  # abs() of the smallest integer overflows, so the line above does not catch it
    negative = (pivots < 0).cpu()
    second = torch.zeros(negative.shape[:-1], dtype=torch.bool)
    alone = second.clone()
    for k in range(negative.shape[-1]):
        alone |= second & ~negative[..., k]
        second = negative[..., k] & ~second
    require(not bool((alone | second).any()), "negative values of pivots must come in consecutive pairs")


def _factored(given: Arguments) -> None:
    b = given["self"]
    require(b.dim() >= 2, "self must have at least 2 dimensions")
    require_shape(given, "A", [*b.shape[:-1], b.shape[-2]])


def _triangular(given: Arguments) -> None:
    """Require that a result for a batch is contiguous. The kernel steps through it as if its matrices were adjacent."""
    out = given.get("out")
    if out is not None and out.dim() > 2:
        require_contiguous("out", out)


def _factors(given: Arguments) -> None:
    """Require that triangular results for a batch are contiguous, as `_triangular`."""
    for name in ("L", "U"):
        t = given.get(name)
        if t is not None and t.dim() > 2:
            require_contiguous(name, t)


def _added_products(given: Arguments) -> None:
    """Require that self has the shape of the products. The library would resize it."""
    a, b = given["batch1"], given["batch2"]
    require(a.dim() == b.dim() == 3, "batch1 and batch2 must have 3 dimensions")
    require_shape(given, "self", [a.shape[1], b.shape[2]])


def _has_columns(given: Arguments) -> None:
    """Require that B has a column: for the driver gelss, the library reads a null pointer without one."""
    a, b = given["self"], given["b"]
    if given["driver"] == "gelss" and a.numel():
        require(b.numel() > 0, "driver gelss needs at least one column in b; use driver gelsy")


def _finite(given: Arguments) -> None:
    require(bool(given["self"].isfinite().all()), "torch.linalg.eigvals: input tensor should not contain infs or NaNs.")


LAWS: dict[str, ArgumentLaw] = {
    "_cholesky_solve_helper": ArgumentLaw(_factored),
    **dict.fromkeys(("_linalg_eigvals", "linalg_eigvals"), ArgumentLaw(None, _finite)),
    "addbmm_": ArgumentLaw(_added_products),
    "linalg_lu": ArgumentLaw(_factors),
    "linalg_lstsq": ArgumentLaw(_has_columns),
    **dict.fromkeys(("tril", "triu"), ArgumentLaw(_triangular)),
    "linalg_lu_solve": ArgumentLaw(None, _lu_pivots),
    "linalg_ldl_solve": ArgumentLaw(_ldl_shapes, _ldl_pivots),
    "lu_unpack": ArgumentLaw(_unpacked, _unpacked_values),
}
