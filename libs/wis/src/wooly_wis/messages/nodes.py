"""Messages about executors and their devices: heartbeats of executors, and the router's list of nodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wooly_wis.messages.base import Bytes, Count, Digest, Endpoints, Host, Id, Message, Name, SessionId
from wooly_wis.messages.memory import MemoryState


class DeviceFacts(Message):
    """One device, as its runtime describes it. Memory is in bytes. `arch`: the compilers' name of the chip (sm_90, gfx942,
    x86_64). `libraries`: the version of each extension library whose operators programs may call, by import name.
    """

    name: str
    vendor: str
    runtime: str
    total_memory: Bytes
    cores: int = Field(ge=1)
    arch: str = Field(default="", max_length=64)
    torch_version: str = ""
    libraries: dict[str, str] = Field(default_factory=dict, max_length=256)


class WorkDone(Message):
    """Work of an executor since its start: number of computing instructions, and device time in nanoseconds.

    `kernel`: generated kernels. `library`: library calls in compiled programs. `tier0`: programs without a plan. `rejected`:
    number of artifacts that the executor refused.
    """

    kernel_instructions: Count = 0
    library_instructions: Count = 0
    tier0_instructions: Count = 0
    kernel_ns: Count = 0
    library_ns: Count = 0
    tier0_ns: Count = 0
    rejected: Count = 0


class ExecutorHeartbeat(Message):
    """Heartbeat of an executor (event, every second).

    Attributes:
        utilization: fraction of the last second, 0 to 1, in which the device executed.
        weights: contents in the executor's memory that another session could share, largest first. Each is named by content and
            circle
            (`wooly_bus.contents.shared_name`).
        late: sessions whose leases were not renewed for more than half of their length, while the connections of their clients
            are open.
        journal: name of the current dispatch journal; empty if there is none. A new process has a new journal, and publishes no
            entry of it while it has nothing to do.
        ending: why the process ends, in its last heartbeat; otherwise empty.
        leaving: why the process will end as soon as its sessions have gone on elsewhere; otherwise empty.
        checkpoints: identity of the place where it stores checkpoints. Executors with the same identity can restore each other's
            sessions. Empty: it stores none.
        checkpoints_read: identities of other places whose checkpoints it can restore.
    """

    executor_id: Id
    node: Host
    pid: int
    device: DeviceFacts
    endpoints: Endpoints
    sessions: tuple[SessionId, ...] = ()
    late: tuple[SessionId, ...] = ()
    memory_used: Bytes = 0
    utilization: float = Field(default=0.0, ge=0.0, le=1.0)
    weights: tuple[Digest, ...] = Field(default=(), max_length=1024)
    memory: MemoryState | None = None
    work: WorkDone = WorkDone()
    journal: str = Field(default="", max_length=256)
    ending: str = Field(default="", max_length=1024)
    leaving: str = Field(default="", max_length=1024)
    checkpoints: str = Field(default="", max_length=64)
    checkpoints_read: tuple[Name, ...] = Field(default=(), max_length=8)


class NamedSession(Message):
    """A session, its tenant, and its number of devices."""

    tenant: Name
    session_id: SessionId
    devices: int = Field(default=1, ge=1, le=8)


class KeepCheckpointsRequest(Message):
    """What becomes of checkpoints whose sessions no executor has (router to executor).

    `keep`: hibernated sessions. `drop`: sessions that have ended.
    """

    keep: tuple[NamedSession, ...] = Field(default=(), max_length=1000)
    drop: tuple[NamedSession, ...] = Field(default=(), max_length=1000)


class KeepCheckpointsReply(Message):
    """The executor has begun to do so."""


class NodesRequest(Message):
    """Ask the router for all nodes."""


class NodeInfo(Message):
    """One executor as the router sees it. `age_s`: seconds since its last heartbeat. `wish`: the operator's wish for its node."""

    executor_id: Id
    node: Host
    state: Literal["alive", "lost"]
    age_s: float
    device: DeviceFacts
    sessions: int
    memory_used: Bytes
    utilization: float
    wish: Literal["active", "cordoned", "draining"] = "active"
    groups: tuple[Name, ...] = ()
    overcommit_vram_percent: int = 0
    memory: MemoryState | None = None
    work: WorkDone = WorkDone()


class NodesReply(Message):
    """All executors that the router knows."""

    nodes: tuple[NodeInfo, ...]


class SetNodeStateRequest(Message):
    """Change whether a node takes tasks (active), takes no new ones (cordoned), or loses its sessions, too (draining)."""

    node: Host
    state: Literal["active", "cordoned", "draining"]
    credential: str = Field(default="", max_length=65536)


class SetNodeStateReply(Message):
    """The state of a node, and the sessions and jobs that it still has. `moving`: sessions whose clients were asked to move."""

    node: Host
    state: Literal["active", "cordoned", "draining"]
    tasks: tuple[SessionId, ...] = ()
    moving: tuple[SessionId, ...] = ()
