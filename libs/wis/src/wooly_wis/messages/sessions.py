"""Messages about the life of a session: open, host, renew, steer, close."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from wooly_wis.messages.base import Bytes, ChannelToken, Digest, Endpoints, Host, Id, Message, Name, SessionId, Token
from wooly_wis.messages.nodes import DeviceFacts


class ClientFacts(Message):
    """The client that asks for a session."""

    host: Host
    pid: int
    program: str = Field(default="", max_length=4096)


#: Which sessions go on in another executor: none, those with small buffers, all.
RecoveryMode = Literal["off", "auto", "on"]


class QueuePlace(Message):
    """The place of a session in the queue: the id and the token of the answer with which it began to wait."""

    session_id: SessionId
    token: Token


#: Maximum number of ranks of a gang: as many as a group of torch.distributed may have.
MAX_GANG = 1024
#: The session of a gang's rank has the id of the gang, of `GANG_ID_CHARS` characters, this mark, and the number of the rank.
GANG_MARK = "-rank-"
GANG_ID_CHARS = 16
#: The session in which an executor works for another session has the other's id, this mark, and a number.
PEER_MARK = "-peer-"


class GangPlace(Message):
    """The place of a session in a gang: the ranks of one program of several processes, which are placed together.

    Attributes:
        gang_id: chosen by the program's launcher; equal in all ranks, and different in each start of the program.
        rank: number of this rank.
        size: number of ranks.
        devices: least number of devices on which the ranks must be.
    """

    gang_id: Annotated[str, Field(min_length=1, max_length=64)]
    rank: int = Field(ge=0, lt=MAX_GANG)
    size: int = Field(ge=2, le=MAX_GANG)
    devices: int = Field(default=1, ge=1, le=MAX_GANG)

    @model_validator(mode="after")
    def _is_one_of_them(self) -> GangPlace:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size} ranks")
        return self


class OpenSessionRequest(Message):
    """Open a session (client to router). `required_vram`: bytes on each device.

    `model`: name of the session's model, for bills. `weight`: relative share inside the class. `service_ns`, `objective_ns` and
    `interval_ns`: as in `AdmitSessionRequest`. `queue`: if no device has room, the session waits in the queue instead of being
    refused. `place`: the session waits already, and its client asks whether its turn has come. `lost`: why a session with a
    `place` that is open has lost its executor; it is opened again, and waits if there is no room. `leaves`: it has not lost it,
    but was asked to leave it, and stays there if there is no room. `cut`: number of the checkpoint from which it goes on; 0: it
    needs none. `recovers`: the client can go on in another executor; `asks_recovery`: unless the cluster's setting `recovery` is
    `off`. `node`: the node of all devices, or the executor of the only device; empty: any. `near`: the executor to prefer for the
    only device, because processes that share memory need one executor. `gang`: the session is a rank of a program of several
    processes, and has one device.
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
    node: Host = ""
    near: Host = ""
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    model: str = Field(default="", max_length=256)
    queue: bool = False
    place: QueuePlace | None = None
    lost: str = Field(default="", max_length=4096)
    leaves: bool = False
    cut: int = Field(default=0, ge=0, lt=1 << 32)
    recovers: bool = False
    asks_recovery: bool = False
    gang: GangPlace | None = None
    client: ClientFacts

    @model_validator(mode="after")
    def _has_one_device_in_a_gang(self) -> OpenSessionRequest:
        if self.gang is not None and self.gpu_count != 1:
            raise ValueError("a rank of a gang has one device; `gang.devices` says how many devices all ranks need")
        return self


class SessionPart(Message):
    """One device of a session: its executor, the endpoints, and the token for the data channel. Without `token`, the session's
    token.
    """

    executor_id: Id
    node: Host
    endpoints: Endpoints
    device: DeviceFacts
    token: ChannelToken = ""


class SessionWait(Message):
    """A session that waits for devices.

    Attributes:
        place: its place in the queue; 1 is next.
        length: number of sessions and jobs in the queue.
        reason: why it does not fit now.
        would_fit: what would start now: changed settings, in words; empty if no smaller request would.
        ask_again_s: seconds after which the client asks again.
    """

    place: int = Field(ge=1)
    length: int = Field(ge=1)
    reason: str = Field(max_length=4096)
    would_fit: str = Field(default="", max_length=1024)
    ask_again_s: float = Field(gt=0)


