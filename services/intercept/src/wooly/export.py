"""Records a computation as a module: keeps the frames that the client would send to a device.

The client's recorder makes the module, not `torch.export`. So a job runs the same instructions as `wooly run`, gives the same
bits, and supports all operators of the device. Only operations that need an answer of the device during recording (`.item()`, a
shape that depends on data) are refused. See ADR 15.
"""

from __future__ import annotations

import inspect
import runpy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

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
from wooly.waits import Waits

_FACTS = {"name": "a recording", "vendor": "cpu", "runtime": "torch-cpu", "total_memory": 1 << 46, "cores": 1}


class ExportError(WoolyError):
    """A computation cannot be exported as a module. The message says why, and what to do."""

    code = "wooly.export"


class RecordingLink:
    """Replaces a session's `Link`, and keeps the frames instead of sending them. There is no executor that answers."""

    recording = True
    hides_data = False
    mirroring = False
    shares = has_fetches = False
    shared: Final[dict[int, Any]] = {}
    offers = None
    #: No host copies; native kernels look here.
    _mirrors: Final[OrderedDict[int, Any]] = OrderedDict()
    overwritten: Final[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.device = dict(_FACTS)
        self.siblings: list[Any] = []
        self.name_of: Callable[[list[int], int], str] = lambda words, instruction: ""
        self.bytes_sent = self.bytes_received = self.syncs = 0
        self.waits = Waits()
        self.programs: dict[bytes, tuple[int, bytes]] = {}
        self.constants: dict[bytes, tuple[int, bytes]] = {}
        self.sources: dict[bytes, bytes] = {}
        self.steps: list[Load | Run] = []

    def define(self, program: bytes) -> None:
        """Keep a program."""
        self.programs.setdefault(module_digest(program), (len(self.programs), program))

    def source(self, name: bytes, raw: bytes) -> bool:
        """Keep the source of a foreign kernel for the module. Returns whether it is sent now: it is not."""
        self.sources.setdefault(name, raw)
        return False

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
        """Keep a run as a step. Refuse a run with `reply`."""
        if reply:
            self._refuse("the shape of a result")
        self.steps.append(Run(self.programs[digest][0], tuple(bindings), params, tuple(frees)))
        return len(self.steps)

    def write(self, buffer: int, offset: int, data: memoryview) -> None:
        """Keep uploaded data as a constant, and add a step that loads it."""
        content = bytes(data)
        name = module_digest(content)
        number, _ = self.constants.setdefault(name, (len(self.constants), content))
        self.steps.append(Load(number, buffer, offset))

    def read(self, buffer: int, offset: int, into: memoryview) -> None:
        """Refuse to read: no values exist during recording."""
        self._refuse("a value")

    def ask(self, buffer: int, offset: int, into: memoryview) -> None:
        """Refuse to read: no values exist during recording."""
        self._refuse("a value")

    def fetch(self, buffer: int, offset: int, into: memoryview, owner: Any) -> None:
        """Refuse to read: no values exist during recording."""
        self._refuse("a value")

    def finish_reads(self) -> None:
        """Do nothing: there are no started reads."""

    def reads_into(self, memory: Any) -> bool:
        """Return False: there are no started reads."""
        return False

    def is_early(self, buffer: int) -> bool:
        """Return False: there are no early reads."""
        return False

    def hold(self, frames: int = 1) -> None:
        """Do nothing: no frame is sent."""

    position = 0
    interrupted = False

    def reach(self, position: int) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def result(self) -> dict[str, Any]:
        """Refuse: no results exist during recording."""
        self._refuse("the shape of a result")

    def _refuse(self, what: str) -> NoReturn:
        raise ExportError(
            f"the exported function needs {what} during recording (by .item(), .cpu(), print, nonzero, a mask as an index, or an "
            "`if` on a tensor), but a module cannot depend on values; move this step out of the exported function, or run the "
            "script with `wooly run`"
        )

    def sync(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def stats(self) -> dict[str, Any]:
        """No counters, because nothing was executed."""
        return {}

    def poll(self) -> bool:
        """Return False, so that the timer never closes a program. The module must not depend on time."""
        return False

    def mirror(self, buffer: int, key: Any) -> None:
        """Return None: there are no cached host copies."""

    def mirrors_of(self, buffer: int) -> dict[Any, TorchTensor]:
        """Nothing: there are no cached host copies."""
        return {}

    def overwrite(self, buffer: int, instructions: int) -> None:
        """Do nothing: there are no cached host copies."""

    def end_program(self, freed: list[int]) -> None:
        """Do nothing: there are no cached host copies."""

    def keep(self, buffer: int, key: Any, host: TorchTensor) -> None:
        """Do nothing: nothing can be read."""

    def forget(self, buffer: int) -> None:
        """Do nothing: there are no cached host copies."""

    def ipc(self, what: int, buffer: int = 0, nbytes: int = 0, name: bytes = b"") -> NoReturn:
        """Refuse: a module has its buffers for itself."""
        raise ExportError(
            "an exported function cannot share tensors with other processes; do so outside of the function"
        )

    def check_open(self) -> None:
        """Do nothing: there is no connection."""

    def end(self, error: WoolyError) -> None:
        """Do nothing: there is no connection."""

    def await_collectives(self) -> None:
        """Do nothing: there is no connection."""

    def say_end(self, why: str = "") -> None:
        """Do nothing: there is no connection."""

    def hang_up(self, *, known: bool) -> None:
        """Do nothing: there is no connection."""


@dataclass(frozen=True)
class Exported:
    """A module and the bytes of its constants, in the order of `module.constants`."""

    module: Module
    constants: list[bytes] = field(repr=False)

    def save(self, path: Path) -> int:
        """Write the module and its constants to one file. Returns the size of the file in bytes."""
        with path.open("wb") as file:
            return sum([file.write(part) for part in write_file(encode_module(self.module), self.constants)])

    def save_blobs(self, directory: Path) -> str:
        """Write the module and each constant to separate files, named by their digests. Returns the digest of the module."""
        directory.mkdir(parents=True, exist_ok=True)
        raw = encode_module(self.module)
        for content in (*self.constants, raw):
            (directory / module_digest(content).hex()).write_bytes(content)
        return module_digest(raw).hex()


def export(build: Callable[[], tuple[Callable[..., Any], Any]]) -> Exported:
    """Record one call of the function that `build` returns.

    Args:
        build: returns a function or `nn.Module`, and example inputs (a tuple or dict of tensors). It is called while "cuda" is
            the Wooly device. An `nn.Module` is moved to the device. Dtypes and sizes of the inputs become the signature of the
            module; their values are not used. The results of the function (a tensor, or tuples, lists and dicts of tensors)
            become the outputs.

    Raises:
        ExportError: the computation cannot be exported as a module.
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
                raise ExportError(
                    f"input {name} has dtype {example.dtype}, which modules do not support; convert the input"
                )
            there = torch.empty(example.shape, dtype=example.dtype, device="cuda")
            recorder.flush()
            link.steps.append(Load(-1 - len(entries), there.untyped_storage().data_ptr() >> ID_SHIFT))
            entries.append(Tensor(name, DTYPES[example.dtype], tuple(example.shape)))
            given[name] = there
        result = function(*given.values()) if isinstance(examples, tuple) else function(**given)
        kept, outputs = [], []
        for name, value in _flat("", result):
            dense = _dense(name, value)
            at = dense.data_ptr()
            recorder.separate([at >> ID_SHIFT])
            recorder.flush()
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
    """Export the function `function` of a script. The script is run first, with `__name__` "wooly_export".

    Raises:
        ExportError: the script does not have this function, or the computation cannot be exported.
    """

    def build() -> Any:
        names = runpy.run_path(str(script), run_name="wooly_export")
        found = names.get(function)
        if not callable(found):
            raise ExportError(f"{script} does not define a function {function}")
        return found()

    return export(build)


def _settled(step: Load | Run, n_constants: int) -> Load | Run:
    """Replace the temporary source number of an input. Inputs are numbered after the constants, whose count is known now."""
    if isinstance(step, Load) and step.source < 0:
        return Load(n_constants - 1 - step.source, step.buffer, step.offset)
    return step


def _built(built: Any) -> tuple[Callable[..., Any], Any]:
    match built:
        case (function, (tuple() | dict()) as examples) if callable(function):
            if all(isinstance(t, TorchTensor) for t in (examples.values() if isinstance(examples, dict) else examples)):
                return function, examples
    raise ExportError(
        "the exported function did not return (function or nn.Module, inputs); inputs must be a tuple or dict of example tensors"
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
        raise ExportError(f"output {name} is {what}, but outputs of a module must be tensors on the device")
    if value.dtype not in DTYPES:
        raise ExportError(f"output {name} has dtype {value.dtype}, which modules do not support; convert the output")
    return value.detach().resolve_conj().resolve_neg().contiguous()
