"""Patches for tensors, storages, modules and constructors that use CUDA before they call the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] # not in its __all__
from torch.overrides import get_default_nowrap_functions

from wooly.device import current
from wooly.devices import NAME, shown
from wooly.facade.names import CUDA, naming_cuda, to_wooly, with_device
from wooly.facade.printing import host_part
from wooly.ipc import is_received
from wooly.storage import DEVICE_MASK, ID_SHIFT, MAX_DEVICES, OFFSET_MASK, address_of
from wooly.torch_private import (
    DeviceContext,
    apply_of_modules,
    compatible_data_patch,
    conversion_patches,
    lazy_clone_patches,
    make_wrapper_subclass,
    methods_of_lazy_tensors,
    moves_data_in_place,
    own_tensors,
    parsing_patch,
    printing_patches,
    raw_device,
    raw_is_cuda,
    raw_storage_device,
    set_data,
    tensor_data,
    tensor_grad,
)

Patch = tuple[Any, str, Any]

#: Constructors whose C++ code uses the device guard before it calls the dispatcher.
_GUARDED = (
    "tensor",
    "as_tensor",
    "scalar_tensor",
    "range",
    "tril_indices",
    "triu_indices",
    "sparse_coo_tensor",
    "sparse_compressed_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_bsr_tensor",
    "sparse_bsc_tensor",
)


#: Factories with `out=`. PyTorch compares the device of `out` with `device=` before it calls the dispatcher.
_FACTORIES_INTO = (
    *("arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "zeros"),
)


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for tensors and their constructors."""
    allowed = methods_of_lazy_tensors()
    methods = dict[str, Any]()
    for owner, name, value in _tensor_patches():
        methods[name] = value
        yield (owner, name, value)
    # PyTorch passes a method to `__torch_function__` as the object that it finds on the class.
    more = [methods[m.__name__] for m in allowed if m.__name__ in methods]
    yield (UninitializedTensorMixin, "_allowed_methods", [*allowed, *more])
    for name in _GUARDED:
        yield (torch, name, with_device(getattr(torch, name)))
    yield (torch.nested, "nested_tensor", with_device(torch.nested.nested_tensor))
    yield (torch, "asarray", naming_cuda(with_device(torch.asarray)))
    yield (torch, "tensor_split", naming_cuda(torch.tensor_split))
    for name in _FACTORIES_INTO:
        yield (torch, name, _into(getattr(torch, name)))
    yield from conversion_patches(_to_named)
    yield parsing_patch(shown)
    yield (torch.UntypedStorage, "byteswap", _byteswap_storage)
    yield (torch.UntypedStorage, "resize_", _resize_storage)
    yield compatible_data_patch()
    convert = apply_of_modules() if moves_data_in_place() else _swapping(apply_of_modules())
    yield (torch.nn.Module, "_apply", _keeping_lazy(convert))
    real_init = DeviceContext.__init__

    def init(self: Any, device: Any) -> None:
        real_init(self, to_wooly(torch.device(device)))

    yield (DeviceContext, "__init__", init)
    real_default = torch.get_default_device

    @functools.wraps(real_default)
    def get_default_device() -> torch.device:
        device = real_default()
        return torch.device(CUDA, device.index) if device.type == NAME else device

    yield (torch, "get_default_device", get_default_device)
    yield from printing_patches(host_part)
    yield from lazy_clone_patches(_is_lazy, _address)


def _is_lazy(t: torch.Tensor) -> bool | None:
    """Whether a device tensor is a lazy clone or its source, and was not written since. None: it is no device tensor."""
    if raw_device(t).type != NAME:
        return None
    at = address_of(t)
    return at >> ID_SHIFT in current().devices.recorders[at >> ID_SHIFT & DEVICE_MASK].lazy_clones


