"""Makes "cuda" mean the Wooly device.

`torch.cuda` answers with the remote devices' facts, and a tensor there says `cuda:0`, `cuda:1`, ….

Creation needs no patch: kernels under the CUDA dispatch key make Wooly tensors (see `device`). What is replaced here is only what
asks for CUDA before the dispatcher is reached: the conversions (`.to`, `.cuda`), constructors from Python data, device contexts,
generators, and the questions of `torch.cuda`. Undone by `uninstall`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly import children, dynamo, triton_capture
from wooly.devices import Devices
from wooly.facade import accelerator, amp, generation, nvtx, parallel, pinned, state, streams, tensors
from wooly.facade.cuda import Answers
from wooly.kernels.launch import Launches
from wooly.torch_private import device_constructors, tell_dynamo

__all__ = ["Facade"]


class _Missing:
    """Marks an attribute that was inherited, not set on the patched object itself."""


_MISSING = _Missing()


class Facade:
    """The patches, so that they can be taken back.

    Args:
        devices: the process's devices.
        facts: answers the executor's facts of the device of an index.
        launches: records kernels in other languages.
    """

    def __init__(self, devices: Devices, facts: Callable[[int], dict[str, Any]], launches: Launches) -> None:
        self._launches = launches
        self._answers = Answers(devices, facts)
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Make "cuda" live."""
        if self._undo:
            return
        # Device contexts know PyTorch's constructors by identity: by that of the ones that ours call.
        device_constructors()
        for patches in (
            tensors.patches(),
            pinned.patches(),
            amp.patches(),
            state.patches(),
            self._answers.patches(),
            streams.patches(),
            accelerator.patches(),
            nvtx.patches(),
            parallel.patches(),
            children.patches(),
            dynamo.patches(),
        ):
            for owner, name, value in patches:
                self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
                setattr(owner, name, value)
        triton_capture.activate(self._launches)
        generation.activate()
        tell_dynamo([(old, owner.__dict__.get(name)) for owner, name, old in self._undo])

    def uninstall(self) -> None:
        """Put everything back."""
        generation.deactivate()
        triton_capture.deactivate()
        back = [(owner.__dict__.get(name), old) for owner, name, old in self._undo]
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        tell_dynamo(back)
