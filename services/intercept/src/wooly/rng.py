"""The device's random state: a seed and a counter, kept on the client.

Every random operator takes one (seed, offset) pair as params of its run. A program that is replayed with the same pair gives
the same numbers, and reading or setting the state needs no round trip.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 63) - 1
DEFAULT_SEED = 67280421310721


class Generator:
    """A counter-based generator: `draw` gives the next (seed, offset)."""

    def __init__(self) -> None:
        self.seed = DEFAULT_SEED
        self.offset = 0

    def manual_seed(self, seed: int) -> None:
        """Start the sequence that belongs to `seed` (taken modulo 2^63)."""
        self.seed = int(seed) & _MASK
        self.offset = 0

    def reseed(self) -> int:
        """Start from a seed of the operating system's entropy and return it."""
        self.manual_seed(secrets.randbits(52))
        return self.seed

    def draw(self) -> tuple[int, int]:
        """The pair for one random operator."""
        offset = self.offset
        self.offset = offset + 1
        return self.seed, offset

    def state(self) -> tuple[int, int]:
        """(seed, offset), to be given to `restore`."""
        return self.seed, self.offset

    def restore(self, seed: int, offset: int) -> None:
        """Continue from an earlier `state`."""
        self.seed, self.offset = int(seed) & _MASK, int(offset)
