"""Registers the Wooly device with PyTorch: the backend module, the kernels of all operators, and the recorders.

The first call of `register()` registers the device, once per process. `api` attaches and detaches sessions.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Set
from functools import partial
from types import ModuleType
from typing import Any

import torch
import wooly_wis

from wooly import native, storage
from wooly.determinism import Determinism
from wooly.devices import NAME, Devices
from wooly.errors import ForkedProcessError, NotConnectedError
from wooly.flags import Flags
from wooly.interned_forms import Forms
from wooly.kernels import (
    attention,
    backend,
    folding,
    indexing,
    jagged,
    layers,
    lists,
    packed_weights,
    resolving,
    semi_structured,
    sync_norm,
    views,
    widening,
)
from wooly.kernels.autocast import Autocast
from wooly.kernels.device_copies import DeviceCopies
from wooly.kernels.exact import EXACT_DYNAMIC
from wooly.kernels.extensions import Extensions, register_autocast
from wooly.kernels.factories import Factories
from wooly.kernels.fused_attention import FusedAttention, NestedAttention
from wooly.kernels.generic import Generic
from wooly.kernels.host_values import HostValues
from wooly.kernels.launch import Launches
from wooly.kernels.nested import dense_kernels, register_nested
from wooly.kernels.quantised.registration import register_quantised
from wooly.kernels.reading import MAX_READ_FOR_SHAPE, Reading
from wooly.kernels.recursive_filter import register_recursive_filter
from wooly.kernels.schema import OpFacts
from wooly.kernels.sparse.calls import SparseCalls
from wooly.kernels.sparse.registration import register_sparse
from wooly.kernels.storages import Storages
from wooly.kernels.tracing import Untraced
from wooly.kernels.transfer import Transfer
from wooly.kernels.whole import WHOLE, Whole
from wooly.origins import set_library_roots
from wooly.recorder import Recorder
from wooly.rng import DeviceGenerator, Generator
from wooly.room import make_room
from wooly.torch_private import (
    OpOverload,
    all_aten_overloads,
    avoid_dynamo_import,
    operators_with_kernel,
    overload_name,
    raw_device,
    redispatch_cpu,
    register_backend,
    short_name,
    use_resize_warning_of_aten,
)

aten = torch.ops.aten

#: Composite operators that are recorded as one instruction. ATen would decompose them into several.
_WHOLE = (
    *("clone", "convolution", "convolution_backward", "native_dropout", "embedding", "linalg_lstsq"),
    # ATen makes an empty result for these, and resizes it. They have opcodes, so plans can contain them.
    *("abs", "abs_", "logical_not", "logical_not_", "logical_and", "logical_and_", "logical_or", "logical_or_"),
    *("logical_xor", "logical_xor_"),
    # ATen would read the offsets of the groups, and wait for them.
    "_grouped_mm",
)
#: Factories that need a kernel here. ATen would compute their values with a CPU kernel.
_FACTORIES = (
    aten.range.default,
    aten.range.step,
    aten.kaiser_window.default,
    aten.kaiser_window.periodic,
    aten.kaiser_window.beta,
)
#: Factories that get a kernel as other operators do, because the CPU has one. They need the same kernel under the key CUDA.
_FACTORIES_ON_CPU = (aten.tril_indices.default, aten.triu_indices.default)
#: Operators of which calls can be native although their kernel in Python is not the generic one alone.
_TEACHABLE = (
    indexing.INDEXED
    | backend.LIMITED
    | {
        "convolution",
        "native_batch_norm",
        "linalg_vector_norm",
        "cat",
        "dot",
        "vdot",
        "nansum",
        "tril",
        "tril_",
        "triu",
        "triu_",
    }
)
#: Operators on metadata. Their CPU kernels do not access the tensor's memory, so they work for device tensors, too.
_METADATA = ("is_set_to", "_sparse_broadcast_to")


class RegisteredDevice:
    """The Wooly devices of this process: recorders, generators, and the `torch.library` objects that hold the kernels."""

    def __init__(self, flush_instructions: int) -> None:
        self._forms = forms = Forms()
        self.devices = Devices([Recorder(flush_instructions, forms, heap, Generator()) for heap in storage.heaps])
        for recorder in self.devices.recorders:
            recorder.heap.make_room = partial(make_room, recorder)
        self.determinism = Determinism()
        self.flags = Flags()
        host_values = HostValues(forms)
        self.generic = Generic(self.devices, forms, self.determinism, self.flags, host_values)
        self.factories = Factories(self.devices, forms, self.determinism)
        self.copies = copies = DeviceCopies(self.devices, forms)
        self.reading = Reading(self.devices, host_values, copies)
        self.transfer = Transfer(self.devices, forms, copies, self.reading)
        self.storages = Storages(self.factories, copies)
        self._kernels = (self.factories, copies, self.reading, self.transfer, self.storages)
        self.launches = Launches(self.devices, forms)
        self._attention = FusedAttention(self.devices)
        self.generic.resize = self.storages.resize
        self.autocast = Autocast(NAME)
        self.forked = False
        self._libraries: list[torch.library.Library] = []
        #: Operators whose kernel is the generic one, operators that run their CPU kernel because they read only metadata, and
        #: operators of `whole` that have native kernels.
        self._generic_ops: list[OpOverload] = []
        self._view_ops: list[OpOverload] = list(views.KERNELS)
        self._whole_ops: list[OpOverload] = []

    @property
    def recorder(self) -> Recorder:
        """Recorder of the first device."""
        return self.devices.recorders[0]

    def set_count(self, count: int) -> None:
        """Set the number of devices, at the start of a session."""
        if count != self.devices.count:
            self.devices.count = count
            self.factories.forget_devices()

    def set_opener(self, opener: Callable[[], None] | None) -> None:
        """Set the function that the first use of a device calls to open the session; None: the session is open, or over."""
        for recorder in self.devices.recorders:
            recorder.opener = recorder.heap.opener = opener
            if opener is not None:
                recorder.heap.granted = 0

    def after_fork(self) -> None:
        """Disable the devices in a forked process, if the parent had a session."""
        self.forked = self.forked or self.recorder.link is not None
        self._forms.forked()
        for recorder in self.devices.recorders:
            recorder.forked()

    def register_kernels(self) -> None:
        """Register a PrivateUse1 kernel for every operator that has a CPU kernel, so that ATen decomposes calls as on the CPU."""
        with warnings.catch_warnings():
            # A PyTorch build with CUDA has its own factories under the key CUDA, and warns when they are replaced.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            self._register_kernels()

    def _register_kernels(self) -> None:
        library = Untraced("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)
        own = self._own_kernels()
        for name, kernel in own.items():
            library.impl(name, kernel, "PrivateUse1")
        on_cpu = operators_with_kernel("CPU")
        resolved = frozenset[str]().union(
            *[operators_with_kernel(key) for key in ("Conjugate", "Negative", "ZeroTensor")]
        )
        for op in all_aten_overloads():
            name = short_name(op)
            kernel = None if name in own else self._kernel_for(op, name, on_cpu, resolved)
            if kernel is not None:
                library.impl(name, kernel, "PrivateUse1")
        self._register_factories(library)
        self._register_whole(library)
        self.autocast.register(library)
        self._libraries.append(register_autocast())
        self._libraries.append(register_recursive_filter(self.devices))
        if torch.distributed.is_available():
            from wooly.distributed.host_groups import register_host_groups

            self._libraries.append(register_host_groups())
        self._libraries.append(_register_fallbacks(Extensions(self.devices, self.generic, _unsupported)))
        register_nested(library)
        for name, kernel in NestedAttention(self._attention).kernels().items():
            library.impl(name, kernel, "NestedTensorPrivateUse1")
        library.impl("scaled_dot_product_attention", attention.nested_attention, "AutogradNestedTensor")
        self._libraries += register_sparse(SparseCalls(self.generic), self.devices)
        self._libraries += register_quantised(self.devices)
        if native.module is not None:
            self._register_native(native.module)
        set_library_roots(tuple(os.path.dirname(m.__file__ or "") for m in (torch, storage, wooly_wis)))

    def _register_native(self, module: Any) -> None:
        """Put native kernels before the kernels in Python, which handle what the native ones do not know."""
        module.set_up(storage.heaps)
        factories = [(aten.empty.memory_format, key) for key in ("PrivateUse1", "CUDA")]
        factories += [(aten.empty_strided.default, key) for key in ("PrivateUse1", "CUDA")]
        generic = [(op, "PrivateUse1") for op in (*self._generic_ops, aten.copy_.default)]
        for op, key in generic + factories:
            facts = self.generic.facts.get(op) or OpFacts(op)
            module.register_kernel(
                *_named(op),
                key,
                facts.name,
                facts.scalar,
                facts.scalar_kw,
                facts.returns_written,
                facts.mutable,
                facts.list_return,
            )
        module.register_linear()
        module.register_attention()
        module.register_arange()
        for op in self._view_ops:
            module.register_view(*_named(op))
        for op in self._whole_ops:
            module.register_whole(*_named(op))

    def _own_kernels(self) -> dict[str, Any]:
        """Kernels that are written for one operator, by operator name."""
        own = {name: kernel for part in self._kernels for name, kernel in part.kernels().items()}
        own.update({short_name(op): kernel for op, kernel in views.KERNELS.items()})
        own.update(backend.KERNELS)
        own.update(packed_weights.KERNELS)
        own.update(semi_structured.KERNELS)
        own.update(sync_norm.KERNELS)
        own.update(dense_kernels())
        own.update(jagged.KERNELS)
        own.update(self._attention.kernels())
        own["_fused_sdp_choice"] = attention.fused_choice
        own["record_stream"] = _record_stream
        return own

    def _kernel_for(self, op: OpOverload, name: str, on_cpu: Set[str], resolved: Set[str]) -> Any:
        """The generic kernel of an operator; None if the device does not support the operator.

        Args:
            op: the operator.
            name: its name without the namespace.
            on_cpu: names of the operators that have a CPU kernel.
            resolved: names of the operators that handle conjugate, negative or zero tensors themselves.
        """
        bare = op.overloadpacket.__name__
        travels = bare in _WHOLE or bare.startswith("_foreach_")
        if not travels and op.name() not in on_cpu:
            return None
        if bare in _METADATA or views.is_view(op):
            self._view_ops.append(op)
            return redispatch_cpu(op)
        if bare.startswith(("quantize", "_empty_affine", "empty_quantized")):
            return None
        if op.name() in resolved:
            kernel = resolving.on_plain(op, partial(self.generic.kernel, op))
        else:
            kernel = self.generic.kernel(op)
        if lists.computes_by_index(bare):
            kernel = lists.in_parts(kernel, self.generic.facts[op])
        generic = kernel
        if bare == "histc":
            kernel = backend.histc(kernel)
        if bare in backend.CHECKED_VALUES:
            kernel = backend.checked_at_call(kernel, bare, backend.CHECKED_VALUES[bare], self._recorder_of)
        if name == "_fused_moving_avg_obs_fq_helper":
            kernel = backend.observed(kernel)
        if bare in backend.CHECKED:
            kernel = backend.checked(kernel, backend.CHECKED[bare])
        if bare in backend.DECOMPOSITIONS:
            kernel = backend.at_call(kernel, self._recorder_of)
        if bare == "linalg_vector_norm":
            kernel = backend.vector_norm(kernel)
        if name == "addmv.out":
            kernel = backend.unless_empty(kernel)
        if bare == "_addmm_activation":
            kernel = backend.addmm_activation(kernel, self._is_on_cpu)
        if bare in backend.LIMITED:
            kernel = backend.limited(kernel)
        if bare in ("segment_reduce", "_segment_reduce_backward"):
            kernel = backend.of_segments(kernel)
        if bare in ("clamp", "clamp_"):
            kernel = backend.real_limits(kernel)
        if bare.removesuffix("_") in backend.PARTICULAR:
            kernel = backend.particular(kernel, op, backend.PARTICULAR[bare.removesuffix("_")])
        if name in ("tril.out", "triu.out"):
            kernel = backend.triangular_into(kernel, op)
        if name in ("linalg_lu.out", "lu_unpack.out"):
            kernel = backend.triangular_factors_into(kernel, op)
        if name in ("tril_", "triu_"):
            kernel = backend.triangular_in_place(kernel, op)
        if name in ("cat", "cat.out"):
            kernel = lists.joined(kernel)
        if name == "dot":
            kernel = backend.dot(kernel)
        if name == "vdot":
            kernel = backend.vdot(kernel)
        if name == "nansum":
            kernel = backend.nansum(kernel)
        if name == "_embedding_bag_backward":
            kernel = layers.embedding_bag_backward(kernel)
        if name == "convolution":
            kernel = layers.convolution(kernel)
        if bare == "native_batch_norm":
            training = getattr(aten._native_batch_norm_legit, overload_name(op))
            kernel = layers.batch_norm(kernel, self.generic.kernel(training, teaches=op))
        if bare in ("native_batch_norm_backward", "batch_norm_backward"):
            kernel = layers.batch_norm_backward(kernel)
        if name in indexing.ON_EXPANDED:
            kernel = indexing.on_expanded(kernel, op, indexing.ON_EXPANDED[name])
        if name in indexing.FILLING:
            kernel = indexing.with_host_target(kernel, op)
        if bare in indexing.INDEXED:
            kernel = indexing.with_host_indices(kernel, op, self.reading.value_for_shape)
        if name == "masked_select":
            kernel = indexing.masked_select(kernel, MAX_READ_FOR_SHAPE, self.reading.value_for_shape)
        elif str(op) in EXACT_DYNAMIC:
            kernel = indexing.with_small_values(kernel, EXACT_DYNAMIC[str(op)], self.reading.value_for_shape)
        # What those kernels look at is part of a native signature, so Python teaches only calls that it records as they are.
        teachable = kernel is generic or bare in _TEACHABLE or name in indexing.ON_EXPANDED or name in indexing.FILLING
        if teachable and name != "_convolution":  # `_register_whole` replaces its kernel
            self._generic_ops.append(op)
        return kernel

    def _recorder_of(self, t: torch.Tensor) -> Recorder:
        return self.devices.recorders[raw_device(t).index]

    def _is_on_cpu(self, t: torch.Tensor) -> bool:
        return self._recorder_of(t).on_cpu()

    def _register_factories(self, library: torch.library.Library) -> None:
        """Register the factories under the key CUDA, too. So `device="cuda"` makes Wooly tensors without a patch per call."""
        library.impl("empty.memory_format", self.factories.empty, "CUDA")
        library.impl("empty_strided", self.factories.empty_strided, "CUDA")
        library.impl("_efficientzerotensor", self.factories.zeros, "CUDA")
        record_arange = self.generic.kernel(aten.arange.start_out)
        for key in ("PrivateUse1", "CUDA"):
            arange = partial(self.factories.arange, record_arange)
            library.impl("arange.start_step", arange, key)
            library.impl("arange.start", arange, key)
            library.impl("arange", partial(arange, 0), key)
            for op in _FACTORIES:
                library.impl(short_name(op), self.generic.kernel(op), key)
        for op in _FACTORIES_ON_CPU:
            library.impl(short_name(op), self.generic.kernel(op), "CUDA")

    def _register_whole(self, library: torch.library.Library) -> None:
        """Register the operators that are recorded as one instruction although PyTorch would decompose them."""
        convolve = layers.flagged_convolution(partial(self.generic.kernel, aten.convolution.default))
        library.impl("_convolution", convolve, "PrivateUse1", allow_override=True)
        record_linear = folding.linear(self.generic.kernel(aten.linear.default))
        library.impl("linear", record_linear, "PrivateUse1")
        self._generic_ops.append(aten.linear.default)
        library.impl("linear", layers.linear(record_linear), "AutogradPrivateUse1")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl("scaled_dot_product_attention", attention.attention, key)
            library.impl("_efficient_attention_forward", jagged.efficient_attention, key)
            library.impl("lstm.input", partial(layers.lstm_input, Whole(self.generic, aten.lstm.input)), key)
            entropy = Whole(self.generic, aten.cross_entropy_loss.default)
            library.impl("cross_entropy_loss", partial(layers.cross_entropy, entropy), key)
        for name in widening.FOURIER:
            transform, into = (
                widening.fourier(getattr(aten, name).default),
                widening.fourier_into(getattr(aten, name).out),
            )
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                library.impl(name, transform, key)
                library.impl(f"{name}.out", into, key)
        for op in WHOLE:
            whole = Whole(self.generic, op)
            library.impl(short_name(op), whole, "AutogradPrivateUse1")
            if whole.takes_host_tensor:
                library.impl(short_name(op), whole, "PrivateUse1")
                continue
            library.impl(short_name(op), whole.record, "PrivateUse1")
            self._generic_ops.append(op)
            self._whole_ops.append(op)


def _named(op: OpOverload) -> tuple[str, str]:
    """The name of an operator with its namespace, and the name of the overload."""
    name, _, overload = op.name().partition(".")
    return name, overload


def _register_fallbacks(extensions: Extensions) -> torch.library.Library:
    """Register what happens with operators without a kernel, and the error for nested tensors."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(extensions, "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    rest.fallback(_not_dense, "NestedTensorPrivateUse1")
    return rest


