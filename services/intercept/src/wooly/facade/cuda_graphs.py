"""CUDA graphs of scripts: `torch.cuda.CUDAGraph`, `torch.accelerator.Graph` and the functions beside them.

`torch.cuda.graph` and `torch.cuda.make_graphed_callables` are PyTorch's own, and use these classes.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from wooly.device import current_devices
from wooly.facade.streams import current_stream
from wooly.graphs.capture import GraphCapture
from wooly.graphs.captured import CapturedGraph
from wooly.interrupts import run_deferred
from wooly.rng import Generator, sequence_of
from wooly.torch_private import BaseGenerator, host_cache_patches

Patch = tuple[Any, str, Any]

_MODES = ("global", "thread_local", "relaxed")
_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """`torch.cuda.graph_pool_handle`: a name for a pool.

    The executor allocates the inner memory of a program for each replay, so graphs share this memory with or without a pool.
    Graphs of one pool also share the memory of values that several of their programs use.
    """
    return 0, next(_pools)


def is_current_stream_capturing() -> bool:
    """`torch.cuda.is_current_stream_capturing`."""
    return current_stream().is_capturing()


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: work that is captured once, and sent again at each replay.

    Args:
        keep_graph: whether `instantiate` or the first replay, not `capture_end`, makes the graph ready. The graph is the same.
    """

    _capture: GraphCapture | None
    _graph: CapturedGraph | None
    _pool: tuple[int, int] | None
    _registered: list[Generator]
    _keep_graph: bool
    _debug: bool

    def __new__(cls, keep_graph: bool = False, *args: Any, **kwargs: Any) -> CUDAGraph:
        self = super().__new__(cls)
        self._keep_graph = keep_graph
        self._capture = self._graph = self._pool = None
        self._registered = []
        self._debug = False
        return self

    def __init__(self, keep_graph: bool = False) -> None:
        """Do nothing: `__new__` has initialised the object, because subclasses of PyTorch's class rely on it."""

    def __del__(self) -> None:
        if self._capture is not None and self._capture.in_own_thread:
            with contextlib.suppress(RuntimeError):
                self._capture.end()

    def register_generator_state(self, generator: BaseGenerator) -> None:
        """Let the captured work draw from a generator. The device's default generator is always registered."""
        self._registered.append(sequence_of(generator))

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Begin to capture the work of this thread on the current device.

        Args:
            pool: name of the pool, from `graph_pool_handle` or `pool`.
            capture_error_mode: global, thread_local or relaxed. Other threads that use the device wait until the capture ends,
                so their calls cannot disturb it, and all modes are the same.
            check_input_liveness: no effect, because the graph keeps its inputs.

        Raises:
            RuntimeError: the graph has been captured, the current stream is the default stream, or the mode is unknown. These
                are PyTorch's own errors.
            torch.AcceleratorError: a capture is in progress. It is CUDA's own error.
        """
        if self._graph is not None or self._capture is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        stream = current_stream()
        if not stream.stream_id:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
                "default stream.)"
            )
        devices = current_devices()
        pool = (next(_pools), 0) if pool is None else pool
        capture = GraphCapture(devices.recorders[devices.current], stream.stream_id, self._registered, pool)
        capture.begin()
        self._capture, self._pool = capture, pool

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            torch.AcceleratorError: no capture is in progress, a call during the capture was not allowed, or another thread began
                the capture. These are CUDA's own errors.
            RuntimeError: the current stream is another one than at the beginning. It is PyTorch's own error.
            WoolyError: the session ended.
        """
        capture = self._capture
        if capture is None:
            raise torch.AcceleratorError(
                "CUDA error: the operation cannot be performed in the present state\n"
                "No capture of this graph is in progress; call capture_begin first."
            )
        capture.check_end(current_stream().stream_id)
        self._capture = None
        self._graph = capture.end()
        if not self._graph.parts:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or "
                "stream.",
                UserWarning,
                stacklevel=2,
            )

    def _captured(self, name: str) -> CapturedGraph:
        if self._graph is None:
            raise RuntimeError(f"Called CUDAGraph::{name} without a preceding successful capture.")
        return self._graph

    def instantiate(self) -> None:
        """Do nothing: a captured graph is ready. Only for graphs with `keep_graph`, as in PyTorch."""
        self._captured("instantiate")
        if not self._keep_graph:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")

    def replay(self) -> None:
        """Send the captured work.

        Raises:
            RuntimeError: nothing was captured. It is PyTorch's own error.
            NotConnectedError: the session of the capture has ended.
        """
        self._captured("replay").replay()
        run_deferred()

    def reset(self) -> None:
        """Delete what was captured. Buffers without a tensor are freed. The graph can be captured again."""
        if self._graph is not None:
            self._graph.release()
        self._graph = None

    def pool(self) -> tuple[int, int]:
        """The name of the graph's pool, for other captures."""
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Allow `debug_dump`."""
        self._debug = True

    def debug_dump(self, debug_path: str) -> None:
        """Write the captured instructions, and the Python lines that recorded them, to a file in the language of Graphviz."""
        if not self._debug:
            warnings.warn(
                "CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()", UserWarning, stacklevel=2
            )
            return
        Path(debug_path).write_text(self._captured("debug_dump").dot())

    def _no_handle(self, *args: Any) -> NoReturn:
        raise NotImplementedError(
            "handles of CUDA graphs are not supported on the wooly device, because this process has no CUDA runtime; "
            "debug_dump(path) writes the captured instructions"
        )

    raw_cuda_graph = raw_cuda_graph_exec = get_graph_data = _no_handle


class AcceleratorGraph(CUDAGraph):
    """`torch.accelerator.Graph`: as `CUDAGraph`, and a context manager that captures on the current stream."""

    def __init__(
        self,
        keep_graph: bool = False,
        *,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "default",
    ) -> None:
        super().__init__(keep_graph)
        self.graph_pool = pool
        self.capture_error_mode = capture_error_mode

    def capture_begin(self) -> None:  # type: ignore[override]  # as in PyTorch, the constructor has the arguments
        """Begin to capture, as `CUDAGraph.capture_begin`."""
        mode = "global" if self.capture_error_mode == "default" else self.capture_error_mode
        super().capture_begin(self.graph_pool, mode)

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self.capture_begin()

    def __exit__(self, *exc: object) -> None:
        self.capture_end()


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value)."""
    for owner in (torch.cuda, torch.cuda.graphs):
        yield (owner, "CUDAGraph", CUDAGraph)
        yield (owner, "graph_pool_handle", graph_pool_handle)
        yield (owner, "is_current_stream_capturing", is_current_stream_capturing)
    if hasattr(torch.accelerator, "Graph"):
        yield (torch.accelerator, "Graph", AcceleratorGraph)
    yield from host_cache_patches()
