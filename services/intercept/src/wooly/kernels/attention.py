"""`scaled_dot_product_attention`: which kernel computes a call, by the switches of `torch.nn.attention.sdpa_kernel`.

Without switches, the choice is that of the executor's library, the CPU's, so that the results have the same bits. If a script
switches kernels off, the rest of CUDA's kernels that can compute the call is asked in CUDA's order, and a call that none of them
can compute raises CUDA's error, with CUDA's warnings as reasons. `fused_attention` has these kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from wooly import native
from wooly.kernels.whole import is_traced
from wooly.torch_private import (
    SDPBackend,
    attention_choice,
    attention_order,
    is_wrapper,
    is_zero_tensor,
    may_use_cudnn,
    may_use_efficient,
    may_use_flash,
    may_use_math,
)

aten = torch.ops.aten

_flash_of_library = aten._scaled_dot_product_flash_attention_for_cpu.default
_math = aten._scaled_dot_product_attention_math.default
_flash = aten._scaled_dot_product_flash_attention.default
_efficient = aten._scaled_dot_product_efficient_attention.default
_cudnn = aten._scaled_dot_product_cudnn_attention.default

_BACKENDS: Any = SDPBackend
_ERROR, _MATH, _FLASH = int(_BACKENDS.ERROR), int(_BACKENDS.MATH), int(_BACKENDS.FLASH_ATTENTION)
_EFFICIENT, _CUDNN = int(_BACKENDS.EFFICIENT_ATTENTION), int(_BACKENDS.CUDNN_ATTENTION)

_ATTENTION = "aten.scaled_dot_product_attention.default"
_learn_fused = None if native.module is None else native.module.learn_fused
#: Largest head of flash attention and of cuDNN's attention, in elements.
_FLASH_WIDTH, _CUDNN_WIDTH = 256, 128
_HALVES = (torch.float16, torch.bfloat16)
#: Whether the CPU's fused kernel also computes calls without a batch.
_LIBRARY_ADDS_BATCH = TorchVersion(torch.__version__) >= "2.14"
#: Maximum number of choices that are kept.
_CHOICES_LIMIT = 16384
_choices: dict[tuple[Any, ...], int] = {}


class Question(NamedTuple):
    """A call of attention, as far as the choice of its kernel depends on it.

    Attributes:
        query, key, value: tensors `[batch, heads, length, width]`, if a fused kernel shall compute the call.
        mask: the mask; None: there is none.
        dropout: probability of dropout.
        causal: whether row i sees the columns 0 to i only.
        gqa: whether heads of queries may share heads of keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    gqa: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def need_gradients(self) -> tuple[bool, bool]:
        """Whether gradients of the tensors are wanted, and whether one of the mask is."""
        if not torch.is_grad_enabled():
            return False, False
        tensors = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        return tensors, self.mask is not None and self.mask.requires_grad

    def described(self, of: Callable[[Tensor], Any]) -> str:
        """Query, key and value in words, as PyTorch's warnings describe them."""
        query, key, value = [of(t) for t in self.tensors]
        return f"Query: {query}, Key: {key}, Value: {value}"


def _layout_objections(q: Question, *, may_share: bool) -> Iterator[str]:
    """What keeps all fused kernels from a call. `may_share`: heads of queries may share heads of keys."""
    if any(t.dim() != 4 for t in q.tensors):
        yield (
            "All fused kernels requires query, key and value to be 4 dimensional, but got dimensions "
            f"{q.described(lambda t: t.dim())} instead."
        )
        return
    heads, of_keys, of_values = [t.size(1) for t in q.tensors]
    shared = may_share and q.gqa and of_keys == of_values and of_keys > 0 and heads % of_keys == 0
    if len({t.size(0) for t in q.tensors}) > 1 or not (shared or heads == of_keys == of_values):
        yield (
            "For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads. "
            f"{q.described(lambda t: list(t.shape))} instead. To broadcast dense inputs, try using unsqueeze and expand_to "
            "before passing them into the kernel."
        )
    if q.query.size(2) == 0 or q.key.size(2) == 0:
        yield "All fused kernels do not support zero seq_len_q or seq_len_kv."
    if any(t.stride(3) != 1 and t.size(3) != 1 for t in q.tensors):
        yield (
            "All fused kernels require the last dimension of the input to have stride 1. "
            f"Got strides of the last dimension {q.described(lambda t: t.stride(3))} instead."
        )


