"""The parts of a contract between processes: a request with its reply, an event, the stream that keeps an event.

`wooly_bus.contracts` is the table of all contracts. This module knows none of them, and no service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

from wooly_wis.messages import Message

from wooly_bus import subjects
from wooly_bus.envelope import decode

#: A request, its reply, and the payload of an event.
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
P = TypeVar("P", bound=Message | bytes)

#: What an API token permits, and with it the NATS credentials made for the token. `session` is no token's scope:
#: the credentials of one session permit these contracts, with the executors of that session.
Scope = Literal["blobs:read", "blobs:write", "nodes:read", "tasks:read", "tasks:write", "session"]
#: Bytes of a request of a tenant's client, unless its contract says otherwise: other requests wait while a service reads one.
TENANT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Log:
    """A stream that drops its oldest messages.

    Attributes:
        name: of the stream.
        max_age_s: seconds after which a message is dropped.
        max_bytes: of all messages.
    """

    name: str
    max_age_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """A stream that keeps each message until a reader acknowledges it. A full queue refuses further messages.

    Attributes:
        name: of the stream.
        max_bytes: of all messages.
    """

    name: str
    max_bytes: int


Stream = Log | WorkQueue


@dataclass(frozen=True, slots=True)
class _Contract:
    """A subject, which may have one parameter.

    Attributes:
        template: the subject; a parameter stands in it as `{name}`.
    """

    template: str

    @property
    def parameter(self) -> str:
        """Name of the parameter in the subject; empty if it has none."""
        return self.template.partition("{")[2].partition("}")[0]

    @property
    def pattern(self) -> str:
        """The subject for a subscription: `*` stands for the parameter."""
        before, _, after = self.template.partition("{")
        return before + "*" + after.partition("}")[2] if after else before

    @property
    def service(self) -> str:
        """The service that serves the request or publishes the event; `{service}` if every service does."""
        return self.template.split(".")[3]

    def _at(self, address: str) -> str:
        """The subject with `address` in place of the parameter.

        Raises:
            ValueError: `address` cannot be one token of a subject. A tenant always can: it is percent-encoded.
        """
        before, _, after = self.template.partition("{")
        name, _, after = after.partition("}")
        return before + (subjects.tenant_token(address) if name == "tenant" else subjects.id_token(address)) + after


@dataclass(frozen=True, slots=True)
class RpcContract(_Contract, Generic[Q, R]):
    """What a request and its reply are, on one subject or on a family of subjects.

    Attributes:
        request: model of the request.
        reply: model of the reply. Any request may also be answered with an `ErrorReply`.
        about: what the request does, in one sentence.
        queue: instances of the service with the same queue share the requests; empty: each instance gets each request.
        scope: what a tenant's client needs; None: no tenant's client may ask.
        most_bytes: of a request of a tenant's client.
        tenants_only: the request is served to tenants' clients, and to no other process.
    """

    request: type[Q]
    reply: type[R]
    about: str = ""
    queue: str = ""
    scope: Scope | None = None
    most_bytes: int = TENANT_BYTES
    tenants_only: bool = False


@dataclass(frozen=True, slots=True)
class Rpc(RpcContract[Q, R]):
    """A request and its reply on one subject."""

    @property
    def subject(self) -> str:
        """Where services ask."""
        return self.template

    def for_tenant(self, tenant: str) -> str:
        """Where that tenant's clients ask; NATS lets nobody else publish there."""
        return subjects.for_tenant(self.template, tenant)


@dataclass(frozen=True, slots=True)
class AddressedRpc(RpcContract[Q, R]):
    """A request and its reply on a family of subjects: one subject for each executor, or for each family of targets."""

    def at(self, address: str) -> Rpc[Q, R]:
        """The request to one address.

        Raises:
            ValueError: `address` cannot be one token of a subject.
        """
        return self.on(self._at(address))

    def on(self, subject: str) -> Rpc[Q, R]:
        """The request on a subject that another process gave, such as the subject in an endpoint. The subject is not checked."""
        return Rpc(
            subject, self.request, self.reply, self.about, self.queue, self.scope, self.most_bytes, self.tenants_only
        )


@dataclass(frozen=True, slots=True)
class EventContract(_Contract, Generic[P]):
    """What is published on one subject or on a family of subjects.

    Attributes:
        payload: model of the event, or `bytes` where the event is bytes that its service encodes.
        about: what the event says, in one sentence. For bytes: what the bytes encode.
        stream: keeps the events; None: a process that does not listen misses them.
        queue: instances of a service with the same queue share the events; empty: each instance hears each event.
        scope: what a tenant's client needs to hear its tenant's events; None: no tenant's client hears them.
    """

    payload: type[P]
    about: str = ""
    stream: Stream | None = None
    queue: str = ""
    scope: Scope | None = None

    @property
    def stream_name(self) -> str:
        """Name of the stream that keeps the events.

        Raises:
            ValueError: no stream keeps them.
        """
        if self.stream is None:
            raise ValueError(f"no stream keeps the events of {self.template}")
        return self.stream.name

    def encoded(self, payload: P) -> bytes:
        """An event as it is published."""
        return payload if isinstance(payload, bytes) else payload.model_dump_json().encode()

    def decoded(self, data: bytes) -> P:
        """The event in published bytes.

        Raises:
            EnvelopeError: the bytes are not such an event.
        """
        if self.payload is bytes:
            return cast(P, data)
        return cast(P, decode(data, cast(type[Message], self.payload)))

    def address_of(self, subject: str) -> str:
        """The parameter in a subject of this family, as it is written there."""
        before, _, after = self.pattern.partition("*")
        return subject.removeprefix(before).removesuffix(after)


@dataclass(frozen=True, slots=True)
class Event(EventContract[P]):
    """An event on one subject."""

    @property
    def subject(self) -> str:
        """Where the event is published."""
        return self.template


@dataclass(frozen=True, slots=True)
class AddressedEvent(EventContract[P]):
    """An event on a family of subjects: one subject for each executor, tenant or service. A listener hears all of them."""

    def at(self, address: str) -> Event[P]:
        """The event of one address.

        Raises:
            ValueError: `address` cannot be one token of a subject.
        """
        return Event(self._at(address), self.payload, self.about, self.stream, self.queue, self.scope)
