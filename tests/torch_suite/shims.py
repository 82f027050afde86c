"""Names that PyTorch's tests of 2.6.0 import and later versions moved or removed."""

import sys


def install():
    """Put back the names of `torch.testing._internal` that moved since 2.6.0."""