def _address(t: torch.Tensor) -> int | None:
    """``buffer id << 40 | byte offset`` of the memory that a device tensor reads. None: it is no device tensor."""
    if raw_device(t).type != NAME:
        return None
    at = address_of(t)
    lazy_clones = current().devices.recorders[at >> ID_SHIFT & DEVICE_MASK].lazy_clones
    return lazy_clones.holder(at >> ID_SHIFT) << ID_SHIFT | at & OFFSET_MASK


def _blocking(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `Tensor.to` with `non_blocking` (the first flag) set to False. Otherwise PyTorch would try to pin memory."""
    for i, a in enumerate(args):
        if a is True or a is False:
            return (*args[:i], False, *args[i + 1 :])
    return args


def _byteswap_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """`UntypedStorage.byteswap`, which supports only host memory."""
    if raw_storage_device(storage).type == NAME:
        raise NotImplementedError(
            "byteswap() is not supported for storages on the wooly device; copy the storage to the CPU first"
        )
    _real_byteswap(storage, dtype)


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`UntypedStorage.resize_`: changes the size, in bytes, in place."""
    if raw_storage_device(storage).type != NAME or not isinstance(size, int):
        return _real_resize(storage, size)  # type: ignore[no-any-return]
    if is_received(storage):
        raise RuntimeError("Trying to resize storage that is not resizable")
    current().storages.resize_storage(storage, size)
    return storage


_real_resize: Any = torch.UntypedStorage.resize_
_real_byteswap: Any = torch.UntypedStorage.byteswap


def _swapping(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module._apply` for a PyTorch that cannot exchange the memory of parameters. It swaps the contents of Python objects
    instead, so that an optimizer keeps its parameters. PyTorch raises an error if a graph holds a parameter.
    """
    future = torch.__future__

    @functools.wraps(real)
    def apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        if future.get_swap_module_params_on_conversion() or future.get_overwrite_module_params_on_conversion():
            return real(module, fn, recurse)
        future.set_swap_module_params_on_conversion(True)
        try:
            return real(module, fn, recurse)
        finally:
            future.set_swap_module_params_on_conversion(False)

    return apply


def _keeping_lazy(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module._apply` so that it keeps lazy parameters (without a shape) lazy."""

    @functools.wraps(real)
    def apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        waiting = [
            (of, name, type(t), t.requires_grad)
            for of in own_tensors(module)
            for name, t in of.items()
            if isinstance(t, UninitializedTensorMixin)
        ]

        def convert(t: torch.Tensor) -> torch.Tensor:
            """Call `fn`. It cannot copy a tensor without a shape on the device, so it gets an empty one in its place."""
            if isinstance(t, UninitializedTensorMixin):
                refuse = t.share_memory_
                t = torch.empty(0, dtype=t.dtype, device=t.device)
                t.share_memory_ = refuse  # type: ignore[method-assign]
            converted: torch.Tensor = fn(t)
            return converted

        result = real(module, convert if waiting else fn, recurse)
        for of, name, kind, requires_grad in waiting:
            t = of[name]
            if t is not None and not isinstance(t, UninitializedTensorMixin):
                of[name] = kind(requires_grad=requires_grad, device=t.device, dtype=t.dtype)
        return result

    return apply


def _set_grad(t: torch.Tensor, value: torch.Tensor | None) -> None:
    """`t.grad = value`. PyTorch's error contains the type of a device of another type than the tensor's.

    Raises:
        RuntimeError: the gradient has another device, shape, dtype or layout than the tensor.
    """
    try:
        tensor_grad.__set__(t, value)
    except RuntimeError as e:
        if f"'{NAME}'" not in str(e):
            raise
        raise RuntimeError(str(e).replace(f"'{NAME}'", f"'{CUDA}'")) from None


def _to_named(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator that converts tensors, so that the device "cuda" means a Wooly device."""

    @functools.wraps(convert)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = to_wooly(kwargs["device"])
        return convert(*[to_wooly(a) if isinstance(a, (torch.device, str)) else a for a in args], **kwargs)

    return call


def _into(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `factory` so that `device="cuda"` is accepted together with an `out=` tensor on the device."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None and "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        return factory(*args, **kwargs)

    return call


def _wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
    """`Tensor._make_wrapper_subclass`, with its device by keyword or by position."""
    if "device" in kwargs:
        kwargs["device"] = to_wooly(kwargs["device"])
    return make_wrapper_subclass(*[to_wooly(a) if isinstance(a, torch.device) else a for a in args], **kwargs)


class _Replaced(property):
    """A property in place of a descriptor of PyTorch, with another setter.

    It has the descriptor's names: TorchDynamo reads them from `Tensor.grad` while it is imported.
    """

    def __init__(self, descriptor: Any, setter: Callable[[torch.Tensor, Any], None]) -> None:
        super().__init__(descriptor.__get__, setter, descriptor.__delete__)
        self.__name__ = descriptor.__name__
        self.__objclass__ = descriptor.__objclass__


def _tensor_patches() -> Iterator[Patch]:
    tensor = torch.Tensor
    shown = [torch.device(CUDA, index) for index in range(MAX_DEVICES)]

    def device(t: torch.Tensor) -> torch.device:
        """Device of the tensor; a Wooly device is reported as "cuda"."""
        real = raw_device(t)
        return shown[real.index] if real.type == NAME else real

    def is_cuda(t: torch.Tensor) -> bool:
        """Whether the tensor is on a Wooly device or on CUDA."""
        return raw_device(t).type == NAME or raw_is_cuda(t)

    yield (tensor, "device", property(device))
    yield (tensor, "is_cuda", property(is_cuda))
    yield (tensor, "data", property(tensor_data.__get__, set_data, tensor_data.__delete__))
    grad = _Replaced(tensor_grad, _set_grad)
    get_default_nowrap_functions().add(grad.__get__)  # as PyTorch's own getter: `t.grad is t.grad` for subclasses
    yield (tensor, "grad", grad)
    # A subclass that wraps a device tensor passes the tensor's device. A wrapper on CUDA itself would abort in autograd.
    yield (tensor, "_make_wrapper_subclass", staticmethod(_wrapper_subclass))
    real_to, real_type, dtype = tensor.to, tensor.type, torch.dtype

    @functools.wraps(real_to)
    def to(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and args[0].__class__ is dtype and not kwargs:  # the usual call in a model
            return real_to(t, args[0])
        if args and isinstance(args[0], (str, torch.device, int)):
            args = (to_wooly(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        if "non_blocking" in kwargs:
            kwargs["non_blocking"] = False
        elif len(args) > 1:
            args = _blocking(args)
        return real_to(t, *args, **kwargs)

    @functools.wraps(tensor.cuda)
    def cuda(
        t: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        target = to_wooly(CUDA if device is None else device)
        return real_to(t, target, memory_format=memory_format)

    @functools.wraps(real_type)
    def type_(t: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        name = dtype if isinstance(dtype, str) else ""
        if dtype is None:
            said = real_type(t)
            return said.replace("torch.wooly.", "torch.cuda.") if isinstance(said, str) else said
        if name.startswith("torch.cuda."):
            plain = real_type(torch.empty(0), name.replace("torch.cuda.", "torch.")).dtype
            return real_to(t, to_wooly(CUDA), plain)
        return real_type(t, dtype, non_blocking, **kwargs)

    yield (tensor, "to", to)
    yield (tensor, "cuda", cuda)
    yield (tensor, "type", type_)
    yield (tensor, "get_device", lambda t: t.device.index if t.is_cuda else -1)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        yield (tensor, name, with_device(getattr(tensor, name)))
    real_new_tensor = with_device(tensor.new_tensor)

    @functools.wraps(tensor.new_tensor)
    def new_tensor(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:  # PyTorch would take the index from its device guard, which supports only one
            kwargs["device"] = t.device
        made: torch.Tensor = real_new_tensor(t, *args, **kwargs)
        return made

    yield (tensor, "new_tensor", new_tensor)
    for name in ("numpy", "set_", "tensor_split"):
        yield (tensor, name, naming_cuda(getattr(tensor, name)))
