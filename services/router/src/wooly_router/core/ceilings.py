"""The limits of a tenant: highest class, largest weight, exclusive devices. Pure.

A request that names a class or weight is granted or refused. It is never lowered: a client that asks for P0 and silently gets
P2 would search for the reason elsewhere. A request without a class gets the default class, or the
ceiling if that is a lower class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: The class of a request that names no class.
DEFAULT_CLASS = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a tenant's sessions and jobs may have.

    Attributes:
        priority: the highest class; 0 is the highest of all, 4 the lowest.
        weight: the largest weight inside a class.
        exclusive: whether a session or job may have a device to itself.
    """

    priority: int
    weight: int
    exclusive: bool


#: The default ceilings of an installation that requires tokens, until an administrator changes them.
RESTRICTED = Ceilings(DEFAULT_CLASS, 100, False)
#: The ceilings of an installation where every caller is an administrator.
UNLIMITED = Ceilings(0, 1 << 20, True)


@dataclass(frozen=True, slots=True)
class Wish:
    """The class, weight and exclusive use that a request asks for; None: the request does not name a value."""

    priority: int | None = None
    weight: int | None = None
    exclusive: bool = False

    @classmethod
    def of_start(cls, priority: int, weight: int, gpu_mode: str) -> Wish:
        """Make the wish of a session or job that is to start.

        A message always names a class, so the default class counts as no wish.
        """
        return cls(None if priority == DEFAULT_CLASS else priority, weight, gpu_mode == "exclusive")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request asks for more than the tenant may have. `message` names the excess, the tenant and the remedy."""

    message: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The class and weight that a tenant gets."""

    priority: int
    weight: int


def grant(tenant: str, ceilings: Ceilings, wish: Wish) -> Grant | Refusal:
    """Decide what a tenant gets of the class, weight and exclusive use that it asks for."""
    if wish.priority is not None and wish.priority < ceilings.priority:
        below = f"class P{ceilings.priority}" + ("" if ceilings.priority == 4 else " or a lower one")
        return _refusal(
            f"tenant {tenant} may use {below}, but P{wish.priority} was requested",
            f"ask for that class (WOOLYAI_PRIORITY), or ask an administrator to raise the tenant's class ceiling: "
            f"wooly tenants set {tenant} --class-ceiling {wish.priority}",
        )
    if wish.weight is not None and wish.weight > ceilings.weight:
        return _refusal(
            f"tenant {tenant} may use a weight of at most {ceilings.weight}, but {wish.weight} was requested",
            f"ask for a smaller weight (WOOLYAI_WEIGHT), or ask an administrator to raise the tenant's weight ceiling: "
            f"wooly tenants set {tenant} --weight-ceiling {wish.weight}",
        )
    if wish.exclusive and not ceilings.exclusive:
        return _refusal(
            f"tenant {tenant} may not use a device exclusively",
            f"share a device (WOOLYAI_GPU_MODE=shared), or ask an administrator to permit exclusive use: "
            f"wooly tenants set {tenant} --exclusive",
        )
    priority = max(DEFAULT_CLASS, ceilings.priority) if wish.priority is None else wish.priority
    return Grant(priority, wish.weight or 1)


def _refusal(what: str, remedy: str) -> Refusal:
    return Refusal(f"{what}; {remedy}")


def overridden(defaults: Ceilings, priority: int | None, weight: int | None, exclusive: bool | None) -> Ceilings:
    """Return a tenant's ceilings: its own values, and the defaults where it has no own value."""
    own = replace(defaults, priority=defaults.priority if priority is None else priority)
    own = replace(own, weight=own.weight if weight is None else weight)
    return replace(own, exclusive=own.exclusive if exclusive is None else exclusive)
