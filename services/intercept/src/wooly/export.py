"""Records a computation as a module: what the device would have been told, kept instead of sent.

It is our own recorder that makes a module, not `torch.export`: so a job runs the very instructions that `wooly run` would have
sent, with the same bits, for whatever the device can run, and only what needs an answer from the device while it records
(`.item()`, a shape that depends on data) is refused. See ADR 15.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor as TorchTensor
from wooly_wis.module import (
    Constant,
    Load,
    Module,
    Output,
    Run,
    Tensor,
    check_module,
    encode_module,
    module_digest,
    write_file,
)

from wooly import api
from wooly.dtypes import DTYPES
from wooly.errors import WoolyError
from wooly.storage import ID_SHIFT, OFFSET_MASK

_FACTS = {"name": "a recording", "vendor": "cpu", "runtime": "torch-cpu", "total_memory": 1 << 46, "cores": 1}


class ExportError(WoolyError):
    """A computation cannot become a module; the message says why, and what to do instead."""

    code = "wooly.export"


class RecordingLink:
    """Stands where a session's link stands, and keeps what it is told. There is nobody to answer."""

    recording = True
    mirroring = False
    sharing = False

    def __init__(self) -> None:
        self.device = dict(_FACTS)
        self.siblings: list[Any] = []
        self.name_of: Callable[[list[int], int], str] = lambda words, instruction: ""
        self.bytes_sent = self.bytes_received = self.syncs = 0
        self.programs: dict[bytes, tuple[int, bytes]] = {}
        self.constants: dict[bytes, tuple[int, bytes]] = {}
        self.sources: dict[bytes, bytes] = {}
        self.steps: list[Load | Run] = []

    def define(self, program: bytes) -> None:
        """A program that will be run."""
        self.programs.setdefault(module_digest(program), (len(self.programs), program))

    def source(self, name: bytes, raw: bytes) -> None:
        """The text of a script's own kernel travels in the module."""
        self.sources.setdefault(name, raw)

    def run(
        self,
        digest: bytes,
        bindings: list[int],
        params: bytes,
        frees: list[int],
        words: Any,
        origins: Any,
        reply: bool = False,
    ) -> int:
        """One run."""
        if reply:
            self._refuse("the shape of a result")
        self.steps.append(Run(self.programs[digest][0], tuple(bindings), params, tuple(frees)))
        return len(self.steps)

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """What the host puts on the device becomes a constant."""
        content = bytes(data)
        name = module_digest(content)
        number, _ = self.constants.setdefault(name, (len(self.constants), content))
        self.steps.append(Load(number, buffer, offset))

    def read(self, buffer: int, offset: int, into: memoryview) -> None:
        """Nothing was computed."""
        self._refuse("a value")

    def fetch(self, buffer: int, offset: int, into: memoryview, owner: Any) -> None:
        """Nothing was computed."""
        self._refuse("a value")

    def settle(self) -> None:
        """Nothing was fetched."""

    position = 0

    def reach(self, position: int) -> bool:
        """There is nothing to wait for."""
        return True

    def result(self) -> dict[str, Any]:
        """Nothing was computed."""
        self._refuse("the shape of a result")

    def _refuse(self, what: str) -> NoReturn:
        raise ExportError(
            f"this computation asks for {what} while it is recorded (.item(), .cpu(), print, nonzero, a mask, an `if` on "
            "a tensor); a module is straight-line: keep such steps out of what is exported, or run it with `wooly run`"
        )

    def sync(self) -> None:
        """There is nothing to wait for."""

    def stats(self) -> dict[str, Any]:
        """Nothing was executed."""
        return {}

    def poll(self) -> bool:
        """Whether it would take more now: never for the timer, so that programs do not depend on time."""
        return False

    def mirror(self, buffer: int, key: Any) -> None:
        """Nothing is known of any content."""

    def keep(self, buffer: int, key: Any, host: TorchTensor) -> None:
        """Nothing is read that could be kept."""

    def forget(self, buffer: int) -> None:
        """Nothing is kept."""

    def look(self) -> None:
        """There is nobody to lose."""

    def end(self, error: WoolyError) -> None:
        """There is nobody to leave."""

    def close(self) -> None:
        """There is nobody to leave."""


@dataclass(frozen=True)
class Exported:
    """A module and its constants, in the module's order."""

    module: Module
    constants: list[bytes] = field(repr=False)

    def save(self, path: Path) -> int:
        """Write both to one file. Returns its size in bytes."""
        with path.open("wb") as file:
            return sum([file.write(part) for part in write_file(encode_module(self.module), self.constants)])

    def save_blobs(self, directory: Path) -> str:
        """Write the module and each constant to a file of its own, named by its digest. Returns the module's."""
        directory.mkdir(parents=True, exist_ok=True)
        raw = encode_module(self.module)
        for content in (*self.constants, raw):
            (directory / module_digest(content).hex()).write_bytes(content)
        return module_digest(raw).hex()


