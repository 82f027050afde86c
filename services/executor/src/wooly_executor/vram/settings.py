"""What an operator may set of swapping."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from wooly_executor.memory.swap import Policy


@dataclass(frozen=True, slots=True)
class SwapSettings:
    """What an operator may set. Memory in bytes.

    Attributes:
        policy: reserve, what a large allocation is, how long a session must be idle.
        host: budget of pinned host memory.
        disk: budget of disk.
        folder: where swap files are.
        patience_ns: how long an allocation waits at least for others to become idle before it fails; otherwise as long as they
            must have been idle, since whoever has not been idle by then is not going to be.
    """

    policy: Policy = field(default_factory=Policy)
    host: int = 0
    disk: int = 0
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    patience_ns: int = 10_000_000_000
