"""A session's life: opened, hosted, renewed, steered, closed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wooly_wis.messages.base import ChannelToken, Digest, Endpoints, Host, Id, Message, Name, SessionId, Token
from wooly_wis.messages.nodes import DeviceFacts


class ClientFacts(Message):
    """Who asks for a session."""

    host: Host
    pid: int
    program: str = Field(default="", max_length=4096)


class OpenSessionRequest(Message):
    """A client wants devices (to the router). `required_vram` is bytes on each of them.

    `model`: what bills call what it runs.
    `weight` is its share inside its class; `service_ns`, `objective_ns` and `interval_ns` as in `AdmitSessionRequest`.
    """

    tenant: Name = "default"
    credential: str = Field(default="", max_length=65536)
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    interval_ns: int = Field(default=0, ge=0, lt=1 << 62)
    required_vram: int | None = Field(default=None, gt=0, lt=1 << 63)
    gpu_count: int = Field(default=1, ge=1, le=64)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: tuple[Name, ...] = Field(default=(), max_length=64)
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    model: str = Field(default="", max_length=256)
    client: ClientFacts


class SessionPart(Message):
    """One device of a session: who serves it, where to connect, and what to show there; without `token`, the session's."""

    executor_id: Id
    node: Host
    endpoints: Endpoints
    device: DeviceFacts
    token: ChannelToken = ""


class OpenSessionReply(Message):
    """The client's session: its devices, each on an executor of its own; renew it with `token` within `lease_s` seconds.

    `credentials`: of NATS, for tunnels to these executors; empty where NATS asks for none. `trace_id`: the trace that is kept of
    it; empty: none is.
    """

    session_id: SessionId
    token: Token
    lease_s: float = Field(gt=0)
    parts: tuple[SessionPart, ...] = Field(min_length=1, max_length=64)
    credentials: str = Field(default="", max_length=65536)
    trace_id: str = Field(default="", max_length=32)


class RenewSessionRequest(Message):
    """The client is still there."""

    session_id: SessionId
    token: Token


class RenewSessionReply(Message):
    """The lease runs for another `lease_s` seconds."""

    lease_s: float = Field(gt=0)


class CloseSessionRequest(Message):
    """The client is done, or the router takes a session back."""

    session_id: SessionId
    token: Token = ""
    reason: str = Field(default="", max_length=4096)


class CloseSessionReply(Message):
    """Whether there was such a session.

    `running_s`: an operator of the session has been on the device for so long, and cannot be stopped: the session ends there when
    the operator does. 0: nothing of the session runs.
    """

    closed: bool
    running_s: float = Field(default=0.0, ge=0)


class SessionPolicy(Message):
    """How the dispatch core treats a session; see `wooly_dispatch.events.Policy`. Times in nanoseconds.

    `rate_permille` and `burst_ns` police P0 and P1; 0 is not policed.
    """

    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    rate_permille: int = Field(default=0, ge=0, le=1000)
    burst_ns: int = Field(default=0, ge=0, lt=1 << 62)


class HostSessionRequest(Message):
    """The router asks an executor to take a session. Without `policy`, it is of its class and otherwise like all.

    `swap`: it may be swapped out; `dedup`: with whom it shares equal content; `overcommit_vram_percent`: how much of its memory
    the executor may promise beyond what it has, from now on (None: as before); `model`: what bills call what it runs.
    `token` renews the lease. `channel_key`: who signs what clients show at the data channel, at the router's time `at` (seconds
    since the epoch); without, they show `token`. `opaque_kernels`: whether it may launch kernels that executors cannot check.
    """

    session_id: SessionId
    token: Token
    tenant: Name
    priority: int = Field(ge=0, le=4)
    policy: SessionPolicy | None = None
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)
    model: str = Field(default="", max_length=256)
    opaque_kernels: bool = False
    lease_s: float = Field(gt=0)
    channel_key: str = Field(default="", max_length=128)
    at: float = Field(default=0.0, ge=0)


class SteerSessionRequest(Message):
    """Treat a running session otherwise from now on (to an executor, or to the scheduler, which tells all its executors).

    What is None stays as it is. `exclusive` shuts all other sessions of the device out, or lets them in again. `hold` suspends
    the session for a reason of its own, which its client is told; empty: that reason is gone.
    """

    session_id: SessionId
    policy: SessionPolicy | None = None
    priority: int | None = Field(default=None, ge=0, le=4)
    weight: int | None = Field(default=None, ge=1, le=1 << 20)
    suspended: bool | None = None
    exclusive: bool | None = None
    hold: str | None = Field(default=None, max_length=4096)


class SteerSessionReply(Message):
    """How the session is treated now."""

    policy: SessionPolicy
    suspended: bool
    exclusive: bool


class HostSessionReply(Message):
    """The executor took it."""

    endpoints: Endpoints


class SessionClosed(Message):
    """A session ended on its executor (event). An empty reason: its client closed it, in order.

    `contents` are the largest that it shared while it lived, named as `ExecutorHeartbeat.weights`.
    """

    session_id: SessionId
    executor_id: Id
    reason: str = Field(default="", max_length=4096)
    contents: tuple[Digest, ...] = Field(default=(), max_length=1024)
