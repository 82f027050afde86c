"""Small values that this process can compute itself, so that the script need not wait for the device.

A script that asks ``if step > limit:`` waits for one bool. Often the operands of the comparison are known here: they were
uploaded as small tensors, or read before. Then the instructions that computed the value are computed on the host, if they are in
the open program or in the one before. If an operand is not known, this operand is read in place of the value: the wait is the
same, and the next comparison with it needs none.

Only operators whose results have the same bits on all devices are computed here (`exact`). An operand that another operator
computes is read. This module searches; it does not know what the operators compute, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor
from wooly_wis.codec import decode_form
from wooly_wis.program import Form, Role

from wooly.interned_forms import Forms, InternedForm
from wooly.kernels.exact import Numbers, Rule, Unknown, exact_dynamic, laid_out, rule_of
from wooly.kernels.host_copies import INTEGERS, MAX_BYTES, is_dense, key_of, nbytes_of, part_of
from wooly.link import Link, ViewKey
from wooly.recorder import RecentProgram, Recorder
from wooly.sync_debug import sync_debug

#: Maximum number and size, in bytes, of operands that are read in place of a value. Larger ones are if the value is large: a
#: comparison of integers has an eighth of their bytes.
_MAX_READS, _MAX_READ_BYTES, _MAX_READ_RATIO = 2, 256, 8
#: Maximum number of instructions that are computed for one value.
_MAX_STEPS = 48
#: Maximum number of words of programs that are searched for what computed a value. The search takes about 0.1 us for each.
_MOST_WORDS = 2048
#: Number of words up to which programs are searched whatever their last instruction is.
_FEW_WORDS = 48
#: Number of programs whose parts are kept: an open and a sent one of two devices.
_MOST_PARSED = 4
#: Maximum number of operands of the last instruction.
_MOST_OPERANDS = 5
#: Number of vain searches in a row after which a value of a loop is mostly read at once, and how often it is still searched then.
_VAIN, _AGAIN = 8, 16
#: Number of words by which the end of a program is known again.
_TAIL = 8
#: Maximum number of values that were searched in vain and are remembered.
_MOST_VAIN = 4096


class Range(NamedTuple):
    """A small dense part of a buffer that must be read."""

    buffer: int
    view: ViewKey


def wait_as_cuda(recorder: Recorder, link: Link) -> None:
    """Do what a script may expect of a call that needs no wait here, because it waits on CUDA.

    Copies to pinned memory that were started before have arrived after it.
    """
    if sync_debug.mode:
        sync_debug.note()
    if recorder.has_deferred:
        recorder.flush()
    if link.has_fetches:
        link.finish_reads()


class HostValues:
    """Computes small values of the open programs.

    Attributes:
        forms: the interned forms.
    """

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self._rules: dict[int, Rule | None] = {}
        self._dynamic: dict[int, tuple[Form, Callable[[Sequence[Tensor | None], Numbers], Any] | None]] = {}
        self._parsed: tuple[_Parsed, ...] = ()
        #: Vain searches in a row, by the slot of the value, and the length and the last words of the program: the same in each
        #: turn of a loop.
        self._vain: dict[tuple[int, ...], int] = {}

    def known(self, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """A view of a host copy that the link keeps, of this part or of more of the buffer; None if there is none."""
        for whole, host in link.mirrors_of(buffer).items():
            found = part_of(host, whole, key)
            if found is not None:
                return found
        return None

    def find(self, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Value | None:
        """How a value can be computed here; None if it must be read.

        Args:
            recorder: the recorder of the device.
            link: its link.
            buffer: the buffer of the value.
            key: the view of the buffer.
        """
        if recorder.recording or link.recording or link.log is not None or link.shares_now:
            return None  # a bundle of `wooly record` has each read; other processes see the work before a read
        programs = recorder.recent_programs(_MOST_WORDS)
        writer = next((p for p in reversed(programs) if buffer in p.slot_of), None)
        if writer is None:
            return None
        likely = self._may_compute(writer.words, writer.slot_of[buffer], recorder.free_form)
        if not likely and not (key[1] in INTEGERS and nbytes_of(key) <= 8):  # one such number is often a counter
            return None
        place = writer.slot_of[buffer], len(writer.words), *writer.words[-_TAIL:]
        vain = self._vain.get(place, 0)
        if vain < _VAIN or vain % _AGAIN == 0:
            value = Value(self, recorder, link, programs)
            is_known = value.resolve(buffer, key)
            if not is_known or value.reads:
                # Reads change nothing: if only they were sent after the last program, its instructions are searched, too.
                more = recorder.recent_programs(_MOST_WORDS, behind_reads=True)
                if len(more) > len(programs):
                    other = Value(self, recorder, link, more)
                    if other.resolve(buffer, key):
                        value, is_known = other, True
            # If work is behind the value, it can be read early itself.
            if is_known and (likely or not value.reads):
                if vain:
                    del self._vain[place]
                return value
        if len(self._vain) >= _MOST_VAIN:
            self._vain.clear()
        self._vain[place] = vain + 1
        return None

    def _may_compute(self, words: list[int], slot: int, free: int) -> bool:
        """Whether to search for what computed a slot: a guess from the last words, because most values must be read."""
        known, end = self.forms.known, len(words)
        while end >= 2 and words[end - 2] == free:
            end -= 2
        if not end or words[end - 1] != slot:  # not the last result
            return end <= _FEW_WORDS
        for arity in range(1, min(end, _MOST_OPERANDS + 1)):
            number = words[end - 1 - arity]
            if number < len(known) and known[number].arity == arity and self.rule(number) is not None:
                return True
        return False

    def is_tiny(self, recorder: Recorder) -> bool:
        """Whether the open program has a few instructions only, which compute small values that the host can compute, too."""
        words, known, at = recorder.words, self.forms.known, 0
        if len(words) > _FEW_WORDS or recorder.has_deferred:
            return False
        while at < len(words):
            form = known[words[at]]
            if form.name not in ("alloc", "free") and self.rule(words[at]) is None:
                return False
            at += 1 + form.arity
        return True

    def now(self, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """A small value that is known, or can be computed here without a read; None if it cannot."""
        if link.is_early(buffer):
            return None
        known = self.known(link, buffer, key)
        if known is not None or nbytes_of(key) > MAX_BYTES:
            return known
        value = self.find(recorder, link, buffer, key)
        return None if value is None or value.reads or value.early else value.compute(())

    def results(self, recorder: Recorder, form: int, buffers: Sequence[int], params: Numbers) -> list[Tensor] | None:
        """The results of an operator whose shapes depend on data, if all its operands are known here and the results are small.

        Args:
            recorder: the recorder of the device.
            form: number of the form of the call.
            buffers: buffers of the operands.
            params: values of the params.
        """
        if form not in self._dynamic:
            decoded = decode_form(self.forms.known[form].raw)
            self._dynamic[form] = decoded, exact_dynamic(decoded)
        (call, compute), link = self._dynamic[form], recorder.link
        if compute is None or link is None or recorder.recording or link.recording or link.log is not None:
            return None
        operands: list[Tensor | None] = []
        for buffer, operand in zip(buffers, call.operands, strict=False):
            if operand.view is not None and operand.role is Role.IN:
                operands.append(self.now(recorder, link, buffer, key_of(operand.view)))
                if operands[-1] is None:
                    return None
        try:
            found = compute(operands, params)
        except (Unknown, RuntimeError, TypeError, ValueError, IndexError):
            return None  # the device reports what is wrong
        results = [found] if isinstance(found, Tensor) else list(found)
        return results if sum(t.nbytes for t in results) <= MAX_BYTES else None

    def parsed(self, program: RecentProgram) -> _Parsed:
        """The instructions of a program."""
        found = next((p for p in self._parsed if p.words is program.words and p.cuts == program.cuts), None)
        if found is None:
            found = _Parsed(program)
            self._parsed = (*self._parsed[1 - _MOST_PARSED :], found)  # threads with other recorders may do so, too
        found.parse(program.bind, self.forms.known)
        return found

    def rule(self, form: int) -> Rule | None:
        """How the instructions of a form are computed; None: not on the host."""
        try:
            return self._rules[form]
        except KeyError:
            rule = self._rules[form] = rule_of(decode_form(self.forms.known[form].raw))
            return rule


class _Parsed:
    """Where the instructions of a program are. A program that has grown is parsed on from where it ended.

    Attributes:
        words: the words of the program.
        starts: where the words and the params of each instruction begin.
        writers: the instructions that write each buffer.
    """

    def __init__(self, program: RecentProgram) -> None:
        self.words, self.cuts = program.words, program.cuts
        self.starts: list[tuple[int, int]] = []
        self.writers: dict[int, list[int]] = {}
        self._end = self._first = 0

    def parse(self, bind: list[int], known: list[InternedForm]) -> None:
        """Go on to the end of the words."""
        words, starts, writers = self.words, self.starts, self.writers
        at, first, end = self._end, self._first, len(self.words)
        while at < end:
            form = known[words[at]]
            for k in form.writes:
                buffer = bind[words[at + 1 + k]]
                if buffer in writers:
                    writers[buffer].append(len(starts))
                else:
                    writers[buffer] = [len(starts)]
            starts.append((at, first))
            at += 1 + form.arity
            first += len(form.param_format)
        self._end, self._first = at, first


class Value:
    """A value that is computed on the host from operands that are known, and from some that must be read first.

    Attributes:
        early: buffers of operands whose host copies are on their way.
    """

    _wanted: ViewKey

    def __init__(self, values: HostValues, recorder: Recorder, link: Link, programs: list[RecentProgram]) -> None:
        self._values, self._recorder, self._link, self._programs = values, recorder, link, programs
        #: An instruction has a number: those of the first program, then those of the second one, `self._first[1]` and up.
        self._parsed = [values.parsed(program) for program in programs]
        self._first = list(accumulate([len(p.starts) for p in self._parsed], initial=0))
        self._computed: dict[int, Callable[[], Tensor] | None] = {}
        self._visited = 0
        self._read: dict[Range, Tensor | None] = {}
        self.early: set[int] = set()
        self._done: list[int] = []
        self._result: Callable[[], Tensor] | None = None

    @property
    def reads(self) -> list[Range]:
        """What must be read."""
        return list(self._read)

    def resolve(self, buffer: int, key: ViewKey) -> bool:
        """Find out how the value is computed. Returns False if it must be read itself."""
        self._wanted = key
        self._result = self._source(buffer, key, self._first[-1])
        return self._result is not None and Range(buffer, key) not in self._read

    def compute(self, hosts: Sequence[Tensor]) -> Tensor | None:
        """The value; None if the library refuses the operands, or if the value may differ between devices.

        Args:
            hosts: host copies of `reads`, in the same order.
        """
        for place, host in zip(self._read, hosts, strict=True):
            self._read[place] = host
        assert self._result is not None
        try:
            return self._result()
        except (Unknown, RuntimeError, TypeError, ValueError, IndexError):
            return None  # the device computes it, and reports what is wrong

    def _source(self, buffer: int, key: ViewKey, before: int) -> Callable[[], Tensor] | None:
        """What computes a view of a buffer as it is before a step; None if it cannot be known."""
        if nbytes_of(key) > MAX_BYTES:
            return None
        written = self._writers(buffer)
        writer = next((step for step in reversed(written) if step < before), None)
        is_current = not written or writer == written[-1]
        if is_current:
            known = self._values.known(self._link, buffer, key)
            if known is not None:
                if self._link.is_early(buffer):
                    self.early.add(buffer)
                return lambda: known
        else:
            overwritten = self._overwritten(buffer, key, next(step for step in written if step >= before), written)
            if overwritten is not None:
                return lambda: overwritten
        if writer is not None:
            program, at, _ = self._place(writer)
            rule, computed = self._values.rule(program.words[at]), self._step(writer)
            if computed is not None and rule is not None:
                return partial(_part, computed, rule.view, key)
        return self._to_read(buffer, key) if is_current else None

    def _overwritten(self, buffer: int, key: ViewKey, writer: int, written: list[int]) -> Tensor | None:
        """A host copy of a view of a buffer as it was before the instruction `writer` wrote it; None if there was none."""
        for first, program in zip(self._first, self._programs, strict=False):
            kept, begin = program.overwritten.get(buffer, ({}, 0))
            if kept and writer == next((step for step in written if step >= first + begin), None):
                return next(
                    (p for p in (part_of(host, whole, key) for whole, host in kept.items()) if p is not None), None
                )
        return None

    def _place(self, step: int) -> tuple[RecentProgram, int, int]:
        """The program of an instruction, and where its words and its params begin."""
        which = 0 if step < self._first[1] else 1
        return self._programs[which], *self._parsed[which].starts[step - self._first[which]]

    def _to_read(self, buffer: int, key: ViewKey) -> Callable[[], Tensor] | None:
        """What gives a part of a buffer that will be read, behind all that is recorded."""
        place = Range(buffer, key)
        if place not in self._read:
            nbytes = nbytes_of(key)
            if len(self._read) >= _MAX_READS or not nbytes or not is_dense(key):
                return None
            if nbytes > max(_MAX_READ_BYTES, _MAX_READ_RATIO * nbytes_of(self._wanted)):
                return None
            if not self._is_alive(buffer) or self._link.is_shared(buffer):
                return None
            self._read[place] = None

        def host() -> Tensor:
            read = self._read[place]
            assert read is not None
            return read

        return host

    def _is_alive(self, buffer: int) -> bool:
        """Whether the script still has a buffer of these programs."""
        for program in reversed(self._programs):
            if buffer in program.slot_of:
                return not self._recorder.frees(buffer)
            if buffer in program.bind:
                return False
        return False

    def _step(self, index: int) -> Callable[[], Tensor] | None:
        """What computes the result of a step."""
        if index not in self._computed:
            if self._visited >= _MAX_STEPS:
                return None
            self._visited += 1
            self._computed[index] = self._new_step(index)
        return self._computed[index]

    def _new_step(self, index: int) -> Callable[[], Tensor] | None:
        program, at, first = self._place(index)
        number = program.words[at]
        rule, form = self._values.rule(number), self._values.forms.known[number]
        if rule is None:
            return None
        buffers = [program.bind[slot] for slot in program.words[at + 1 : at + 1 + form.arity]]
        params = program.params[first : first + len(form.param_format)]
        read, early, computed = dict(self._read), set(self.early), dict(self._computed)
        sources: list[Callable[[], Tensor] | None] = [None] * len(buffers)
        for k, key in rule.inputs:
            source = self._source(buffers[k], key, index)
            if source is None:
                # What was found for the other operands may need reads that nobody needs now.
                self._read, self.early = read, early
                self._computed = {k: c for k, c in self._computed.items() if c is None or k in computed}
                return None
            sources[k] = source
        result: Tensor | None = None

        def compute() -> Tensor:
            nonlocal result
            if result is None:
                result = laid_out(rule, rule.call([s and s() for s in sources], params))
                self._done.append(index)
            return result

        return compute

    @property
    def has_operands(self) -> bool:
        """Whether other values were computed for this one."""
        return len(self._done) > 1

    @property
    def whole(self) -> tuple[ViewKey, Tensor] | None:
        """All that the instruction of the value has written to its buffer; None if it is the value itself, or was not computed.

        What changes a tensor in place needs all of it, also if the script reads one number after each change.
        """
        if not self._done:
            return None
        last = self._done[-1]
        program, at, _ = self._place(last)
        rule, computed = self._values.rule(program.words[at]), self._computed[last]
        assert rule is not None
        assert computed is not None
        return None if rule.view == self._wanted else (rule.view, computed())

    def operands(self) -> Iterator[tuple[Range, Tensor]]:
        """The values that were computed for this one, and that are in their buffers now. Call it before anything is sent."""
        for index in self._done[:-1]:
            program, at, _ = self._place(index)
            rule, computed = self._values.rule(program.words[at]), self._computed[index]
            assert rule is not None
            assert computed is not None
            buffer = program.bind[program.words[at + 1 + rule.result]]
            # Not of tensors that are changed in place: a link keeps one older copy of a buffer (`overwritten`). The next write
            # would keep this one in its place, and values that were computed from the older one could not be found any more.
            in_place = any(k == rule.result for k, _ in rule.inputs)
            if not in_place and self._writers(buffer) == [index] and self._is_alive(buffer):
                yield Range(buffer, rule.view), computed()

    def _writers(self, buffer: int) -> list[int]:
        """The steps that write a buffer, in order."""
        return [
            first + step
            for first, p in zip(self._first, self._parsed, strict=False)
            for step in p.writers.get(buffer, ())
        ]


def _part(computed: Callable[[], Tensor], whole: ViewKey, key: ViewKey) -> Tensor:
    """A part of a computed value.

    Raises:
        Unknown: the value does not cover it.
    """
    found = part_of(computed(), whole, key)
    if found is None:
        raise Unknown
    return found
