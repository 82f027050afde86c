"""What the script asked of `torch.use_deterministic_algorithms`, and who must know when it changes.

PyTorch keeps the switch per process. Plans of operators that depend on it are cached per mode, so a call does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wooly.torch_private import deterministic_fill, deterministic_mode


class Mode(NamedTuple):
    """One state of PyTorch's switch.

    Attributes:
        on: operators must be deterministic.
        warn_only: an operator that cannot be deterministic warns; else it raises an error.
        fills: memory that an operator leaves undefined is filled with NaN, or the largest number of an integer dtype.
    """

    on: bool = False
    warn_only: bool = False
    fills: bool = False


class Determinism:
    """The current mode of the process.

    Attributes:
        mode: the mode when `look` was last called.
    """

    def __init__(self) -> None:
        self.mode = Mode()
        self._watchers: list[Callable[[Mode], None]] = []

    def watch(self, changed: Callable[[Mode], None]) -> None:
        """Call `changed` with the new mode after each change."""
        self._watchers.append(changed)

    def look(self) -> None:
        """Read PyTorch's switch. The facade calls this after each function that may change it."""
        on, warn_only = deterministic_mode()
        mode = Mode(on, warn_only and on, on and deterministic_fill())
        if mode != self.mode:
            self.mode = mode
            for changed in self._watchers:
                changed(mode)
