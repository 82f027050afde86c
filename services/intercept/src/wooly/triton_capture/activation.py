"""Installs Wooly's compiler and driver in Triton when Triton is imported, and removes them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from wooly.origins import add_library_root

if TYPE_CHECKING:
    from wooly.kernels.launch import Launches


def activate(launches: Launches) -> None:
    """Install compiler and driver, now or when Triton is imported. Triton then launches kernels through `launches`."""
    if "triton" in sys.modules:
        _install(launches)
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(launches))


def deactivate() -> None:
    """Remove Wooly's driver, so that Triton looks for its own drivers again."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
    runtime = sys.modules.get("triton.runtime.driver")
    if runtime is not None and getattr(runtime.driver, "_wooly", False):
        runtime.driver._active = None
        runtime.driver._wooly = False


class _Finder(importlib.abc.MetaPathFinder):
    """Detects the import of Triton."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The normal spec of Triton, with a loader that installs compiler and driver after the import."""
        if name != "triton":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader, launches = spec.loader, self._launches
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # Not before: a program may ask whether Triton exists, and import it later.
                sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
                execute(module)
                _install(launches)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(launches: Launches) -> None:
    import triton
    from triton.backends import Backend, backends

    from wooly.triton_capture.compiler import NAME, WoolyBackend
    from wooly.triton_capture.driver import WoolyDriver

    add_library_root(str(Path(triton.__file__).parent))
    backends[NAME] = Backend(compiler=WoolyBackend, driver=WoolyDriver)
    triton.runtime.driver.set_active(WoolyDriver(launches))
    triton.runtime.driver._wooly = True
