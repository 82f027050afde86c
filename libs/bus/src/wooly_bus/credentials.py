"""Credentials of NATS users: a signed permission (JWT) and the key of the user, in one text (a `.creds` file).

An `Issuer` makes credentials with the signing key of the account. The NATS server verifies them without asking a service. The
permission contains the tenant and the subjects that the user may publish and subscribe to. Services take the tenant from the
subject, which the server has checked, and not from the message.
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
#: Most subscriptions of one connection. The number of connections, two or three per client, is not limited.
MAX_SUBSCRIPTIONS = 1000

#: Subjects to which an administrator may publish: requests, jobs, and the subjects of JetStream and tunnels.
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
    """The credentials cannot be read, are malformed, or have expired."""

    code = "bus.credentials"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to; None: all subjects."""

    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None

    def may_publish(self, subject: str) -> bool:
        """Whether the server accepts a message of this user to `subject`."""
        return self.publish is None or any(subjects.matches(pattern, subject) for pattern in self.publish)

    def may_subscribe(self, subject: str) -> bool:
        """Whether the server lets this user subscribe to `subject`."""
        return self.subscribe is None or any(subjects.matches(pattern, subject) for pattern in self.subscribe)


class Credentials:
    """Credentials of one NATS user.

    Attributes:
        jwt: the signed permission.
        key: key of the user.
        user_id: name of the user, unique in its tenant.
        tenant: the tenant of the user; None: the user belongs to no tenant.
        role: role of the user.
        account: public key of the account.
        expires_at: end of validity, in seconds since the epoch; None: the credentials do not expire.
        permissions: subjects that the server permits.
        inbox: prefix of the subjects on which the user receives replies.
    """

    def __init__(self, jwt: str, key: Key) -> None:
        self.jwt, self.key = jwt, key
        claims = unverified(jwt)
        body = claims.get("nats", {})
        if claims.get("sub") != key.public:
            raise CredentialsError("the key does not belong to the permission (JWT)")
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
        """Parse the text of a `.creds` file.

        Raises:
            CredentialsError: the text is not that of a `.creds` file.
        """
        blocks = _BLOCKS.findall(text)
        if len(blocks) != 2:
            raise CredentialsError("not the text of a .creds file, which has a permission (JWT) and a key (seed)")
        try:
            return cls(blocks[0], Key.read(blocks[1], "user"))
        except (KeyFormatError, SignatureError, AttributeError, TypeError, ValueError) as e:
            raise CredentialsError(f"not the text of a .creds file: {e}") from e

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Read a `.creds` file.

        Raises:
            CredentialsError: the file cannot be read, or is not a `.creds` file.
        """
        try:
            return cls.parse(path.read_text())
        except OSError as e:
            raise CredentialsError(f"cannot read {path}: {e.strerror or e}") from e
        except CredentialsError as e:
            raise CredentialsError(f"{path}: {e}") from e

    def text(self) -> str:
        """The text of a `.creds` file with these credentials."""
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.key.seed}\n------END USER NKEY SEED------\n"
        )


class Issuer:
    """Makes credentials of users.

    Args:
        signing: signing key of the account.
        account: public key of the account.
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
        """Make credentials of a new user.

        Args:
            role: role of the user.
            permissions: permissions of the user.
            tenant: tenant of the user; None: no tenant.
            user_id: name of the user; None: a random name.
            ttl_s: validity in seconds; None: unlimited.
            now: begin of validity, in seconds since the epoch; None: the current time.
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
        """Credentials of a service: all permissions, unlimited validity."""
        return self.issue("service", Permissions())

    def client(
        self, tenant: str, scopes: Collection[str], *, ttl_s: float | None = None, now: float | None = None
    ) -> Credentials:
        """Credentials of a tenant's client: the permissions of its scopes, for its tenant only."""
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
        """Credentials for the tunnels of one session to its executors."""
        asked = [rpc for rpc in contracts.RPCS.values() if isinstance(rpc, AddressedRpc) and rpc.scope == "session"]
        publish = [rpc.at(executor).for_tenant(tenant) for executor in executors for rpc in asked]
        publish.append(subjects.tunnel_inbox(subjects.client_inbox(tenant, session_id)) + ".>")
        permissions = Permissions(tuple(publish), (subjects.client_inbox(tenant, session_id) + ".>",))
        return self.issue("user", permissions, tenant=tenant, user_id=session_id, ttl_s=ttl_s, now=now)

    def administrator(self, *, ttl_s: float | None = None, now: float | None = None) -> Credentials:
        """Credentials of an administrator: all requests to all services, all events, JetStream."""
        user_id = secrets.token_hex(8)
        permissions = Permissions(_ADMINISTRATOR, (subjects.INBOX + ".>", f"{subjects.PREFIX}.evt.>"))
        return self.issue("admin", permissions, user_id=user_id, ttl_s=ttl_s, now=now)
