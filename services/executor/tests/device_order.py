"""Finds accesses to device memory whose order nothing determines, although one of them writes (happens-before, vector clocks).

Each stream of a GPU is one timeline, and all threads of the host are one. Work that is enqueued is later than what is on its
stream already, and than what the host has waited for. Events and waits of streams order streams, and waits of the host order the
host.

An allocation and the end of memory count as writes on the stream that the memory belongs to: torch's allocator gives memory out
again on this stream, without a wait. So memory that another stream may still use when it is freed is a race, also if nobody has
reused it yet.

What is not seen: an order between threads of the host that only a lock makes, and operators in threads that are not watched.
"""

import contextlib
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HOST = "the host"
#: Methods with which the host reads a tensor itself, or may write it.
READING, SHOWING = (torch.Tensor.tolist, torch.Tensor.cpu), (torch.Tensor.numpy,)
#: Operators that change only what a tensor is, and operators that write nothing into the memory that they return.
METADATA = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::resolve_conj", "aten::resolve_neg"}
EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_OWN = {__file__, str(Path(__file__).with_name("fake_gpu.py"))}


class RaceError(AssertionError):
    """Two accesses without an order."""


class Access(NamedTuple):
    """An access to the bytes from `begin` to `end`. `job`: returns the mover's job that makes it, or None."""

    timeline: str
    stamp: int
    begin: int
    end: int
    write: bool
    what: str
    places: tuple
    job: object = lambda: None

    @property
    def thrown_away(self):
        """Whether it reads for a job that was cancelled, which drops what it has read."""
        job = self.job()
        return not self.write and job is not None and job.cancelled

    def __str__(self):
        places = " < ".join(f"{_short(file)}:{line} {function}" for file, line, function in self.places)
        return f"{'write' if self.write else 'read'} by {self.timeline}: {self.what} ({places})"


class Block:
    """The memory of one storage, or locked pages of the host. `home`: the timeline that gets the memory back."""

    def __init__(self, begin, end, home, host, owner=None):
        self.begin, self.end, self.home, self.host, self.owner = begin, end, home, host, owner
        self.accesses = {}

    def __lt__(self, other):
        return self.begin < other.begin

    @property
    def stale(self):
        """Whether its storage has moved elsewhere."""
        owner = self.owner() if self.owner is not None else None
        return owner is not None and owner.data_ptr() != self.begin


