"""What a process tells about the executors of its session, so that executors can work together.

A rank tells the other ranks where its session is (`place`). If the ranks of a group are at several executors, all of these carry
its collectives. Each process gets the router's ticket for each of the other executors, and passes the tickets to its own one
(`introductions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import DistBackendError
from wooly_wis.collectives import MAX_SHARES, share_of
from wooly_wis.frames import pack_json
from wooly_wis.messages.sessions import PEER_MARK

from wooly.link import Link

#: Minimum bytes of a share of a collective that is divided among executors.
LEAST_SHARE = 1 << 20
#: Bytes of host memory that an executor gives to a collective that others carry, if it does not say so: its default.
GROUP_BYTES = 512 << 20


def place(opened: Any, index: int, link: Link) -> dict[str, Any]:
    """Where a device of a session is.

    Args:
        opened: the session, as `wooly.api.opened_session` returns it; None: it has no controller.
        index: index of the device in the session.
        link: the device's link.

    Returns:
        What JSON can hold. It contains the token of a standalone executor, but no token of a controller.
    """
    found: dict[str, Any] = {"instance": link.device.get("instance", ""), "where": link.where}
    found["shares"] = bool(link.device.get("group_shares"))
    found["bytes"] = int(link.device.get("group_bytes", GROUP_BYTES))
    if opened is None:
        return found
    part = opened.parts[index]
    found |= {"session_id": opened.session_id, "executor_id": part.executor_id}
    if not opened.controlled:
        found["direct"] = {
            "executor_id": part.executor_id,
            "endpoints": list(part.endpoints),
            "token": part.token,
            "session": opened.opens.model_dump(mode="json"),
        }
    return found


def introductions(
    places: Sequence[dict[str, Any]],
    rank: int,
    group: bytes,
    known: set[str],
    introduce: Callable[[dict[str, Any], bytes], bytes],
) -> Iterator[bytes]:
    """The contents of the GROUP frames by which a rank's executor learns who carries a group.

    Args:
        places: where the sessions of the group's ranks are, by rank.
        rank: this rank.
        group: id of the group.
        known: processes of executors to which a frame has led this rank's executor before; those of this call are added.
        introduce: see `introduction`, with the place and the id as its arguments.
    """
    first = {place["instance"]: place for place in reversed(places)}
    order = list(dict.fromkeys([place["instance"] for place in places]))
    divided = len(order) > 1 and all(place.get("shares") for place in places)
    for k, instance in enumerate(order[: MAX_SHARES if divided else 1]):
        if instance == places[rank]["instance"]:
            continue
        share = share_of(group, k)
        yield known_introduction(first[instance], share) if instance in known else introduce(first[instance], share)
        known.add(instance)
    if divided:
        carriers = [order.index(place["instance"]) % MAX_SHARES for place in places]
        yield pack_json({"group": group.hex(), "carriers": carriers, "least": LEAST_SHARE})


def known_introduction(there: dict[str, Any], group: bytes) -> bytes:
    """The content of the GROUP frame for another group at an executor to which `introduction` has led before."""
    return pack_json({"group": group.hex(), "instance": there["instance"]})


def introduction(opened: Any, index: int, there: dict[str, Any], group: bytes) -> bytes:
    """The content of the GROUP frame for this process's executor.

    Args:
        opened: the session; see `place`.
        index: index of the device in the session.
        there: place of a device at the other executor.
        group: id of the group, or of the share, that the other executor carries.

    Raises:
        DistBackendError: the sessions have no controller, and their executors are not standalone, or only one of them is.
        WoolyError: the controller refuses.
    """
    said: dict[str, Any] = {"group": group.hex(), "instance": there["instance"]}
    if opened is None or bool(there.get("direct")) == opened.controlled:
        raise DistBackendError(
            "the ranks' executors cannot work together: use one controller for all ranks (WOOLYAI_CONTROLLER_URL), or standalone "
            "executors (WOOLYAI_EXECUTOR_URL)"
        )
    if opened.controlled:
        said["ticket"] = opened.peer_ticket(opened.parts[index].executor_id, there["session_id"], there["executor_id"])
    else:
        said["peer"] = there["direct"] | {"session_id": f"{opened.session_id}{PEER_MARK}{there['session_id']}"}
    return pack_json(said)
