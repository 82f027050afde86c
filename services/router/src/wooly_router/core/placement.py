"""Which executors get a session: filter, then score. A pure function that gives its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wooly_wis.messages import ExecutorHeartbeat, OpenSessionRequest


@dataclass(frozen=True, slots=True)
class Claim:
    """What one session, open or being opened, takes of one executor. Memory in bytes."""

    executor_id: str
    required_vram: int | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What all sessions take of one executor."""

    sessions: int = 0
    reserved: int = 0
    exclusive: bool = False


IDLE = Load()


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice: an executor per device asked for, or none with the reason for each that was passed over."""

    executors: tuple[ExecutorHeartbeat, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)


def loads(claims: Iterable[Claim]) -> dict[str, Load]:
    """The load of each executor that has sessions."""
    result: dict[str, Load] = {}
    for claim in claims:
        load = result.get(claim.executor_id, IDLE)
        result[claim.executor_id] = replace(
            load,
            sessions=load.sessions + 1,
            reserved=load.reserved + (claim.required_vram or 0),
            exclusive=load.exclusive or claim.exclusive,
        )
    return result


def unfit(request: OpenSessionRequest, executor: ExecutorHeartbeat, load: Load) -> str:
    """Why the executor cannot take a device of the session; empty if it can."""
    room = executor.device.total_memory - load.reserved
    if request.node_groups:
        return f"is in none of the groups {', '.join(request.node_groups)}"
    if load.exclusive:
        return "is held exclusively by another session"
    if request.gpu_mode == "exclusive" and load.sessions:
        return "has sessions, an exclusive device was asked for"
    if request.required_vram is not None and request.required_vram > room:
        return f"has {max(room, 0)} bytes unreserved, {request.required_vram} were asked for"
    return ""


def place(request: OpenSessionRequest, candidates: Sequence[ExecutorHeartbeat], load: Mapping[str, Load]) -> Placement:
    """Choose as many executors as devices were asked for, each for one device.

    Executors on one node win if one has enough of them, else the fewest nodes. Then the fewest sessions, the lowest utilization
    in hundredths, the id: the same input always gives the same choice.

    Args:
        request: what the client wants.
        candidates: executors that are alive.
        load: what sessions take of them.
    """
    reasons: dict[str, str] = {}
    nodes: dict[str, list[ExecutorHeartbeat]] = {}

    def score(executor: ExecutorHeartbeat) -> tuple[int, int, str]:
        sessions = load.get(executor.executor_id, IDLE).sessions
        return sessions, round(100 * executor.utilization), executor.executor_id

    for executor in sorted(candidates, key=score):
        why = unfit(request, executor, load.get(executor.executor_id, IDLE))
        if why:
            reasons[executor.executor_id] = why
        else:
            nodes.setdefault(executor.node, []).append(executor)
    chosen: list[ExecutorHeartbeat] = []
    while nodes and len(chosen) < request.gpu_count:
        missing = request.gpu_count - len(chosen)

        def worth(node: str, missing: int = missing) -> tuple[int, list[tuple[int, int, str]]]:
            best = nodes[node][:missing]
            return -len(best), sorted([score(e) for e in best], reverse=True)

        chosen += nodes.pop(min(nodes, key=worth))[:missing]
    return Placement(tuple(chosen) if len(chosen) == request.gpu_count else (), reasons)
