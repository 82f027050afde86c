"""Steps of optimizers as programs, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from wooly_wis.dtypes import DType

from wooly_testkit.tape import Tape, Tensor

#: Learning rate, weight decay, both decay rates of the averages, and the number that is added to the denominator.
LR, DECAY, BETA1, BETA2, EPS = 1e-3, 0.01, 0.9, 0.999, 1e-8


def adamw(tape: Tape, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Write the second step of AdamW over tensors of these sizes.

    Returns:
        Parameter, gradient and both averages of each tensor, which are inputs of the program.
    """
    found = []
    for n in sizes:
        p, g, m, v = (tape.input(DType.F32, n) for _ in range(4))
        tape.op("mul", p, 1 - LR * DECAY, into=p)
        tape.op("lerp", m, g, 1 - BETA1, into=m)
        tape.op("mul", v, BETA2, into=v)
        tape.op("addcmul", v, g, g, 1 - BETA2, into=v)
        d = tape.op("sqrt", v)
        tape.op("div", d, (1 - BETA2**2) ** 0.5, into=d)
        tape.op("add", d, EPS, into=d)
        tape.op("addcdiv", p, m, d, -LR / (1 - BETA1**2), into=p)
        tape.free(d)
        found.append((p, g, m, v))
    return found
