"""The open WIS program: instructions as they are recorded, closed and sent at a sync, at a size limit, or by a timer.

The hot path is `begin … emit`: a few list appends per instruction. Forms are interned once per process, so that a step seen
before costs one dictionary look-up at its end: its words are its name. Knows PyTorch only as the thing that calls it; the
socket belongs to `link`.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from wooly_wis.codec import digest, encode_form, join_program
from wooly_wis.dtypes import DType
from wooly_wis.limits import MAX_FREES
from wooly_wis.program import Form, Operand, ParamKind, Role, View

from wooly.errors import ForkedProcessError, NotConnectedError, WoolyError
from wooly.python_private import frame_at, unlock_after_fork
from wooly.rng import Generator
from wooly.storage import Heap

if TYPE_CHECKING:
    from wooly.link import Link

#: Instructions after which the first program after a wait is closed.
EARLY = 12
_PARAM_FORMAT = {ParamKind.F64: "d", ParamKind.I64: "q", ParamKind.C128: "dd", ParamKind.BOOL: "q"}


#: Forms that end programs, and programs that these should not end; forgotten all at once when there are more.
MARKS = 1024
#: Programs that may end anywhere after the timer has cut one, before a mark is set for them.
ASTRAY = 8
#: Frames that wait behind an open program, after which it is closed.
AFTERWARDS = 32


#: One recorded instruction's origin: code object and instruction offset of the Python line.
Origin = tuple[CodeType, int]


class InternedForm(NamedTuple):
    """A form as the recorder keeps it.

    Attributes:
        raw: canonical bytes.
        arity: operand count.
        param_format: `struct` format of its params.
        name: opcode, or the operator's name.
        writes: operands that the instruction writes.
        random: its last two params are a (seed, offset) of the device's generator.
        nbytes: what an `alloc` allocates.
    """

    raw: bytes
    arity: int
    param_format: str
    name: str
    writes: tuple[int, ...]
    random: bool
    nbytes: int


class SentProgram(NamedTuple):
    """A program the executor of this session already has: its digest and the packer of its params."""

    digest: bytes
    pack_params: struct.Struct


class Work(NamedTuple):
    """A closed program, kept to be sent again.

    Attributes:
        key: its words as bytes, its name among the programs that were sent.
        words: interned forms and slots.
        origins: the Python line of each instruction.
    """

    key: bytes
    words: list[int]
    origins: list[Origin]


class Mark:
    """A point of a device's work: a position of the link it went through.

    Attributes:
        link: that link; None while the program that is open there is not sent, and for ever if it never is.
        position: the last frame that was sent before it.
    """

    __slots__ = ("link", "position")

    def __init__(self, link: Link | None = None, position: int = 0) -> None:
        self.link = link
        self.position = position


#: Programs that a session may refer to by digest: both ends drop the least recently used beyond this, in the same order.
PROGRAMS_KEPT = 1024

#: Whether a code object is a library's, by its id: Dynamo makes some that have no hash. The list keeps the ids theirs.
_library_code: dict[int, bool] = {}
_codes_seen: list[CodeType] = []
_GENERATED = ("<frozen", "<eval_with_key>")
_library_roots: tuple[str, ...] = _GENERATED


def set_library_roots(roots: tuple[str, ...]) -> None:
    """Directories whose frames are never shown as the origin of an operation (torch's and our own)."""
    global _library_roots
    _library_roots = (*_GENERATED, *roots)
    _library_code.clear()
    _codes_seen.clear()


def add_library_root(root: str) -> None:
    """One more directory whose frames are never shown."""
    if root not in _library_roots:
        set_library_roots((*_library_roots, root))


def _is_library(code: CodeType) -> bool:
    _codes_seen.append(code)
    known = _library_code[id(code)] = code.co_filename.startswith(_library_roots)
    return known


def origin(depth: int = 2) -> Origin:
    """The innermost Python line outside torch and Wooly that led here."""
    frame: FrameType | None = frame_at(depth)
    first = frame
    known = _library_code
    while frame is not None:
        code = frame.f_code
        library = known.get(id(code))
        if library is None:
            library = _is_library(code)
        if not library:
            return code, frame.f_lasti
        frame = frame.f_back
    assert first is not None
    return first.f_code, first.f_lasti


def describe_origin(where: Origin) -> str:
    """``file:line`` of an origin."""
    code, last = where
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= last < end and number is not None:
            line = number
            break
    return f"{code.co_filename}:{line} in {code.co_name}"


def _refuse_forked(*args: object, **kwargs: object) -> NoReturn:
    raise ForkedProcessError


class Forms:
    """Every form that this process has recorded, by a small number. All devices share them; any thread may ask.

    Attributes:
        known: the forms, by their number.
    """

    def __init__(self) -> None:
        self.known: list[InternedForm] = []
        self._ids: dict[bytes, int] = {}
        self._alloc_ids: dict[int, int] = {}
        self._lock = threading.Lock()

    def intern(self, form: Form) -> int:
        """A small number for `form`, the same for equal forms."""
        raw = encode_form(form)
        with self._lock:
            known = self._ids.get(raw)
            if known is None:
                fmt = "".join(_PARAM_FORMAT[k] for k in form.params)
                name = form.attr("name") or form.attr("entry")
                writes = tuple([i for i, o in enumerate(form.operands) if o.role is not Role.IN])
                random = form.attr("rng") is not None
                view = form.operands[0].view if form.opcode == "alloc" else None
                self.known.append(
                    InternedForm(
                        raw, len(form.operands), fmt, str(name or form.opcode), writes, random, view.end if view else 0
                    )
                )
                known = self._ids[raw] = len(self.known) - 1
            return known

    def forked(self) -> None:
        """This process is a fork: another thread may have held the lock."""
        self._lock = threading.Lock()

    def alloc(self, nbytes: int) -> int:
        """The interned `alloc` of `nbytes` bytes."""
        known = self._alloc_ids.get(nbytes)
        if known is None:
            view = View(DType.U8, (nbytes,), (1,), 0)
            known = self._alloc_ids[nbytes] = self.intern(Form("alloc", (Operand(Role.OUT, view),)))
        return known


class Recorder:
    """Records for one device. All public methods are called with `lock` held.

    Attributes:
        lock: reentrant; every kernel takes it, so that threads of one process share a device safely. No thread that
            holds one device's waits for another's, except who takes all in order (see `graphs`).
        forms: what instructions are made of.
        heap: the device's storages.
        generator: the device's random numbers.
        limit: instructions after which a program is closed.
        room: instructions of the open program after which it may be closed: see `crowded`.
        recording: somebody keeps what is recorded now.
        follows: the open program began behind one that was sent again: there it begins each time around.
        foreign_draws: random operators so far that drew from a generator of the user's.
        programs_dir: where new programs are written, as ``<digest>.wis``.
    """

    def __init__(self, limit: int, forms: Forms, heap: Heap, generator: Generator) -> None:
        self.lock = threading.RLock()
        self.forms = forms
        self.heap = heap
        self.generator = generator
        self.limit = limit
        self.link: Link | None = None
        self.programs_dir: Path | None = None
        self.recording = self.follows = False
        self.foreign_draws = 0
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
        self._marks: set[int] = set()
        #: The program that ended at a mark just now: its words, how many instructions; and such that need not have ended there.
        self._cut: tuple[bytes, int] | None = None
        self._short: set[bytes] = set()
        self._astray = 0
        self._restart(limit)
        self._mark: Mark | None = None
        self._afterwards: list[Callable[[Link], None]] = []
        self._sent: OrderedDict[bytes, SentProgram] = OrderedDict()
        self._frees: list[int] = []
        self._freed: list[int] = []
        self._free_form = forms.intern(Form("free", (Operand(Role.IN, None),)))
        self.woken = threading.Event()
        self.sleeping = True

    # -- recording ---------------------------------------------------------------------------------------------------

    def emit(self, form: int, buffers: list[int], where: Origin) -> None:
        """Append one instruction: interned form, buffer id per operand."""
        words, slot_of, bind = self.words, self.slot_of, self.bind
        words.append(form)
        for buffer in buffers:
            slot = slot_of.get(buffer)
            if slot is None:
                slot = slot_of[buffer] = len(bind)
                bind.append(buffer)
            words.append(slot)
        self.origins.append(where)

    def crowded(self, form: int) -> None:
        """The open program has reached `room`, its last instruction is of this form: close it here, or a little later.

        A loop's programs should be the same each time around, wherever it was when the last one was closed: then a digest is all
        that travels, and the executor knows the program. So programs end where others did, at a *mark*, once they are half full;
        one that finds no mark ends at the limit and sets one, at the rarest form of its second half.

        Where the timer cuts hangs on how fast machines are just now. The programs after its cut lie across the loop in a way that
        will not come again: marks for them would only make the loop's programs more and shorter, so they have to find an old one.

        A mark that parts what one program could hold, as somebody waits soon behind it, is passed over the next time.
        """
        count, self._cut = len(self.origins), None
        if count >= self._most:
            if self._most == self.limit and form not in self._marks:
                if self._astray:
                    self._astray -= 1
                else:
                    self._set_mark()
            self.flush()
        elif form in self._marks:
            name = array("I", self.words).tobytes()
            if name in self._short:
                self.room = self._most
            else:
                self.flush()
                self._cut = name, count

    def _set_mark(self) -> None:
        words, known, at = self.words, self._forms, 0
        forms = []
        while at < len(words):
            forms.append(words[at])
            at += 1 + known[words[at]].arity
        times = Counter(forms)
        late = [form for form in forms[len(forms) // 2 :] if known[form].name not in ("alloc", "free")]
        if late:
            if len(self._marks) >= MARKS:
                self._marks.clear()
            self._marks.add(min(reversed(late), key=times.__getitem__))

    def _restart(self, most: int) -> None:
        """The open program is closed after `most` instructions."""
        self._most = most
        self.room = most if most < self.limit else max(most // 2, 1)

    def release_dead(self) -> None:
        """Turn the deaths reported by the heap into frees.

        A buffer that this program used is freed by an instruction (deaths by reference count repeat exactly); any other
        after the run, outside the program, so that the garbage collector's timing does not make new programs.
        """
        dead = self.heap.dead
        link = self.link
        slot_of, words = self.slot_of, self.words
        while dead:
            buffer = dead.pop()
            slot = slot_of.pop(buffer, None)
            if slot is None:
                self._frees.append(buffer)
            else:
                words.append(self._free_form)
                words.append(slot)
                self.origins.append(self.origins[-1])
                self._freed.append(buffer)
            if link is not None:
                link.forget(buffer)

    def mend(self) -> None:
        """Take back the instruction that an interrupt (Ctrl-C) has left half recorded."""
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
    def open(self) -> bool:
        """Whether anything is recorded and not yet sent."""
        return bool(self.words or self._frees)

    def flush(self, *, reply: bool = False) -> int:
        """Close the open program and send it. Returns the frame's sequence number (0: there was nothing to send).

        Raises:
            WoolyError: there is no session, or it is lost.
        """
        if self.heap.dead:
            self.release_dead()
        if not (self.words or self._frees):
            return 0
        try:
            link = self.require_link()
        except NotConnectedError:
            self._abandon()
            raise
        mark, afterwards = self._mark, self._afterwards
        cut, self._cut = self._cut, None
        if cut is not None and cut[1] + len(self.origins) <= self.limit:
            if len(self._short) >= MARKS:
                self._short.clear()
            self._short.add(cut[0])
        assert not (reply and afterwards), "an answer is awaited that others would come before"
        rest = self._frees[MAX_FREES:]  # they go with the next program
        del self._frees[MAX_FREES:]
        try:
            seq = self._send(link, array("I", self.words).tobytes(), self, self.bind, self.params, self._frees, reply)
        finally:
            self._abandon()
            self._frees = rest
        for send in afterwards:
            send(link)
        if mark is not None:
            mark.link, mark.position = link, link.position
        return seq

    def afterwards(self, send: Callable[[Link], None]) -> None:
        """Have something sent behind the open program, or now if none is open. It must not wait for anything."""
        if not self.words:
            send(self.require_link())
            return
        self._afterwards.append(send)
        if len(self._afterwards) >= AFTERWARDS:
            self.flush()

    @property
    def waiting(self) -> bool:
        """Whether something will be sent behind the open program."""
        return bool(self._afterwards)

    def sync(self) -> None:
        """Send what is open and wait until everything has run.

        Raises:
            RemoteOperationError: something since the last answer failed.
            WoolyError: there is no session, or it is lost.
        """
        self.flush()
        self.require_link().sync()
        self.idle()

    def mark(self) -> Mark:
        """This point of the work, to be waited for with `reach`; where a program is open, its end."""
        if self.link is not None and not self.open:
            return Mark(self.link, self.link.position)
        if self._mark is None:
            self._mark = Mark()
        return self._mark

    def reach(self, mark: Mark) -> None:
        """Wait until everything up to a mark has run; where no answer will tell that, until everything has.

        Raises:
            RemoteOperationError: something failed.
            WoolyError: there is no session, or it is lost.
        """
        if mark is self._mark:
            self.flush()
        link = self.require_link()
        if mark.link is not link or not link.reach(mark.position):
            self.sync()

    def set_limit(self, limit: int) -> None:
        """Programs have up to so many instructions from now on; the open one has exactly as many, marks or not."""
        self.limit = self._most = self.room = limit

    def idle(self) -> None:
        """The device has run everything: the next program is sent early, so that it has something to do."""
        self._restart(min(EARLY, self.limit))

    def replay(self, work: Work, bind: list[int], params: list[float | int], frees: list[int]) -> None:
        """Send recorded work again, after what is open, with other buffers and params.

        Args:
            work: what was recorded.
            bind: buffer per slot.
            params: values of its params, in order.
            frees: buffers to free afterwards.
        """
        self.flush()
        self._send(self.require_link(), work.key, work, bind, params, frees, reply=False)
        self.follows = True

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
        else:
            self._sent.move_to_end(key)
        packed = sent.pack_params.pack(*params)
        seq = link.run(sent.digest, bind, packed, frees, work.words, work.origins, reply)
        self.instructions += len(work.origins)
        self.programs += 1
        return seq

    def try_flush(self) -> None:
        """Flush for the timer's thread: a lost executor is reported at the next call of the user's own thread."""
        if self._marks:
            self._astray = ASTRAY
        self._cut = None
        with contextlib.suppress(WoolyError):
            self.flush()

    def _abandon(self) -> None:
        self.heap.recycle(self._frees)
        self.heap.recycle(self._freed)
        self.words = []
        self.bind = []
        self.slot_of = {}
        self.params = []
        self.origins = []
        self._frees = []
        self._freed = []
        self._mark = None
        self._afterwards = []
        self.follows = False
        self.generation += 1
        self._restart(self.limit)

    def _define(self, link: Link, recorded: list[int]) -> SentProgram:
        """Encode a program, send its definition, and name it."""
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

    def instructions_of(self, words: list[int]) -> Iterator[tuple[InternedForm, list[int]]]:
        """(form, slots) of every instruction in recorded words."""
        i = 0
        while i < len(words):
            form = self._forms[words[i]]
            yield form, words[i + 1 : i + 1 + form.arity]
            i += 1 + form.arity

    def take_params(self, form: int) -> list[float | int]:
        """Take back the params of the instruction of `form` that is being recorded, the last ones."""
        n = len(self._forms[form].param_format)
        kept, own = (self.params[:-n], self.params[-n:]) if n else (self.params, [])
        self.params = kept
        return own

    def require_link(self) -> Link:
        """The session's link.

        Raises:
            NotConnectedError: there is none.
        """
        if self.link is None:
            raise NotConnectedError(
                "the wooly device is not connected; call wooly.enable(), or run the script with `wooly run`"
            )
        return self.link

    def name_of(self, words: list[int], instruction: int) -> str:
        """Name of the operation at `instruction` in recorded words."""
        i = 0
        for _ in range(instruction):
            i += 1 + self._forms[words[i]].arity
        return self._forms[words[i]].name

    def forked(self) -> None:
        """This process is a fork of the one that has the session: from now on recording fails, as CUDA does."""
        unlock_after_fork(self.lock)
        if self.link is not None:
            self.emit = self.require_link = _refuse_forked  # type: ignore[method-assign]

    def forget_session(self) -> None:
        """Start over for a new session: nothing is defined there yet."""
        self._sent.clear()
        self._abandon()
        self.link = None
