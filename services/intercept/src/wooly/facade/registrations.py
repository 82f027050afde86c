"""Kernels in Python that PyTorch and scripts register for CUDA's dispatch keys. They hold for the keys of the device, too.

These are the kernels of autocast and autograd that `torch.library` registers, those under the key CUDA for PyTorch's own
operators, and all kernels of operators on functions (`torch.ops.higher_order`, such as flex attention). Kernels under the key
CUDA for other operators are found by their calls (`wooly.kernels.extensions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from wooly.kernels.cells import COMPOSED
from wooly.kernels.tracing import Untraced
from wooly.torch_private import (
    DispatchKey,
    HigherOrderOperator,
    OpOverload,
    destroy,
    destroy_together,
    exists,
    falls_through,
    has_kernel,
    higher_order_operators,
    is_for_cuda_alone,
    is_registered_in_python,
    kernel_before,
    operators_for_cuda_alone,
    python_kernels,
    python_registrations,
    qualified_name,
    redispatch_to,
    short_name,
    without_autocast,
)

aten = torch.ops.aten

#: CUDA's keys, and those of the device.
_KEYS = {
    getattr(DispatchKey, of_cuda): getattr(DispatchKey, of_device)
    for of_cuda, of_device in (
        ("CUDA", "PrivateUse1"),
        ("AutogradCUDA", "AutogradPrivateUse1"),
        ("AutocastCUDA", "AutocastPrivateUse1"),
    )
}
#: The same, as `torch.library` names them.
_NAMES = {
    "Autocast": "AutocastPrivateUse1",
    "AutocastCUDA": "AutocastPrivateUse1",
    "AutogradCUDA": "AutogradPrivateUse1",
}
#: Keys under which a kernel of an operator holds for all devices whose own key has none. "" is that for all devices and autograd.
_FOR_ALL = {
    "": ("AutogradPrivateUse1", "PrivateUse1"),
    "CompositeImplicitAutograd": ("AutogradPrivateUse1", "PrivateUse1"),
    "Autograd": ("AutogradPrivateUse1",),
}
#: Namespaces of PyTorch's own operators.
_OF_PYTORCH = ("aten", "prims", "quantized")

#: Operators that the device records as one instruction, and PyTorch decomposes on CUDA: names of those that are then called.
_PARTS: dict[OpOverload, frozenset[str]] = {
    aten.linear.default: frozenset(
        {"t", "addmm", "mm", "bmm", "matmul", "mv", "addmv", "dot", "baddbmm", "add", "add_", "unsqueeze", "squeeze_"}
    ),
    aten.cross_entropy_loss.default: frozenset(
        {
            "log_softmax",
            "_log_softmax",
            "nll_loss",
            "nll_loss2d",
            "nll_loss_nd",
            "nll_loss_forward",
            "nll_loss2d_forward",
        }
    ),
    aten._scaled_dot_product_attention_math.default: frozenset(
        {"matmul", "bmm", "mm", "baddbmm", "softmax", "_softmax", "_safe_softmax", "add", "add_", "mul", "dropout"}
    ),
    aten.rms_norm.default: frozenset({"_fused_rms_norm", "pow", "mean", "add", "rsqrt", "mul"}),
    **dict.fromkeys(COMPOSED, frozenset({"linear", "addmm", "mm", "add", "mul", "sigmoid", "tanh", "relu"})),
}
#: Libraries of the device's kernels that are those of libraries from before the facade was installed.
_libraries: list[torch.library.Library] = []
#: The library of the device's kernels beside each library of a script that has kernels for CUDA. Both end together.
_beside: WeakKeyDictionary[torch.library.Library, torch.library.Library] = WeakKeyDictionary()
_AUTOCAST = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]


class _Copied:
    """A kernel of CUDA's key, registered for the device's. A kernel that is registered for the device itself replaces it."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*args, **kwargs)


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value), for kernels that are registered later; register those that exist."""
    yield from _patches_of_library()
    yield from _patches_of_operators_on_functions()


def _patches_of_library() -> Iterator[tuple[Any, str, Any]]:
    register: Callable[..., None] = torch.library.Library.impl
    kernel_of: Callable[..., Any] = torch.library.get_kernel

    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        register(library, op_name, fn, dispatch_key, **options)
        if isinstance(library, Untraced) or is_for_cuda_alone(fn):  # the former are the device's own kernels
            return
        for key, kernel in _copies(library.ns, op_name, fn, dispatch_key or library.dispatch_key):
            register(_library_beside(library), op_name, kernel, key, **{**options, "allow_override": True})
            if key == "PrivateUse1":
                _call_parts(library, op_name, register)

    def get_kernel(op: Any, dispatch_key: Any) -> Any:
        key = DispatchKey.__members__.get(dispatch_key) if isinstance(dispatch_key, str) else dispatch_key
        return kernel_of(op, _KEYS.get(key, dispatch_key))

    while _libraries:  # of the last time
        destroy(_libraries.pop())
    for of_cuda in ("AutocastCUDA", "AutogradCUDA"):
        for op in python_registrations(of_cuda, _NAMES[of_cuda]):
            library = torch.library.Library(op.namespace, "IMPL")
            _libraries.append(library)
            kernel = redispatch_to(op, of_cuda)
            register(library, op, without_autocast(kernel) if of_cuda == "AutocastCUDA" else kernel, _NAMES[of_cuda])
    others = Untraced.of_cuda | operators_for_cuda_alone()
    for op in python_registrations("CUDA", None):
        if op.namespace not in _OF_PYTORCH or short_name(op) in others:
            continue
        if not any(is_registered_in_python(op.name(), "PrivateUse1", of) for of in _beside.values()):
            library = torch.library.Library(op.namespace, "IMPL")
            _libraries.append(library)
            register(library, op, _until_removed(op), "PrivateUse1", with_keyset=True)
            _call_parts(library, op, register)
    yield torch.library.Library, "impl", impl
    yield torch.library, "get_kernel", get_kernel


def _copies(space: str, op_name: Any, fn: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the device under which a kernel that was registered for `key` holds, too, and the kernel."""
    if key in _NAMES:
        # A kernel of autocast excludes CUDA's key before it calls the operator again.
        again = _NAMES[key] == "AutocastPrivateUse1" and fn is not torch.library.fallthrough_kernel
        yield _NAMES[key], without_autocast(fn) if again else fn
    elif space in _OF_PYTORCH and key == "CUDA":
        yield "PrivateUse1", fn
        name = qualified_name(space, op_name)
        differentiated = any(is_registered_in_python(name, of) for of in ("AutogradCUDA", "Autograd"))
        if not differentiated and _is_recorded_whole(name) and has_kernel(name, "CompositeImplicitAutograd"):
            # With a kernel for CUDA, PyTorch does not decompose the operator any more.
            yield "AutogradPrivateUse1", torch.library.fallthrough_kernel
    elif space in _OF_PYTORCH and key in _FOR_ALL and _is_recorded_whole(qualified_name(space, op_name)):
        for ours in _FOR_ALL[key]:
            yield ours, fn


