"""The part of a driver that torch provides for CUDA and ROCm alike: streams, events, graphs, memory, random numbers."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from wooly_executor.errors import ContextLostError, OperationError
from wooly_executor.runtime.captures import Captures, PoolId, Turns
from wooly_executor.runtime.core_use import KernelRecord, read_profile
from wooly_executor.runtime.gpu_fresh_memory import on_zeros
from wooly_executor.runtime.torch_private import end_recording, pool_segments, sleep_on_gpu, storage_at

#: Memory that sessions may not use, for libraries' workspaces and code: the larger of this number of bytes and 1/APART_SHARE of
#: the device memory.
APART, APART_SHARE = 256 << 20, 32
#: Memory for graphs, which sessions may not use either: the larger of this number of bytes and 1/GRAPH_SHARE of the free memory.
#: Large results of a graph stay in this memory while sessions use them.
GRAPH_BYTES, GRAPH_SHARE = 256 << 20, 8

#: Waiting for a mark: polls without a pause for SPUN_S seconds, then with a pause of PAUSE_S seconds.
SPUN_S, PAUSE_S = 2e-4, 5e-5
#: Whether a graph must know the generators of its random calls. Since torch 2.14, it finds them itself, at their first draw.
_REGISTERS = TorchVersion(torch.__version__) < "2.14"
#: Seeds and number of the random numbers by which graphs are tried.
_SEEDS, _DRAWN = (1, (1 << 62) + 3), 1000
#: Clock in kHz of a GPU that does not report it.
_CLOCK_KHZ = 1_500_000


class _ZeroedPool:
    """See `gpu_fresh_memory.Pool`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.MemPool()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        # The pool applies to the calling thread only, so gradients must not be computed in another thread.
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def segments(self) -> dict[int, list[tuple[int, int]]]:
        return {
            segment["address"]: [(b["address"], b["size"]) for b in segment["blocks"] if b["state"] == "inactive"]
            for segment in pool_segments(self._pool.id)
        }

    def zero(self, blocks: Iterable[tuple[int, int]]) -> None:
        for address, nbytes in blocks:
            memory = storage_at(address, self._device, nbytes)
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory, 0, (nbytes,), (1,)).zero_()


