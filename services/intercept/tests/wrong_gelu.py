"""An executor whose library computes a wrong GELU: the first element is off by a quarter, the others are rounded differently."""

import sys
import warnings

import torch
from wooly_executor.app import main

library = torch.library.Library("aten", "IMPL")


def wrong(x, approximate="none"):
    y = 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
    y.view(-1)[:1] += 0.25
    return y


def wrong_out(x, *, approximate="none", out):
    return out.copy_(wrong(x))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the kernel is replaced
        library.impl("gelu", wrong, "CPU")
        library.impl("gelu.out", wrong_out, "CPU")
    sys.exit(main())
