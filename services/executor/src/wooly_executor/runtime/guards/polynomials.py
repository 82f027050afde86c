"""Laws for orthogonal polynomials: a limit on the degree. The library's time grows linearly with the degree."""

from __future__ import annotations

import torch

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require

#: Highest degree that the executor computes. One element of this degree takes 65,536 iterations.
DEGREE = 1 << 16


def _degree(given: Arguments) -> None:
    n = given["n"]
    if n.numel():
        highest = float(n.to(torch.float64).nan_to_num(0.0).max())
        require(highest <= DEGREE, f"n must be at most {DEGREE}, but it is {highest:g}")


#: The library stops Chebyshev polynomials early only if a value becomes NaN, so a large degree takes unlimited time. Hermite
#: polynomials need no law: their values grow fast, and the library stops at the first NaN.
LAWS: dict[str, ArgumentLaw] = {
    "special_laguerre_polynomial_l": ArgumentLaw(None, _degree),
    "special_legendre_polynomial_p": ArgumentLaw(None, _degree),
    **{
        f"special_{shifted}chebyshev_polynomial_{kind}": ArgumentLaw(None, _degree)
        for shifted in ("", "shifted_")
        for kind in ("t", "u", "v", "w")
    },
}
