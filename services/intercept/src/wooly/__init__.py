"""Wooly runs the "cuda" operations of an ordinary PyTorch program on a remote device.

`enable()` opens a session and redirects "cuda" to the remote device. `wooly run script.py` does the same for an unmodified
script.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["cuda_kernel", "disable", "enable", "is_enabled", "ptx_kernel", "session_stats"]

#: Modules of the names that are not in `wooly.api`.
_HOMES = {"cuda_kernel": "wooly.kernels.cuda_c", "ptx_kernel": "wooly.kernels.ptx"}

if TYPE_CHECKING:
    from wooly.api import disable, enable, is_enabled, session_stats
    from wooly.kernels.cuda_c import cuda_kernel
    from wooly.kernels.ptx import ptx_kernel

    __version__: str


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext wooly` in a notebook: open a session and redirect "cuda"."""
    from wooly import api

    api.enable()
    for index, device in enumerate(api.session_stats()["devices"] if api.has_session() else ()):
        print(f"cuda:{index} is {device['device']} of {device['executor_id']} ({device['node']})")


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext wooly`: close the session."""
    from wooly import api

    api.disable()


def __getattr__(name: str) -> Any:
    """Import the API on first use. The API imports torch, and commands such as `wooly status` do not need torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("wooly")
    if name not in __all__:
        raise AttributeError(f"module 'wooly' has no attribute {name!r}")
    from wooly import capture

    home = importlib.import_module(_HOMES.get(name, "wooly.api"))
    capture.finish()
    return getattr(home, name)
