"""What a tenant may ask for: the highest class, the largest weight, a device to itself. Pure: limits and wishes in, a grant out.

What is asked for in words is granted or refused, never lowered: a client that asked for P0 and silently got P2 would look for the
fault elsewhere. Only the class of those who ask for none follows the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: The class of those who ask for none.
DEFAULT_CLASS = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a tenant's sessions and jobs may have at most.

    Attributes:
        priority: the highest class; 0 is the highest of all, 4 the lowest.
        weight: the largest weight inside a class.
        exclusive: whether they may have a device to themselves.
    """

    priority: int
    weight: int
    exclusive: bool


#: Where tokens are asked for, until an administrator says otherwise.
MODEST = Ceilings(DEFAULT_CLASS, 100, False)
#: Where everybody is an administrator.
UNLIMITED = Ceilings(0, 1 << 20, True)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for; None: nothing in particular."""

    priority: int | None = None
    weight: int | None = None
    exclusive: bool = False

    @classmethod
    def of_start(cls, priority: int, weight: int, gpu_mode: str) -> Wish:
        """Of a session or a job that is to start. Messages name a class always: the default one is no wish."""
        return cls(None if priority == DEFAULT_CLASS else priority, weight, gpu_mode == "exclusive")


@dataclass(frozen=True, slots=True)
class Refusal:
    """More was asked for than is allowed. `message`: what, of whom, and who can change it."""

    message: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The class and weight that a tenant gets."""

    priority: int
    weight: int


def grant(tenant: str, ceilings: Ceilings, wish: Wish) -> Grant | Refusal:
    """What a tenant gets of what it asks for."""
    if wish.priority is not None and wish.priority < ceilings.priority:
        below = f"class P{ceilings.priority}" + ("" if ceilings.priority == 4 else " or a lower one")
        return _refusal(
            f"tenant {tenant} may have {below}, and P{wish.priority} was asked for",
            f"ask for that class (WOOLYAI_PRIORITY), or have an administrator raise the tenant's class ceiling: "
            f"wooly tenants set {tenant} --class-ceiling {wish.priority}",
        )
    if wish.weight is not None and wish.weight > ceilings.weight:
        return _refusal(
            f"tenant {tenant} may have a weight of at most {ceilings.weight}, and {wish.weight} was asked for",
            f"ask for less (WOOLYAI_WEIGHT), or have an administrator raise the tenant's weight ceiling: "
            f"wooly tenants set {tenant} --weight-ceiling {wish.weight}",
        )
    if wish.exclusive and not ceilings.exclusive:
        return _refusal(
            f"tenant {tenant} may not have a device to itself",
            f"share one (WOOLYAI_GPU_MODE=shared), or have an administrator permit it: "
            f"wooly tenants set {tenant} --exclusive",
        )
    priority = max(DEFAULT_CLASS, ceilings.priority) if wish.priority is None else wish.priority
    return Grant(priority, wish.weight or 1)


def _refusal(what: str, remedy: str) -> Refusal:
    return Refusal(f"{what}; {remedy}")


def overridden(defaults: Ceilings, priority: int | None, weight: int | None, exclusive: bool | None) -> Ceilings:
    """A tenant's ceilings: its own, and the defaults where it has none."""
    own = replace(defaults, priority=defaults.priority if priority is None else priority)
    own = replace(own, weight=own.weight if weight is None else weight)
    return replace(own, exclusive=own.exclusive if exclusive is None else exclusive)
