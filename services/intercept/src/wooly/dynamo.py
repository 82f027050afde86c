"""`torch.compile` on the device: the backend ``wooly`` runs each graph of Dynamo as one WIS program.

The graph's first call runs through the same kernels as eager code and is recorded (see `graphs`). So compiled and eager results
are the same. Graphs without a tensor on the device go to PyTorch's default backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wooly.device import current
from wooly.devices import NAME
from wooly.graphs import GraphFunction
from wooly.torch_private import fake_device, fake_device_patches, inductor, never_trace

#: Name of the backend for `torch.compile`; the entry point in pyproject.toml has the same name.
BACKEND = "wooly"
#: Name of PyTorch's default backend.
_DEFAULT = "inductor"


def compile_graph(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """Compile a graph: return a callable that computes the same as `graph`.

    Args:
        graph: graph that Dynamo traced.
        example_inputs: fake inputs.
        mode: mode of the default backend; not used for graphs on the device.
        options: options of the default backend; not used for graphs on the device.
    """
    if not _on_device(graph):
        return _default_backend(graph, example_inputs, mode, options)
    constants = [
        value
        for node in graph.graph.nodes
        if node.op == "get_attr" and isinstance(value := _attribute(graph, node.target), Tensor)
    ]
    return GraphFunction(current(), graph.forward, constants)


def _on_device(graph: torch.fx.GraphModule) -> bool:
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        for t in value if isinstance(value, (tuple, list)) else (value,):
            place = fake_device(t) if isinstance(t, Tensor) else None
            if place is not None and place.type == NAME:
                return True
    return False


def _attribute(graph: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), graph)


def _default_backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Any
) -> Callable[..., Any]:
    compiled: Callable[..., Any] = inductor(mode, options)(graph, list(example_inputs))
    return compiled


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) that make `torch.compile` use the backend ``wooly`` by default."""
    yield from fake_device_patches(NAME, "cuda")
    real = torch.compile

    @functools.wraps(real)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        never_trace("wooly", "wooly_bus", "wooly_wis")
        if kwargs.get("backend", _DEFAULT) == _DEFAULT:
            kwargs["backend"] = BACKEND
        return real(*args, **kwargs)

    yield torch, "compile", compile_