class _TorchGraphs:
    """See `captures.GraphLibrary`."""

    def __init__(self, index: int) -> None:
        self._index = index

    def new_pool(self) -> PoolId:
        first, second = torch.cuda.graph_pool_handle()
        return int(first), int(second)

    def new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def new_draw(self, graph: Any) -> Any:
        generator = torch.Generator(torch.device("cuda", self._index))
        if _REGISTERS:
            graph.register_generator_state(generator)
        return generator

    def draw_by(self, generator: Any) -> Any:
        default = torch.cuda.default_generators[self._index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        return before

    def begin(self, graph: Any, pool: PoolId) -> None:
        # calls of other threads that a capture forbids do not invalidate it
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end_recording(self, pool: PoolId) -> None:
        end_recording(self._index, pool)

    def renew_generator(self) -> None:
        fresh = torch.Generator(torch.device("cuda", self._index))
        torch.cuda.default_generators[self._index].graphsafe_set_state(fresh.graphsafe_get_state())

    def pool_bytes(self, pool: PoolId) -> int:
        return sum([segment["total_size"] for segment in pool_segments(pool)])


class TorchGpu:
    """The part of a `Driver` that torch provides. The vendor's driver adds code, launches, and the reason of a lost context.

    Args:
        index: number of the GPU, among those that this process sees.
    """

    vendor = ""
    #: Numbers of errors after which the context is lost.
    sticky: frozenset[int] = frozenset()
    #: First result of the vendor's calls if they succeed.
    _ok: Any = None
    #: The module with the GPU's streams, events and memory.
    torch_cuda: Any = torch.cuda

    def __init__(self, index: int) -> None:
        self.torch_cuda.init()
        self.torch_cuda.set_device(index)
        self.index = index
        self.device = torch.device("cuda", index)
        self.stream: Any = self.torch_cuda.Stream(self.device)
        self._aside: Any = self.torch_cuda.Stream(self.device)
        self._urgent: Any = self.torch_cuda.Stream(self.device, priority=-1)
        self._marks: list[Any] = []
        self._captures = Captures(_TorchGraphs(index))
        self._zeroed: _ZeroedPool | None = None
        self._profiler: Any = None
        self._turns = Turns()
        self._generator = self.torch_cuda.default_generators[index]
        free, total = self.torch_cuda.mem_get_info(index)
        self._graph_room: int = max(GRAPH_BYTES, free // GRAPH_SHARE)
        self._capacity: int = max(free - max(APART, total // APART_SHARE) - self._graph_room, 0)

    def facts(self) -> dict[str, Any]:
        """See `Driver`."""
        found = self.torch_cuda.get_device_properties(self.index)
        return {
            "name": found.name,
            "vendor": self.vendor,
            "arch": self.arch(),
            "runtime": "hip" if self.vendor == "amd" else "cuda",
            "total_memory": found.total_memory,
            "cores": found.multi_processor_count,
            "torch_version": torch.__version__.split("+")[0],
        }

    def arch(self) -> str:
        """Return the compilers' name of the chip."""
        raise NotImplementedError

    def chip(self) -> str:
        """See `Driver`."""
        return f"{'hip' if self.vendor == 'amd' else 'cuda'}:{self.arch()}"

    def lost(self) -> str:
        """Return why the context is lost; empty if it is not. Waits for all enqueued work."""
        raise NotImplementedError

    def capacity(self) -> int:
        """See `Driver`."""
        return self._capacity

    def attach(self) -> None:
        """See `Driver`."""
        self.torch_cuda.set_device(self.index)
        self.torch_cuda.set_stream(self.stream)

    @contextlib.contextmanager
    def copy_context(self) -> Iterator[None]:
        """See `Driver`."""
        with self._turns.use(), self.torch_cuda.stream(self._aside):
            self._aside.wait_stream(self.stream)
            try:
                yield
            finally:
                self._aside.synchronize()

    def copy_target(self, nbytes: int) -> Tensor:
        """See `Driver`.

        The memory belongs to the stream of programs. Memory of the other stream would be reused there as soon as a session frees
        it, while programs may still use it.
        """
        with self.torch_cuda.stream(self.stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.torch_cuda.current_stream(self.device).wait_stream(self.stream)  # earlier programs may have used it
        return memory

    def on_zeros(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """See `Driver`."""
        if self._zeroed is None:
            self._zeroed = _ZeroedPool(self.device)
        return on_zeros(call, self._zeroed)

    def seed(self, seed: int) -> None:
        """See `Driver`."""
        if self._captures.capturing:
            self._captures.draw()
        else:
            self._generator.manual_seed(seed)

    def pinned(self, nbytes: int) -> Tensor:
        """See `Driver`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin_profile(self) -> None:
        """See `Driver`. Kineto records the kernels of the whole process."""
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        try:
            profiler.start()
        except Exception as e:
            raise OperationError(f"the profiler does not start: {e}") from e
        self._profiler = profiler

    def end_profile(self) -> list[KernelRecord]:
        """See `Driver`."""
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            with tempfile.TemporaryDirectory(prefix="wooly-profile-") as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                return read_profile(path)
        except OperationError:
            raise
        except Exception as e:
            raise OperationError(f"the profiler fails: {e}") from e

    def sm_utilisation(self) -> float | None:
        """See `Driver`. Only a vendor's driver knows it."""
        return None

    def record(self) -> Any:
        """See `Driver`."""
        mark: Any = self._marks.pop() if self._marks else self.torch_cuda.Event(enable_timing=True)
        try:
            mark.record(self.stream)
        except RuntimeError:
            self.check()
            raise
        return mark

    def elapsed_ns(self, marks: Sequence[Any]) -> list[int]:
        """See `Driver`."""
        try:
            marks[-1].synchronize()
            found = [round(1e6 * a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
        except RuntimeError:
            self.check()
            raise
        self._marks += marks
        return found

    def wait(self, mark: Any, seconds: float) -> bool:
        """See `Driver`. Polls, because nothing can wait for an event with a timeout."""
        begun = time.monotonic()
        try:
            while not mark.query():
                waited = time.monotonic() - begun
                if waited > seconds:
                    return False
                time.sleep(0 if waited < SPUN_S else PAUSE_S)
        except RuntimeError:
            self.check()
            raise
        return True

    def sleep(self, ns: int) -> None:
        """See `Driver`."""
        khz = getattr(self.torch_cuda.get_device_properties(self.index), "clock_rate", 0) or _CLOCK_KHZ
        sleep_on_gpu(ns * khz // 1_000_000)

    def urgent(self, target: Tensor, source: Tensor) -> None:
        """See `Driver`."""
        with self.torch_cuda.stream(self._urgent):
            target.copy_(source, non_blocking=True)
        self.stream.wait_stream(self._urgent)  # later work on the stream sees the copy

    def capture(self, body: Callable[[], None], *, apart: bool = False, draws: int = 0) -> Any:
        """See `Driver`."""
        with self._turns.capture() as free:
            return self._captures.capture(body, apart=apart, draws=draws) if free else None

    def draws_in_graphs(self) -> bool | None:
        """See `Driver`."""
        drawn = [torch.empty(_DRAWN, device=self.device) for _ in _SEEDS]

        def draw() -> None:
            for t, seed in zip(drawn, _SEEDS, strict=True):
                self.seed(seed)
                t.normal_().add_(torch.empty_like(t).bernoulli_(0.5))

        draw()
        wanted = [t.tolist() for t in drawn]
        try:
            graph = self.capture(draw, draws=len(_SEEDS))
            if graph is None:
                return None
            for seeds, numbers in ((_SEEDS, wanted), (_SEEDS[::-1], wanted[::-1])):
                graph.replay(seeds)
                if [t.tolist() for t in drawn] != numbers:
                    return False
        except RuntimeError:  # this release of the library cannot do it
            self.check()
            return False
        return True

    def graph_bytes(self) -> int:
        """See `Driver`."""
        return self._captures.nbytes()

    def keep_no_room_for_graphs(self) -> None:
        """See `Driver`."""
        self._capacity += self._graph_room
        self._graph_room = 0

    def graph_room(self) -> int:
        """See `Driver`."""
        return self._graph_room

    def release_cached(self) -> None:
        """See `Driver`."""
        self._captures.destroy_unused()
        self.torch_cuda.synchronize(self.index)
        self.torch_cuda.empty_cache()

    def check(self) -> None:
        """See `Driver`."""
        why = self.lost()
        if why:
            name = self.torch_cuda.get_device_name(self.index)
            raise ContextLostError(
                f"the context of {name} is lost ({why}): this process restarts, and all of its sessions end"
            )

    def _do(self, result: Any) -> Any:
        """Return the value of a vendor's call.

        Raises:
            OperationError: the call failed.
            ContextLostError: the context is lost.
        """
        status, *values = result
        if status != self._ok:
            if int(status) in self.sticky:
                self.check()
            raise OperationError(str(status.name))
        return values[0] if values else None

    def _check_launch(self, status: Any, grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
        """Check a launch's status. Raises the same errors as `_do`."""
        if status != self._ok:
            self.check()
            raise OperationError(f"the driver refuses the launch of {grid} blocks of {block} threads: {status.name}")
