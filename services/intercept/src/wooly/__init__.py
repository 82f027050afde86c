"""Wooly runs the "cuda" operations of an ordinary PyTorch program on a remote device.

`enable()` opens a session and redirects "cuda" to the remote device. `wooly run script.py` does the same for an unmodified
script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["cuda_kernel", "disable", "enable", "is_enabled", "ptx_kernel", "session_stats"]

if TYPE_CHECKING:
    from wooly.api import disable, enable, is_enabled, session_stats
    from wooly.kernels.cuda_c import cuda_kernel
    from wooly.kernels.ptx import ptx_kernel

    __version__: str


def __getattr__(name: str) -> Any:
    """Import the API on first use. The API imports torch, and commands such as `wooly status` do not need torch."""
    if name == "cuda_kernel":
        from wooly.kernels.cuda_c import cuda_kernel

        return cuda_kernel
    if name == "ptx_kernel":
        from wooly.kernels.ptx import ptx_kernel

        return ptx_kernel
    if name == "__version__":
        from importlib.metadata import version

        return version("wooly")
    if name in __all__:
        from wooly import api

        return getattr(api, name)
    raise AttributeError(f"module 'wooly' has no attribute {name!r}")
