"""Kernels in languages of others, of all sessions: compiled beside the device's thread, launched on what their operands show.

    kernel = foreign.kernel(source, launch, form)     begins to compile, or finds what was
    kernel.then(go_on)                                whether somebody has to wait, who is then called
    kernel.run(entry, writable, values, grid)         ns that other threads took

Who compiles is a `Builder`: a compiler's worker process, started by name, for services do not import each other.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from wooly_bus.worker import Limits, WorkerError, WorkerProcess
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError, WisError
from wooly_wis.foreign import ForeignCode, Launch, Source, check_grid, decode_code, kernel_key, launch_of
from wooly_wis.program import Form, ParamRef

from wooly_executor.errors import ExecutorError, OperationError

#: Compiled kernels kept, of all sessions.
KERNELS_KEPT = 4096
#: A pointer's address and its bytes; or a scalar.
Value = tuple[int, int] | int | float | bool
#: What launches a kernel: values, grid; ns that other threads took.
Loaded = Callable[[Sequence[Value], tuple[int, int, int]], int]
COMPLAINTS = {1: "reads", 2: "writes", 3: "updates"}


class Builder(Protocol):
    """What compiles."""

    def build(self, request: dict[str, Any], what: str) -> bytes:
        """The code (see `wooly_wis.foreign`) of a kernel.

        Raises:
            WisError: it cannot be compiled.
        """
        ...


class WorkerBuilder:
    """Compiles in a process of the compiler service's, of this executor's own.

    Args:
        folder: where it keeps its files.
    """

    MODULE = "wooly_compiler.worker"

    def __init__(self, folder: Path) -> None:
        self._worker = WorkerProcess(Limits(), self.MODULE, (str(folder),))

    def build(self, request: dict[str, Any], what: str) -> bytes:
        """See `Builder`."""
        if importlib.util.find_spec("wooly_compiler") is None:
            raise WorkerError(
                "kernels in other languages need the compiler on the executor's machine: pip install wooly-compiler"
            )
        return self._worker.ask({"what": "foreign", **request}, str(request["target"]), what)


class ForeignKernel:
    """One kernel, compiled or not yet."""

    def __init__(self, foreign: Foreign, launch: Launch, request: dict[str, Any]) -> None:
        self._foreign = foreign
        self.launch = launch
        self.request = request
        self.code: ForeignCode | None = None
        self._loaded: Loaded | None = None
        self._why = ""
        self._lasting = True
        self._waiting: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._building = False

    def then(self, go_on: Callable[[], Any]) -> bool:
        """Whether it is still being compiled; then `go_on` is called by another thread when it no longer is."""
        with self._lock:
            if self._building:
                self._waiting.append(go_on)
            return self._building

    def begin(self) -> bool:
        """Somebody will compile it. False: somebody does already, or has."""
        with self._lock:
            if self._building or self._loaded is not None or (self._why and self._lasting):
                return False
            self._building = True
            return True

    def retry(self) -> None:
        """Compile it again where that failed for a reason that may be gone."""
        if not self._lasting:
            self._foreign.compile(self)

    def end(self, code: ForeignCode | None, loaded: Loaded | None, why: str = "", *, lasting: bool = True) -> None:
        """It is compiled, or cannot be."""
        with self._lock:
            self.code, self._loaded, self._why, self._lasting = code, loaded, why, lasting
            self._building = False
            waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def run(self, entry: str, writable: Sequence[bool], values: Sequence[Value], grid: tuple[int, int, int]) -> int:
        """Launch it. Returns ns of device time that was not this thread's.

        Args:
            entry: its name, for messages.
            writable: per argument, whether it is a buffer that may be written.
            values: per argument.
            grid: groups along each dimension.

        Raises:
            OperationError: it was not compiled, or did what it must not.
        """
        if self._loaded is None or self.code is None:
            raise OperationError(f"kernel {entry}: {self._why or 'it was not compiled'}")
        parameters = self.code.parameters
        if len(parameters) != len(values):
            raise OperationError(f"kernel {entry} takes {len(parameters)} arguments, {len(values)} are given")
        for k, (parameter, value, may) in enumerate(zip(parameters, values, writable, strict=True)):
            if parameter.buffer != isinstance(value, tuple):
                wanted, given = ("a buffer", "a number") if parameter.buffer else ("a number", "a buffer")
                raise OperationError(f"kernel {entry}: argument {k} is {wanted}, {given} is given")
            if parameter.writes and not may:
                raise OperationError(f"kernel {entry} writes argument {k}, which it is only given to read")
        if 0 in grid:
            return 0
        try:
            check_grid(list(grid))
        except RuleError as e:
            raise OperationError(f"kernel {entry}: {e}") from e
        try:
            return self._loaded(values, grid)
        except OperationError as e:
            raise OperationError(f"kernel {entry} on a grid of {grid[0]}, {grid[1]}, {grid[2]}: {e}") from None


class Foreign:
    """Kernels by what they are compiled from.

    Args:
        builder: what compiles; without one, every kernel fails and says why.
        target: what code must be built for.
        load: makes code ready.
        why: why there is no builder.
    """

    def __init__(
        self,
        builder: Builder | None = None,
        target: Callable[[], str] | None = None,
        load: Callable[[ForeignCode, tuple[int, ...]], Loaded] | None = None,
        why: str = "this executor runs no kernels of sessions' own: its runtime has no OpenCL (WOOLY_EXECUTOR_RUNTIME=opencl)",
    ) -> None:
        self._builder = builder
        self._target = target
        self._load = load
        self._none = why
        self._known: OrderedDict[bytes, ForeignKernel] = OrderedDict()
        self._wanted: queue.SimpleQueue[ForeignKernel] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def kernel(self, source: Source, launch: Launch, form: Form) -> ForeignKernel:
        """The kernel of a launch; it begins to be compiled if nobody asked for it before."""
        key = kernel_key(launch, form)
        found = self._known.get(key)
        if found is None:
            request = {
                "language": source.language,
                "text": source.text,
                "entry": launch.entry,
                "args": [_kind(form, a) for a in launch.args],
                "block": launch.block,
                "options": launch.options,
            }
            found = self._known[key] = ForeignKernel(self, launch, request)
            if len(self._known) > KERNELS_KEPT:
                self._known.popitem(last=False)
            self.compile(found)
        else:
            found.retry()
        self._known.move_to_end(key)
        return found

    def known(self, form: Form) -> ForeignKernel:
        """The kernel of a launch that was asked for.

        Raises:
            OperationError: nobody did, or it is long ago.
        """
        found = self._known.get(kernel_key(launch_of(form), form))
        if found is None:
            raise OperationError(f"the source of kernel {form.attr('entry')} is not known here")
        return found

    def compile(self, kernel: ForeignKernel) -> None:
        """Have a kernel compiled, unless it is."""
        if self._builder is None:
            kernel.end(None, None, self._none)
        elif kernel.begin():
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="foreign-kernels", daemon=True)
                self._thread.start()
            self._wanted.put(kernel)

    def _work(self) -> None:
        assert self._builder is not None and self._target is not None and self._load is not None
        while True:
            kernel = self._wanted.get()
            launch = kernel.launch
            try:
                request = {**kernel.request, "target": self._target()}
                code = decode_code(self._builder.build(request, f"kernel {launch.entry}"))
                kernel.end(code, self._load(code, launch.block))
            except (WisError, ExecutorError) as e:
                kernel.end(None, None, str(e), lasting=not getattr(e, "retryable", False))
            except Exception as e:  # whatever it is, who waits for the kernel must hear of it
                kernel.end(None, None, f"{type(e).__name__}: {e}", lasting=False)


def _kind(form: Form, argument: Any) -> str:
    """An argument as compilers are told of it: ``*f32`` is a buffer of such elements."""
    if isinstance(argument, int):
        view = form.operands[argument].view
        assert view is not None
        return f"*{view.dtype.label}"
    return str(argument[0].label)


Arguments = Callable[[Sequence[tuple[int, int]], Sequence[Any]], tuple[list[Value], tuple[int, int, int]]]


def arguments_of(form: Form) -> Arguments:
    """What gives a launch's values and grid, from its operands' (address, bytes) and its params."""
    launch = launch_of(form)

    def scalar(dtype: DType, value: Any) -> Any:
        if dtype.kind == "float":
            return float(value)
        if dtype is DType.BOOL:
            return int(bool(value))
        bits = 8 * dtype.itemsize
        value = int(value) & ((1 << bits) - 1)
        return value - (1 << bits) if dtype.kind == "int" and value >> (bits - 1) else value

    def bind(operands: Sequence[tuple[int, int]], params: Sequence[Any]) -> tuple[list[Value], tuple[int, int, int]]:
        values: list[Value] = []
        for a in launch.args:
            if isinstance(a, int):
                values.append(operands[a])
            else:
                dtype, value = a
                values.append(scalar(dtype, params[value.index] if isinstance(value, ParamRef) else value))
        x, y, z = [params[n.index] if isinstance(n, ParamRef) else n for n in launch.grid]
        return values, (int(x), int(y), int(z))

    return bind