class Order:
    """The accesses to one device. `races` has the texts of all races so far. Any thread may use it.

    Args:
        current: returns the name of the stream to which the calling thread sends work.
        waits: tells for which operators the host waits.
    """

    def __init__(self, current, waits):
        self.races = []
        self._current, self._waits = current, waits
        self._lock = threading.RLock()
        self._clocks = {HOST: {HOST: 0}}
        self._blocks = []
        self._dead = deque()
        self._local = threading.local()
        self.accesses = 0

    def check(self):
        """Raise the first race.

        Raises:
            RaceError: there is one.
        """
        with self._lock:
            self._bury()
            if self.races:
                raise RaceError(self.races[0])

    # -- order -------------------------------------------------------------------------------------------------------

    def point(self, timeline):
        """Return the clock of what is enqueued on a stream so far."""
        with self._lock:
            return dict(self._enqueue(timeline))

    def after(self, timeline, clock):
        """Order later work of a timeline after a point of another one."""
        with self._lock:
            _merge(self._clocks.setdefault(timeline, {}), clock)

    def _enqueue(self, timeline):
        clock = self._clocks.setdefault(timeline, {})
        if timeline != HOST:
            _merge(clock, self._clocks[HOST])
        clock[timeline] = clock.get(timeline, 0) + 1
        return clock

    # -- threads -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self):
        """Watch the operators of the calling thread."""
        if getattr(self._local, "watched", False):
            yield
            return
        self._local.watched = True
        try:
            with Shown(self), Watch(self):
                yield
        finally:
            self._local.watched = False

    def watch_thread(self):
        """Watch the operators of the calling thread until it ends. The main thread outlives a test and is not watched."""
        if threading.current_thread() is not threading.main_thread() and not getattr(self._local, "watched", False):
            self._local.watching = self.watched()
            self._local.watching.__enter__()

    @contextlib.contextmanager
    def ignored(self):
        """Do not count the accesses of the calling thread, but know its new memory."""
        before, self._local.ignored = getattr(self._local, "ignored", False), True
        try:
            yield
        finally:
            self._local.ignored = before

    @contextlib.contextmanager
    def by_address(self):
        """The calling thread uses memory by its address, as a graph does: memory that is not known has been freed."""
        before, self._local.by_address = getattr(self._local, "by_address", False), True
        try:
            yield
        finally:
            self._local.by_address = before

    # -- accesses ----------------------------------------------------------------------------------------------------

    def host_memory(self, address, nbytes, owner=None):
        """Note memory of the host that the device copies from and to."""
        with self._lock:
            self._bury()
            ref = weakref.ref(owner.untyped_storage(), self._forget(address)) if owner is not None else None
            insort(self._blocks, Block(address, address + nbytes, HOST, True, ref))

    def host_memory_ends(self, address):
        """Note that pages of the host are no longer locked. Any code may call this, also a destructor."""
        self._dead.append((address, dict(self._clocks[HOST]), _places()))

    def kernel(self, name, timeline, arrays):
        """Note a launch that accesses (address, bytes, whether it reads, whether it writes). None: to the memory's end."""
        with self._lock:
            self._bury()
            self._enqueue(timeline)
            for address, nbytes, reads, writes in arrays:
                block = self._at(address)
                end = address + nbytes if nbytes is not None else block.end if block is not None else address
                if end > address:
                    block = block or self._add(address, end, timeline, None)
                    if reads:
                        self._access(block, timeline, address, end, False, f"kernel {name}")
                    if writes:
                        self._access(block, timeline, address, end, True, f"kernel {name}")

    def shown(self, t, name, write):
        """Note that the host reads a tensor, or may write it."""
        if getattr(self._local, "ignored", False) or not t.untyped_storage().nbytes():
            return
        with self._lock:
            self._bury()
            block = self._block_of(t, self._current())
            timeline = HOST if block.host else self._current()
            self._enqueue(timeline)
            begin, end = _span(t)
            self._access(block, timeline, begin, end, write and block.host, name)
            if not block.host:
                _merge(self._clocks[HOST], self._clocks[timeline])

    def ran(self, func, args, kwargs, result):
        """Note an operator that has run."""
        schema, ignored = func._schema, getattr(self._local, "ignored", False)
        if func.is_view or schema.name in METADATA:
            return
        reads, writes = _operands(schema, args, kwargs)
        with self._lock:
            self._bury()
            stream = self._current()
            made = [] if ignored else self._known(reads + writes, stream)
            fresh = [t for t in _tensors(result) if t.untyped_storage().nbytes() and self._at(_address(t)) is None]
            if ignored:
                for t in fresh:
                    self._block_of(t, stream)
                return
            if not fresh and not writes and schema.returns and made and _aliases(result, reads):
                return  # such as `to` or `reshape` without a copy
            on_device = [t for t, block in made if not block.host]
            timeline = stream if on_device or fresh else HOST
            self._enqueue(timeline)
            what = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
            for t, write in [*[(t, False) for t in reads], *[(t, True) for t in writes]]:
                if t.untyped_storage().nbytes():
                    self._access(self._block_of(t, stream), timeline, *_span(t), write, what)
            for t in fresh:
                block = self._block_of(t, stream)
                self._access(block, stream, block.begin, block.end, True, f"memory for {what}")
            blocking = not kwargs.get("non_blocking") and not (schema.name == "aten::copy_" and args[2:] and args[2])
            mixed = on_device and len(on_device) < len(made)
            if (mixed and blocking) or self._waits(func):
                _merge(self._clocks[HOST], self._clocks[timeline])

    def _known(self, tensors, stream):
        """Return tensors with memory, and their blocks."""
        used = [t for t in tensors if t.untyped_storage().nbytes()]
        if getattr(self._local, "by_address", False):
            for t in used:
                if self._at(_address(t)) is None:
                    self.races.append(
                        f"a graph uses memory that was freed ({Access(stream, 0, 0, 0, False, '', _places())})"
                    )
        return [(t, self._block_of(t, stream)) for t in used]

    def _access(self, block, timeline, begin, end, write, what):
        self.accesses += 1
        clock = self._clocks[timeline]
        places, job = _seen_from()
        new = Access(timeline, clock[timeline], begin, end, write, what, places, job)
        self._compare(block, new, clock)
        if write:
            block.accesses = {k: a for k, a in block.accesses.items() if a.begin < begin or end < a.end}
        block.accesses[timeline, begin, end, write] = new

    def _compare(self, block, new, clock):
        for old in block.accesses.values():
            overlap = old.begin < new.end and new.begin < old.end and (old.write or new.write)
            if overlap and clock.get(old.timeline, 0) < old.stamp and not (old.thrown_away or new.thrown_away):
                self.races.append(f"race on {block.end - block.begin} bytes:\n  {old}\n  {new}")

    # -- memory ------------------------------------------------------------------------------------------------------

    def _at(self, address):
        """Return the block that has an address."""
        k = bisect_right(self._blocks, address, key=lambda b: b.begin) - 1
        if k < 0 or address >= self._blocks[k].end:
            return None
        if self._blocks[k].stale:
            del self._blocks[k]
            return None
        return self._blocks[k]

    def _block_of(self, t, stream):
        """Return the block of a tensor. Memory that was not known belongs to the stream."""
        storage = t.untyped_storage()
        return self._at(storage.data_ptr()) or self._add(
            storage.data_ptr(), storage.data_ptr() + storage.nbytes(), stream, storage
        )

    def _add(self, begin, end, home, storage):
        owner = weakref.ref(storage, self._forget(begin)) if storage is not None else None
        block = Block(begin, end, home, False, owner)
        insort(self._blocks, block)
        return block

    def _forget(self, begin):
        """Return what to do when a storage ends: in any thread, also while the lock is held."""

        def forget(ref):
            clocks = {name: dict(clock) for name, clock in list(self._clocks.items())}
            self._dead.append((begin, clocks, _places(), ref))

        return forget

    def _bury(self):
        """Handle the memory that has ended since the last access."""
        while self._dead:
            begin, clocks, places, *ref = self._dead.popleft()
            k = bisect_right(self._blocks, begin, key=lambda b: b.begin) - 1
            block = self._blocks[k] if k >= 0 else None
            if block is None or block.begin != begin or (ref and block.owner is not ref[0]):
                continue
            del self._blocks[k]
            if ref and block.host:
                continue  # torch keeps pinned memory of its own until the device has used it
            clock = clocks
            if ref:
                clock = dict(clocks.get(block.home, {}))
                _merge(clock, clocks[HOST])
            end = Access(
                block.home, clock.get(block.home, 0), block.begin, block.end, True, "the memory is freed", places
            )
            self._compare(block, end, clock)


