"""Small copies between this process and the device, once per step: they wait for nothing, and repeat no content.

vLLM relies on pinned memory, which a GPU reads and writes by itself. On Wooly's device, an upload ends the open program,
and a read without pinned memory waits. Most uploads of a decode step repeat what the last step sent.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.v1.worker.gpu.async_utils as outputs
import vllm.v1.worker.gpu.model_runner as runner
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import NonUvaBuffer, StagedWriteTensor, UvaBackedTensor, _apply_write_kernel

#: Largest content, in bytes, that is compared with earlier ones; and number of contents that stay on the device.
MAX_BYTES, MAX_KEPT = 16 << 10, 64
#: Maximum number of single numbers that are written by one launch each.
MAX_SINGLE_WRITES = 8
#: Size, in bytes, of the blocks of memory into which small results are read.
BLOCK_BYTES = 64 << 10
#: Number of integers that a program of vLLM's kernel writes at once.
BLOCK_SIZE = 1024

_sent: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()


def send(
    data: Any, device: Any = None, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Replaces `async_tensor_h2d` in the model runner. Content that was sent before is copied on the device.

    Args:
        data: array, list or host tensor.
        device: device of the result, if `out` is None.
        dtype: dtype of the result.
        out: tensor to fill.
    """
    dtype = dtype or (None if out is None else out.dtype)
    host = torch.as_tensor(data, dtype=dtype, device="cpu")
    if host.nbytes > MAX_BYTES:
        return async_tensor_h2d(data, device, dtype, out)  # type: ignore[no-any-return]
    place = device if out is None else out.device
    key = (host.dtype, host.shape, host.numpy().tobytes(), str(place))
    known = _sent.pop(key, None)
    if known is None:
        known = host.to(place)
        if len(_sent) >= MAX_KEPT:
            _sent.popitem(last=False)
    _sent[key] = known
    return known.clone() if out is None else out.copy_(known)


def uva(self: Any, n: int | None = None) -> torch.Tensor:
    """Replaces `NonUvaBuffer.uva`: the device's copy of a host buffer, which is sent if it has changed."""
    host: torch.Tensor = self.cpu[:n]
    copy: torch.Tensor = self._uva[:n]
    content = host.numpy().tobytes() if host.nbytes <= MAX_BYTES else None
    if content is None or content != getattr(self, "content", None):
        copy.copy_(host)
        self.content = content
    return copy


def copy_to_uva(self: Any, n: int | None = None) -> torch.Tensor:
    """Replaces `UvaBackedTensor.copy_to_uva`: the device's copy of a host array.

    vLLM calls it for each parameter of sampling in each step, also if no request has come or gone. The copy of the last step is
    still right if the array has not changed.
    """
    array = self.np if n is None else self.np[:n]
    content = array.tobytes() if array.nbytes <= MAX_BYTES else None
    if content is None or content != getattr(self, "content", None):
        self.gpu = self.pool.copy_to_uva(array)
        self.content = content
    copy: torch.Tensor = self.gpu
    return copy


# Triton refuses annotations of types.
@triton.jit(do_not_specialize=["at", "value"])
def _store(target, at, value):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    tl.store(target + at, value)


def apply_write(self: Any) -> None:
    """Replaces `StagedWriteTensor.apply_write`. vLLM's function needs four uploads.

    A few single numbers, such as new blocks of requests, travel with the program. Other integers are one upload.
    """
    rows, starts, contents = self._staged_write_indices, self._staged_write_starts, self._staged_write_contents
    ends = self._staged_write_cu_lens
    if len(rows) <= MAX_SINGLE_WRITES and len(ends) == len(contents):
        for row, start, value in zip(rows, starts, contents, strict=True):
            _store[(1,)](self.gpu, row * self.gpu.stride(0) + int(start), value)
    elif self.dtype is torch.int32:
        longest = max(map(operator.sub, ends, [0, *ends]), default=0)
        _write(self.gpu, _sent_together(self.device, rows, starts, contents, ends), len(rows), longest)
    else:
        _apply_write(self)
        return
    self.clear_staged_writes()


def _sent_together(device: torch.device, *lists: list[int]) -> list[torch.Tensor]:
    """Send lists of integers as one tensor. Each begins at a multiple of 64 bytes, as tensors of their own do."""
    begins = [0, *itertools.accumulate([len(part) + -len(part) % 16 for part in lists])]
    host = np.zeros(begins[-1] + -begins[-1] % 256, np.int32)  # few sizes, so that programs repeat
    for begin, part in zip(begins, lists, strict=False):
        host[begin : begin + len(part)] = part
    sent = torch.from_numpy(host).to(device)
    return [sent[begin : begin + len(part)] for begin, part in zip(begins, lists, strict=False)]


def _write(target: torch.Tensor, sent: list[torch.Tensor], n: int, longest: int) -> None:
    rows, starts, contents, ends = sent
    # Since vLLM 0.33, a program of the kernel writes one block of a row; before, each writes the whole row.
    _apply_write_kernel[(n, -(-longest // BLOCK_SIZE))](
        target, target.stride(0), rows, starts, contents, ends, None, BLOCK_SIZE=BLOCK_SIZE, MULTI_GROUP=False
    )


_apply_write = StagedWriteTensor.apply_write


class _Pinned:
    """Pinned memory for reads. Each read gets bytes of its own; a block lives as long as its reads."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory for one read, as bytes."""
        end = self._used + nbytes
        if end > self._block.nbytes:
            self._block = torch.empty(max(BLOCK_BYTES, nbytes), dtype=torch.uint8, pin_memory=True)
            self._used, end = 0, nbytes
        part = self._block[self._used : end]
        self._used = end + -end % 64
        return part


_pinned = _Pinned()


def start_read(t: torch.Tensor) -> torch.Tensor:
    """Start to read a tensor. The copy is complete after the next event on its stream."""
    into = _pinned.take(t.nbytes).view(t.dtype).view(t.shape)
    return into.copy_(t, non_blocking=True)


def start_read_to_array(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """Replaces `async_copy_to_np`."""
    return start_read(t).numpy()


def start_read_of_logprobs(self: Any) -> Any:
    """Replaces `LogprobsTensors.to_cpu_nonblocking`."""
    if self.logprob_token_ids.is_cpu:
        return self
    ends = self.cu_num_generated_tokens_tensor
    return LogprobsTensors(
        start_read(self.logprob_token_ids),
        start_read(self.logprobs),
        start_read(self.selected_token_ranks),
        self.cu_num_generated_tokens,
        None if ends is None else start_read(ends),
    )


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    runner.async_tensor_h2d = send
    NonUvaBuffer.uva = uva
    UvaBackedTensor.copy_to_uva = copy_to_uva
    StagedWriteTensor.apply_write = apply_write
    outputs.async_copy_to_np = start_read_to_array
    LogprobsTensors.to_cpu_nonblocking = start_read_of_logprobs
