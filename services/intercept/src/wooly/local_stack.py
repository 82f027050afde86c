"""Finds the local stack, and begins to start one for this process before it is needed.

`wooly run` does this first, so this module imports neither torch nor the client's messages.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wooly.settings import Settings

log = logging.getLogger("wooly")
#: Local stack that `begin` started for this process and that `take` has not returned.
_begun: Any = None


def local_stack() -> Any:
    """The module of the local stack; None if it is not installed. It is an optional part of the client."""
    for point in entry_points(group="wooly.local_stack"):
        return point.load()
    return None


def begin(settings: Settings, *, lends: bool = False) -> None:
    """Start a local stack for this process if `wooly.control.connect` will need one, and do not wait. A second call does nothing.

    This function raises no error. If the stack does not start, `connect` reports it.

    Args:
        settings: the client's settings.
        lends: this process will import torch. `fork_executor` then makes the executor from it.
    """
    global _begun
    if _begun is not None:
        return
    stack_module = None if settings.controller_url or settings.executor_url else local_stack()
    if stack_module is None or stack_module.read_stack(settings.state_dir) is not None:
        return
    try:
        _begun = stack_module.begin_stack(None, ephemeral=True, gpus=settings.gpu_count, lends=lends)
    except (RuntimeError, OSError):
        log.debug("the local stack could not be started early; connect() tries again", exc_info=True)


def fork_executor() -> None:
    """Import torch, and fork the executor of the stack that `begin` started, if it lends its executor.

    So only one process imports torch. Call this before the process has threads.
    """
    if _begun is not None and _begun.lends:
        try:
            import torch  # noqa: F401
        except ImportError:
            return  # whoever needs torch reports it
        _begun.fork_executor()


def take() -> Any:
    """The stack that `begin` started; None if there is none. The caller waits for it."""
    global _begun
    begun, _begun = _begun, None
    return begun
