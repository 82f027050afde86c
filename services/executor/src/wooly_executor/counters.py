"""Counters of what sessions have done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """The counters of one session."""

    programs: int = 0
    instructions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Work:
    """Computing instructions and device time (ns), by how they ran: kernels, library calls, tier 0. `rejected` counts bad
    artifacts.
    """

    kernel_instructions: int = 0
    library_instructions: int = 0
    tier0_instructions: int = 0
    kernel_ns: int = 0
    library_ns: int = 0
    tier0_ns: int = 0
    rejected: int = 0

    def ran(self, prepared: Any, computing: int, gpu_ns: int, kernel_ns: int) -> None:
        """Add a program that has ended, with or without an error."""
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
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}
