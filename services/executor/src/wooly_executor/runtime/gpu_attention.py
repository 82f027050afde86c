"""Attention on a GPU: the CPU library's fused operator, done by the GPU library's fused operators.

Programs are recorded as a CPU would run them (ADR 6). The results have the shapes and dtypes of the CPU's operator. A GPU's fused
operator does not store the matrix of scores. If no fused operator fits a call, products of matrices compute the call.
"""

from __future__ import annotations

import enum
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wooly_executor.errors import OperationError
from wooly_executor.runtime.torch_private import deterministic_switches, set_deterministic

aten = torch.ops.aten

#: The fused operators read memory in units of this number of bytes.
UNIT = 16
#: The fused operators need a multiple of this number of elements per head. Zeros are added up to a multiple.
WIDTH_UNIT = 8
#: The rows of a mask have a multiple of this number of elements in memory (as in torch's `pad_bias`).
MASK_UNIT = 16
#: The memory-efficient operator's backward pass reads logarithms for a multiple of this number of rows.
LOGS_UNIT = 32
#: Largest head dimension of the flash operator, and the largest on chips that have less shared memory than an A100.
FLASH_WIDTH, FLASH_WIDTH_SMALL = 256, 192
#: torch's number of cuDNN's operator (`SDPBackend`), and the maximum number of its choices that are kept.
CUDNN_CHOSEN, CHOICES = 3, 4096
#: CUDA's limit of the second and third dimension of a grid: the operators have one block per batch and head there.
GRID = 65535

_HALVES = (torch.float16, torch.bfloat16)


class Way(enum.Enum):
    """How attention is computed."""

    FLASH = "flash"
    #: As torch chooses it. With a mask only if nobody reads the logarithms: cuDNN has other ones for a fully masked row than the
    #: CPU, and its gradients are NaN for some lengths (issue 196678 of PyTorch, since 2.11).
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATMUL = "matmul"


class Chip(NamedTuple):
    """A GPU: its vendor, and its compute capability."""

    vendor: str
    major: int
    minor: int


def choose(
    dtype: torch.dtype,
    query: tuple[int, ...],
    key: tuple[int, ...],
    mask: torch.dtype | None,
    is_causal: bool,
    chip: Chip | None,
) -> Way:
    """Return how to compute attention. A forward pass and its backward pass may differ, because their logarithms are the same.

    Args:
        dtype: dtype of query, key and value.
        query: shape of query, (batch, heads, rows, width).
        key: shape of key and value, (batch, heads of key, columns, width).
        mask: dtype of the mask; None: there is no mask.
        is_causal: whether row i sees the columns 0 to i only.
        chip: the GPU; None: the device is not a GPU.
    """
    if chip is None or chip.vendor != "nvidia" or 0 in query or 0 in key:  # other vendors' operators are not tested
        return Way.MATMUL
    if query[0] > GRID or query[1] > GRID:
        return Way.MATMUL
    ampere = chip.major >= 8
    roomy = chip.minor == 0 and chip.major in (8, 9, 10)
    # With other numbers of rows than columns, the flash operator aligns the causal mask at the last column, not at the first.
    square = not is_causal or query[2] == key[2]
    fits = query[3] <= (FLASH_WIDTH if roomy else FLASH_WIDTH_SMALL)
    if ampere and dtype in _HALVES and mask is None and square and fits:
        return Way.FLASH
    if chip.major < 7 or mask not in (None, torch.bool, torch.float32, dtype):
        return Way.MATMUL
    if dtype is torch.float32 or dtype is torch.float16 or (dtype is torch.bfloat16 and ampere):
        return Way.EFFICIENT
    return Way.MATMUL


