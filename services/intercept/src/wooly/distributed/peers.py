"""What a process tells about the executors of its session, so that executors can work together.

A rank tells the other ranks where its session is (`place`). A process whose executor is another one than that of the first rank
gets the router's ticket for it, and passes the ticket to its own executor (`introduction`).
"""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError
from wooly_wis.frames import pack_json
from wooly_wis.messages.sessions import PEER_MARK

from wooly.link import Link


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


def known_introduction(there: dict[str, Any], group: bytes) -> bytes:
    """The content of the GROUP frame for another group at an executor to which `introduction` has led before."""
    return pack_json({"group": group.hex(), "instance": there["instance"]})


def introduction(opened: Any, index: int, there: dict[str, Any], group: bytes) -> bytes:
    """The content of the GROUP frame for this process's executor.

    Args:
        opened: the session; see `place`.
        index: index of the device in the session.
        there: place of the device whose executor carries the collectives.
        group: id of the group.

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
