"""Runs a user's script or module exactly as Python does. The caller has enabled the device before."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from wooly.python_private import join_threads, run_exit_functions, skip_at_exit

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


def finish() -> None:
    """Do what Python does after a script: wait for its threads, and call the functions that it has registered with `atexit`."""
    try:
        join_threads()
    except BaseException as e:  # such as KeyboardInterrupt; Python prints it, too, and goes on
        print_error(e)
    private = sys.modules.get("wooly.torch_private")
    if private is not None:
        skip_at_exit(private.remove_kernels)  # it would take 35 ms, and the process ends anyway
    run_exit_functions()


#: Classes of archives, by module. An archive is written completely only when it is closed. A class comes before those whose files
#: it may write into.
_WRITERS = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))


def flush_files() -> None:
    """Write what the script's open files keep in memory, as the end of Python does.

    Files of modules that were imported before the script, which the collector does not know (`gc.freeze`), are not written.
    """
    archives = [getattr(sys.modules[module], name) for module, name in _WRITERS if module in sys.modules]
    kinds = (io.TextIOWrapper, *archives, io.BufferedWriter, io.BufferedRandom)
    found: dict[type, list[object]] = {kind: [] for kind in kinds}
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, kinds):
            found[next(k for k in kinds if issubclass(kind, k))].append(each)
    for kind, files in found.items():
        for file in files:
            with contextlib.suppress(Exception):
                (file.close if kind in archives else file.flush)()  # type: ignore[attr-defined]
