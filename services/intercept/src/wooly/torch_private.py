"""All private names of PyTorch that the client uses. Check this file against each new release of PyTorch.

Checked against torch 2.11 to 2.15. This file does not depend on other parts of Wooly.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from types import CellType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
import torch._meta_registrations as meta_registrations
import torch._ops
import torch._prims_common as prims_common
import torch._prims_common.wrappers as prims_wrappers
import torch.autograd.forward_ad as forward_ad
import torch.jit._builtins as torchscript
import torch.utils._device as device_contexts
import torch.utils._python_dispatch as python_dispatch
import torch.utils._pytree as pytree
from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined] # its stub is not complete
from torch._prims_common import suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] # its stub does not know it
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TensorBase: Any = torch._C.TensorBase
#: PyTorch's own getters. They stay available after the facade has replaced the properties of `torch.Tensor`.
_device: Callable[[torch.Tensor], torch.device] = TensorBase.device.__get__
raw_data_ptr: Callable[[torch.Tensor], int] = TensorBase.data_ptr
raw_is_cuda: Callable[[torch.Tensor], bool] = TensorBase.is_cuda.__get__

raw_storage_device: Callable[[torch.UntypedStorage], torch.device] = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]
#: `swap_memory(a, b)`: two storages exchange their memory and sizes; one of them must be empty. None before torch 2.13.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", None
)
raw_to: Callable[..., torch.Tensor] = TensorBase.to


def raw_device(t: torch.Tensor) -> torch.device:
    """The device of a tensor, as PyTorch knows it. The facade shows another one to scripts."""
    found = _device(t)
    if found.type != "cuda":
        return found
    # A mode is active, such as that of `torch.set_default_device`. The getter has asked it, and it returns the shown device.
    with torch._C.DisableTorchFunction():
        return _device(t)


#: The finalizer of each `torch.library.Library`: it removes the library's kernels from PyTorch's tables.
remove_kernels: Callable[..., None] = torch.library._del_library
#: `from_dlpack(capsule) -> Tensor`, without the device checks of the Python wrapper.
from_dlpack: Callable[[object], torch.Tensor] = torch._C._from_dlpack

#: `reinterpret(t, sizes, strides, storage_offset_increment)`: a new tensor on the storage of `t`, without a copy (takes 0.7 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: The memory format that ATen's kernels derive from the strides of a tensor.
suggested_format: Callable[[torch.Tensor], torch.memory_format] = suggest_memory_format

#: Number of dispatch modes (`TorchDispatchMode`) that are active in this thread.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_fake(t: torch.Tensor) -> bool:
    """Whether the tensor stands for one that a trace computes with, and so has no memory."""
    if t.__class__ is torch.Tensor and not dispatch_modes():
        return False
    from torch._subclasses.fake_tensor import is_fake as has_no_memory

    fake: bool = has_no_memory(t)
    return fake


CPU_KEYS = DispatchKeySet(DispatchKey.CPU)

#: An overload of an operator, and an operator with all its overloads.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
#: The C++ classes behind `torch.Generator`, `torch.Stream` and `torch.Event`. The facade replaces the public names.
BaseGenerator = torch._C.Generator
BaseStream = torch._C.Stream
BaseEvent = torch._C.Event
#: PyTorch's own descriptors of `Tensor.data` (see `set_data`, too) and `Tensor.grad`. The facade puts others on `torch.Tensor`.
tensor_data: Any = TensorBase.data
tensor_grad: Any = TensorBase.grad
#: The number of the device type CUDA, for streams and events.
CUDA_DEVICE_TYPE = int(torch._C._autograd.DeviceType.CUDA.value)

#: `aten._convolution`: a convolution with arguments that choose among CUDA's algorithms. `torch.jit.trace` can record it.
convolution_with_flags: Callable[..., torch.Tensor] = torch._convolution
#: A view that reads as the negative of a tensor.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
#: Whether a tensor is a zero without memory. Autograd makes such tensors.
is_zero_tensor: Callable[[torch.Tensor], bool] = TensorBase._is_zerotensor
is_view: Callable[[torch.Tensor], bool] = TensorBase._is_view
#: `make_wrapper_subclass(cls, size, ..., device=...)`: a tensor of that class without memory, which holds other tensors.
make_wrapper_subclass: Callable[..., Any] = TensorBase._make_wrapper_subclass
#: `make_subclass(cls, data, requires_grad)`: a tensor of that class on the memory of `data`.
make_subclass: Callable[..., Any] = TensorBase._make_subclass

#: The base class of modes. An active mode sees each operator that is called.
TorchDispatchMode = python_dispatch.TorchDispatchMode
DeviceContext = device_contexts.DeviceContext
#: All functions that make tensors. The first call fills a cache. Device contexts look up functions in this cache by identity.
device_constructors: Callable[[], Any] = device_contexts._device_constructors
#: The object with PyTorch's own functions on tensors, such as `empty_like`.
TENSOR_FUNCTIONS: Any = torch._C._VariableFunctions
#: Whether a mode sees the calls of functions now.
is_function_mode_active: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

#: Functions on trees: nested tuples, lists and dicts with values as leaves.
TreeSpec = pytree.TreeSpec
tree_flatten, tree_unflatten = pytree.tree_flatten, pytree.tree_unflatten
tree_leaves, tree_map = pytree.tree_leaves, pytree.tree_map

#: For `scaled_dot_product_attention`: the available kernels, whether PyTorch may use them, in which order it asks them, and its
#: choice for given arguments.
SDPBackend = torch._C._SDPBackend
may_use_flash: Callable[[], bool] = torch._C._get_flash_sdp_enabled
may_use_math: Callable[[], bool] = torch._C._get_math_sdp_enabled
may_use_efficient: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
may_use_cudnn: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled
attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
attention_choice: Callable[..., int] = torch._fused_sdp_choice

#: `alert_not_deterministic(name)` raises the error of a kernel that is not deterministic, or warns, as the switch says.
alert_not_deterministic: Callable[[str], None] = prims_common.alert_not_deterministic

#: The number that the next operation of this thread gets in its autograd graph. The numbers of a thread only grow.
next_operation: Callable[[], int] = torch._C._autograd._get_sequence_nr


def running_operation() -> int | None:
    """The number of the operation whose backward or hook runs in this thread; None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def deterministic_mode() -> tuple[bool, bool]:
    """Whether deterministic algorithms are on, and whether operators without one only warn."""
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def deterministic_fill() -> bool:
    """Whether memory that operators leave undefined is filled while deterministic algorithms are on."""
    return torch._C._get_deterministic_fill_uninitialized_memory()


def deterministic_switches() -> list[tuple[Any, str]]:
    """The functions that change these switches, as (owner, name)."""
    return [(torch._C, "_set_deterministic_algorithms"), (torch._C, "_set_deterministic_fill_uninitialized_memory")]


#: `fp32_precision("cuda", op)` with op "matmul", "conv" or "rnn": the precision of float32 in CUDA's libraries ("tf32", "ieee",
#: "none").
fp32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
#: Whether cuBLAS may sum parts of a product in float16 (or bfloat16), and whether it may split the sums.
fp16_reduction: Callable[[], tuple[bool, bool]] = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
bf16_reduction: Callable[[], tuple[bool, bool]] = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
#: Whether cuBLAS may sum products of float16 in float16.
fp16_accumulation: Callable[[], bool] = torch._C._get_cublas_allow_fp16_accumulation
#: Whether cuDNN must use deterministic algorithms.
prefers_deterministic_cudnn: Callable[[], bool] = torch._C._get_cudnn_deterministic


