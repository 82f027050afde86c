"""The share of an NVIDIA GPU's cores that this process uses, as NVML measures it. For comparison with bills, never for bills."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

log = logging.getLogger("wooly.executor")


class Nvml:
    """NVML, if its module (`pynvml`, of the package `nvidia-ml-py`) is installed and the driver offers it."""

    def __init__(self) -> None:
        self._module: Any = None
        self._absent = False
        self._seen_us = 0

    def utilisation(self, uuid: str) -> float | None:
        """Return the mean share of this process since the last call, from 0 to 1; None: NVML does not tell.

        Args:
            uuid: the GPU's UUID, without NVML's prefix.
        """
        if self._absent:
            return None
        try:
            if self._module is None:
                module = importlib.import_module("pynvml")
                module.nvmlInit()
                self._module = module
            handle = self._module.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            samples = self._module.nvmlDeviceGetProcessUtilization(handle, self._seen_us)
        except ImportError:
            self._absent = True
            return None
        except Exception as e:  # NVML's errors have no public base that every version has
            if "not found" in str(e).lower():  # no sample since the last call: no process used the GPU
                return 0.0
            log.info("NVML does not tell how much of the GPU is used (%s): bills are not compared with it", e)
            self._absent = True
            return None
        self._seen_us = max([self._seen_us, *[int(s.timeStamp) for s in samples]])
        mine = [min(max(int(s.smUtil), 0), 100) for s in samples if int(s.pid) == os.getpid()]
        if not mine:  # in a container, NVML may know this process by another number
            return None if samples else 0.0
        return sum(mine) / len(mine) / 100
