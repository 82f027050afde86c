"""Credentials of NATS users: a signed permission (JWT) and the user's key, in one text (a `.creds` file).

Whoever has the account's signing key makes them (`Issuer`); the server checks them by itself, whoever they come from. What a user
may publish and hear is written in the permission, and with it the tenant: services believe the server, not the message.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wooly_bus import contracts, subjects
from wooly_bus.contract_types import AddressedEvent, AddressedRpc, Rpc
from wooly_bus.errors import BusError
from wooly_bus.keys import Key, KeyFormatError, SignatureError, unverified

HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_BLOCKS = re.compile(r"-{3,}BEGIN [^-]+-{3,}\s+([^\s-]\S*)\s+-{3,}END [^-]+-{3,}")
#: Connections, of which a client has two or three, are not limited; subscriptions of one are.
MAX_SUBSCRIPTIONS = 1000

#: What the cluster's administrator may publish: requests and jobs, and what JetStream and tunnels need.
_ADMINISTRATOR = (
    f"{subjects.PREFIX}.rpc.>",
    contracts.ROUTER_JOB_COMMAND.subject,
    "$JS.API.>",
    "$JS.ACK.>",
    "$JS.FC.>",
    "$O.>",
    f"{subjects.INBOX}.>",
)

Role = Literal["user", "operator", "admin", "service"]


class CredentialsError(BusError):
    """A text is no credentials, or they have ended."""

    code = "bus.credentials"


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a user may do; None: everything."""

    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None

    def may_publish(self, subject: str) -> bool:
        """Whether the server would take a message there from this user."""
        return self.publish is None or any(subjects.matches(pattern, subject) for pattern in self.publish)

    def may_subscribe(self, subject: str) -> bool:
        """Whether the server would let this user hear what is published there."""
        return self.subscribe is None or any(subjects.matches(pattern, subject) for pattern in self.subscribe)


class Credentials:
    """What a connection shows to NATS.

    Attributes:
        jwt: the signed permission.
        key: the user's.
        user_id: names this user among those of its tenant.
        tenant: whose; None: nobody's in particular.
        role: what kind of user.
        account: the account's public key.
        expires_at: seconds since the epoch; None: it does not end.
        permissions: what the server lets it do.
        inbox: under which it hears replies.
    """

    def __init__(self, jwt: str, key: Key) -> None:
        self.jwt, self.key = jwt, key
        claims = unverified(jwt)
        body = claims.get("nats", {})
        if claims.get("sub") != key.public:
            raise CredentialsError("the key is not that of the permission")
        tags = dict(str(t).split(":", 1) for t in body.get("tags", ()) if ":" in str(t))
        self.user_id = str(claims.get("name", ""))
        self.tenant = subjects.tenant_of(tags["tenant"]) if "tenant" in tags else None
        self.role = tags.get("role", "service")
        self.account = str(body.get("issuer_account") or claims.get("iss"))
        self.expires_at: float | None = claims.get("exp")
        allowed: list[tuple[str, ...] | None] = []
        for side in ("pub", "sub"):
            found = body.get(side, {}).get("allow")
            allowed.append(None if found is None else tuple(found))
        self.permissions = Permissions(*allowed)
        self.inbox = subjects.client_inbox(self.tenant, self.user_id) if self.tenant is not None else subjects.INBOX

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """The credentials in a `.creds` file's text.

        Raises:
            CredentialsError: it is none.
        """
        blocks = _BLOCKS.findall(text)
        if len(blocks) != 2:
            raise CredentialsError("not the text of a .creds file: it has a permission and a key")
        try:
            return cls(blocks[0], Key.read(blocks[1], "user"))
        except (KeyFormatError, SignatureError, AttributeError, TypeError, ValueError) as e:
            raise CredentialsError(f"not the text of a .creds file: {e}") from e

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """The credentials in a file.

        Raises:
            CredentialsError: it cannot be read, or has none.
        """
        try:
            return cls.parse(path.read_text())
        except OSError as e:
            raise CredentialsError(f"cannot read {path}: {e.strerror or e}") from e
        except CredentialsError as e:
            raise CredentialsError(f"{path}: {e}") from e

    def text(self) -> str:
        """As a `.creds` file."""
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.key.seed}\n------END USER NKEY SEED------\n"
        )


