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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Maximum size, in bytes, of a value that is read early: losses and counts are small.
MAX_EARLY_BYTES = 4096
#: Number of sent programs in which the reader of a value is looked for.
_RECENT = 8
#: Maximum number of values of one prediction.
_MOST_VALUES = 16
#: Credit of a value, and maximum credit. A used value adds 1, an unused one takes `_UNUSED_COSTS`, and a value
#: without credit is dropped. So a prediction outlasts the end of a loop, but not a script that uses every other value.
_FIRST_CREDIT, _MOST_CREDIT, _UNUSED_COSTS = 3, 8, 2
#: Size of a word of a program, in bytes.
WORD_BYTES = array("I").itemsize
#: Maximum number of predictions, of reads that were seen, and of predictions that failed. A full table is cleared.
_REMEMBERED = 256


class EarlyValue:
    """A value that will probably be read.

    Attributes:
        slot: slot of the value's buffer in the open program.
        view: what is read of the buffer; the caller knows the meaning.
        nbytes: size of the value.
    """

    __slots__ = ("_credit", "_used", "nbytes", "slot", "view")

    def __init__(self, slot: int, view: Hashable, nbytes: int) -> None:
        self.slot, self.view, self.nbytes = slot, view, nbytes
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


@dataclass(frozen=True, slots=True)
class EarlyRead:
    """A prediction: when the open program has these words, values are complete that will be read.

    Attributes:
        words: the words of the open program, as bytes.
        count: its number of instructions.
        values: the values, one of a buffer.
    """

    words: bytes
    count: int
    values: tuple[EarlyValue, ...]


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
        self._reads = 0
        #: Whether the script has waited for the device since the last program.
        self._waited = False
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
        self._reads, self._waited = 0, False
        where, count = self._place
        self._place = where, count + 1
        return self._known.get(self._place)

    def waited(self) -> None:
        """The script has waited for all work, and reads a value then: it could have come with that wait."""
        self._waited = True

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
        self._reads += 1
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
            # One line of the script may read many values of a program.
            place = self._recent[-1].place, self._reads, view
            times = self._seen.get(place, 0) + 1
            self._limit(self._seen)
            self._seen[place] = times
            if times == 3 or (times >= 2 and not times & (times - 1)):  # what fails often is looked at ever more rarely
                self._learn(buffer, view, nbytes, end, times)
        return self.used(where)

    def _learn(self, buffer: int, view: Hashable, nbytes: int, end: int, times: int) -> None:
        for program in reversed(self._recent):
            if buffer not in program.bind:
                continue
            slot = program.bind.index(buffer)
            words, count, worked = self._writer(program, slot)
            if not count:
                continue
            is_last = program is self._recent[-1]
            if self._extent_of(words, slot) < end or (times == 2 and not is_last):
                # The same words may come with a smaller buffer. And the first turn of a loop begins at another place than the
                # next ones: one turn later, all values of a program are predicted at once, so that it has one end.
                return
            # At the end of the last program, one read gains nothing. But further ones come with the first, or with a wait.
            if (worked or not is_last or self._reads or self._waited) and (program.place, view) not in self._refused:
                self._predict(program.place, EarlyRead(words, count, (EarlyValue(slot, view, nbytes),)))
            return

    def _predict(self, place: _Place, new: EarlyRead) -> None:
        """Read a value early at a place: together with those that are read there already, if the programs begin alike."""
        known = self._known.get(place)
        if known is not None and (known.words.startswith(new.words) or new.words.startswith(known.words)):
            value = new.values[0]
            if known.count >= new.count and any((v.slot, v.view) == (value.slot, value.view) for v in known.values):
                return
            kept = [v for v in known.values if v.slot != value.slot]
            longer = known if known.count > new.count else new
            new = replace(longer, values=(*kept[1 - _MOST_VALUES :], value))
        self._limit(self._known)
        self._known[place] = new

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

    def forget(self, wrong: EarlyValue) -> None:
        """Drop a value that the script does not use, and do not predict it again."""
        for place, known in list(self._known.items()):
            if wrong in known.values:
                self._limit(self._refused)
                self._refused.add((place, wrong.view))
                kept = tuple([value for value in known.values if value is not wrong])
                if kept:
                    self._known[place] = replace(known, values=kept)
                else:
                    del self._known[place]

    @staticmethod
    def _limit(table: dict[Any, Any] | set[Any]) -> None:
        if len(table) >= _REMEMBERED:
            table.clear()
