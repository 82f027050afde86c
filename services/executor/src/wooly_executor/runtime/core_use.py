"""How many cores of a GPU a program occupies: for its generated kernels by the driver's occupancy, for the library by a profile.

A launch's device time says nothing about how much of the GPU it needs. Of generated kernels, the executor knows the blocks and
how many of them a core takes at once. Of the library's kernels, a profile of one run in many tells the blocks. Both are kept per
prepared program, as averages over its device time, and later runs are billed by them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wooly_executor.billing.cores import occupied
from wooly_executor.errors import OperationError

#: One in this many runs of a program is profiled, the second one first: the first run also loads code.
PROFILED_EVERY, PROFILED_FIRST = 64, 2
#: Cores are counted in thousandths. This is the bill of device time about which nothing is known: one core.
UNKNOWN = 1000
#: Maximum size of a profile in bytes, and of its kernels. A run of one program has at most some thousand launches.
PROFILE_BYTES, KERNELS = 64 << 20, 200_000


class KernelRecord(NamedTuple):
    """A kernel that the device ran: its name, its device time in ns, and its number of blocks."""

    name: str
    ns: int
    blocks: int


@dataclass(slots=True)
class CoreUse:
    """The cores that a prepared program occupies on average, in thousandths.

    Attributes:
        kernels: while its generated kernels run.
        library: in its other device time, which includes the gaps between kernels; None: no run was profiled yet.
    """

    kernels: int = UNKNOWN
    library: int | None = None
    _runs: int = 0
    _ns: int = 0
    _core_ns: int = 0

    def due(self) -> bool:
        """Count a run that begins. Returns whether it is profiled."""
        self._runs += 1
        if self._runs % PROFILED_EVERY != PROFILED_FIRST:
            return False
        self._ns = self._core_ns = 0
        return True

    def profiled(self, ns: int, records: Iterable[KernelRecord], own: Set[str], cores: int) -> None:
        """Add the profile of a part of a run.

        Args:
            ns: device time of the part.
            records: its kernels.
            own: names of generated kernels, whose cores are known otherwise.
            cores: number of cores of the device.
        """
        rest, core_ns = ns, 0
        for record in records:
            if record.name in own:
                rest -= record.ns
            else:
                core_ns += record.ns * occupied(record.blocks, None, cores) // 1000
        rest = max(rest, 0)
        self._ns += rest
        self._core_ns += min(core_ns, rest * cores)
        if self._ns:
            self.library = min(1000 * self._core_ns // self._ns, 1000 * cores)

    def measured(self, ns: int, core_ns: int, cores: int) -> None:
        """Note that the generated kernels of a run took `ns` and occupied `core_ns`."""
        if ns > 0:
            self.kernels = min(max(1000 * core_ns // ns, 0), 1000 * cores)

    def core_ns(self, ns: int, kernel_permille: int) -> int:
        """Return the core time to bill.

        Args:
            ns: device time of a part of a run.
            kernel_permille: share of generated kernels in it, in 1/1000.
        """
        kernels = ns * kernel_permille // 1000
        library = UNKNOWN if self.library is None else self.library
        return kernels * self.kernels // 1000 + (ns - kernels) * library // 1000


def read_profile(path: Path) -> list[KernelRecord]:
    """Return the kernels in a profile that torch has written in Chrome's trace format.

    Raises:
        OperationError: the file cannot be read, or has another form.
    """
    try:
        if path.stat().st_size > PROFILE_BYTES:
            raise OperationError(f"the profile has more than {PROFILE_BYTES >> 20} MiB")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise OperationError(f"the profile cannot be read: {e}") from e
    return kernel_records(found)


def kernel_records(profile: Any) -> list[KernelRecord]:
    """Return the kernels in a profile in Chrome's trace format.

    Raises:
        OperationError: it has another form.
    """
    events = profile.get("traceEvents") if isinstance(profile, dict) else None
    if not isinstance(events, list):
        raise OperationError("the profile has no list of events (traceEvents)")
    found = []
    for event in events:
        if not isinstance(event, dict) or event.get("cat") != "kernel":
            continue
        name, args = event.get("name"), event.get("args")
        us: Any = event.get("dur")
        grid = args.get("grid") if isinstance(args, dict) else None
        if not isinstance(name, str) or not _is_count(us) or not isinstance(grid, list) or len(grid) != 3:
            raise OperationError("a kernel in the profile has no name, no duration or no grid")
        if not all(isinstance(n, int) and _is_count(n) for n in grid):
            raise OperationError("the grid of a kernel in the profile does not consist of three whole numbers")
        found.append(KernelRecord(name, round(1000 * us), math.prod(grid)))
        if len(found) > KERNELS:
            raise OperationError(f"the profile has more than {KERNELS} kernels")
    return found


def _is_count(value: Any) -> bool:
    """Whether a value is a number from 0 to 2**40."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1 << 40
