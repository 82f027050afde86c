"""How much work one instruction may be, and how much of it runs at once, by kind of device."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form

from wooly_executor.bounds.work import Work

#: Elements per second that a core goes over at worst: strided reads, one after the other. Most operators are ten times as fast.
CORE_ELEMENTS_S = 150_000_000
#: Operations of float32 per second of a core in products of some size.
CORE_FLOPS_S = 25_000_000_000
#: Seconds that an instruction which cannot be split may take on a CPU, at those rates.
LONGEST_S = 60
#: Cores that count for elements: many operators that go over elements use one, or are bounded by memory.
CORES = 8
#: Seconds that a piece of an instruction should take on a CPU, at twice those rates.
PIECE_S = 0.1
#: A GPU's: 5e11 elements are 10 s at 5e10 per second, 5e14 operations 25 s at 20 TFLOP/s.
GPU_ELEMENTS, GPU_FLOPS = 500_000_000_000, 500_000_000_000_000
#: Pieces of one instruction at most, and of one program.
PIECES, PROGRAM_PIECES = 4096, 131_072
#: Pieces whose work a plan's kernel may be.
KERNEL_PIECES = 4
_HALF = (DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on instructions; see `Work` for what is counted.

    Attributes:
        elements: of an instruction, or a piece of one.
        flops: the same.
        piece_elements: an instruction of more is split into pieces of about so many, where its operator allows it; 0: none is.
        piece_flops: the same for products.
        host: products of half precision take as much more time as is measured here.
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
        """The same for a runtime that splits nothing."""
        return replace(self, piece_elements=0, piece_flops=0)

    def weighed(self, work: Work, form: Form) -> Work:
        """What work is on this device."""
        if not self.host or not work.flops:
            return work
        half = {o.view.dtype for o in form.operands if o.view is not None} & set(_HALF)
        return Work(work.elements, work.flops * max([half_factor(d) for d in half], default=1))

    def exceeded(self, work: Work) -> bool:
        """Whether it is too much."""
        return work.elements > self.elements or work.flops > self.flops

    def parts(self, work: Work) -> int:
        """Pieces that an instruction should be split into; 1: it is to stay whole."""
        if not self.divides:
            return 1
        by_elements = -(-work.elements // self.piece_elements)
        by_flops = -(-work.flops // self.piece_flops)
        # Less than two pieces more is not worth a split; products are split where they have to be, as their library may
        # compute a few rows in another way than many.
        if self.exceeded(work):
            return max(by_elements, by_flops)
        return max(by_elements if by_elements > 2 else 1, by_flops if by_flops > 4 else 1)

    def for_kernels(self) -> Limits:
        """Of a plan's generated kernel, which does several instructions and is not split: no more than a few pieces."""
        if not self.divides:
            return self
        return replace(self, elements=KERNEL_PIECES * self.piece_elements, flops=KERNEL_PIECES * self.piece_flops)


def default_limits(*, host: bool, cores: int, elements: int | None = None, flops: int | None = None) -> Limits:
    """The limits of a device; `elements` and `flops` as configured, where they are."""
    if not host:
        return Limits(elements or GPU_ELEMENTS, flops or GPU_FLOPS)
    cores = max(cores, 1)
    elements_s, flops_s = CORE_ELEMENTS_S * min(cores, CORES), CORE_FLOPS_S * cores
    elements, flops = elements or LONGEST_S * elements_s, flops or LONGEST_S * flops_s
    pieces = min(int(PIECE_S * 2 * elements_s), elements), min(int(PIECE_S * 2 * flops_s), flops)
    return Limits(elements, flops, *pieces, host=True)


@functools.cache
def half_factor(dtype: DType) -> int:
    """How many times as long a product of half precision takes here as one of float32: 1 to 64, measured once."""
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