#: The libraries of CUDA that a script may prefer, by the function of `torch.backends.cuda` that sets them.
PREFERABLE: dict[str, dict[str, Any]] = {
    "preferred_linalg_library": torch.backends.cuda._LinalgBackends,
    "preferred_blas_library": torch.backends.cuda._BlasBackends,
}


def flag_switches() -> list[tuple[Any, str]]:
    """The functions that change these flags, as (owner, name). Properties of `torch.backends.cudnn` keep their own functions."""
    names = (
        *(
            "_set_fp32_precision_setter",
            "_set_float32_matmul_precision",
            "_set_cublas_allow_tf32",
            "_set_cudnn_allow_tf32",
        ),
        *("_set_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
        *("_set_cublas_allow_fp16_accumulation", "_set_cudnn_deterministic"),
    )
    properties = vars(type(torch.backends.cudnn))
    return [
        *[(torch._C, name) for name in names],
        *[(properties[name], "setter") for name in ("allow_tf32", "deterministic")],
    ]


def convolution_flags() -> dict[str, bool]:
    """The arguments of `aten._convolution` that `aten.convolution` does not have, as CUDA would set them now."""
    return {
        "benchmark": torch._C._get_cudnn_benchmark(),
        "deterministic": torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms(),
        "cudnn_enabled": torch._C._get_cudnn_enabled(),
        "allow_tf32": fp32_precision("cuda", "conv") == "tf32",
    }


@contextlib.contextmanager
def deterministic_off() -> Iterator[None]:
    """Switch deterministic algorithms off in the block, for all threads. Operators on the host then give no alerts."""
    on, warn_only = deterministic_mode()
    set_mode = _set_deterministic
    set_mode(False)
    try:
        yield
    finally:
        set_mode(on, warn_only=warn_only)


_set_deterministic: Callable[..., None] = torch._C._set_deterministic_algorithms


def schema_of(op: OpOverload) -> torch._C.FunctionSchema:
    """The arguments and results that an overload declares."""
    return op._schema


def overload_name(op: OpOverload) -> str:
    """Name of an overload without the operator: `default`, `Tensor`, …"""
    return op._overloadname


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its own parameters and its own buffers, by name."""
    return module._parameters, module._buffers


def apply_of_modules() -> Callable[..., Any]:
    """The method by which `Module.to` and similar methods convert all tensors of a module."""
    return torch.nn.Module._apply


def methods_of_lazy_tensors() -> Any:
    """Methods that may be called on a parameter without a shape."""
    return UninitializedTensorMixin._allowed_methods


class _TakenErrors:
    """Errors in flight that the device guard took, per thread.

    When an exception of Python's (of a hook, of a kernel) leaves a step of a backward, PyTorch asks the device guard for its type
    while Python's error is still set. A Python method that returns with an error set fails, and PyTorch ends the process. So the
    guard takes the error. The backward then ends without one, and `in_calling_thread` raises what was taken.
    """

    def __init__(self) -> None:
        self._errors: dict[int, BaseException] = {}
        # Nothing may be looked up or converted before the error is taken, so everything is made here.
        self.places = tuple([ctypes.c_void_p() for _ in range(3)])
        self.references = tuple([ctypes.byref(place) for place in self.places])

    def keep(self) -> None:
        """Keep the error that was just taken. The first error of a thread stays."""
        ctypes.pythonapi.PyErr_NormalizeException(*self.references)
        _, value, trace = [None if not p.value else ctypes.cast(p, ctypes.py_object).value for p in self.places]
        for place in self.places:
            ctypes.pythonapi.Py_DecRef(place)
            place.value = None
        if isinstance(value, BaseException):
            self._errors.setdefault(threading.get_ident(), value.with_traceback(trace))

    def pop(self) -> BaseException | None:
        """The error that was taken from this thread."""
        return self._errors.pop(threading.get_ident(), None)


_taken = _TakenErrors()


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """PyTorch's guard for backends in Python. Its only method may be called while Python's error is set."""

    def type_(
        self,
        kind: Any = torch._C._autograd.DeviceType.PrivateUse1,
        fetch: Any = ctypes.pythonapi.PyErr_Fetch,
        references: Any = _taken.references,
        place: Any = _taken.places[0],
    ) -> Any:
        fetch(*references)
        if place:
            _taken.keep()
        return kind


def register_backend(name: str, module: Any) -> None:
    """Make `name` the PrivateUse1 device type, with `module` as `torch.<name>`."""
    _setup_privateuseone_for_python_backend(name, backend_module=module, device_guard=_DeviceGuard())


def warn_of_resize(out: torch.Tensor, shape: Any) -> None:
    """Warn as ATen does when an `out=` tensor that has elements is resized."""
    if out.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not match "
            f"the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch release "
            "outputs will not be resized unless they have zero elements. You can explicitly reuse an out tensor t by "
            "resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=3,
        )


def use_resize_warning_of_aten() -> None:
    """Make PyTorch's meta kernels in Python warn of a resized `out=` with the text that its C++ kernels use."""

    def check(out: torch.Tensor, shape: Any) -> bool:
        if tuple(out.shape) == tuple(shape):
            return False
        warn_of_resize(out, shape)
        return True

    for module in (prims_wrappers, meta_registrations):
        setattr(module, "_resize_output_check", check)  # noqa: B010 - the modules' stubs do not know it


def avoid_dynamo_import() -> None:
    """Stop PyTorch's reference kernels, which infer shapes, from importing Dynamo.

    At its first call, each reference kernel asks Dynamo not to trace it. This imports Dynamo, which takes more than a second of
    CPU in every program, even if the program compiles nothing. After this function, the kernels ask only if Dynamo is imported
    already.
    """
    if "torch._dynamo" in sys.modules:
        return
    asking = torch._disable_dynamo(avoid_dynamo_import).__code__  # type: ignore[attr-defined]
    kernels = [n for n in sys.modules if n.startswith(("torch._refs", "torch._decomp"))]
    found = [f for name in kernels for f in vars(sys.modules[name]).values() if isinstance(f, FunctionType)]
    seen = set(found)
    while found:  # decorators may be nested
        outer = found.pop()
        inner = [c.cell_contents for c in outer.__closure__ or () if c != _EMPTY]
        inner = [f for f in inner if isinstance(f, FunctionType)]
        if outer.__code__ is asking:
            for kernel in inner:
                if not hasattr(kernel, _PROMISE):
                    setattr(kernel, _PROMISE, _until_dynamo(outer, kernel))
        found += [f for f in inner if f not in seen]
        seen.update(inner)


def quick_check_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, value) that stops `torch._check` from importing SymPy for conditions that are plainly true.

    Meta kernels check their arguments with it. The import takes a third of the time that `import torch` takes.
    """
    real: Any = torch._check_with

    @wraps(real)
    def check_with(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            real(error_type, cond, message)

    yield torch, "_check_with", check_with


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module, or of any module, also calls functions of the user."""
    own = vars(module)
    hooks = [own.get(name) for name in ("_forward_hooks", "_forward_pre_hooks")]
    return any(hooks) or "forward" in own or bool(_GLOBAL_HOOKS or _GLOBAL_PRE_HOOKS)


_GLOBAL_HOOKS: dict[int, Any] = torch.nn.modules.module._global_forward_hooks
_GLOBAL_PRE_HOOKS: dict[int, Any] = torch.nn.modules.module._global_forward_pre_hooks

_EMPTY = CellType()
#: Attribute in which a reference kernel keeps the function that Dynamo made from it.
_PROMISE = "__dynamo_disable"


