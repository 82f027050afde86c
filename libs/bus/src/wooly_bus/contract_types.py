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

#: The permissions of an API token and of the NATS credentials made for it. No token has the scope `session`: the credentials
#: of a session permit the contracts with this scope, for the executors of that session only.
Scope = Literal["blobs:read", "blobs:write", "nodes:read", "tasks:read", "tasks:write", "session"]
#: Largest request of a tenant's client, in bytes, unless the contract sets another limit. The limit is small because other
#: requests wait while a service decodes one.
TENANT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Log:
    """A stream that drops its oldest messages.

    Attributes:
        name: name of the stream.
        max_age_s: seconds after which a message is dropped.
        max_bytes: largest total size of the messages, in bytes.
    """

    name: str
    max_age_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """A stream that keeps each message until a reader acknowledges it. A full queue refuses further messages.

    Attributes:
        name: name of the stream.
        max_bytes: largest total size of the messages, in bytes.
    """

    name: str
    max_bytes: int


Stream = Log | WorkQueue


@dataclass(frozen=True, slots=True)
class _Contract:
    """A subject, which may have one parameter.

    Attributes:
        template: the subject; a parameter is written as `{name}`.
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
            ValueError: `address` is not a valid token of a subject. The name of a tenant is always valid: it is percent-encoded.
        """
        before, _, after = self.template.partition("{")
        name, _, after = after.partition("}")
        return before + (subjects.tenant_token(address) if name == "tenant" else subjects.id_token(address)) + after


@dataclass(frozen=True, slots=True)
class RpcContract(_Contract, Generic[Q, R]):
    """A request and its reply, on one subject or on a family of subjects.

    Attributes:
        request: model of the request.
        reply: model of the reply. Any request may also be answered with an `ErrorReply`.
        about: what the request does, in one sentence.
        queue: instances of the service with the same queue share the requests; empty: each instance gets each request.
        scope: the scope that a tenant's client needs; None: no tenant's client may send the request.
        max_bytes: largest request of a tenant's client, in bytes.
        tenants_only: only tenants' clients may send the request.
    """

    request: type[Q]
    reply: type[R]
    about: str = ""
    queue: str = ""
    scope: Scope | None = None
    max_bytes: int = TENANT_BYTES
    tenants_only: bool = False


@dataclass(frozen=True, slots=True)
class Rpc(RpcContract[Q, R]):
    """A request and its reply on one subject."""

    @property
    def subject(self) -> str:
        """The subject to which services send the request."""
        return self.template

    def for_tenant(self, tenant: str) -> str:
        """The subject to which the clients of `tenant` send the request. NATS lets no other client publish there."""
        return subjects.for_tenant(self.template, tenant)


@dataclass(frozen=True, slots=True)
class AddressedRpc(RpcContract[Q, R]):
    """A request and its reply on a family of subjects: one subject for each executor, or for each family of targets."""

    def at(self, address: str) -> Rpc[Q, R]:
        """The request to one address.

        Raises:
            ValueError: `address` is not a valid token of a subject.
        """
        return self.on(self._at(address))

    def on(self, subject: str) -> Rpc[Q, R]:
        """The request on a subject that another process supplied, such as the subject in an endpoint.

        The subject is not checked.
        """
        return Rpc(
            subject, self.request, self.reply, self.about, self.queue, self.scope, self.max_bytes, self.tenants_only
        )


@dataclass(frozen=True, slots=True)
class EventContract(_Contract, Generic[P]):
    """An event on one subject or on a family of subjects.

    Attributes:
        payload: model of the event, or `bytes` if the service encodes the event itself.
        about: what the event reports, in one sentence. For bytes: what the bytes encode.
        stream: the stream that stores the events; None: a process that is not subscribed misses them.
        queue: instances of a service with the same queue share the events; empty: each instance receives each event.
        scope: the scope that a tenant's client needs to receive its tenant's events; None: no tenant's client receives them.
    """

    payload: type[P]
    about: str = ""
    stream: Stream | None = None
    queue: str = ""
    scope: Scope | None = None

    @property
    def stream_name(self) -> str:
        """Name of the stream that stores the events.

        Raises:
            ValueError: no stream stores the events.
        """
        if self.stream is None:
            raise ValueError(f"no stream stores the events of {self.template}")
        return self.stream.name

    def encoded(self, payload: P) -> bytes:
        """The bytes of an event for publishing."""
        return payload if isinstance(payload, bytes) else payload.model_dump_json().encode()

    def decoded(self, data: bytes) -> P:
        """The event that the published bytes encode.

        Raises:
            EnvelopeError: the bytes are not an event of this contract.
        """
        if self.payload is bytes:
            return cast(P, data)
        return cast(P, decode(data, cast(type[Message], self.payload)))

    def address_of(self, subject: str) -> str:
        """The parameter in a subject of this family, not decoded."""
        before, _, after = self.pattern.partition("*")
        return subject.removeprefix(before).removesuffix(after)


@dataclass(frozen=True, slots=True)
class Event(EventContract[P]):
    """An event on one subject."""

    @property
    def subject(self) -> str:
        """The subject to which the event is published."""
        return self.template


@dataclass(frozen=True, slots=True)
class AddressedEvent(EventContract[P]):
    """An event on a family of subjects: one subject for each executor, tenant or service. A subscriber receives all of them."""

    def at(self, address: str) -> Event[P]:
        """The event of one address.

        Raises:
            ValueError: `address` is not a valid token of a subject.
        """
        return Event(self._at(address), self.payload, self.about, self.stream, self.queue, self.scope)
