"""Redirects "cuda" in every Python process that is started with the variable WOOLYAI_CAPTURE, as soon as it has imported torch.

The file `wooly-capture.pth` lies in the environment's `site-packages`, so each Python process of the environment reads it when it
starts. The file imports this module if the variable is set. This module does not import torch: it waits until the program does.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: Variable that captures a process and its children (the setting `capture`). Empty or 0: they are not captured. If it is a path,
#: each session appends a line of JSON to this file when it ends.
VARIABLE = "WOOLYAI_CAPTURE"
#: Whether torch is imported and "cuda" is not redirected yet.
_postponed = False
#: Options of Python that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and redirects "cuda" after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._call_after(spec.loader)
                return spec
        return None

    def _call_after(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def execute_and_enable(module: ModuleType) -> None:
            if self in sys.meta_path:  # not before: a program may ask whether torch exists, and import it later
                sys.meta_path.remove(self)
            execute(module)
            _finish_after_import()

        loader.exec_module = execute_and_enable  # type: ignore[method-assign]


def _finish_after_import() -> None:
    global _postponed
    _postponed = True
    ours = [m.__spec__ for name, m in sys.modules.items() if name.startswith("wooly.")]
    if not any(getattr(spec, "_initializing", False) for spec in ours):
        finish()


def finish() -> None:
    """Redirect "cuda" now, if torch was imported by a module of Wooly, which had to be complete first."""
    global _postponed
    if _postponed:
        _postponed = False
        from wooly import api

        if not api.is_enabled():
            api.enable_on_use()


def is_on(environment: Mapping[str, str]) -> bool:
    """Whether an environment captures the processes that are started with it."""
    return environment.get(VARIABLE, "") not in ("", "0")


def is_own_process() -> bool:
    """Whether this process is a command or a service of Wooly, which does not need "cuda"."""
    rest = iter(sys.orig_argv[1:])
    for argument in rest:
        if argument == "-m":
            return next(rest, "").partition(".")[0].startswith("wooly")
        if argument in _WITH_VALUE:
            next(rest, "")
        elif not argument.startswith("-"):
            return Path(argument).name == "wooly"
        elif argument == "-c":
            break
    return False


def start() -> None:
    """Redirect "cuda" when this process imports torch. In some environments Python reads the file twice."""
    awaited = "torch" in sys.modules or any(isinstance(finder, _AfterTorch) for finder in sys.meta_path)
    if is_on(os.environ) and not awaited and not is_own_process():
        sys.meta_path.insert(0, _AfterTorch())


def variables(settings: Mapping[str, object] | None = None, report: str = "1") -> dict[str, str]:
    """The variables that capture programs which are started with them.

    The folder of this Python's programs becomes the first of PATH, so that `python` and `torchrun` are those of the environment
    that has Wooly.

    Args:
        settings: settings that differ from those of this process, such as the address of a stack that was started for this run.
        report: file for the sessions' lines; "1": none.
    """
    from wooly.settings import ENV_PREFIX

    folder, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != folder:
        path = folder + os.pathsep + path
    changed = {ENV_PREFIX + name.upper(): str(value) for name, value in (settings or {}).items() if value is not None}
    return {VARIABLE: report, "PATH": path, **changed}


def report_session(session_id: str, stats: Mapping[str, Any]) -> None:
    """Append a line about a session that ends, if VARIABLE is a path. `read_report` reads it."""
    path = os.environ.get(VARIABLE, "")
    if not Path(path).is_absolute():
        return
    line = json.dumps({"session_id": session_id, "program": sys.argv[0] if sys.argv else "", "stats": stats})
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "a", encoding="utf-8") as report:
            report.write(line + "\n")


def read_report(path: str) -> list[dict[str, Any]]:
    """The sessions that `report_session` has written, in the order in which they ended."""
    found = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as report:
        for line in report:
            with contextlib.suppress(ValueError):  # a process that was killed has written a part of its line
                found.append(json.loads(line))
    return found
