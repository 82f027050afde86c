"""Runs a function after the import of a module that the facade changes but does not import itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


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


class ReplacedAfterImport(AfterImport):
    """Replaces attributes after the first import of one module, until `deactivate`.

    Args:
        module: full name of the module.
        patches: returns the patches (owner, name, value) for the module.
    """

    def __init__(self, module: str, patches: Callable[[ModuleType], Iterable[tuple[Any, str, Any]]]) -> None:
        super().__init__(module, self._replace)
        self._patches = patches
        self._replaced: list[tuple[Any, str, Any]] = []

    def _replace(self, module: ModuleType) -> None:
        for owner, name, value in self._patches(module):
            self._replaced.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, value)

    def deactivate(self) -> ModuleType | None:
        """Stop waiting, and restore the attributes. Returns the module if it is imported."""
        while self._replaced:
            setattr(*self._replaced.pop())
        return super().deactivate()
