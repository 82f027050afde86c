"""The private torch names that the executor uses, in one file. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._ops
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined] # its stub is not complete
from torch._prims_common import suggest_memory_format

#: One overload of an operator.
OpOverload = torch._ops.OpOverload

#: `reinterpret(t, sizes, strides, offset_increment)`: a new tensor on the storage of `t`, same dtype (0.6 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: The memory format that ATen's kernels derive from the strides of a tensor.
suggested_format: Callable[[torch.Tensor], torch.memory_format] = suggest_memory_format

#: Returns a view that reads as the negative of a tensor.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

#: `storage_at(address, device, nbytes)`: a storage on device memory that it does not own.
storage_at: Any = torch._C._construct_storage_from_data_pointer

#: `linear_pointwise(x, weight, bias, "none", [], "")`: oneDNN's product of x and the transposed weight, in float32.
linear_pointwise: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


#: The C++ bindings of functions of `torch.nn.functional`, without the Python code around them.
linear: Callable[..., torch.Tensor] = torch._C._nn.linear
silu: Callable[..., torch.Tensor] = torch._C._nn.silu
gelu: Callable[..., torch.Tensor] = torch._C._nn.gelu


#: `copy_each(targets, sources)`: copies each source to its target. On a GPU, tensors of one dtype take one launch.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_

#: Returns the number of references to a storage at `address_of_storage`. Each tensor has one, and the storage's Python object.
uses_of: Callable[[int], int] = torch._C._storage_Use_Count

#: Launches a kernel of torch that waits for a number of the GPU's cycles.
sleep_on_gpu: Callable[[int], None] = torch.cuda._sleep


def end_recording(device: int, pool: tuple[int, int]) -> None:
    """End the recording of a capture into a memory pool of a GPU, and the capture's use of the pool.

    Raises:
        RuntimeError: no capture into this pool is recorded.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def pool_segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the segments of a memory pool of a GPU, as `torch.cuda.memory_snapshot` does.

    Torch releases a reference to each number that it gets here, and it has none (seen in 2.11). Without a new reference in its
    place, numbers that are still in use would be freed, and the process would end at some later time. So the references are
    counted before and after the call.
    """
    numbers = (*pool, False)
    before = _references(numbers)
    for k in numbers:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(k))
    try:
        found: list[dict[str, Any]] = torch._C._cuda_memorySnapshot(numbers)["segments"]
    finally:
        for at, (now, then) in enumerate(zip(_references(numbers), before, strict=True)):
            if now > then:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(numbers[at]))
    return found


def _references(values: tuple[Any, ...]) -> list[int]:
    return list(map(sys.getrefcount, values))


def deterministic_switches() -> tuple[bool, bool, bool]:
    """Return the arguments of `set_deterministic` that restore the present state."""
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )


def set_deterministic(on: bool, warn_only: bool, fill: bool) -> None:
    """Set the library's switches for deterministic algorithms, for all threads of the process."""
    torch._C._set_deterministic_algorithms(on, warn_only=warn_only)
    torch._C._set_deterministic_fill_uninitialized_memory(fill)


class Switch(NamedTuple):
    """A setting of CUDA's libraries, for all threads of the process.

    Attributes:
        read: returns the present value, as a tuple of arguments of `write`.
        write: sets the value.
        value: the value that a flag of a form asks for.
    """

    read: Callable[[], tuple[Any, ...]]
    write: Callable[..., object]
    value: tuple[Any, ...]


def _precision(op: str, value: str) -> Switch:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return Switch(lambda: (read("cuda", op),), lambda precision: write("cuda", op, precision), (value,))


