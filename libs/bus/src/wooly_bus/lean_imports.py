"""Imports libraries without what they import only in case it is installed.

nats-py imports aiohttp, which takes as long as all the rest of nats-py and is used only for WebSockets. No distribution of Wooly
but the Kubernetes operator needs aiohttp.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

#: The modules that nats-py needs only for `ws://` and `wss://`.
LATER = ("aiohttp", "multidict")


class _Later:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


@contextlib.contextmanager
def unavailable(*names: str) -> Iterator[None]:
    """Let imports of these modules fail inside the block, in all threads. Modules that are imported already stay."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None: the import fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_nats() -> None:
    """Import nats-py. Call this before the process has threads, because no thread can import aiohttp meanwhile."""
    if "nats" in sys.modules or any(name in sys.modules or importlib.util.find_spec(name) is None for name in LATER):
        return
    with unavailable(*LATER):
        transport = importlib.import_module("nats.aio.transport")
    for name in LATER:
        setattr(transport, name, _Later(name))
