"""`torch.compile` on the device: whole graphs of Dynamo as WIS programs, under the backend name ``wooly``.

A graph is run by the same kernels as eager code and recorded while it runs (see `graphs`), so that its results are the same.
Graphs without a tensor on the device go to PyTorch's own default backend.
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

BACKEND = "wooly"
_DEFAULT = "inductor"


def compile_graph(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """The backend: a callable that does what `graph` does.

    Args:
        graph: what Dynamo traced.
        example_inputs: fake inputs.
        mode: of the default backend; graphs on the device have one mode.
        options: of the default backend.
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
    """(owner, name, value) of what makes `torch.compile` use the device's backend by default."""
    yield from fake_device_patches(NAME, "cuda")
    real = torch.compile

    @functools.wraps(real)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        never_trace("wooly", "wooly_bus", "wooly_wis")
        if kwargs.get("backend", _DEFAULT) == _DEFAULT:
            kwargs["backend"] = BACKEND
        return real(*args, **kwargs)

    yield torch, "compile", compile_
