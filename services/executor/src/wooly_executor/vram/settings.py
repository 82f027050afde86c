"""Settings of swapping, for operators."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from wooly_executor.memory.swap import Policy


@dataclass(frozen=True, slots=True)
class SwapSettings:
    """Settings of swapping. Memory in bytes.

    Attributes:
        policy: the reserve, the size of a large allocation, the required idle time.
        host: budget of pinned host memory.
        disk: budget of disk.
        folder: folder of the swap files.
        patience_ns: minimum time for which an allocation waits for other sessions to become idle before it fails. The policy's
            idle time applies if it is longer, because a session that is not idle after it will probably stay busy.
    """

    policy: Policy = field(default_factory=Policy)
    host: int = 0
    disk: int = 0
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    patience_ns: int = 10_000_000_000
