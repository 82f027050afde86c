"""Learns which values a loop reads, so that the next turn asks for each value as soon as it is computed.

A loop reads its loss at the end of a step (`loss.item()`), and the loss is computed in the middle of the step. A read waits for
all work before it. So the recorder ends the program behind the instruction that computes the loss, and sends the read there. The
executor answers it while the client records the rest of the step, and the script need not wait.

This module only learns and predicts. It knows neither the link nor tensors.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

#: Maximum size, in bytes, of a value that is read early: losses and counts are small.
MAX_EARLY_BYTES = 4096
#: Number of sent programs in which the reader of a value is looked for.
_RECENT = 4
#: Credit of a new prediction, and maximum credit. A used value adds 1, an unused one takes `_UNUSED_COSTS`, and a prediction
#: without credit is dropped. So a prediction outlasts the end of a loop, but not a script that uses every other value.
_FIRST_CREDIT, _MOST_CREDIT, _UNUSED_COSTS = 3, 8, 2
#: Size of a word of a program, in bytes.
WORD_BYTES = array("I").itemsize
#: Maximum number of predictions, of reads that were seen, and of predictions that failed. A full table is cleared.
_REMEMBERED = 256


class EarlyRead:
    """A prediction: when the open program has these words, a value is complete that will be read.

    Attributes:
        words: the words of the open program, as bytes.
        count: its number of instructions.
        slot: slot of the value's buffer.
        view: what is read of the buffer; the caller knows the meaning.
        nbytes: size of the value.
    """

    __slots__ = ("_credit", "_used", "count", "nbytes", "slot", "view", "words")

    def __init__(self, words: bytes, count: int, slot: int, view: Hashable, nbytes: int) -> None:
        self.words, self.count, self.slot, self.view, self.nbytes = words, count, slot, view, nbytes
        self._used, self._credit = True, _FIRST_CREDIT

    def begin(self) -> bool:
        """Note that the value is read early. Returns False if it must not be, because too many values were not used."""
        if not self._used:
            self._credit -= _UNUSED_COSTS
        if self._credit <= 0:
            return False
        self._used = False
        return True

    def use(self) -> None:
        """Note that the script uses the value that was read early."""
        self._used, self._credit = True, min(self._credit + 1, _MOST_CREDIT)


#: A place in the script's work: where it last read a value, and the number of programs that were sent since.
_Place = tuple[Hashable, int]
_NOWHERE: _Place = None, 0


class _Sent(NamedTuple):
    """A program that was sent, and the place at which it began."""

    place: _Place
    words: bytes
    bind: Sequence[int]


class EarlyReads:
    """The predictions of one recorder.

    Predictions belong to places, not to the program before: the timer of the client sends programs at random points, but a loop
    begins again at each read.

    Args:
        instructions_of: yields the positions of the written operands, and the slots, of each instruction in words.
        extent_of: number of bytes that the buffer of a slot has at least, according to words.
    """

    def __init__(
        self,
        instructions_of: Callable[[bytes], Iterator[tuple[Sequence[int], Sequence[int]]]],
        extent_of: Callable[[bytes, int], int],
    ) -> None:
        self._instructions_of = instructions_of
        self._extent_of = extent_of
        self._recent: deque[_Sent] = deque(maxlen=_RECENT)
        self._place = _NOWHERE
        self._seen: dict[Hashable, int] = {}
        self._known: dict[_Place, EarlyRead] = {}
        self._refused: set[tuple[_Place, Hashable]] = set()

    def sent(self, words: bytes, bind: Sequence[int]) -> EarlyRead | None:
        """Note a program that is sent. Returns the prediction for the next one.

        Args:
            words: its words, as bytes.
            bind: its buffers by slot.
        """
        self._recent.append(_Sent(self._place, words, bind))
        where, count = self._place
        self._place = where, count + 1
        return self._known.get(self._place)

    def interrupt(self) -> None:
        """Something else than a recorded program was sent."""
        self._recent.clear()
        self._place = _NOWHERE

    def used(self, where: Hashable) -> EarlyRead | None:
        """The script has got a value that was read early. Returns the prediction for the next program.

        Args:
            where: the place in the script.
        """
        self._place = where, 0
        return self._known.get(self._place)

    def read(self, buffer: int, view: Hashable, nbytes: int, end: int, where: Hashable) -> EarlyRead | None:
        """The script has waited for a value. If it does so again at the same place, it is predicted from then on.

        Args:
            buffer: the buffer of the value.
            view: what was read.
            nbytes: its size.
            end: minimum size of a buffer that has the view.
            where: the place in the script.

        Returns:
            The prediction for the next program.
        """
        if self._recent:
            place = self._recent[-1].place, view
            times = self._seen.get(place, 0) + 1
            self._limit(self._seen)
            self._seen[place] = times
            if times >= 2 and not times & (
                times - 1
            ):  # a prediction that never fits is made anew, but ever more rarely
                self._learn(buffer, view, nbytes, end)
        return self.used(where)

    def _learn(self, buffer: int, view: Hashable, nbytes: int, end: int) -> None:
        for program in reversed(self._recent):
            if buffer not in program.bind:
                continue
            slot = program.bind.index(buffer)
            words, count, worked = self._writer(program, slot)
            if not count:
                continue
            if self._extent_of(words, slot) < end:
                return  # the same words may come with a smaller buffer
            if (worked or program is not self._recent[-1]) and (program.place, view) not in self._refused:
                self._limit(self._known)
                self._known[program.place] = EarlyRead(words, count, slot, view, nbytes)
            return

    def _writer(self, program: _Sent, slot: int) -> tuple[bytes, int, bool]:
        """The words and the number of instructions up to the last one that writes a slot, and whether work is behind it."""
        at = written = count = writer = last = 0
        for writes, slots in self._instructions_of(program.words):
            at, count = at + WORD_BYTES * (1 + len(slots)), count + 1
            if writes:
                last = count
            if any(slots[k] == slot for k in writes):
                written, writer = at, count
        return program.words[:written], writer, last > writer

    def forget(self, wrong: EarlyRead) -> None:
        """Drop a prediction whose values the script does not use, and do not make it again."""
        for place, known in list(self._known.items()):
            if known is wrong:
                del self._known[place]
                self._limit(self._refused)
                self._refused.add((place, wrong.view))

    @staticmethod
    def _limit(table: dict[Any, Any] | set[Any]) -> None:
        if len(table) >= _REMEMBERED:
            table.clear()