@functools.cache
def _chip(device: torch.device) -> Chip | None:
    if device.type != "cuda":
        return None
    return Chip("amd" if torch.version.hip else "nvidia", *torch.cuda.get_device_capability(device))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    logs_read: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the result of attention, and the logarithm of the sum of exponentials of each row (0 for a fully masked row).

    Without `logs_read`, the logarithms may be missing.
    """
    way = _way((query, key, value), dropout_p, is_causal, attn_mask, logs_read=logs_read)
    if way is Way.MATMUL:
        return attention_by_matmul(query, key, value, is_causal, attn_mask, scale)
    factor = _factor(query, scale)
    rows, width, dtype = query.shape[2], query.shape[3], query.dtype
    if way is Way.CUDNN:
        q, k, v = [_aligned(t) for t in (query, key, value)]
        by_cudnn = aten._scaled_dot_product_cudnn_attention.default
        added = None if attn_mask is None else _added(attn_mask, query.dtype)
        planned_for, with_logs = (q, k, v) if added is None else (q, k, v, added), added is None
        made = planned(
            "forward",
            planned_for,
            is_causal,
            lambda: by_cudnn(q, k, v, added, with_logs, 0.0, is_causal, False, scale=factor),
        )
        if made is not None:
            return made[0][..., :width], made[1].view(query.shape[:3]) if with_logs else None
        way = _without_cudnn(query, key, None if attn_mask is None else attn_mask.dtype, is_causal)
    if way is Way.FLASH:
        q, k, v = [_aligned(t) for t in (query, key, value)]
        found = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=factor)
        return found[0][..., :width], found[1]
    k, v = [_shared(t, query.shape[1]) for t in (key, value)]
    q, k, v = [_aligned(t) for t in _widened((query, k, v), attn_mask)]
    bias = _bias(attn_mask, q, k)
    out, logs, _, _ = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, bias, True, 0.0, is_causal, scale=factor
    )
    return out[..., :width].to(dtype), logs[..., :rows]


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attention` for query, key and value, from the logarithms of its rows."""
    way = _way((query, key, value, out), dropout_p, is_causal, attn_mask)
    if way is Way.MATMUL:
        return attention_backward_by_matmul(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
    factor = _factor(query, scale)
    rows, columns, width, dtype, device = query.shape[2], key.shape[2], query.shape[3], query.dtype, query.device
    grad_out, logsumexp = grad_out.to(dtype), logsumexp.to(torch.float32)
    if way is Way.CUDNN:
        g, q, k, v, o = [_aligned(t) for t in (grad_out, query, key, value, out)]
        seed, offset = [torch.empty((), dtype=torch.int64, device=device) for _ in range(2)]  # without dropout, unread
        logs = logsumexp.contiguous().unsqueeze(-1)
        by_cudnn = aten._scaled_dot_product_cudnn_attention_backward.default
        given = (g, q, k, v, o, logs, seed, offset, None, None, None, rows, columns, 0.0, is_causal)
        grads = planned("backward", (g, q, k, v, o), is_causal, lambda: by_cudnn(*given, scale=factor))
        if grads is not None:
            grad_query, grad_key, grad_value = [t[..., :width] for t in grads]
            return grad_query, grad_key, grad_value
        way = _without_cudnn(query, key, None, is_causal)
    if way is Way.FLASH:
        g, q, k, v, o = [_aligned(t) for t in (grad_out, query, key, value, out)]
        seed, offset = [
            torch.empty(size, dtype=torch.uint64, device=device) for size in ((2,), ())
        ]  # without dropout, unread
        grads = _deterministic_if_asked(aten._scaled_dot_product_flash_attention_backward.default)(
            g, q, k, v, o, logsumexp.contiguous(), None, None, rows, columns, 0.0, is_causal, seed, offset, scale=factor
        )
        grad_query, grad_key, grad_value = [t[..., :width] for t in grads]
        return grad_query, grad_key, grad_value
    k, v = [_shared(t, query.shape[1]) for t in (key, value)]
    g, q, k, v, o = [_aligned(t) for t in _widened((grad_out, query, k, v, out), attn_mask)]
    o = (
        o.transpose(1, 2).contiguous().transpose(1, 2)
    )  # the kernel computes the stride of the rows of `out` from its shape
    more = -rows % LOGS_UNIT
    logs = torch.nn.functional.pad(logsumexp, (0, more), value=math.inf).contiguous()
    seed, offset = [
        torch.empty((), dtype=torch.int64, device=device) for _ in range(2)
    ]  # without dropout, they are not read
    found = _deterministic_if_asked(aten._scaled_dot_product_efficient_attention_backward.default)(
        g,
        q,
        k,
        v,
        _bias(attn_mask, q, k),
        o,
        logs,
        seed,
        offset,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=factor,
    )
    grad_query, grad_key, grad_value = [t[..., :width].to(dtype) for t in found[:3]]
    return grad_query, _summed(grad_key, key.shape[1]), _summed(grad_value, key.shape[1])


#: The function writes every element of its results, so it needs no zeroed memory (see `fresh_memory`).
attention_backward.writes_all = True  # type: ignore[attr-defined]


class Attention:
    """`attention` for one instruction. Its operands have the same views in each run, so how to compute it is decided once.

    Attributes:
        logs_read: whether the program reads the logarithms.
    """

    __slots__ = ("_known", "_of", "logs_read")

    #: See `fresh_memory`: every element of the results is written.
    writes_all = True

    def __init__(self) -> None:
        self._known: Direct | None = None
        self.logs_read = True
        self._of: tuple[Any, ...] = ()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `attention`."""
        # the pieces of an instruction have other shapes, and memory of other origin may have another alignment
        of = (query.shape, key.shape, dropout_p, is_causal, None if attn_mask is None else attn_mask.shape)
        if (
            self._known is not None
            and of == self._of
            and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) % UNIT
        ):
            return self._known(query, key, value, attn_mask, _factor(query, scale))
        logs_read = self.logs_read
        found = attention(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale, logs_read=logs_read
        )
        self._known, self._of = _direct(query, key, value, is_causal, attn_mask, logs_read=logs_read), of
        return found


#: Computes attention of query, key, value and mask, with a factor.
Direct = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor | None]]


def _direct(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, *, logs_read: bool
) -> Direct | None:
    """Return a function that computes attention of tensors of these layouts, at aligned addresses, as `attention` has done it.

    None if the tensors must be changed before. Only this thread may call the function: cuDNN's plans belong to a thread.
    """
    tensors = query, key, value
    way = _way(tensors, 0.0, is_causal, mask, logs_read=logs_read)
    if way is Way.CUDNN and mask is not None:
        added = _added(mask, query.dtype)
        if _plan_of("forward", (*tensors, added), is_causal) not in _planned:
            way = _without_cudnn(query, key, mask.dtype, is_causal)
    if way is Way.MATMUL or any(_aligned(t) is not t for t in tensors):
        return None
    if way is Way.EFFICIENT:
        if mask is not None and mask.dtype is torch.float32 and query.dtype is not torch.float32:
            return None  # the operands must be widened
        by_efficient, heads = aten._scaled_dot_product_efficient_attention.default, query.shape[1]
        shared, length = key.shape[1] != heads, query.shape[2]

        def efficient(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, factor: float
        ) -> tuple[Tensor, Tensor]:
            if shared:
                k, v = _shared(k, heads), _shared(v, heads)
            bias = _bias(attn_mask, q, k)
            made = by_efficient(q, k, v, bias, True, 0.0, is_causal, scale=factor)
            return made[0], made[1][..., :length]

        return efficient
    if way is Way.CUDNN:
        rows, by_cudnn = query.shape[:3], aten._scaled_dot_product_cudnn_attention.default
        if mask is not None:

            def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, factor: float) -> tuple[Tensor, None]:
                assert attn_mask is not None
                bias = _added(attn_mask, q.dtype)
                return by_cudnn(q, k, v, bias, False, 0.0, is_causal, False, scale=factor)[0], None

            return masked
        if _plan_of("forward", tensors, is_causal) in _planned:

            def cudnn(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
                made = by_cudnn(q, k, v, None, True, 0.0, is_causal, False, scale=factor)
                return made[0], made[1].view(rows)

            return cudnn
        if _without_cudnn(query, key, None, is_causal) is not Way.FLASH:
            return None
    by_flash = aten._scaled_dot_product_flash_attention.default

    def flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        made = by_flash(q, k, v, 0.0, is_causal, False, scale=factor)
        return made[0], made[1]

    return flash


def _way(
    tensors: tuple[Tensor, ...], dropout_p: float, is_causal: bool, mask: Tensor | None, *, logs_read: bool = True
) -> Way:
    """Return how to compute attention of tensors, which begin with query and key.

    Raises:
        OperationError: the CPU's operator does not support the call.
    """
    query, key, *_ = tensors
    if dropout_p:
        raise OperationError(f"the CPU's fused attention has no dropout, but dropout_p is {dropout_p}")
    if any(t.dtype is not query.dtype for t in tensors):  # the fused operators do not check all dtypes
        raise OperationError(f"attention needs tensors of one dtype, but they have {[t.dtype for t in tensors]}")
    found = None if mask is None else mask.dtype
    way = _without_cudnn(query, key, found, is_causal)
    if query.dtype not in _HALVES or way is Way.MATMUL:
        return way
    masked = tensors[:3]
    if mask is not None:
        if logs_read or found not in (torch.bool, query.dtype) or any(_aligned(t) is not t for t in tensors):
            return way
        masked = (*masked, mask)
    if deterministic_switches()[0]:  # cuDNN's gradients are not deterministic
        return way
    layouts = tuple([(tuple(t.shape), t.stride()) for t in masked])
    known = _cudnn_is_chosen.get((query.dtype, found, is_causal, layouts))
    if known is None:
        if len(_cudnn_is_chosen) >= CHOICES:
            _cudnn_is_chosen.clear()
        gqa = key.shape[1] != query.shape[1]
        chosen = aten._fused_sdp_choice.default(query, key, tensors[2], mask, 0.0, is_causal, enable_gqa=gqa)
        known = _cudnn_is_chosen[query.dtype, found, is_causal, layouts] = chosen == CUDNN_CHOSEN
    return Way.CUDNN if known else way


def _without_cudnn(query: Tensor, key: Tensor, mask: torch.dtype | None, is_causal: bool) -> Way:
    return choose(query.dtype, tuple(query.shape), tuple(key.shape), mask, is_causal, _chip(query.device))


def planned(which: str, tensors: tuple[Tensor, ...], is_causal: bool, call: Callable[[], Any]) -> Any:
    """Return the results of an operator of cuDNN; None if cuDNN cannot plan it.

    Torch makes one plan per thread and layout. Torch 2.11 keeps an empty entry if cuDNN fails to make the plan, and the next call
    with this layout then reads address 0, which ends the process. So such a call is never repeated, and no plan is made during a
    capture, where cuDNN may fail.

    Args:
        which: name of the operator.
        tensors: its tensors.
        is_causal: its argument.
        call: calls it.

    Raises:
        RuntimeError: there is no plan, and a capture is in progress.
    """
    key = _plan_of(which, tensors, is_causal)
    if key in _planned:
        return call()
    if key in _unplannable:
        return None
    if _in_capture():
        raise RuntimeError("cuDNN must plan this attention before a graph can contain it")
    try:
        made = call()
    except Exception as e:
        _unplannable.add(key)
        if isinstance(e, torch.OutOfMemoryError):
            raise
        return None
    if len(_planned) >= CHOICES:
        _planned.clear()
    _planned.add(key)
    return made


def _plan_of(which: str, tensors: tuple[Tensor, ...], is_causal: bool) -> tuple[Any, ...]:
    """Return everything on which a plan of cuDNN depends."""
    layouts = tuple([(tuple(t.shape), t.stride()) for t in tensors])
    return which, threading.get_ident(), tensors[0].device, tensors[0].dtype, is_causal, layouts


def _in_capture() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


#: Calls of cuDNN's operators that have a plan, and those for which cuDNN has failed.
_planned: set[tuple[Any, ...]] = set()
_unplannable: set[tuple[Any, ...]] = set()
#: Whether torch itself would choose cuDNN's operator, by dtypes and layouts of a call. It depends on the chip and on cuDNN.
_cudnn_is_chosen: dict[tuple[Any, ...], bool] = {}


@functools.cache
def _ends(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added to the score of an element that a row sees, and of one that it does not see."""
    return torch.zeros((), dtype=dtype, device=device), torch.full((), -math.inf, dtype=dtype, device=device)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of truth values as numbers that are added to the scores, in one launch; another mask as it is."""
    return torch.where(mask, *_ends(dtype, mask.device)) if mask.dtype is torch.bool else mask


def _deterministic_if_asked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with deterministic sums if the instruction asks for deterministic algorithms.

    If the library only warns (see `invocation.deterministic`), the fused operators ignore the switch.
    """
    before = deterministic_switches()
    if not before[0]:
        return call

    def strictly(*args: Any, **kwargs: Any) -> Any:
        set_deterministic(on=True, warn_only=False, fill=False)
        try:
            return call(*args, **kwargs)
        finally:
            set_deterministic(*before)

    return strictly


def _factor(query: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(query.shape[-1])


def _aligned(t: Tensor) -> Tensor:
    """Return `t` with a head dimension and addresses that the fused operators can read. They may end the context otherwise."""
    more = -t.shape[-1] % WIDTH_UNIT
    if more:
        t = torch.nn.functional.pad(t, (0, more))
    per = UNIT // t.dtype.itemsize
    if t.stride(-1) != 1 or any(n % per for n in t.stride()[:-1]) or t.data_ptr() % UNIT:
        t = t.clone(memory_format=torch.contiguous_format)
    return t


def _widened(tensors: tuple[Tensor, ...], mask: Tensor | None) -> list[Tensor]:
    """Return the tensors in float32 if the mask has this dtype, because the operator takes only one dtype."""
    wide = mask is not None and mask.dtype is torch.float32
    return [t.to(torch.float32) if wide else t for t in tensors]


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask as numbers that are added to the scores, in a layout that the memory-efficient operator can read."""
    if mask is None:
        return None
    mask = _added(mask, query.dtype)
    columns = key.shape[2]
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask.expand(*mask.shape[:3], columns)
    if mask.stride(-1) != 1 or any(n % MASK_UNIT for n in mask.stride()[:-1]) or mask.data_ptr() % UNIT:
        own = mask.new_zeros(*mask.shape[:3], columns + -columns % MASK_UNIT)[..., :columns]
        mask = own.copy_(mask)
    return mask.expand(*query.shape[:3], columns)


def _shared(t: Tensor, heads: int) -> Tensor:
    """Repeat each head of key or value for the heads of query that share this head."""
    if t.shape[1] == heads:
        return t
    batch, own, rows, width = t.shape  # `repeat_interleave` copies a number from the host, which a graph cannot contain
    return t.unsqueeze(2).expand(batch, own, heads // own, rows, width).reshape(batch, heads, rows, width)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of `_shared`."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


# -- products of matrices ------------------------------------------------------------------------------------------------------


def attention_by_matmul(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Do `attention` with the whole matrix of scores."""
    scores = _scores(query, key, is_causal, mask, scale)
    logs = _finite(torch.logsumexp(scores, -1))
    shares = torch.exp(scores - logs.unsqueeze(-1))
    return torch.matmul(shares, _shared(value, query.shape[1]).to(shares.dtype)).to(query.dtype), logs


def attention_backward_by_matmul(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `attention_backward` with the whole matrix of scores (Dao et al. 2022, algorithm 4, with one block)."""
    scores = _scores(query, key, is_causal, mask, scale)
    shares = torch.exp(scores - _finite(logsumexp.to(scores.dtype)).unsqueeze(-1))
    wide, heads = shares.dtype, query.shape[1]
    grad, factor = grad_out.to(wide), _factor(query, scale)
    grad_value = torch.matmul(shares.transpose(-2, -1), grad)
    along = torch.matmul(grad, _shared(value, heads).to(wide).transpose(-2, -1))
    row = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = shares * (along - row) * factor
    grad_query = torch.matmul(grad_scores, _shared(key, heads).to(wide))
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), query.to(wide))
    grad_key, grad_value = [_summed(t, key.shape[1]) for t in (grad_key, grad_value)]
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the scaled and masked scores, at least in float32."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    key = _shared(key, query.shape[1])
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1)) * _factor(query, scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf by 0, as the CPU does. Fully masked rows have no finite logarithm, and all of their weights become 0."""
    return logs.masked_fill(logs == -math.inf, 0.0)
