"""The process group of ranks on Wooly's devices. PyTorch makes it for the backend "nccl".

It is a process group in Python, so it also does the work of the backend for CPU tensors in mixed groups ("cpu:gloo,cuda:nccl").
Arguments are checked as NCCL's group checks them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError
from wooly_wis.collectives import MAX_RANGES, REDUCIBLE, Reduction, What

from wooly.devices import NAME
from wooly.distributed.carrier import Carrier, Work
from wooly.dtypes import DTYPES
from wooly.kernels.resolving import plain
from wooly.torch_private import (
    PythonProcessGroup,
    completed_work,
    raw_device,
    reduction_of,
    suggested_format,
)


class Options:
    """`torch.distributed.ProcessGroupNCCL.Options`: kept, without effect, except the timeout."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.backend = "nccl"
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


class DeviceGroup(PythonProcessGroup):  # type: ignore[misc] # the class is PyTorch's
    """A process group of ranks on Wooly's devices.

    Args:
        rank: this rank.
        size: number of ranks.
        carrier: carries the collectives.
        host: the backend of CPU tensors; None: the group has none.
    """

    Options = Options
    uid = -1
    supports_splitting = supports_coalescing = supports_time_estimate = False
    bound_device_id = None

    def __init__(self, rank: int, size: int, carrier: Carrier, host: Any = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._carrier, self._host = rank, size, carrier, host
        self._batch: list[tuple[Tensor, int, bool]] | None = None
        self._group_name, self._description = "", "undefined"
        self._destroyed = False

    # -- what PyTorch asks -------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "nccl"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._group_name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), *([] if self._host is None else [torch.device("cpu")])]

    def _get_backend(self, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            return self._host_for_cpu()
        return self

    def _host_for_cpu(self) -> Any:
        if self._host is None:
            raise RuntimeError(
                'No backend type associated with device type cpu (the group has only the backend "nccl"; move the tensor to '
                '"cuda", or make the group with backend="cpu:gloo,cuda:nccl")'
            )
        return self._host

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._carrier.timeout_s = timeout.total_seconds()  # type: ignore[attr-defined]

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        """The carrier counts the collectives itself."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        self._destroyed = True
        self._carrier.leave()

    abort = shutdown

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if tensors and tensors[0].is_cpu:
            return self._host_for_cpu().allreduce(tensors, *([] if opts is None else [opts]))
        for t in tensors:
            flat = _flat(t)
            self._reduce(What.ALL_REDUCE, [flat], [flat], opts)
        return completed_work(tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if tensors and tensors[0].is_cpu:
            return self._host_for_cpu().allreduce_coalesced(list(tensors), *([] if opts is None else [opts]))
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if tensors[0].is_cpu:
            return self._host_for_cpu().reduce(tensors, *([] if opts is None else [opts]))
        flat, root = _flat(tensors[0]), self._root(opts)
        self._reduce(What.REDUCE, [flat], [flat] if root == self._rank else [], opts, root=root)
        return completed_work(list(tensors))

    def broadcast(self, tensors: Any, opts: Any = 0) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if tensors[0].is_cpu:
            return self._host_for_cpu().broadcast(tensors, *([opts] if opts else []))
        root = self._root(opts)
        for t in tensors:
            flat = [_flat(t)]
            mine = root == self._rank
            self._carry(What.BROADCAST, flat if mine else [], [] if mine else flat, opts, root=root)
        return completed_work(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        if inputs[0].is_cpu:
            return self._host_for_cpu().allgather(outputs, inputs)
        for out, t in zip(outputs, inputs, strict=True):
            self._check_list(out, t)
            with _written(out) as flat:
                self._carry(What.ALL_GATHER, [_flat(t)], flat, opts)
        return completed_work([list(out) for out in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        if inputs and inputs[0].is_cpu:
            return self._host_for_cpu().allgather_coalesced(outputs, inputs)
        # PyTorch passes, for each rank, the list of its tensors
        return self.allgather([[out[k] for out in outputs] for k in range(len(inputs))], inputs, opts)

    def _allgather_base(self, output: Tensor, t: Tensor, opts: Any = None) -> Any:
        if t.is_cpu:
            return self._host_for_cpu()._allgather_base(output, t)
        if output.dtype is not t.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if output.numel() != t.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        self._carry(What.ALL_GATHER, [_flat(t)], self._parts(_flat(output)), opts)
        return completed_work([output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return _coalesced([self._allgather_base(out, t, opts) for out, t in zip(outputs, inputs, strict=True)], outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        if outputs[0].is_cpu:
            return self._host_for_cpu().reduce_scatter(outputs, inputs, opts)
        for out, parts in zip(outputs, inputs, strict=True):
            self._check_list(parts, out)
            self._reduce(What.REDUCE_SCATTER, [_flat(p.contiguous()) for p in parts], [_flat(out)], opts)
        return completed_work(list(outputs))

    def _reduce_scatter_base(self, output: Tensor, t: Tensor, opts: Any = None) -> Any:
        if t.is_cpu:
            return self._host_for_cpu()._reduce_scatter_base(output, t, opts)
        if output.dtype is not t.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if t.numel() != output.numel() * self._size:
            raise ValueError("input tensor must be the same size as output size times world size")
        self._reduce(What.REDUCE_SCATTER, self._parts(_flat(t)), [_flat(output)], opts)
        return completed_work([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return _coalesced(
            [self._reduce_scatter_base(out, t, opts) for out, t in zip(outputs, inputs, strict=True)], outputs
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Tensor, t: Tensor, gets: Sequence[int], gives: Sequence[int], opts: Any = None
    ) -> Any:
        if t.is_cpu:
            return self._host_for_cpu().alltoall_base(output, t, list(gets), list(gives))
        if output.dtype is not t.dtype:
            raise TypeError("tensors are not of the same type")
        self._carry(What.ALL_TO_ALL, self._split(t, gives), self._split(output, gets), opts)
        return completed_work([output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        if inputs[0].is_cpu:
            return self._host_for_cpu().alltoall(outputs, inputs)
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all needs {self._size} input and output tensors, one per rank of the group")
        _check_dtypes([*outputs, *inputs])
        self._carry(What.ALL_TO_ALL, [_flat(t) for t in inputs], [_flat(t) for t in outputs], opts)
        return completed_work(list(outputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        if inputs[0].is_cpu:
            return self._host_for_cpu().gather(outputs, inputs, opts)
        found: Sequence[Tensor] = []
        root = self._root(opts)
        if root == self._rank:
            found = outputs[0]
            self._check_list(found, inputs[0])
        with _written(found) as flat:
            self._carry(What.GATHER, [_flat(inputs[0])], flat, opts, root=root)
        return completed_work([list(found)])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        if outputs[0].is_cpu:
            return self._host_for_cpu().scatter(outputs, inputs, opts)
        parts: list[Tensor] = []
        root = self._root(opts)
        if root == self._rank:
            self._check_list(inputs[0], outputs[0])
            parts = [_flat(t.contiguous()) for t in inputs[0]]
        self._carry(What.SCATTER, parts, [_flat(outputs[0])], opts, root=root)
        return completed_work(list(outputs))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks. As with NCCL, the script waits, too."""
        awaited = not getattr(opts, "asyncOp", False)
        self._carry(What.BARRIER, [], [], opts, awaited=awaited)
        if awaited:
            self._carrier.wait()
        return completed_work([])

    # -- between two ranks -------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Any:
        if tensors[0].is_cpu:
            return self._host_for_cpu().send(tensors, dst, tag)
        return self._exchange(tensors, dst, sends=True)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Any:
        if tensors[0].is_cpu:
            return self._host_for_cpu().recv(tensors, src, tag)
        return self._exchange(tensors, src, sends=False)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        if tensors[0].is_cpu:
            return self._host_for_cpu().recv_anysource(tensors, tag)
        raise ValueError(
            "recv from any rank is not supported with the backend nccl; name the rank: recv(tensor, src=...)"
        )

    def _exchange(self, tensors: Sequence[Tensor], peer: int, *, sends: bool) -> Any:
        batch = self._batch
        found = [(_flat(t), peer, sends) for t in tensors]
        if batch is None:
            self._send_batch(found)
        else:
            batch += found
        return completed_work(list(tensors))

    def _send_batch(self, batch: Sequence[tuple[Tensor, int, bool]]) -> None:
        """Send and receive together. Ranks that do so with each other do not wait for an order."""
        if len(batch) > MAX_RANGES:
            raise ValueError(f"batch_isend_irecv has {len(batch)} operations, at most {MAX_RANGES} are supported")
        if not batch:
            return
        raw = [(t.view(torch.uint8), peer, sends) for t, peer, sends in batch]  # a batch may have several dtypes
        reads, writes = (
            [(t, peer) for t, peer, sends in raw if sends],
            [(t, peer) for t, peer, sends in raw if not sends],
        )
        peers = [peer for _, peer in (*reads, *writes)]
        self._begin(Work(What.EXCHANGE, [t for t, _ in reads], [t for t, _ in writes], peers=peers))

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Sends and receives in this block are one exchange, which begins at the end of the block."""
        if self._batch is not None:
            yield
            return
        self._batch = []
        try:
            yield
            batch = self._batch
        finally:
            self._batch = None
        self._send_batch(batch)

    def _start_coalescing(self, device: Any) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any) -> Any:
        batch, self._batch = self._batch or [], None
        self._send_batch(batch)
        return completed_work([])

    def _root(self, opts: Any) -> int:
        """The root of a collective.

        Raises:
            ValueError: it is no rank of the group. It is PyTorch's own error.
        """
        root = 0 if opts is None else opts if isinstance(opts, int) else opts.rootRank
        if not 0 <= root < self._size:
            raise ValueError(f"invalid root rank: {root}; the group has the ranks 0 to {self._size - 1}")
        return int(root)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _reduce(self, what: What, reads: list[Tensor], writes: list[Tensor], opts: Any, *, root: int = 0) -> None:
        kind, factor = reduction_of(opts)
        reduction = Reduction.__members__.get(kind, Reduction.NONE)
        if reduction is Reduction.NONE:
            raise ValueError(f"Cannot use ReduceOp.{kind} with NCCL")
        dtype = reads[0].dtype
        if DTYPES.get(dtype) not in REDUCIBLE:
            raise ValueError(f"Input tensor data type is not supported for NCCL process group: {dtype}")
        if reduction in (Reduction.AVG, Reduction.PREMUL_SUM) and dtype is torch.bool:
            raise ValueError(f"Cannot use ReduceOp.{kind} with Boolean inputs")
        if reduction is Reduction.PREMUL_SUM and not dtype.is_floating_point:
            raise ValueError("Cannot use ReduceOp.PREMUL_SUM with inputs that are not floating-point numbers")
        self._carry(what, reads, writes, opts, root=root, reduction=reduction, factor=factor)

    def _carry(self, what: What, reads: Sequence[Tensor], writes: Sequence[Tensor], opts: Any, **more: Any) -> None:
        _check_dtypes([*reads, *writes])
        timeout = getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) and timeout.total_seconds() > 0 else None
        self._begin(Work(what, reads, writes, timeout_s=timeout_s, **more))

    def _begin(self, work: Work) -> None:
        """Send this rank's part.

        Raises:
            DistBackendError: the group was destroyed. NCCL's group raises it, too.
        """
        if self._destroyed:
            raise DistBackendError(
                f"NCCL communicator was aborted: the process group {self._group_name or '(without a name)'} was destroyed, "
                "and cannot be used any more"
            )
        self._carrier.carry(work)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The equal parts of the ranks."""
        n = flat.numel() // self._size
        return [flat.narrow(0, k * n, n) for k in range(self._size)]

    def _split(self, t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The parts of the ranks of all_to_all_single. The sizes count rows; without sizes, the parts are equal."""
        flat = _flat(t)
        if not sizes:
            if t.dim() and t.shape[0] % self._size:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            return self._parts(flat)
        if len(sizes) != self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(sizes) != t.shape[0]:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        row = flat.numel() // t.shape[0] if t.shape[0] else 0
        return list(flat.split([n * row for n in sizes]))

    def _check_list(self, parts: Sequence[Tensor], like: Tensor) -> None:
        if len(parts) != self._size:
            raise ValueError(f"the list has {len(parts)} tensors, but the group has {self._size} ranks")
        _check_dtypes([*parts, like])


def _coalesced(works: list[Any], outputs: Sequence[Tensor]) -> Any:
    """One handle for several collectives. Those of CPU tensors are done only when their handles have been waited for."""
    if not outputs or not outputs[0].is_cpu:
        return completed_work(list(outputs))
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    other = next((t.dtype for t in tensors if t.dtype is not tensors[0].dtype), None)
    if other is not None:
        raise TypeError(f"tensors must have the same dtype, but found {tensors[0].dtype} and {other}")


def _flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory.

    Raises:
        RuntimeError: the tensor is not on the device.
        ValueError: the tensor is not dense.
    """
    if t.layout is not torch.strided or raw_device(t).type != NAME:
        raise RuntimeError("Tensors must be CUDA and dense")
    t = plain(t.detach())
    if not t.is_contiguous():
        if not t.is_contiguous(memory_format=suggested_format(t)):
            raise ValueError("Tensors must be contiguous")
    elif t.dim() == 1:
        return t
    return t.as_strided((t.numel(),), (1,))


@contextlib.contextmanager
def _written(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat tensors to write. Those that are not dense get their elements from a copy at the end of the block."""
    dense = [t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    yield [_flat(t) for t in dense]
    for t, own in zip(tensors, dense, strict=True):
        if own is not t:
            t.copy_(own)
