"""Native kernels of Wooly's client. `wooly` finds this package and uses it; nothing else imports it."""

from pathlib import Path

from wooly_native import _built
from wooly_native._sources import digest

__all__ = ["TORCH", "is_outdated"]

TORCH = _built.TORCH


def is_outdated() -> bool:
    """Whether the sources of a checkout have changed since the module was built."""
    now = digest(Path(__file__).parent)
    return now is not None and now != getattr(_built, "SOURCES", None)
