"""Patches by which the backend "nccl" of torch.distributed makes groups of Wooly's devices."""

from __future__ import annotations

import json
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.cuda.nccl
from torch.distributed import DistBackendError
from wooly_wis.collectives import GROUP_BYTES, MAX_RANKS

from wooly import ranks
from wooly.devices import Devices
from wooly.distributed.carrier import Carrier
from wooly.distributed.clients import ClientCarrier
from wooly.distributed.frames import FrameCarrier
from wooly.distributed.group import DeviceGroup
from wooly.distributed.peers import introduction, introductions, place
from wooly.distributed.together import Together
from wooly.link import Link
from wooly.origins import origin
from wooly.recorder import Lock
from wooly.torch_private import PrefixStore, distributed_patches, make_gloo

Patch = tuple[Any, str, Any]
#: The release of NCCL that scripts see: that of PyTorch's builds for CUDA 13.
NCCL_VERSION = (2, 28, 9)
_STAYS = "it is a rank of a torch.distributed group, whose collectives cannot be repeated: {}"


def patches(devices: Devices, mode: Callable[[], str], session: Callable[[], Any]) -> Iterator[Patch]:
    """Yield each patch as (owner, name, value).

    Args:
        devices: the process's devices.
        mode: returns the setting WOOLYAI_COLLECTIVES.
        session: returns the open session, as `wooly.api.opened_session` does.
    """
    told = False
    meeting = Meeting(devices, session)

    def connect(store: Any, rank: int, size: int, options: Any, has_host: bool) -> tuple[Carrier, Any]:
        nonlocal told
        for recorder in devices.active():
            if (capture := recorder.own_capture) is not None:
                capture.refuse(
                    "A process group cannot be made while a CUDA graph is captured, because its ranks wait for each other. Make "
                    "it before the capture (init_process_group, new_group)."
                )
        timeout = options._timeout
        # A program that makes its groups again may meet in the same store, where the keys of its former groups still are.
        store = PrefixStore(f"wooly/{store.add(f'wooly/made/{rank}', 1)}", store)
        host = make_gloo(PrefixStore("cpu", store), rank, size, timeout) if has_host else None
        if mode() == "clients":
            carrier: Carrier = ClientCarrier(PrefixStore("clients", store), rank, size, timeout, devices)
        else:
            carrier, count = meeting.meet(store, rank, size, timeout.total_seconds())
            if not rank and size > count and not told:
                share = "one device" if count == 1 else f"{count} devices"
                print(f"wooly: the {size} ranks of this program share {share}", file=sys.stderr, flush=True)
            told = True
        return carrier, host

    yield from distributed_patches(connect, DeviceGroup)
    yield (torch.cuda.nccl, "version", lambda: NCCL_VERSION)


