"""Patches by which the backend "nccl" of torch.distributed makes groups of Wooly's devices."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.cuda.nccl
from torch.distributed import DistBackendError
from wooly_wis.collectives import GROUP_BYTES, MAX_RANKS, What

from wooly.devices import Devices
from wooly.distributed.carrier import Carrier, Work
from wooly.distributed.clients import ClientCarrier
from wooly.distributed.frames import FrameCarrier
from wooly.distributed.group import DeviceGroup
from wooly.torch_private import PrefixStore, distributed_patches, make_gloo

Patch = tuple[Any, str, Any]
#: The release of NCCL that scripts see: that of PyTorch's builds for CUDA 13.
NCCL_VERSION = (2, 28, 9)
_STAYS = "it is a rank of a torch.distributed group, whose collectives cannot be repeated"


def patches(devices: Devices, mode: Callable[[], str]) -> Iterator[Patch]:
    """Yield each patch as (owner, name, value).

    Args:
        devices: the process's devices.
        mode: returns the setting WOOLYAI_COLLECTIVES.
    """
    told = False

    def connect(store: Any, rank: int, size: int, options: Any, has_host: bool) -> tuple[Carrier, Any]:
        nonlocal told
        timeout = options._timeout
        host = make_gloo(PrefixStore("cpu", store), rank, size, timeout) if has_host else None
        if mode() == "clients":
            carrier: Carrier = ClientCarrier(PrefixStore("clients", store), rank, size, timeout)
        else:
            carrier = _meet(devices, store, rank, size, timeout.total_seconds())
            if not rank and size > 1 and not told:
                print(f"wooly: the {size} ranks of this program share one device", file=sys.stderr, flush=True)
            told = True
        return carrier, host

    yield from distributed_patches(connect, DeviceGroup)
    yield (torch.cuda.nccl, "version", lambda: NCCL_VERSION)


def _meet(devices: Devices, store: Any, rank: int, size: int, timeout_s: float) -> FrameCarrier:
    """Tell the other ranks where this rank's session is, and check that all are on one executor.

    Raises:
        DistBackendError: they are not.
    """
    if size > MAX_RANKS:
        raise DistBackendError(f"a process group on Wooly's devices has at most {MAX_RANKS} ranks, not {size}")
    recorder = devices.recorders[devices.current]
    with recorder.lock:
        link = recorder.require_link()
    if not rank:
        store.set("wooly/group", secrets.token_hex(GROUP_BYTES))
    here = {"instance": link.device.get("instance", ""), "where": link.where}
    store.set(f"wooly/{rank}", json.dumps(here))
    found = [json.loads(store.get(f"wooly/{k}")) for k in range(size)]
    places = {place["instance"]: place["where"] for place in found}
    if "" in places:
        raise DistBackendError(f"the executor {places['']} has no collectives; update it")
    if len(places) > 1:
        listed = "; ".join([f"rank {k}: {place['where']}" for k, place in enumerate(found)][:8])
        raise DistBackendError(
            f"the ranks' sessions are on {len(places)} executors, but a process group of the backend nccl needs all ranks on one "
            f"executor ({listed}). Name a node with one device, or an executor, with WOOLYAI_NODE; or set "
            "WOOLYAI_COLLECTIVES=clients to pass the data through the ranks' processes, which is slow"
        )
    with recorder.lock:
        link.stay(_STAYS)
    name = bytes.fromhex(store.get("wooly/group").decode())
    carrier = FrameCarrier(devices, link, name, rank, size, timeout_s)
    carrier.carry(Work(What.BARRIER))  # from now on, the executor knows all ranks, so it notices if one ends
    return carrier
