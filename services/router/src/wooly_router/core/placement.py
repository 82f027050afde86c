"""Which executor gets a session: filter, then score. A pure function that gives its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wooly_wis.messages import ExecutorHeartbeat, OpenSessionRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice: an executor, or None with the reason for each that was passed over."""

    executor: ExecutorHeartbeat | None
    reasons: Mapping[str, str]


def place(
    request: OpenSessionRequest,
    alive: Sequence[ExecutorHeartbeat],
    reserved: Mapping[str, int],
    pending: Mapping[str, int],
) -> Placement:
    """Choose among executors that are alive.

    Args:
        request: what the client wants.
        alive: candidates.
        reserved: bytes promised on each executor to sessions that named a size.
        pending: sessions on each executor, as the router has them.

    The fewest sessions win, then the lowest utilization, then the id: the same input always gives the same choice.
    """
    reasons: dict[str, str] = {}
    fitting: list[ExecutorHeartbeat] = []
    for executor in alive:
        room = executor.device.total_memory - reserved.get(executor.executor_id, 0)
        if request.gpu_count > 1:
            reasons[executor.executor_id] = f"has 1 device, {request.gpu_count} were asked for"
        elif request.node_groups:
            reasons[executor.executor_id] = f"is in none of the groups {', '.join(request.node_groups)}"
        elif request.required_vram is not None and request.required_vram > room:
            reasons[executor.executor_id] = f"has {room} bytes unreserved, {request.required_vram} were asked for"
        elif request.gpu_mode == "exclusive" and pending.get(executor.executor_id, 0):
            reasons[executor.executor_id] = "has sessions, an exclusive device was asked for"
        else:
            fitting.append(executor)
    if not fitting:
        return Placement(None, reasons)
    best = min(fitting, key=lambda e: (pending.get(e.executor_id, 0), round(e.utilization, 2), e.executor_id))
    return Placement(best, reasons)
