"""Runs a user's script or module exactly as Python does. The caller has enabled the device before."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

#: Prefixes of the file names of frames that are not part of the script: Wooly, and Python's own runners.
_OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "<frozen runpy>", "<frozen importlib")


@contextlib.contextmanager
def _arguments(argv: list[str], path0: str) -> Iterator[None]:
    old_argv, old_path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = argv, path0
    try:
        yield
    finally:
        sys.argv = old_argv
        if sys.path and sys.path[0] == path0:
            sys.path[0] = old_path


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without Wooly's frames before the script."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OWN):
        tb = tb.tb_next
    return tb


def print_error(error: BaseException) -> None:
    """Print an error of a script with its traceback, without Wooly's frames before the script, and note it, as Python does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, _without_our_frames(error.__traceback__)
    traceback.print_exception(sys.last_type, error, sys.last_traceback)


def run(target: str, arguments: list[str], *, module: bool) -> int:
    """Run `target` as `__main__`. Returns the exit code that Python would return.

    Args:
        target: path of a script, or with `module` the name of a module.
        arguments: command-line arguments of the script.
        module: run a module, like `python -m`.
    """
    try:
        if module:
            with _arguments([target, *arguments], str(Path.cwd())):
                runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            with _arguments([target, *arguments], os.path.dirname(os.path.abspath(target))):
                runpy.run_path(target, run_name="__main__")
    except SystemExit as e:
        if e.code is None:
            return 0
        if isinstance(e.code, int):
            return e.code
        print(e.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        print_error(e)
        return 130
    except BaseException as e:
        print_error(e)
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    return 0