def _until_dynamo(asking: Callable[..., Any], kernel: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return kernel(*args, **kwargs)
        if getattr(kernel, _PROMISE, None) is call:  # Dynamo is imported: restore PyTorch's own behaviour
            delattr(kernel, _PROMISE)
        return asking(*args, **kwargs)

    return call


def short_name(op: torch._ops.OpOverload) -> str:
    """The name of an ATen operator without its namespace, as `torch.library` takes it."""
    return str(op.name()).removeprefix("aten::")


def redispatch_cpu(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs the CPU kernel of `op` on tensors of any device. Correct only if the kernel reads metadata alone."""
    call = op._handle.redispatch_boxed

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(CPU_KEYS, *args, **kwargs)

    return run


def redispatch_nested_host(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs the kernel of `op` for nested host tensors on tensors of any device.

    Correct only if the kernel reads metadata alone.
    """
    call, keys = op._handle.redispatch_boxed, DispatchKeySet(DispatchKey.NestedTensorCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(keys, *args, **kwargs)

    return run


def jagged_attention() -> tuple[Any, str, Callable[..., bool]]:
    """Where PyTorch asks whether its memory-efficient attention can take jagged tensors: module, name and function."""
    from torch.nested._internal import sdpa

    name = "can_use_efficient_attention"
    return sdpa, name, getattr(sdpa, name)


def with_values(nested: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A nested tensor with the sizes of `nested`, strided or jagged, and other values."""
    if nested.layout is torch.jagged:
        from torch.nested._internal.ops import extract_kwargs

        made: torch.Tensor = type(nested)(values, **extract_kwargs(nested))
        return made
    aten = torch.ops.aten
    facts = (
        aten._nested_tensor_size(nested),
        aten._nested_tensor_strides(nested),
        aten._nested_tensor_storage_offsets(nested),
    )
    return torch._nested_view_from_buffer(values, *facts)


def redispatch_sparse_host(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """A callable that runs the kernel of `op` for sparse host tensors on tensors of any device.

    Correct only if the kernel reads no memory itself.

    Args:
        op: the operator.
        key: ``SparseCPU`` or ``SparseCsrCPU``.
    """
    call, keys = op._handle.redispatch_boxed, DispatchKeySet(getattr(DispatchKey, key))

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(keys, *args, **kwargs)

    return run


def redispatch_quantised_host(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs the kernel of `op` for quantised host tensors on tensors of any device.

    Correct only if the kernel reads no memory itself.
    """
    call, keys = op._handle.redispatch_boxed, DispatchKeySet(DispatchKey.QuantizedCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(keys, *args, **kwargs)

    return run


_allocator_lock = threading.Lock()
_NO_QUANTISED = (
    f"quantized tensors are not supported on the wooly device with torch {torch.__version__} on this system; install a release "
    "from 2.11 to 2.15 for Linux or macOS, or quantize on the CPU: x.cpu()"
)


@cache
def _allocators() -> tuple[int, Callable[[Any], None]]:
    """The address of the allocator of meta tensors, and a function that sets the allocator of the device type PrivateUse1.

    Raises:
        NotImplementedError: this build of PyTorch does not export the functions.
    """
    try:
        library = ctypes.CDLL(next(str(p) for p in (Path(torch.__file__).parent / "lib").glob("libc10.*")))
        find, put = (
            library._ZN3c1012GetAllocatorERKNS_10DeviceTypeE,
            library._ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh,
        )
    except (AttributeError, OSError, StopIteration):
        raise NotImplementedError(_NO_QUANTISED) from None
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.POINTER(ctypes.c_int8)]
    put.restype, put.argtypes = None, [ctypes.c_int8, ctypes.c_void_p, ctypes.c_uint8]
    ours = int(DeviceType.PrivateUse1.value)
    return find(ctypes.byref(ctypes.c_int8(int(DeviceType.Meta.value)))), lambda allocator: put(ours, allocator, 0)


#: Byte offset of `device_` (type and index, one byte each) in c10::StorageImpl: after the vtable, 2 counts and 3 pointers.
_STORAGE_DEVICE_AT = 40


def without_memory(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Call `make`, which makes a quantised tensor of `device` with PyTorch's own code. The tensor has no memory yet.

    PyTorch asks the device type's allocator for memory, which is C++ code. Wooly has none, so the allocator of meta tensors takes
    its place during the call. It gives no memory. No other code allocates memory of this device type in C++. The storage without
    memory then gets the device.

    Raises:
        NotImplementedError: this build of PyTorch does not export the functions that set allocators, or its storages have another
            memory layout.
    """
    nothing, put = _allocators()
    with _allocator_lock:
        put(nothing)
        try:
            made = make()
        finally:
            put(None)
    address = made.untyped_storage()._cdata
    there = (ctypes.c_int8 * 2).from_address(address + _STORAGE_DEVICE_AT)
    if tuple(there) != (int(DeviceType.Meta.value), -1):
        raise NotImplementedError(_NO_QUANTISED)
    there[:] = [int(DeviceType.PrivateUse1.value), device.index]
    return made


_HOST = torch.device("cpu")


class _Device(ctypes.Structure):
    """c10::Device."""

    _fields_ = (("type", ctypes.c_int8), ("index", ctypes.c_int8))


#: Number of the slot for `__init__` in CPython's stable interface, and its byte offset in a type since Python 3.8.
_INIT, _INIT_AT = 60, 296
_slot_of = ctypes.pythonapi.PyType_GetSlot
_slot_of.restype, _slot_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]


class _WithInit:
    """A class whose slot for `__init__` has CPython's function that looks up `__init__` and calls it."""

    def __init__(self) -> None:
        """Do nothing."""


class NumberedDevices:
    """Lets `torch.device(0)` be a device of type `shown`, as in a build with CUDA.

    PyTorch's constructor, which is C++ code, takes the type of the registered backend. Attributes of `torch.device` cannot be
    set, so it gets an `__init__` through its dictionary and its slot. This `__init__` corrects the type of the new device.

    Args:
        real: name of the registered backend.
        shown: type of device in its place.
    """

    def __init__(self, real: str, shown: str) -> None:
        number = int(getattr(DeviceType, shown.upper()).value)
        named = (str, torch.device, NoneType)

        def init(self: torch.device, *args: Any, **kwargs: Any) -> None:
            if not isinstance(args[0] if args else kwargs.get("device"), named) and self.type == real:
                _memory_of(self).type = number

        self._init = init
        self._before: int | None = None

    def activate(self) -> None:
        """Change the constructor, if it is not changed. Without effect where types or devices have another memory layout."""
        if self._before is None and _has_known_layout():
            self._before = _slot_of(torch.device, _INIT)
            _set_init(_slot_of(_WithInit, _INIT), self._init)

    def deactivate(self) -> None:
        """Undo `activate`."""
        if self._before is not None:
            _set_init(self._before, None)
            self._before = None


def _memory_of(device: torch.device) -> _Device:
    """Type and index of a device where Python's object has them: after the object's header."""
    return _Device.from_address(id(device) + object.__basicsize__)


def _has_known_layout() -> bool:
    device = torch.device("meta", 3)
    if torch.device.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Device) or device is torch.device("meta", 3):
        return False
    found = _memory_of(device)
    slot = ctypes.c_void_p.from_address(id(torch.device) + _INIT_AT).value
    return (found.type, found.index) == (int(DeviceType.Meta.value), 3) and slot == _slot_of(torch.device, _INIT)


def _set_init(slot: int, init: Callable[..., None] | None) -> None:
    """Set the slot for `__init__` of `torch.device`, and its entry in the dictionary."""
    (entries,) = gc.get_referents(vars(torch.device))
    if init is None:
        entries.pop("__init__", None)
    else:
        entries["__init__"] = init
    ctypes.c_void_p.from_address(id(torch.device) + _INIT_AT).value = slot
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))


#: `c10::TensorImpl::_change_backend_component_keys(c10::Device)` as Linux and macOS name it, and as Windows does.
_CHANGE_BACKEND = (
    "_ZN3c1010TensorImpl30_change_backend_component_keysENS_6DeviceE",
    "?_change_backend_component_keys@TensorImpl@c10@@QEAAXUDevice@2@@Z",
)


@cache
def _kinds() -> dict[str, int]:
    """The numbers of the device types of the CPU and of PrivateUse1, by name."""
    return {
        _HOST.type: int(DeviceType.CPU.value),
        torch._C._get_privateuse1_backend_name(): int(DeviceType.PrivateUse1.value),
    }


@cache
def _change_backend() -> Callable[[torch.Tensor, torch.device], None]:
    """A function that changes in place which device's kernels PyTorch calls for a tensor. It does not touch the tensor's memory.

    Raises:
        NotImplementedError: this build of PyTorch does not export the function.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("*c10.*"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            for name in _CHANGE_BACKEND:
                change = getattr(library, name, None)
                if change is not None:
                    change.restype, change.argtypes = None, [ctypes.c_void_p, _Device]
                    return lambda t, device: change(t._cdata, _Device(_kinds()[device.type], 0))
    raise NotImplementedError(
        f"a tensor cannot move between host and device in place with torch {torch.__version__} on this system; "
        "install a release from 2.11 to 2.15 for Linux or macOS"
    )


def moves_data_in_place() -> bool:
    """Whether this build of PyTorch can exchange the memory of tensors on different devices; see `set_data`."""
    try:
        _change_backend()
    except NotImplementedError:
        return False
    return True


def _as_host(t: torch.Tensor) -> torch.Tensor:
    """An alias of a device tensor for which PyTorch calls the CPU's kernels. Only its properties may be used."""
    alias: torch.Tensor = make_subclass(torch.Tensor, t, device_for_backend_keys=_HOST)
    return alias


def _moves_in_place(t: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether both are tensors of the CPU or of PrivateUse1, at least one of them the latter, without a wrapper around them."""
    kinds = {raw_device(t).type, raw_device(value).type}
    return kinds <= _kinds().keys() and kinds != {_HOST.type} and not is_wrapper(t) and not is_wrapper(value)


def have_compatible_data(t: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `t.data = value` is possible: `torch._has_compatible_shallow_copy_type`, for PrivateUse1 as for CUDA."""
    if _leaves_components(t, value):
        return False
    if _compatible_data(t, value):
        return True
    if not _moves_in_place(t, value) or isinstance(t, UninitializedTensorMixin) or not moves_data_in_place():
        return False
    return _compatible_data(_as_host(t), _as_host(value))


def set_data(t: torch.Tensor, value: torch.Tensor) -> None:
    """`t.data = value`, which for PrivateUse1 works as for CUDA: also between the host and a device.

    PyTorch exchanges the memory of tensors only if both have the same backend, or backends of a list that has CUDA and not
    PrivateUse1. So both are tensors of the CPU while it does so. No kernel runs meanwhile.

    Raises:
        RuntimeError: the tensors have different layouts, or are compressed ones of different devices, or `t` requires gradients,
            which the dtype of `value` cannot have.
        NotImplementedError: this build of PyTorch does not export the function that changes a tensor's backend.
    """
    if isinstance(value, torch.Tensor) and _leaves_components(t, value):
        raise RuntimeError(
            "incompatible tensor type: data of another device cannot be assigned to a compressed sparse tensor, because PyTorch "
            "would leave its indices and values where they are; make a new tensor"
        )
    if not isinstance(value, torch.Tensor) or not _moves_in_place(t, value) or _same_keys(t, value):
        tensor_data.__set__(t, value)
        return
    change, host = _change_backend(), _as_host(value)
    with torch._C.DisableTorchFunction():
        change(t, _HOST)
        try:
            tensor_data.__set__(t, host)
        finally:
            change(t, _device(t))


def _leaves_components(t: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch would assign the properties of `value`, but not its components: compressed tensors of two devices."""
    return (
        t.layout is not torch.strided
        and t.layout is not torch.sparse_coo
        and t.layout is value.layout
        and _device(t) != _device(value)
    )


def _same_keys(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch._C._dispatch_keys(a) == torch._C._dispatch_keys(b)


_compatible_data: Callable[[torch.Tensor, torch.Tensor], bool] = torch._has_compatible_shallow_copy_type


def compatible_data_patch() -> tuple[Any, str, Any]:
    """The patch (owner, name, value) of the question whether the data of a tensor can become those of another one."""

    def answer(*args: Any, **kwargs: Any) -> bool:  # TorchDynamo compares the signature with that of its own version
        return have_compatible_data(*args, **kwargs)

    return (torch, "_has_compatible_shallow_copy_type", answer)


def coo_components(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor, which may be unsorted or repeated."""
    return t._indices(), t._values()


#: Byte offset of `device_` (type and index, one byte each) in c10::GeneratorImpl: after the vtable, two counts and a mutex.
_GENERATOR_DEVICE_AT = 56
_NO_INDEX = 0xFF


def identity_of(generator: torch._C.Generator) -> int:
    """Address of the C++ generator. All Python objects of one generator have the same address."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def set_generator_device(generator: torch._C.Generator, device: torch.device) -> None:
    """Change the device of a new CPU generator, so that PyTorch's own checks refuse it for other devices.

    PyTorch offers no function that makes a generator for a device without C++ code.

    Raises:
        NotImplementedError: this release of PyTorch has another memory layout of generators.
    """
    there = (ctypes.c_uint8 * 2).from_address(identity_of(generator) + _GENERATOR_DEVICE_AT)
    if tuple(there) != (int(torch._C._autograd.DeviceType.CPU.value), _NO_INDEX):
        raise NotImplementedError(
            f"torch.Generator for a device is not supported with torch {torch.__version__}; install a release from 2.11 to 2.15"
        )
    there[:] = [int(getattr(torch._C._autograd.DeviceType, device.type.upper()).value), device.index]


def below_autocast(op: torch._ops.OpOverload) -> Callable[[Any, Any], Any]:
    """A callable `(args, kwargs)` that runs `op`, and the operators into which it decomposes, without autocast."""
    exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]

    def run(args: Any, kwargs: Any) -> Any:
        exclude(key, True)
        try:
            return op(*args, **kwargs)
        finally:
            exclude(key, False)

    return run


#: A context in which no device's autocast casts the arguments of operators.
no_autocast: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableAutocast


def without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, so that the operators which it calls run without autocast."""
    exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

    def run(*args: Any, **kwargs: Any) -> Any:
        before = excluded(key)
        exclude(key, True)
        try:
            return kernel(*args, **kwargs)
        finally:
            exclude(key, before)

    return run


def redispatch_cuda_autocast(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs CUDA's autocast kernel for `op`. CPU builds of PyTorch contain these kernels, too."""
    call, keys = op._handle.redispatch_boxed, DispatchKeySet(DispatchKey.AutocastCUDA)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(keys, *args, **kwargs)

    return run


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference; None if it was freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def has_kernel(op_name: str, key: str) -> bool:
    """Whether a kernel of `op_name` ("aten::add.Tensor") is registered directly for the dispatch key `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op_name, key)


def operators_with_kernel(key: str) -> frozenset[str]:
    """Names of all operators for which `has_kernel` is true. One call takes as long as a hundred calls of `has_kernel`."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def python_body(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """A callable that runs the Python function that is registered for `op` under CUDA or for all devices; None: there is none.

    Kernels in C++ under CUDA would access the memory of the tensors, so they do not count.
    """
    space, _, rest = op.name().partition("::")
    names = {rest, rest.partition(".")[0]} if overload_name(op) == "default" else {rest}
    for key in ("CUDA", "CompositeExplicitAutograd"):
        if any(f"{space}/{name}/{key}" in torch.library._impls for name in names):
            call, keys = op._handle.redispatch_boxed, DispatchKeySet(getattr(DispatchKey, key))
            return lambda *args, call=call, keys=keys, **kwargs: call(keys, *args, **kwargs)
    return None


def fake_results(call: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> tuple[Any, bool] | None:
    """Run `call` with fake tensors, whose sizes may be symbols. Used to infer the shapes of extension operators.

    Plain meta tensors are wrong here: a fake kernel may ask its context for a size that depends on data.

    Args:
        call: gets a function that makes a fake host tensor with the shape, strides and dtype of a tensor.

    Returns:
        The result, with fake tensors, and whether any size or stride of it depends on data; None if the operator has no fake
        kernel.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def fake(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")

    missing = (
        *(UnsupportedOperatorException, DynamicOutputShapeException, DataDependentOutputException),
        NotImplementedError,
    )
    # Without `allow_fallback_kernels=False`, PyTorch runs the kernels of torchaudio's operators with zeros as values.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on CUDA no fake kernel runs, so there is no warning
        try:
            result = call(fake)
        except missing:
            return None
    flat = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return result, any(_is_symbol(n) for t in flat for n in (*t.shape, *t.stride()))


def _is_symbol(n: Any) -> bool:
    return isinstance(n, torch.SymInt) and bool(n.node.expr.free_symbols)


@cache
def all_aten_overloads() -> tuple[torch._ops.OpOverload, ...]:
    """Every overload of the aten namespace that this torch build knows, in a stable order."""
    found = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        if namespace != "aten":
            continue
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, torch._ops.OpOverload):
            found.append(op)
    return tuple(found)


def fake_device_patches(real: str, shown: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) that move fake tensors from device type `shown` to `real` but report `shown`.

    Autograd needs a device guard for the device of a fake tensor. A PyTorch build without CUDA has no guard for "cuda".
    A device without an index is the current device.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    device: Any = FakeTensor.__dict__["device"]

    def to_real(d: torch.device) -> torch.device:
        if d.type != shown:
            return d
        index = d.index
        if index is None:
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        return torch.device(real, index)

    def say(t: Any) -> torch.device:
        found: torch.device = device.fget(t)
        return torch.device(shown, found.index) if found.type == real else found

    if hasattr(FakeTensor, "_normalize_fake_device"):
        normalize = FakeTensor._normalize_fake_device
        yield FakeTensor, "_normalize_fake_device", staticmethod(lambda d: normalize(to_real(d)))
    else:  # before torch 2.13, the constructor normalises the device
        make = FakeTensor.__new__

        def new(cls: Any, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            return make(cls, fake_mode, elem, to_real(torch.device(device)), *args, **kwargs)

        yield FakeTensor, "__new__", staticmethod(new)

        def move(t: Any, d: torch.device) -> None:
            t.__dict__["fake_device"] = to_real(d)

        # Views get their device by an assignment.
        yield FakeTensor, "fake_device", property(lambda t: t.__dict__["fake_device"], move)
    yield FakeTensor, "device", property(say, device.fset)


def is_wrapper(t: torch.Tensor) -> bool:
    """Whether a tensor consists of other tensors and has no memory of its own, such as a jagged tensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(t)


def fake_device(t: torch.Tensor) -> torch.device | None:
    """The device that a fake tensor represents, or the first fake tensor inside a subclass; None for other tensors."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(t, FakeTensor):
        return t.fake_device
    if is_traceable_wrapper_subclass(t):
        found = [fake_device(getattr(t, name)) for name in t.__tensor_flatten__()[0]]
        return next((d for d in found if d is not None), None)
    return None


def keep_random_numbers_in_checkpoints(graph: torch.fx.GraphModule) -> None:
    """Let the checkpoints in a graph of Dynamo restore the random state when they compute again.

    PyTorch's operator for them does not, because its compilers replace random operators by ones that draw the same numbers twice.
    A graph that runs as it is would have other dropout masks in the backward than in the forward.
    """
    from torch._higher_order_ops.wrap import tag_activation_checkpoint
    from torch.utils.checkpoint import checkpoint

    def run(part: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        how, given = tag_activation_checkpoint.divide_kwargs(kwargs)
        if "_checkpoint_context_fn" in part.meta:
            how["context_fn"] = part.meta["_checkpoint_context_fn"]
        return checkpoint(part, *args, **{"preserve_rng_state": True, **how, "use_reentrant": False}, **given)

    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            found = [node for node in part.graph.nodes if node.target is tag_activation_checkpoint]
            for node in found:
                node.target = run
            if found:
                part.recompile()


def inductor(mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:
    """The default backend of `torch.compile`, for graphs on the host: a callable `(graph, example_inputs)`."""
    made = torch._TorchCompileInductorWrapper(mode, options, dynamic=None)
    made.config["triton.cudagraphs"] = (
        False  # CUDA graphs would need the CUDA runtime, which does not exist in this process
    )
    return made


def aot_eager(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph with PyTorch's backend ``aot_eager``: traced with its gradient, and run operator by operator."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, example_inputs)
    return compiled


def tell_dynamo(replaced: Iterable[tuple[Any, Any]]) -> None:
    """Tell Dynamo, if it is imported, which functions were replaced. Dynamo identifies PyTorch's functions by identity.

    Args:
        replaced: pairs of the old and the new function.
    """
    names = ("trace_rules", "variables.torch", "utils")
    rules, variables, constants = [sys.modules.get(f"torch._dynamo.{name}") for name in names]
    if rules is None or variables is None or constants is None:
        return
    rules.clear_lru_cache()
    variables.TorchInGraphFunctionVariable._get_handlers.cache_clear()
    for old, new in replaced:
        if isinstance(old, Hashable):
            for table in (variables.constant_fold_functions, variables.constant_fold_functions_need_guards):
                if old in table:
                    table[new] = table[old]
            if old in constants.common_constant_types:
                constants.common_constant_types.add(new)


def tell_references(context: Any, patches: Iterable[tuple[Any, str, Any]]) -> None:
    """Tell the mode that runs PyTorch's references in Python which functions were replaced. It identifies functions by identity.

    PyTorch passes the replaced function of a method or property to a mode, and the original one of a function.

    Args:
        context: the module `torch._prims.context`.
        patches: owner, name and original of each replaced function.
    """
    references, plain = context.torch_to_refs_map(), context.torch_function_passthrough
    for owner, name, old in patches:
        new = owner.__dict__.get(name)
        if isinstance(new, property):
            if hasattr(old, "__get__") and old.__get__ in plain:
                plain.add(new.__get__)
        elif isinstance(old, Hashable) and isinstance(new, Hashable):
            if old in plain or new in plain:
                plain.update((old, new))
            reference = references.get(old) or references.get(new)
            if reference is not None:
                references[old] = references[new] = reference


def dynamo_stream_owners() -> list[Any]:
    """Modules whose `get_current_stream` is C++ code that refuses the name "cuda". Before torch 2.15, it is written in Python."""
    native = torch._C._dynamo.utils  # type: ignore[attr-defined]  # its stub is not complete
    if not hasattr(native, "get_current_stream"):
        return []
    loaded = [sys.modules.get(f"torch._dynamo.{name}") for name in ("utils", "guards")]
    return [native, *[m for m in loaded if hasattr(m, "get_current_stream")]]


def tell_torchscript(replaced: Iterable[tuple[Any, Any]]) -> None:
    """Tell TorchScript which functions were replaced. TorchScript identifies PyTorch's operators by the identity of functions.

    Args:
        replaced: pairs of the old and the new function.
    """
    builtins = torchscript._get_builtin_table()
    for old, new in replaced:
        operator = builtins.get(id(old))
        if operator is not None:
            builtins[id(new)] = operator


def forget_in_torchscript(functions: Iterable[Any]) -> None:
    """Undo `tell_torchscript` for these functions: another object may get the identity of a function that is freed."""
    builtins = torchscript._get_builtin_table()
    for function in functions:
        builtins.pop(id(function), None)


def torchscript_executor_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, value) that keeps TorchScript's executor when a program asks for the older one.

    Libraries for speech and large models switch to the older executor. Its fuser ends with "Unknown device for graph fuser" for
    devices that it does not know, and cannot be switched off. The executors have the same results.
    """
    real: Any = torch._C._jit_set_profiling_executor
    said = real(True)

    def set_profiling_executor(profiling: bool) -> bool:
        nonlocal said
        before, said = said, profiling
        return bool(before)

    yield torch._C, "_jit_set_profiling_executor", set_profiling_executor


#: The trace of this thread that `torch.jit.trace` records, or None.
trace: Callable[[], Any] = torch._C._get_tracing_state


def in_trace() -> bool:
    """Whether `torch.jit.trace` records the calls of this thread."""
    return trace() is not None


@contextlib.contextmanager
def suspended_trace() -> Iterator[None]:
    """Suspend the trace of this thread. PyTorch may have excluded the key that records it; then only the key can be set back."""
    native: Any = torch._C  # its stub is not complete
    recording = trace()
    excluded = native._dispatch_tls_local_exclude_set().remove(native._parse_dispatch_key("Tracer"))
    with native._ForceDispatchKeyGuard(native._dispatch_tls_local_include_set(), excluded):
        native._set_tracing_state(None)
        try:
            yield
        finally:
            native._set_tracing_state(recording)


@cache
def never_trace(*modules: str) -> None:
    """Exclude modules from tracing by Dynamo. Wooly's kernels also run inside compiled functions and must not be traced."""
    from torch._dynamo import trace_rules

    for name in modules:
        trace_rules.add(name)


def device_context_patches(contexts: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) that tell Dynamo of the present `torch.cuda.device` and of the functions it calls.

    Dynamo stores these when it is imported, which may be before they are replaced.

    Args:
        contexts: the module of Dynamo's variables for context managers.
    """
    kind: Any = contexts.CUDADeviceVariable
    for name, function in (
        ("_exchange_fn", torch.cuda._exchange_device),
        ("_maybe_exchange_fn", torch.cuda._maybe_exchange_device),
    ):
        if name in kind.__dict__:  # before torch 2.13, the variable looks them up in torch.cuda at each call
            yield kind, name, staticmethod(function)
    known = getattr(contexts, "_device_context_manager_map", None)
    if known is not None:
        yield contexts, "_device_context_manager_map", {**known, torch.cuda.device: kind}


#: What PyTorch's build can profile, and whether a profiler runs in this thread.
supported_activities: Callable[[], set[Any]] = torch._C._autograd._supported_activities
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class ProfilerMethods:
    """PyTorch's own methods of `torch.autograd.profiler.profile`, which the facade wraps, and the names of private ones.

    Attributes:
        start: starts to record.
        parse: makes events of the results of C++.
    """

    names = ("_start_trace", "_parse_kineto_results")
    start: Callable[[Any], None] = torch.autograd.profiler.profile._start_trace
    parse: Callable[..., list[Any]] = torch.autograd.profiler.profile._parse_kineto_results


DeviceType: Any = torch._C._autograd.DeviceType
#: The state of a profiler that records the host with Kineto.
KINETO: Any = torch._C._profiler.ProfilerState.KINETO


def python_registrations(key: str, unless: str | None) -> list[torch._ops.OpOverload]:
    """The operators for which Python has registered a kernel under one dispatch key, but not under another one."""
    found = []
    for entry in sorted(torch.library._impls):
        operator, _, of = entry.rpartition("/")
        if of == key and f"{operator}/{unless}" not in torch.library._impls:
            space, _, name = operator.partition("/")
            packet = getattr(getattr(torch.ops, space), name.partition(".")[0], None)
            overload = getattr(packet, name.partition(".")[2] or "default", None)
            if overload is not None:  # PyTorch also takes kernels for operators that do not exist
                found.append(overload)
    return found


def qualified_name(space: str, name: Any) -> str:
    """The name ("aten::add.Tensor") of an operator that `torch.library` gets as "add.Tensor", "aten::add.Tensor" or overload."""
    return str(name.name()) if isinstance(name, OpOverload) else f"{space}::{name.rpartition('::')[2]}"


def exists(op_name: str) -> bool:
    """Whether an operator ("aten::add.Tensor") is defined."""
    return torch._C._dispatch_has_kernel(op_name)


def is_registered_in_python(op_name: str, key: str, library: torch.library.Library | None = None) -> bool:
    """Whether a library (default: any) has registered a kernel in Python for an operator and a dispatch key."""
    entries = torch.library._impls if library is None else library._op_impls
    return f"{op_name.replace('::', '/')}/{key}" in entries


def is_for_cuda_alone(kernel: Any) -> bool:
    """Whether a kernel in Python is one of PyTorch's own, which replace CUDA's for certain GPUs (`torch._native`)."""
    return str(getattr(kernel, "__module__", "")).startswith("torch._native")


def operators_for_cuda_alone() -> set[str]:
    """The operators for which PyTorch has registered such kernels under the key CUDA. Before torch 2.12, there are none."""
    registry: Any = sys.modules.get("torch._native.registry")
    if registry is None:
        return set()
    if hasattr(registry, "_override_libs"):  # since torch 2.15, with the namespace
        return {name for space, name, key in registry._override_libs if (space, key) == ("aten", "CUDA")}
    known = registry._aten_override_libs if hasattr(registry, "_aten_override_libs") else registry._libs  # torch 2.12
    return {name for name, key in known if key == "CUDA"}


def destroy(library: torch.library.Library) -> None:
    """Remove all kernels that a library has registered."""
    library._destroy()


class _Destroys:
    """An entry in a library's list of what ends with it. This one ends another library."""

    def __init__(self, library: torch.library.Library) -> None:
        self.destroy = library._destroy


def destroy_together(library: torch.library.Library, other: torch.library.Library) -> None:
    """Let the kernels of `other` end with those of `library`."""
    library._registration_handles.append(_Destroys(other))  # type: ignore[arg-type] # a RegistrationHandle in all but its class


def kernel_before(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """A callable `(keys, *args)` that runs the kernel that `op` has now for a dispatch key. Another one may replace it later."""
    return torch.library.get_kernel(op, key).call_boxed


def redispatch_to(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """A callable that runs the kernel of `op` for a dispatch key."""
    call, keys = op._handle.redispatch_boxed, DispatchKeySet(getattr(DispatchKey, key))

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(keys, *args, **kwargs)

    return run


HigherOrderOperator: Any = torch._ops.HigherOrderOperator


def higher_order_operators() -> list[Any]:
    """The operators on functions that exist now (`torch.ops.higher_order`)."""
    return list(torch._ops._higher_order_ops.values())


def python_kernels(op: Any) -> dict[Any, Callable[..., Any]]:
    """The kernels of an operator on functions, by dispatch key."""
    return op.py_kernels  # type: ignore[no-any-return]


def falls_through(op: Any, key: Any) -> bool:
    """Whether an operator on functions ignores a dispatch key."""
    return not op.non_fallthrough_keys.has(key)


def random_number_primitives() -> ModuleType:
    """The module of the operators that draw random numbers of a given seed and offset."""
    import torch._prims.rng_prims

    return torch._prims.rng_prims


def run_profiler_hooks(*, start: bool) -> None:
    """Call what PyTorch calls when a profiler starts or stops."""
    profiler = torch.autograd.profiler
    call: Callable[[], None] = profiler._run_on_profiler_start if start else profiler._run_on_profiler_stop
    call()


def default_dtype_patches(changed: Callable[[torch.dtype], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) that call `changed` with the earlier dtype after the default dtype has changed."""

    def telling(real: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(real)
        def set_default(value: Any) -> None:
            before = torch.get_default_dtype()
            real(value)
            if torch.get_default_dtype() is not before:
                changed(before)

        return set_default

    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        yield torch._C, name, telling(getattr(torch._C, name))


class _Wrapped:
    """A function in place of another one. It has the hash of the other one, which is the hash of the operator that has it."""

    def __init__(self, real: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._real, self._function = real, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self._real)

    def __eq__(self, other: object) -> bool:
        return self is other


def conversion_patches(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) that wrap the operators which ask CUDA's device guard for the current device.

    They ask for it if their device argument has no index, and a build of PyTorch without CUDA has no such guard.
    """
    aten = torch.ops.aten
    for op in (aten._to_copy, aten._to_copy.default, aten.to, aten.to.device, aten.to.dtype_layout):
        yield op, "_op", _Wrapped(op._op, wrap(op._op))


def lazy_clone_patches(
    is_lazy: Callable[[torch.Tensor], bool | None], address: Callable[[torch.Tensor], int | None]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) of what PyTorch tells about lazy clones.

    Args:
        is_lazy: whether a device tensor is a lazy clone or a source of one; None: it is no device tensor.
        address: address of a device tensor's memory; None: it is no device tensor.
    """
    native: Any = torch._C  # its stub is not complete
    real_is_lazy, real_address = native._is_cow_tensor, native._data_address

    def is_cow_tensor(t: torch.Tensor) -> bool:
        lazy = is_lazy(t)
        return bool(real_is_lazy(t)) if lazy is None else lazy

    def data_address(t: torch.Tensor) -> int:
        there = address(t)
        return int(real_address(t)) if there is None else there

    yield (torch._C, "_is_cow_tensor", is_cow_tensor)
    yield (torch._C, "_data_address", data_address)


def parsing_patch(named: Callable[[torch.device], torch.device]) -> tuple[Any, str, Any]:
    """The patch (owner, name, value) of what reads the arguments of a method `to`, so that it names devices as `named` does.

    It reads a number, or the device of a tensor, as the device of this build of PyTorch.
    """
    owner: Any = torch._C._nn  # its stub is not complete
    real = owner._parse_to

    @wraps(real)
    def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        device, *more = real(*args, **kwargs)
        return (device if device is None else named(device), *more)

    return (owner, "_parse_to", parse_to)


def run_backward_patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The functions that call the autograd engine, as (module, name, function)."""
    engine = torch.autograd.graph._engine_run_backward
    return [(module, "_engine_run_backward", engine) for module in (torch.autograd, torch.autograd.graph)]


def in_calling_thread(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run_backward` so that the calling thread runs the backward on all devices. The switch for this is per thread.

    The wrapper also raises the error that the device guard took (`_TakenErrors`).
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        _taken.pop()  # of an earlier backward that something else ended
        if torch._C._is_multithreading_enabled():
            torch._C._set_multithreading_enabled(False)
        try:
            return run_backward(*args, **kwargs)
        except SystemError:
            error = _taken.pop()
            if error is None:
                raise
        raise error from error.__cause__

    return run


def print_options() -> tuple[float, int]:
    """Return the number of elements above which PyTorch abbreviates the text of a tensor, and how many it shows at each edge."""
    options = torch._tensor_str.PRINT_OPTS
    return options.threshold, options.edgeitems


def printing_patches(
    host_part: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[Any, str, Callable[..., str]]]:
    """Yield (module, name, function) for the functions that make the text of a tensor.

    Args:
        host_part: returns the tensor whose elements PyTorch reads for the text.

    PyTorch switches function transforms off in the calling thread while it prints a tensor, until a local variable of this
    function dies. If printing raises an exception (a deferred error, Ctrl-C), the exception's traceback keeps the variable alive,
    and `torch.func.grad` in the rest of the program returns zeros. So the wrapper clears the function's variables.
    """
    module: Any = torch._tensor_str
    print_tensor = module._str

    @wraps(print_tensor)
    def text_of(*args: Any, **kwargs: Any) -> str:
        try:
            return str(print_tensor(*args, **kwargs))
        except BaseException as e:
            here = e.__traceback__
            while here is not None:
                if here.tb_frame.f_code is print_tensor.__code__:
                    here.tb_frame.clear()
                here = here.tb_next
            raise

    yield (module, "_str", text_of)
    elements_of = module._tensor_str

    @wraps(elements_of)
    def elements_on_host(t: torch.Tensor, indent: int) -> str:
        return str(elements_of(host_part(t), indent))

    yield (module, "_tensor_str", elements_on_host)


#: The method of the device guard, and the caller of the engine, which asks the guard between nodes. An exception of a signal
#: handler there would end the process, since the guard's C++ methods may not throw.
GUARD_CODE = _DeviceGuard.type_.__code__
ENGINE_CODE = in_calling_thread(torch.autograd.backward).__code__


#: The dense matrix of a 2:4 sparse one in CUTLASS's format: its kept elements and their positions.
semi_structured_to_dense: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = sparse_semi_structured_to_dense_cutlass


#: A kernel that `torch.cuda.jiterator` compiles.
JittedFunction: type = torch.cuda.jiterator._JittedFunction
#: The method with which an optimizer checks whether a CUDA graph may capture its step. Before torch 2.13, it asks `is_built`.
CAPTURE_CHECK_CODE = torch.optim.Optimizer._accelerator_graph_capture_health_check.__code__


def compiled_version_patches(cuda_version: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, value) for the number of the CUDA version, which PyTorch's test library asks for."""
    major, minor = [int(part) for part in cuda_version.split(".")[:2]]
    yield torch._C, "_cuda_getCompiledVersion", lambda: 1000 * major + 10 * minor


def cuda_function_patches(functions: Mapping[str, Callable[..., Any]]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) for functions of a CUDA build's C++ part that other libraries call directly."""
    for name, function in functions.items():
        yield torch._C, f"_cuda_{name}", function


def host_cache_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) for functions of the C++ part that `torch.cuda.graph` calls."""
    yield torch._C, "_host_emptyCache", lambda: None


def has_saved_tensors_hooks() -> bool:
    """Whether hooks of the script receive the tensors that autograd saves, as in checkpoints and in `save_on_cpu`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def unobserved_graph() -> Iterator[None]:
    """Keep what the script has set to observe autograd away from a graph of Wooly's own, whose tensors have no data.

    Checkpoints count the saved tensors that their hooks get, and hooks that offload activations copy them. The search for
    anomalies reads the values of gradients.
    """
    with contextlib.ExitStack() as stack:
        if has_saved_tensors_hooks():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def in_transform() -> bool:
    """Whether a function transform (`torch.func`) is active. Transforms cannot handle Wooly's autograd functions."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_tangents(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these tensors has a tangent (forward-mode AD outside of `torch.func`)."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def for_each_of_batch(
    call: Callable[[tuple[torch.Tensor | None, ...]], list[torch.Tensor]], grads: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor]:
    """Call a backward with gradients. Of gradients with `is_grads_batched=True`, call it for each of the batch.

    PyTorch hides the batch dimension in tensors without memory. Its own operators find it, and Wooly's autograd functions do not.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if not level:
        return call(grads)
    for _ in range(level):  # else PyTorch would refuse random operators, which this call uses only to find shapes
        torch._C._vmapmode_decrement_nesting()
    try:
        return _for_each(call, grads, level)
    finally:
        for _ in range(level):
            torch._C._vmapmode_increment_nesting()


#: The key of tensors that stand for a batch of tensors (not those of `torch.func`).
_BATCHED = torch._C._dispatch_key_parse("Batched")


def _for_each(
    call: Callable[..., list[torch.Tensor]], grads: tuple[torch.Tensor | None, ...], level: int
) -> list[torch.Tensor]:
    batched = [g is not None and torch._C._dispatch_keys(g).has(_BATCHED) for g in grads]
    if not any(batched):
        return call(grads)
    # The first dimension of a gradient that has no batch at this level has size 1.
    parts = [
        g if g is None or not b else torch._remove_batch_dim(g, level, 1, 0)
        for g, b in zip(grads, batched, strict=True)
    ]
    size = max([g.shape[0] for g, b in zip(parts, batched, strict=True) if g is not None and b])
    found = [
        _for_each(
            call,
            tuple(
                [g if g is None or not b else g[min(i, g.shape[0] - 1)] for g, b in zip(parts, batched, strict=True)]
            ),
            level - 1,
        )
        for i in range(size)
    ]
    return [torch._add_batch_dim(torch.stack(of), 0, level) for of in zip(*found, strict=True)]


#: The module behind `torch.distributed`.
c10d: Any = torch.distributed.distributed_c10d
#: The base class of process groups that are written in Python.
PythonProcessGroup: Any = torch._C._distributed_c10d.ProcessGroup
PrefixStore: Any = torch._C._distributed_c10d.PrefixStore


_work_from_future: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009 - its stub is not complete


#: The timeout of NCCL's groups, which a build without NCCL does not know.
_NCCL_TIMEOUT = timedelta(minutes=10)


def completed_work(result: Any) -> Any:
    """A handle of an asynchronous collective that needs no waiting."""
    done: Any = torch.futures.Future()
    done.set_result(result)
    return _work_from_future(done)


def collective(name: str) -> Any:
    """The operator by which a process group of PyTorch's sends a collective through the dispatcher."""
    return getattr(torch.ops.c10d, name).default


def boxed_work(work: Any) -> Any:
    """A handle as these operators return it."""
    return work.boxed()


def unboxed_work(boxed: Any) -> Any:
    """The inverse of `boxed_work`."""
    return torch.distributed.Work.unbox(boxed)


def reduction_of(options: Any) -> tuple[str, float]:
    """The reduction that a collective's options (or None, or a `ReduceOp`) name, and the factor of PREMUL_SUM."""
    if options is None:
        return "SUM", 1.0
    op: Any = getattr(options, "reduceOp", options)
    state: Any = op.__getstate__() if isinstance(op, torch.distributed.ReduceOp) else (op, None)
    kind, factor = state
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    return str(kind.name), 1.0 if factor is None else float(factor)


def make_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A backend for CPU tensors."""
    made = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    made._set_sequence_number_for_group()
    return made


@cache
def accept_pinned_memory() -> None:
    """Let `empty_strided` on the CPU make ordinary memory where pinned memory is asked for.

    The reducer of DistributedDataParallel asks for it in C++ if it searches for unused parameters, and a build without CUDA has
    no pinned memory. Each `empty_strided` on the CPU then takes some microseconds more, so call this only if it is needed.
    """

    def empty_strided(
        size: list[int],
        stride: list[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        last = sum([(n - 1) * step for n, step in zip(size, stride, strict=True)])
        made = torch.empty(last + 1 if all(size) else 0, dtype=dtype, device="cpu").as_strided(size, stride)
        if pin_memory:
            asked_for_pinned.append(raw_data_ptr(made))
        return made

    replace_on_host("empty_strided", empty_strided)


#: Addresses of the last host tensors for which the reducer has asked for pinned memory. It looks at once whether they are pinned.
asked_for_pinned: deque[int] = deque(maxlen=64)


def replace_on_host(name: str, kernel: Callable[..., Any]) -> None:
    """Replace PyTorch's kernel of an operator for host tensors, until the process ends."""
    _libraries.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _libraries[-1].impl(name, kernel, "CPU", allow_override=True)


_libraries: list[torch.library.Library] = []


def static_graph_patch(distributed: Any) -> tuple[Any, str, Any]:
    """The patch (owner, name, value) for `DistributedDataParallel` with a static graph: the first backward searches, too."""
    set_static_graph = distributed._set_static_graph

    @wraps(set_static_graph)
    def searching(self: Any) -> None:
        if any(p.is_cuda for p in self.module.parameters()):
            accept_pinned_memory()
        set_static_graph(self)

    return distributed, "_set_static_graph", searching


class _LoggerWithoutTimes:
    """The logger of a DDP model on the device. PyTorch has timers for two types of devices only, and a logger without a timer
    warns at each start of a program.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Log no times of the last iteration."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def distributed_patches(connect: Callable[..., Any], group_type: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) by which torch.distributed uses groups in Python for the backend "nccl".

    Args:
        connect: `connect(store, rank, size, options, has_host)` returns the further arguments of `group_type`. `has_host`: the
            group also has a backend for CPU tensors.
        group_type: class of the groups: `group_type(rank, size, ...)`. Its context `batched()` collects sends and receives.
    """
    helper, batch, split = c10d._new_process_group_helper, c10d.batch_isend_irecv, c10d.split_group
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp_helper = ddp._ddp_init_helper
    state = threading.local()

    class ProcessGroupNCCL(group_type):  # type: ignore[misc]
        """What PyTorch calls to make a group, and compares groups with."""

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            super().__init__(rank, size, *connect(store, rank, size, options or self.Options(), state.has_host))

    @wraps(helper)
    def new_group(group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        state.has_host = "cpu" in c10d.BackendConfig(c10d.Backend(str(backend))).get_device_backend_map()
        return helper(group_size, group_rank, ranks, backend, *args, **kwargs)

    @wraps(batch)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        group = (p2p_op_list[0].group or c10d._get_default_group()) if p2p_op_list else None
        if not isinstance(group, group_type):
            return batch(p2p_op_list)
        with group.batched():
            return batch(p2p_op_list)

    @wraps(split)
    def split_group(parent_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parent_pg or c10d._get_default_group(), group_type):
            raise NotImplementedError(
                "torch.distributed.split_group is not supported on the wooly device; make the groups with "
                "torch.distributed.new_group"
            )
        return split(parent_pg, *args, **kwargs)

    @wraps(ddp_helper)
    def make_reducer(model: Any, *args: Any, **kwargs: Any) -> None:
        ddp_helper(model, *args, **kwargs)
        if isinstance(model.process_group, group_type) and model.device_type != "cpu":
            model.logger = _LoggerWithoutTimes(model.logger)

    yield (ddp, "_ddp_init_helper", make_reducer)
    yield (c10d, "_NCCL_AVAILABLE", True)
    yield (c10d, "default_pg_nccl_timeout", _NCCL_TIMEOUT)
    yield (c10d, "_new_process_group_helper", new_group)
    if hasattr(c10d, "_create_nccl2_process_group"):  # since 2.14: a class that only a machine with NCCL can make
        make, plugins = c10d._create_nccl_process_group, c10d.Backend._plugins
        yield (c10d, "_create_nccl2_process_group", make)
        if hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):  # since 2.15
            yield (c10d, "_FR_SELF_RECORDING_BACKENDS", c10d._FR_SELF_RECORDING_BACKENDS | {"nccl"})
        if "NCCL" in plugins:
            yield (c10d.Backend, "_plugins", plugins | {"NCCL": plugins["NCCL"]._replace(creator_fn=make)})
    for owner in (c10d, torch.distributed):
        yield (owner, "ProcessGroupNCCL", ProcessGroupNCCL)
        yield (owner, "batch_isend_irecv", batch_isend_irecv)
        yield (owner, "split_group", split_group)
    yield (torch._C, "_get_accelerator", lambda *args: torch.device("cuda"))
