"""The private torch names that the executor leans on, in one file. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._ops
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined] # its stub is not complete

#: An overload of an operator.
OpOverload = torch._ops.OpOverload

#: `reinterpret(t, sizes, strides, offset_increment)`: a new tensor on the storage of `t`, same dtype (0.6 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: A view that reads as the negative of a tensor.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

#: `storage_at(address, device, nbytes)`: memory of a device that somebody else keeps.
storage_at: Any = torch._C._construct_storage_from_data_pointer

#: `linear_pointwise(x, weight, bias, "none", [], "")`: oneDNN's product of x and the transpose of weight, float32.
linear_pointwise: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


#: The C++ bindings behind functions of `torch.nn.functional`, without the Python code around them.
linear: Callable[..., torch.Tensor] = torch._C._nn.linear
silu: Callable[..., torch.Tensor] = torch._C._nn.silu
gelu: Callable[..., torch.Tensor] = torch._C._nn.gelu


def schema_of(op: OpOverload) -> torch._C.FunctionSchema:
    """The arguments and results that an overload declares."""
    return op._schema


def binding_of(op: OpOverload) -> Callable[..., Any]:
    """The function of C++ that an overload calls."""
    call: Callable[..., Any] = op._op
    return call


def _allocator_switch(name: str) -> ctypes.c_bool:
    """A switch of the library's allocator of host memory: a global variable of the library.

    Raises:
        ImportError: this build of torch does not have the switch.
    """
    ending = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    path = Path(torch.__file__).parent / "lib" / ending
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(path)), name)
    except (OSError, ValueError) as e:
        raise ImportError(
            f"torch {torch.__version__} has no {name} in {path} ({e}): without it an operator's results could show one "
            "session what another session freed; install a wheel of torch from PyPI, 2.11 to 2.13"
        ) from e


#: While it is set, the library zeroes each block of host memory before it uses the block, in every thread.
zero_fill = _allocator_switch("FLAGS_caffe2_cpu_allocator_do_zero_fill")
#: While it is set, each such block is filled with 0x7fedbeef, a NaN. For tests; not together with `zero_fill`.
junk_fill = _allocator_switch("FLAGS_caffe2_cpu_allocator_do_junk_fill")


def interpret(text: str) -> tuple[Callable[..., Any], list[str]]:
    """A function from a graph in the text form of the library's interpreter; and the schema of each of its operators, in order.

    No optimisation is applied to it: it does what the text says, in that order. (The switch is the calling thread's, and stays.)
    """
    torch._C._set_graph_executor_optimize(False)
    graph = torch._C.parse_ir(text)
    schemas = [node.schema() for node in graph.nodes() if node.kind().startswith("aten::")]
    return torch._C._create_function_from_graph("segment", graph), schemas