class OpenSessionReply(Message):
    """The opened session: its devices, each on another executor. The client renews the session with `token` within `lease_s`
    seconds. Or, without `parts`, a session that waits: the client asks again within `lease_s`, or the session leaves the queue.

    `credentials`: NATS credentials for tunnels to these executors; empty if NATS needs none. `trace_id`: the stored trace of the
    session; empty if the session is not traced. `wait`: why the session waits, and where in the queue. `recovery`: the cluster's
    setting, for clients without their own.
    """

    session_id: SessionId
    token: Token
    lease_s: float = Field(gt=0)
    parts: tuple[SessionPart, ...] = Field(default=(), max_length=64)
    credentials: str = Field(default="", max_length=65536)
    trace_id: str = Field(default="", max_length=32)
    wait: SessionWait | None = None
    recovery: RecoveryMode = "auto"

    @model_validator(mode="after")
    def _is_open_or_waits(self) -> OpenSessionReply:
        if bool(self.parts) == (self.wait is not None):
            raise ValueError("an opened session has parts, and a waiting session has `wait`")
        return self


#: Maximum size, in characters, of a line that a client adds to the story of its task.
MAX_NOTE = 1024


class Resumed(Message):
    """How a session went on in another executor: seconds for which its script waited, and number of frames sent again."""

    seconds: float = Field(ge=0)
    frames: int = Field(ge=0)


class RenewSessionRequest(Message):
    """Renew the session's lease.

    `stays`: why the client does not do what a reply asked for, and `refused`: the reason that this reply gave; None: the last
    reply. `recovers`: whether the client can still go on in another executor. `resumed`: how it last did, once. `note`: a line
    for the story of the session's task.
    """

    session_id: SessionId
    token: Token
    stays: str = Field(default="", max_length=4096)
    refused: str | None = Field(default=None, max_length=4096)
    recovers: bool = True
    resumed: Resumed | None = None
    note: str = Field(default="", max_length=MAX_NOTE)

    @model_serializer(mode="wrap")
    def _without_unused(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `refused` out if it is None: older routers refuse fields that they do not know."""
        written: dict[str, Any] = write(self)
        if self.refused is None:
            del written["refused"]
        return written


#: What the router asks a session's client to do: to go on in another executor, to hibernate, to end the hibernation.
Wish = Literal["move", "hibernate", "wake"]


class RenewSessionReply(Message):
    """The lease ends `lease_s` seconds from now.

    `wish`: what the client is to do, and `reason`: why. `hibernate_after_s`: seconds without an operation after which the client
    hibernates by itself; 0: never.
    """

    lease_s: float = Field(gt=0)
    wish: Wish | None = None
    reason: str = Field(default="", max_length=4096)
    hibernate_after_s: float = Field(default=0.0, ge=0)


class HibernateSessionRequest(Message):
    """A session hibernates: its client has a checkpoint of it, and needs no executor until the next operation.

    `cut`: number of the checkpoint. `reason`: why.
    """

    session_id: SessionId
    token: Token
    cut: int = Field(ge=0, lt=1 << 32)
    reason: str = Field(default="", max_length=4096)


class HibernateSessionReply(Message):
    """The session's executor is free. The client still renews the lease, within `lease_s` seconds."""

    lease_s: float = Field(gt=0)


class CloseSessionRequest(Message):
    """Close a session: the client has finished, or the router cancels it. `passing`: it may go on in another executor.

    `reason`: of a client, the failure that has ended its script; empty: it ended normally.
    """

    session_id: SessionId
    token: Token = ""
    reason: str = Field(default="", max_length=4096)
    passing: bool = False


class PeerSessionRequest(Message):
    """Let the executor of a session work with the executor of another session of the same tenant (client to router).

    The first executor becomes a client of the second one: the router opens a session for it there.

    Attributes:
        session_id: the client's session.
        token: its token.
        executor_id: which of its executors.
        peer: the other session. It may be the same one, if it has several devices.
        peer_executor_id: which of its executors.
    """

    session_id: SessionId
    token: Token
    executor_id: Id
    peer: SessionId
    peer_executor_id: Id


class PeerSessionReply(Message):
    """What the client passes to its executor: the router's signed statement of where the other executor is, and who may enter."""

    ticket: str = Field(max_length=16384)


class SessionPolicy(Message):
    """How the dispatch core treats a session; see `wooly_dispatch.events.Policy`. Times are in nanoseconds.

    `rate_permille` and `burst_ns` are the token bucket of a P0 or P1 session; 0: no bucket of its own.
    """

    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    rate_permille: int = Field(default=0, ge=0, le=1000)
    burst_ns: int = Field(default=0, ge=0, lt=1 << 62)


class HostSessionRequest(Message):
    """Host a session (router to executor). Without `policy`, the executor uses the default policy of the class.

    Attributes:
        token: renews the lease.
        claim: without `quota`, bytes with which the session counts at least against the device's promises.
        swap: the session may be swapped out.
        dedup: the sharing domain, that is, the sessions with which it shares equal contents.
        overcommit_vram_percent: memory that the executor may promise in addition to its own, from now on; None: no change.
        model: name of the session's model, for bills.
        channel_key: key that signs the tokens for the data channel; without it, clients show `token`.
        at: the router's time, in seconds since the epoch.
        opaque_kernels: the session may launch kernels that executors cannot check.
        epoch: how often the session has gone on in another executor.
        part: index of the session's device.
        repeats: the cluster lost the session's last executor, so the session repeats work first. Metering does not bill it again.
    """

    session_id: SessionId
    token: Token
    tenant: Name
    priority: int = Field(ge=0, le=4)
    policy: SessionPolicy | None = None
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    claim: Bytes = 0
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)
    model: str = Field(default="", max_length=256)
    opaque_kernels: bool = False
    lease_s: float = Field(gt=0)
    channel_key: str = Field(default="", max_length=128)
    at: float = Field(default=0.0, ge=0)
    epoch: int = Field(default=0, ge=0)
    part: int = Field(default=0, ge=0, lt=8)
    repeats: bool = False


