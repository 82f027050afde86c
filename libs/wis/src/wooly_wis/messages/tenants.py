"""Messages about tenants: their limits, which administrators read and change, and checks against these limits."""

from __future__ import annotations

from pydantic import Field

from wooly_wis.messages.base import Message, Name


class TenantInfo(Message):
    """A tenant, with the limits in force.

    Attributes:
        class_ceiling: highest class that its sessions and jobs may have (0 is the highest class, 4 the lowest).
        weight_ceiling: largest weight that its sessions and jobs may have.
        exclusive: its sessions may have a device for themselves.
        opaque_kernels: its sessions may launch kernels that executors cannot check.
        created_at: seconds since the epoch.
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
    """List all tenants (administrator to router)."""

    credential: str = Field(default="", max_length=65536)


class TenantsReply(Message):
    """All tenants, ordered by name."""

    tenants: tuple[TenantInfo, ...]


class SetTenantRequest(Message):
    """Create or change a tenant (administrator to router). None leaves a value unchanged; see `TenantInfo`."""

    tenant: Name
    credential: str = Field(default="", max_length=65536)
    description: str | None = Field(default=None, max_length=1024)
    disabled: bool | None = None
    opaque_kernels: bool | None = None
    class_ceiling: int | None = Field(default=None, ge=0, le=4)
    weight_ceiling: int | None = Field(default=None, ge=1, le=1 << 20)
    exclusive: bool | None = None


class CheckCeilingRequest(Message):
    """Check whether a tenant may have a class and a weight (service to router). None: no check of this value."""

    tenant: Name
    priority: int | None = Field(default=None, ge=0, le=4)
    weight: int | None = Field(default=None, ge=1, le=1 << 20)


class CheckCeilingReply(Message):
    """`refusal`: why the tenant may not have them, and who can change the limit; empty if the tenant may."""

    refusal: str = Field(default="", max_length=4096)
