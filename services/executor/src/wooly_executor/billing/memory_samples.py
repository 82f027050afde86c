"""Records how much device memory each account is charged for, in consecutive intervals without gaps.

The device loop's thread owns this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wooly_executor.memory.accounts import Account
from wooly_executor.memory.ledger import Ledger


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The charges of one account in one interval: see `wooly_wis.messages.MemoryBorne`."""

    session: str
    tenant: str
    sequence: int
    from_ns: int
    to_ns: int
    own: int
    shared: int
    own_byte_ns: int
    shared_byte_ns: int
    host: int
    disk: int
    last: bool


class MemorySamples:
    """The samples of all accounts of one device.

    Args:
        ledger: integrates the charges.
        clock: returns monotonic ns.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], int]) -> None:
        self._ledger, self._clock = ledger, clock
        # by account: sequence number, end of the last interval, integrals so far
        self._told: dict[str, tuple[int, int, int, int]] = {}
        self._ended: list[MemorySample] = []

    def open(self, account: Account, now: int) -> None:
        """Start an account at a time in ns."""
        self._told[account.name] = (0, now, 0, 0)

    def close(self, account: Account, swapped: tuple[int, int] = (0, 0)) -> None:
        """Take the last sample of an account that is about to be closed."""
        self._ended.append(self._sample(account, swapped, last=True))
        del self._told[account.name]

    def take(self, accounts: Iterable[tuple[Account, tuple[int, int]]]) -> list[MemorySample]:
        """The samples of accounts that were closed since the last call, and of the given accounts.

        Args:
            accounts: open accounts with their bytes in host memory and on disk.
        """
        ended, self._ended = self._ended, []
        return ended + [self._sample(account, swapped) for account, swapped in accounts]

    def _sample(self, account: Account, swapped: tuple[int, int], *, last: bool = False) -> MemorySample:
        now = self._clock()
        sequence, since, own, shared = self._told[account.name]
        bearing = self._ledger.bearing(account, now)
        self._told[account.name] = (sequence + 1, now, bearing.own_byte_ns, bearing.shared_byte_ns)
        return MemorySample(
            account.name,
            account.tenant,
            sequence + 1,
            since,
            now,
            bearing.own,
            bearing.shared,
            bearing.own_byte_ns - own,
            bearing.shared_byte_ns - shared,
            *swapped,
            last,
        )