class Watch(TorchDispatchMode):
    """Tells `Order` about the operators of a thread."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.order.ran(func, args, kwargs, result)
        return result


class Shown(TorchFunctionMode):
    """Tells `Order` what the host reads of tensors itself."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READING or func in SHOWING:
            self.order.shown(args[0], func.__name__, func in SHOWING)
        return func(*args, **(kwargs or {}))


def _merge(clock, other):
    for name, stamp in other.items():
        if clock.get(name, 0) < stamp:
            clock[name] = stamp


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


def _operands(schema, args, kwargs):
    """Return the tensors that an operator reads, and those that it writes."""
    reads, writes = [], []
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in schema.arguments[len(args) :] if a.name in kwargs]
    for argument, value in given:
        found = _tensors(value)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(found)
    return reads, writes


def _aliases(result, reads):
    known = {_address(t) for t in reads}
    return all(_address(t) in known for t in _tensors(result))


def _address(t):
    return t.untyped_storage().data_ptr()


def _span(t):
    """Return the addresses of the first byte of a tensor and behind the last one."""
    begin = _address(t) + t.storage_offset() * t.element_size()
    if not t.numel():
        return begin, begin
    return begin, begin + (sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) + 1) * t.element_size()


def _short(file):
    return "/".join(Path(file).parts[-2:])


def _places(most=3):
    """Return the places in the source that lead to an access, innermost first."""
    return _seen_from(most)[0]


def _seen_from(most=3):
    """Return these places, and a function that returns the mover's job for which this thread works, or None."""
    found, job, frame = [], lambda: None, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = "wooly_executor" in code.co_filename or "/tests/" in code.co_filename
        if ours and code.co_filename not in _OWN and len(found) < most:
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        if code.co_name == "_step" and code.co_filename.endswith("mover.py"):
            job = weakref.ref(frame.f_locals["entry"].job)  # a job keeps memory
            break
        frame = frame.f_back
    return tuple(found), job
