"""The private torch names that the executor leans on, in one file. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.guards import _reinterpret_tensor

#: `reinterpret(t, sizes, strides, offset_increment)`: a new tensor on the storage of `t`, same dtype (0.6 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: A view that reads as the negative of a tensor.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

#: `linear_pointwise(x, weight, bias, "none", [], "")`: oneDNN's product of x and the transpose of weight, float32.
linear_pointwise: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


def interpret(text: str) -> tuple[Callable[..., Any], list[str]]:
    """A function from a graph in the text form of the library's interpreter; and the schema of each of its operators, in order.

    No optimisation is applied to it: it does what the text says, in that order. (The switch is the calling thread's, and stays.)
    """
    torch._C._set_graph_executor_optimize(False)
    graph = torch._C.parse_ir(text)
    schemas = [node.schema() for node in graph.nodes() if node.kind().startswith("aten::")]
    return torch._C._create_function_from_graph("segment", graph), schemas