class Meeting:
    """Makes groups of ranks whose executors carry the collectives.

    Args:
        devices: the process's devices.
        session: returns the open session, as `wooly.api.opened_session` does.
    """

    def __init__(self, devices: Devices, session: Callable[[], Any]) -> None:
        self._devices, self._session = devices, session
        #: The ranks of the open session's program, after its first group was made.
        self._together: Together | None = None
        #: By link, and by the process of its session's executor: processes to which it has been led.
        self._ways: weakref.WeakKeyDictionary[Link, dict[str, set[str]]] = weakref.WeakKeyDictionary()

    def meet(self, store: Any, rank: int, size: int, timeout_s: float) -> tuple[FrameCarrier, int]:
        """See `_meet`. The script has used no device by that."""
        devices = self._devices
        used = devices.is_used()
        found = self._meet(store, rank, size, timeout_s)
        if not used:
            devices.grouped = devices.operations
        return found

    def _meet(self, store: Any, rank: int, size: int, timeout_s: float) -> tuple[FrameCarrier, int]:
        """Tell the other ranks where this rank's session is, and let their executors work together.

        If all ranks can, their sessions go on elsewhere together. Otherwise each ends with its executor.

        Returns:
            The carrier, and the number of executors.

        Raises:
            DistBackendError: the executors cannot work together.
        """
        if size > MAX_RANKS:
            raise DistBackendError(f"a process group on Wooly's devices has at most {MAX_RANKS} ranks, not {size}")
        devices = self._devices
        recorder = devices.recorders[devices.current]
        with recorder.lock:
            link = recorder.require_link()
        opened = self._session()
        index = 0 if opened is None or len(opened.parts) == 1 else devices.current
        if not rank:
            store.set("group", secrets.token_hex(GROUP_BYTES))
        whole = _is_whole(rank, size)
        known = self._together if self._together is not None and self._together.link is link else None
        why = _why_alone(link, opened, whole=whole, known=known)
        own = rank if known is None else known.rank
        behind = None if not whole else 0 if known is None else known.behind
        store.set(f"{rank}/recovers", json.dumps([own, why, behind]))
        said = [json.loads(store.get(f"{k}/recovers")) for k in range(size)]
        name = bytes.fromhex(store.get("group").decode())
        why = next((f"rank {number}: {reason}" for number, reason, _ in said if reason), "")
        if not why and link.recovery is not None:
            together = self._together = known or _enter(store, rank, size, link, recorder.lock, opened, index)
            turns = [turn for _, _, turn in said]
            first = None if None in turns else max(turns)
            with recorder.lock:
                link.recovery.together = together
                found = together.form(name, [number for number, _, _ in said])
                if first is not None:
                    together.lead(first)
            # Also if one executor has all ranks: after a loss, several may have them.
            most = _bytes_of_round(found, always=True)
            carrier = FrameCarrier(devices, link, name, rank, size, timeout_s, together, turns_from=first, most=most)
            carrier.form()
            return carrier, len({place["instance"] for place in found})
        with recorder.lock:
            link.stay(_STAYS.format(why))  # before the others know where it is
        store.set(f"{rank}", json.dumps(place(opened, index, link)))
        found = [json.loads(store.get(f"{k}")) for k in range(size)]
        places = {place["instance"]: place["where"] for place in found}
        if "" in places:
            raise DistBackendError(f"the executor {places['']} has no collectives; update it")
        led: set[str] = set()
        if opened is not None and opened.controlled:  # only a controller's ticket leads to an executor for all groups
            led = self._ways.setdefault(link, {}).setdefault(found[rank]["instance"], led)
        payloads = list(
            introductions(found, rank, name, led, lambda there, group: introduction(opened, index, there, group))
        )
        with recorder.lock:
            for payload in payloads:
                link.introduce(payload, origin())
        carrier = FrameCarrier(devices, link, name, rank, size, timeout_s, most=_bytes_of_round(found))
        carrier.form()
        return carrier, len(places)


def _bytes_of_round(places: Sequence[dict[str, Any]], *, always: bool = False) -> int | None:
    """Bytes of host memory that a collective of ranks at these places may need; None: one executor, which needs none, unless
    `always`.
    """
    if not always and len({place["instance"] for place in places}) == 1:
        return None
    return min([int(place["bytes"]) for place in places])


def _enter(store: Any, rank: int, size: int, link: Link, lock: Lock, opened: Any, index: int) -> Together:
    """Let the sessions of all ranks go on elsewhere together from now on."""
    together = Together(
        PrefixStore("together", store).clone(),
        rank,
        size,
        link,
        lock,
        lambda: place(opened, index, link),
        lambda there, group: introduction(opened, index, there, group),
    )
    together.enter()
    return together


def _is_whole(rank: int, size: int) -> bool:
    """Whether a group has all ranks of the program."""
    own = ranks.own()
    return own is not None and (own.rank, own.size) == (rank, size)


def _why_alone(link: Link, opened: Any, *, whole: bool, known: Together | None) -> str:
    """Why this session cannot go on elsewhere together with those of a group's other ranks; empty: it can."""
    if link.recovery is None:
        return link.stays or "WOOLYAI_RECOVERY is off"
    if known is not None:
        return known.over
    if opened is None or not opened.controlled:
        return "its executor has no controller"
    if len(opened.parts) > 1:
        return "its session has several devices"
    if not whole:
        return "the first group is not that of all ranks that the launcher has started"
    return "" if link.device.get("groups_recover") else f"the executor {link.where} is too old"
