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

#: Operators that may write to expanded tensors, because all elements get the same value.
FILLS = frozenset({"aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default", "aten._foreach_zero_.default"})


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
    if not written.numel() or not (_is_packed(written) and _is_packed(read)):
        return
    a, b = int(written.storage_offset()), int(read.storage_offset())
    begin, end = a * written.element_size(), (a + written.numel()) * written.element_size()
    first, last = b * read.element_size(), (b + read.numel()) * read.element_size()
    if begin < last and first < end and ((begin, end) != (first, last) or written.stride() != read.stride()):
        raise _shared_memory()


def _shared_memory() -> RuntimeError:
    return RuntimeError(
        "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
        "location. Please clone() the tensor before performing the operation."
    )


#: Operators of ATen's iterator without the tag of elementwise ones.
_ITERATED = frozenset({"floor_divide", "where"})


def is_iterated(facts: OpFacts) -> bool:
    """Whether ATen's iterator computes the operator, element by element."""
    return torch.Tag.pointwise in facts.op.tags or facts.op.overloadpacket.__name__ in _ITERATED


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
