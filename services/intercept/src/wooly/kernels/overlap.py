"""Tensors with several elements at the same address, such as expanded tensors: which operators may write to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from wooly_wis.program import Operand, Role

from wooly.devices import mixed_devices
from wooly.kernels.schema import Call, OpFacts
from wooly.storage import span
from wooly.torch_private import tree_leaves

#: Operators that may write to expanded tensors, because all elements at one address get the same value.
FILLS = frozenset(
    {
        *("aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default", "aten._foreach_zero_.default"),
        "aten.threshold_.default",
    }
)


def overlaps(t: Tensor) -> bool:
    """Whether elements of `t` share memory, as in expanded tensors."""
    return 0 in t.stride() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)) and t.numel() > 0


def without_overlap(t: Tensor) -> Tensor:
    """A view of `t` that contains each address only once. Only expanded tensors change."""
    if not overlaps(t):
        return t
    return t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)], t.stride())


def refuse_overlap(t: Tensor) -> None:
    """Check that `t` is not expanded, before a write.

    Raises:
        RuntimeError: `t` is expanded. It is ATen's error.
    """
    if overlaps(t):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def _is_packed(t: Tensor) -> bool:
    """Whether the elements of a tensor are in memory without gaps and without overlap."""
    return t.numel() == span(tuple(t.shape), t.stride()) and not overlaps(t)


def refuse_partial_overlap(written: Tensor, read: Tensor) -> None:
    """Check a copy between two tensors of one storage. ATen compares only tensors without gaps.

    Raises:
        RuntimeError: the tensors share some memory, but are not the same. It is ATen's error.
    """
    (begin, end), (first, last) = _range(written), _range(read)
    if _shares(written, read) and ((begin, end) != (first, last) or written.stride() != read.stride()):
        raise _shared_memory()


def refuse_common_memory(written: Tensor, read: Tensor) -> None:
    """Check a call whose operands may share no memory. ATen compares only tensors without gaps.

    Raises:
        RuntimeError: the tensors share memory. It is ATen's error.
    """
    if _in_one_buffer(written, read) and _shares(written, read):
        raise _shared_memory()


def _range(t: Tensor) -> tuple[int, int]:
    """The first byte of a tensor without gaps in its storage, and the first byte behind it."""
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + t.numel() * t.element_size()


def _shares(written: Tensor, read: Tensor) -> bool:
    """Whether two tensors of one storage share bytes. Tensors with gaps are not compared."""
    if not written.numel() or not (_is_packed(written) and _is_packed(read)):
        return False
    (begin, end), (first, last) = _range(written), _range(read)
    return begin < last and first < end


def _shared_memory() -> RuntimeError:
    return RuntimeError(
        "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
        "location. Please clone() the tensor before performing the operation."
    )


#: Operators of ATen's iterator without the tag of elementwise ones.
_ITERATED = frozenset(
    {
        *("elu", "floor_divide", "gelu", "gelu_backward", "hardshrink", "hardsigmoid", "hardsigmoid_backward"),
        *("hardswish", "hardtanh", "hardtanh_backward", "leaky_relu", "log_sigmoid_backward", "mish", "softplus"),
        *("softplus_backward", "softshrink", "threshold", "threshold_backward", "where"),
    }
)
#: Overloads with that tag that make their result contiguous.
_CONTIGUOUS = frozenset({"aten.mvlgamma.out", "aten.pow.Scalar_out"})


def is_iterated(facts: OpFacts) -> bool:
    """Whether ATen's iterator computes the operator, element by element."""
    tagged = torch.Tag.pointwise in facts.op.tags or facts.op.overloadpacket.__name__ in _ITERATED
    return tagged and facts.name not in _CONTIGUOUS


