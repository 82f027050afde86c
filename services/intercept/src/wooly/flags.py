"""The flags of CUDA's libraries that the script has set, and who must know when they change.

PyTorch keeps these flags per process. The kernels of operators that follow a flag learn of a change, so a call does not ask for
the flags. See `wooly_wis.flags` for their names. PyTorch's defaults are no flags.
"""

from __future__ import annotations

from collections.abc import Callable

from wooly.torch_private import (
    bf16_reduction,
    fp16_accumulation,
    fp16_reduction,
    fp32_precision,
    prefers_deterministic_cudnn,
)


class Flags:
    """The current flags of the process.

    Attributes:
        current: the flags when `look` was last called, sorted.
    """

    def __init__(self) -> None:
        self.current: tuple[str, ...] = ()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change."""
        self._watchers.append(changed)

    def look(self) -> None:
        """Read PyTorch's flags. The facade calls this after each function that may change them."""
        found = tuple(sorted(_asked()))
        if found != self.current:
            self.current = found
            for changed in self._watchers:
                changed()


def _asked() -> list[str]:
    found = []
    if fp32_precision("cuda", "matmul") == "tf32":
        found.append("matmul_tf32")
    found += [f"no_{op}_tf32" for op in ("conv", "rnn") if fp32_precision("cuda", op) != "tf32"]
    for dtype, (reduces, splits) in (("fp16", fp16_reduction()), ("bf16", bf16_reduction())):
        if not reduces:
            found.append(f"no_{dtype}_reduction" if splits else f"no_{dtype}_split_k")
    if fp16_accumulation():
        found.append("fp16_accumulation")
    if prefers_deterministic_cudnn():
        found.append("cudnn_deterministic")
    return found
