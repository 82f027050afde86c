"""Tenants and their API tokens. A token's secret is shown once, when the token is made; only its hash is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from sqlalchemy import select, update

from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import TenantRow, TokenRow

Role = Literal["admin", "operator", "user"]
SECRET_PREFIX = "wooly_"


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """An account that may have tasks. `opaque_kernels`: it may launch kernels that executors cannot check.

    `class_ceiling`, `weight_ceiling`, `exclusive`: see `core.ceilings`; None: the installation's default.
    """

    name: str
    created_at: float
    description: str = ""
    disabled: bool = False
    opaque_kernels: bool = False
    class_ceiling: int | None = None
    weight_ceiling: int | None = None
    exclusive: bool | None = None


@dataclass(frozen=True, slots=True)
class TenantChange:
    """A change of a tenant; fields with None do not change."""

    description: str | None = None
    disabled: bool | None = None
    opaque_kernels: bool | None = None
    class_ceiling: int | None = None
    weight_ceiling: int | None = None
    exclusive: bool | None = None

    def values(self) -> dict[str, str | bool | int]:
        """Return the changed fields, by column."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """An API token, without its secret. Times in seconds since the epoch."""

    id: str
    tenant: str
    name: str
    role: Role
    created_at: float
    scopes: tuple[str, ...] = field(default=())
    expires_at: float | None = None
    revoked_at: float | None = None

    def valid(self, now: float) -> bool:
        """Tell whether the token is valid at a time."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def hash_of(secret: str) -> str:
    """Return the stored hash of a secret. A secret has 256 random bits, so a plain hash resists brute force."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(
    tenant: str,
    name: str,
    role: Role,
    now: float,
    scopes: tuple[str, ...] = (),
    expires_at: float | None = None,
) -> tuple[TokenRecord, str]:
    """Make a token that is not stored yet; returns the token and a random secret for it."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    return TokenRecord(secrets.token_hex(8), tenant, name, role, now, scopes, expires_at), secret


class TenantStore:
    """All tenants and tokens."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(
        self,
        tenant: TenantRecord,
        tokens: Iterable[tuple[TokenRecord, str]] = (),
        *,
        before: Callable[[], None] = lambda: None,
    ) -> bool:
        """Add a tenant with its first tokens, in one transaction. Several routers may do this at the same time.

        Args:
            tenant: the tenant.
            tokens: its tokens, each with its secret.
            before: called before the transaction is committed. If it raises, nothing is added.

        Returns:
            False if the name is in use; nothing is added then.
        """
        columns = {f: getattr(tenant, f) for f in TenantRecord.__slots__}
        async with self.database.writing() as s:
            new = insert_of(s, TenantRow).values(columns).on_conflict_do_nothing().returning(TenantRow.name)
            if (await s.execute(new)).first() is None:
                return False
            s.add_all([_token_row(token, secret) for token, secret in tokens])
            await s.flush()
            before()
            return True

    async def all(self) -> list[TenantRecord]:
        """All tenants, by name."""
        async with self.database.reading() as s:
            return [_tenant(r) for r in await s.scalars(select(TenantRow).order_by(TenantRow.name))]

    async def get(self, name: str) -> TenantRecord | None:
        """Return one tenant."""
        async with self.database.reading() as s:
            row = await s.get(TenantRow, name)
            return None if row is None else _tenant(row)

    async def change(self, name: str, change: TenantChange) -> TenantRecord | None:
        """Change a tenant and return it. None if the tenant does not exist."""
        async with self.database.writing() as s:
            row = await s.get(TenantRow, name, with_for_update=True)
            if row is None:
                return None
            for column, value in change.values().items():
                setattr(row, column, value)
            return _tenant(row)

    async def put(self, name: str, now: float, change: TenantChange) -> TenantRecord:
        """Change a tenant, or create it if it does not exist, and return it."""
        record = TenantRecord(name, now)
        while True:
            made = replace(record, **change.values())  # type: ignore[arg-type]  # columns are fields
            if await self.add(made):
                return made
            changed = await self.change(name, change)
            if changed is not None:
                return changed

    async def opaque_kernels(self, name: str) -> bool:
        """Tell whether a tenant may launch kernels that executors cannot check. A tenant without a record may not."""
        found = await self.get(name)
        return found is not None and found.opaque_kernels

    async def add_token(self, token: TokenRecord, secret: str) -> None:
        """Add a token (`new_token`) to an existing tenant."""
        async with self.database.writing() as s:
            s.add(_token_row(token, secret))

    async def tokens(self, tenant: str) -> list[TokenRecord]:
        """A tenant's tokens, oldest first."""
        async with self.database.reading() as s:
            rows = await s.scalars(
                select(TokenRow).where(TokenRow.tenant == tenant).order_by(TokenRow.created_at, TokenRow.id)
            )
            return [_token(r) for r in rows]

    async def revoke(self, tenant: str, token_id: str, now: float) -> bool:
        """Revoke a token. Returns False if the tenant has no such token or the token is already revoked."""
        condition = (TokenRow.id == token_id, TokenRow.tenant == tenant, TokenRow.revoked_at.is_(None))
        async with self.database.writing() as s:
            found = await s.execute(update(TokenRow).where(*condition).values(revoked_at=now).returning(TokenRow.id))
            return found.first() is not None

    async def by_hash(self, secret_hash: str) -> tuple[TokenRecord, TenantRecord] | None:
        """Return the token whose secret has this hash, and its tenant. The caller must check whether both are valid."""
        query = select(TokenRow, TenantRow).join(TenantRow, TenantRow.name == TokenRow.tenant)
        async with self.database.reading() as s:
            row = (await s.execute(query.where(TokenRow.secret_hash == secret_hash))).first()
            return None if row is None else (_token(row[0]), _tenant(row[1]))


def _tenant(row: TenantRow) -> TenantRecord:
    return TenantRecord(**{f: getattr(row, f) for f in TenantRecord.__slots__})


def _token_row(token: TokenRecord, secret: str) -> TokenRow:
    columns = {f: getattr(token, f) for f in TokenRecord.__slots__} | {"scopes": list(token.scopes)}
    return TokenRow(secret_hash=hash_of(secret), **columns)


def _token(row: TokenRow) -> TokenRecord:
    values = {f: getattr(row, f) for f in TokenRecord.__slots__}
    return TokenRecord(**values | {"scopes": tuple(row.scopes)})
