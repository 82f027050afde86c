"""Collectives on "cuda" tensors in groups of the backend "gloo": on copies in the memory of the process, as PyTorch's gloo does.

PyTorch sends a group's collectives through its dispatcher to the kernel of the tensors' device. These kernels give the same
collective to the group again, with host tensors, and copy its results back. They know nothing about other ranks' devices.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Work

from wooly.torch_private import boxed_work, collective, completed_work, unboxed_work

#: The collectives whose first argument has the results, and whether it also has operands.
_RESULTS_FIRST = {
    "allgather_": False,
    "_allgather_base_": False,
    "allgather_coalesced_": False,
    "allgather_into_tensor_coalesced_": False,
    "allreduce_": True,
    "allreduce_coalesced_": True,
    "alltoall_": False,
    "alltoall_base_": False,
    "broadcast_": True,
    "gather_": False,
    "reduce_": True,
    "reduce_scatter_": False,
    "_reduce_scatter_base_": False,
    "reduce_scatter_tensor_coalesced_": False,
    "scatter_": False,
}
#: These return before the data has arrived: a rank may begin to receive, and send afterwards.
_RECEIVING = ("recv_", "recv_any_source_")


def register_host_groups() -> torch.library.Library:
    """Register the kernels. They are in force as long as the returned library lives."""
    library = torch.library.Library("c10d", "IMPL")
    kernels = {name: _collective(name, with_operands) for name, with_operands in _RESULTS_FIRST.items()}
    kernels |= {name: _receive(name) for name in _RECEIVING} | {"send": _send}
    for name, kernel in kernels.items():
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
    return library


def _on_host(argument: Any, *, with_values: bool = True) -> Any:
    """An argument with host tensors in place of its tensors, which may be in lists of lists."""
    if isinstance(argument, Tensor):
        if with_values:
            return argument.cpu()
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="cpu")
    if isinstance(argument, (list, tuple)):
        return [_on_host(a, with_values=with_values) for a in argument]
    return argument


def _copy_back(results: Any, host: Any) -> None:
    if isinstance(results, Tensor):
        results.copy_(host)
    else:
        for result, found in zip(results, host, strict=True):
            _copy_back(result, found)


def _collective(name: str, with_operands: bool) -> Any:
    op = collective(name)

    def run(results: Any, *arguments: Any) -> Any:
        host = _on_host(results, with_values=with_operands)
        found = op(host, *[_on_host(a) for a in arguments])
        several = isinstance(found, tuple)
        unboxed_work(found[-1] if several else found).wait()
        _copy_back(results, host)
        work = boxed_work(completed_work(results))
        return (results, work) if several else work

    return run


def _send(tensors: list[Tensor], *arguments: Any) -> Any:
    return collective("send")(_on_host(tensors), *arguments)


def _receive(name: str) -> Any:
    op = collective(name)

    def run(tensors: list[Tensor], *arguments: Any) -> Any:
        host = _on_host(tensors, with_values=False)
        return boxed_work(_Receipt(unboxed_work(op(host, *arguments)), tensors, host))

    return run


class _Receipt(Work):
    """The handle of a `recv`: the tensors have the values after `wait`.

    Args:
        work: the handle of the host's `recv`.
        tensors, host: where the values shall be, and where the host's `recv` writes them.
    """

    #: Those that nobody has waited for. PyTorch itself keeps only the part of the object that is in C++.
    _kept: ClassVar[set[_Receipt]] = set()

    def __init__(self, work: Any, tensors: list[Tensor], host: list[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._host = work, tensors, host
        self._kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done: bool = self._work.wait(timeout)
        if self in self._kept:
            self._kept.remove(self)
            _copy_back(self._tensors, self._host)
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def source_rank(self) -> int:
        rank: int = self._work._source_rank()
        return rank

    _source_rank = source_rank
