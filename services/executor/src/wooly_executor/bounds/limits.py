"""Limits on the work of one instruction, and on the size of its pieces, per kind of device."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form

from wooly_executor.bounds.work import Work

#: Elements per second and core in the worst case: strided reads, one after the other. Most operators are ten times as fast.
CORE_ELEMENTS_S = 150_000_000
#: Operations of float32 per second and core, in medium-sized matrix products.
CORE_FLOPS_S = 25_000_000_000
#: Maximum time on a CPU of an instruction that cannot be split, in seconds, at these rates.
LONGEST_S = 60
#: Maximum number of cores in the limit on elements: many element-wise operators use one core, or are limited by memory
#: bandwidth.
CORES = 8
#: Target time of a piece on a CPU, in seconds, at twice these rates.
PIECE_S = 0.1
#: Limits of a GPU: 5e11 elements take 10 s at 5e10 per second, 5e14 operations take 25 s at 20 TFLOP/s.
GPU_ELEMENTS, GPU_FLOPS = 500_000_000_000, 500_000_000_000_000
#: Maximum number of pieces of one instruction, and of one program.
PIECES, PROGRAM_PIECES = 4096, 131_072
#: Maximum work of a plan's generated kernel, in pieces.
KERNEL_PIECES = 4
_HALF = (DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work of instructions; `Work` defines the units.

    Attributes:
        elements: maximum elements of an instruction that is not split, or of one piece.
        flops: maximum operations of an instruction that is not split, or of one piece.
        piece_elements: target size of a piece, in elements. 0: no instruction is split.
        piece_flops: target size of a piece, in operations.
        host: the device is a CPU, and products of half precision are weighted by their measured slowdown.
    """

    elements: int
    flops: int
    piece_elements: int = 0
    piece_flops: int = 0
    host: bool = False

    @property
    def divides(self) -> bool:
        """Whether instructions are split."""
        return self.piece_elements > 0

    def whole(self) -> Limits:
        """Return the same limits for a runtime that does not split instructions."""
        return replace(self, piece_elements=0, piece_flops=0)

    def weighed(self, work: Work, form: Form) -> Work:
        """Return the work in units of this device: on a CPU, products of half precision count more."""
        if not self.host or not work.flops:
            return work
        half = {o.view.dtype for o in form.operands if o.view is not None} & set(_HALF)
        return Work(work.elements, work.flops * max([half_factor(d) for d in half], default=1))

    def exceeded(self, work: Work) -> bool:
        """Whether the work exceeds a limit."""
        return work.elements > self.elements or work.flops > self.flops

    def parts(self, work: Work) -> int:
        """Return the number of pieces for an instruction; 1: do not split it."""
        if not self.divides:
            return 1
        by_elements = -(-work.elements // self.piece_elements)
        by_flops = -(-work.flops // self.piece_flops)
        # A split into two pieces is not worth its cost. Products are split only where necessary, because the library may compute
        # a few rows in another way than many rows.
        if self.exceeded(work):
            return max(by_elements, by_flops)
        return max(by_elements if by_elements > 2 else 1, by_flops if by_flops > 4 else 1)

    def for_kernels(self) -> Limits:
        """Return the limits of a plan's generated kernel. It runs several instructions and cannot be split."""
        if not self.divides:
            return self
        return replace(self, elements=KERNEL_PIECES * self.piece_elements, flops=KERNEL_PIECES * self.piece_flops)


def default_limits(*, host: bool, cores: int, elements: int | None = None, flops: int | None = None) -> Limits:
    """Return the limits of a device. `elements` and `flops` are configured limits, which replace the defaults."""
    if not host:
        return Limits(elements or GPU_ELEMENTS, flops or GPU_FLOPS)
    cores = max(cores, 1)
    elements_s, flops_s = CORE_ELEMENTS_S * min(cores, CORES), CORE_FLOPS_S * cores
    elements, flops = elements or LONGEST_S * elements_s, flops or LONGEST_S * flops_s
    pieces = min(int(PIECE_S * 2 * elements_s), elements), min(int(PIECE_S * 2 * flops_s), flops)
    return Limits(elements, flops, *pieces, host=True)


@functools.cache
def half_factor(dtype: DType) -> int:
    """Return the time of a product in half precision relative to float32 on this CPU, from 1 to 64. Measured once per process."""
    torch_dtype = torch.float16 if dtype is DType.F16 else torch.bfloat16

    def least(kind: torch.dtype) -> int:
        a = torch.ones(128, 128, dtype=kind)
        found = []
        for _ in range(4):
            begun = time.thread_time_ns()
            torch.mm(a, a)
            found.append(time.thread_time_ns() - begun)
        return max(min(found), 1)

    return min(max(least(torch_dtype) // least(torch.float32), 1), 64)
