"""Records instructions into the open WIS program. A sync, a size limit or a timer closes the program and sends it.

The hot path is `emit`: a few list appends per instruction. Forms are interned once per process. A program is identified by its
words (interned forms and slots), so a repeated program costs one dictionary look-up when it is closed. This file does not depend
on PyTorch. The socket belongs to `link`.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from wooly_wis.codec import decode_form, digest, join_program
from wooly_wis.limits import MAX_FREES
from wooly_wis.program import Form, Operand, Role

from wooly.early_reads import WORD_BYTES, EarlyRead, EarlyReads, EarlyValue
from wooly.errors import ForkedProcessError, NotConnectedError, WoolyError
from wooly.interned_forms import Forms, InternedForm
from wooly.lazy_clones import LazyClones
from wooly.native import ProgramFields
from wooly.origins import Origin, origin
from wooly.program_limits import ProgramLimits
from wooly.python_private import unlock_after_fork
from wooly.read_ahead import ReadAhead
from wooly.rng import Generator
from wooly.storage import ID_MASK, NO_LIMIT, Heap

if TYPE_CHECKING:
    from wooly.link import Link, Overwritten

#: Size limit, in instructions, of the first program after a wait. The device is idle then, so a short program starts it sooner.
FIRST_PROGRAM_LIMIT = 12


#: Maximum number of end forms (`Recorder.close_if_due`), and of programs that an end form does not close. A full set is cleared.
MAX_END_FORMS = 1024
#: The operator whose results are more than what its caller gets.
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
#: Number of programs after a timer cut for which `Recorder.close_if_due` adds no end form.
PROGRAMS_WITHOUT_END_FORM = 8
#: Maximum number of frames that wait until the open program is sent. At this number the program is closed.
MAX_DEFERRED = 32
#: A program as far as its end and its sizes show it, without its shapes, which grow with each token of a generation: last form,
#: numbers of instructions, words and buffers.
Outline = tuple[int, int, int, int]


class SentProgram:
    """A program that the executor of this session has.

    Attributes:
        digest: its digest.
        pack_params: packs its params.
        times: how often it was sent.
    """

    __slots__ = ("digest", "pack_params", "times")

    def __init__(self, digest: bytes, pack_params: struct.Struct) -> None:
        self.digest, self.pack_params, self.times = digest, pack_params, 0


class Work(NamedTuple):
    """A closed program that can be sent again.

    Attributes:
        key: the words as bytes; they identify the program among the sent programs.
        words: interned forms and slots.
        origins: the Python line of each instruction.
    """

    key: bytes
    words: list[int]
    origins: list[Origin]


class RecentProgram(NamedTuple):
    """Instructions whose buffers are known: the open program, or the program that was sent last.

    Attributes:
        words: interned forms and slots.
        bind: buffer per slot.
        params: values of the params.
        slot_of: slot of each buffer that the script had not freed.
        position: sequence number of its frame; 0 for the open program.
        overwritten: host copies of what the program has overwritten.
        cuts: number of incomplete instructions that were removed so far.
    """

    words: list[int]
    bind: list[int]
    params: list[float | int]
    slot_of: dict[int, int]
    position: int
    overwritten: Overwritten
    cuts: int


class Taken(NamedTuple):
    """The open program that `Recorder.end_capture` takes.

    Attributes:
        words: interned forms and slots.
        bind: buffer per slot.
        params: values of the params.
        origins: the Python line of each instruction.
        freed: ids of storages that the program frees.
        operations: number of recorded operators.
    """

    words: list[int]
    bind: list[int]
    params: list[float | int]
    origins: list[Origin]
    freed: list[int]
    operations: int


class Lock(Protocol):
    """A reentrant lock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, or return whether it was taken."""

    def release(self) -> None:
        """Give the lock back."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...


class CapturedCollective(Protocol):
    """One rank's part in a collective that a graph sends at each replay.

    Attributes:
        name: the name of the collective, as messages show it.
        where: the Python line that asked for it.
    """

    name: str
    where: Origin

    @property
    def reads(self) -> Sequence[tuple[int, int, int]]:
        """The ranges of memory that it reads: id of the buffer, first byte, and the byte behind the last one."""

    @property
    def writes(self) -> Sequence[tuple[int, int, int]]:
        """The ranges of memory that it writes, in the same form."""

    def bind(self, buffers: dict[int, int]) -> None:
        """Use other buffers from now on: `buffers` has the id of each one in `reads` and `writes`."""

    def send(self) -> None:
        """Send it. It may wait for another rank's script, so the caller does not hold the recorder's lock."""


