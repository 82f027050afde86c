"""What sessions have done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """What a session has done."""

    programs: int = 0
    instructions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Work:
    """Who did how much: computing instructions, and device time in ns. `rejected`: plans that were bad."""

    kernel_instructions: int = 0
    library_instructions: int = 0
    tier0_instructions: int = 0
    kernel_ns: int = 0
    library_ns: int = 0
    tier0_ns: int = 0
    rejected: int = 0

    def ran(self, prepared: Any, computing: int, gpu_ns: int, kernel_ns: int) -> None:
        """A program ran to its end, or to its failure."""
        by_kernel = getattr(prepared, "by_kernel", None)
        if by_kernel is None:
            self.tier0_instructions += computing
            self.tier0_ns += gpu_ns
            return
        self.kernel_instructions += by_kernel
        self.library_instructions += prepared.by_library
        self.kernel_ns += kernel_ns
        self.library_ns += max(gpu_ns - kernel_ns, 0)

    def to_json(self) -> dict[str, int]:
        """Its numbers by name."""
        return {name: getattr(self, name) for name in self.__slots__}
