"""Control messages: what services and clients say to each other over NATS. Frozen, versioned, nothing extra."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    """Base of every control message."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1


class DeviceFacts(Message):
    """One device, as its runtime describes it. Memory in bytes."""

    name: str
    vendor: str
    runtime: str
    total_memory: int = Field(ge=0)
    cores: int = Field(ge=1)
    torch_version: str = ""


class ExecutorHeartbeat(Message):
    """An executor is alive (event, every second).

    `utilization` is the share of the last second, 0 to 1, in which the device executed.
    """

    executor_id: str
    node: str
    pid: int
    device: DeviceFacts
    endpoints: tuple[str, ...]
    sessions: tuple[str, ...] = ()
    memory_used: int = Field(default=0, ge=0)
    utilization: float = Field(default=0.0, ge=0.0, le=1.0)


class ClientFacts(Message):
    """Who asks for a session."""

    host: str
    pid: int
    program: str = ""


class OpenSessionRequest(Message):
    """A client wants a device (to the router)."""

    tenant: str = "default"
    credential: str = ""
    priority: int = Field(default=2, ge=0, le=4)
    required_vram: int | None = Field(default=None, gt=0)
    gpu_count: int = Field(default=1, ge=1, le=64)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: tuple[str, ...] = ()
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    client: ClientFacts


class OpenSessionReply(Message):
    """The client's session: where to connect and with what token; renew within `lease_s` seconds."""

    session_id: str
    executor_id: str
    node: str
    endpoints: tuple[str, ...]
    token: str
    lease_s: float
    device: DeviceFacts


class RenewSessionRequest(Message):
    """The client is still there."""

    session_id: str
    token: str


class RenewSessionReply(Message):
    """The lease runs for another `lease_s` seconds."""

    lease_s: float


class CloseSessionRequest(Message):
    """The client is done, or the router takes a session back."""

    session_id: str
    token: str = ""
    reason: str = ""


class CloseSessionReply(Message):
    """Whether there was such a session."""

    closed: bool


class HostSessionRequest(Message):
    """The router asks an executor to take a session."""

    session_id: str
    token: str
    tenant: str
    priority: int = Field(ge=0, le=4)
    quota: int | None = Field(default=None, gt=0)
    lease_s: float = Field(gt=0)


class HostSessionReply(Message):
    """The executor took it."""

    endpoints: tuple[str, ...]


class SessionClosed(Message):
    """A session ended on its executor (event)."""

    session_id: str
    executor_id: str
    reason: str = ""


class NodesRequest(Message):
    """Ask the router for all nodes."""


class NodeInfo(Message):
    """One executor as the router sees it. `age_s`: seconds since its last heartbeat."""

    executor_id: str
    node: str
    state: Literal["alive", "lost"]
    age_s: float
    device: DeviceFacts
    sessions: int
    memory_used: int
    utilization: float


class NodesReply(Message):
    """All executors that the router knows."""

    nodes: tuple[NodeInfo, ...]


class ErrorReply(Message):
    """The one shape in which an error travels."""

    code: str
    message: str
    retryable: bool = False
