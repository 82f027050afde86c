"""How many instructions the programs of a recorder may have.

Long programs cost an executor less per instruction. But a model of equal layers is made of few short programs, which repeat from
layer to layer also if the script goes on to other shapes, and each program must be prepared once. So programs are short while
many are new to the executor. When it knows all of them, they become longer (ADR 111).
"""

from __future__ import annotations

from typing import Final

#: Limit of short programs, and of the first ones after a wait.
SHORT: Final = 128
#: Number of programs, one after the other, that must be known before programs become longer.
KNOWN_IN_A_ROW: Final = 128
#: Number of longer programs that may be new before programs become short again. A loop needs so many once.
NEW: Final = 16


class ProgramLimits:
    """Chooses the limits. It depends on what is sent alone, not on time: the programs of a loop stay equal.

    Args:
        most: the highest limit.

    Attributes:
        next: limit of the next program.
    """

    __slots__ = ("_full", "_known", "_most", "_new", "_patience", "next")

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = self.next = min(SHORT, most)
        self._known = self._new = 0
        self._patience = KNOWN_IN_A_ROW

    def waited(self) -> None:
        """The script has waited for the device. The next programs are short again, so that the device gets work soon."""
        self.next = min(SHORT, self._most)

    def sent(self, count: int, *, known: bool) -> None:
        """Note a program that is sent: choose the limit of the one after it.

        Args:
            count: its number of instructions.
            known: whether it was sent before.
        """
        grows = self._full > SHORT
        if known:
            self._known += 1
            if self._known >= self._patience:
                self._full, self._known, self._new = self._most, 0, 0
                if grows:  # the longer programs repeat, too
                    self._patience = KNOWN_IN_A_ROW
        else:
            self._known = 0
            self._new += grows
            if self._new > NEW:  # try again, but more rarely
                self._new, self._patience = 0, 2 * self._patience
                self._full = self.next = min(SHORT, self._most)
                return
        if grows and count > self.next // 2:
            self.next = min(2 * self.next, self._full)
