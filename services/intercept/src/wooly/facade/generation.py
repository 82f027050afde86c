"""Makes Transformers' `generate` faster on a remote device: it checks one step late whether generation has ended.

After each token, `generate` checks whether all sequences have ended, and waits for the answer before it prepares the next step.
On a remote device, this takes one round trip per token, during which neither client nor device computes. For the device "mps",
Transformers has a deferred check: it reads the answer while the next step is prepared, and undoes the last step if it was not
needed. This file enables the deferred check for the Wooly device, too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from wooly.device import current_devices
from wooly.facade.imports import AfterImport

_MODULE = "transformers.generation.utils"
#: Class of Transformers' deferred check, and the device for which Transformers uses it.
_CLASS, _DEFERRING = "DeferredStopCheck", torch.device("mps")


def deactivate() -> None:
    """Restore Transformers' own check."""
    module = _waiting.deactivate()
    ours: Any = getattr(module, _CLASS, None)
    if hasattr(ours, "wooly_replaces"):
        setattr(module, _CLASS, ours.wooly_replaces)


def _install(module: ModuleType) -> None:
    real = getattr(module, _CLASS, None)
    if real is not None and not hasattr(real, "wooly_replaces"):  # releases before 5 do not have the class
        setattr(module, _CLASS, _make_deferred(real))


_waiting = AfterImport(_MODULE, _install)
activate = _waiting.activate


def _make_deferred(real: Any) -> type:
    """Make a subclass of Transformers' deferred check that also supports the Wooly device."""

    class DeferredStopCheckOnDevice(real):  # type: ignore[misc]
        """Also restores the generator if the last step was not needed, so that later random numbers are the same."""

        wooly_replaces = real

        def __init__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            self._device = input_ids.device
            self._drawn: tuple[int, int] | None = None

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, *args: Any, **kwargs: Any) -> bool:
            """Whether to use the deferred check. A returned cache would contain the extra step, so then the check is not used."""
            if device.type != "cuda":
                return bool(real.is_supported(device, cache, cache_is_returned, *args, **kwargs))
            return not cache_is_returned and bool(
                real.is_supported(_DEFERRING, cache, cache_is_returned, *args, **kwargs)
            )

        def __call__(self, *args: Any, **kwargs: Any) -> bool:
            stopping = super().__call__(*args, **kwargs)
            if self._device.type == "cuda":
                devices = current_devices()
                generator = devices.recorders[devices.index_of(self._device)].generator
                if self.stop_reported and self._drawn is not None:
                    generator.seed, generator.offset = self._drawn
                self._drawn = generator.seed, generator.offset
            return bool(stopping)

    return DeferredStopCheckOnDevice
