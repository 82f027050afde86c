"""Transformers' `generate` on a device that is far away: whether to stop is asked one step late.

Its loop asks after every token whether all sequences have ended, and waits for the answer before it prepares the next step: here
that is a round trip per token in which neither side computes. It knows a way around that, for one kind of device: the answer is
fetched while the next step is recorded, and a step too many is taken back. Here it is told to take it for ours, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from wooly.device import current_devices

_MODULE = "transformers.generation.utils"
#: Transformers' check that is late, and the device that it takes it for.
_CLASS, _DEFERRING = "DeferredStopCheck", torch.device("mps")


def activate() -> None:
    """Make `generate` ask late, now or as soon as it is imported."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _install(module)
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def deactivate() -> None:
    """Give Transformers its own check back."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
    module = sys.modules.get(_MODULE)
    ours: Any = getattr(module, _CLASS, None)
    if hasattr(ours, "wooly_replaces"):
        setattr(module, _CLASS, ours.wooly_replaces)


class _Finder(MetaPathFinder):
    """Waits for the module to be imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own, whose end of loading is heard of."""
        if name != _MODULE:
            return None
        sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(module: ModuleType) -> None:
    real = getattr(module, _CLASS, None)
    if real is not None and not hasattr(real, "wooly_replaces"):  # releases before 5 do not know it
        setattr(module, _CLASS, _late(real))


def _late(real: Any) -> type:
    """Transformers' check, for our device as well."""

    class LateStopCheck(real):  # type: ignore[misc]
        """Also takes back the random numbers that the step too many has drawn: what comes next draws what it would have."""

        wooly_replaces = real

        def __init__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_ids, *args, **kwargs)
            self._device = input_ids.device
            self._drawn: tuple[int, int] | None = None

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, *args: Any, **kwargs: Any) -> bool:
            """Whether to ask late. Not where the cache is given back: the step too many would be in it."""
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

    return LateStopCheck
