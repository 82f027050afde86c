"""The runtime for GPUs: library calls and generated kernels on one stream, timed with the stream's events.

The differences between vendors are in the `Driver`. A run enqueues its steps and waits at the end of each call of `advance`. Then
it knows the time of each part, whether a kernel reported a violation, and whether the context is lost.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from wooly_wis.artifact import Artifact, Code
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
from wooly_wis.program import Form, Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.billing.cores import occupied
from wooly_executor.errors import ContextLostError, OperationError, OutOfMemoryError, PoisonedError
from wooly_executor.plans.artifacts import ArtifactCache
from wooly_executor.runtime.buffers import Buffer, Buffers
from wooly_executor.runtime.builds import WorkerBuilder
from wooly_executor.runtime.calls import LibraryCall, function_of
from wooly_executor.runtime.core_use import KernelRecord
from wooly_executor.runtime.device import TorchDevice, symbols_replaced
from wooly_executor.runtime.driver import Driver
from wooly_executor.runtime.execution import StepExecution
from wooly_executor.runtime.flights import Flight, Flights
from wooly_executor.runtime.foreign import KERNEL_BYTES, Foreign
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.gpu_kernels import GpuKernels
from wooly_executor.runtime.gpu_ranges import in_range
from wooly_executor.runtime.graphs import Graphs
from wooly_executor.runtime.packing import Arguments
from wooly_executor.runtime.page_locked import page_locked
from wooly_executor.runtime.plans import Run, acts_of_plan, complaint, count_work, kernels_of
from wooly_executor.runtime.preparation import prepare_acts
from wooly_executor.runtime.prepared import PreparedProgram, Span
from wooly_executor.runtime.protocol import Rates
from wooly_executor.runtime.substitutes import substitute
from wooly_executor.runtime.torch_private import schema_of
from wooly_executor.runtime.torch_runtime import HOT, TorchRuntime

log = logging.getLogger("wooly.executor")
#: Maximum number of loaded functions, over all programs. At this number, the cache is cleared.
FUNCTIONS_KEPT = 8192
#: One in this many runs of a plan measures the share of generated kernels in its time.
SAMPLED = 16
#: Minimum distance of two edges of a program, in ns. A graph lies between two edges, and each edge costs a mark.
EDGE_NS = 500_000
#: What a GPU needs for an operator that does almost nothing, in ns. Measured times are those of the host, which is slower.
OWN_NS = 2_500
#: Number of runs of a program for which it is noted where the device waits for the host. Afterwards, edges do not move any more.
WATCHED = 256
#: Maximum size in bytes of a transfer that goes through pinned memory of torch's cache.
STAGED = 64 << 20
#: Minimum size in bytes of host memory that is page-locked separately. Smaller memory comes from torch's cache.
LOCKED = 1 << 20


class GpuDevice(TorchDevice):
    """The memory of a GPU.

    Args:
        driver: the driver of the GPU.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.device)
        self.host = False
        self._driver = driver

    def on_zeros(self, call: Callable[[Any], Any], *, repeatable: bool = True) -> Callable[[Any], Any]:
        """See `TorchDevice`.

        An in-place operator cannot be repeated. It returns only its operands, so it needs no zeroed memory.
        """
        return self._driver.on_zeros(call) if repeatable else call

    def seed(self, seed: int) -> None:
        """See `TorchDevice`."""
        self._driver.seed(seed)

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """See `TorchDevice`.

        The call gets this device in place of the symbol for a device, or if it makes a tensor without naming a device. It gets
        substitutes for operators that only the host's library has, and checks for operands that would end the context.
        """
        args = tuple([symbols_replaced(a, self.device) for a in call.args])
        kwargs = tuple([(k, symbols_replaced(v, self.device)) for k, v in call.kwargs])
        if _lacks_device(call):  # the host would make the tensor; a graph cannot contain the copy
            kwargs += (("device", self.device),)
        instead = substitute(call.op, form)
        return LibraryCall(call.op, args, kwargs, in_range(call.op, instead or function_of(call.op)) or instead)

    def result(self, t: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `TorchDevice`.

        One of the two libraries fills some results for its own backward pass, and the other library leaves them empty.
        """
        if not t.numel() or 0 in sizes:
            return torch.zeros(sizes, dtype=t.dtype, device=self.device)
        return t

    def read(self, memory: Tensor) -> memoryview:
        """See `TorchDevice`. Returns a copy."""
        host = self._staging(len(memory))
        self._copied(host, memory)
        return host.numpy().data

    def upload_target(self, memory: Tensor) -> tuple[memoryview, Callable[[], None] | None]:
        """See `TorchDevice`."""
        host = self._staging(len(memory))
        return host.numpy().data, lambda: self._copied(memory, host)

    def host_memory(self, nbytes: int) -> Tensor:
        """See `TorchDevice`.

        The memory is page-locked, so that copies run while programs run. If locking fails, it is ordinary memory.
        """
        if nbytes < LOCKED:
            return self._driver.pinned(nbytes)
        try:
            return page_locked(nbytes, self._driver.lock, self._driver.unlock)
        except OperationError as e:
            log.warning(
                "cannot page-lock %d bytes of host memory (%s): copies from and to this memory are slower", nbytes, e
            )
            return super().host_memory(nbytes)

    def sleep(self, ns: int) -> int:
        """See `TorchDevice`. A kernel waits, so the marks around it measure its time."""
        self._driver.sleep(ns)
        return 0

    def attach(self) -> None:
        """See `TorchDevice`."""
        self._driver.attach()

    def copy_target(self, nbytes: int) -> Tensor:
        """See `TorchDevice`."""
        return self._driver.copy_target(nbytes)

    def copy_context(self) -> AbstractContextManager[Any]:
        """See `TorchDevice`."""
        return self._driver.copy_context()

    def _staging(self, nbytes: int) -> Tensor:
        return self._driver.pinned(nbytes) if nbytes <= STAGED else torch.empty(nbytes, dtype=torch.uint8)

    def _copied(self, target: Tensor, source: Tensor) -> None:
        try:
            target.copy_(source)  # the host waits here, so both sides may be reused afterwards
        except RuntimeError:
            self._driver.check()
            raise


def _lacks_device(call: LibraryCall) -> bool:
    """Whether a call makes a tensor from numbers only, without naming its device."""
    declared = schema_of(call.op).arguments
    at = next((i for i, a in enumerate(declared) if a.name == "device"), None)
    if at is None or at < len(call.args) or any(k == "device" for k, _ in call.kwargs):
        return False
    return not any("Tensor" in str(a.type) for a in declared)


class StatusWords:
    """Status words on the device, one for each act that may report a violation. A word is 0 unless its act has reported one.

    Make them in the device's `copy_context`. The memory belongs to the stream of programs, which uses it.

    Args:
        device: the device of the words.
        driver: the driver of the GPU.
        acts: the acts, each with a function from the word's value to an exception.
        counts: whether each report adds to its word, so that the words of a run are known by their difference to those of the run
            before. Otherwise the next run must not begin before the words of this one are read.
    """

    def __init__(
        self,
        device: GpuDevice,
        driver: Driver,
        acts: Sequence[tuple[int, Callable[[int], Exception]]],
        *,
        counts: bool = False,
    ) -> None:
        self._acts, self._driver, self.counts = list(acts), driver, counts
        self._words = device.copy_target(4 * len(acts)).zero_().view(torch.int32)
        self._before = [0] * len(acts)
        self._hosts: list[Tensor] = []

    def address(self, k: int) -> int:
        """Return the device address of word `k`."""
        return self._words.data_ptr() + 4 * k

    def word(self, k: int) -> Tensor:
        """Return word `k` as a tensor."""
        return self._words[k]

    def fetch(self) -> Tensor:
        """Enqueue a copy of the words to the host. Returns where they will be."""
        host = self._hosts.pop() if self._hosts else self._driver.pinned(4 * len(self._acts)).view(torch.int32)
        host.copy_(self._words, non_blocking=True)
        return host

    def complaint(self, host: Tensor) -> tuple[int, Exception] | None:
        """Return the first act that reported a violation since the words that were read before, and the exception; None if no act
        did. Words must be read in the order in which they were fetched.
        """
        words, before = host.tolist(), self._before
        self._hosts.append(host)
        if words == before:
            return None
        found = [
            (*self._acts[k], word - was) for k, (word, was) in enumerate(zip(words, before, strict=True)) if word != was
        ]
        if self.counts:
            self._before = words
        else:
            self._words.zero_()
        act, said, value = min(found, key=lambda f: f[0])
        return act, said(value)


class GpuExecution(StepExecution):
    """A run on a GPU. Times are measured with the stream's events."""

    __slots__ = ("_driver", "_kernels_ns", "_profiled", "_runtime", "_sampled", "_took_ns", "_unlanded")
    _notes_failures = False  # graphs replace segments

    def __init__(
        self,
        runtime: GpuRuntime,
        prepared: PreparedProgram,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> None:
        self._runtime = runtime
        self._driver = runtime.driver
        self._kernels_ns = self._took_ns = self._unlanded = 0
        if isinstance(buffers, Buffers):
            buffers.lost_late.clear()
        super().__init__(prepared, buffers, bindings, params, single=single)
        self.host_bound: list[bool] = []
        self._profiled = runtime.profiles and prepared.core_use.due()
        self._sampled = prepared.by_kernel is not None and not prepared.runs % SAMPLED
        if runtime.with_graphs and not self._sampled:
            self._graphs = runtime.graphs

    def advance(self, edges: Sequence[int], ahead_ns: int = 0) -> list[int]:
        """See `Execution.advance`.

        The host waits for work whose device time is not known from earlier runs. Work that may report a violation is checked when
        the session's next launch is enqueued. A run that is profiled is alone on the device.
        """
        prepared, runtime = self._prepared, self._runtime
        if self.ended:
            return [0] * len(edges)
        if not self._profiled:
            times = self._advance(edges, ahead_ns)
        else:
            profiled = runtime.begin_profile()
            try:
                times = self._advance(edges, 0 if profiled else ahead_ns)
            finally:
                records = runtime.end_profile() if profiled else None
            if records is not None and self.outcome.failed_at is None:
                prepared.core_use.profiled(self._took_ns, records, runtime.own_kernels, runtime.cores)
        ns = sum(times)
        runtime.extra_core_ns += prepared.core_use.core_ns(ns, prepared.kernel_permille) - ns
        return times

    def _advance(self, edges: Sequence[int], ahead_ns: int) -> list[int]:
        driver, prepared, runtime, kernels = self._driver, self._prepared, self._runtime, self._runtime.kernels
        flights, owner, clock = runtime.flights, self._frame.buffers, time.perf_counter_ns
        session = owner if isinstance(owner, Buffers) else None
        flights.make_way(ahead_ns)
        span = Span(self._steps is prepared.hot, self._at, tuple(edges))
        if self._sampled:
            runtime.sample = []
        if prepared.foreign:
            kernels.begin()
        marks, enqueued = [driver.record()], [clock()]
        for k, edge in enumerate(edges):
            if self.ended:
                break
            if k:
                marks.append(driver.record())
                enqueued.append(clock())
            self._run_to(edge)
        status: StatusWords | None = prepared.status
        launched = kernels.fetch() if prepared.foreign else None
        words = status.fetch() if status is not None else None
        marks.append(driver.record())
        enqueued.append(clock())
        inside, runtime.sample = runtime.sample, None
        if ahead_ns and not launched and inside is None and session is not None and (status is None or status.counts):
            known = flights.known(prepared, span)
            if known is not None and self.outcome.failed_at is None:
                times = flights.charge(session, known.ns)
                flight = Flight(prepared, span, marks, enqueued, sum(known.ns), session)
                if words is not None:
                    self._unlanded, self.unchecked = self._unlanded + 1, True
                    flight.check = functools.partial(self._landed, words)
                flights.add(flight)
                flights.check(session, but=int(words is not None))
                if session.lost_late:
                    self._heed(session)
                if prepared.runs <= WATCHED:
                    self.host_bound += known.host_bound()
                if prepared.kernel_permille:
                    self._kernels_ns += sum(times) * prepared.kernel_permille // 1000
                self._leave()
                return times if len(times) == len(edges) else times + [0] * (len(edges) - len(times))
        flights.land()
        found = [kernels.wait()] if launched else []
        if self.outcome.failed_at is None:
            measured = flights.measured(prepared, span, marks, enqueued)
            times, self.host_bound = measured.ns, [*self.host_bound, *measured.host_bound()]
        else:
            times = driver.elapsed_ns(marks)
        if status is not None and words is not None:
            said = status.complaint(words)
            found.append((prepared.owner.index(said[0]), said[1]) if said is not None else None)
        complaints = sorted([c for c in found if c is not None], key=lambda c: c[0])
        if complaints and self.outcome.failed_at is None:
            step, why = complaints[0]
            self._fail(prepared, self._frame, step, step, why)
            self.ended = True
        if session is not None and session.lost_late:
            self._heed(session)
        self._leave()
        self._took_ns = sum(times)
        self._share(self._took_ns, inside)
        if session is not None:
            times = flights.charge(session, times)
        return times + [0] * (len(edges) - len(times))

    def _landed(self, words: Tensor) -> None:
        """Check a launch of this run that has landed."""
        prepared, owner = self._prepared, self._frame.buffers
        status: StatusWords = prepared.status
        self._unlanded -= 1
        self.unchecked = self._unlanded > 0
        said = status.complaint(words)
        if said is None:
            return
        act, why = said
        if not self.ended or self._frame.registers:
            self._end_failed(act, why)
            return
        if self.outcome.failed_at is not None and self.outcome.failed_at <= prepared.acts[act].at:
            return
        # The run has ended, and its session may have begun another one.
        self._say(prepared.acts[act].at, why)
        lost = self._poison(act)
        if isinstance(owner, Buffers):
            owner.lost_late.update([(self._frame.bindings[slot], self.outcome.error) for slot in lost])

    def _heed(self, session: Buffers) -> None:
        """Fail where this run has used a buffer that an earlier run, as is known only now, did not write."""
        lost, bindings, made = session.lost_late, self._frame.bindings, self._prepared.facts.slot_alloc
        for k, act in enumerate(self._prepared.acts):
            if act.form.opcode != "free":
                for slot in act.slots:
                    if made[slot] is None and bindings[slot] in lost:
                        self._end_failed(k, PoisonedError(lost[bindings[slot]]))
                        lost.clear()
                        return
        lost.clear()

    def _leave(self) -> None:
        """Drop the tensors of a run that has ended. A graph can lend its memory again when nobody uses it."""
        if self.ended:
            self._frame.registers.clear()
            self._frame.bases.clear()

    def _share(self, total: int, inside: list[tuple[Any, Any, int]] | None) -> None:
        """Divide the time between generated kernels and the library."""
        prepared = self._prepared
        if inside is not None:
            marks = [mark for begin, end, _ in inside for mark in (begin, end)]
            took = self._driver.elapsed_ns(marks)[::2] if marks else []
            kernels = sum(took)
            core_ns = sum([ns * cores // 1000 for ns, (_, _, cores) in zip(took, inside, strict=True)])
            prepared.core_use.measured(kernels, core_ns, self._runtime.cores)
            prepared.kernel_permille = min(1000 * kernels // max(total, 1), 1000)
        self._kernels_ns += total * prepared.kernel_permille // 1000

    @property
    def kernel_ns(self) -> int:
        """Device time of generated kernels so far, in ns, estimated from the shares that sampled runs measured."""
        return self._kernels_ns

    def _fail(self, prepared: PreparedProgram, frame: Frame, first: int, step: int, cause: Exception) -> None:
        if isinstance(cause, ContextLostError):
            raise cause
        no_memory = isinstance(cause, torch.OutOfMemoryError)
        if isinstance(cause, RuntimeError) and not no_memory:
            self._driver.check()
        super()._fail(prepared, frame, first, step, cause)
        if no_memory:
            self.outcome.code = OutOfMemoryError.code


class GpuRuntime(TorchRuntime):
    """Runs programs on a GPU.

    Args:
        driver: the driver of the GPU.
        hot: see `TorchRuntime`.
        cache: folder for code of foreign kernels; None: the code is not kept.
    """

    def __init__(self, driver: Driver, hot: int = HOT, cache: Path | None = None) -> None:
        device = GpuDevice(driver)
        super().__init__(device, hot)
        self.driver = driver
        self.gpu = device
        #: Generated kernels are not known to have the same bits as a GPU's library.
        self.exact = False
        self.kernel_s = 10.0
        #: During a run that is sampled: the marks around each kernel, and the cores that it occupies, in thousandths.
        self.sample: list[tuple[Any, Any, int]] | None = None
        #: Number of cores; names of the generated kernels that were loaded; whether runs are profiled.
        self.cores = int(driver.facts()["cores"])
        self.own_kernels: set[str] = set()
        self.profiles = True
        self.kernels = GpuKernels(driver, device, lambda: self.kernel_s)
        folder = (cache or Path(tempfile.gettempdir()) / f"wooly-executor-{os.getuid()}") / "foreign"
        kept = ArtifactCache(folder / "code", KERNEL_BYTES) if cache is not None else None
        self.foreign = Foreign(
            WorkerBuilder(folder), driver.chip, self.kernels.load, cache=kept, unchecked=True, begins=self.kernels.at
        )
        self.graphs = Graphs(driver, device)
        self.with_graphs = True
        self.flights = Flights(driver)
        self._rates: Rates | None = None
        self._functions: dict[tuple[bytes, bytes], Run] = {}

    def leave_out_graphs(self) -> None:
        """Replay no graphs from now on, and give sessions the memory that is kept for graphs. Call it before `capacity`."""
        self.with_graphs = False
        self.driver.keep_no_room_for_graphs()

    def begin_profile(self) -> bool:
        """Begin to profile a run. Returns False, from then on, if the profiler does not start."""
        self.flights.land()
        try:
            self.driver.begin_profile()
        except OperationError as e:
            self._profile_no_more(e)
            return False
        return True

    def end_profile(self) -> list[KernelRecord] | None:
        """Return the kernels of a profiled run; None, from then on, if the profiler fails."""
        try:
            return self.driver.end_profile()
        except OperationError as e:
            self._profile_no_more(e)
            return None

    def _profile_no_more(self, why: OperationError) -> None:
        self.profiles = False
        log.warning(
            "programs are no longer profiled (%s): device time of programs without a profile is billed as one core; "
            "WOOLY_EXECUTOR_CORE_PROFILES=0 starts no profiler",
            why,
        )

    def facts(self) -> dict[str, Any]:
        """See `Runtime.facts`."""
        return self.driver.facts()

    def capacity(self) -> int:
        """Return the bytes that sessions may use."""
        return self.driver.capacity()

    def target(self) -> str:
        """See `PlanRuntime.target`."""
        return self.driver.target()

    def rates(self) -> Rates:
        """Return the measured speed of torch on this GPU; see `Rates`."""
        if self._rates is None:
            self._rates = self._measure_rates()
        return self._rates

    def settle(self) -> None:
        """See `Runtime.settle`."""
        self.flights.land()

    def begin(
        self,
        prepared: Any,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> GpuExecution:
        """See `Runtime.begin`."""
        if not prepared.hot:
            self.graphs.observe(prepared, params)
        self.heat(prepared)
        return GpuExecution(self, prepared, buffers, bindings, params, single=single)

    def heat(self, prepared: PreparedProgram) -> None:
        """See `TorchRuntime.heat`."""
        if prepared.runs + 1 == self._hot:
            self.graphs.mark(prepared)
        super().heat(prepared)

    def prepare(self, program: Program, facts: ProgramFacts, notes: Sequence[dict[str, Any]] = ()) -> PreparedProgram:
        """See `Runtime.prepare`."""
        prepared: PreparedProgram = super().prepare(program, facts, notes)
        self._add_status_words(prepared, [])
        return prepared

    def load(self, artifact: Artifact, program: Program, facts: ProgramFacts) -> PreparedProgram:
        """See `PlanRuntime.load`."""
        plan = artifact.plan
        runs: dict[bytes, Run] = {}
        for kernel, code in zip(plan.kernels, artifact.codes, strict=True):
            name = digest(kernel)
            key = name, code.code
            known = self._functions.get(key)
            if known is None:
                known = self._function(kernel, code)
                if len(self._functions) >= FUNCTIONS_KEPT:
                    self._functions.clear()
                    self.own_kernels.clear()
                self._functions[key] = known
            runs[name] = known
        asked: list[tuple[int, Callable[[int], Exception]]] = []

        def add_status(run: Run, where: int, forms: Sequence[Form], act: int) -> Run:
            k = len(asked)
            asked.append((act, lambda word: complaint(forms, word)))
            return lambda at, given: run([*at[:where], prepared.status.address(k), *at[where:]], given)

        acts = acts_of_plan(plan, runs, add_status)
        self.bounds.check_kernels(kernels_of(acts))
        prepared = prepare_acts(program, facts, acts, self.foreign, self.device)
        self._add_status_words(prepared, asked)
        count_work(prepared, plan)
        prepared.runs = max(self._hot - 2, 0)
        return prepared

    def _add_status_words(self, prepared: PreparedProgram, asked: list[tuple[int, Callable[[int], Exception]]]) -> None:
        """Give a program the status words in which its kernels and library calls report violations.

        Args:
            prepared: the program.
            asked: the acts that are such kernels, and what their words mean. They get the first words.
        """
        calls = prepared.words
        if not (asked or calls):
            return
        said = [*asked, *[(act, lambda _, why=word.why: why) for act, word in calls]]
        # calls with gradients write words, too, which needs normal tensors
        with self.device.copy_context(), torch.inference_mode(False):
            status = StatusWords(self.gpu, self.driver, said, counts=not asked)
            for k, (_, word) in enumerate(calls, len(asked)):
                word.memory = status.word(k)
        prepared.status = status

    def _function(self, kernel: Kernel, code: Code) -> Run:
        """Return a function that launches a kernel.

        Raises:
            OperationError: the driver refuses the code.
        """
        driver = self.driver
        kinds = [None] * len(kernel.arrays) + [s.dtype for s in kernel.scalars]
        try:
            function = driver.load(code.code, code.entry, kinds)
            per_core = driver.blocks_per_core(function, code.threads) if code.groups else None
        except OperationError as e:
            raise OperationError(f"the driver refuses the code of kernel {kernel.name}: {e}") from e
        arguments, grid, block = Arguments(kinds), (code.groups, 1, 1), (code.threads, 1, 1)
        launch = driver.launch
        cores = occupied(code.groups, per_core, self.cores)
        self.own_kernels.add(code.entry)

        def run(at: list[int], scalars: Sequence[Any]) -> int:
            sample = self.sample
            if sample is None:
                launch(function, grid, block, arguments.fill([*at, *scalars]))
            else:
                begin = driver.record()
                launch(function, grid, block, arguments.fill([*at, *scalars]))
                sample.append((begin, driver.record(), cores))
            return 0

        return run if code.groups else lambda at, scalars: 0

    def _measure_rates(self) -> Rates:
        """Measure the speed with three operators, which are limited by memory, by arithmetic and by the cost of a launch."""
        driver, where = self.driver, self.device.device

        def least(call: Callable[[], Any], times: int) -> int:
            found = []
            for _ in range(4):
                begin = driver.record()
                for _ in range(times):
                    call()
                (taken,) = driver.elapsed_ns([begin, driver.record()])
                found.append(taken // times)
            return max(min(found), 1)

        driver.attach()
        with torch.inference_mode():
            large, square, small = (torch.ones(n, device=where) for n in ((1 << 22,), (1024, 1024), (4,)))
            out = torch.empty_like(large)
            moved = least(lambda: torch.add(large, large, out=out), 4)
            computed = least(lambda: torch.mm(square, square), 4)
            return Rates(
                bytes_per_us=max(2 * large.nbytes * 1000 // moved, 1),
                flops_per_us=max(2 * 1024**3 * 1000 // computed, 1),
                launch_ns=least(lambda: torch.add(small, small), 100),
                edge_ns=EDGE_NS,
                segment_ns=EDGE_NS,
                own_ns=OWN_NS,
            )
