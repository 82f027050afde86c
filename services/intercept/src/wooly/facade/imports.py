"""Runs a function after the import of a module that the facade changes but does not import itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Detects the first import of one module.

    Args:
        module: full name of the module.
        install: called with the module: at once if it is imported already, otherwise after its import.
    """

    def __init__(self, module: str, install: Callable[[ModuleType], None]) -> None:
        self._module, self._install = module, install

    def activate(self) -> None:
        """Call the function now or after the import."""
        module = sys.modules.get(self._module)
        if module is not None:
            self._install(module)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def deactivate(self) -> ModuleType | None:
        """Stop waiting. Returns the module if it is imported."""
        sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
        return sys.modules.get(self._module)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The normal spec of the module, with a loader that calls the function after the import."""
        if name != self._module:
            return None
        sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
