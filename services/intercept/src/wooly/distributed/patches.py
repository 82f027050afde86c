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
from wooly.distributed.peers import introduction, place
from wooly.recorder import origin
from wooly.torch_private import PrefixStore, distributed_patches, make_gloo

Patch = tuple[Any, str, Any]
#: The release of NCCL that scripts see: that of PyTorch's builds for CUDA 13.
NCCL_VERSION = (2, 28, 9)
_STAYS = "it is a rank of a torch.distributed group, whose collectives cannot be repeated"


def patches(devices: Devices, mode: Callable[[], str], session: Callable[[], Any]) -> Iterator[Patch]:
    """Yield each patch as (owner, name, value).

    Args:
        devices: the process's devices.
        mode: returns the setting WOOLYAI_COLLECTIVES.
        session: returns the open session, as `wooly.api.opened_session` does.
    """
    told = False

    def connect(store: Any, rank: int, size: int, options: Any, has_host: bool) -> tuple[Carrier, Any]:
        nonlocal told
        timeout = options._timeout
        host = make_gloo(PrefixStore("cpu", store), rank, size, timeout) if has_host else None
        if mode() == "clients":
            carrier: Carrier = ClientCarrier(PrefixStore("clients", store), rank, size, timeout)
        else:
            carrier, count = _meet(devices, session, store, rank, size, timeout.total_seconds())
            if not rank and size > count and not told:
                share = "one device" if count == 1 else f"{count} devices"
                print(f"wooly: the {size} ranks of this program share {share}", file=sys.stderr, flush=True)
            told = True
        return carrier, host

    yield from distributed_patches(connect, DeviceGroup)
    yield (torch.cuda.nccl, "version", lambda: NCCL_VERSION)


def _meet(
    devices: Devices, session: Callable[[], Any], store: Any, rank: int, size: int, timeout_s: float
) -> tuple[FrameCarrier, int]:
    """Tell the other ranks where this rank's session is, and let their executors work together.

    Returns:
        The carrier, and the number of executors.

    Raises:
        DistBackendError: the executors cannot work together.
    """
    if size > MAX_RANKS:
        raise DistBackendError(f"a process group on Wooly's devices has at most {MAX_RANKS} ranks, not {size}")
    recorder = devices.recorders[devices.current]
    with recorder.lock:
        link = recorder.require_link()
    opened = session()
    index = 0 if opened is None or len(opened.parts) == 1 else devices.current
    if not rank:
        store.set("wooly/group", secrets.token_hex(GROUP_BYTES))
    with recorder.lock:
        link.stay(_STAYS)  # before the others know where it is
    store.set(f"wooly/{rank}", json.dumps(place(opened, index, link)))
    found = [json.loads(store.get(f"wooly/{k}")) for k in range(size)]
    places = {place["instance"]: place["where"] for place in found}
    if "" in places:
        raise DistBackendError(f"the executor {places['']} has no collectives; update it")
    name = bytes.fromhex(store.get("wooly/group").decode())
    first = found[0]
    if first["instance"] != found[rank]["instance"]:
        payload = introduction(opened, index, first, name)
        with recorder.lock:
            link.introduce(payload, origin())
    carrier = FrameCarrier(devices, link, name, rank, size, timeout_s)
    carrier.carry(Work(What.BARRIER))  # from now on, the executors know all ranks, so they notice if one ends
    return carrier, len(places)