def must_fit(facts: OpFacts, call: Call) -> bool:
    """Whether a call reads one of its `out=` tensors and gives it another size, so that ATen refuses the call without a warning.

    Inference has one stand-in per argument, so kernels would resize the stand-in, with a warning, before `refuse_resize` raises.
    It is also true for some calls whose sizes do not fit together for another reason.
    """
    name_of = facts.op.overloadpacket.__name__
    if name_of not in ("addr", "cat") and not is_iterated(facts):
        return False
    read = [a for a in tree_leaves(call.args) if isinstance(a, Tensor)]
    for out in [a for name in facts.out_args for a in read if a is call.kwargs.get(name)]:
        try:
            if name_of == "cat" or torch.broadcast_shapes(*[a.shape for a in read]) != out.shape:
                return True
        except RuntimeError:
            return True
    return False


def refuse_resize(facts: OpFacts, call: Call, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that no `out=` tensor of another size than the result is also an argument, before `out=` tensors are resized.

    Elementwise operators, `addr` and `cat` of PyTorch refuse such a call. Other operators give the argument the size of the
    result before they read it, so that their results are undefined; they are not checked.

    Args:
        facts: the operator.
        call: the arguments.
        sizes: size of the result, for each `out=` tensor of another size.

    Raises:
        RuntimeError: an `out=` tensor is also an argument. It is ATen's error.
    """
    name_of = facts.op.overloadpacket.__name__
    iterated = is_iterated(facts)
    if not (iterated or name_of in ("addr", "cat")):
        return
    for name, shape in sizes.items():
        out = call.kwargs[name]
        read = [a for a in tree_leaves(call.args) if isinstance(a, Tensor) and _in_one_buffer(a, out)]
        if name_of != "addr":
            for a in read:
                refuse_partial_overlap(out, a)
        if not any(a is out for a in read):
            continue
        if iterated:
            raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(shape)}")
        if name_of == "cat":
            raise _shared_memory()
        if out.dim() != 2:
            raise RuntimeError(f"2D tensor expected, got {out.dim()}D tensor for input")
        v1, v2 = call.args[1:3]
        raise RuntimeError(f"size mismatch, input: {list(out.shape)}, v1: {list(v1.shape)}, v2: {list(v2.shape)}")


def _in_one_buffer(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0)


def _written_tensors(facts: OpFacts, call: Call) -> Iterator[Tensor]:
    for name in facts.written:
        for t in tree_leaves(call.kwargs[name] if name in call.kwargs else call.args[facts.positions[name]]):
            if isinstance(t, Tensor):
                yield t


def refuse_writes_on_host(facts: OpFacts, call: Call) -> None:
    """Check that a call on the device does not write a tensor on the host.

    Raises:
        RuntimeError: it does. It is CUDA's error for mixed devices.
    """
    for t in _written_tensors(facts, call):
        if t.is_cpu:
            raise mixed_devices([t])


def refuse_overlaps(facts: OpFacts, call: Call) -> None:
    """Check that a call does not write to an expanded tensor.

    Raises:
        RuntimeError: the call writes to an expanded tensor. It is ATen's error.
    """
    if facts.mutable and facts.name not in FILLS:
        for t in _written_tensors(facts, call):
            refuse_overlap(t)


#: Maximum number of operands of a call that is checked. Kernels for more operands (fused optimizers) do not check.
_MAX_OPERANDS = 8


def may_overlap(facts: OpFacts, operands: Sequence[Operand], written: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of operands that ATen might refuse if they were in the same buffer: a written one and another one.

    Elementwise operators may write to the tensor that they read. Operators on lists compare only tensors of the same position, so
    the executor checks them.

    Args:
        facts: the operator.
        operands: the operands of its form.
        written: positions of the operands that the call writes.
    """
    if facts.each_alone or len(operands) > _MAX_OPERANDS:
        return ()
    elementwise = torch.Tag.pointwise in facts.op.tags
    found = []
    for w in written:
        a = operands[w].view
        for k, operand in enumerate(operands):
            b = operand.view
            if k == w or operand.role is Role.OUT or a is None or b is None or (elementwise and a == b):
                continue
            if a.offset < b.end and b.offset < a.end:
                found.append((w, k))
    return tuple(found)