def export(build: Callable[[], tuple[Callable[..., Any], Any]]) -> Exported:
    """Record one call of what `build` returns.

    Args:
        build: returns (function or `nn.Module`, example inputs: a tuple or dict of tensors). Called with "cuda" live; a module
            is moved
            there. The inputs' dtypes and sizes are the signature; their values matter nothing. The function's results (a
            tensor, or tuples, lists and dicts of tensors) are the outputs.

    Raises:
        ExportError: it cannot become a module.
    """
    link = RecordingLink()
    api.attach_link(link)
    try:
        api.install_facade()
        recorder = api.attached_device().recorder
        function, examples = _built(build())
        named = _named_inputs(function, examples)
        if isinstance(function, torch.nn.Module):
            function = function.to("cuda")
        given: dict[str, TorchTensor] = {}
        entries: list[Tensor] = []
        for name, example in named.items():
            if example.dtype not in DTYPES:
                raise ExportError(f"input {name} is {example.dtype}, which no module can hold")
            there = torch.empty(example.shape, dtype=example.dtype, device="cuda")
            recorder.flush()
            link.steps.append(Load(-1 - len(entries), there.untyped_storage().data_ptr() >> ID_SHIFT))
            entries.append(Tensor(name, DTYPES[example.dtype], tuple(example.shape)))
            given[name] = there
        result = function(*given.values()) if isinstance(examples, tuple) else function(**given)
        kept, outputs = [], []
        for name, value in _flat("", result):
            dense = _dense(name, value)
            recorder.flush()
            at = dense.data_ptr()
            tensor = Tensor(name, DTYPES[dense.dtype], tuple(dense.shape))
            outputs.append(Output(tensor, at >> ID_SHIFT, at & OFFSET_MASK))
            kept.append(dense)
        recorder.flush()
        steps = [_settled(s, len(link.constants)) for s in link.steps]
    finally:
        api.disable()
    module = Module(
        programs=tuple([raw for _, raw in link.programs.values()]),
        constants=tuple([Constant(name, len(content)) for name, (_, content) in link.constants.items()]),
        inputs=tuple(entries),
        outputs=tuple(outputs),
        steps=tuple(steps),
        sources=tuple(link.sources.values()),
    )
    check_module(module)
    return Exported(module, [content for _, content in link.constants.values()])


def export_script(script: Path, function: str) -> Exported:
    """`export` of a function of a script, which is run with `__name__` "wooly_export" first.

    Raises:
        ExportError: it has no such function, or it cannot become a module.
    """

    def build() -> Any:
        names = runpy.run_path(str(script), run_name="wooly_export")
        found = names.get(function)
        if not callable(found):
            raise ExportError(f"{script} has no function {function}")
        return found()

    return export(build)


def _settled(step: Load | Run, n_constants: int) -> Load | Run:
    """Inputs are counted after the constants, whose number is known only now."""
    if isinstance(step, Load) and step.source < 0:
        return Load(n_constants - 1 - step.source, step.buffer, step.offset)
    return step


def _built(built: Any) -> tuple[Callable[..., Any], Any]:
    match built:
        case (function, (tuple() | dict()) as examples) if callable(function):
            if all(isinstance(t, TorchTensor) for t in (examples.values() if isinstance(examples, dict) else examples)):
                return function, examples
    raise ExportError(
        "what is exported must return (function or nn.Module, inputs), where inputs is a tuple or a dict of example tensors"
    )


def _named_inputs(function: Callable[..., Any], examples: Any) -> dict[str, TorchTensor]:
    if isinstance(examples, Mapping):
        return {str(k): v for k, v in examples.items()}
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = [
            p.name
            for p in inspect.signature(target).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    names += [f"input{i}" for i in range(len(names), len(examples))]
    return dict(zip(names, examples, strict=False))


def _flat(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    else:
        yield name or "output", value
        return
    for key, part in parts:
        yield from _flat(f"{name}.{key}" if name else str(key), part)


def _dense(name: str, value: Any) -> TorchTensor:
    if not isinstance(value, TorchTensor) or value.device.type != "cuda":
        what = f"on {value.device}" if isinstance(value, TorchTensor) else f"a {type(value).__name__}"
        raise ExportError(f"output {name} is {what}; outputs of a module are tensors on the device")
    if value.dtype not in DTYPES:
        raise ExportError(f"output {name} is {value.dtype}, which no module can hold")
    return value.detach().resolve_conj().resolve_neg().contiguous()
