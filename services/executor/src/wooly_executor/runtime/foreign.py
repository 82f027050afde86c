"""Foreign kernels of all sessions: compiled outside the device thread, launched with access to their operands only.

    kernel = foreign.kernel(source, launch, form)     starts to compile, or returns the known kernel
    kernel.then(go_on)                                returns whether the caller must wait; if so, go_on is called later
    kernel.run(entry, writable, values, grid)         returns the ns that other threads took

Compiled code is kept on disk. For other kernels, remote compilers are asked (`Remote`). If none answers, the kernel is compiled
on this machine (`Builder`: worker processes of the compiler, started by module name, because services do not import each other).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError, WisError
from wooly_wis.foreign import OPAQUE, ForeignCode, KernelKey, Launch, Source, check_grid, decode_code, key_of, launch_of
from wooly_wis.program import Form, ParamRef

from wooly_executor.errors import ExecutorError, FullDiskError, OperationError
from wooly_executor.plans.artifacts import ArtifactCache
from wooly_executor.runtime.builds import Builder, Remote, Turns

log = logging.getLogger("wooly.executor")
#: Maximum number of compiled kernels in memory, over all sessions, about half a MiB each. The least recently used one is evicted.
KERNELS_KEPT = 1024
#: Maximum size of the kernels' code on disk, in bytes.
KERNEL_BYTES = 1 << 30
#: Time after a compilation that failed for a temporary reason, in seconds, before a run compiles again: runs that were sent
#: before the client knew of the failure fail at once.
RETRY_AFTER_S = 5.0
#: Argument of a launch: a buffer as (address, bytes), or a scalar.
Value = tuple[int, int] | int | float | bool
#: Launches a kernel with values and grid. Returns the ns that other threads took.
Loaded = Callable[[Sequence[Value], tuple[int, int, int]], int]
_WHERE = {"disk": "code found on disk", "elsewhere": "code received from a remote compiler", "here": "compiled here"}
COMPLAINTS = {1: "reads", 2: "writes", 3: "updates"}


def violation_message(kind: int, place: int, places: Sequence[str]) -> str:
    """Return the message for a violation that a kernel reports: the kind of violation and its place.

    `wooly_status` in docs/reference/foreign-kernels.md defines the numbers.
    """
    where = places[place] if 0 <= place < len(places) else f"place {place}"
    if kind in COMPLAINTS:
        return f"{where} {COMPLAINTS[kind]} beyond the buffer that the launch was given"
    return f"{where} failed" if kind == 4 else f"{where} executed a trap"


class ForeignKernel:
    """One foreign kernel: compiled, being compiled, or failed to compile."""

    def __init__(self, foreign: Foreign, source: Source, key: KernelKey, owner: str) -> None:
        self._foreign = foreign
        self.source = source
        self.key = key
        self.owner = owner
        self.code: ForeignCode | None = None
        self._loaded: Loaded | None = None
        self._why = ""
        self._lasting = True
        self._waiting: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._building = False
        #: End of the last compilation, on the clock of `time.monotonic`.
        self._ended = 0.0
        #: The uses of arguments that fit to the code.
        self._fitting: set[tuple[bool | None, ...]] = set()
        #: The last grid that was checked.
        self._grid: tuple[int, int, int] | None = None

    def then(self, go_on: Callable[[], Any]) -> bool:
        """Return whether the kernel is being compiled. If so, another thread calls `go_on` at the end of the compilation.

        If the last compilation failed for a temporary reason, another one starts, but not within `RETRY_AFTER_S`.
        """
        if not self._lasting and time.monotonic() - self._ended >= RETRY_AFTER_S:
            self.retry()
        with self._lock:
            if self._building:
                self._waiting.append(go_on)
            return self._building

    def begin(self) -> bool:
        """Return True if the caller must compile the kernel. False: it is compiled, being compiled, or cannot be compiled."""
        with self._lock:
            if self._building or self._loaded is not None or (self._why and self._lasting):
                return False
            self._building = True
            return True

    def retry(self) -> None:
        """Compile the kernel again if the last attempt failed for a temporary reason."""
        if not self._lasting:
            self._foreign.compile(self)

    def end(self, code: ForeignCode | None, loaded: Loaded | None, why: str = "", *, lasting: bool = True) -> None:
        """Store the result of a compilation, and call the waiting functions."""
        with self._lock:
            self.code, self._loaded, self._why, self._lasting = code, loaded, why, lasting
            self._fitting = set()
            self._building, self._ended = False, time.monotonic()
            waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def run(
        self, entry: str, uses: tuple[bool | None, ...], values: Sequence[Value], grid: tuple[int, int, int]
    ) -> int:
        """Launch the kernel. Returns the device time in ns that other threads took.

        Args:
            entry: name of the kernel, for messages.
            uses: per argument, whether it is a buffer that may be written; None: it is a number.
            values: the arguments.
            grid: number of blocks along each dimension.

        Raises:
            OperationError: the kernel is not compiled, its arguments are wrong, or it reported a violation.
        """
        if self._loaded is None or self.code is None:
            again = "" if self._lasting else f"; a launch that comes {RETRY_AFTER_S:g} s later compiles it again"
            raise OperationError(f"kernel {entry}: {self._why or 'it was not compiled'}{again}")
        if uses not in self._fitting:
            self._check(entry, uses, self.code)
            self._fitting.add(uses)
        if grid != self._grid:
            if 0 in grid:
                return 0
            try:
                check_grid(list(grid))
            except RuleError as e:
                raise OperationError(f"kernel {entry}: {e}") from e
            self._grid = grid
        try:
            return self._loaded(values, grid)
        except OperationError as e:
            raise OperationError(f"kernel {entry} on a grid of {grid[0]}, {grid[1]}, {grid[2]}: {e}") from None

    @staticmethod
    def _check(entry: str, uses: tuple[bool | None, ...], code: ForeignCode) -> None:
        """Raise an error if the code does not take such arguments."""
        parameters = code.parameters
        if len(parameters) != len(uses):
            raise OperationError(f"kernel {entry} takes {len(parameters)} arguments, but the launch has {len(uses)}")
        for k, (parameter, may) in enumerate(zip(parameters, uses, strict=True)):
            if parameter.buffer != (may is not None):
                wanted, given = ("a buffer", "a number") if parameter.buffer else ("a number", "a buffer")
                raise OperationError(f"kernel {entry}: argument {k} must be {wanted}, but the launch has {given}")
            if parameter.writes and not may:
                raise OperationError(f"kernel {entry} writes argument {k}, but the launch declares it as read-only")


class Foreign:
    """All foreign kernels of an executor, by the key that they are compiled from.

    Args:
        builder: compiler on this machine; None: every kernel fails with the message `why`.
        target: returns the target that code must be built for.
        load: loads compiled code.
        why: why there is no builder.
        cache: where code is kept on disk.
        opaque: languages whose memory accesses the runtime cannot check. They are for tenants with permission.
        begins: called with the index of the program's step that is about to launch a kernel.
        unchecked: whether a launch may turn the checks of its text off (`UNCHECKED`). This, too, is for tenants with permission.

    Attributes:
        remote: the remote compilers; None until they are connected.
        counts: number of kernels that came from disk, from remote compilers, and from this machine.
    """

    def __init__(
        self,
        builder: Builder | None = None,
        target: Callable[[], str] | None = None,
        load: Callable[[ForeignCode, tuple[int, ...]], Loaded] | None = None,
        why: str = "this executor cannot run foreign kernels: its runtime has no OpenCL (set WOOLY_EXECUTOR_RUNTIME=opencl)",
        cache: ArtifactCache | None = None,
        opaque: frozenset[str] = OPAQUE,
        unchecked: bool = False,
        begins: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.begins = begins
        self.opaque, self.unchecked = opaque, unchecked
        self._builder = builder
        self._target = target
        self._load = load
        self._unavailable_why = why
        self._cache = cache
        self._loading = threading.Lock()
        self._known: OrderedDict[KernelKey, ForeignKernel] = OrderedDict()
        self._turns = Turns(self._compile)
        self.remote: Remote | None = None
        self.counts = {"disk": 0, "elsewhere": 0, "here": 0}

    def kernel(self, source: Source, launch: Launch, form: Form, owner: str = "") -> ForeignKernel:
        """Return the kernel of a launch, and start to compile it if it is new.

        `owner` is the tenant whose turn the compilation takes.
        """
        key = key_of(launch, form)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = ForeignKernel(self, source, key, owner)
            if len(self._known) > KERNELS_KEPT:
                self._known.popitem(last=False)
            self.compile(found)
        else:
            found.retry()
        self._known.move_to_end(key)
        return found

    def known(self, form: Form) -> ForeignKernel:
        """Return the kernel of a launch that `kernel` was called for before.

        Raises:
            OperationError: the kernel was never requested, or was evicted.
        """
        found = self._known.get(key_of(launch_of(form), form))
        if found is None:
            raise OperationError(
                f"the source of kernel {form.attr('entry')} is unknown: the client must send it before the launch"
            )
        return found

    def compile(self, kernel: ForeignKernel) -> None:
        """Queue a kernel for compilation, unless it is compiled."""
        if self._builder is None:
            kernel.end(None, None, self._unavailable_why)
        elif kernel.begin():
            self._turns.put(kernel.owner, kernel)

    def _compile(self, kernel: ForeignKernel) -> None:
        try:
            kernel.end(*self._obtain(kernel))
        except (WisError, ExecutorError) as e:
            kernel.end(None, None, str(e), lasting=not getattr(e, "retryable", False))
        except Exception as e:  # sessions that wait for the kernel must get any error
            kernel.end(None, None, f"{type(e).__name__}: {e}", lasting=False)

    def _obtain(self, kernel: ForeignKernel) -> tuple[ForeignCode, Loaded]:
        """Return a kernel's code, loaded: from disk, from a remote compiler, or compiled here."""
        assert self._builder is not None and self._target is not None
        target, mine, cache = self._target(), self._builder.version(), self._cache
        if cache is not None:
            for version in dict.fromkeys([v for v in (cache.compiler, mine) if v]):
                name = kernel.key.name(target, version)
                raw = cache.read(name)
                if raw is None:
                    continue
                try:
                    return self._count_source("disk", kernel, self._load_code(kernel, raw, name))
                except FullDiskError:
                    raise
                except (WisError, ExecutorError) as e:
                    log.warning("cached code of kernel %s cannot be used, removing it: %s", kernel.key.entry, e)
                    cache.drop(name)
        rejected = ""
        for _ in range(2):
            found = self.remote.get(kernel.source, kernel.key, target, rejected) if self.remote is not None else None
            if found is None:
                break
            version, raw = found
            name = kernel.key.name(target, version)
            try:
                ready = self._load_code(kernel, raw, name)
            except FullDiskError:
                raise
            except (WisError, ExecutorError) as e:
                log.warning("code of kernel %s from compiler %s cannot be used: %s", kernel.key.entry, version, e)
                rejected = version
                continue
            self._keep(name, raw, version)
            return self._count_source("elsewhere", kernel, ready)
        name = kernel.key.name(target, mine)
        raw = self._builder.build(_request(kernel, target, name), f"kernel {kernel.key.entry}")
        ready = self._load_code(kernel, raw, name)
        if mine:
            self._keep(name, raw)
        return self._count_source("here", kernel, ready)

    def _load_code(self, kernel: ForeignKernel, raw: bytes, name: str) -> tuple[ForeignCode, Loaded]:
        assert self._load is not None
        code = decode_code(raw, name)
        with self._loading:
            return code, self._load(code, kernel.key.block)

    def _keep(self, name: str, raw: bytes, elsewhere: str = "") -> None:
        if self._cache is not None:
            self._cache.write(name, raw)
            if elsewhere:
                self._cache.compiler = elsewhere

    def _count_source(
        self, where: str, kernel: ForeignKernel, ready: tuple[ForeignCode, Loaded]
    ) -> tuple[ForeignCode, Loaded]:
        log.info("kernel %s: %s", kernel.key.entry, _WHERE[where])
        with self._loading:
            self.counts[where] += 1
        return ready