class Capture(Protocol):
    """Keeps the open program of a recorder instead of sending it (`Recorder.begin_capture`)."""

    @property
    def in_own_thread(self) -> bool:
        """Whether the calling thread is the capturing thread."""

    def refuse(self, why: str = "") -> NoReturn:
        """Raise the error of a call that cannot be a part of a graph. `why`: cause and cure; empty: it must send the open
        program.
        """

    def collective(self, collective: CapturedCollective) -> None:
        """Keep a collective at this place of the open program, in place of sending it."""

    def note_death(self, freed: int) -> None:
        """A storage was freed. `freed` is its entry of `Heap.dead`."""

    def note_draw(self, generator: Generator) -> None:
        """A random operator is about to draw from a generator of the user."""

    def inline(self, work: Work, bind: list[int], params: list[float | int], frees: list[int]) -> None:
        """Append a recorded program to the open one, in place of `Recorder.replay`."""

    def owns(self, stream_id: int) -> bool:
        """Whether the work that the calling thread records on this stream is captured."""


class Mark:
    """A point in the work of a device, such as a recorded event: a position in the frames of its link.

    Attributes:
        link: link of the device; None until the program that is open at this point is sent.
        position: sequence number of the last frame before this point.
    """

    __slots__ = ("link", "position")

    def __init__(self, link: Link | None = None, position: int = 0) -> None:
        self.link = link
        self.position = position


#: Number of programs to which a session can refer by digest. Client and executor both evict the least recently used program, in
#: the same order.
PROGRAMS_KEPT = 1024


def _refuse_forked(*args: object, **kwargs: object) -> NoReturn:
    raise ForkedProcessError


