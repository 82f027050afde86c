"""Fits the polynomials of `wooly_compiler.mathlib` and prints their coefficients.

Each fit minimises the largest weighted error on an interval (Lawson's algorithm on a dense grid, in 50 digits). Then it rounds
the coefficients to f32, from the lowest power up, and fits the others again each time.

Run: .venv/bin/python services/compiler/tools/fit_math.py
"""

import math

import mpmath as mp
import numpy as np

mp.mp.dps = 50


def fit(function, low, high, degree, weight=lambda x: 1.0, n=1200):
    """Return the coefficients, lowest power first, of a polynomial near `function` on [low, high]."""
    nodes = [(low + high) / 2 + (high - low) / 2 * math.cos(math.pi * (k + 0.5) / n) for k in range(n)]
    values = np.array([float(function(mp.mpf(x))) for x in nodes])
    scale = np.array([float(weight(mp.mpf(x))) for x in nodes])
    x = np.array(nodes)
    fixed = []
    for power in range(degree + 1):
        rest = values - sum(c * x**k for k, c in enumerate(fixed))
        powers = np.stack([x**k for k in range(power, degree + 1)], 1)
        lawson = np.ones(n) / n
        for _ in range(60):
            w = np.sqrt(lawson) * scale
            found, *_ = np.linalg.lstsq(powers * w[:, None], rest * w, rcond=None)
            error = np.abs((powers @ found - rest) * scale)
            lawson *= error + 1e-300
            lawson /= lawson.sum()
        fixed.append(float(np.float32(found[0])))
    error = np.abs((sum(c * x**k for k, c in enumerate(fixed)) - values) * scale).max()
    return fixed, error


def series(function, tiny):
    """Return `function` by its Taylor series, for arguments at which the formula loses digits."""
    coefficients = mp.taylor(function, 0, 24)

    def at(x, start):
        return sum(c * x ** (k - start) for k, c in enumerate(coefficients) if k >= start)

    return at


def show(name, found):
    coefficients, error = found
    print(f"{name} = (  # weighted error {error:.1e}")
    for c in coefficients:
        print(f"    {c!r},")
    print(")")


if __name__ == "__main__":
    exp, log1p, tanh = series(mp.exp, 0), series(mp.log1p, 0), series(mp.tanh, 0)
    erf, sin, cos = series(mp.erf, 0), series(mp.sin, 0), series(mp.cos, 0)
    show("EXP", fit(lambda r: exp(r, 2), -0.3467, 0.3467, 5, lambda r: r * r / mp.exp(r)))

    def log_tail(f):
        return (mp.log1p(f) - f + f * f / 2) / f**3 if abs(f) > 0.02 else log1p(f, 3)

    show("LOG", fit(log_tail, -0.2930, 0.4143, 8, lambda f: abs(f * f * f / mp.log1p(f))))
    show(
        "TANH",
        fit(
            lambda z: tanh(mp.sqrt(z), 3) if z < 0.01 else (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
            1e-9,
            0.391,
            5,
            lambda z: z,
        ),
    )
    show("ERF", fit(lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1 if z > 0 else 0, 1e-9, 1.0, 6))

    def erfc_root(t):
        return mp.root(mp.erfc(t + 1), 4)

    show("ERFC_ROOT", fit(erfc_root, 0.0, 3.0, 8, lambda t: 4 * erfc_root(t) ** 3 / mp.erf(t + 1)))
    show("SIN", fit(lambda z: sin(mp.sqrt(z), 3), 1e-9, 0.6169, 3, lambda z: z))
    show("COS", fit(lambda z: cos(mp.sqrt(z), 4), 1e-9, 0.6169, 3, lambda z: z * z))
    show(
        "EXP2",
        fit(
            lambda r: (mp.power(2, r) - 1) / r if abs(r) > 1e-3 else mp.log(2) * exp(r * mp.log(2), 1),
            -0.5,
            0.5,
            6,
            lambda r: r / mp.power(2, r),
        ),
    )