def _request(kernel: ForeignKernel, target: str, name: str) -> dict[str, Any]:
    """Return the request to a compiler's worker process."""
    key = kernel.key
    return {
        "language": kernel.source.language,
        "text": kernel.source.text,
        "entry": key.entry,
        "args": key.args,
        "block": key.block,
        "options": key.options,
        "target": target,
        "name": name,
        "after_crash": {"careful": True},
    }


Arguments = Callable[[Sequence[tuple[int, int]], Sequence[Any]], tuple[list[Value], tuple[int, int, int]]]


def arguments_of(form: Form) -> Arguments:
    """Return a function that computes a launch's values and grid from its operands' (address, bytes) and its params."""
    launch = launch_of(form)
    #: The values that are the same in each launch, with 0 for the others.
    constant: list[Value] = [0] * len(launch.args)
    buffers: list[tuple[int, int]] = []
    numbers: list[tuple[int, int, Callable[[Any], Any]]] = []
    for k, a in enumerate(launch.args):
        if isinstance(a, int):
            buffers.append((k, a))
        elif isinstance(a[1], ParamRef):
            numbers.append((k, a[1].index, _converter(a[0])))
        else:
            constant[k] = _converter(a[0])(a[1])
    grid = [(n.index, 0) if isinstance(n, ParamRef) else (-1, int(n)) for n in launch.grid]

    def bind(operands: Sequence[tuple[int, int]], params: Sequence[Any]) -> tuple[list[Value], tuple[int, int, int]]:
        values = constant.copy()
        for k, operand in buffers:
            values[k] = operands[operand]
        for k, index, convert in numbers:
            values[k] = convert(params[index])
        x, y, z = [n if index < 0 else int(params[index]) for index, n in grid]
        return values, (x, y, z)

    return bind


def _converter(dtype: DType) -> Callable[[Any], Any]:
    """Return the function that gives a number the range of a dtype. Integers wrap."""
    if dtype.kind == "float":
        return float
    if dtype is DType.BOOL:
        return lambda value: int(bool(value))
    bits = 8 * dtype.itemsize
    low = -(1 << (bits - 1)) if dtype.kind == "int" else 0
    high = low + (1 << bits)
    return lambda value: n if low <= (n := int(value)) < high else (n - low) % (1 << bits) + low
