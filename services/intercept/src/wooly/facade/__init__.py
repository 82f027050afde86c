"""The facade: redirects "cuda" to the Wooly device.

`torch.cuda` reports the properties of the remote devices, and their tensors have the devices `cuda:0`, `cuda:1`, ….

Most functions that create tensors need no patch, because kernels under the dispatch key CUDA make Wooly tensors (see `device`).
The facade only patches functions that use CUDA before they call the dispatcher: conversions (`.to`, `.cuda`), constructors from
Python data, device contexts, generators, and the functions of `torch.cuda`. `uninstall` removes the patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from wooly import children, dynamo, interrupts, ipc, triton_capture
from wooly.determinism import Determinism
from wooly.devices import NAME, Devices
from wooly.distributed import patches as distributed
from wooly.facade import (
    accelerator,
    ahead_of_time,
    amp,
    bitsandbytes,
    comm,
    cuda_graphs,
    default_dtype,
    determinism,
    flags,
    functional_rng,
    generation,
    handover,
    legacy,
    nvtx,
    overrides,
    parallel,
    pinned,
    profiler,
    registrations,
    saving,
    sources,
    state,
    streams,
    tensors,
    torchscript,
)
from wooly.facade.build import CUDA_VERSION
from wooly.facade.cuda import Answers
from wooly.facade.imports import AfterImport
from wooly.facade.names import CUDA
from wooly.facade.snapshots import Snapshots
from wooly.flags import Flags
from wooly.kernels import attention, jagged
from wooly.kernels.launch import Launches
from wooly.torch_private import (
    NumberedDevices,
    device_constructors,
    forget_in_torchscript,
    quick_check_patches,
    tell_dynamo,
    tell_references,
    tell_torchscript,
)

__all__ = ["Facade"]


class _Missing:
    """Marks an attribute that the patched object inherits and does not have itself."""


_MISSING = _Missing()


class Facade:
    """Installs and removes the patches.

    Args:
        devices: the process's devices.
        facts: returns the properties of a device, from its executor, by index.
        launches: records launches of foreign kernels.
        mode: the mode of determinism that kernels follow.
        flags: the flags of CUDA's libraries that kernels follow.
        lose_session: ends the session with a reason.
        cuda_version: the version that `torch.version.cuda` reports; empty: that of the local PyTorch.
        collectives: returns who carries collectives: "executor" or "clients".
        session: returns the open session; None: it has no controller.
    """

    def __init__(
        self,
        devices: Devices,
        facts: Callable[[int], dict[str, Any]],
        launches: Launches,
        mode: Determinism,
        flags: Flags,
        lose_session: Callable[[str], None],
        cuda_version: str = CUDA_VERSION,
        collectives: Callable[[], str] = lambda: "executor",
        session: Callable[[], Any] = lambda: None,
    ) -> None:
        self._session = session
        self._collectives = collectives
        self._launches = launches
        self._mode = mode
        self._flags = flags
        self._interrupts = interrupts.Interrupts(lose_session)
        self._devices = devices
        self._snapshots = Snapshots(devices)
        self._answers = Answers(devices, facts, cuda_version)
        self._undo: list[tuple[Any, str, Any]] = []
        self._numbered = NumberedDevices(NAME, CUDA)
        self._references = AfterImport("torch._prims.context", self._tell_references)

    def install(self) -> None:
        """Install the patches, if they are not installed."""
        if self._undo:
            return
        # Device contexts identify PyTorch's constructors by identity. Fill their cache before the constructors are replaced.
        device_constructors()
        for patches in (
            tensors.patches(),
            legacy.patches(),
            torchscript.patches(),
            pinned.patches(),
            amp.patches(),
            determinism.patches(self._mode),
            flags.patches(self._flags),
            default_dtype.patches(),
            state.patches(),
            saving.patches(),
            self._answers.patches(),
            streams.patches(),
            cuda_graphs.patches(),
            accelerator.patches(),
            nvtx.patches(),
            self._snapshots.patches(),
            profiler.patches(self._devices, self._answers.name_of),
            parallel.patches(),
            comm.patches(),
            distributed.patches(self._devices, self._collectives, self._session),
            children.patches(),
            ipc.patches(),
            dynamo.patches(),
            quick_check_patches(),
            jagged.patches(),
            attention.patches(),
            registrations.patches(),
            self._interrupts.patches(),
        ):
            self._set(patches)
        self._set(overrides.patches(self._undo.copy()))
        overrides.tell_device_contexts(self._undo)
        triton_capture.activate(self._launches)
        generation.activate()
        functional_rng.activate()
        saving.activate()
        sources.activate()
        ahead_of_time.activate()
        dynamo.activate()
        bitsandbytes.activate()
        handover.activate()
        self._numbered.activate()
        self._references.activate()
        replaced = [(old, owner.__dict__.get(name)) for owner, name, old in self._undo]
        tell_dynamo(replaced)
        tell_torchscript(replaced)

    def _set(self, patches: Iterable[tuple[Any, str, Any]]) -> None:
        for owner, name, value in patches:
            self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
            setattr(owner, name, value)

    def _tell_references(self, context: ModuleType) -> None:
        """Tell the mode for PyTorch's references, whose module was imported, what is replaced."""
        tell_references(
            context,
            [
                (owner, name, getattr(getattr(owner, "__base__", None), name, None) if old is _MISSING else old)
                for owner, name, old in self._undo
            ],
        )

    def uninstall(self) -> None:
        """Remove all patches."""
        self._references.deactivate()
        self._numbered.deactivate()
        bitsandbytes.deactivate()
        handover.deactivate()
        functional_rng.deactivate()
        saving.deactivate()
        generation.deactivate()
        sources.deactivate()
        ahead_of_time.deactivate()
        dynamo.deactivate()
        triton_capture.deactivate()
        overrides.forget_in_device_contexts(
            [owner.__dict__.get(name) for owner, name, _ in self._undo if owner is torch]
        )
        back = [(owner.__dict__.get(name), old) for owner, name, old in self._undo]
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        interrupts.restore()
        tell_dynamo(back)
        forget_in_torchscript([new for new, _ in back])