def _is_recorded_whole(name: str) -> bool:
    """Whether the device has a kernel above autograd for an operator, which need not exist."""
    return exists(name) and has_kernel(name, "AutogradPrivateUse1")


def _library_beside(library: torch.library.Library) -> torch.library.Library:
    """The library of the device's kernels beside a library of a script, which may accept the kernels of one key only."""
    found = _beside.get(library)
    if found is None:
        found = _beside[library] = torch.library.Library(library.ns, "IMPL")
        destroy_together(library, found)
    return found


def _call_parts(library: torch.library.Library, op_name: Any, register: Callable[..., None]) -> None:
    """Let operators that are recorded whole call their parts, one of which has a script's kernel now."""
    space, _, part = qualified_name(library.ns, op_name).partition(".")[0].partition("::")
    ours = _beside.get(library, library)
    for op, parts in _PARTS.items():
        if space == "aten" and part in parts and not is_registered_in_python(op.name(), "AutogradPrivateUse1", ours):
            decompose = COMPOSED.get(op, op.decompose)
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                register(ours, op, decompose, key, allow_override=True)


def _until_removed(op: OpOverload) -> Callable[..., Any]:
    """The kernel of `op` for CUDA, which a library has registered before; the device's own after the library's end."""
    name, of_cuda, before = op.name(), redispatch_to(op, "CUDA"), kernel_before(op, "PrivateUse1")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if is_registered_in_python(name, "CUDA"):
            return of_cuda(*args, **kwargs)
        return before(keys, *args, **kwargs)

    return run


def _patches_of_operators_on_functions() -> Iterator[tuple[Any, str, Any]]:
    register, pass_by = HigherOrderOperator.py_impl, HigherOrderOperator.fallthrough

    def copy_kernel(op: HigherOrderOperator, key: Any, kernel: Callable[..., Any]) -> None:
        # A kernel of autocast excludes CUDA's key before it calls the operator again.
        copied = _Copied(without_autocast(kernel) if key == _AUTOCAST else kernel)
        if isinstance(python_kernels(op).get(key), _Copied):
            del python_kernels(op)[key]
        if key not in python_kernels(op):
            register(op, key)(copied)

    def py_impl(op: HigherOrderOperator, key: Any) -> Any:
        def inner(kernel: Callable[..., Any]) -> Any:
            if key in _KEYS.values() and isinstance(python_kernels(op).get(key), _Copied):
                del python_kernels(op)[key]
            result = register(op, key)(kernel)
            if key in _KEYS:
                copy_kernel(op, _KEYS[key], kernel)
            return result

        return inner

    def fallthrough(op: HigherOrderOperator, key: Any) -> None:
        pass_by(op, key)
        if key in _KEYS:
            pass_by(op, _KEYS[key])

    for op in higher_order_operators():
        for of_cuda, of_device in _KEYS.items():
            if of_cuda in python_kernels(op):
                copy_kernel(op, of_device, python_kernels(op)[of_cuda])
            elif falls_through(op, of_cuda) and of_device not in python_kernels(op):
                pass_by(op, of_device)
    yield HigherOrderOperator, "py_impl", py_impl
    yield HigherOrderOperator, "fallthrough", fallthrough
