"""Orthogonal polynomials: the library adds up one degree after the other, for as long as the number says."""

from __future__ import annotations

import torch

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require

#: The highest degree that is computed.
DEGREE = 1 << 16


def _degree(given: Arguments) -> None:
    n = given["n"]
    if n.numel():
        highest = float(n.to(torch.float64).nan_to_num(0.0).max())
        require(highest <= DEGREE, f"n must be at most {DEGREE}, it is {highest:g}")


#: Chebyshev's stop where a value is no number, which beside 1 takes more degrees than anybody waits for. Hermite's grow fast.
LAWS: dict[str, ArgumentLaw] = {
    "special_laguerre_polynomial_l": ArgumentLaw(None, _degree),
    "special_legendre_polynomial_p": ArgumentLaw(None, _degree),
    **{
        f"special_{shifted}chebyshev_polynomial_{kind}": ArgumentLaw(None, _degree)
        for shifted in ("", "shifted_")
        for kind in ("t", "u", "v", "w")
    },
}
