"""Executors and their devices, as they say of themselves and as the router tells others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wooly_wis.messages.base import Bytes, Count, Digest, Endpoints, Host, Id, Message, Name, SessionId
from wooly_wis.messages.memory import MemoryState


class DeviceFacts(Message):
    """One device, as its runtime describes it. Memory in bytes; `arch`: what compilers call it (sm_90, gfx942, x86_64)."""

    name: str
    vendor: str
    runtime: str
    total_memory: Bytes
    cores: int = Field(ge=1)
    arch: str = Field(default="", max_length=64)
    torch_version: str = ""


class WorkDone(Message):
    """Who did how much since the executor began: computing instructions, and device time in nanoseconds.

    `kernel`: generated kernels; `library`: the library's calls in compiled programs; `tier0`: programs that run as they are.
    `rejected`: compiled programs that were bad.
    """

    kernel_instructions: Count = 0
    library_instructions: Count = 0
    tier0_instructions: Count = 0
    kernel_ns: Count = 0
    library_ns: Count = 0
    tier0_ns: Count = 0
    rejected: Count = 0


class ExecutorHeartbeat(Message):
    """An executor is alive (event, every second).

    `utilization` is the share of the last second, 0 to 1, in which the device executed; `weights` name contents that lie in its
    memory and that a further session could share, the largest first, each by its content and circle
    (`wooly_bus.contents.name_in_circle`). `ending` is empty but in the last one of a process: why it ends.
    """

    executor_id: Id
    node: Host
    pid: int
    device: DeviceFacts
    endpoints: Endpoints
    sessions: tuple[SessionId, ...] = ()
    memory_used: Bytes = 0
    utilization: float = Field(default=0.0, ge=0.0, le=1.0)
    weights: tuple[Digest, ...] = Field(default=(), max_length=1024)
    memory: MemoryState | None = None
    work: WorkDone = WorkDone()
    ending: str = Field(default="", max_length=1024)


class NodesRequest(Message):
    """Ask the router for all nodes."""


class NodeInfo(Message):
    """One executor as the router sees it. `age_s`: since its last heartbeat; `wish`: what its operator wants of its node."""

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
