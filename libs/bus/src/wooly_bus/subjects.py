"""Syntax of subjects, ``wooly.v1.{rpc|cmd|evt}.<service>.<noun>.<verb>[.<id>]``, and of inboxes.

`contracts` lists the subjects.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote, unquote

PREFIX = "wooly.v1"

#: Prefix of the subjects of replies.
INBOX = "_INBOX"


def id_token(value: str) -> str:
    """An id as one token of a subject.

    Raises:
        ValueError: the id is empty or contains a dot, a wildcard or white space.
    """
    if not value or any(c in ".*>" or c.isspace() for c in value):
        raise ValueError(
            f"{value!r} is not a valid token of a subject: it must not be empty or contain '.', '*', '>' or white space"
        )
    return value


def tenant_token(tenant: str) -> str:
    """The name of a tenant as one token of a subject, percent-encoded."""
    return quote(tenant, safe="").replace(".", "%2E")


def tenant_of(token: str) -> str:
    """The name of the tenant that `tenant_token` encoded."""
    return unquote(token)


def for_tenant(subject: str, tenant: str) -> str:
    """The variant of `subject` for the clients of one tenant. NATS lets no other client publish there."""
    return f"{subject}.{tenant_token(tenant)}"


def _tenant_inbox(tenant: str) -> str:
    """Prefix of the inboxes of a tenant. It has a hash, because a tenant's name can be too long or have other characters."""
    return f"{INBOX}.{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def client_inbox(tenant: str, user_id: str) -> str:
    """Prefix of the inboxes of one NATS user of a tenant. Only this user may subscribe to them."""
    return f"{_tenant_inbox(tenant)}.{id_token(user_id)}"


def tunnel_inbox(inbox: str) -> str:
    """Prefix of the inboxes on which an executor receives the tunnels of the user with this inbox. Only this user may publish
    there.

    Raises:
        ValueError: `inbox` is not an inbox of a tenant's user.
    """
    found = re.match(rf"{INBOX}\.([0-9a-f]{{32}}\.[A-Za-z0-9_-]{{1,64}})(\.|$)", inbox)
    if found is None:
        raise ValueError(f"{inbox[:100]!r} is not an inbox of a tenant's user")
    return f"{INBOX}.tunnel.{found[1]}"


def is_inbox_of(subject: str, tenant: str) -> bool:
    """Whether `subject` is an inbox of a user of `tenant`."""
    return subject.startswith(f"{_tenant_inbox(tenant)}.")


def is_service(subject: str) -> bool:
    """Whether Wooly's services or NATS itself subscribe to `subject`.

    A reply must not go there: it would act with our permissions.
    """
    return subject.startswith((f"{PREFIX}.", "$"))


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern with the wildcards `*` and `>`."""
    wanted, given = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(given) > i
        if i >= len(given) or part not in ("*", given[i]):
            return False
    return len(wanted) == len(given)


def inbox(subject: str) -> str:
    """Check that `subject`, to which a peer asks us to publish, is an inbox in the usual form of NATS. Returns it.

    Raises:
        ValueError: `subject` is not an inbox. A message to it could reach a service with our permissions.
    """
    if not re.fullmatch(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,4}", subject):
        raise ValueError(f"{subject[:100]!r} is not an inbox")
    return subject


def template(subject: str) -> str:
    """The subject without its id, for spans and metrics, whose number of names must stay small."""
    parts = subject.split(".")
    return ".".join(parts[:6]) if len(parts) > 6 else subject