class Issuer:
    """Makes credentials.

    Args:
        signing: the account's signing key.
        account: the account's public key.
    """

    def __init__(self, signing: Key, account: str) -> None:
        self._signing, self.account = signing, account

    def issue(
        self,
        role: Role,
        permissions: Permissions,
        *,
        tenant: str | None = None,
        user_id: str | None = None,
        ttl_s: float | None = None,
        now: float | None = None,
    ) -> Credentials:
        """New credentials.

        Args:
            role: what kind of user.
            permissions: what it may.
            tenant: whose.
            user_id: its name; at random without.
            ttl_s: seconds for which they hold; None: for ever.
            now: seconds since the epoch; the clock's without.
        """
        key, at = Key.new("user"), int(time.time() if now is None else now)
        tags = [f"role:{role}", *([] if tenant is None else [f"tenant:{subjects.tenant_token(tenant)}"])]
        body: dict[str, Any] = {"subs": MAX_SUBSCRIPTIONS, "data": -1, "payload": -1, "type": "user", "version": 2}
        for side, allowed in (("pub", permissions.publish), ("sub", permissions.subscribe)):
            body[side] = {} if allowed is None else {"allow": list(allowed)}
        body |= {"issuer_account": self.account, "tags": tags}
        claims: dict[str, Any] = {
            "jti": secrets.token_hex(16),
            "iat": at,
            "iss": self._signing.public,
            "name": user_id or secrets.token_hex(8),
            "sub": key.public,
            "nats": body,
        }
        if ttl_s is not None:
            claims["exp"] = at + max(1, int(ttl_s))
        return Credentials(self._signing.claim(claims, HEADER), key)

    def service(self) -> Credentials:
        """For a service of ours: everything, for ever."""
        return self.issue("service", Permissions())

    def client(
        self, tenant: str, scopes: Collection[str], *, ttl_s: float | None = None, now: float | None = None
    ) -> Credentials:
        """For a tenant's client, which may do what its scopes say, for its tenant alone."""
        user_id = secrets.token_hex(8)
        asked = [rpc for rpc in contracts.RPCS.values() if isinstance(rpc, Rpc) and rpc.scope in scopes]
        heard = [e for e in contracts.EVENTS.values() if isinstance(e, AddressedEvent) and e.scope in scopes]
        publish = [rpc.for_tenant(tenant) for rpc in asked]
        hear = [subjects.client_inbox(tenant, user_id) + ".>", *[event.at(tenant).subject for event in heard]]
        permissions = Permissions(tuple(publish), tuple(hear))
        return self.issue("user", permissions, tenant=tenant, user_id=user_id, ttl_s=ttl_s, now=now)

    def session(
        self, tenant: str, session_id: str, executors: Sequence[str], *, ttl_s: float, now: float | None = None
    ) -> Credentials:
        """For the tunnels of one session: to its executors, and nothing else."""
        asked = [rpc for rpc in contracts.RPCS.values() if isinstance(rpc, AddressedRpc) and rpc.scope == "session"]
        publish = [rpc.at(executor).for_tenant(tenant) for executor in executors for rpc in asked]
        publish.append(subjects.tunnel_inbox(subjects.client_inbox(tenant, session_id)) + ".>")
        permissions = Permissions(tuple(publish), (subjects.client_inbox(tenant, session_id) + ".>",))
        return self.issue("user", permissions, tenant=tenant, user_id=session_id, ttl_s=ttl_s, now=now)

    def administrator(self, *, ttl_s: float | None = None, now: float | None = None) -> Credentials:
        """For who runs the cluster: asks every service everything, hears all events, has JetStream."""
        user_id = secrets.token_hex(8)
        permissions = Permissions(_ADMINISTRATOR, (subjects.INBOX + ".>", f"{subjects.PREFIX}.evt.>"))
        return self.issue("admin", permissions, user_id=user_id, ttl_s=ttl_s, now=now)