class Recorder(ProgramFields):
    """Records instructions for one device. Callers of all public methods hold `lock`.

    Attributes:
        lock: reentrant lock. Every kernel takes it, so several threads can use a device. To prevent deadlocks, a thread that
            holds the lock of one device does not wait for the lock of another. Only `graphs` takes all locks, in order of the
            index.
        forms: the interned forms.
        heap: the device's storages.
        generator: the device's random numbers.
        limit: maximum number of instructions of a program.
        room: number of instructions from which `close_if_due` is called.
        recording: whether `graphs` keeps the instructions that are recorded now.
        after_replay: whether the open program began after a program that was sent by `replay`. In a loop, it begins at this point
            in every iteration.
        reads: number of reads so far that may decide what the script does next, also of values that the client knew.
        foreign_draws: number of random operators so far that used a generator of the user.
        replaced: whether `emit` is replaced.
        lazy_clones: storages that read the buffer of another storage.
        capture: what keeps the open program; None: it is sent.
        opener: opens the session; None if the session is open, or if nobody asked for one.
        programs_dir: folder to which new programs are written as ``<digest>.wis``; None: they are not written.
        early_reads: predicts which values the script reads.
        read_ahead: knows in which order tensors were uploaded and read.
        read_early: sends the open program, and begins to read values of buffers. Returns whether it did.
    """

    def __init__(self, limit: int, forms: Forms, heap: Heap, generator: Generator) -> None:
        self._own_lock = threading.RLock()
        self.lock: Lock = self._own_lock
        self.forms = forms
        self.heap = heap
        self.generator = generator
        self.limit = limit
        self.link: Link | None = None
        self.opener: Callable[[], None] | None = None
        self.programs_dir: Path | None = None
        self.recording = self.after_replay = self.replaced = False
        self.capture: Capture | None = None
        self.lazy_clones = LazyClones(self)
        self._marks: Callable[[Origin], Origin] | None = None
        self._operations_before_capture = 0
        self.foreign_draws = self.reads = 0
        self.words: list[int] = []
        self.bind: list[int] = []
        self.slot_of: dict[int, int] = {}
        self.params: list[float | int] = []
        self.origins: list[Origin] = []
        self.generation = 0
        self.operations = 0
        self.instructions = 0
        self.programs = 0
        self._forms = forms.known
        self._end_forms: set[int] = set()
        #: `_closed_at_end_form`: the program that an end form closed last, and its limit. `_kept_whole`: programs that an end
        #: form must not close, because the instructions after them would have fitted into the same program.
        self._closed_at_end_form: Outline | None = None
        self._limit_at_end_form = 0
        self._kept_whole: set[Outline] = set()
        self._without_end_form = 0
        self.early_reads = EarlyReads(self._writes_of, self._extent_of)
        self.read_ahead = ReadAhead()
        self.read_early: Callable[[Recorder, list[tuple[int, EarlyValue]]], bool] | None = None
        self._early: EarlyRead | None = None
        #: The link, its last frame after `finish` has sent frees alone, and its last frame before them.
        self._sent_frees: tuple[Link | None, int, int] = None, 0, 0
        self._limits = ProgramLimits(limit)
        self._limit_before_capture = limit, self._limits
        self._limit_without_early = limit
        self._set_open_limit(self._limits.next)
        self._mark: Mark | None = None
        self._deferred: list[Callable[[Link], None]] = []
        self._sent: OrderedDict[bytes, SentProgram] = OrderedDict()
        self._sent_last: RecentProgram | None = None
        #: Number of the last frame, if only reads were sent after that program.
        self._behind_reads = 0
        self._cuts = 0
        self._frees: list[int] = []
        self._freed: list[int] = []
        self._free_form = forms.intern(Form("free", (Operand(Role.IN, None),)))
        self.woken = threading.Event()
        self.sleeping = True

    # -- recording ---------------------------------------------------------------------------------------------------

    def emit(self, form: int, buffers: list[int], where: Origin) -> None:
        """Append one instruction.

        Args:
            form: number of the interned form.
            buffers: buffer id per operand.
            where: Python line that called the operator.
        """
        words, slot_of, bind = self.words, self.slot_of, self.bind
        words.append(form)
        for buffer in buffers:
            slot = slot_of.get(buffer)
            if slot is None:
                slot = slot_of[buffer] = len(bind)
                bind.append(buffer)
            words.append(slot)
        self.origins.append(where)

    def emit_new(self, form: int, buffer: int, where: Origin) -> None:
        """Append the instruction that allocates a buffer, which no instruction of the open program has used: `emit`, in short.

        Args:
            form: number of the interned form.
            buffer: id of the new buffer.
            where: Python line that called the operator.
        """
        bind = self.bind
        self.slot_of[buffer] = slot = len(bind)
        bind.append(buffer)
        self.words += (form, slot)
        self.origins.append(where)

    def mark_origins(self, mark: Callable[[Origin], Origin] | None) -> None:
        """From now on, replace the origin of each instruction by what `mark` returns for it. None: no longer.

        Without `mark`, recording is not slower than before.
        """
        self._marks = mark
        self._replace()

    def watch_lazy_clones(self) -> None:
        """From now on, let instructions read the buffers that have the bytes of lazy clones, if there are any."""
        self._replace()

    def record(self, form: int, buffers: list[int], where: Origin) -> None:
        """As `emit`, for buffers that are no lazy clones."""
        Recorder.emit(self, form, buffers, where if self._marks is None else self._marks(where))

    def separate(self, buffers: Iterable[int]) -> None:
        """Give lazy clones and their sources among these buffers memory of their own, because a frame will name them."""
        if self.lazy_clones:
            where = origin(2)
            for buffer in dict.fromkeys(buffers):
                self.lazy_clones.separate(buffer, where)

    def _replace(self) -> None:
        """Replace `emit`, or no longer. It is not replaced if there is no reason, so that recording is not slower."""
        if self.__dict__.get("emit") is _refuse_forked:
            return
        mark, lazy = self._marks, self.lazy_clones
        self.replaced = mark is not None or bool(lazy)
        self.__dict__.pop("emit", None)
        self.__dict__.pop("emit_new", None)
        if not self.replaced:
            return

        def emit(form: int, buffers: list[int], where: Origin) -> None:
            if lazy:
                for written in self._forms[form].writes:
                    lazy.separate(buffers[written], where)
                buffers = [lazy.holder(buffer) for buffer in buffers]
            self.record(form, buffers, where)

        self.emit = emit  # type: ignore[method-assign]
        if mark is None:
            return
        emit_new = type(self).emit_new

        def emit_new_marked(form: int, buffer: int, where: Origin) -> None:
            emit_new(self, form, buffer, mark(where))

        self.emit_new = emit_new_marked  # type: ignore[method-assign]

    def close_if_due(self, form: int) -> None:
        """Decide whether to close the open program, which has reached `room` instructions.

        In a loop, the programs of all iterations should be equal. Then the client sends only the digest, and the executor has
        prepared the program already. So the recorder closes programs at the same points of the loop, at *end forms*:

        - A program that has more than half of its limit of instructions is closed after the next instruction whose form is an
          end form.
        - A program that reaches its limit without an end form is closed there. The rarest form in its second half becomes an end
          form, unless the program was sent before.
        - After the timer has cut a program, the next `PROGRAMS_WITHOUT_END_FORM` programs add no end forms. The position of a
          timer cut depends on the speed of the machine, so these programs do not repeat, and end forms for them would make the
          programs of the loop shorter.
        - If a sync soon follows a close at an end form, and both parts would have fitted into one program, the recorder does not
          close that program at an end form the next time.
        - No program is closed right after attention, but after the next instruction. Without gradients, its logarithms die when
          the call returns. A GPU uses another kernel, with other bits, if the program does not free them unread.

        Args:
            form: form of the last instruction.
        """
        count, self._closed_at_end_form = len(self.origins), None
        early = self._early
        if early is not None and self._close_early(early, count):
            return
        if self._forms[form].name == ATTENTION:
            self.room = count + 1
            return
        if count >= self._open_limit:
            if self._open_limit == self._limits.next and form not in self._end_forms:
                if self._without_end_form:
                    self._without_end_form -= 1
                elif array("I", self.words).tobytes() not in self._sent:  # equal programs need no end form
                    self._add_end_form()
            self.flush()
        elif form in self._end_forms:
            outline = form, count, len(self.words), len(self.bind)
            if outline in self._kept_whole:
                self.room = self._open_limit
            else:
                limit = self._open_limit
                self.flush()
                self._closed_at_end_form, self._limit_at_end_form = outline, limit

    def _close_early(self, early: EarlyRead, count: int) -> bool:
        """Close the open program and read values, if the program is as predicted. Returns whether `close_if_due` is done."""
        if count < early.count:
            return False
        self._early = None
        self._set_open_limit(self._limit_without_early)
        if self.heap.dead:
            self.release_dead()
        known = len(early.words) // WORD_BYTES
        rest = self.words[known:]
        if (
            self.read_early is not None
            and array("I", self.words[:known]).tobytes() == early.words
            and rest[::2] == [self._free_form] * (len(self.origins) - early.count)  # nothing but frees is behind it
        ):
            values = [(self.bind[v.slot], v) for v in early.values]
            alive = [(b, v) for b, v in values if self.slot_of.get(b) == v.slot]  # the script still has these buffers
            if alive and self.read_early(self, alive):
                return True
        return count < self.room

    def _writes_of(self, words: bytes) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        found = array("I")
        found.frombytes(words)
        for form, slots in self.instructions_of(found.tolist()):
            yield form.writes, slots

    def _extent_of(self, words: bytes, slot: int) -> int:
        found, extent = array("I"), 0
        found.frombytes(words)
        for form, slots in self.instructions_of(found.tolist()):
            if slot in slots:
                operands = decode_form(form.raw).operands
                ends = [o.view.end for o, s in zip(operands, slots, strict=True) if s == slot and o.view is not None]
                extent = max([extent, *ends])
        return extent

    def note_read(self, buffer: int, view: Hashable, nbytes: int, end: int, where: Origin) -> None:
        """The script has waited for a value, behind all that was recorded.

        Args:
            buffer: the buffer of the value.
            view: what was read.
            nbytes: its size.
            end: minimum size of a buffer that has the view.
            where: Python line that reads it.
        """
        if not (self.recording or self.replaced):
            self._early = self.early_reads.read(buffer, view, nbytes, end, (id(where[0]), where[1], False))

    def note_early_read_used(self, where: Origin) -> None:
        """The script has got a value that was read early, at this Python line.

        The open program was sent before. If it is so small that it was not, the next predictions are those for its continuation.
        """
        if not (self.recording or self.replaced):
            self._early = self.early_reads.used((id(where[0]), where[1], bool(self.words)))
            self._limits.waited()
            self._set_open_limit(self._limits.next)

    def _add_end_form(self) -> None:
        words, known, at = self.words, self._forms, 0
        forms = []
        while at < len(words):
            forms.append(words[at])
            at += 1 + known[words[at]].arity
        times = Counter(forms)
        late = [form for form in forms[len(forms) // 2 :] if known[form].name not in ("alloc", "free", ATTENTION)]
        if late:
            if len(self._end_forms) >= MAX_END_FORMS:
                self._end_forms.clear()
            self._end_forms.add(min(reversed(late), key=times.__getitem__))

    def _drop_prediction(self) -> None:
        """Forget which value the next program would compute early, and that it would end there."""
        if self._early is not None:
            self._early = None
            self._set_open_limit(self._limit_without_early)

    def _set_open_limit(self, most: int) -> None:
        """Set the maximum number of instructions of the open program. A prediction (`_close_early`) may make it shorter."""
        self._limit_without_early = self._open_limit = most
        self.room = most if most < self._limits.next else most // 2 or 1
        early = self._early
        if early is not None:
            self._open_limit = min(most, early.count)
            self.room = min(self.room, self._open_limit)

    def release_dead(self) -> None:
        """Record frees for the storages that the heap lists as freed.

        If the open program uses the buffer, an instruction frees it. Such frees come from reference counts, so each iteration of
        a loop frees at the same point. Other buffers are freed after the run, outside the program. So the timing of the garbage
        collector does not change the program. Host copies of buffers that the open program uses are kept until it is sent,
        because its values may be computed from them.
        """
        heap, link, mask = self.heap, self.link, ID_MASK
        dead, kept, capture = heap.dead, heap.kept, self.capture
        slot_of, words = self.slot_of, self.words
        while dead:
            freed = dead.pop()
            if kept and self._is_kept(freed):
                continue
            if capture is not None:
                capture.note_death(freed)
            buffer = freed & mask
            slot = slot_of.pop(buffer, None)
            if slot is None:
                self._frees.append(buffer)
                if link is not None:
                    link.forget(buffer)
            else:
                words.append(self._free_form)
                words.append(slot)
                self.origins.append(self.origins[-1])
                self._freed.append(buffer)

    def _is_kept(self, freed: int) -> bool:
        """Process an entry of `Heap.dead` while `Heap.kept` has entries. Returns False if the buffer must be freed now."""
        return (freed >= 0 and self.lazy_clones.died(freed)) or self.heap.is_kept(freed)

    def drop_incomplete(self) -> None:
        """Remove the incomplete last instruction after an interrupt (Ctrl-C)."""
        self._cuts += 1
        at = count = n_params = n_slots = 0
        while at < len(self.words) and count < len(self.origins):
            form = self._forms[self.words[at]]
            end = at + 1 + form.arity
            if end > len(self.words) or n_params + len(form.param_format) > len(self.params):
                break
            n_slots = max([n_slots, *[slot + 1 for slot in self.words[at + 1 : end]]])
            at, count, n_params = end, count + 1, n_params + len(form.param_format)
        del self.words[at:], self.origins[count:], self.params[n_params:], self.bind[n_slots:]
        for buffer in [b for b, slot in self.slot_of.items() if slot >= n_slots]:
            del self.slot_of[buffer]

    @property
    def own_capture(self) -> Capture | None:
        """The capture of a CUDA graph, if the calling thread makes it."""
        capture = self.capture
        return capture if capture is not None and capture.in_own_thread else None

    @property
    def open(self) -> bool:
        """Whether there are recorded instructions or frees that are not sent."""
        return bool(self.words or self._frees)

    def flush(self, *, reply: bool = False) -> int:
        """Close the open program and send it. Returns the frame's sequence number (0: there was nothing to send).

        If a signal handler raises an exception while the send waits for room, or if the stack or the memory of the host is too
        small to send it, the program stays open. With `reply`, it is dropped: it is one operation, which the exception ends.

        Raises:
            WoolyError: no session is open, or the connection ended.
            RuntimeError: a CUDA graph is being captured. It is CUDA's own error.
        """
        if self.capture is not None:
            self.capture.refuse()
        if self.heap.dead:
            self.release_dead()
        if not (self.words or self._frees):
            self.heap.settle()
            if self._deferred:
                self._send_deferred(self.require_link())
            return 0
        link = self.link
        if link is None:
            try:
                link = self.require_link()
            except NotConnectedError:
                self._reset_program()
                raise
        mark, send_later = self._mark, self._deferred
        cut, self._closed_at_end_form = self._closed_at_end_form, None
        if cut is not None and cut[1] + len(self.origins) <= self._limit_at_end_form:
            if len(self._kept_whole) >= MAX_END_FORMS:
                self._kept_whole.clear()
            self._kept_whole.add(cut)
        assert not (reply and send_later), "the deferred frames would be answered before the run"
        rest: list[int] = []
        if len(self._frees) > MAX_FREES:
            rest = self._frees[MAX_FREES:]  # sent with the next program
            del self._frees[MAX_FREES:]
        link.interrupted = False
        key, bind = array("I", self.words).tobytes(), self.bind
        try:
            seq = self._send(link, key, self, bind, self.params, self._frees, reply)
        except BaseException as e:
            if isinstance(e, (RecursionError, MemoryError)) and link.lost is None:
                link.interrupted = True  # before the link was asked to send it
            if link.interrupted and not reply:
                self._frees += rest  # the program stays open: its operations have returned, so they must still happen
                raise
            if link.interrupted:  # the executor still has these buffers, so their ids may not be used again
                rest = self._frees + self._freed + rest
                self._frees, self._freed = [], []
            self._reset_program()
            self._frees = rest
            raise
        self._early = self.early_reads.sent(key, bind)
        self._sent_last = RecentProgram(self.words, bind, self.params, self.slot_of, seq, link.overwritten, self._cuts)
        self._reset_program()
        if rest:
            self._frees = rest
        else:
            self.heap.settle()
        if send_later:
            self._deferred = send_later
            self._send_deferred(link)
        if mark is not None:
            mark.link, mark.position = link, link.position
        return seq

    def flush_complete(self) -> None:
        """Flush while an instruction is being recorded: its params, which are there already, stay."""
        at = n_params = 0
        while at < len(self.words):
            form = self._forms[self.words[at]]
            at, n_params = at + 1 + form.arity, n_params + len(form.param_format)
        own = self.params[n_params:]
        del self.params[n_params:]
        try:
            self.flush()
        finally:
            self.params += own  # after those of a program that stays open

    def send_later(self, send: Callable[[Link], None]) -> None:
        """Call `send` after the open program is sent, or now if no program is open. `send` must not wait for an answer."""
        if not self.words:
            send(self.require_link())
            return
        self._deferred.append(send)
        if len(self._deferred) >= MAX_DEFERRED:
            self.flush()

    def _send_deferred(self, link: Link) -> None:
        """Send what `send_later` has deferred. If an exception of a signal handler ends a wait, the next flush sends the rest."""
        while self._deferred:
            self._deferred[0](link)
            del self._deferred[0]

    @property
    def has_deferred(self) -> bool:
        """Whether `send_later` has deferred a call."""
        return bool(self._deferred)

    def sync(self) -> None:
        """Send the open program and wait until the executor has run everything.

        Raises:
            RemoteOperationError: an operation since the last answer failed.
            WoolyError: no session is open, or the connection ended.
        """
        self.flush()
        self.require_link().sync()
        self.early_reads.waited()
        self.idle()

    def finish(self) -> None:
        """As `sync`, but ask nothing if an answer has shown that everything has run, or a read that is under way will show it.

        Raises:
            RemoteOperationError: as `sync`.
            WoolyError: as `sync`.
        """
        works = bool(self.words or self._deferred)
        link = self.require_link()
        position = self._last_work(link)
        self.flush()
        if works:
            position = link.position
        else:
            self._sent_frees = link, link.position, position
        if link.reach(position):
            self.early_reads.waited()
            self.idle()
        else:
            self.sync()

    def _last_work(self, link: Link) -> int:
        """Number of the last frame that is work: frees that `finish` has sent alone are none."""
        of, after, before = self._sent_frees
        return before if of is link and after == link.position else link.position

    def settle(self) -> None:
        """As `sync`, if something was recorded or sent since the last answer. An error is kept for the next call that waits."""
        link = self.link
        if link is None or not (self.open or link.unanswered):
            return
        try:
            self.sync()
        except RuntimeError as e:  # an operation has failed, or the connection has ended
            link.keep_error(e)

    def mark(self) -> Mark:
        """The current point in the work, for `reach`. If a program is open, the point is the end of this program."""
        if self.link is not None and not self.open:
            return Mark(self.link, self._last_work(self.link))
        if self._mark is None:
            self._mark = Mark()
        return self._mark

    def reach(self, mark: Mark) -> None:
        """Wait until the executor has run the work before a mark. If no pending answer shows this, wait for all work.

        Raises:
            RemoteOperationError: an operation failed.
            WoolyError: no session is open, or the connection ended.
        """
        if mark is self._mark:
            self.flush()
        link = self.require_link()
        if mark.link is not link or not link.reach(mark.position):
            self.sync()

    def passed(self, mark: Mark | None = None) -> bool:
        """Whether the executor is known to have run the work before a mark; None: all work. Does not wait for the device.

        The open program is sent, so the answer becomes True without another call that sends it.

        Raises:
            WoolyError: the connection ended.
        """
        if (mark is None or mark is self._mark) and (self.words or self._deferred):  # frees alone are no work
            self.flush()
        link = self.link
        if link is None:
            return True
        return link.passed(self._last_work(link) if mark is None or mark.link is not link else mark.position)

    def set_limit(self, limit: int) -> None:
        """Set the maximum number of instructions per program. Until the next flush, end forms do not close the program."""
        self.limit = self._open_limit = self.room = limit
        self._limits = ProgramLimits(limit)

    def lift_limit(self, limit: int) -> tuple[int, ProgramLimits]:
        """Set another maximum for a while. Returns what `restore_limit` takes."""
        before = self.limit, self._limits
        self.set_limit(limit)
        return before

    def restore_limit(self, before: tuple[int, ProgramLimits]) -> None:
        """Restore the maximum, and what was learned about the programs that are sent."""
        self.limit, self._limits = before
        self._set_open_limit(self._limits.next)

    def idle(self) -> None:
        """Make the next programs short, because the device is idle and should get work soon."""
        self._limits.waited()
        self._set_open_limit(min(FIRST_PROGRAM_LIMIT, self.limit))

    def replay(self, work: Work, bind: list[int], params: list[float | int], frees: list[int]) -> None:
        """Send a recorded program again, with other buffers and params. The open program is sent first.

        Args:
            work: the recorded program.
            bind: buffer per slot.
            params: values of the params, in order.
            frees: buffers to free after the run.
        """
        if self.replaced:
            self.separate(bind)
        if self.capture is not None:
            self.capture.inline(work, bind, params, frees)
            return
        link = self.require_link()
        if self.words:  # the open program, what waits for it, and the recorded program are one message
            link.hold(1 + len(self._deferred))
        try:
            self.flush()
        finally:
            link.hold(0)
        self._drop_prediction()
        self.early_reads.interrupt()
        self._send(self.require_link(), work.key, work, bind, params, frees, reply=False)
        self.after_replay = True

    def begin_capture(self, capture: Capture) -> None:
        """Send the open program. From now on, `capture` keeps what is recorded, as one program of any length."""
        self.lazy_clones.separate_all(origin())
        self.flush()
        self.require_link()
        self._operations_before_capture = self.operations
        self._limit_before_capture = self.lift_limit(NO_LIMIT)
        self.recording = True
        self.capture = capture

    def end_capture(self) -> Taken:
        """Take the open program. From now on, programs are sent again."""
        operations = self.operations - self._operations_before_capture
        taken = Taken(self.words, self.bind, self.params, self.origins, self._freed, operations)
        self.operations = self._operations_before_capture
        self.capture, self.recording = None, False
        if self.link is not None:
            self.link.end_program(self._freed)
        frees, self._frees, self._freed = self._frees, [], []
        self._reset_program()
        self._frees = frees
        self.restore_limit(self._limit_before_capture)
        return taken

    def append(self, form: int, slots: Iterable[int], where: Origin) -> None:
        """Append one instruction whose slots exist."""
        self.words.append(form)
        self.words.extend(slots)
        self.origins.append(where)

    def note_draw(self, generator: Generator) -> None:
        """A random operator is about to draw from a generator of the user."""
        if self.capture is not None:
            self.capture.note_draw(generator)
        self.foreign_draws += 1

    def draw_from(self, generator: Generator) -> None:
        """Let operators without a generator draw from this one, until another call.

        Raises:
            RuntimeError: a CUDA graph is captured, which does not know the generator.
        """
        with self.lock:
            self.note_draw(generator)
            self.generator = generator

    @property
    def free_form(self) -> int:
        """Number of the form `free`."""
        return self._free_form

    def _send(
        self,
        link: Link,
        key: bytes,
        work: Recorder | Work,
        bind: list[int],
        params: list[float | int],
        frees: list[int],
        reply: bool,
    ) -> int:
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = self._define(link, work.words)
            if len(self._sent) > PROGRAMS_KEPT:
                self._sent.popitem(last=False)
        self._limits.sent(len(work.origins), sent.times)
        sent.times += 1
        packed = sent.pack_params.pack(*params)
        seq = link.run(sent.digest, bind, packed, frees, work.words, work.origins, reply)
        self._sent.move_to_end(key)  # as the executor does when the run arrives
        self.instructions += len(work.origins)
        self.programs += 1
        return seq

    def try_flush(self) -> None:
        """Flush in the timer thread. If the connection has ended, the next call in the user's thread raises the error."""
        if self._end_forms:
            self._without_end_form = PROGRAMS_WITHOUT_END_FORM
        self._closed_at_end_form = None
        self._drop_prediction()
        with contextlib.suppress(WoolyError):
            self.flush()

    def _reset_program(self) -> None:
        if self.link is not None:
            self.link.end_program(self._freed)
        freed = self._frees + self._freed
        if freed:
            self.heap.recycle(freed)
        self.words = []
        self.bind = []
        self.slot_of = {}
        self.params = []
        self.origins = []
        self._frees = []
        self._freed = []
        self._mark = None
        self._deferred = []
        self.after_replay = False
        self.generation += 1
        self._set_open_limit(self._limits.next)

    def _define(self, link: Link, recorded: list[int]) -> SentProgram:
        """Encode a program and send its definition. Returns its digest and the packer of its params."""
        local: dict[int, int] = {}
        order: list[bytes] = []
        fmt = ["<"]
        words = array("I", recorded)
        i, n, forms = 0, len(words), self._forms
        while i < n:
            form = words[i]
            info = forms[form]
            index = local.get(form)
            if index is None:
                index = local[form] = len(order)
                order.append(info.raw)
            words[i] = index
            fmt.append(info.param_format)
            i += 1 + info.arity
        raw = join_program(order, words)
        link.define(raw)
        name = digest(raw)
        if self.programs_dir is not None:
            (self.programs_dir / f"{name.hex()[:16]}.wis").write_bytes(raw)
        return SentProgram(name, struct.Struct("".join(fmt)))

    def recent_programs(self, most: int, *, behind_reads: bool = False) -> list[RecentProgram]:
        """The program that was sent last, if nothing was sent after it, and the open program.

        Args:
            most: maximum number of words of all programs. Longer ones are left out.
            behind_reads: whether reads may have been sent after it.
        """
        found = []
        if len(self.words) <= most:
            last, link = self._sent_last, self.link
            if last is not None and link is not None:
                at = link.position
                is_last = at == last.position or (behind_reads and at == self._behind_reads)
                if is_last and len(last.words) + len(self.words) <= most:
                    found.append(last)
            overwritten = {} if link is None else link.overwritten
            found.append(RecentProgram(self.words, self.bind, self.params, self.slot_of, 0, overwritten, self._cuts))
        return found

    def note_reads_sent(self, count: int) -> None:
        """The last `count` frames are reads. They change nothing, so the program before them may still be searched."""
        last, link = self._sent_last, self.link
        if last is not None and link is not None and link.position - count in (last.position, self._behind_reads):
            self._behind_reads = link.position

    def frees(self, buffer: int) -> bool:
        """Whether the script has freed a buffer, and the open program does not use it or does not show it yet."""
        return buffer in self._frees or any(dead & ID_MASK == buffer for dead in self.heap.dead)

    def instructions_of(self, words: list[int]) -> Iterator[tuple[InternedForm, list[int]]]:
        """Yield (form, slots) for every instruction in recorded words."""
        i = 0
        while i < len(words):
            form = self._forms[words[i]]
            yield form, words[i + 1 : i + 1 + form.arity]
            i += 1 + form.arity

    def take_params(self, form: int) -> list[float | int]:
        """Remove and return the params of the last instruction, whose form is `form`."""
        n = len(self._forms[form].param_format)
        kept, own = (self.params[:-n], self.params[-n:]) if n else (self.params, [])
        self.params = kept
        return own

    @property
    def torch_version(self) -> str:
        """Version of the executor's PyTorch; empty if it is not known."""
        return "" if self.link is None else str(self.link.device.get("torch_version", ""))

    def require_link(self) -> Link:
        """The session's link.

        Raises:
            NotConnectedError: no session is open.
        """
        if self.link is None and self.opener is not None:
            self.opener()
        if self.link is None:
            raise NotConnectedError(
                "no session is open, so the wooly device cannot be used; call wooly.enable(), or run the script with `wooly run`"
            )
        return self.link

    def on_cpu(self) -> bool:
        """Whether the executor computes on a CPU. Connects the session if that is not known."""
        return self.require_link().device.get("vendor") == "cpu"

    def name_of(self, words: list[int], instruction: int) -> str:
        """Name of the operation with index `instruction` in recorded words."""
        i = 0
        for _ in range(instruction):
            i += 1 + self._forms[words[i]].arity
        return self._forms[words[i]].name

    def share(self, other: Recorder | None) -> None:
        """Use the link of another recorder, together with it; None: a link of its own. Call it while no session is open."""
        self.lock = self._own_lock if other is None else other.lock
        self._sent = OrderedDict() if other is None else other._sent

    def forked(self) -> None:
        """Make recording fail in a forked process whose parent has a session, as CUDA does."""
        self.lock = self._own_lock
        unlock_after_fork(self.lock)
        if self.link is not None:
            self.replaced = True
            self.emit = self.emit_new = self.require_link = _refuse_forked  # type: ignore[method-assign]

    def forget_session(self) -> None:
        """Drop the open program and the list of sent programs, so that a new session can begin."""
        if self.capture is not None:
            self.heap.recycle(self.end_capture().freed)
        self._sent.clear()
        self.early_reads = EarlyReads(self._writes_of, self._extent_of)
        self.read_ahead = ReadAhead()
        self._early = self._sent_last = None
        self._sent_frees = None, 0, 0
        self._reset_program()
        self.link = None
        self.heap.granted = NO_LIMIT