def _dtype_objections(q: Question, allowed: tuple[torch.dtype, ...], names: str) -> Iterator[str]:
    if q.query.dtype not in allowed or any(t.dtype is not q.query.dtype for t in q.tensors):
        yield (
            f"Expected query, key and value to all be of dtype: {{{names}}}. "
            f"Got {q.described(lambda t: t.dtype)} instead."
        )


def _flash_objections(q: Question) -> Iterator[str]:
    yield from _layout_objections(q, may_share=True)
    if q.mask is not None:
        yield "Flash Attention does not support non-null attn_mask."
    widths = [t.size(-1) for t in q.tensors]
    if len(set(widths)) > 1 or widths[0] > _FLASH_WIDTH:
        yield (
            "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to "
            f"{_FLASH_WIDTH}. Got {q.described(lambda t: t.size(-1))} instead."
        )
    if q.causal and q.query.dim() == q.key.dim() == 4 and q.query.size(2) != q.key.size(2):
        yield (
            "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. "
            f"Got seqlen_q: {q.query.size(2)} seqlen_k: {q.key.size(2)}. If you would like to use causal attention with "
            "non-square inputs, please see CausalAttnMask."
        )
    yield from _dtype_objections(q, _HALVES, "Half, BFloat16")


def _efficient_objections(q: Question) -> Iterator[str]:
    yield from _layout_objections(q, may_share=False)
    unit = 8 if q.query.dtype in _HALVES else 4
    if any(width % unit or not width for width in (q.query.size(-1), q.value.size(-1))):
        yield (
            f"Mem efficient attention requires last dimension of inputs to be divisible by {unit}. "
            f"Got {q.described(lambda t: t.size(-1))} instead."
        )
    yield from _dtype_objections(q, (torch.float32, *_HALVES), "Half, BFloat16, Float")


def _cudnn_objections(q: Question) -> Iterator[str]:
    yield from _layout_objections(q, may_share=True)
    widths = [t.size(-1) for t in q.tensors]
    if widths[0] != widths[1] or any(width % 8 or width > _CUDNN_WIDTH for width in widths):
        yield (
            f"cuDNN SDPA requires head dimensions that are multiples of 8 and at most {_CUDNN_WIDTH}. "
            f"Got {q.described(lambda t: t.size(-1))} instead."
        )
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield "cuDNN SDPA is not deterministic."
    yield from _dtype_objections(q, _HALVES, "Half, BFloat16")


class _Kernel(NamedTuple):
    """One of CUDA's fused kernels: its name in warnings, its switch, and what keeps it from a call."""

    name: str
    is_on: Callable[[], bool]
    objections: Callable[[Question], Iterator[str]]


_KERNELS = {
    _EFFICIENT: _Kernel("Memory efficient", may_use_efficient, _efficient_objections),
    _FLASH: _Kernel("Flash attention", may_use_flash, _flash_objections),
    _CUDNN: _Kernel("cuDNN attention", may_use_cudnn, _cudnn_objections),
}


def can_compute(kernel: int, q: Question, *, warn: bool = False) -> bool:
    """Whether a fused kernel of CUDA is switched on and can compute a call.

    Args:
        kernel: its number in `SDPBackend`.
        q: the call.
        warn: whether to say in warnings what keeps the kernel from the call.
    """
    known = _KERNELS[kernel]
    if not known.is_on():
        if warn:
            warnings.warn(f"{known.name} kernel has been runtime disabled.", stacklevel=2)
        return False
    objections = list(known.objections(q))
    for objection in objections if warn else ():
        warnings.warn(objection, stacklevel=2)
    return not objections