class DirectSession(Message):
    """What a client asks for when it opens a session at a standalone executor, in its hello.

    Attributes:
        quota: bytes of device memory that the session declares; None: no declaration.
        swap: the session may be swapped out.
        dedup: the sharing domain, that is, the sessions with which it shares equal contents.
    """

    tenant: Name = "default"
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"


class SteerSessionRequest(Message):
    """Change the treatment of a running session (to an executor; or to the scheduler, which tells all executors of the session).

    None leaves a value unchanged. `exclusive`: whether the session has the device for itself. `hold`: suspend the session for
    this reason, which its client gets; empty: remove the reason.
    """

    session_id: SessionId
    policy: SessionPolicy | None = None
    priority: int | None = Field(default=None, ge=0, le=4)
    weight: int | None = Field(default=None, ge=1, le=1 << 20)
    suspended: bool | None = None
    exclusive: bool | None = None
    hold: str | None = Field(default=None, max_length=4096)


class SteerSessionReply(Message):
    """The treatment of the session after the change."""

    policy: SessionPolicy
    suspended: bool
    exclusive: bool


class HostSessionReply(Message):
    """The executor accepted the session."""

    endpoints: Endpoints


class SessionClosed(Message):
    """A session ended on its executor (event). `reason` is empty if the client closed the session normally.

    `contents`: the largest contents that the session shared, named as in `ExecutorHeartbeat.weights`. `passing`: nothing that the
    session did is the reason, so it may go on in another executor. `epoch`: as in `HostSessionRequest`. `hung_up`: the client's
    system has closed the connection, as it does if the client's process ends.
    """

    session_id: SessionId
    executor_id: Id
    reason: str = Field(default="", max_length=4096)
    contents: tuple[Digest, ...] = Field(default=(), max_length=1024)
    passing: bool = False
    epoch: int = Field(default=0, ge=0)
    hung_up: bool = False


class CloseSessionReply(Message):
    """`closed`: whether the session existed.

    `running_s`: seconds for which an operator of the session has been running. The operator cannot be stopped, so the session
    ends there when the operator ends. 0: nothing of the session runs.

    `ended`: how the session had ended before this request, if the executor still knows: its event may have been lost.
    """

    closed: bool
    running_s: float = Field(default=0.0, ge=0)
    ended: SessionClosed | None = None
