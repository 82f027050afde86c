"""The CPU runtime: torch is the library, on torch's own memory."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from wooly_bus import host

from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.protocol import Rates
from wooly_executor.runtime.torch_runtime import HOT, TorchRuntime


class TorchCpuRuntime(TorchRuntime):
    """Runs programs with torch on the CPU.

    Args:
        hot: see `TorchRuntime`.
    """

    def __init__(self, hot: int = HOT) -> None:
        super().__init__(HOST, hot)

    def facts(self) -> dict[str, Any]:
        """Return the facts that answer `torch.cuda.get_device_properties`."""
        return {
            "name": _cpu_name(),
            "vendor": "cpu",
            "arch": platform.machine(),
            "runtime": "torch-cpu",
            "total_memory": host.memory(),
            "cores": torch.get_num_threads(),
            "torch_version": torch.__version__.split("+")[0],
        }

    def rates(self) -> Rates:
        """Return the measured speed of torch on this machine; see `Rates`."""
        return _rates(torch.get_num_threads())


@functools.cache
def _rates(threads: int) -> Rates:
    """Measure the speed with three operators, which are limited by memory, by arithmetic and by the cost of a call."""

    def least(call: Callable[[], Any], times: int) -> int:
        found = []
        for _ in range(4):
            begun = time.thread_time_ns()
            for _ in range(times):
                call()
            found.append((time.thread_time_ns() - begun) // times)
        return max(min(found), 1)

    large, square, small = torch.ones(1 << 20), torch.ones(256, 256), torch.ones(4)
    out = torch.empty_like(large)
    moved = least(lambda: torch.add(large, large, out=out), 2)
    computed = least(lambda: torch.mm(square, square), 2)
    return Rates(
        bytes_per_us=max(2 * large.nbytes * 1000 // moved, 1),
        flops_per_us=max(2 * 256**3 * 1000 // computed, 1),
        launch_ns=least(lambda: torch.add(small, small), 100),
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or "CPU"
    return platform.processor() or f"CPU ({os.cpu_count()} cores)"
