"""Tenants: what each is allowed, told to and changed by administrators; whether a service may grant what a tenant asks for."""

from __future__ import annotations

from pydantic import Field

from wooly_wis.messages.base import Message, Name


class TenantInfo(Message):
    """A tenant, with the limits in force.

    `class_ceiling`: the highest class that its sessions and jobs may have (0 is the highest of all, 4 the lowest);
    `weight_ceiling`: their largest weight; `exclusive`: they may have a device to themselves; `opaque_kernels`: they may launch
    kernels that executors cannot check. `created_at`: seconds since the epoch.
    """

    name: Name
    description: str = Field(default="", max_length=1024)
    disabled: bool = False
    opaque_kernels: bool = False
    class_ceiling: int = Field(ge=0, le=4)
    weight_ceiling: int = Field(ge=1, le=1 << 20)
    exclusive: bool
    created_at: float


class TenantsRequest(Message):
    """All tenants (administrator to router)."""

    credential: str = Field(default="", max_length=65536)


class TenantsReply(Message):
    """All tenants, by name."""

    tenants: tuple[TenantInfo, ...]


class SetTenantRequest(Message):
    """Make a tenant, or change one (administrator to router). What is None stays as it is; see `TenantInfo`."""

    tenant: Name
    credential: str = Field(default="", max_length=65536)
    description: str | None = Field(default=None, max_length=1024)
    disabled: bool | None = None
    opaque_kernels: bool | None = None
    class_ceiling: int | None = Field(default=None, ge=0, le=4)
    weight_ceiling: int | None = Field(default=None, ge=1, le=1 << 20)
    exclusive: bool | None = None


class CheckCeilingRequest(Message):
    """May a tenant have this class and this weight? (service to router). None: not asked for."""

    tenant: Name
    priority: int | None = Field(default=None, ge=0, le=4)
    weight: int | None = Field(default=None, ge=1, le=1 << 20)


class CheckCeilingReply(Message):
    """Why not, with who can change it; empty: it may."""

    refusal: str = Field(default="", max_length=4096)
