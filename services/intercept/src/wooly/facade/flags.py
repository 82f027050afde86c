"""Patches of the functions that set flags of CUDA's libraries: TF32, reduced precision, deterministic algorithms of cuDNN."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from wooly.flags import Flags
from wooly.torch_private import flag_switches

Patch = tuple[Any, str, Any]


def patches(flags: Flags) -> Iterator[Patch]:
    """Yield the patches (owner, name, value): each switch also tells the kernels the new flags.

    `torch.set_float32_matmul_precision`, and the attributes and context managers of `torch.backends`, call these switches.
    """

    def following(real: Any) -> Any:
        @functools.wraps(real)
        def switch(*args: Any, **kwargs: Any) -> None:
            try:
                real(*args, **kwargs)
            finally:  # a function that raises an error may have changed a part of the flags
                flags.look()

        return switch

    for owner, name in flag_switches():
        yield (owner, name, following(getattr(owner, name)))
    flags.look()
