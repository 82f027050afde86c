"""The carrier of ranks on different executors: gloo, on copies in the memory of the ranks' processes.

Each collective waits for the device and for the other ranks. It is slow, so it is used only if WOOLYAI_COLLECTIVES=clients asks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from wooly_wis.collectives import REDUCING, Reduction, What

from wooly.devices import Devices
from wooly.distributed.carrier import Work
from wooly.torch_private import make_gloo

_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.SUM,
    Reduction.PREMUL_SUM: dist.ReduceOp.SUM,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
}
#: gloo has no reductions of bools: a sum is the maximum, a product is the minimum.
_OPS_OF_BOOL = {
    Reduction.SUM: dist.ReduceOp.MAX,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.MIN,
    Reduction.MIN: dist.ReduceOp.MIN,
}


class ClientCarrier:
    """Carries collectives through the clients.

    Args:
        store: the group's store.
        rank: this rank.
        size: number of ranks.
        timeout: maximum time to wait for other ranks.
        devices: the process's devices.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, devices: Devices) -> None:
        self._gloo: Any = make_gloo(store, rank, size, timeout)
        self._rank, self._size, self._devices = rank, size, devices

    def carry(self, work: Work) -> None:
        """Do this rank's part, and wait for it.

        Raises:
            torch.AcceleratorError: a CUDA graph is being captured. It is CUDA's own error.
        """
        for recorder in self._devices.active():
            if (capture := recorder.own_capture) is not None:
                capture.refuse(
                    "With WOOLYAI_COLLECTIVES=clients, a collective waits for the device, so it cannot be a part of a CUDA "
                    "graph. Move it out of the capture, or leave WOOLYAI_COLLECTIVES at its default."
                )
        reads = [t.cpu() for t in work.reads]
        results = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in work.writes]
        steps: dict[What, Callable[[Work, list[Tensor], list[Tensor]], None]] = {
            What.ALL_REDUCE: self._reduce,
            What.REDUCE: self._reduce,
            What.REDUCE_SCATTER: self._reduce,
            What.BROADCAST: self._broadcast,
            What.ALL_GATHER: self._all_gather,
            What.ALL_TO_ALL: self._all_to_all,
            What.GATHER: self._gather,
            What.SCATTER: self._scatter,
            What.EXCHANGE: self._exchange,
            What.BARRIER: self._barrier,
        }
        moved = work.what not in REDUCING  # gloo does not know all dtypes
        raw = [[t.view(torch.uint8) if moved else t for t in tensors] for tensors in (reads, results)]
        steps[work.what](work, *raw)
        for target, result in zip(work.writes, results, strict=True):
            target.copy_(result)

    def wait(self) -> None:
        """Each collective has waited."""

    def leave(self) -> None:
        """The connections end with the group."""

    def _reduce(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        mine = torch.cat(reads)
        if work.reduction is Reduction.PREMUL_SUM:
            mine *= work.factor
        options: Any = dist.AllreduceOptions()
        is_bool = mine.dtype is torch.bool
        options.reduceOp = (_OPS_OF_BOOL if is_bool else _OPS)[work.reduction]
        summed = mine.to(torch.uint8) if is_bool else mine
        self._gloo.allreduce([summed], options).wait()
        if work.reduction is Reduction.AVG:
            summed = (
                summed / self._size if summed.is_floating_point() else summed.div(self._size, rounding_mode="trunc")
            )
        if work.what is What.REDUCE_SCATTER:
            summed = summed.split([t.numel() for t in reads])[self._rank]
        for result in results:
            result.copy_(summed)

    def _barrier(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        self._gloo.barrier().wait()

    def _broadcast(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank = work.root
        self._gloo.broadcast([*reads, *results], options).wait()

    def _all_gather(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        self._gloo.allgather([results], reads).wait()

    def _all_to_all(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        gets, gives = [t.numel() for t in results], [t.numel() for t in reads]
        found = torch.empty(sum(gets), dtype=results[0].dtype, device="cpu")
        self._gloo.alltoall_base(found, torch.cat(reads), gets, gives).wait()
        for result, part in zip(results, found.split(gets), strict=True):
            result.copy_(part)

    def _gather(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        options: Any = dist.GatherOptions()
        options.rootRank = work.root
        self._gloo.gather([results] if results else [], reads, options).wait()

    def _scatter(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        options: Any = dist.ScatterOptions()
        options.rootRank = work.root
        self._gloo.scatter(results, [reads] if reads else [], options).wait()

    def _exchange(self, work: Work, reads: list[Tensor], results: list[Tensor]) -> None:
        to, come_from = work.peers[: len(reads)], work.peers[len(reads) :]
        started = [self._gloo.send([t], peer, 0) for t, peer in zip(reads, to, strict=True)]
        started += [self._gloo.recv([t], peer, 0) for t, peer in zip(results, come_from, strict=True)]
        for each in started:
            each.wait()
