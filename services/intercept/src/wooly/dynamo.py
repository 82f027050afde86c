"""`torch.compile` on the device: the backend ``wooly`` runs each graph of Dynamo as one WIS program.

The graph's first call runs through the same kernels as eager code and is recorded (see `graphs`). So compiled and eager results
are the same. Graphs without a tensor on the device go to PyTorch's default backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from types import FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor

from wooly.device import current
from wooly.devices import NAME, shown
from wooly.facade.imports import AfterImport
from wooly.graphs import GraphFunction
from wooly.torch_private import (
    aot_eager,
    device_context_patches,
    fake_device,
    fake_device_patches,
    inductor,
    keep_random_numbers_in_checkpoints,
    never_trace,
    tree_flatten,
    tree_unflatten,
)

#: Name of the backend for `torch.compile`; the entry point in pyproject.toml has the same name.
BACKEND = "wooly"
#: Name of PyTorch's default backend.
_DEFAULT = "inductor"
#: Name of PyTorch's backend that replays each graph as a CUDA graph.
_CUDA_GRAPHS = "cudagraphs"


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
    return _one_program(graph, example_inputs)


def compile_cuda_graphs(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **ignored: Any
) -> Callable[..., Any]:
    """Compile a graph as `compile_graph` does, for the backend ``cudagraphs``: a program that is sent again is a replay.

    PyTorch's own backend asks CUDA's allocator for the memory of each graph, which does not exist in this process. It runs graphs
    on the host without CUDA graphs.

    Args:
        graph: graph that Dynamo traced.
        example_inputs: fake inputs.
        ignored: options, which PyTorch's backend does not use either.
    """
    if not _on_device(graph):
        return aot_eager(graph, list(example_inputs))
    return _one_program(graph, example_inputs)


def _one_program(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    keep_random_numbers_in_checkpoints(graph)
    constants = [
        value
        for node in graph.graph.nodes
        if node.op == "get_attr" and isinstance(value := _attribute(graph, node.target), Tensor)
    ]
    if not any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        return GraphFunction(current(), graph.forward, constants)
    # Compiled autograd passes all tensors in one list.
    _, spec = tree_flatten(tuple(example_inputs))
    function = GraphFunction(current(), lambda *flat: graph.forward(*tree_unflatten(flat, spec)), constants)
    return lambda *inputs: function(*tree_flatten(inputs)[0])


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
        backend = kwargs.get("backend", _DEFAULT)
        if backend == _DEFAULT:
            kwargs["backend"] = BACKEND
        elif backend == _CUDA_GRAPHS:
            kwargs["backend"] = compile_cuda_graphs
        return real(*args, **kwargs)

    yield torch, "compile", compile_


_replaced: list[tuple[Any, str, Any]] = []


def activate() -> None:
    """Change Dynamo's own modules now, or after their import. Programs also call Dynamo without `torch.compile`."""
    _rules.activate()
    _constructors.activate()
    _interface.activate()
    _device_contexts.activate()
    _tracing.activate()


def deactivate() -> None:
    """Undo `activate`. Dynamo still does not trace Wooly's modules."""
    _rules.deactivate()
    _constructors.deactivate()
    _interface.deactivate()
    _device_contexts.deactivate()
    _tracing.deactivate()
    while _replaced:
        setattr(*_replaced.pop())


def _set_rules(rules: ModuleType) -> None:
    """Let Dynamo trace the facade's methods of tensors as PyTorch's own, and no other function of Wooly."""
    never_trace("wooly", "wooly_bus", "wooly_wis")
    real = rules.get_tensor_method.__wrapped__

    @functools.cache
    def get_tensor_method() -> frozenset[Any]:
        methods = [getattr(Tensor, name) for name in dir(Tensor)]
        pairs = [(m, unwrap(m)) for m in methods if isinstance(m, FunctionType)]
        return real().union(*[pair for pair in pairs if isinstance(pair[1], MethodDescriptorType)])  # type: ignore[no-any-return]

    _replaced.append((rules, "get_tensor_method", rules.get_tensor_method))
    rules.get_tensor_method = get_tensor_method  # type: ignore[attr-defined]


def _make_streams(utils: ModuleType) -> None:
    """Make compiled functions call the facade's streams and events. Dynamo calls the classes in C++, which need CUDA."""
    for name, kind in (("build_stream", "Stream"), ("build_event", "Event")):
        if hasattr(utils, name):
            _replaced.append((utils, name, getattr(utils, name)))
            setattr(utils, name, functools.partial(_made, kind))


def _set_interface(interfaces: ModuleType) -> None:
    """Let Dynamo know the facade's classes of streams and events, if it was imported before the facade was installed."""
    for name in ("Stream", "Event"):
        _replaced.append((interfaces.CudaInterface, name, getattr(interfaces.CudaInterface, name)))
        setattr(interfaces.CudaInterface, name, getattr(torch.cuda, name))


def _made(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(torch, kind)(*args, **kwargs)


def _set_device_contexts(contexts: ModuleType) -> None:
    """Let `with torch.cuda.device(...)` in compiled functions call the facade."""
    for owner, name, value in device_context_patches(contexts):
        _replaced.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)


def _name_devices(tracing: ModuleType) -> None:
    """Let traced graphs name the device "cuda" in the calls, too, that PyTorch makes in C++: `torch.where(mask, x, 0.0)`."""
    real = tracing.proxy_call

    @functools.wraps(real)
    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if isinstance(device, torch.device):
            kwargs = {**kwargs, "device": shown(device)}
        return real(mode, func, pre_dispatch, args, kwargs)

    _replaced.append((tracing, "proxy_call", real))
    tracing.proxy_call = proxy_call  # type: ignore[attr-defined]


_rules = AfterImport("torch._dynamo.trace_rules", _set_rules)
_constructors = AfterImport("torch._dynamo.utils", _make_streams)
_interface = AfterImport("torch._dynamo.device_interface", _set_interface)
_device_contexts = AfterImport("torch._dynamo.variables.ctx_manager", _set_device_contexts)
_tracing = AfterImport("torch.fx.experimental.proxy_tensor", _name_devices)
