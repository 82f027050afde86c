"""The arithmetic of collectives: what is copied and reduced, in pieces. This module does not know sessions or groups.

A reduction goes over the ranks in their order, and each step rounds to the elements' own dtype: ((r0 + r1) + r2) + … So the
result depends on nothing but the ranks' values. float16 and bfloat16 are rounded at each step, too, as gloo does.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from wooly_wis.collectives import REDUCING, Collective, Reduction, What

from wooly_executor.mover import Job

#: Size, in bytes, of a piece. The piece of a host fits into a core's cache, so a reduction reads and writes it there.
PIECE_ON_HOST = 256 << 10
PIECE_ON_GPU = 16 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Elements that are computed together: `sources` have equal sizes, and their reduction (or the only source) is copied to each
    of `targets`. All are flat.
    """

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return sum([t.numel() * t.element_size() for t in (*self.sources, *self.targets)])


#: The memory of one rank: tensors of the ranges that it reads and writes.
Memory = tuple[Sequence[Tensor], Sequence[Tensor]]


def parts_of(calls: Sequence[Collective], memory: Sequence[Memory]) -> list[Part]:
    """The parts of a collective.

    Args:
        calls: what the ranks ask for, in the order of the ranks.
        memory: their memory.
    """
    what, root = calls[0].what, calls[0].root
    reads, writes = [m[0] for m in memory], [m[1] for m in memory]
    ranks = range(len(calls))
    if what is What.ALL_REDUCE:
        return [Part(tuple([r[0] for r in reads]), tuple([w[0] for w in writes]))]
    if what is What.REDUCE:
        return [Part(tuple([r[0] for r in reads]), (writes[root][0],))]
    if what is What.REDUCE_SCATTER:
        return [Part(tuple([r[k] for r in reads]), (writes[k][0],)) for k in ranks]
    if what is What.BROADCAST:
        return [Part((reads[root][0],), tuple([w[0] for k, w in enumerate(writes) if k != root]))]
    if what is What.ALL_GATHER:
        return [Part((reads[k][0],), tuple([w[k] for w in writes])) for k in ranks]
    if what is What.ALL_TO_ALL:
        return [Part((reads[k][to],), (writes[to][k],)) for k in ranks for to in ranks]
    if what is What.GATHER:
        return [Part((reads[k][0],), (writes[root][k],)) for k in ranks]
    if what is What.SCATTER:
        return [Part((reads[root][k],), (writes[k][0],)) for k in ranks]
    return []


def reduce(pieces: Sequence[Tensor], reduction: Reduction, factor: float, into: Tensor) -> None:
    """Reduce tensors of equal size, in their order.

    Args:
        pieces: the tensors.
        reduction: the reduction.
        factor: the factor of PREMUL_SUM.
        into: memory of the same size for the result. It may be one of the first `readable_in_place` pieces, but must not
            overlap the others.
    """
    first = pieces[0]
    if first.dtype is torch.bool:  # as in NCCL, whose bools are numbers: a sum is "or", a product is "and"
        step = torch.logical_or if reduction in (Reduction.SUM, Reduction.MAX) else torch.logical_and
    elif reduction is Reduction.PRODUCT:
        step = torch.mul
    elif reduction is Reduction.MIN:
        step = torch.minimum
    elif reduction is Reduction.MAX:
        step = torch.maximum
    else:
        step = torch.add
    if reduction is Reduction.PREMUL_SUM:
        torch.mul(first, factor, out=into)
        for piece in pieces[1:]:
            into.add_(piece * factor)
        return
    if len(pieces) == 1:
        _copy(first, into)
    else:
        step(first, pieces[1], out=into)
    for piece in pieces[2:]:
        step(into, piece, out=into)
    if reduction is Reduction.AVG:
        if into.is_floating_point():
            into.div_(len(pieces))
        else:
            torch.div(into, len(pieces), rounding_mode="trunc", out=into)


def readable_in_place(reduction: Reduction) -> int:
    """Number of pieces that `reduce` has read before it writes the result for the first time."""
    return 1 if reduction is Reduction.PREMUL_SUM else 2


def _copy(source: Tensor, target: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():  # a rank's own part may be in place already
        target.copy_(source)


def _combine(call: Collective, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Do the work of a piece of a part. A reduction is computed in the first target that no later source overlaps."""
    found = sources[0]
    if call.what in REDUCING and targets:
        later = {source.data_ptr() for source in sources[readable_in_place(call.reduction) :]}
        own = next((target for target in targets if target.data_ptr() not in later), None) if later else targets[0]
        found = torch.empty_like(found) if own is None else own
        reduce(sources, call.reduction, call.factor, found)
    for target in targets:
        if target is not found:
            _copy(found, target)


def steps(parts: Sequence[Part], call: Collective, piece: int) -> Iterator[int]:
    """Do the work, and yield the bytes of each piece.

    A target is a source's memory, or overlaps no source: `service.overlap` has checked this.

    Args:
        parts: the parts.
        call: what one of the ranks asks for: reduction and factor are the same for all.
        piece: size of a piece, in bytes.
    """
    small = 0
    for part in parts:
        first = part.sources[0]
        count, nbytes = first.numel(), first.element_size()
        each = max(piece // nbytes, 1)
        for begin in range(0, count, each):
            sources, targets, end = part.sources, part.targets, min(begin + each, count)
            if count > each:
                sources = tuple([t[begin:end] for t in sources])
                targets = tuple([t[begin:end] for t in targets])
            _combine(call, sources, targets)
            small += (end - begin) * nbytes * (len(sources) + len(targets))
            if small >= piece:
                yield small
                small = 0
    yield small


@dataclass(eq=False)
class WorkJob(Job):
    """Does the work of a large collective outside the device's thread.

    Attributes:
        parts: what is to be done.
        call: what one of the ranks asks for.
        piece: size of a piece, in bytes.
        took_ns: time that the work took so far.
        core_ns: core time so far.
    """

    parts: list[Part] = field(default_factory=list)
    call: Collective | None = None
    piece: int = PIECE_ON_HOST
    took_ns: int = 0
    core_ns: int = 0

    def steps(self) -> Generator[int]:
        assert self.call is not None
        begun, core = time.perf_counter_ns(), time.thread_time_ns()
        for nbytes in steps(self.parts, self.call, self.piece):
            self.took_ns += time.perf_counter_ns() - begun
            self.core_ns += time.thread_time_ns() - core
            yield nbytes
            begun, core = time.perf_counter_ns(), time.thread_time_ns()