def _sums(dtype: str, reduces: bool, splits: bool) -> Switch:
    name = f"cublas_allow_{dtype}_reduced_precision_reduction"
    return Switch(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"), (reduces, splits))


def _boolean(name: str) -> Switch:
    read = getattr(torch._C, f"_get_{name}")
    return Switch(lambda: (read(),), getattr(torch._C, f"_set_{name}"), (True,))


#: The setting that each flag of a form changes (`wooly_wis.flags`).
SWITCHES: dict[str, Switch] = {
    "cudnn_deterministic": _boolean("cudnn_deterministic"),
    "fp16_accumulation": _boolean("cublas_allow_fp16_accumulation"),
    "matmul_tf32": _precision("matmul", "tf32"),
    "no_bf16_reduction": _sums("bf16", False, True),
    "no_bf16_split_k": _sums("bf16", False, False),
    "no_conv_tf32": _precision("conv", "ieee"),
    "no_fp16_reduction": _sums("fp16", False, True),
    "no_fp16_split_k": _sums("fp16", False, False),
    "no_rnn_tf32": _precision("rnn", "ieee"),
}


def schema_of(op: OpOverload) -> torch._C.FunctionSchema:
    """Return the declared arguments and results of an overload."""
    return op._schema


def has_kernel(op_name: str, key: str) -> bool:
    """Return whether a kernel of `op_name` ("aten::add.Tensor") is registered for the dispatch key `key` itself."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op_name, key)


def all_operator_names() -> list[str]:
    """Return the names of all operators of this process ("aten::add.Tensor"), in no particular order."""
    return torch._C._dispatch_get_all_op_names()


def binding_of(op: OpOverload) -> Callable[..., Any]:
    """Return the C++ function that an overload calls."""
    call: Callable[..., Any] = op._op
    return call


def _allocator_switch(name: str) -> ctypes.c_bool:
    """Return a switch of torch's allocator of host memory. It is a global variable of the library.

    Raises:
        ImportError: this build of torch does not have the switch.
    """
    ending = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    path = Path(torch.__file__).parent / "lib" / ending
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(path)), name)
    except (OSError, ValueError) as e:
        raise ImportError(
            f"torch {torch.__version__} has no {name} in {path} ({e}). Without this switch, results of operators could show "
            "freed memory of other sessions. Install torch 2.11 to 2.15 from PyPI"
        ) from e


#: While this is set, the library zeroes each new block of host memory, in every thread.
zero_fill = _allocator_switch("FLAGS_caffe2_cpu_allocator_do_zero_fill")
#: While this is set, the library fills each new block with 0x7fedbeef, a NaN. For tests; do not set it together with `zero_fill`.
junk_fill = _allocator_switch("FLAGS_caffe2_cpu_allocator_do_junk_fill")


def _function_of_cpu(name: str, *, takes: bool) -> Callable[..., int] | None:
    """Return a function of torch's library for CPUs, or of a library that it loads; None: this build does not have it.

    The function keeps the interpreter's lock, because it takes less than the time to get the lock back.

    Args:
        name: its name; it returns an `int`.
        takes: whether it takes an `int`, or nothing.
    """
    ending = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
    try:
        found = getattr(ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / ending)), name)
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_int] if takes else [], ctypes.c_int
    call: Callable[..., int] = found
    return call


#: `limit_products(n)`: MKL's work of the calling thread uses at most `n` cores from now on. It returns the limit before, which is
#: torch's number in each thread. 0: as many as the thread's other operators, so `limit_threads` would also limit MKL.
limit_products: Callable[[int], int] | None = _function_of_cpu("MKL_Set_Num_Threads_Local", takes=True)
#: `limit_threads(n)`: the calling thread's other operators use at most `n` threads from now on. The result has no meaning.
#: `torch.set_num_threads` would also change MKL's number, for all threads.
limit_threads: Callable[[int], int] | None = _function_of_cpu("omp_set_num_threads", takes=True)
#: The number of threads that the calling thread's operators use now.
threads_of_this_thread: Callable[[], int] | None = _function_of_cpu("omp_get_max_threads", takes=False)


def interpret_plainly() -> None:
    """From now on, run graphs of torch's interpreter in this thread without optimising them."""
    torch._C._set_graph_executor_optimize(False)


def interpret(text: str) -> tuple[Callable[..., Any], list[str]]:
    """Return a function from a graph in the text form of torch's interpreter, and the schemas of its operators, in order.

    The function is not optimised: it does what the text says, in that order. Every thread that calls this or the function must
    have called `interpret_plainly` before.
    """
    interpret_plainly()
    graph = torch._C.parse_ir(text)
    schemas = [node.schema() for node in graph.nodes() if node.kind().startswith("aten::")]
    return torch._C._create_function_from_graph("segment", graph), schemas


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same storage, also if it is empty."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def address_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's C++ object, which is valid while the storage exists."""
    return int(storage._cdata)