def choose(q: Question) -> int:
    """CUDA's choice of a kernel for a call, a number of `SDPBackend`: the first in PyTorch's order that can compute the call.

    Raises:
        RuntimeError: all kernels are switched off, or none of the others can compute the call. Warnings say why.
    """
    if not may_use_math() and not any(kernel.is_on() for kernel in _KERNELS.values()):
        return _ERROR
    for kernel in attention_order():
        if kernel == _MATH and may_use_math():
            return _MATH
        if kernel in _KERNELS and can_compute(kernel, q):
            return int(kernel)
    for number, known in _KERNELS.items():
        warnings.warn(f"{known.name} kernel not used because:", stacklevel=2)
        can_compute(number, q, warn=True)
    raise RuntimeError("No available kernel. Aborting execution.")


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) of the functions that say whether a kernel can compute a call."""
    owner = torch.backends.cuda
    for name, kernel in (("flash", _FLASH), ("efficient", _EFFICIENT), ("cudnn", _CUDNN)):
        if hasattr(owner, f"can_use_{name}_attention"):
            yield owner, f"can_use_{name}_attention", _can_use(getattr(owner, f"can_use_{name}_attention"), kernel)
    yield torch, "_fused_sdp_choice", _with_choice_of_nested(attention_choice)
    if hasattr(owner, "is_flash_attention_available"):
        yield owner, "is_flash_attention_available", lambda: True


def _with_choice_of_nested(real: Callable[..., int]) -> Callable[..., int]:
    """Wrap `torch._fused_sdp_choice`, so that it names CUDA's kernel for nested tensors. They do not call this function."""

    def choice(query: Tensor, *args: Any, **kwargs: Any) -> int:
        if not (query.is_nested and query.layout is torch.strided and query.is_cuda):
            return real(query, *args, **kwargs)
        if may_use_flash() and query.dtype in _HALVES:
            return _FLASH
        return _EFFICIENT if may_use_efficient() and query.dtype in (torch.float32, *_HALVES) else _MATH

    return choice


def _can_use(real: Callable[..., bool], kernel: int) -> Callable[..., bool]:
    def can_use(params: Any, debug: bool = False) -> bool:
        q = params.query
        if not q.is_cuda or q.is_nested:
            return real(params, debug)
        given = (q, params.key, params.value, params.attn_mask, params.dropout, params.is_causal, params.enable_gqa)
        return can_compute(kernel, Question(*given), warn=debug)

    return can_use


def fused_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """`aten._fused_sdp_choice`: CUDA's choice. Nothing waits."""
    return choose(Question(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))


def _library_computes(q: Question) -> bool:
    """Whether the CPU's fused kernel can compute a call, by PyTorch's rules. Sizes may be symbolic."""
    flat = all(t.dim() == 3 for t in q.tensors) and _LIBRARY_ADDS_BATCH
    if q.dropout or not (flat or all(t.dim() == 4 for t in q.tensors)):
        return False
    query, key, value = [(1, *t.shape) if flat else tuple(t.shape) for t in q.tensors]
    batch, heads, rows, width = query
    columns, of_keys = key[2], key[1]
    shared = q.gqa and isinstance(of_keys, int) and of_keys > 0 and heads % of_keys == 0
    fits = all(sizes[0] == batch and sizes[3] == width and sizes[1] == of_keys for sizes in (key, value))
    if not fits or value[2] != columns or not (shared or heads == of_keys):
        return False
    if any(isinstance(n, int) and not n for n in (rows, columns)):  # a symbolic size is never 0
        return False
    if any(t.stride(-1) != 1 and t.size(-1) != 1 for t in q.tensors):
        return False
    if q.mask is None:
        return True
    whole = (batch, heads, rows, columns)[4 - q.mask.dim() :]
    dims = (1, 2, 3, 4) if flat else (2, 4)  # PyTorch adds the missing dimensions to the mask, too
    return q.mask.dim() in dims and all(n in (1, of) for n, of in zip(q.mask.shape, whole, strict=True))