def _record_stream(t: torch.Tensor, stream: torch.Stream) -> None:
    """`aten.record_stream`: do nothing. All work runs in order, so a free always comes after the work that uses the buffer."""


def _unsupported(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{op} is not supported on the wooly device, because the executor's library has no kernel for it; "
        "compute it on the CPU: x.cpu()"
    )


def _not_dense(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{op} is not supported on the wooly device for nested tensors; make the tensors dense (to_padded_tensor()), or "
        "compute on the CPU"
    )


class BackendModule(ModuleType):
    """`torch.wooly`: the functions that PyTorch requires of a PrivateUse1 backend."""

    def __init__(self, device: RegisteredDevice) -> None:
        super().__init__("torch.wooly")
        self._device = device

    def is_available(self) -> bool:
        return self._device.devices.look() > 0

    def is_initialized(self) -> bool:
        return self._device.devices.is_used()

    def _recorder(self, device: Any = None) -> Recorder:
        devices = self._device.devices
        return devices.recorders[devices.index_of(device)]

    def device_count(self) -> int:
        return self._device.devices.look()

    def current_device(self) -> int:
        return self._device.devices.current

    def set_device(self, device: Any) -> None:
        """Set the current device of this thread. A negative index changes nothing, as in CUDA."""
        if not isinstance(device, int) or device >= 0:
            self._device.devices.current = self._device.devices.index_of(device)

    def synchronize(self, device: Any = None) -> None:
        """Wait until the executor has run all work of a device. Raises the errors of that work."""
        recorder = self._recorder(device)
        with recorder.lock:
            recorder.finish()

    @property
    def default_generators(self) -> tuple[DeviceGenerator, ...]:
        """The default generator of each device."""
        return tuple([DeviceGenerator(i, r) for i, r in enumerate(self._device.devices.active())])

    def manual_seed(self, seed: int) -> None:
        self._recorder().generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for recorder in self._device.devices.recorders:
            recorder.generator.manual_seed(int(seed))

    def seed(self) -> int:
        return self._recorder().generator.reseed()

    def seed_all(self) -> int:
        """Set the same new random seed on all devices, and return it."""
        seed = self.seed()
        self.manual_seed_all(seed)
        return seed

    def initial_seed(self) -> int:
        return self._recorder().generator.seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Seed and offset as 16 bytes."""
        return self._recorder(device).generator.state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._recorder(device).generator.restore(state)

    def clear_autocast_cache(self) -> None:
        """Drop the cached casts of weights."""
        self._device.autocast.cache.clear()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return self._device.forked

    def require_same_process(self) -> None:
        """Check that this process may use the device, as CUDA's initialisation does.

        Raises:
            ForkedProcessError: the process was forked from a process with a session.
        """
        if self._device.forked:
            raise ForkedProcessError


_lock = threading.Lock()
_device: RegisteredDevice | None = None


def current() -> RegisteredDevice:
    """The process's device.

    Raises:
        NotConnectedError: the device is not registered, because no session was opened.
    """
    if _device is None:
        raise NotConnectedError("no session is open; call wooly.enable()")
    return _device


def current_devices() -> Devices:
    """The process's devices.

    Raises:
        NotConnectedError: the device is not registered, because no session was opened.
    """
    return current().devices


def register(flush_instructions: int = 0) -> RegisteredDevice:
    """Return the process's device. The first call registers it with PyTorch.

    Args:
        flush_instructions: maximum number of instructions per program; 0: as before.
    """
    global _device
    with _lock:
        if _device is None:
            if os.environ.get(native.VARIABLE) == "on":
                native.switch("on")
            device = RegisteredDevice(flush_instructions)
            register_backend(NAME, BackendModule(device))
            use_resize_warning_of_aten()
            avoid_dynamo_import()
            device.register_kernels()
            if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
                os.register_at_fork(after_in_child=device.after_fork)
            _device = device
        for recorder in _device.devices.recorders if flush_instructions else ():
            recorder.set_limit(flush_instructions)
        # PyTorch's guard for Python backends supports only one device index, and a backward in the calling thread is faster.
        torch.autograd.set_multithreading_enabled(False)
        return _device
