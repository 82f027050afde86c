"""How many instructions the programs of a recorder may have.

Long programs cost an executor less per instruction. But a model of equal layers is made of few short programs, which repeat from
layer to layer also if the script goes on to other shapes, and each program must be prepared once. So programs are short until a
loop sends the same ones again and again. Then they become longer (ADR 111).
"""

from __future__ import annotations

from typing import Final

#: Limit of short programs, and of the first ones after a wait; and the highest limit, if the setting names no other.
SHORT: Final = 128
MOST: Final = 512
#: Number of programs, one after the other, that must have been sent often before programs become longer; and its maximum, after
#: attempts whose longer programs stayed new.
IN_A_ROW: Final = 128
MOST_IN_A_ROW: Final = 2048
#: A program that was sent so often before is part of a loop. Those of the tokens of a generation are known after the first
#: generation of a length, but each of them is sent once per generation.
OFTEN: Final = 8
#: Number of longer programs that may be new before programs become short again. A loop needs so many once.
NEW: Final = 32


class ProgramLimits:
    """Chooses the limits. It depends on what is sent alone, not on time: the programs of a loop stay equal.

    Args:
        most: the highest limit.

    Attributes:
        next: limit of the next program.
    """

    __slots__ = ("_full", "_in_a_row", "_most", "_needed", "_new", "next")

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = self.next = min(SHORT, most)
        self._in_a_row = self._new = 0
        self._needed = IN_A_ROW

    def waited(self) -> None:
        """The script has waited for the device. The next programs are short again, so that the device gets work soon."""
        self.next = min(SHORT, self._most)

    def sent(self, count: int, times: int) -> None:
        """Note a program that is sent: choose the limit of the one after it.

        Args:
            count: its number of instructions.
            times: how often it was sent before.
        """
        grows = self._full > SHORT
        self._in_a_row = self._in_a_row + 1 if times >= OFTEN else 0
        if self._in_a_row >= self._needed:
            self._full, self._in_a_row, self._new = self._most, 0, 0
            if grows:  # the longer programs are sent often, too
                self._needed = IN_A_ROW
        elif grows and not times:
            self._new += 1
            if self._new > NEW:  # try again, but more rarely
                self._new, self._needed = 0, min(2 * self._needed, MOST_IN_A_ROW)
                self._full = self.next = min(SHORT, self._most)
                return
        if grows and count > self.next // 2:
            self.next = min(2 * self.next, self._full)
