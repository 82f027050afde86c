"""The kernel of all operators on sparse tensors: redispatched to the container's kernel, recorded as a call, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from wooly_wis.dtypes import BY_LABEL
from wooly_wis.sparse import (
    DYNAMIC,
    NAMESPACE,
    OPERATORS,
    SCHEMAS,
    DenseResult,
    SparseFacts,
    parse_results,
    results_text,
)

from wooly.dtypes import DTYPES, TORCH_DTYPES
from wooly.errors import RemoteOperationError
from wooly.kernels.generic import Generic
from wooly.kernels.sparse.arguments import Encoded, components, encode, is_sparse
from wooly.kernels.sparse.broadcasting import broadcast_to
from wooly.kernels.sparse.containers import is_container_operator
from wooly.kernels.sparse.trial import Found, attempt, signature
from wooly.torch_private import (
    OpOverload,
    overload_name,
    raw_device,
    redispatch_sparse_host,
    schema_of,
)

aten = torch.ops.aten
#: For each key of sparse device tensors, the key of sparse host tensors.
HOST_KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
#: Operators whose result has the indices of an argument, and the position of that argument.
_SAME_INDICES = {"sparse_mask": 1}
#: Products of a matrix. CUDA's take float16 and bfloat16 and add in float32; those of the CPU do not take them for all layouts.
_PRODUCTS = frozenset(("mm", "addmm", "mv", "addmv", "_sparse_sparse_matmul"))
_SHORT = (torch.float16, torch.bfloat16)
#: Operators on batches of compressed tensors and dense tensors that CUDA has. The result is dense, and so are the operands here.
_OF_BATCHES = {
    **dict.fromkeys(("add", "add_"), (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)),
    **dict.fromkeys(("bmm", "baddbmm"), (torch.sparse_csr, torch.sparse_csc)),
}
#: In-place operators on the values of compressed tensors.
_FILLING = ("fill_", "normal_")
#: Operators whose text announces the layouts of their results, so that nothing waits for the executor.
_ANNOUNCED = ("dense", "values")
#: Operators that check the elements of a tensor, of which a trial has none.
_CHECKS = ("_validate_compressed_sparse_indices",)
#: Maximum number of remembered trials; a full cache is cleared.
_MAX_TRIALS = 4096


class SparseCalls:
    """Makes the kernels of operators on sparse tensors.

    Args:
        generic: makes kernels that record a call.
    """

    def __init__(self, generic: Generic) -> None:
        # A fragment, because an executor in the same process defines the same operators.
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        record = {}
        for name, schema in SCHEMAS.items():
            if not hasattr(getattr(torch.ops, NAMESPACE), name):
                self._library.define(schema, tags=(torch.Tag.dynamic_output_shape,) if name in DYNAMIC else ())
            if name in _ANNOUNCED:
                self._library.impl(name, _announced, "Meta")
            if name == "update":
                self._library.impl(name, _nothing, "Meta")
            record[name] = generic.kernel(getattr(getattr(torch.ops, NAMESPACE), name).default)
        self._record = record
        self._trials: dict[tuple[Any, ...], Found] = {}
        #: The in-place operators whose new tensor is computed now.
        self._in_progress: set[OpOverload] = set()

    def kernel(self, op: OpOverload, key: str) -> Callable[..., Any]:
        """Make the kernel of an operator for a dispatch key (of `HOST_KEYS`)."""
        packet = op.overloadpacket.__name__
        if packet == "_sparse_broadcast_to":
            return broadcast_to
        if str(op) == "aten.triangular_solve.X":
            return _solve_triangular
        if is_container_operator(packet):
            return redispatch_sparse_host(op, HOST_KEYS[key])

        def run(*args: Any, **kwargs: Any) -> Any:
            return self(op, *args, **kwargs)

        if str(op) in ("aten.add.Tensor", "aten.sub.Tensor"):
            return _summed(packet, run)
        if packet in ("mul", "mul_", "div", "div_"):
            return _scaled(packet, run)
        if str(op) == "aten.sparse_mask.default":
            return _masked(run)
        if str(op) == "aten.sparse_sampled_addmm.default":
            return _sampled(run, self._try)
        if packet.removesuffix("_") in _PRODUCTS:
            return _widened(op, run)
        return run

    def __call__(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Call an operator of the closed list on the executor.

        Raises:
            NotImplementedError: the operator is not supported for sparse tensors.
        """
        target = _written(op, args, kwargs)
        if target is not None and is_sparse(target):
            return self._in_place(op, target, args, kwargs)
        layouts = _OF_BATCHES.get(op.overloadpacket.__name__)
        if layouts is not None and _has_batch_and_dense(args, layouts):
            return op(*[a.to_dense() if _is_batch(a) else a for a in args], **kwargs)
        if op.overloadpacket.__name__ == "_spsolve":  # PyTorch's builds for CUDA do not have it either
            raise RuntimeError(
                "Calling linear solver with sparse tensors requires compiling PyTorch with CUDA cuDSS and is not supported in "
                "ROCm build."
            )
        if str(op) not in OPERATORS:
            raise unsupported(op)
        call = encode(op, args, kwargs)
        if target is not None:
            self._try(op, args, kwargs)
            self._record["update"](call.call.text(), target, call.tensors, call.numbers)
            return target
        if op.overloadpacket.__name__ in _CHECKS:
            return self._dynamic(call)
        found = self._try(op, args, kwargs)
        if found.dense is not None:
            results = self._record["dense"](call.call.text(), results_text(found.dense), call.tensors, call.numbers)
            return results[0] if len(schema_of(op).returns) == 1 else tuple(results)
        pattern = _SAME_INDICES.get(op.overloadpacket.__name__)
        if pattern is not None and (args[pattern].layout is torch.sparse_coo or not is_sparse(args[0])):
            return self._of_pattern(args[pattern], args[0].dtype, call)
        return self._dynamic(call)

    def _try(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        key = signature(op, args, kwargs)
        found = self._trials.get(key)
        if found is None:
            try:
                found = attempt(op, args, kwargs)
            except NotImplementedError as e:
                raise unsupported(op, str(e).split("\n", 1)[0]) from None
            if len(self._trials) >= _MAX_TRIALS:
                self._trials.clear()
            self._trials[key] = found
        return found

    def _of_pattern(self, pattern: Tensor, dtype: torch.dtype, call: Encoded) -> Tensor:
        """Call an operator whose result has the indices of `pattern`: nothing waits."""
        layout = torch.empty(components(pattern)[1].shape, dtype=dtype, device="meta")
        announced = DenseResult(tuple(layout.shape), layout.stride(), DTYPES[dtype].label)
        (own,) = self._record["values"](call.call.text(), results_text([announced]), call.tensors, call.numbers)
        return _with_values(pattern, own)

    def _dynamic(self, call: Encoded) -> Any:
        """Call an operator whose result has a number of elements that only the executor knows, and wait for it.

        Raises:
            RuntimeError: the arguments are not valid.
        """
        try:
            compressed, plain, values, facts = self._record["sparse"](call.call.text(), call.tensors, call.numbers)
        except RemoteOperationError as e:
            if "not implemented for" in e.message:  # the kernel does not support the dtype
                raise NotImplementedError(e.message) from None
            raise
        if facts is None:
            return None
        known = SparseFacts.of_shape(tuple(facts.shape))
        if compressed is None:
            return _coo(plain, values, known.size, known.coalesced)
        layout = getattr(torch, known.layout.value)
        return aten._sparse_compressed_tensor_unsafe(
            compressed, plain, values, known.size, dtype=values.dtype, layout=layout, device=raw_device(values)
        )

    def _in_place(self, op: OpOverload, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute a new tensor and put its components into `target`.

        Raises:
            NotImplementedError: the operator has no form that makes a new tensor.
        """
        packet = op.overloadpacket.__name__
        overload = overload_name(op)
        if packet in _FILLING and target.layout is not torch.sparse_coo:
            op(components(target)[1], *args[1:], **kwargs)
            return target
        functional = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
        if not packet.endswith("_") or functional is None:
            raise unsupported(op, "out= cannot be a sparse tensor; use the result instead")
        if op in self._in_progress:  # PyTorch makes the new tensor by a copy and this operator
            raise unsupported(op)
        self._in_progress.add(op)
        try:
            result = functional(*args, **kwargs)
        finally:
            self._in_progress.discard(op)
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {_name(result.dtype)} can't be cast to the desired output type {_name(target.dtype)}"
            )
        if result.dtype is not target.dtype:
            if result.layout is torch.sparse_coo:
                result = result.coalesce()  # as on CUDA: sums are rounded, not their terms
            result = _with_values(result, components(result)[1].to(target.dtype))
        target.copy_(result)
        return target


def _announced(call: str, results: str, tensors: list[Tensor], numbers: list[Any]) -> list[Tensor]:
    """The results of a call without data."""
    return [
        torch.empty_strided(r.sizes, r.strides, dtype=TORCH_DTYPES[BY_LABEL[r.dtype]], device="meta")
        for r in parse_results(results)
    ]


def _nothing(call: str, self: Tensor, tensors: list[Tensor], numbers: list[Any]) -> None:
    """A call without data that writes a tensor."""


def _coo(indices: Tensor, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors(  # type: ignore[no-any-return]
        indices.shape[0],
        values.dim() - 1,
        size,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=raw_device(values),
        is_coalesced=coalesced,
    )


def _summed(packet: str, record: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a sum or difference. Like CUDA, it joins the elements of two COO tensors, so that nothing waits.

    CUDA adds sparse tensors in float16, and the CPU does not: if not all is joined, they are added in float32. PyTorch adds each
    compressed tensor to itself, also those whose layouts it cannot add: the indices stay.
    """
    add = getattr(torch, packet)

    def run(a: Any, b: Any, **kwargs: Any) -> Any:
        if packet == "add" and isinstance(a, Tensor) and a.is_cpu and a.dim() and not is_sparse(a):
            raise RuntimeError("add: expected 'self' to be a CUDA tensor, but got a CPU tensor")  # CUDA's error
        if a is b and is_sparse(a) and a.layout is not torch.sparse_coo:
            values = components(a)[1]
            return _with_values(a, add(values, values, **kwargs))
        if not (is_sparse(a) and is_sparse(b)):
            return record(a, b, **kwargs)
        alpha = kwargs.get("alpha", 1)
        if isinstance(alpha, torch.SymFloat):  # it stands for a number on the device
            alpha = float(alpha)
        if _can_be_joined(a, b, alpha):
            return _joined(a, b, alpha if packet == "add" else -alpha)
        if torch.result_type(a, b) is not torch.float16:
            return record(a, b, **kwargs)
        return record(a.float(), b.float(), **kwargs).half()

    return run


def _is_batch(a: Any) -> bool:
    """Whether an argument is a batch of compressed tensors."""
    return is_sparse(a) and a.layout is not torch.sparse_coo and components(a)[0][0].dim() > 1


def _has_batch_and_dense(args: tuple[Any, ...], layouts: tuple[torch.layout, ...]) -> bool:
    """Whether some tensors are batches of compressed tensors of these layouts, and the others are dense."""
    sparse = [a for a in args if isinstance(a, Tensor) and is_sparse(a)]
    dense = any(isinstance(a, Tensor) and a.dim() and not is_sparse(a) for a in args)
    return dense and bool(sparse) and all(_is_batch(a) and a.layout in layouts for a in sparse)


def _sampled(record: Callable[..., Any], try_on_host: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of `aten.sparse_sampled_addmm`. The matrices of a batch are computed one by one, as on CUDA.

    Args:
        record: the kernel for matrices.
        try_on_host: raises PyTorch's error for arguments that do not fit.
    """

    def run(t: Tensor, a: Tensor, b: Tensor, **scales: Any) -> Any:
        if not _is_batch(t) or is_sparse(a) or is_sparse(b):
            return record(t, a, b, **scales)
        try_on_host(aten.sparse_sampled_addmm.default, (t, a, b), scales)
        (rows, columns), values = components(t)
        parts = [each.flatten(0, -2) for each in (rows, columns, values)]
        found = []
        for *part, left, right in zip(*parts, a.flatten(0, -3), b.flatten(0, -3), strict=True):
            matrix = aten._sparse_compressed_tensor_unsafe(
                *part, t.shape[-2:], dtype=t.dtype, layout=t.layout, device=raw_device(values)
            )
            found.append(components(record(matrix, left, right, **scales))[1])
        return _with_values(t, torch.stack(found).view(values.shape) if found else values.clone())

    return run


def _can_be_joined(a: Tensor, b: Tensor, alpha: Any) -> bool:
    """Whether the sum of two tensors has the elements of both."""
    return (
        a.layout is b.layout is torch.sparse_coo
        and a.shape == b.shape
        and raw_device(a) == raw_device(b)
        and a.sparse_dim() == b.sparse_dim()
        and _elements(a) > 0 < _elements(b)
        and torch.bool not in (a.dtype, b.dtype)
        and (
            isinstance(alpha, int) or a.is_floating_point() or b.is_floating_point() or a.is_complex() or b.is_complex()
        )
    )


def _elements(t: Tensor) -> int:
    """Number of elements of a COO tensor."""
    return int(components(t)[0][0].shape[1])


def _joined(a: Tensor, b: Tensor, factor: Any) -> Tensor:
    """`a` + `factor` * `b` as the elements of both, which are not added yet, unless there are more than the tensor has places."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    (ours,), values = components(a)
    (theirs,), added = components(b)
    added = added.to(dtype)
    joined = torch.cat([values.to(dtype), added if factor == 1 else added.mul(factor)])
    result = _coo(torch.cat([ours, theirs], 1), joined, tuple(a.shape), coalesced=False)
    return result if _elements(result) <= a.numel() else result.coalesce()


def _widened(op: OpOverload, record: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a product, which computes short floating-point numbers in float32 and rounds the result once."""
    functional = getattr(aten, op.overloadpacket.__name__.removesuffix("_")).default

    def wide(a: Any) -> Any:
        return _with_values(a, components(a)[1].float()) if is_sparse(a) else a.float() if isinstance(a, Tensor) else a

    def run(*args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
        if len(dtypes) != 1 or not dtypes.issubset(_SHORT):
            return record(*args, **kwargs)
        target = _written(op, args, kwargs)
        given = {name: a for name, a in kwargs.items() if name != "out"}
        result = functional(*[wide(a) for a in args], **given).to(*dtypes)
        return result if target is None else target.copy_(result)

    return run


def _solve_triangular(
    b: Tensor,
    a: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
    *,
    X: Tensor,  # ATen's names
    M: Tensor,
) -> tuple[Tensor, Tensor]:
    """`aten.triangular_solve` with a sparse matrix, which is made dense. The CPU's kernel for sparse ones may end the process."""
    if not components(a)[1].numel():
        X.fill_(torch.nan)
    else:
        X.copy_(aten.triangular_solve.default(b, a.to_dense(), upper, transpose, unitriangular)[0])
    return X, M


def _masked(record: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of `sparse_mask`. A compressed tensor that is its own mask is the result, in each layout."""

    def run(a: Any, mask: Any) -> Any:
        return a if a is mask and a.layout is not torch.sparse_coo else record(a, mask)

    return run


def _scaled(packet: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a product or quotient. A number scales the values, and the indices stay."""
    scale = getattr(torch.Tensor, packet)

    def run(a: Any, b: Any, **kwargs: Any) -> Any:
        if packet == "mul" and is_sparse(b) and isinstance(a, Tensor) and not is_sparse(a) and not a.dim():
            a, b = b, a
        if not is_sparse(a) or (isinstance(b, Tensor) and (b.dim() or is_sparse(b))):
            return otherwise(a, b, **kwargs)
        if packet.endswith("_"):
            scale(components(a)[1], b, **kwargs)
            return a
        if kwargs.get("rounding_mode") is not None and a.layout is torch.sparse_coo:
            a = a.coalesce()  # a rounded quotient of a sum is not the sum of rounded quotients
        return _with_values(a, scale(components(a)[1], b, **kwargs))

    return run


def _with_values(a: Tensor, values: Tensor) -> Tensor:
    """A sparse tensor with the indices of `a`."""
    indices = [i.clone() for i in components(a)[0]]
    if a.layout is torch.sparse_coo:
        return _coo(indices[0], values, tuple(a.shape), a.is_coalesced())
    return aten._sparse_compressed_tensor_unsafe(  # type: ignore[no-any-return]
        *indices, values, a.shape, dtype=values.dtype, layout=a.layout, device=raw_device(values)
    )


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that the operator writes."""
    for declared, a in zip(schema_of(op).arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            return a  # type: ignore[no-any-return]
    return kwargs.get("out")


def _name(dtype: torch.dtype) -> str:
    return torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")


def unsupported(op: OpOverload, why: str = "") -> NotImplementedError:
    """Make the error for an operator that is not supported for sparse tensors."""
    return NotImplementedError(
        f"{op} is not supported on the wooly device for sparse tensors{': ' + why if why else ''}; make the tensors dense "
        "(to_dense()), or compute on the CPU: x.cpu()"
    )
