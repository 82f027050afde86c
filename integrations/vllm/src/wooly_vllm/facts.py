"""Properties of the device, also for processes of vLLM that do not compute.

vLLM's server process asks for the device's properties, but its engine, another process, uses the device. So the server process
opens a session only for the question, and closes it. The engine may then be a fork of this process, as with CUDA before its first
use.
"""

from __future__ import annotations

import functools
from typing import Any

from wooly import api, opening
from wooly.facade.cuda import capability_of


def has_session() -> bool:
    """Whether this process has opened a session of its own."""
    return api.has_session()


@functools.cache
def _asked() -> dict[str, Any]:
    """The device's properties, from a session that is closed at once."""
    from wooly.settings import load

    opened, link = opening.open_link(
        load().model_copy(update={"gpu_count": 1, "recovery": "off", "required_vram": None})
    )
    try:
        return dict(link.device)
    finally:
        link.close()
        opened.close()


def _of(device_id: int) -> dict[str, Any]:
    return api.device_facts(device_id) if api.has_session() else _asked()


def devices() -> int:
    """Number of devices that the program asks for (`wooly run --gpus`)."""
    from wooly.settings import load

    return load().gpu_count


def capability(device_id: int) -> tuple[int, int]:
    """Compute capability of a device (major, minor). vLLM chooses dtypes by it, so a CPU has the first one with all of them."""
    return capability_of(_of(device_id).get("arch", "")) if is_gpu(device_id) else (8, 9)


def name(device_id: int) -> str:
    """Name of a device, as its vendor writes it: vLLM looks for tuned sizes of kernels by it."""
    return str(_of(device_id).get("name", "unknown device"))


def total_memory(device_id: int) -> int:
    """Bytes of memory that the session may use."""
    return int(_of(device_id).get("total_memory", 0))


def cores(device_id: int) -> int:
    """Number of the device's multiprocessors; of a CPU, its cores."""
    return int(_of(device_id).get("cores", 1))


def is_gpu(device_id: int = 0) -> bool:
    """Whether the executor's device is a GPU. Kernels in Triton then have the vendor's compiler."""
    return str(_of(device_id).get("arch", "")).startswith(("sm_", "gfx"))


def multiplies_fp8(device_id: int = 0) -> bool:
    """Whether PyTorch's products of 8-bit floating-point numbers work on a device."""
    arch = str(_of(device_id).get("arch", ""))
    return arch.startswith(("gfx94", "gfx95", "gfx12")) if arch.startswith("gfx") else capability(device_id) >= (8, 9)
