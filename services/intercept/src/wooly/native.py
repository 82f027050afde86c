"""The optional native kernels (`wooly-native`): whether they are there, and what the rest of the client uses of them.

Native kernels record calls whose plan Python has taught them, as `kernels.generic` would, with the same programs. Everything
else stays in Python. Without the module, or with WOOLYAI_NATIVE=off, Python does everything. The fields of heaps and recorders on
which both work are the base classes here: C structs with the module, plain attributes without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly.link import Link
    from wooly.origins import Origin
    from wooly.recorder import Capture, Outline
    from wooly.storage import Heap

#: Name of the setting as an environment variable.
VARIABLE = "WOOLYAI_NATIVE"
#: The package with the native module. No requirement names it, because it is optional and fits one release of PyTorch.
PACKAGE = "wooly_native"

Wish = Literal["auto", "on", "off"]


def _load() -> tuple[Any, str]:
    """The native module, and why it is None."""
    if os.environ.get(VARIABLE) == "off":
        return None, f"{VARIABLE}=off"
    if importlib.util.find_spec(PACKAGE) is None:
        return None, "wooly-native is not installed"
    package = importlib.import_module(PACKAGE)
    built_for, have = package.TORCH, str(torch.__version__)
    if built_for != have:
        return None, f"wooly-native was built for PyTorch {built_for}, and PyTorch {have} is installed"
    if package.is_outdated():
        return None, "the sources of wooly-native have changed since it was built; build it again: make native"
    try:
        return importlib.import_module(f"{PACKAGE}._native"), ""
    except ImportError as e:
        return None, f"wooly-native cannot be loaded: {e}"


#: The native module, or None; and why it is None.
module, reason = _load()


class HeapFields:
    """Fields of `storage.Heap`."""

    __slots__ = (
        *("_next", "_reusable", "dead", "granted", "held_bytes", "index", "kept", "live", "live_bytes"),
        *("observed", "peak_bytes", "peak_live", "tell_free"),
    )
    index: int
    live: int
    live_bytes: int
    peak_bytes: int
    peak_live: int
    held_bytes: int
    granted: int
    observed: bool
    dead: list[int]
    kept: dict[int, int]
    tell_free: Callable[[Any], None]
    _next: int
    _reusable: list[int]


class ProgramFields:
    """Fields of `recorder.Recorder`."""

    operations: int
    room: int
    replaced: bool
    lock: Any
    heap: Heap
    link: Link | None
    capture: Capture | None
    words: list[int]
    bind: list[int]
    slot_of: dict[int, int]
    params: list[float | int]
    origins: list[Origin]
    _open_limit: int
    _frees: list[int]
    _freed: list[int]
    _end_forms: set[int]
    _closed_at_end_form: Outline | None
    _free_form: int


if not TYPE_CHECKING and module is not None:
    HeapFields, ProgramFields = module.HeapFields, module.ProgramFields


_switched_off = False


def switch(wish: Wish) -> None:
    """Let native kernels record calls, or give all calls to Python.

    Raises:
        WoolyError: they are required, and not there.
    """
    if wish == "on" and module is None:
        raise WoolyError(f"{VARIABLE}=on, but {reason}; set it to auto, or build wooly-native: make native")
    global _switched_off
    _switched_off = wish == "off"
    if module is not None:
        module.switch(not _switched_off)


def forget() -> None:
    """Forget all plans that Python taught, because calls with the same signatures may have other plans now."""
    if module is not None:
        module.forget()


def describe() -> str:
    """In a few words, whether native kernels are used."""
    if module is None:
        return f"off: {reason}"
    return "off: the setting `native` is off" if _switched_off else f"on (built for PyTorch {torch.__version__})"
