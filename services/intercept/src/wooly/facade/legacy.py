"""The old tensor types of `torch.cuda`, such as `torch.cuda.FloatTensor` and `torch.cuda.sparse.FloatTensor`.

Programs call them to make tensors, pass them to `isinstance` and `Tensor.type`, and set one as the default type. In a build of
PyTorch without CUDA, the types exist, but PyTorch refuses each use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch

from wooly.facade.names import CUDA

Patch = tuple[Any, str, Any]

#: Data type by the name of its tensor type, without "Tensor".
KINDS = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


def _device_of(device: Any) -> torch.device:
    """The device of a new tensor.

    Raises:
        RuntimeError: `device` is no device of CUDA.
    """
    where = torch.device(CUDA) if device is None else torch.device(device)
    if where.type != CUDA:
        raise RuntimeError(f"legacy constructor expects device type: {CUDA} but device type: {where.type} was passed")
    return where


class TensorType(type):
    """The class of the tensor types. A tensor type has no instances of its own: calling it makes a `torch.Tensor`."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.is_cuda
            and instance.dtype is cls.dtype
            and instance.layout is cls.layout
        )

    def __call__(cls, *arguments: Any, device: Any = None) -> torch.Tensor:
        """Make a tensor from sizes, from data, or from a tensor of this type; without arguments, an empty one.

        Raises:
            TypeError: a tensor is of another type.
        """
        where = _device_of(device)
        if len(arguments) == 1 and not isinstance(arguments[0], (Integral, torch.Size)):
            data = arguments[0]
            if not isinstance(data, torch.Tensor):
                return torch.tensor(data, dtype=cls.dtype, device=where)
            if not isinstance(data, cls):
                raise TypeError(f"expected torch.cuda.{cls.__name__} (got {data.type()})")
            return data.detach()
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, device=where)

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}'>"


class SparseTensorType(TensorType):
    """The class of the types of sparse tensors."""

    is_sparse = True
    layout = torch.sparse_coo

    def __call__(cls, *arguments: Any, device: Any = None) -> torch.Tensor:
        """Make a tensor from indices, values and, if given, its size, or an empty one from a size.

        The dtype is that of the values, as in PyTorch, whatever the type is.

        Raises:
            TypeError: the size is a tuple or list.
        """
        where = _device_of(device)
        if arguments and isinstance(arguments[0], torch.Tensor):
            check = torch.sparse.check_sparse_tensor_invariants.is_enabled()  # without the warning that nobody chose
            return torch.sparse_coo_tensor(*arguments, device=device, check_invariants=check)
        if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) and not isinstance(arguments[0], torch.Size):
            raise TypeError(
                "torch.sparse.SparseTensor(sequence) only accepts sizes.  Please use torch.sparse_coo_tensor() or "
                "construct a strided tensor and convert it to sparse via to_sparse."
            )
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, layout=torch.sparse_coo, device=where)


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for the tensor types, and for the functions that take a type."""
    types = {}
    for kind, dtype in KINDS.items():
        name = f"{kind}Tensor"
        types[dtype] = TensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        yield (torch.cuda, name, types[dtype])
        if hasattr(torch.cuda.sparse, name):
            sparse = SparseTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda.sparse"})
            yield (torch.cuda.sparse, name, sparse)
    real_type, real_default, real_new = torch.Tensor.type, torch.set_default_tensor_type, torch.Tensor.__new__

    def new(*of_class: Any, **kwargs: Any) -> Any:
        """Make a tensor as `torch.Tensor(...)` does if the default type is one of CUDA.

        The import of Dynamo takes it for PyTorch's own function if its signature names no argument.
        """
        cls, *arguments = of_class
        if vars(torch)["set_default_tensor_type"] is not set_default_tensor_type:  # the patches were removed
            call_real_constructor()
            return real_new(cls, *arguments, **kwargs)
        made = types[torch.get_default_dtype()](*arguments, **kwargs)
        return made if cls is torch.Tensor else made.as_subclass(cls)

    def call_real_constructor() -> None:
        if "__new__" in vars(torch.Tensor):
            del torch.Tensor.__new__

    @functools.wraps(real_type)
    def type_(t: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if isinstance(dtype, TensorType):
            return t.to(CUDA, dtype.dtype)
        return real_type(t, dtype, non_blocking, **kwargs)

    @functools.wraps(real_default)
    def set_default_tensor_type(t: Any) -> None:
        name = t if isinstance(t, str) else ""
        if name.startswith("torch.cuda."):
            t = getattr(torch.cuda, name.removeprefix("torch.cuda."), None)
        if isinstance(t, TensorType):
            if t.is_sparse:
                raise TypeError("only dense types are supported as the default type")
            if not t.dtype.is_floating_point:
                raise TypeError(f"only floating-point types are supported as the default type (got {t!r})")
            torch.set_default_dtype(t.dtype)
            torch.set_default_device(CUDA)
            torch.Tensor.__new__ = new  # type: ignore[method-assign]  # it ignores the default device
            return
        real_default(t)
        call_real_constructor()
        if torch.get_default_device().type == CUDA:  # a type of the host also moves the default back
            torch.set_default_device(None)

    yield (torch.Tensor, "type", type_)
    yield (torch, "set_default_tensor_type", set_default_tensor_type)
