"""Linear algebra: factors that go with what is solved, pivots that are rows."""

from __future__ import annotations

import torch

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    require,
    sized,
    within,
)


def _lu_pivots(given: Arguments) -> None:
    """Rows, counted from 1 (LAPACK's getrs, laswp)."""
    name = "pivots" if "pivots" in given else "LU_pivots"
    rows = int(given["LU" if "LU" in given else "LU_data"].shape[-2])
    within(name, given[name], 1, rows + 1)


def _unpacked(given: Arguments) -> None:
    t = given["LU_data"]
    require(t.dim() >= 2, "LU_data must have at least 2 dimensions")
    if given["unpack_pivots"]:
        sized(given, "LU_pivots", [*t.shape[:-2], min(t.shape[-2:])])


def _unpacked_values(given: Arguments) -> None:
    if given["unpack_pivots"]:
        _lu_pivots(given)


def _ldl_shapes(given: Arguments) -> None:
    """The kernel broadcasts all but the pivots."""
    batch = torch.broadcast_shapes(given["LD"].shape[:-2], given["B"].shape[:-2])
    require(given["pivots"].shape[:-1] == batch, f"pivots must have batch dimensions {list(batch)}")


def _ldl_pivots(given: Arguments) -> None:
    """Rows, counted from 1; two negative ones in a row are a block of 2 by 2 (LAPACK's sytrs, hetrs)."""
    pivots, rows = given["pivots"], int(given["LD"].shape[-1])
    within("pivots", pivots.abs(), 1, rows + 1)
    within("pivots", pivots, -rows, rows + 1)  # the least number has no magnitude
    negative = (pivots < 0).cpu()
    second = torch.zeros(negative.shape[:-1], dtype=torch.bool)
    alone = second.clone()
    for k in range(negative.shape[-1]):
        alone |= second & ~negative[..., k]
        second = negative[..., k] & ~second
    require(not bool((alone | second).any()), "pivots: negative ones must come in pairs")


def _factored(given: Arguments) -> None:
    b = given["self"]
    require(b.dim() >= 2, "self must have at least 2 dimensions")
    sized(given, "A", [*b.shape[:-1], b.shape[-2]])


def _finite(given: Arguments) -> None:
    require(bool(given["self"].isfinite().all()), "input tensor should not contain infs or NaNs")


LAWS: dict[str, ArgumentLaw] = {
    "_cholesky_solve_helper": ArgumentLaw(_factored),
    "_linalg_eigvals": ArgumentLaw(None, _finite),
    "linalg_lu_solve": ArgumentLaw(None, _lu_pivots),
    "linalg_ldl_solve": ArgumentLaw(_ldl_shapes, _ldl_pivots),
    "lu_unpack": ArgumentLaw(_unpacked, _unpacked_values),
}