def _with_four_dimensions(t: Tensor) -> Tensor:
    return t[(None,) * (4 - t.dim())]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention`: one instruction if the CPU would use its fused kernel, else the decomposition.

    If the script has switched kernels off, other than all but the decomposition, CUDA's choice among the rest.
    """
    if is_zero_tensor(query) or is_zero_tensor(key) or is_zero_tensor(value):  # PyTorch would pass them without strides
        query, key, value = [t.clone() if is_zero_tensor(t) else t for t in (query, key, value)]
    q = Question(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel, of_library = _kernel_of(q, scale)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        q = q._replace(mask=torch.where(attn_mask, torch.zeros((), dtype=query.dtype, device="cpu"), -torch.inf))
    if kernel == _MATH:
        return _math(*q[:6], None, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]
    if of_library:
        return _computed_by_library(q, scale)
    if kernel == _FLASH:
        return _flash(*q.tensors, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    mask = None if q.mask is None else q.mask.expand(*query.shape[:3], key.size(2))
    fused = _efficient if kernel == _EFFICIENT else _cudnn
    found = fused(*q.tensors, mask, any(q.need_gradients), dropout_p, is_causal, scale=scale)
    return found[0]  # type: ignore[no-any-return]


def _kernel_of(q: Question, scale: float | None) -> tuple[int, bool]:
    """The kernel that computes a call, a number of `SDPBackend`, and whether it is the CPU's kernel of this name."""
    wraps = q.query.__class__ is not Tensor and is_wrapper(q.query)
    needs, mask_needs = q.need_gradients
    flash, math, others = may_use_flash(), may_use_math(), may_use_efficient() or may_use_cudnn()
    traced = is_traced(q.query) and not wraps
    # Tensors that wrap others, such as DTensor, know CUDA's kernels only.
    of_library = traced or (math and (flash or not others) and not wraps)
    if traced:  # sizes may be symbolic, so PyTorch cannot be asked for its choice
        kernel = _FLASH if not mask_needs and _library_computes(q) else _MATH
    elif of_library:
        kernel = _choice_of_library(q, scale, (needs, mask_needs, flash, math))
    else:
        _check(q)
        kernel = choose(q)
    if kernel == _ERROR:
        raise RuntimeError(
            "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the math "
            "kernel and the fused kernels."
        )
    if kernel == _FLASH and needs and q.query.dtype is torch.float64 and math:
        kernel = _MATH  # as on CUDA, whose fused kernels have no float64; only this one has second derivatives
    if kernel == _FLASH and not traced and not q.query.numel():
        kernel = _MATH  # the fused kernel divides by the number of heads
    if _learn_fused is not None and kernel == _FLASH and of_library and not traced and q.query.dim() != 3:
        _learn_fused(_ATTENTION)
    return kernel, of_library


def _choice_of_library(q: Question, scale: float | None, situation: tuple[bool, ...]) -> int:
    """PyTorch's choice for the same call on a CPU.

    Args:
        q: the call.
        scale: its scale.
        situation: what else the choice depends on: whether gradients are wanted, and which kernels are on.
    """
    query, key, value, mask, *more = q
    signature = (
        *(query.dtype, query.shape, query.stride()),
        *(key.dtype, key.shape, key.stride()),
        *(value.dtype, value.shape, value.stride()),
        None if mask is None else (mask.dtype, mask.shape, mask.stride()),
        *(*more, scale, situation),
    )
    choice = _choices.get(signature)
    if choice is not None:
        return choice
    if len(_choices) > _CHOICES_LIMIT:
        _choices.clear()
    _check(q)
    grad = torch.is_grad_enabled()
    stand_ins: list[Any] = [None if t is None else _like(t, grad and t.requires_grad) for t in q[:4]]
    # Ask with host tensors of the same kind. A wrong call raises PyTorch's own error here.
    choice = attention_choice(*stand_ins, q.dropout, q.causal, scale=scale, enable_gqa=q.gqa)
    if choice == _FLASH and query.dim() == 3:  # PyTorch asks again after it has added a dimension
        stand_ins = [None if t is None else _with_four_dimensions(t) for t in stand_ins]
        choice = attention_choice(*stand_ins, q.dropout, q.causal, scale=scale, enable_gqa=q.gqa)
    _choices[signature] = choice
    return choice


def _computed_by_library(q: Question, scale: float | None) -> Tensor:
    """The result of the CPU's fused kernel. Since torch 2.14, it also computes calls with one dimension less."""
    query, key, value, mask = *q.tensors, q.mask
    flat = query.dim() == 3
    if flat:
        query, key, value = map(_with_four_dimensions, (query, key, value))
        mask = None if mask is None else _with_four_dimensions(mask)
    found = _flash_of_library(query, key, value, q.dropout, q.causal, attn_mask=mask, scale=scale)[0]
    return found.squeeze(0) if flat else found  # type: ignore[no-any-return]


_composed = aten.scaled_dot_product_attention.default.decompose


def nested_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention` of nested tensors on any device: PyTorch's decomposition where it can compute the call.

    Of device tensors, the fused kernels compute calls that it refuses: with transposed parts, or one batch or head for all.
    """
    tensors = (query, key, value)
    given = (*tensors, attn_mask, dropout_p, is_causal)
    fused = {kernel for kernel, known in _KERNELS.items() if kernel != _CUDNN and known.is_on()}
    if query.dtype not in _HALVES:
        fused.discard(_FLASH)
    suits = attn_mask is None and query.dtype in (torch.float32, *_HALVES) and not is_causal
    counts = set() if query.is_cpu or not fused or not suits else {_batch_and_heads(t) for t in tensors}
    plain = len(counts) == 1 and all(t.is_nested and t.is_contiguous() for t in tensors)
    if not counts or None in counts or (plain and may_use_math()):
        return _composed(*given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    if _FLASH in fused:
        return _flash(*tensors, dropout_p, False, False, scale=scale)[0]  # type: ignore[no-any-return]
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _efficient(*tensors, None, needs, dropout_p, False, scale=scale)[0]  # type: ignore[no-any-return]


def _batch_and_heads(t: Tensor) -> tuple[int, int] | None:
    """Numbers of parts and heads; None if the parts have no heads, or different numbers, which no fused kernel takes."""
    try:
        return (t.size(0), t.size(1)) if t.dim() == 4 else None
    except RuntimeError:
        return None


def _check(q: Question) -> None:
    """Raise RuntimeError for calls that PyTorch refuses for every kernel."""
    query, key, value = tensors = q.tensors
    if any(t.dtype is not query.dtype for t in tensors):
        _refuse_as_library(*tensors)
    if any(t.device != query.device for t in tensors):
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if any(t.dim() < 2 for t in tensors):
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if q.mask is None:
        return
    if q.mask.dtype not in (torch.bool, torch.float32, query.dtype):
        _refuse_as_library(*tensors, q.mask)
    if q.causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")


def _like(t: Tensor, grad: bool) -> Tensor:
    """A host tensor with the same dtype, shape and strides. Its memory is never read or written."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu", requires_grad=grad)


def _refuse_as_library(*tensors: Tensor) -> None:
    """Raise PyTorch's error for dtypes that do not fit together. It has the names of dtypes in C++."""
    _composed(*[torch.empty([1] * t.dim(), dtype=t.dtype, device="cpu") for t in tensors])
    raise RuntimeError(f"attention does not take these dtypes together: {[t.dtype for t in tensors]}")
