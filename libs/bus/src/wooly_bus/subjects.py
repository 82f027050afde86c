"""The form of subjects, ``wooly.v1.{rpc|cmd|evt}.<service>.<noun>.<verb>[.<id>]``, and of inboxes. `contracts` lists subjects."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote, unquote

PREFIX = "wooly.v1"

#: Where replies are heard.
INBOX = "_INBOX"


def id_token(value: str) -> str:
    """An id as one token of a subject.

    Raises:
        ValueError: it cannot be one.
    """
    if not value or any(c in ".*>" or c.isspace() for c in value):
        raise ValueError(f"{value!r} cannot be part of a subject")
    return value


def tenant_token(tenant: str) -> str:
    """A tenant's name as one token of a subject: what cannot be part of one is percent-encoded."""
    return quote(tenant, safe="").replace(".", "%2E")


def tenant_of(token: str) -> str:
    """The tenant whose `tenant_token` this is."""
    return unquote(token)


def for_tenant(subject: str, tenant: str) -> str:
    """Where a tenant's clients ask what others ask at `subject`: NATS lets nobody else publish there."""
    return f"{subject}.{tenant_token(tenant)}"


def _tenant_inbox(tenant: str) -> str:
    """Inboxes have no room for every name, and need not be read."""
    return f"{INBOX}.{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def client_inbox(tenant: str, user_id: str) -> str:
    """Under which one user of a tenant's hears replies, and nobody else."""
    return f"{_tenant_inbox(tenant)}.{id_token(user_id)}"


def tunnel_inbox(inbox: str) -> str:
    """Under which an executor hears the tunnels of the user who has `inbox`; nobody else may publish there.

    Raises:
        ValueError: that is no user's inbox.
    """
    found = re.match(rf"{INBOX}\.([0-9a-f]{{32}}\.[A-Za-z0-9_-]{{1,64}})(\.|$)", inbox)
    if found is None:
        raise ValueError(f"{inbox[:100]!r} is no user's inbox")
    return f"{INBOX}.tunnel.{found[1]}"


def is_inbox_of(subject: str, tenant: str) -> bool:
    """Whether `subject` is an inbox of a user of that tenant's."""
    return subject.startswith(f"{_tenant_inbox(tenant)}.")


def is_service(subject: str) -> bool:
    """Whether services, or NATS itself, listen there: a reply must not go to such a subject, for it would speak in our name."""
    return subject.startswith((f"{PREFIX}.", "$"))


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of those that a pattern with `*` and `>` stands for."""
    wanted, given = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(given) > i
        if i >= len(given) or part not in ("*", given[i]):
            return False
    return len(wanted) == len(given)


def inbox(subject: str) -> str:
    """`subject`, if it is an inbox of NATS's usual form: one that a peer named, to which we are going to publish.

    Raises:
        ValueError: it is not; publishing there could speak to a service in our name.
    """
    if not re.fullmatch(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,4}", subject):
        raise ValueError(f"{subject[:100]!r} is not an inbox")
    return subject


def template(subject: str) -> str:
    """The subject without its id, for names that must stay few (spans, metrics)."""
    parts = subject.split(".")
    return ".".join(parts[:6]) if len(parts) > 6 else subject
